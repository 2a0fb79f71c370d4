"""The only place where a device mesh is made: axes "slice" (outermost), "data" and "model".

Chips of a slice reach each other over their interconnect, slices over the data centre's network:
what crosses "slice" is a sum of gradients and nothing else. All axes are of type Auto: XLA
propagates the shardings that inputs, outputs and parameters are given by `sharding.rules`, and
inserts the collectives.
"""

import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("slice", "data", "model")


def split_cpu(devices: int) -> None:
    """Makes JAX count the host's CPU as so many devices (0: as it does by itself, one).

    A device for each core decodes about twice as fast as one device with a thread for each: small
    products do not divide over threads, but rows do. Does nothing where XLA_FLAGS has a count;
    accelerators are not concerned. To be called before JAX is used.
    """
    if devices and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", devices)


def make_mesh(
    *, data: int, model: int, slices: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Makes a (slice, data, model) mesh; data = -1 takes all that the other two leave.

    It covers exactly `devices` (None: all of this program's; a compile-only topology's are taken
    too). Raises ValueError with the arithmetic, and the nearest sizes that work, where the sizes
    do not multiply to the device count or `slices` is not the number of slices that there are.
    """
    devices = list(jax.devices() if devices is None else devices)
    count = len(devices)
    _check_slices(devices, slices)
    chips = count // slices
    if data == -1 and chips % model:
        divisors = [n for n in range(1, chips + 1) if chips % n == 0]
        raise ValueError(
            f"mesh.model = {model} does not divide the {chips} devices of a slice; the nearest "
            f"that does is {min(divisors, key=lambda n: abs(n - model))}, of {divisors}"
        )
    data = chips // model if data == -1 else data
    if slices * data * model != count:
        raise ValueError(
            f"mesh.slices * mesh.data * mesh.model = {slices} * {data} * {model} = "
            f"{slices * data * model}, but there are {count} devices; set mesh.data to -1 to take "
            "all of them"
        )
    types = (AxisType.Auto,) * len(AXES)
    if slices == 1:
        try:
            return jax.make_mesh((1, data, model), AXES, axis_types=types, devices=devices)
        except NotImplementedError:  # no axis of the slice's torus, nor several, has so many chips
            grid = mesh_utils.create_device_mesh(
                (1, data, model), devices, allow_split_physical_axes=True
            )
    elif _slices_of(devices) == {0}:  # CPUs stand for slices: the first for the first slice
        grid = np.array(devices).reshape(slices, data, model)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(
            (1, data, model), (slices, 1, 1), devices, allow_split_physical_axes=True
        )
    return Mesh(grid, AXES, axis_types=types)


def _check_slices(devices: Sequence[jax.Device], slices: int) -> None:
    """Raises ValueError where mesh.slices is not the devices' number; CPUs stand for any."""
    there = len(_slices_of(devices))
    if there > 1 and slices != there:
        raise ValueError(f"mesh.slices = {slices}, but the devices are {there} slices; set it so")
    if there == 1 and slices > 1 and hasattr(devices[0], "slice_index"):
        raise ValueError(f"mesh.slices = {slices}, but all devices are of one slice; set it to 1")
    if len(devices) % slices:
        raise ValueError(f"mesh.slices = {slices} does not divide the {len(devices)} devices")


def _slices_of(devices: Sequence[jax.Device]) -> set[int]:
    """Returns the numbers of the slices that the devices are of; {0} for what is no TPU."""
    return {getattr(device, "slice_index", 0) or 0 for device in devices}
