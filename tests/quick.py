"""Random models, and programs that tests run a few times: compiled in a quarter of the time."""

import functools

import jax
import jax.extend
import numpy as np

from models.transformer import abstract_params

# Without excess precision XLA rounds to bfloat16 where the program says so, and nowhere else.
COMPILER_OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 12):  # gone from its compiler
    COMPILER_OPTIONS["xla_cpu_use_fusion_emitters"] = False
_jit = jax.jit


def jit(function=None, *, compiler_options=None, **options):
    """jax.jit, also as a decorator with options; a test may put it in jax.jit's place."""
    if function is None:
        return functools.partial(jit, compiler_options=compiler_options, **options)
    return _jit(
        function, compiler_options=COMPILER_OPTIONS | dict(compiler_options or {}), **options
    )


def random_params(config, *, spread=0.3, seed=0):
    """Makes (graph, params): host arrays, large enough for clearly uneven token probabilities."""
    graph, abstract = abstract_params(config)
    rng = np.random.default_rng(seed)
    return graph, jax.tree.map(lambda a: rng.normal(0, spread, a.shape).astype(a.dtype), abstract)


def equations(jaxpr):
    """Yields the equations of a jaxpr, inner ones and those of kernels too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner)
