"""Compiles fast what runs a few times: jax.jit for the tiny programs of tests."""

import functools

import jax

# Without optimisation and with XLA's older code generator a program takes a fifth of the time to
# compile. Without excess precision XLA rounds to bfloat16 where the program says so, nowhere else.
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_allow_excess_precision": False,
}
jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
