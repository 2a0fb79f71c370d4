"""A config through the real compilers of TPUs and GPUs, and what is said where one does not fit."""

import contextlib
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from clu.parameter_overview import count_parameters

from configs import base, qwen2_5_0_5b
from dapo_jax.preflight import __main__ as preflight
from dapo_jax.preflight import examine
from dapo_jax.preflight.chips import GIB, chip_of
from dapo_jax.preflight.compile import CUDA, LIBTPU, compiled, topology_devices
from dapo_jax.setup import components
from dapo_jax.setup.memory import device_bytes
from models.qwen2 import PRESETS, Qwen2Config
from models.transformer import abstract_params

needs_compiler = pytest.mark.skipif(
    not LIBTPU.exists(), reason="needs the TPU's compiler: `make preflight`"
)
needs_gpu_compiler = pytest.mark.skipif(
    not CUDA.exists(), reason="needs the GPU's compiler: `make preflight TOPOLOGY=h100:8`"
)
# A model of two small layers, with biases, grouped heads and tied embeddings as the 0.5B has them.
SMALL = Qwen2Config(4_096, 512, 2_048, 2, 8, 2, 64, tie_embeddings=True)
SMALL_SETTINGS = {
    "rollout.num_prompts": 16,
    "rollout.max_prompt_tokens": 64,
    "rollout.max_response_tokens": 64,
    "rollout.slot_tokens": 32,
    "rollout.cache_mib": 5,
    "algo.overlong_cache_tokens": 32,
    "algo.old_logprobs": "learner",
    "learner.row_tokens": 256,  # a TPU's prompts and responses begin at multiples of 128
    "learner.micro_batch_rows": 8,
    "eval.every_steps": 0,
}


def program(arguments, temporaries):
    """Stands for what the compiler says of a program: two kernels, and 3 GiB in 9 collectives."""
    sizes = {"argument_size_in_bytes": arguments, "temp_size_in_bytes": temporaries}
    return types.SimpleNamespace(**sizes), 2, 9, 3 * GIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "model"),
    [
        pytest.param("v5e:2x2", 1, marks=needs_compiler),
        pytest.param("h100:8", 2, marks=needs_gpu_compiler),
    ],
)
def test_a_recipe_that_fits(monkeypatch, request, topology, model):
    """Arguments are known by arithmetic; the compiler's temporaries must fit.

    Attention in rows and pages is ours, not plain XLA's; and the sampler's weights are what they
    are gathered to, but for the head's copy, from parts of every data shard.
    """
    recipe = qwen2_5_0_5b.get_config()
    recipe.update_from_flattened_dict(SMALL_SETTINGS | {"mesh.model": model})
    monkeypatch.setitem(PRESETS, "0.5b", SMALL)
    effort = "jax_exec_time_optimization_effort"  # a third of the seconds; JAX 0.12 has none
    if effort in jax.config.values:
        jax.config.update(effort, -1.0)
        request.addfinalizer(lambda: jax.config.update(effort, 0.0))
    found = examine.examine(recipe, topology, slices=None)
    assert found.headroom >= examine.WANTED_HEADROOM
    parameters = count_parameters(abstract_params(SMALL)[1])
    needed = {"reshard", "prefill", "decode", "old_logp", "update"}
    assert needed <= found.phases.keys()
    phase = found.phases["decode"]
    assert phase["state"] == pytest.approx(12 * parameters / found.chips, rel=0.01)
    head = 2 * SMALL.vocab_size * SMALL.width  # the sampler's copy of the tied embedding
    assert phase["sampler's weights"] == pytest.approx((2 * parameters + head) / model, rel=0.01)
    assert phase["keys and values"] <= recipe.rollout.cache_mib * 2**20
    assert all(found.calls[name][0] > 0 for name in ("update", "old_logp", "decode"))
    assert found.calls["reshard"][2] == pytest.approx(2 * parameters / model, rel=0.01)


@pytest.mark.parametrize(("share", "gib"), [(None, 0.75 * 79.1), ("0.92", 0.92 * 79.1)])
def test_of_a_gpus_memory_jax_takes_a_share(monkeypatch, share, gib):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    if share:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    assert chip_of("h100:8").hbm_bytes == pytest.approx(gib * GIB)
    assert chip_of("v5e:2x2").hbm_bytes == 15.75 * GIB
    for count in ("h100", "h100:", "h100:0", "h100:8x1"):
        with pytest.raises(ValueError, match="number of GPUs, as in h100:8"):
            chip_of(count)


@needs_compiler
def test_a_program_that_needs_more_than_there_is_does_not_fit():
    device = topology_devices("v5e:2x2", slices=1)[0]
    where = jax.sharding.SingleDeviceSharding(device)
    array = jax.ShapeDtypeStruct((2**15, 2**16), jnp.float32, sharding=where)  # 8 GiB, and again
    lowered = jax.jit(lambda a: jnp.sort(a)).lower(array)
    with pytest.raises(MemoryError, match=r"sorting: .* memory .*15.75G"):
        compiled("sorting", lowered)


@pytest.mark.parametrize(
    ("gib", "status", "words"),
    [
        (1.0, 0, "1 chips of v5e, mesh "),
        (1.0, 0, "update                2 kernels of ours; 9 collectives exchange 3.000 GiB"),
        (15.0, 0, "less than 10% is free: lower learner.micro_batch_rows"),
        (16.0, 1, "it does not fit"),
        (None, 1, "it does not fit: update: 17.2G\nlower learner.micro_batch_rows"),
    ],
)
def test_the_exit_status_says_whether_it_fits(monkeypatch, capsys, gib, status, words):
    """gib: of the one program's temporaries; None: it does not compile."""

    def compile_programs(built):
        if gib is None:
            raise MemoryError("update: 17.2G")
        return {"update": program(device_bytes(built.state), int(gib * GIB))}

    config = base.get_config()
    config.model.preset = "tiny"
    given = mock.Mock(config=config, topology="v5e:1x1", slices=None)
    monkeypatch.setattr(preflight.flags, "FLAGS", given)
    monkeypatch.setattr(examine, "compiled_programs", compile_programs)
    monkeypatch.setattr(examine, "topology_devices", lambda *_, **__: jax.devices()[:1])
    with pytest.raises(SystemExit) if status else contextlib.nullcontext():
        preflight.main([])
    out = capsys.readouterr().out
    assert words in out
    assert out.endswith("it fits\n") == (status == 0)


@pytest.mark.parametrize("setting", [{"learner.lora_rank": 4}, {"algo.kl_coef": 0.1}])
def test_each_phase_has_what_is_held_meanwhile(setting):
    config = base.get_config()
    config.update_from_flattened_dict({"model.preset": "tiny"} | setting)
    vocab_size = components.model_sizes(config).vocab_size
    built = components.programs(config, vocab_size, devices=jax.devices()[:1])
    held = built.start_weights, built.state
    start_weights, state, params = map(device_bytes, (*held, built.state.params))
    programs = {"decode": program(0, 3), "update": program(state + start_weights + 7, 5)}
    programs["old_logp"] = program(params + start_weights + 7, 5)
    phases = examine.memory_phases(built, programs)
    decoding, *updating = (sum(parts.values()) for parts in phases.values())
    assert start_weights > 0
    assert decoding == device_bytes((*held, built.engine.params, built.engine.pages)) + 3
    assert updating == [state + start_weights + 7 + 5] * 2
    assert phases["update"]["batch"] == phases["old_logp"]["batch"] == 7
