"""One accelerator, row by row, what decides most first: for ten minutes of a GPU or of TPU chips.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python -m experiments.benchmarks.device [--rows=attention]
    python experiments/benchmarks/torch_gpu.py        # a GPU's peer, by its environment's Python
    python -m experiments.benchmarks.device --small=tpu    # or gpu: interpreted on a CPU

bfloat16 and random weights, where not said otherwise. Of several GPUs the first is measured. On a
TPU updates and steps take all chips, and the other rows one. The kinds of rows, in their order:

    rates      of a copy and of a product
    agree      how far the kernels of pages and of rows are from plain XLA. Then one step with all
               of them, in both dtypes: whether the sampler's log-probabilities are the learner's to
               the bit, how far Adam's moments are from plain XLA's, and whether a second step has
               the same bits
    step       a config's, with response lengths spread as those of Qwen2.5's family, and the memory
    update     four rows a device of one response each, layers recomputed
    decode     256 slots, or as many as fit, that have sampled so many tokens each
    attention  in packed rows of one and of twenty segments, by ours and others: ms

Times stand beside a floor, that of experiments.preflight.estimate at a chip's published rates; a
GPU's are those of a copy and of a product. Memory stands beside what dapo_jax.preflight predicts.
A TPU keeps the temporaries of its programs in what it calls reserved, and measured is both.

Nothing decodes to the context: pages are filled with random numbers, and every block begins at the
same token. Each row is printed as soon as it is there, with the seconds that it took, compilations
too. One that fails says why, and the others follow.
"""

import dataclasses
import functools
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from clu.parameter_overview import count_parameters
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from configs import one_gpu, qwen2_5_0_5b
from dapo_jax.learner import minibatch
from dapo_jax.preflight import compile as compiling
from dapo_jax.preflight.chips import CHIPS, Chip
from dapo_jax.preflight.examine import memory_phases
from dapo_jax.process import compile_cache, hosts
from dapo_jax.report.compare import table
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.engine import Engine, token_bytes
from dapo_jax.setup import auto_sizes, components
from dapo_jax.types import Group, Prompt, Response, Status
from experiments.benchmarks import common
from experiments.preflight import estimate
from experiments.preflight.estimate import Device, response_lengths
from models.kernels import Kernels, kernels_for, packed, platform_of, xla
from models.parameters import normal, ones
from models.qwen2 import PRESETS
from models.transformer import abstract_params
from sharding import rules
from sharding.mesh import make_mesh

FLAGS = flags.FLAGS
flags.DEFINE_string("rows", "", "A regular expression: only rows whose names have it.")
flags.DEFINE_enum("small", "", ["", "gpu", "tpu"], "Toy sizes, this one's kernels interpreted.")
BLOCK, PAGE = 16, 128  # tokens
SPARE_BYTES = 4 * 2**30  # of the device: logits and pieces of attention
PROMPT, MICRO_BATCHES = 64, 4  # of an update
MOST_SEGMENTS = 32  # of a row, for cuDNN
PUBLISHED = {  # what JAX calls them
    **{"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"},
    **{"TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x"},
}


@dataclasses.dataclass(frozen=True)
class Work:
    """The sizes of all rows.

    devices: of updates and steps; None: all. attention: (tokens of a row, query heads, key heads,
    head size), by each of methods. updates: (model, tokens of a row). decodes: (model, tokens that
    a slot has sampled). steps: models of the config. agree: tokens of a row. agree_steps: models.
    """

    kernels: str
    devices: int | None
    methods: tuple[str, ...]
    attention: tuple[tuple[int, int, int, int], ...]
    updates: tuple[tuple[str, int], ...]
    decodes: tuple[tuple[str, int], ...]
    steps: tuple[str, ...]
    config: ModuleType
    prompts: int  # of a step, for each device
    max_tokens: int  # of its responses
    slots: int = 256
    segments: tuple[int, ...] = (1, 20)
    agree: int = 2_048
    agree_steps: tuple[str, ...] = ("tiny", "0.5b")
    copy_mib: int = 2_048
    product: int = 8_192
    repeats: int = 5


HEADS = ((4_096, 14, 2, 64), (22_528, 14, 2, 64), (4_096, 12, 2, 128), (22_528, 12, 2, 128))
REAL = {
    "gpu": Work(
        kernels="gpu",
        devices=1,
        methods=("ours", "cudnn", "cudnn packed", "plain XLA"),
        attention=HEADS,
        updates=(("0.5b", 4_096), ("0.5b", 22_528), ("1.5b", 4_096)),
        decodes=(("0.5b", 1_024), ("0.5b", 4_096), ("1.5b", 1_024), ("7b", 1_024)),
        steps=("0.5b", "1.5b"),
        config=one_gpu,
        prompts=64,
        max_tokens=4_096,
    ),
    "tpu": Work(
        kernels="tpu",
        devices=None,
        methods=("ours", "JAX's splash", "plain XLA"),
        attention=HEADS,
        updates=(("0.5b", 4_096), ("1.5b", 4_096)),
        decodes=(("0.5b", 1_024), ("1.5b", 1_024), ("0.5b", 4_096)),
        steps=("0.5b", "1.5b"),
        config=qwen2_5_0_5b,
        prompts=8,
        max_tokens=1_024,
        copy_mib=1_024,
        repeats=3,
    ),
}
TOY = {
    "attention": ((256, 4, 2, 32),),
    "updates": (("tiny", 256),),
    "decodes": (("tiny", 64),),
    "steps": ("tiny",),
    "prompts": 4,
    "max_tokens": 32,
    "slots": 8,
    "segments": (1, 3),
    "agree": 256,
    "agree_steps": ("tiny",),
    "copy_mib": 16,
    "product": 256,
    "repeats": 1,
}
SMALL = {
    "gpu": dataclasses.replace(
        REAL["gpu"], kernels="gpu_interpret", methods=("ours", "cudnn", "plain XLA"), **TOY
    ),
    "tpu": dataclasses.replace(REAL["tpu"], kernels="tpu_interpret", devices=2, **TOY),
}


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


def jax_splash(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    """Attends in segments as JAX's splash kernel is used: all blocks up to the diagonal."""
    (T, N, H), sides = q_BTNH.shape[1:], ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv")
    blocks = dict.fromkeys(sides, min(T, 1_024))
    attend = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((T, T))] * N),
        block_sizes=splash.BlockSizes(**blocks, use_fused_bwd_kernel=True),
        interpret=bool(FLAGS.small),
    )
    qkv = (q_BTNH * H**-0.5).astype(q_BTNH.dtype), k_BTKH, v_BTKH
    of_row = jax.vmap(lambda q, k, v, s: attend(q, k, v, segment_ids=splash.SegmentIds(s, s)))
    return of_row(*(a.swapaxes(1, 2) for a in qkv), segment_BT).swapaxes(1, 2)


OTHERS = {
    "cudnn": cudnn,
    "cudnn packed": cudnn_packed,
    "JAX's splash": jax_splash,
    "plain XLA": packed.packed_attention,
}


def kernels_of(work: Work) -> Kernels:
    """Gives the kernels that are measured."""
    return kernels_for(work.kernels, "cpu" if FLAGS.small else work.kernels)


def off(ours, theirs) -> float:
    """Returns the norm of the difference of two trees of arrays, over the second's."""
    ours, theirs = (
        np.concatenate([np.ravel(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(of)])
        for of in jax.device_get((ours, theirs))
    )
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def random_arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Draws normal numbers in bfloat16, the same ones each time."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(*it, jnp.bfloat16) for it in zip(keys, shapes, strict=True)]


def agree_pages(work: Work, N: int, K: int, H: int) -> str:
    """Compares attention to pages, and what is written and copied there, with plain XLA's."""
    kernels, B, C, I, J = kernels_of(work), work.slots, PAGE, 2, 3
    tiles = (K, H, C), (K, C, H)
    *pools, q_BNH, k_BKHS, v_BKSH = random_arrays(
        *[(1 + count * B, *tile) for count in (I, J) for tile in tiles],
        *[(B, N, H), (B, K, H, BLOCK), (B, K, BLOCK, H)],
    )
    prompt_pool, pool, recent = pools[:2], pools[2:], (k_BKHS, v_BKSH)
    rng = np.random.default_rng(0)
    page_BI, page_BJ = ((1 + rng.permutation(B * n)).reshape(B, n).astype(np.int32) for n in (I, J))
    prompt_B, recent_B = (rng.integers(1, 1 + most, B, np.int32) for most in (I * C, BLOCK))
    response_B = BLOCK * rng.integers(0, J * C // BLOCK, B, np.int32)
    open_B = page_BJ[np.arange(B), response_B // C]
    table = xla.PageTable(page_BI, page_BJ, prompt_B, response_B, np.arange(B, dtype=np.int32))

    def ours(q_BNH, recent, prompt_pool, pool):
        page_BX = xla.page_order(table, page_tokens=C)
        how = page_BX, prompt_B, response_B
        return kernels.attend_pages(q_BNH, recent, recent_B, prompt_pool, pool, *how)

    def plain(q_BNH, recent, prompt_pool, pool):
        whole = (I + J) * C + BLOCK + 1  # a window that sees all
        opened = [
            jnp.concatenate([array_P[open_B], block], axis=axis)
            for array_P, block, axis in zip(pool, recent, (3, 2), strict=True)
        ]
        attend = xla.near_attention(prompt_pool, pool, table, block_tokens=BLOCK, window=whole)
        return attend(q_BNH, opened, recent_B)

    attended = [jax.jit(run)(q_BNH, recent, prompt_pool, pool) for run in (ours, plain)]
    offset_B = response_B % C

    def same(run, plainly, *given) -> str:
        is_same = off(jax.jit(run)(*given), jax.jit(plainly)(*given)) == 0
        return f"{'as by' if is_same else 'DIFFER FROM'} plain XLA"

    to, of = page_BJ[:, 0], (pool, prompt_pool, page_BJ[:, 1], page_BI[:, 0])
    written = same(kernels.write_pages, xla.write_pages, *pool, *recent, to, offset_B)
    done = f"written {written} and copied {same(kernels.copy_pages, xla.copy_pages, *of)}"
    return f"attention is {off(*attended):.1e} from plain XLA's; pages are {done}"


def agree_rows(work: Work, *heads: int) -> str:
    """Compares attention in packed rows of three segments, and gradients, with plain XLA's."""
    results = []
    for name in ("ours", "plain XLA"):
        forward, gradient, qkv, _ = attention_programs(work, (work.agree, *heads), 3, name)
        results.append((forward(*qkv), *gradient(*qkv)))
    each = (f"{name} {off(*of):.1e}" for name, *of in zip(("out", *"qkv"), *results, strict=True))
    return f"{', '.join(each)} from plain XLA's"


def agree_step(work: Work, preset: str, dtype: str) -> str:
    """Takes a step twice by the kernels, and its update by plain XLA."""
    r = {"num_prompts": 4, "group_size": 4, "max_prompt_tokens": PROMPT}
    r |= {"max_response_tokens": 64, "slot_tokens": 64, "page_tokens": 64}
    settings = {f"rollout__{name}": value for name, value in r.items()} | {"updates_per_step": 1}
    settings |= {"learner__row_tokens": 256, "learner__micro_batch_rows": 2}
    settings |= {"model__compute_dtype": dtype, "requests": 16, "devices": jax.devices()[:1]}
    built, plain = (
        common.programs(preset, model__kernels=kernels, **settings)
        for kernels in (work.kernels, "xla")
    )
    prompts, advantage_PG = common.random_prompts(built, 4, PROMPT), np.ones((4, 4), np.float32)
    advantage_PG[:, ::2] *= -1

    def step(programs, groups=None):
        state = programs.start_state()
        weights = programs.reshard(state.params, None)
        groups = groups or common.sample(programs, weights, prompts, [[64] * 4] * 4)[0]
        batch = minibatch(groups, advantage_PG, programs.settings, programs.mesh)
        state, metrics = programs.compile_learner()["update"](state, None, batch, np.float32(1e-6))
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
    moments, gap = off(state.opt_state, plain_state.opt_state), float(metrics["ratio_gap"])
    said = f"{gap:.1e}" if gap else "0, the sampler's log-probabilities are the learner's"
    return (
        f"ratio gap {said}; moments are {moments:.1e} from plain XLA's; "
        f"a second step {'has the same bits' if same else 'DIFFERS'}"
    )


def attention(work: Work, sizes: tuple[int, int, int, int], segments: int, name: str) -> str:
    """Times a way of attention, forward and with the backward pass, and compares it with `ours`."""
    _, N, _, H = sizes
    best = functools.partial(common.best_seconds, repeats=work.repeats)
    forward, gradient, qkv, segment_BT = attention_programs(work, sizes, segments, name)
    seconds = [best(lambda run=run: run(*qkv)) for run in (forward, gradient)]
    pairs = N * sum(n * (n + 1) / 2 for n in np.bincount(segment_BT[0]))
    rates = [flop * pairs * H / s / 1e12 for flop, s in zip((4, 14), seconds, strict=True)]
    text = "; ".join(
        f"{what} {1e3 * s:.2f} ms, {rate:.0f} TFLOP/s"
        for what, s, rate in zip(("forward", "with backward"), seconds, rates, strict=True)
    )
    if name == "ours":
        return text
    _, ours, *_ = attention_programs(work, sizes, segments, "ours")
    return f"{text}; d_q differs by {off(ours(*qkv)[0], gradient(*qkv)[0]):.1e}"


def attention_programs(work: Work, sizes: tuple[int, int, int, int], segments: int, name: str):
    """Makes (forward, gradient, their random arguments, the segments) of a way of attention."""
    T, N, K, H = sizes
    attend = kernels_of(work).attend_rows if name == "ours" else OTHERS[name]
    qkv = random_arrays(*((1, T, heads, H) for heads in (N, K, K)))
    segment_BT = (1 + np.arange(T) * segments // T)[None].astype(np.int32)

    def forward(q, k, v):
        return attend(q, k, v, segment_BT, np.ones_like(segment_BT))

    def loss(*qkv):
        return jnp.sum(forward(*qkv).astype(jnp.float32) ** 2)

    return jax.jit(forward), jax.jit(jax.grad(loss, argnums=(0, 1, 2))), qkv, segment_BT


def update(work: Work, preset: str, row_tokens: int) -> str:
    """Times an update of full rows, layers recomputed, one response a row."""
    devices = jax.devices()[: work.devices]
    rows = MICRO_BATCHES * len(devices)
    built = common.programs(
        preset,
        devices=devices,
        updates_per_step=1,
        model__compute_dtype="bfloat16",
        model__kernels=work.kernels,
        rollout__num_prompts=rows,
        rollout__group_size=1,
        learner__row_tokens=row_tokens,
        learner__micro_batch_rows=len(devices),
    )
    program, state = built.compile_learner()["update"], built.start_state()
    rng = np.random.default_rng(0)
    vocab, tokens = built.sizes.vocab_size, row_tokens - PROMPT + 1
    uniform_T = np.full(tokens, -np.log(vocab), np.float32)

    def response() -> Response:
        return Response(rng.integers(1, vocab, tokens).astype(np.int32), uniform_T, Status.CUT)

    prompts = common.random_prompts(built, rows, PROMPT)
    groups = [Group(i, Prompt(prompt), (response(),)) for i, prompt in enumerate(prompts)]
    advantage_PG = rng.normal(size=(rows, 1)).astype(np.float32)
    batch = minibatch(groups, advantage_PG, built.settings, built.mesh)

    def one_update():
        nonlocal state
        state, metrics = program(state, None, batch, np.float32(1e-6))
        return metrics

    seconds = common.best_seconds(one_update, repeats=work.repeats)
    of_model = Device(chip(work), PRESETS[preset])
    floor = of_model.update_seconds(rows * row_tokens, [row_tokens] * rows, len(devices))
    share = f"its products have {floor / seconds:.0%} of the chip's rate"
    return f"{seconds:.3f} s, the floor is {floor:.3g} s: {share}; {memory()}"


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
    abstract = built.engine.params
    engine = Engine(PRESETS[preset], built.mesh, cache, params=abstract, kernels=kernels_of(work))
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
        pages, token_SB, *_ = engine.decode(
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
    limit = memory_stats().get("bytes_limit")
    if limit is None:
        return work.slots
    c = PRESETS[preset]
    head = c.vocab_size * c.width if c.tie_embeddings else 0  # an array of its own
    left = limit - SPARE_BYTES - 2 * (count_parameters(abstract_params(c)[1]) + head)
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
    """Takes the rollout and the updates of a step of the config, once each."""
    devices = jax.devices()[: work.devices]
    config = compiling.without_weights(work.config.get_config())
    config.model.preset, config.model.kernels, r = preset, work.kernels, config.rollout
    r.num_prompts = work.prompts * len(devices)
    r.generation_prompts, r.max_prompt_tokens = 2 * r.num_prompts, 2 * PROMPT
    r.max_response_tokens = work.max_tokens
    r.slot_tokens = r.cache_mib = config.learner.row_tokens = config.learner.micro_batch_rows = 0
    config.eval.every_steps = 0
    auto_sizes.fit_training(config, devices=devices)
    built = components.programs(config, PRESETS[preset].vocab_size, devices=devices)
    sampling = common.stream(built).sampling
    compiled = compiling.compiled_programs(built)
    del compiled["reshard"]  # weights are there before a step is timed
    phases = memory_phases(built, compiled).items()
    predicted = {name: sum(parts.values()) / 1e9 for name, parts in phases}

    how = {"groups": r.generation_prompts, "group_size": r.group_size, "seed": 0}
    length_PG = response_lengths(work.max_tokens / 4, longest=work.max_tokens, **how)
    program, state = built.compile_learner()["update"], built.start_state()
    weights = built.reshard(state.params, None)
    built.engine.compile(sampling)
    prompts = common.random_prompts(built, r.generation_prompts, r.max_prompt_tokens)
    groups, _, sampling_s = common.sample(built, weights, prompts, length_PG.tolist())
    del weights
    per_update, start = r.num_prompts // config.updates_per_step, time.perf_counter()
    for first in range(0, r.num_prompts, per_update):
        chosen = groups[first : first + per_update]
        advantage_PG = np.random.default_rng(first).normal(size=(len(chosen), r.group_size))
        batch = minibatch(chosen, advantage_PG.astype(np.float32), built.settings, built.mesh)
        state, metrics = program(state, None, batch, np.float32(1e-6))
    gap, updates_s = float(metrics["ratio_gap"]), time.perf_counter() - start
    config.model.kernels = "auto"  # the estimate is a TPU's
    lengths = {"mean": work.max_tokens / 4, "informative": 0.5}
    floors = estimate.step_seconds(config, chip(work), built.mesh, **lengths)
    decoding, prefills, updates, _ = floors
    said = ", ".join(f"{name} {size:.1f}" for name, size in predicted.items())
    return (
        f"sampling {length_PG.size:,} responses, {length_PG.sum():,} tokens {sampling_s:.1f} s, "
        f"the floor is {decoding + prefills:.3g} s; {config.updates_per_step} updates "
        f"{updates_s:.1f} s, the floor is {updates:.3g} s; cache {r.cache_mib:,} MiB, "
        f"{built.engine.cache.slots} slots; ratio gap {gap:.3f}; {memory()}; predicted: {said}"
    )


@functools.cache
def measured_chip(work: Work) -> Chip:
    """Measures the first device by a large copy (read and written) and a large product."""
    array = jnp.ones((work.copy_mib * 2**9, 1_024), jnp.bfloat16)  # whole tiles of a TPU
    square = jnp.ones((work.product, work.product), jnp.bfloat16)
    copy, multiply = jax.jit(lambda a: a + 1), jax.jit(lambda a: a @ a)
    copied = common.best_seconds(lambda: copy(array), repeats=10)
    multiplied = common.best_seconds(lambda: multiply(square), repeats=10)
    return Chip("measured", 0.0, 2 * array.nbytes / copied, 2 * work.product**3 / multiplied)


def chip(work: Work) -> Chip:
    """The first device with its published rates; measured where there are none here."""
    published = PUBLISHED.get(jax.devices()[0].device_kind)
    return CHIPS[published] if published else measured_chip(work)


def memory_stats() -> dict[str, int]:
    """Asks the first device for its memory; a CPU tells nothing."""
    return jax.local_devices()[0].memory_stats() or {}


def memory() -> str:
    """Says the most memory that was taken since the start. A TPU reserves that of temporaries."""
    taken = map(memory_stats().get, ("peak_bytes_in_use", "peak_bytes_reserved"))
    return f"peak so far {sum(size or 0 for size in taken) / 1e9:.1f} GB"


def rates(work: Work) -> str:
    """Says what a copy and a product reach, beside what is published."""
    measured, published = measured_chip(work), chip(work)
    hbm, flop = measured.hbm_rate / published.hbm_rate, measured.flop_rate / published.flop_rate
    return (
        f"{measured.hbm_rate / 1e9:,.0f} GB/s, {hbm:.0%} of the floor's; "
        f"{measured.flop_rate / 1e12:,.2f} TFLOP/s, {flop:.0%}"
    )


def rows_of(work: Work) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields each row's name, and what measures it."""
    yield "rates of a copy and of a product", functools.partial(rates, work)
    for heads in dict.fromkeys(sizes[1:] for sizes in work.attention):
        for name, run in (("pages", agree_pages), ("rows", agree_rows)):
            text = f"agree, {name}, {heads[0]} x {heads[2]} heads"
            yield text, functools.partial(run, work, *heads)
    for preset in work.agree_steps:
        for dtype in ("float32", "bfloat16"):
            text = f"agree, a step of {preset}, {dtype}"
            yield text, functools.partial(agree_step, work, preset, dtype)
    for preset in work.steps:
        yield f"step, {preset}", functools.partial(step, work, preset)
    for kind, works in ((update, work.updates), (decode, work.decodes)):
        for preset, tokens in works:
            name = f"{kind.__name__}, {preset}, {tokens:,} tokens"
            yield name, functools.partial(kind, work, preset, tokens)
    for sizes in work.attention:
        for segments in work.segments:
            for name in work.methods:
                if (name == "cudnn" and segments > 1) or (name == "plain XLA" and sizes[0] > 8_192):
                    continue
                heads = f"{sizes[1]} x {sizes[3]} heads, {sizes[0]:,} tokens, {segments} segments"
                run = functools.partial(attention, work, sizes, segments, name)
                yield f"attention, {name}, {heads}", run


def main(_):
    kind = FLAGS.small or platform_of(make_mesh(data=-1, model=1))
    works = SMALL if FLAGS.small else REAL
    if kind not in works:
        sys.exit(f"this measures a GPU or a TPU, and JAX finds a {kind}: give --small=tpu")
    compile_cache.enable()  # what tells a program's memory has compiled it
    print("\n".join([common.origin(), "", *table(["row", "result", "took, s"], [])]), flush=True)
    mistakes = 0
    for name, run in rows_of(works[kind]):
        if not re.search(FLAGS.rows, name):
            continue
        start = time.perf_counter()
        try:
            found = run()
        except Exception as error:  # of a kernel, a compiler, a device: none may cost other rows
            found = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if not isinstance(error, RuntimeError | MemoryError):
                traceback.print_exc()
                mistakes += 1
        print(f"| {name} | {found} | {time.perf_counter() - start:.0f} |", flush=True)
    if kind == "tpu":
        print("Please send all lines above as an issue to the project: no TPU had run it before.")
    if mistakes:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
