"""The smallest recipe through the real TPU compiler, and what is said where one does not fit."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT

from configs import base, qwen2_5_0_5b, qwen2_5_32b
from dapo_jax.preflight import __main__ as preflight
from dapo_jax.preflight.chips import chip_of
from dapo_jax.run import build
from models.qwen2 import PRESETS

needs_compiler = pytest.mark.skipif(
    not preflight.LIBTPU.exists(), reason="needs the TPU's compiler: `make preflight`"
)
PARAMETERS = 494_032_768  # Qwen2.5-0.5B


def run(*arguments):
    command = [sys.executable, "-m", "dapo_jax.preflight", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@needs_compiler
def test_the_smallest_recipe_fits_its_slice(tmp_path):
    """Arguments and products are known by arithmetic; the compiler's temporaries must fit."""
    config = "--config=configs/qwen2_5_0_5b.py"
    files = [f"--json={tmp_path / 'a.json'}", f"--png={tmp_path / 'a.png'}"]
    done = run(config, "--topology=v5e:2x4", "--config.eval.every_steps=0", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it fits" in done.stdout
    assert "No TPU has confirmed them" in done.stdout
    assert (tmp_path / "a.png").stat().st_size > 10_000
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["headroom"] >= preflight.WANTED_HEADROOM

    phase = report["phases"]["decode"]
    assert phase["state"] == pytest.approx(12 * PARAMETERS / 8, rel=0.01)
    head = 2 * 151_936 * 896  # the sampler's copy of the tied embedding
    assert phase["sampler's weights"] == pytest.approx(2 * PARAMETERS + head, rel=0.01)
    assert phase["keys and values"] <= 8_192 * 2**20

    recipe = qwen2_5_0_5b.get_config()
    tokens = recipe.learner.micro_batch_rows / 8 * recipe.learner.row_tokens
    update = report["programs"]["update"]
    products = 8 * PARAMETERS * tokens  # forward, again for the backward pass, and backward
    assert 0.85 * products < update["turn"]["flops"] < products
    decode = report["programs"]["decode"]
    assert decode["turn"]["hbm_bytes"] > 2 * PARAMETERS  # the weights are read
    products = 2 * PARAMETERS * report["slots_a_shard"]
    assert products < decode["turn"]["flops"] < 1.5 * products  # and attention to prompts
    assert not decode["turn"]["collectives"]
    step = report["step"]
    assert step["total"] > step["rollout"] > 0
    assert step["sampled_tokens"] > 128 * 16 * step["mean_response_tokens"] * 0.9


@needs_compiler
def test_a_program_that_needs_more_than_there_is_does_not_fit():
    device = preflight.topology_devices("v5e:2x2", slices=1)[0]
    where = jax.sharding.SingleDeviceSharding(device)
    array = jax.ShapeDtypeStruct((2**15, 2**16), jnp.float32, sharding=where)  # 8 GiB, and again
    lowered = jax.jit(lambda a: jnp.sort(a)).lower(array)
    with pytest.raises(preflight.DoesNotFit, match=r"sorting: .* memory .*15.75G"):
        preflight.compiled("sorting", lowered)


@needs_compiler
def test_an_impossible_mesh_is_refused_before_anything_is_compiled():
    done = run("--config=configs/qwen2_5_32b.py", "--topology=v5p:8x8x4", "--config.mesh.model=16")
    assert done.returncode == 1
    assert "heads axis of 40 does not divide by mesh.model = 16; choose a" in done.stderr
    assert "divides 40, as 8 does" in done.stderr


def test_an_unknown_topology_is_named():
    done = run("--config=configs/qwen2_5_0_5b.py", "--topology=v9:2x2")
    assert done.returncode == 1
    assert "--topology=v9:2x2: there are v4, v5e, v5p, v6e, tpu7x" in done.stderr


@pytest.mark.parametrize(
    ("config", "topology", "chips", "model"),
    [(qwen2_5_0_5b, "v5e:2x4", 8, 1), (qwen2_5_32b, "v5p:8x8x4", 256, 2)],
)
def test_the_fewest_chips_that_hold_the_weights_are_proposed(config, topology, chips, model):
    recipe = preflight.with_sizes(config.get_config())
    found = preflight.suggested(recipe, [None] * chips, chip_of(topology), slices=1)
    assert found["mesh.model"] == model
    assert found["learner.micro_batch_rows"] == chips // model
    assert 0 < found["rollout.cache_mib"] < chip_of(topology).hbm_bytes / 2**20


def test_more_ways_are_proposed_where_chips_are_small():
    recipe = preflight.with_sizes(qwen2_5_32b.get_config())
    found = preflight.suggested(recipe, [None] * 256, chip_of("v6e:16x16"), slices=1)
    assert found["mesh.model"] == 8


def test_a_model_that_no_mesh_of_these_chips_holds_is_refused():
    recipe = preflight.with_sizes(qwen2_5_32b.get_config())
    with pytest.raises(ValueError, match=r"32.8 billion parameters do not fit 8 chips of v5e"):
        preflight.suggested(recipe, [None] * 8, chip_of("v5e:2x4"), slices=1)


def test_a_path_and_a_preset_must_be_of_one_size(tmp_path):
    config = base.get_config()
    config.model.path = str(ROOT / "experiments/tiny_base/checkpoint")
    config.model.preset = "tiny"
    assert build.model_sizes(config) == PRESETS["tiny"]
    config.model.preset = "0.5b"
    with pytest.raises(ValueError, match=r"no model of the sizes model.preset = '0.5b': vocab"):
        build.model_sizes(config)
