"""Compiles kernels for accelerators that are not there, and prints what each program takes.

    python tests/compiled_kernels.py gpu|TOPOLOGY rows|pages ...

A line has the heads, the bytes of the queries or of a pool, those of the program's own memory, its
TPU kernels, and how many of these are split over cores.
"""

import base64
import contextlib
import itertools
import math
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.preflight.compile import topology_devices
from models.kernels import KERNELS, xla
from models.transformer import segment_positions
from sharding.mesh import make_mesh

# H100, A100 and RTX 4090, whose blocks have the least shared memory of any Ampere or Ada.
GPUS = ("h100", "a100", "rtx4090")
HALF, WHOLE = jnp.bfloat16, jnp.float32
# Heads, key heads and head size on a device, tokens of a row or page, dtype. Qwen2.5 0.5B and 1.5B,
# in float32 SmolLM2 and 32B, and Gemma 3; on a TPU 0.5B, and 32B split 8 and 4 ways.
HEADS = {
    ("rows", "gpu"): (
        *((14, 2, 64, 8_192, HALF), (12, 2, 128, 8_192, HALF)),
        *((9, 3, 64, 8_192, WHOLE), (40, 8, 128, 8_192, WHOLE)),
        *((8, 4, 256, 8_192, HALF), (8, 4, 256, 8_192, WHOLE)),
    ),
    ("pages", "gpu"): (
        *((14, 2, 64, 128, HALF), (12, 2, 128, 128, HALF)),
        *((4, 1, 256, 128, HALF), (4, 1, 256, 128, WHOLE), (40, 8, 128, 128, WHOLE)),
    ),
    ("rows", "tpu"): ((5, 1, 128, 22_528, HALF),),
    ("pages", "tpu"): ((14, 2, 64, 128, HALF), (10, 2, 128, 128, HALF)),
}


def rows(kernels, heads, mesh):
    """(jitted gradient of attention in two rows, arguments)."""
    N, K, H, T, dtype = heads

    def loss(q_BTNH, k_BTKH, v_BTKH, segment_BT):
        numbers = segment_BT, jnp.zeros_like(segment_BT)
        if H == 256:
            numbers += (segment_positions(segment_BT), 512)
        return jnp.sum(kernels.attend_rows(q_BTNH, k_BTKH, v_BTKH, *numbers) ** 2)

    def array(*shape, dtype=dtype):
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct((2, T, *shape), dtype, sharding=whole)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return run, (array(N, H), array(K, H), array(K, H), array(dtype=jnp.int32))


def pages(kernels, heads, mesh):
    """(jitted steps of two layers on each device, as of decoding, arguments).

    The pools are then written to, by block and by page, and returned in place of those given.
    """
    (N, K, H, C, dtype), B, X, P, D, S, M = heads, 64, 180, 16_384, 256, 16, 8
    data, model = mesh.shape["data"], mesh.shape["model"]
    slots, pool = PartitionSpec("data"), PartitionSpec("data", "model")
    specs = (slots, [(pool, pool)] * 2, PartitionSpec(None, "model"), *[slots] * 3)
    how = {"window": 512} if H == 256 else {}

    def steps(x_BD, pools, w_DNH, page_BX, *tokens):
        axes = jax.typeof(jnp.einsum("BD,DNH->BNH", x_BD, w_DNH)).manual_axis_type.varying

        def step(i, x_BD):
            for pool in pools:
                q_BNH = jnp.einsum("BD,DNH->BNH", x_BD, w_DNH)
                k_BKHS = jax.lax.pcast(jnp.ones((B, K, H, S), dtype), tuple(axes), to="varying")
                recent = (k_BKHS, k_BKHS.swapaxes(2, 3)), tokens[1] % S + i
                out_BNH = kernels.attend_pages(q_BNH, *recent, pool, pool, page_BX, *tokens, **how)
                x_BD += jax.lax.psum(jnp.einsum("BNH,DNH->BD", out_BNH, w_DNH), "model")
            return x_BD

        x_BD = jax.lax.fori_loop(0, 8, step, x_BD)
        new = jnp.broadcast_to(x_BD[:, None, :H, None], (B, K, H, S)).astype(dtype)
        where = page_BX[:, 0], page_BX[:, 1] % (C // S) * S
        pools = [kernels.write_pages(*pool, new, new.swapaxes(2, 3), *where) for pool in pools]
        if kernels.copy_pages is not xla.copy_pages:
            few, places = [a[:M] for a in pools[0]], (page_BX[:M, 2], jnp.arange(M))
            pools = [kernels.copy_pages(pool, few, *places) for pool in pools]
        return x_BD, pools

    def array(spec, *shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    k_PKHC, v_PKCH = (array(pool, data * P, model * K, *it) for it in ((H, C), (C, H)))
    x_BD, w_DNH = array(slots, data * B, D), array(specs[2], D, model * N, H)
    page_BX = array(slots, data * B, X, dtype=jnp.int32)
    of_slots = [array(slots, data * B, dtype=jnp.int32)] * 2
    run = jax.shard_map(steps, mesh=mesh, in_specs=specs, out_specs=(slots, specs[1]))
    arguments = (x_BD, [(k_PKHC, v_PKCH)] * 2, w_DNH, page_BX, *of_slots)
    return jax.jit(run, donate_argnums=1), arguments


def an_h100():
    """Tells JAX from 0.11 on which GPU to lower for; those before lower for one like it."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h100()))


def h100():
    return jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")


def of_an_h100(mesh):
    """The same for what a mesh's own devices would tell, inside of shard_map."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return mesh
    types = mesh.axis_types
    return jax.sharding.AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=types, abstract_device=h100()
    )


def meshes(what: str, target: str):
    """Yields the meshes to compile for: each GPU, or chips of a slice, one for rows."""
    if target != "gpu":
        chips = topology_devices(target, slices=1)
        ways = 1 if what == "rows" else 2
        yield make_mesh(data=ways, model=ways, devices=chips[: ways**2])
        return
    for gpu in GPUS:
        yield make_mesh(data=1, model=1, devices=topology_devices(f"{gpu}:1", slices=1))


def main(target: str, *kinds: str) -> None:
    platform = "gpu" if target == "gpu" else "tpu"
    for what in kinds:
        for mesh, heads in itertools.product(meshes(what, target), HEADS[what, platform]):
            run, arguments = globals()[what](KERNELS[platform], heads, mesh)
            with jax.set_mesh(mesh):
                compiled = run.lower(*arguments).compile()
            largest = jax.tree.leaves(arguments)[0 if what == "rows" else 1]
            one = largest.sharding.shard_shape(largest.shape)
            size = largest.dtype.itemsize * math.prod(one)
            text, memory = compiled.as_text(), compiled.memory_analysis()
            calls = text.count("tpu_custom_call")
            bodies = map(base64.b64decode, re.findall(r'"body": ?"([^"]+)"', text))
            parallel = sum(b"semantics<parallel>" in body for body in bodies)
            print(*heads[:4], size, memory.temp_size_in_bytes, calls, parallel)


if __name__ == "__main__":
    main(*sys.argv[1:])
