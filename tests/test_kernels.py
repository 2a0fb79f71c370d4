"""The table of kernels: what each platform gets, and what is refused."""

import jax
import pytest

from models.kernels import KERNELS, kernels_for, platform_of
from sharding.mesh import make_mesh


@pytest.mark.parametrize(
    ("platform", "row"), [("cpu", "cpu"), ("gpu", "gpu"), ("tpu", "tpu"), ("another", "gpu")]
)
def test_auto_is_the_platforms_own_row(platform, row):
    assert kernels_for("auto", platform) is KERNELS[row]


def test_a_mesh_has_the_platform_of_its_devices():
    assert platform_of(make_mesh(data=-1, model=1)) == jax.devices()[0].platform == "cpu"


def test_a_name_is_taken_where_the_platform_can_run_it():
    assert kernels_for("tpu_interpret", "cpu") is KERNELS["tpu_interpret"]
    for platform in ("cpu", "gpu", "tpu"):  # plain XLA
        assert kernels_for("gpu", platform) is KERNELS["gpu"]


@pytest.mark.parametrize(
    ("name", "platform", "message"),
    [
        (
            "tpuv5",
            "cpu",
            "model.kernels = 'tpuv5' is unknown; choose one of auto, cpu, gpu, tpu, ",
        ),
        ("tpu", "cpu", r"'tpu' runs on tpu only, .* are cpu; .* auto, cpu, gpu, tpu_interpret$"),
        ("cpu", "gpu", r"'cpu' runs on cpu only, .* are gpu; .* auto, gpu$"),
        (
            "tpu_interpret",
            "tpu",
            r"'tpu_interpret' runs on cpu only, .* are tpu; .* auto, gpu, tpu$",
        ),
    ],
)
def test_other_names_and_other_platforms_are_refused(name, platform, message):
    with pytest.raises(ValueError, match=message):
        kernels_for(name, platform)
