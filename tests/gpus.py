"""GPUs that are not there, for which kernels are lowered and compiled."""

import contextlib
import pathlib

import jax
import pytest
from jax.experimental import topologies

from sharding.mesh import make_mesh
from tests.processes import ran

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Here the plugin with the GPU's compiler may be: jax-cuda13-plugin and jax-cuda13-pjrt of JAX's
# version, nvidia-cuda-nvcc and nvidia-nvvm, by pip install --no-deps --target .venv/cuda.
PLUGIN = ROOT / ".venv" / "cuda"
# Compute capability and the shared memory that a block may ask for, in bytes, of GPUs that are not
# there. The last has the least that any Ampere or Ada has.
GPUS = {"H100": ((9, 0), 232_448), "A100": ((8, 0), 166_912), "RTX 4090": ((8, 9), 101_376)}
# What XLA asks of them; the rest is an H100's.
TARGET = """
platform_name: "CUDA"
gpu_device_info {
  cuda_compute_capability { major: %d minor: %d }
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: %d
  shared_memory_per_core: 233472 registers_per_block_limit: 65536 registers_per_core_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 device_memory_size: 84929347584
}
runtime_version { major: 13 }
dnn_version_info { major: 9 }
"""
NEEDS_COMPILER = pytest.mark.skipif(
    not PLUGIN.is_dir() or jax.__version_info__ >= (0, 11),
    reason=f"needs the GPU's compiler in {PLUGIN}, and JAX 0.10, which does not look for a GPU",
)


def an_h100():
    """Tells JAX from 0.11 on which GPU to lower for; those before lower for one like it."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def compiled(file: str, **environment: str) -> list[str]:
    """Runs a file of tests as a program that compiles for `meshes`; returns the lines it prints."""
    done = ran(file, PYTHONPATH=f"{ROOT}:{PLUGIN}", JAX_PLATFORMS="cpu", **environment)
    return done.stdout.split("\n")[:-1]


def meshes():
    """Yields (a GPU's name, a mesh of one)."""
    for name, ((major, minor), shared_memory_bytes) in GPUS.items():
        target = TARGET % (major, minor, shared_memory_bytes)
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology="1x1x1"
        )
        yield name, make_mesh(data=1, model=1, devices=topology.devices)
