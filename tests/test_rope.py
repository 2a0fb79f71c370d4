"""Scaled rotary angles by hand, and what of config.json is refused."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import save_hf
from models.hf_config import load_config
from models.qwen2 import PRESETS, Qwen2Config
from models.rope import Llama3Scaling, YarnScaling, scaling_of
from models.transformer import abstract_params, rotation

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}


def test_llama3_slows_what_turns_less_than_once_in_a_text():
    """Turns in 8,192 tokens: 0.5 and 1 at an eighth, 2.5 half way, 4 and 100 as they were."""
    turns = np.array([0.5, 1.0, 2.5, 4.0, 100.0])
    frequency_H = jnp.asarray(turns * 2 * math.pi / 8_192, jnp.float32)
    scaled_H = Llama3Scaling(8.0, 1.0, 4.0, 8_192).frequencies(frequency_H, theta=5e5)
    np.testing.assert_allclose(scaled_H / frequency_H, [1 / 8, 1 / 8, 9 / 16, 1, 1], rtol=1e-5)
    assert Llama3Scaling(8.0, 1.0, 4.0, 8_192).amplitude == 1


def test_yarn_of_qwen():
    """Dimension d of 64 turns 32768 / (2 pi 1e6^(d / 64)) times: 32 at 23.6, once at 39.7."""
    frequency_H = 1e6 ** (-jnp.arange(64, dtype=jnp.float32) / 64)
    yarn = scaling_of(YARN)
    share_H = np.asarray(yarn.frequencies(frequency_H, theta=1e6) / frequency_H)
    np.testing.assert_array_equal(share_H[:24], 1)
    np.testing.assert_array_equal(share_H[40:], 0.25)
    # Evenly from 23 to 40: seventeen steps of 3/4 in all.
    np.testing.assert_allclose(share_H[23:41], 1 - 0.75 * np.arange(18) / 17, rtol=1e-6)
    assert yarn.amplitude == pytest.approx(1.138629, abs=1e-6)  # 0.1 ln 4 + 1
    assert yarn.positions == 131_072


def test_a_models_angles_are_the_scaled_ones():
    position_BT = jnp.array([[0, 7, 100_000]])
    config = dataclasses.replace(PRESETS["7b"], rope_scaling=scaling_of(YARN))
    cos, sin = rotation(position_BT, config)
    frequency = 1e6 ** (-50 / 64) / 4
    for t, position in enumerate((0, 7, 100_000)):
        at = position * frequency
        np.testing.assert_allclose(cos[0, t, 0, :, 50], 1.138629 * math.cos(at), atol=1e-5)
        expected = 1.138629 * math.sin(at) * np.array([-1, 1])
        np.testing.assert_allclose(sin[0, t, 0, :, 50], expected, atol=1e-5)


@pytest.fixture
def raw(tmp_path):
    """read(changes) -> the config of a directory with these keys of config.json."""
    config = Qwen2Config(64, 24, 40, 3, 4, 2, 8, True, rope_theta=1e4)
    _, params = abstract_params(config)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)
    save_hf(zeros, config, tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())

    def read(changes):
        file.write_text(json.dumps(content | changes))
        return load_config(tmp_path)

    return read


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": YARN}, YarnScaling(4.0, 32_768)),
        ({"rope_parameters": YARN | {"rope_theta": 1e4}}, YarnScaling(4.0, 32_768)),
        ({"rope_parameters": YARN, "rope_scaling": YARN}, YarnScaling(4.0, 32_768)),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.0, "beta_fast": 16}},
            YarnScaling(4.0, 32_768, beta_fast=16, attention_factor=1.0),
        ),
        ({"rope_scaling": LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 8_192)),
    ],
)
def test_scalings_are_read_wherever_transformers_writes_them(raw, changes, expected):
    assert raw(changes).rope_scaling == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is {'.*'llama3', 'ya"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "rope_scaling is {.*but mscale is not comp"),
        ({"rope_scaling": YARN | {"type": "llama3"}}, "rope_scaling is {.*only rope_type"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling is .*but yarn needs original_max_position_embeddings",
        ),
        ({"rope_scaling": YARN | {"factor": float("nan")}}, "factor must be a positive number"),
        (
            {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
            "rope_scaling is .*must say the same as rope_parameters",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 4_096},
            "original_max_position_embeddings is 4096, but 32768 beside the rope_type",
        ),
    ],
)
def test_other_scalings_are_refused_by_their_key(raw, changes, message):
    with pytest.raises(ValueError, match=rf"config.json: .*{message}") as error:
        raw(changes)
    assert "\n" not in str(error.value)
