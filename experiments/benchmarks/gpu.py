"""One GPU, row by row, what decides most first: for ten minutes of a card.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python -m experiments.benchmarks.gpu [--rows=attention]
    python experiments/benchmarks/torch_gpu.py     # the peer, by the Python of its environment
    python -m experiments.benchmarks.gpu --small   # on a CPU, interpreted, but tiles and cuDNN

bfloat16 and random weights, where not said otherwise. The kinds of rows, in their order:

    agree      one step in float32 with all kernels: how far the sampler's log-probabilities are
               from the learner's, and Adam's moments from plain XLA's; whether a second one has the
               same bits
    attention  in packed rows of one and of twenty segments, by each of ATTENTION: ms
    tiles      the same by ours with other tiles (flash_gpu.TILES), one kernel's at a time
    update     four rows of one response each, layers recomputed
    decode     256 slots, or as many as fit, that have sampled so many tokens each; the floor is
               that of experiments.preflight.estimate at the rates of a copy and of a product
    step       configs/one_gpu.py, with response lengths spread as those of Qwen2.5's family

Nothing decodes to the context: pages are filled with random numbers, and every block begins at the
same token. Each row is printed as soon as it is there, with the seconds that it took, compilations
too. One that fails says why, and the others follow.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax._src.cudnn import fused_attention_stablehlo

from configs import one_gpu
from dapo_jax.learner import minibatch
from dapo_jax.preflight.chips import Chip
from dapo_jax.preflight.compile import without_weights
from dapo_jax.preflight.examine import parameter_count
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.engine import Engine, token_bytes
from dapo_jax.setup import auto_sizes, components
from dapo_jax.types import Group, Prompt, Response
from experiments.benchmarks import common
from experiments.preflight.estimate import Device, response_lengths
from models.kernels import flash_gpu, kernels_for, packed, platform_of
from models.parameters import normal, ones
from models.qwen2 import PRESETS
from sharding import hosts, rules

FLAGS = flags.FLAGS
flags.DEFINE_string("rows", "", "A regular expression: only rows whose names have it.")
flags.DEFINE_bool("small", False, "Toy sizes, interpreted kernels: shows that rows work.")
BLOCK, PAGE = 16, 128  # tokens
SPARE_BYTES = 4 * 2**30  # of the device: logits and pieces of attention
PROMPT, MICRO_BATCHES = 64, 4  # of an update
MOST_SEGMENTS = 32  # of a row, for cuDNN


@dataclasses.dataclass(frozen=True)
class Work:
    """The sizes of all rows.

    attention: (tokens of a row, query heads, key heads, head size). updates: (model, tokens of a
    row). decodes: (model, tokens that a slot has sampled). steps: models of configs/one_gpu.py.
    """

    kernels: str
    attention: tuple[tuple[int, int, int, int], ...]
    updates: tuple[tuple[str, int], ...]
    decodes: tuple[tuple[str, int], ...]
    steps: tuple[str, ...]
    prompts: int  # of a step
    max_tokens: int  # of its responses
    slots: int = 256
    segments: tuple[int, ...] = (1, 20)
    copy_mib: int = 2_048
    product: int = 8_192
    repeats: int = 5


REAL = Work(
    kernels="gpu",
    attention=((4_096, 14, 2, 64), (22_528, 14, 2, 64), (4_096, 12, 2, 128), (22_528, 12, 2, 128)),
    updates=(("0.5b", 4_096), ("0.5b", 22_528), ("1.5b", 4_096)),
    decodes=(("0.5b", 1_024), ("0.5b", 4_096), ("1.5b", 1_024), ("7b", 1_024)),
    steps=("0.5b", "1.5b"),
    prompts=64,
    max_tokens=4_096,
)
SMALL = Work(
    kernels="gpu_interpret",
    attention=((256, 4, 2, 32),),
    updates=(("tiny", 256),),
    decodes=(("tiny", 64),),
    steps=("tiny",),
    prompts=4,
    max_tokens=32,
    slots=8,
    segments=(1, 3),
    copy_mib=16,
    product=256,
    repeats=1,
)


def cudnn(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    """Attends as a causal row of one segment: what JAX's public function has of cuDNN."""
    how = "xla" if FLAGS.small else "cudnn"
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation=how)


def cudnn_packed(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    """Attends in segments by cuDNN (Hopper or later), which JAX has no public function for.

    Each segment is a problem of its own there: it knows no branches. JAX up to 0.11.0 is wrong for
    grouped queries (jax#39521).
    """
    number_M = jnp.arange(1, MOST_SEGMENTS + 1)
    is_BMT = segment_BT[:, None] == number_M[:, None]
    length_BM = is_BMT.sum(axis=2, dtype=jnp.int32)
    start_BM = jnp.argmax(is_BMT, axis=2).astype(jnp.int32)
    length_BM, start_BM = (jnp.where(length_BM > 0, of, -1) for of in (length_BM, start_BM))
    offsets_BM = jnp.pad(start_BM, ((0, 0), (0, 1)), constant_values=-1)
    return fused_attention_stablehlo.dot_product_attention(
        *(q_BTNH, k_BTKH, v_BTKH),
        q_seqlen=length_BM,
        kv_seqlen=length_BM,
        q_offsets=offsets_BM,
        kv_offsets=offsets_BM,
        scale=q_BTNH.shape[3] ** -0.5,
        mask_type=fused_attention_stablehlo.MaskType.PADDING_CAUSAL,
    )


def ours(*arrays):
    """Attends by the kernel that an update on a GPU has."""
    return flash_gpu.flash_attention(*arrays, interpret=FLAGS.small)


ATTENTION = {
    "ours": ours,
    "cudnn": cudnn,
    "cudnn packed": cudnn_packed,
    "plain XLA": packed.packed_attention,
}
KERNELS = ("forward", "d_queries", "d_keys")
TILES = {  # by the size of a head: (one of KERNELS, queries, keys, warps, stages)
    64: (
        *((0, 128, 64, 4, 3), (0, 128, 128, 8, 2), (0, 64, 64, 4, 3)),
        *((1, 128, 64, 8, 2), (1, 64, 64, 4, 2), (1, 128, 32, 4, 3)),
        *((2, 64, 64, 4, 3), (2, 64, 128, 8, 2), (2, 32, 128, 4, 2)),
    ),
    128: (
        *((0, 128, 128, 8, 2), (0, 128, 64, 8, 3), (0, 64, 64, 4, 2)),
        *((1, 128, 64, 8, 2), (1, 128, 32, 8, 2), (1, 64, 32, 4, 3)),
        *((2, 64, 128, 8, 2), (2, 32, 64, 4, 3), (2, 32, 128, 8, 2)),
    ),
}


def agree(work: Work) -> str:
    """Takes a step of float32 twice by the kernels, and its update by plain XLA."""
    r = {"num_prompts": 4, "group_size": 4, "max_prompt_tokens": PROMPT}
    r |= {"max_response_tokens": 64, "slot_tokens": 64, "page_tokens": 64}
    settings = {f"rollout__{name}": value for name, value in r.items()} | {"updates_per_step": 1}
    settings |= {"learner__row_tokens": 256, "learner__micro_batch_rows": 2}
    how = settings | {"requests": 16, "devices": jax.devices()[:1]}
    built, plain = (
        common.programs("tiny", model__kernels=kernels, **how) for kernels in (work.kernels, "xla")
    )
    prompts, advantage_PG = common.random_prompts(built, 4, PROMPT), np.ones((4, 4), np.float32)
    advantage_PG[:, ::2] *= -1

    def step(programs, groups=None):
        state = programs.start_state()
        weights = programs.reshard(state.params, None)
        groups = groups or common.sample(programs, weights, prompts, [[64] * 4] * 4)[0]
        batch = minibatch(groups, advantage_PG, programs.learning, programs.mesh)
        state, metrics = programs.compile_update()(state, None, batch, np.float32(1e-6))
        return groups, jax.device_get(state), jax.device_get(metrics)

    (groups, state, metrics), (again, state_again, _) = step(built), step(built)
    _, plain_state, _ = step(plain, groups)
    first, second = ([r for g in it for r in g.responses] for it in (groups, again))
    same = all(
        np.array_equal(a.tokens_T, b.tokens_T)
        and np.array_equal(a.behavior_logp_T, b.behavior_logp_T)
        for a, b in zip(first, second, strict=True)
    )
    same &= all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(state_again)))
    moments, plain_moments = (
        np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(of.opt_state)])
        for of in (state, plain_state)
    )
    off = np.linalg.norm(moments - plain_moments) / np.linalg.norm(plain_moments)
    return (
        f"ratio gap {float(metrics['ratio_gap']):.1e}; moments are {off:.1e} from plain XLA's; a "
        f"second step {'has the same bits' if same else 'DIFFERS'}"
    )


def attention(work: Work, sizes: tuple[int, int, int, int], segments: int, name: str) -> str:
    """Times a way of attention, forward and with the backward pass, and compares it with `ours`."""
    _, N, _, H = sizes
    of, best = ATTENTION[name], functools.partial(common.best_seconds, repeats=work.repeats)
    forward, gradient, qkv, segment_BT = attention_programs(sizes, segments, of)
    seconds = [best(lambda run=run: run(*qkv)) for run in (forward, gradient)]
    pairs = N * sum(n * (n + 1) / 2 for n in np.bincount(segment_BT[0]))
    rates = [flop * pairs * H / s / 1e12 for flop, s in zip((4, 14), seconds, strict=True)]
    text = "; ".join(
        f"{what} {1e3 * s:.2f} ms, {rate:.0f} TFLOP/s"
        for what, s, rate in zip(("forward", "with backward"), seconds, rates, strict=True)
    )
    if of is ours:
        return text
    mine, theirs = our_d_q(sizes, segments), np.asarray(gradient(*qkv)[0], np.float32)
    return f"{text}; d_q differs by {np.linalg.norm(mine - theirs) / np.linalg.norm(theirs):.1e}"


def attention_programs(sizes: tuple[int, int, int, int], segments: int, attend: Callable):
    """Makes (forward, gradient, their random arguments, the segments) of a way of attention."""
    T, N, K, H = sizes
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = [
        jax.random.normal(key, (1, T, heads, H), jnp.bfloat16)
        for key, heads in zip(keys, (N, K, K), strict=True)
    ]
    segment_BT = (1 + np.arange(T) * segments // T)[None].astype(np.int32)

    def forward(q, k, v):
        return attend(q, k, v, segment_BT, np.ones_like(segment_BT))

    def loss(*qkv):
        return jnp.sum(forward(*qkv).astype(jnp.float32) ** 2)

    return jax.jit(forward), jax.jit(jax.grad(loss, argnums=(0, 1, 2))), qkv, segment_BT


@functools.cache
def our_d_q(sizes: tuple[int, int, int, int], segments: int) -> np.ndarray:
    """Computes the gradient of the queries by our kernel, which others are compared with."""
    _, gradient, qkv, _ = attention_programs(sizes, segments, ours)
    return np.asarray(gradient(*qkv)[0], np.float32)


def tiles(work: Work, sizes: tuple[int, int, int, int], segments: int, which: int, *tile) -> str:
    """Times our attention with another tile of one of its kernels."""
    of = jnp.dtype(jnp.bfloat16).itemsize, sizes[3]
    changed = [*flash_gpu.TILES[of]]
    changed[which] = tile
    with mock.patch.dict(flash_gpu.TILES, {of: tuple(changed)}):
        return attention(work, sizes, segments, "ours")


def update(work: Work, preset: str, row_tokens: int) -> str:
    """Times an update of full rows, layers recomputed, one response a row."""
    built = common.programs(
        preset,
        devices=jax.devices()[:1],
        updates_per_step=1,
        model__compute_dtype="bfloat16",
        model__kernels=work.kernels,
        rollout__num_prompts=MICRO_BATCHES,
        rollout__group_size=1,
        learner__row_tokens=row_tokens,
        learner__micro_batch_rows=1,
    )
    program, state, rng = built.compile_update(), built.start_state(), np.random.default_rng(0)
    vocab, tokens = built.sizes.vocab_size, row_tokens - PROMPT + 1
    uniform_T = np.full(tokens, -np.log(vocab), np.float32)

    def response() -> Response:
        return Response(rng.integers(1, vocab, tokens).astype(np.int32), uniform_T, False)

    prompts = common.random_prompts(built, MICRO_BATCHES, PROMPT)
    groups = [Group(i, Prompt(prompt), (response(),)) for i, prompt in enumerate(prompts)]
    advantage_PG = rng.normal(size=(MICRO_BATCHES, 1)).astype(np.float32)
    batch = minibatch(groups, advantage_PG, built.learning, built.mesh)

    def one_update():
        nonlocal state
        state, metrics = program(state, None, batch, np.float32(1e-6))
        return metrics

    seconds = common.best_seconds(one_update, repeats=work.repeats)
    entries, sequences = MICRO_BATCHES * row_tokens, [row_tokens] * MICRO_BATCHES
    share = Device(chip(work), PRESETS[preset]).update_seconds(entries, sequences, 1) / seconds
    return f"{seconds:.3f} s; its products have {share:.0%} of a large one's rate; {memory()}"


def decode(work: Work, preset: str, context: int) -> str:
    """Times a decode step when every slot has sampled `context` tokens, beside the floor.

    Raises MemoryError where the weights leave no room for a slot.
    """
    own = -(-(context + BLOCK) // PAGE)  # a slot's pages
    slots = slots_that_fit(work, preset, own)
    built = common.programs(
        preset,
        devices=jax.devices()[:1],
        model__compute_dtype="bfloat16",
        model__kernels=work.kernels,
        rollout__max_prompt_tokens=1,
        rollout__max_response_tokens=own * PAGE,
    )
    cache = Cache(
        slots=slots,
        pages=slots * own + 1,
        prompt_pages=1,
        readers=1,
        page_tokens=PAGE,
        block_tokens=BLOCK,
        max_prompt_tokens=1,
        max_response_tokens=own * PAGE,
    )
    chosen, abstract = kernels_for(work.kernels, platform_of(built.mesh)), built.engine.params
    engine = Engine(PRESETS[preset], built.mesh, cache, params=abstract, kernels=chosen)
    engine.sizes = engine.sizes[-1:]  # the program of all slots and pages
    sampling = common.stream(built).sampling
    engine.compile(sampling)
    ((size, _),) = engine.sizes
    rows = np.zeros(size, cache.row_dtype)
    busy = rows[:slots]
    busy["active"], busy["token"], busy["cursor"] = 1, 1, np.arange(slots)
    busy["sampled"], busy["limit"] = context, cache.max_response_tokens
    shuffled = 1 + np.random.default_rng(0).permutation(slots * own)
    busy["response_pages"] = shuffled.reshape(slots, own)
    key_Z = np.stack([jax.random.key_data(jax.random.key(0))])
    key_Z = hosts.place(key_Z, rules.replicated(built.mesh))

    def random_pages():
        def pool(s):
            page = jax.random.normal(jax.random.key(1), s.shape[1:], s.dtype)
            return jnp.broadcast_to(page, s.shape)

        return jax.tree.map(pool, engine.pages)

    shardings = jax.tree.map(lambda s: s.sharding, engine.pages)
    prompt_pages, pages = jax.jit(random_pages, out_shardings=shardings)()
    params = jax.tree.map(lambda like: maker(like)(), abstract)
    page_P = np.arange(cache.pages, dtype=np.int32)

    def block():
        nonlocal pages
        pages, token_SB, _ = engine.decode(
            params, prompt_pages, pages, key_Z, rows, page_P, (sampling,)
        )
        return token_SB

    seconds = common.best_seconds(block, repeats=work.repeats) / BLOCK
    floor = Device(chip(work), PRESETS[preset]).decode_seconds(slots, slots * context)
    return (
        f"{1e3 * seconds:.2f} ms a step of {slots} slots, {slots / seconds:,.0f} tokens/s; the "
        f"floor is {1e3 * floor:.2f} ms: {floor / seconds:.0%}"
    )


def slots_that_fit(work: Work, preset: str, pages: int) -> int:
    """As many slots of so many pages as were asked for, or as the device holds."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return work.slots
    c = PRESETS[preset]
    head = c.vocab_size * c.width if c.tie_embeddings else 0  # an array of its own
    left = limit - SPARE_BYTES - 2 * (parameter_count(c) + head)
    of_slot = pages * PAGE * token_bytes(c, bytes_per_value=2, model_degree=1)
    if left < of_slot:
        raise MemoryError("the weights leave no room for a slot")
    return min(work.slots, left // of_slot)


@functools.cache
def maker(like):
    """A program for each kind of array: one for all of them took a GPU's compiler minutes."""
    make = functools.partial(normal if like.ndim > 1 else ones, jax.random.key(0), like.shape)
    return jax.jit(lambda: make().astype(like.dtype), out_shardings=like.sharding)


def step(work: Work, preset: str) -> str:
    """Takes the rollout and the updates of a step of configs/one_gpu.py, once each."""
    config = without_weights(one_gpu.get_config())
    config.model.preset, config.model.kernels, r = preset, work.kernels, config.rollout
    r.num_prompts, r.generation_prompts = work.prompts, 2 * work.prompts
    r.max_response_tokens, r.max_prompt_tokens = work.max_tokens, 2 * PROMPT
    auto_sizes.fit_training(config)
    built = components.programs(config, PRESETS[preset].vocab_size, devices=jax.devices()[:1])
    how = {"groups": r.generation_prompts, "group_size": r.group_size, "seed": 0}
    length_PG = response_lengths(work.max_tokens / 4, longest=work.max_tokens, **how)
    program, state = built.compile_update(), built.start_state()
    weights = built.reshard(state.params, None)
    built.engine.compile(common.stream(built).sampling)
    prompts = common.random_prompts(built, r.generation_prompts, PROMPT)
    groups, _, sampling_s = common.sample(built, weights, prompts, length_PG.tolist())
    del weights
    per_update, start = work.prompts // config.updates_per_step, time.perf_counter()
    for first in range(0, work.prompts, per_update):
        chosen = groups[first : first + per_update]
        advantage_PG = np.random.default_rng(first).normal(size=(len(chosen), r.group_size))
        batch = minibatch(chosen, advantage_PG.astype(np.float32), built.learning, built.mesh)
        state, metrics = program(state, None, batch, np.float32(1e-6))
    gap = float(metrics["ratio_gap"])
    return (
        f"sampling {length_PG.size:,} responses, {length_PG.sum():,} tokens {sampling_s:.1f} s; "
        f"{config.updates_per_step} updates {time.perf_counter() - start:.1f} s; cache "
        f"{r.cache_mib:,} MiB, {built.engine.cache.slots} slots; ratio gap {gap:.3f}; {memory()}"
    )


@functools.cache
def chip(work: Work) -> Chip:
    """Measures the rates of the first device."""
    how = {"copy_mib": work.copy_mib, "product": work.product, "dtype": "bfloat16"}
    return common.measured_chip(**how, devices=jax.devices()[:1])


def memory() -> str:
    """The most memory that was taken since the start."""
    stats = jax.devices()[0].memory_stats() or {}
    return f"peak so far {stats.get('peak_bytes_in_use', 0) / 1e9:.1f} GB"


def rates(work: Work) -> str:
    """Says what everything is compared with."""
    measured = chip(work)
    return f"{measured.hbm_rate / 1e9:,.0f} GB/s, {measured.flop_rate / 1e12:,.2f} TFLOP/s"


def rows_of(work: Work) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields each row's name, and what measures it."""
    yield "rates of a copy and of a product", functools.partial(rates, work)
    yield "agree", functools.partial(agree, work)
    for sizes in work.attention:
        for segments in work.segments:
            for name in ATTENTION:
                if (name == "cudnn" and segments > 1) or (name == "plain XLA" and sizes[0] > 8_192):
                    continue
                if name == "cudnn packed" and work is SMALL:
                    continue
                heads = f"{sizes[1]} x {sizes[3]} heads, {sizes[0]:,} tokens, {segments} segments"
                run = functools.partial(attention, work, sizes, segments, name)
                yield f"attention, {name}, {heads}", run
    for sizes in work.attention:
        for segments in work.segments:
            for which, *tile in TILES.get(sizes[3], ()) if sizes[0] > 8_192 else ():
                name = f"tiles, heads of {sizes[3]}, {segments} segments, {KERNELS[which]} {tile}"
                yield name, functools.partial(tiles, work, sizes, segments, which, *tile)
    for kind, works in ((update, work.updates), (decode, work.decodes)):
        for preset, tokens in works:
            name = f"{kind.__name__}, {preset}, {tokens:,} tokens"
            yield name, functools.partial(kind, work, preset, tokens)
    for preset in work.steps:
        yield f"step, {preset}", functools.partial(step, work, preset)


def main(_):
    print(f"{common.machine()}, commit {common.commit()}\n")
    print(common.table(["row", "result", "took, s"], []), flush=True)
    for name, run in rows_of(SMALL if FLAGS.small else REAL):
        if not re.search(FLAGS.rows, name):
            continue
        start = time.perf_counter()
        try:
            found = run()
        except (RuntimeError, MemoryError) as error:
            found = " ".join(str(error).split())[:100]
        print(f"| {name} | {found} | {time.perf_counter() - start:.0f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
