"""An engine compiles the sampler's programs: prefill, blocks of decode steps, copies of pages.

Nothing here decides which request is in which slot: `scheduler` does, and `session` joins the two.
"""

import concurrent.futures
import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.process import hosts
from dapo_jax.sampler.cache import Cache, decode_sizes
from dapo_jax.sampler.decode import Layout, Sampling, copy_pages, decode_block, prefill
from models.kernels import OPTIONS, Kernels, platform_of
from models.parameters import ModelConfig
from models.precision import products_in
from sharding import rules

COPIES = 64  # pages that one call copies between shards
WIDE_TOKENS = 512  # of a shard, from which on a program has the compiler's `wide_options`


def token_bytes(config: ModelConfig, *, bytes_per_value: int, model_degree: int) -> int:
    """Counts the bytes of one token's keys and values on a device, over all layers.

    Raises ValueError where the key/value heads do not divide over the "model" axis.
    """
    heads, left = divmod(config.num_kv_heads, model_degree)
    if left:
        raise ValueError(
            f"mesh.model = {model_degree} does not divide the model's {config.num_kv_heads} "
            "key/value heads, which are split over it; the nearest that does is "
            f"{math.gcd(config.num_kv_heads, model_degree)}"
        )
    return 2 * config.num_layers * heads * config.head_dim * bytes_per_value


class Engine:
    """The compiled programs of one model on one mesh, for a session to run."""

    def __init__(self, config: ModelConfig, mesh: Mesh, cache: Cache, *, params, kernels: Kernels):
        """params: ShapeDtypeStructs, with shardings, of models.transformer.unstack's layout.

        kernels: how the programs attend and multiply.
        """
        if cache.page_tokens % cache.block_tokens:
            raise ValueError(
                f"rollout.page_tokens = {cache.page_tokens} is not a multiple of "
                f"rollout.block_tokens = {cache.block_tokens}"
            )
        self.config, self.mesh, self.cache = config, mesh, cache
        self.shards = rules.row_degree(mesh)
        self.params, self._dtype = params, jax.tree.leaves(params)[0].dtype
        self._rows = rules.rows(mesh)
        # Of prompts and of responses: ShapeDtypeStructs with shardings.
        self.pages = self._pool(cache.prompt_pages), self._pool(cache.pages)
        self.new_pages = jax.jit(  # makes both, zeroed
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.pages),
            out_shardings=jax.tree.map(lambda s: s.sharding, self.pages),
        )
        self._programs: dict[tuple, jax.stages.Compiled] = {}
        axis = "model" if mesh.shape["model"] > 1 else None
        self._layout = Layout(config, cache, kernels.of_pages(cache.page_tokens), axis)
        self._options = OPTIONS.get(platform_of(mesh), {})
        self.sizes = decode_sizes(cache, kernel=kernels.attend_pages is not None)

    def lower(self, *samplings: Sampling) -> dict[tuple, jax.stages.Lowered]:
        """Lowers all programs that a session may run: {(name, samplings, *sizes): program}.

        samplings: of the session's streams, in order.
        """
        lowered = {}
        for bucket, rows in self.cache.buckets.items():
            lowered["prefill", None, bucket] = self._lower_prefill(bucket, self.shards * rows)
        everywhere = rules.replicated(self.mesh)
        copy_M4 = jax.ShapeDtypeStruct((COPIES, 4), jnp.int32, sharding=everywhere)
        run = functools.partial(copy_pages, kernels=self._layout.kernels)
        for pool in self.pages if self.shards > 1 else ():
            program = self._lower(run, (pool, copy_M4), self._specs(pool), donate=0)
            lowered["copy", None, len(pool[0][0]) // self.shards] = program
        for size in self.sizes:
            lowered["decode", samplings, *size] = self._lower_decode(samplings, *size)
        return lowered

    def compile(self, *samplings: Sampling) -> None:
        """Compiles all that a session may run, so that nothing is compiled later."""
        if ("decode", samplings, *self.sizes[0]) in self._programs:
            return
        self.new_pages.lower().compile()
        missing = {k: v for k, v in self.lower(*samplings).items() if k not in self._programs}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = pool.map(lambda lowered: lowered.compile(), missing.values())
            self._programs |= dict(zip(missing, compiled, strict=True))

    def prefill(self, params, prompt_pages, pages, *of_rows):
        """Runs prefill for [shards * rows] rows: (prompt_pages, pages, route_RTLA or None).

        of_rows: its arrays, page_R2I last. The old pages are gone. The routes are NumPy's.
        """
        program = self._programs["prefill", None, of_rows[-1].shape[2]]
        of_host = hosts.place(of_rows, self._rows)
        *both, route_RTLA = program(params, prompt_pages, pages, *of_host)
        return *both, hosts.fetch(route_RTLA)

    def decode(self, params, prompt_pages, pages, run_key_Z, rows, page_P, samplings):
        """Decodes a block: returns (pages, token_SB, logp_SB, route_SBLA or None).

        All but pages from NumPy. run_key_Z: the data of the streams' keys, uint32 [Z, 2];
        samplings: a tuple of as many. rows: `Cache.row_dtype`, of all shards. page_P: the pages
        that its tables number.
        """
        size = (len(rows) // self.shards, len(page_P) // self.shards)
        program = self._programs["decode", samplings, *size]
        row_BX = rows.view(np.int32).reshape(len(rows), -1)
        of_host = hosts.place((row_BX, page_P), self._rows)
        pages, *sampled = program(params, prompt_pages, pages, run_key_Z, *of_host)
        return pages, *hosts.fetch(sampled)

    def copy(self, pages, copy_M4: np.ndarray):
        """Copies pages of one pool between shards (`Moves`); the old pages are gone."""
        for first in range(0, len(copy_M4), COPIES):
            call_N4 = np.full((COPIES, 4), -1, np.int32)
            call_N4[: len(copy_M4) - first] = copy_M4[first : first + COPIES]
            program = self._programs["copy", None, len(pages[0][0]) // self.shards]
            pages = program(pages, hosts.place(call_N4, rules.replicated(self.mesh)))
        return pages

    def _pool(self, pages: int):
        """Describes a pool of so many pages a shard: a (k_PKHC, v_PKCH) a layer."""
        C, H = self.cache.page_tokens, self.config.head_dim
        rows_and_heads = (self.shards * pages, self.config.num_kv_heads)
        sharding = NamedSharding(self.mesh, PartitionSpec(rules.ROW_AXES, "model"))

        def array(*tile):
            return jax.ShapeDtypeStruct((*rows_and_heads, *tile), self._dtype, sharding=sharding)

        return ((array(H, C), array(C, H)),) * self.config.num_layers

    def _lower_prefill(self, bucket: int, rows: int) -> jax.stages.Lowered:
        tokens_RT = self._host_array(rows, bucket * self.cache.page_tokens)
        page_R2I = self._host_array(rows, 2, bucket)
        of_rows = tokens_RT, *[self._host_array(rows)] * 2, page_R2I
        arguments = (self.params, *self.pages, *of_rows)
        out = (*self._specs(self.pages), rules.BATCH)
        run = functools.partial(prefill, layout=self._layout)
        return self._lower(run, arguments, out, donate=(1, 2), tokens=tokens_RT.size)

    def _lower_decode(
        self, samplings: tuple[Sampling, ...], rows: int, pages: int
    ) -> jax.stages.Lowered:
        run = functools.partial(decode_block, layout=self._layout, samplings=samplings)
        keys = (len(samplings), 2)
        run_key_Z = jax.ShapeDtypeStruct(keys, jnp.uint32, sharding=rules.replicated(self.mesh))
        row_BX = self._host_array(self.shards * rows, self.cache.row_dtype.itemsize // 4)
        page_P = self._host_array(self.shards * pages)
        tokens = PartitionSpec(None, rules.ROW_AXES)
        out = (self._specs(self.pages[1]), tokens, tokens, tokens)
        arguments = (self.params, *self.pages, run_key_Z, row_BX, page_P)
        return self._lower(run, arguments, out, donate=2, tokens=self.shards * rows)

    def _host_array(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._rows)

    def _specs(self, arrays):
        return jax.tree.map(lambda array: array.sharding.spec, arrays)

    def _lower(self, run, arguments, out, *, donate, tokens=0) -> jax.stages.Lowered:
        mapped = jax.shard_map(
            run, mesh=self.mesh, in_specs=self._specs(arguments), out_specs=out, check_vma=False
        )
        is_wide = tokens >= self.shards * WIDE_TOKENS
        options = self._options | dict(self._layout.kernels.wide_options if is_wide else {})
        jitted = jax.jit(mapped, donate_argnums=donate, compiler_options=options)
        with products_in(self._dtype):
            return jitted.lower(*arguments)
