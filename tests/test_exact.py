"""The sampler's log-probabilities are the learner's, bit for bit (models/kernels/tiles.py)."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cases
from engines import (
    PROMPTS,
    RUN_KEY,
    SAMPLING,
    TWO,
    Scripted,
    batch_of,
    begin,
    by_request,
    finished,
    programs,
    same_bits,
    step,
)
from golden import directory

from dapo_jax.logprobs import Softmax, chosen_logprobs, sampling_logits
from dapo_jax.sampler.cache import PARTS
from dapo_jax.sampler.sampling import sample_token
from dapo_jax.sampler.scheduler import Scheduler
from dapo_jax.sampler.session import LONG_ANSWER, Session, Stream
from dapo_jax.types import Prompt
from models import qwen2, qwen3_moe
from models.kernels import OPTIONS, tiles
from models.kernels.xla import combine
from models.precision import low_rank_product
from models.qwen2 import Qwen2Config
from models.qwen3_moe import Qwen3MoeConfig
from models.transformer import rms_norm
from sharding.mesh import make_mesh

ONE, DATA, MODEL = ({"data": d, "model": m} for d, m in ((1, 1), (2, 1), (1, 2)))
FAMILIES = {
    "qwen2/tied": "qwen2",
    "qwen3/untied": "qwen3",
    "llama/llama3": "llama",
    "gemma3/27b": "gemma3_text",  # with windows that are shorter than the text
    "qwen3_moe/normed": "qwen3_moe",
}
TRUNCATED = {"top_p": 0.7, "top_k": 9}


def build(golden, dtype, folder, **how):
    """Builds the programs of a recipe for one of the golden models."""
    model = {"compute_dtype": dtype}
    return programs(FAMILIES[golden], directory(golden, folder), model=model, **how)


def logprobs(built, batch):
    """Returns those of a batch's sampled tokens, the sampler's and the first update's."""
    state, start = begin(built)
    pair = batch.behavior_logp_BT, built.recompute_old_logp(state.params, start, batch)
    is_sampled_MBT = np.asarray(batch.is_response_BT)
    return (np.asarray(logp_MBT)[is_sampled_MBT] for logp_MBT in pair)


def exact(built, **how):
    """Takes a step, in which both have the same bits; returns its groups."""
    done = step(built, **how)
    sampled, learned = logprobs(built, done.batch)
    responses = by_request(done.groups).values()
    assert len(sampled) == sum(response.sampled_tokens for response in responses)
    np.testing.assert_array_equal(learned, sampled)
    assert done.metrics["ratio_gap"] == 0
    return done.groups


def drawn(number: int) -> tuple[str, str, dict, dict]:
    """Draws (golden model, dtype, how it is built, what is asked of `step`).

    20 numbers in a row have all families in both dtypes, and all meshes. A low temperature shows
    differences of logits that are small beside a log-probability.
    """
    rng = np.random.default_rng(number)

    def any_of(*choices):
        return choices[rng.integers(len(choices))]

    page, block = any_of((8, 4), (4, 2), (16, 16), (12, 3), (5, 5), (8, 1))
    longest, limit = any_of(1, 9, 17, 40), any_of(3, 20, 47, 70)
    count, size = any_of(1, 2, 4), any_of(2, 4, 7)
    tokens = [min(longest, any_of(1, 2, page, page + 1, longest)) for _ in range(count)]
    scarce = {"slots": any_of(2, 5, 9), "pages": 2 + any_of(1, 2, 3) * -(-limit // page)}
    sampling = dataclasses.replace(
        SAMPLING,
        temperature=any_of(0.1, 0.3, 1.0, 1.4),
        max_response_tokens=limit,
        stop_ids=any_of((), SAMPLING.stop_ids),
        **any_of({}, {}, {}, TRUNCATED),
    )
    beside = dataclasses.replace(sampling, temperature=0.6, **TRUNCATED)
    losses = ({}, {"old_logprobs": "learner"}, {"kl_coef": 0.1}, {"entropy_coef": 0.01})
    losses += ({"ratio": "sequence"},)
    golden, dtype = list(FAMILIES)[number % 5], ("float32", "bfloat16")[number % 2]
    adapted = ("q", "k", "v", "o") + (() if "moe" in golden else ("gate", "up", "down"))
    how = {
        "mesh": (ONE, DATA, MODEL)[number % 3],
        "lora_rank": any_of(0, 1, 4),
        "cache": any_of(None, scarce),
        "parts": any_of(((1, 1),), ((1, 1),), PARTS),
        "rollout": {
            **{"page_tokens": page, "block_tokens": block, "slot_tokens": any_of(1, limit)},
            **{"max_prompt_tokens": longest, "max_response_tokens": limit},
            **{"num_prompts": count, "group_size": size, "temperature": sampling.temperature},
        },
        "learner": {
            "row_tokens": longest + limit + int(rng.integers(100)),
            **{"micro_batch_rows": any_of(2, 4), "row_lengths": any_of(1, 3)},
            "remat": any_of("none", "full", "keep_products", "keep_attention"),
            **{"lora_targets": adapted, "lora_alpha": 6.0},  # a scale that rounds
        },
        "algo": {"replay_routes": any_of(True, False), **any_of(*losses)},
    }
    asked = {
        "prompts": {7 * i: rng.integers(0, SAMPLING.vocab_size, n) for i, n in enumerate(tokens)},
        **{"group_size": size, "sampling": sampling, "beside": any_of(None, beside)},
    }
    return golden, dtype, how, asked


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=() if i < 5 else pytest.mark.slow) for i in cases(20, 200)]
)
def test_the_learner_computes_what_the_sampler_recorded(number, tmp_path):
    """For whatever recipe; FAULTS=full draws 200, and what fails prints itself.

    Of truncated samples the sampler's are those among the tokens that are left.
    """
    *model, how, asked = drawn(number)
    print(*model, how, asked, sep="\n")
    built = build(*model, tmp_path, **how)
    if asked["sampling"].top_p == 1:
        exact(built, **asked)
    else:
        sampled, learned = logprobs(built, step(built, **asked).batch)
        assert (learned <= sampled).all() and (learned < sampled).any()


@pytest.mark.parametrize(
    ("golden", "dtype"),
    [
        ("llama/llama3", "float32"),
        pytest.param("gemma3/27b", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_no_bit_depends_on_the_caches_sizes_and_data_shards(golden, dtype, tmp_path):
    """Few pages, of which samples lose theirs and start again; short blocks; two shards."""
    endless = {"sampling": dataclasses.replace(SAMPLING, stop_ids=())}
    roomy = exact(build(golden, dtype, tmp_path, mesh=ONE), **endless)
    few = {"mesh": DATA, "cache": {"slots": 5, "pages": 7}, "rollout": {"block_tokens": 2}}
    preempt = Scheduler._preempt
    with mock.patch.object(Scheduler, "_preempt", autospec=True, side_effect=preempt) as lost:
        scarce = exact(build(golden, dtype, tmp_path, **few), **endless)
    assert lost.called
    same_bits(by_request(scarce), by_request(roomy))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_newest_policys_tokens_are_exact_behind_older_ones(dtype, tmp_path):
    """Another session goes on with them, and computes their keys and values anew.

    In the same session keys and values stay those of the older policy, and the gap is that of the
    groups which the newest one began.
    """
    how = {"cache": {"partial_rollouts": True}, "algo": {"old_logprobs": "learner"}}
    built = build("qwen3/untied", dtype, tmp_path, mesh=ONE, rollout={"num_prompts": 4}, **how)
    state, start = built.start_state(), built.load_start_weights()
    older = built.reshard(jax.tree.map(lambda p: 0.9 * p, state.params), start)
    newest = built.reshard(state.params, start)
    stream = Stream(RUN_KEY, dataclasses.replace(SAMPLING, stop_ids=()))
    same, another = (Session(built.engine, it, stream) for it in (older, newest))
    for cursor in TWO:
        same.submit(cursor, Prompt(TWO[cursor]), group_size=4)
    for _ in range(3):
        assert not same.step()
    for it in same.pause():
        another.submit(it.cursor, Prompt(TWO[it.cursor]), group_size=4, begun=it.responses)

    def only_newest(response):
        older_T = np.arange(len(response.tokens_T)) < response.stale_tokens
        assert 0 < older_T.sum() < len(older_T)
        return dataclasses.replace(response, given_T=older_T)

    groups = [
        dataclasses.replace(group, responses=tuple(map(only_newest, group.responses)))
        for group in finished(another)
    ]
    np.testing.assert_array_equal(*logprobs(built, batch_of(built, groups)))

    same.resume(newest)
    for cursor in (0, 100):
        same.submit(cursor, Prompt(PROMPTS[cursor]), group_size=4)
    _, metrics = built.update(state, start, batch_of(built, finished(same)), 1e-3)
    assert 0 < metrics["on_policy"] < 1
    assert metrics["ratio_gap"] == 0


@pytest.mark.parametrize(
    ("golden", "dtype"),
    [
        ("qwen2/tied", "float32"),
        pytest.param("qwen3_moe/normed", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_tokens_behind_an_environments_answers_are_exact(golden, dtype, tmp_path):
    """Behind short ones, which are fed in blocks, and long ones, which are computed together."""
    sizes = {"rollout": {"max_response_tokens": 200}, "learner": {"row_tokens": 216}}
    built = build(golden, dtype, tmp_path, mesh=ONE, cache={"turns": True}, **sizes)
    how = {"sampling": dataclasses.replace(SAMPLING, max_response_tokens=200)}
    restore = Session._restore
    with mock.patch.object(Session, "_restore", autospec=True, side_effect=restore) as restored:
        groups = exact(built, environments=Scripted(more=LONG_ANSWER), **how)
    assert restored.called
    turns = [response.turns_T for group in groups for response in group.responses]
    answers = [given_T for it in turns if len(it) % 2 for given_T in it[1::2]]  # with turns behind
    assert {len(given_T) > LONG_ANSWER for given_T in answers} == {False, True}


WIDE = (61, 576, 640, 2, 9, 3, 64, True)  # more terms than a block of `cpu.OPTIONS`
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_width": 24, "norm_topk": True}


@pytest.mark.parametrize(
    ("family", "dtype", "slots"),
    [("qwen2", "float32", 40), ("qwen2", "bfloat16", 3), ("qwen3_moe", "float32", 3)],
)
def test_wide_models_are_exact_with_few_slots(family, dtype, slots):
    """SmolLM2 had a gap of 4e-6: one product's sums had an order by the number of slots.

    It was so only where there are more terms than in a block; and then in experts, too.
    """
    sizes, presets = {
        "qwen2": (Qwen2Config(*WIDE), qwen2.PRESETS),
        "qwen3_moe": (Qwen3MoeConfig(*WIDE, **EXPERTS), qwen3_moe.PRESETS),
    }[family]
    with mock.patch.dict(presets, wide=sizes):
        model = {"compute_dtype": dtype, "preset": "wide"}
        built = programs(family, "", mesh=ONE, model=model, cache={"slots": slots})
    exact(built)


def test_a_slots_pages_are_added_up_as_a_rows_tiles_are():
    """One after the other, whatever their powers; what is not finite stays in its slot."""
    rng, (E, K, G, H), (B, X) = np.random.default_rng(0), (150, 2, 3, 5), (4, 37)
    sums = tiles.Sums(
        rng.normal(size=(E, K, G, H)).astype(np.float32),
        rng.uniform(0.1, 60, (E, K, G)).astype(np.float32),
        rng.integers(-90, 90, (E, K, G)).astype(np.float32),
    )
    sums.power[:9] = tiles.MASKED  # tiles of which nothing is seen
    entry_BX = 1 + rng.permutation(E - 1)[: B * X].reshape(B, X)
    entry_BX[:, :-1] = np.where(rng.random((B, X - 1)) < 0.3, E, entry_BX[:, :-1])
    entry_BX[0, -1] = 0
    sums.out[0] = np.nan
    run = functools.partial(combine, dtype=jnp.float32)
    out_BNH = jax.jit(run, compiler_options=OPTIONS["cpu"])([sums], entry_BX)
    for out_NH, entry_X in zip(out_BNH, entry_BX, strict=True):
        pieces = (tiles.Sums(*(a[e] for a in sums)) for e in entry_X[entry_X < E])
        together_KGH = tiles.attended(functools.reduce(tiles.add, pieces))
        np.testing.assert_array_equal(out_NH, together_KGH.reshape(K * G, H))
    assert np.isfinite(out_BNH[1:]).all()


@pytest.mark.parametrize("keys", [35, 48, 200])
def test_a_tiles_power_is_of_its_largest_key_wherever_it_is(keys):
    """A smaller one would give the same sums, until a weight is too large for float32."""
    k_MHC = 9.0 * np.eye(keys, dtype=np.float32)[:, None]
    seen = np.ones((1, keys), bool)
    power_M1 = tiles.tile(jnp.ones((keys, 1, 1)), k_MHC, jnp.zeros((keys, 1)), seen).power
    np.testing.assert_array_equal(power_M1, np.full((keys, 1), 9.0))


def test_lora_of_rank_1_is_exact_for_any_number_of_rows():
    """A product of one column adds up the rows that are left of eight in another order."""
    x_TD, a_DR, b_RF = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate(((99, 576), (576, 1), (1, 8)))
    )
    multiply = functools.partial(low_rank_product, "TD,DF->TF", a=a_DR, b=b_RF)
    multiply = jax.jit(multiply, compiler_options=OPTIONS["cpu"])
    for rows in (5, 33, 97):
        np.testing.assert_array_equal(multiply(x_TD[:rows]), multiply(x_TD)[:rows])


@pytest.mark.parametrize("width", [8, 24, 32])
def test_a_norm_is_exact_whatever_is_fused_with_it(width):
    """With heads of 8 and pages of 5 tokens a prompt's keys had other last bits in the cache.

    So had the last norm of a model of width 32, in bfloat16 on two model shards.
    """
    x_MD, y_MD = (jax.random.normal(jax.random.key(i), (40, width)) for i in (0, 1))
    y_MD = y_MD.astype(jnp.bfloat16)
    jit = functools.partial(jax.jit, compiler_options=OPTIONS["cpu"])
    norm = functools.partial(rms_norm, scale=jnp.ones(width), eps=1e-6)

    def summed(x, y):
        return x + y.astype(jnp.float32) - y.astype(jnp.float32)[..., ::-1]

    fused = jit(lambda x, y: norm(summed(x, y)))
    alone_MD = jit(norm)(summed(x_MD, y_MD))
    for shape in ((40, width), (8, 5, 1, width), (1, 40, 1, width)):
        np.testing.assert_array_equal(
            fused(x_MD.reshape(shape), y_MD.reshape(shape)).reshape(40, width), alone_MD
        )


def test_a_program_does_not_grow_with_the_pages_that_are_added_up():
    """One that had lines of its own for each page took half a minute to compile, for 2,048 tokens.

    `dapo_jax.sample` of a model with many positions began minutes later.
    """

    def lines(pages):
        shapes = (9, 2, 1, 16), (9, 2, 1), (9, 2, 1)
        sums = tiles.Sums(*map(jnp.zeros, shapes))
        add = functools.partial(combine, dtype=jnp.float32)
        return (
            jax.make_jaxpr(add)([sums], jnp.zeros((3, pages), jnp.int32)).pretty_print().count("\n")
        )

    assert lines(1_600) == lines(320)


@pytest.mark.parametrize("temperature", [1.0, 1.4])
@pytest.mark.parametrize(("columns", "vocab_size"), [(96, 61), (700, 700)])
def test_heads_are_exact_at_any_temperature(columns, vocab_size, temperature):
    """The learner's compiler fused the division with a difference, which left out a rounding.

    Not where part of a large vocabulary is padding, nor at a temperature of 1.
    """
    x_BD, head_DV = (jax.random.normal(jax.random.key(0), it) for it in ((64, 16), (16, columns)))
    uniform_B = jax.random.uniform(jax.random.key(1), 64)
    one_device = make_mesh(data=1, model=1, devices=jax.devices()[:1])
    pi = Softmax(temperature, vocab_size, one_device)

    def sampler(x_BD, head_DV, uniform_B):
        how = {"temperature": temperature, "vocab_size": vocab_size, "first_id": 0}
        return sample_token(sampling_logits(x_BD @ head_DV, **how), uniform_B, axis=None)

    def learner(x_BD, head_DV, token_B):
        return chosen_logprobs(x_BD[None], head_DV, token_B[None], pi)[0][0]

    sampler, learner = (jax.jit(it, compiler_options=OPTIONS["cpu"]) for it in (sampler, learner))
    token_B, sampled_B = sampler(x_BD, head_DV, uniform_B)
    np.testing.assert_array_equal(learner(x_BD, head_DV, token_B), sampled_B)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["gpu_interpret", "tpu_interpret"])
def test_interpreted_kernels_do_so_too(kernels, dtype, tmp_path):
    """With pages of at least `tiles.FEWEST_KEYS`, as those of a TPU and a GPU have."""
    model, pages = {"compute_dtype": dtype, "kernels": kernels}, {"page_tokens": tiles.FEWEST_KEYS}
    folder = directory("qwen2/tied", tmp_path)
    exact(programs("qwen2", folder, mesh=ONE, model=model, rollout=pages))
