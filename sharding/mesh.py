"""The only place where a device mesh is made: axes "data" (outer) and "model" (inner).

Both axes are of type Auto: XLA propagates the shardings that inputs, outputs and parameters are
given by `sharding.rules`, and inserts the collectives.
"""

import os
from collections.abc import Sequence

import jax
from jax.sharding import AxisType


def split_cpu(devices: int) -> None:
    """Have JAX count the host's CPU as so many devices (0: as it does by itself, one).

    A device for each core decodes about twice as fast as one device with a thread for each: small
    products do not divide over threads, but rows do. Does nothing where XLA_FLAGS has a count;
    accelerators are not concerned. To be called before JAX is used.
    """
    if devices and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", devices)


def cpu_options(mesh: jax.sharding.Mesh) -> dict[str, object]:
    """Compiler options for the decoder's small products on a CPU; none elsewhere.

    Products by themselves, not fused with others: the latter's bits depend on the batch's size.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def make_mesh(
    *, data: int, model: int, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A (data, model) mesh; data = -1 takes all that model leaves.

    It covers exactly `devices` (None: all of this program's; a compile-only topology's are taken
    too). Raises ValueError with the arithmetic where the sizes do not multiply to the device count.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    if model < 1 or (data != -1 and data < 1):
        raise ValueError(
            f"mesh.data = {data} and mesh.model = {model}: sizes are at least 1 (data may be -1)"
        )
    if data == -1 and count % model:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        raise ValueError(
            f"mesh.model = {model} does not divide the {count} devices; set it to one of {divisors}"
        )
    data = count // model if data == -1 else data
    if data * model != count:
        raise ValueError(
            f"mesh.data * mesh.model = {data} * {model} = {data * model}, but there are {count} "
            f"devices; set mesh.data to -1 to take all of them"
        )
    return jax.make_mesh(
        (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )
