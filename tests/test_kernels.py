"""The table of kernels: what each platform gets, and that each equals its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_kernels import HEADS, PLUGIN, ROOT, an_h100, pages, rows
from engines import by_request, programs, step
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import (
    MANY,
    ODD,
    SHORT,
    a_slot_depends_on_itself_alone,
    arrays,
    branches,
    by_definition,
    make_pages,
    matches_the_definition,
    positions,
    seen,
    sees_a_window,
    value_and_gradient,
)
from processes import ran
from quick import jit

from dapo_jax.preflight.compile import LIBTPU
from models import gemma3
from models.kernels import (
    KERNELS,
    flash_gpu,
    kernels_for,
    packed,
    paged_gpu,
    paged_tpu,
    platform_of,
    splash_tpu,
    triton,
    xla,
)
from models.precision import Weights
from models.qwen2 import PRESETS, Qwen2Config
from models.transformer import REMAT, abstract_params
from sharding.mesh import make_mesh

BLOCK = 128  # of the TPU's attention in rows
ROWS = {
    "packed": packed.packed_attention,
    "flash": functools.partial(flash_gpu.flash_attention, interpret=True),
    "splash": functools.partial(splash_tpu.splash_attention, interpret=True),
}


@pytest.fixture
def small(monkeypatch):
    """Small blocks, splits, tiles and grid steps, so that small cases have several of each."""
    monkeypatch.setattr(packed, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(packed, "BLOCKS", 5)  # computed together, at last fewer
    monkeypatch.setattr(splash_tpu, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(paged_gpu, "pages_per_split", lambda page_tokens: 2)
    monkeypatch.setattr(paged_gpu, "TILE_TOKENS", 32)
    monkeypatch.setattr(paged_tpu, "pages_per_block", lambda v_PKCH: 2)
    monkeypatch.setattr(paged_tpu, "SLOTS", 8)


# The table.


@pytest.mark.parametrize(
    ("name", "platform", "row"),
    [
        *(("auto", name, name) for name in ("cpu", "gpu", "tpu")),
        ("auto", "another", "xla"),
        *(("xla", name, "xla") for name in ("gpu", "another")),
        *((name, "cpu", name) for name in ("tpu_interpret", "gpu_interpret")),
        ("tpuv5", "cpu", "'tpuv5' is unknown; choose one of auto, cpu, gpu, gpu_interpret, tpu, "),
        ("tpu", "cpu", "only, .* are cpu; .* auto, cpu, gpu_interpret, tpu_interpret, xla$"),
        ("tpu_interpret", "tpu", "runs on cpu only, .* are tpu; .* auto, tpu, xla$"),
    ],
)
def test_a_name_is_taken_where_the_platform_can_run_it(name, platform, row):
    if row in KERNELS:
        assert kernels_for(name, platform) is KERNELS[row]
        return
    with pytest.raises(ValueError, match=row):
        kernels_for(name, platform)


@pytest.mark.parametrize(
    ("name", "head_size", "pages"),
    [
        ("gpu", 64, {8: 16, 32: 32, 48: 64, 96: 128, 128: 128}),
        ("tpu", 64, {8: 128, 32: 128, 48: 128, 128: 128, 129: 256}),
        *(("tpu", 128, {32: 32, 48: 48}), ("cpu", 64, {8: 8, 48: 48})),
        *(("gpu_interpret", 64, {8: 8, 48: 48}), ("tpu_interpret", 64, {8: 8, 48: 48})),
    ],
)
def test_pages_are_as_large_as_the_kernels_need(name, head_size, pages):
    """A config's pages of 48 tokens were refused on a GPU, of 32 beside heads of 64 on a TPU."""
    assert {C: KERNELS[name].page_tokens(C, head_size) for C in pages} == pages


def test_a_platforms_row_is_compiled_and_the_other_one_interpreted():
    """A GPU's kernels, interpreted on that GPU, would give the same tokens and take hours."""
    assert platform_of(make_mesh(data=-1, model=1)) == "cpu"
    for platform in ("gpu", "tpu"):
        for name, interpret in ((platform, False), (f"{platform}_interpret", True)):
            kernels = KERNELS[name]
            for kernel in (kernels.attend_rows, kernels.attend_pages):
                assert kernel.keywords == {"interpret": interpret}


# Attention in packed rows.


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kernel", "segment_BT", "branch_BT", "head_dim", "window"),
    [
        *(("packed", *SHORT[name], 8, window) for name in SHORT for window in (None, 6)),
        ("packed", *SHORT["shared prompts"], 8, 1),
        *(("flash", it, branches(it), dim, None) for it, dim in ((ODD, 128), (MANY, 64))),
        *(("flash", it, branches(it), dim, w) for it, dim, w in ((ODD, 16, 1), (MANY, 64, 70))),
        *(("splash", it, None, dim, w) for it, dim, w in ((ODD, 64, None), (MANY, 128, 129))),
        ("splash", MANY, None, 128, None),
    ],
)
def test_attention_in_rows_equals_the_definition(
    kernel, segment_BT, branch_BT, head_dim, window, monkeypatch
):
    """Segments end on borders of blocks and elsewhere; padding fills whole rows, too.

    A window is counted by position: a response of a prompt stands behind others of it.
    """
    monkeypatch.setattr(splash_tpu, "cores", lambda interpret: 1 + (head_dim == 64))
    given = arrays(segment_BT, head_dim=head_dim), segment_BT, branch_BT, window
    value, gradients, out_BTNH = value_and_gradient(ROWS[kernel], *given)
    expected, expected_gradients, expected_BTNH = value_and_gradient(by_definition, *given)
    used_BT = segment_BT > 0
    exact = 1e-5 if kernel == "packed" else 5e-5
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out_BTNH[used_BT], expected_BTNH[used_BT], atol=exact / 5)
    assert np.isfinite(out_BTNH).all() and (kernel == "splash" or not out_BTNH[~used_BT].any())
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert np.abs(want).max() > 0.01 or window == 1  # where the weight of a key is 1
        np.testing.assert_allclose(got, want, atol=exact)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kernel", ["flash", "splash"])
def test_blocks_without_its_segment_are_not_even_read(kernel):
    """NaNs of other segments reach no block that does not visit them, masked or not."""
    segment_1T = MANY[:1]
    its_1T = segment_1T == 2
    given = arrays(segment_1T)
    broken = [np.where(its_1T[..., None, None], array, np.nan) for array in given]
    (_, found, out), (_, expected, expected_out) = (
        value_and_gradient(ROWS[kernel], it, segment_1T, counts_BT=its_1T) for it in (broken, given)
    )
    for got, want in zip((out, *found), (expected_out, *expected), strict=True):
        np.testing.assert_array_equal(got[its_1T], want[its_1T])


@pytest.mark.parametrize("tile", [(32, 16), (16, 64)])
@pytest.mark.parametrize(("branched", "window"), [(False, None), (True, None), (True, 100)])
def test_a_gpu_visits_what_is_seen_once_and_without_a_mask_what_is_seen_whole(
    tile, branched, window
):
    """Tells from all pairs of tokens; tiles between a prompt and a branch are not visited.

    With a window some are that nobody sees, where a tile holds tokens of two sequences.
    """
    segment_BT = np.pad(MANY, ((0, 0), (0, -MANY.shape[1] % 64)))
    branch_BT = branches(segment_BT) if branched else np.zeros_like(segment_BT)
    (B, T), (Q, S) = segment_BT.shape, tile
    position_BT = positions(segment_BT, branch_BT)
    seen_BTT = seen(segment_BT, branch_BT, position_BT, window)
    seen_BIQJS = seen_BTT.reshape(B, T // Q, Q, T // S, S)
    until_BT = flash_gpu._until(segment_BT, branch_BT)
    for axes, of_keys in (((0, 1, 3, 2, 4), False), ((0, 3, 1, 2, 4), True)):
        pairs_BIJQS = seen_BIQJS.transpose(axes)
        visits_BIJ, whole_BIJ = np.zeros((2, *pairs_BIJQS.shape[:3]), int)
        how = {"window": window, "of_keys": of_keys}
        bounds_BIX = np.array(flash_gpu._ranges(until_BT, position_BT, tile, **how))
        for b, i in np.ndindex(bounds_BIX.shape[:2]):
            for begin, whole, rest, end in bounds_BIX[b, i].reshape(-1, 4):
                visits_BIJ[b, i, begin:end] += 1
                whole_BIJ[b, i, whole:rest] += 1
        needed_BIJ, all_BIJ = pairs_BIJQS.any(axis=(3, 4)), pairs_BIJQS.all(axis=(3, 4))
        assert np.all(visits_BIJ[needed_BIJ] == 1)
        most = 1.2 if window is None else 2
        assert visits_BIJ.max() == 1 and visits_BIJ.sum() < most * needed_BIJ.sum()
        if window is None:
            np.testing.assert_array_equal(whole_BIJ, all_BIJ)
        assert whole_BIJ.any() and np.all(all_BIJ[whole_BIJ > 0])


@pytest.mark.parametrize("window", [None, 1, 2, 129, 130, 500])
def test_a_tpu_visits_the_blocks_with_pairs_of_a_segment(window):
    """By the pairs themselves; the diagonal is for padding. A number stands for no order."""
    ends_BS = np.sort(np.random.default_rng(0).integers(1, 1024, (8, 4)), axis=1)
    segment_BT = (np.sum(np.arange(1024) >= ends_BS[..., None], axis=1) + 1) % 5  # 0: padding
    place_BT = np.tile(np.arange(1024), (8, 1))
    pairs_BTT = seen(segment_BT, 0 * segment_BT, place_BT, window) | np.eye(1024, dtype=bool)
    expected_BIJ = pairs_BTT.reshape(8, 8, BLOCK, 8, BLOCK).any(axis=(2, 4))
    for numbers in ([0, 1, 2, 3, 4], [0, 5, 2, 9, 1]):
        found_BIJ = splash_tpu.visited_blocks(np.array(numbers)[segment_BT], BLOCK, window)
        np.testing.assert_array_equal(found_BIJ, expected_BIJ)


def test_a_cpu_visits_no_block_of_which_nothing_is_seen(monkeypatch):
    """In a row of short sequences in proportion to the row; with Gemma's windows 3/8 of all.

    A window of 512 visits 9 blocks of 64 tokens for one of queries, its own included.
    """

    def counts(segment_BT, block, branch=0, **how):
        monkeypatch.setattr(packed, "BLOCK_TOKENS", block)
        numbers = segment_BT, np.full_like(segment_BT, branch), positions(segment_BT, segment_BT)
        return jit(lambda *rows: packed._pairs(*rows, **how).count_Q)(*numbers)

    for length in (64, 256):
        segment_BT = np.repeat(np.arange(1, length // 8 + 1), 8)[None]
        assert counts(segment_BT, 8).tolist() == [1] * (length // 8)
    one_BT = np.ones((1, 4_096), np.int32)
    assert counts(one_BT[:, :64], 8, branch=1).tolist() == list(range(1, 9))
    visits = {w: int(counts(one_BT, 64, branch=1, window=w).sum()) for w in (None, 512)}
    assert visits == {None: 64 * 65 // 2, 512: sum(min(i + 1, 9) for i in range(64))}
    of_layers = [visits[kind.window] for kind in gemma3.PRESETS["1b"].kinds]
    assert sum(of_layers) <= 0.4 * len(of_layers) * visits[None]


@pytest.mark.parametrize("few", [0, flash_gpu.FEW])
def test_bfloat16_is_as_near_to_float32_on_a_gpu_as_plain_attention_is(few, monkeypatch):
    """Gradients of a key are summed over its query heads in float32, in a program or behind it."""
    monkeypatch.setattr(flash_gpu, "FEW", few)
    given = arrays(ODD, heads=(14, 2, 2), head_dim=64)
    rounded = [jnp.asarray(array, jnp.bfloat16) for array in given]
    exact = value_and_gradient(ROWS["packed"], given, ODD)[1]
    ours, plain = (
        [
            np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
            for got, want in zip(value_and_gradient(attend, rounded, ODD)[1], exact, strict=True)
        ]
        for attend in (ROWS["flash"], ROWS["packed"])
    )
    assert np.all(np.array(ours) < 1.2 * np.array(plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_kept_for_the_backward_pass_is_not_computed_a_second_time(dtype):
    """Six of a layer's 7 products are needed again, and attention's 2 in a loop.

    In bfloat16 a product has a gradient of its own (models.precision), and a policy that looks for
    products did not see it: keep_products kept nothing.
    """
    segment_BT, branch_BT = SHORT["shared prompts"]
    graph, params = abstract_params(Qwen2Config(16, 32, 16, 1, 4, 2, 8, True))

    def computed(remat):
        def scalar(params):
            attend = lambda *qkv, window: packed.packed_attention(*qkv, segment_BT, branch_BT)  # noqa: E731
            how = {"remat": remat, "weights": Weights(dtype=dtype)}
            x_BTD, _ = nnx.merge(graph, params).hidden(segment_BT, branch_BT, attend, **how)
            return jnp.sum(jnp.sin(x_BTD))

        text = str(jax.make_jaxpr(jax.grad(scalar))(params))
        return np.array([text.count(f" {name}[") for name in ("dot_general", "while")])

    again = {remat: tuple((computed(remat) - computed("none")).tolist()) for remat in REMAT}
    kept = {"none": (0, 0), "keep_products": (0, 0), "keep_attention": (6, 0)}
    assert again == kept | {"full": (8, 1), "offload": (8, 1)}


# Attention over pages.


def near_pages(q_BNH, recent, recent_tokens_B, *given, window):
    """Attends as the kernels do, by plain XLA; what is dead in its pages has to be finite."""
    prompt_pool, pool, page_BX, prompt_tokens_B, tokens_B = given
    filled_B1 = -(-prompt_tokens_B // pool[1].shape[2])[:, None]
    place_BX = jnp.minimum(filled_B1 + jnp.arange(page_BX.shape[1]), page_BX.shape[1] - 1)
    response_BX = jnp.take_along_axis(page_BX, place_BX, axis=1)
    table = xla.PageTable(page_BX, response_BX, prompt_tokens_B, tokens_B, None)
    pools = ([jnp.nan_to_num(a, nan=9.0) for a in pool] for pool in (prompt_pool, pool))
    return xla.near_attention(*pools, table, window=window)(q_BNH, recent, recent_tokens_B)


TINY = {"head_dim": 16, "page_tokens": 16}
HALF = {"dtype": jnp.bfloat16}
PAGES = {
    "xla": (near_pages, {"heads": 6, "kv_heads": 2, **TINY}),
    "gpu, groups of 5": (paged_gpu, {"heads": 10, "kv_heads": 2, **TINY}),
    "gpu, more heads than rows": (paged_gpu, {"heads": 20, "kv_heads": 1, **TINY}),
    "gpu, half precision": (paged_gpu, {"heads": 7, "kv_heads": 1, **HALF, **TINY}),
    "gpu, 0.5B": (
        *(paged_gpu, {"heads": 14, "kv_heads": 2, "head_dim": 64, "page_tokens": 32, **HALF}),
    ),
    "tpu, grouped": (paged_tpu, {"heads": 6, "kv_heads": 2, **TINY}),
    "tpu, one key head": (
        *(paged_tpu, {"heads": 5, "kv_heads": 1, "head_dim": 128, "page_tokens": 64, **HALF}),
    ),
    # The head is small and the page is not: on TPU its tokens are stored last.
    "tpu, tokens last": (
        *(paged_tpu, {"heads": 14, "kv_heads": 2, "head_dim": 64, "page_tokens": 128, **HALF}),
    ),
}
WINDOWED = ("xla", "gpu, groups of 5", "gpu, half precision", "tpu, grouped", "tpu, tokens last")


def case(name, **how):
    kernel, sizes = PAGES[name]
    if name != "xla":
        kernel = functools.partial(kernel.paged_attention, **{"interpret": True} | how)
    return make_pages(jit(kernel, static_argnames="window"), **sizes)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [name for name in PAGES if name != "xla"])
def test_attention_over_pages_equals_the_definition(name):
    matches_the_definition(case(name))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_over_pages_is_seen_and_no_page_before_it_read(name):
    """Windows have one token, end in a page, have a whole page, or two and one more token."""
    for window in (1, 7, 16, 33) if name in ("xla", "gpu, groups of 5") else (16, 33):
        sees_a_window(case(name), window)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", WINDOWED[1:])
def test_a_slot_depends_on_itself_alone(name):
    a_slot_depends_on_itself_alone(case(name))


def test_a_gpu_refuses_sizes_that_are_no_powers_of_two():
    """The interpreter takes other sizes of pages."""
    for C in (8, 48):
        sizes = {"heads": 2, "kv_heads": 2, "head_dim": 16, "page_tokens": C}
        compiled = jit(functools.partial(paged_gpu.paged_attention, interpret=False))
        with pytest.raises(ValueError, match=f"pages of {C} tokens.* powers of two"):
            make_pages(compiled, **sizes)()


@pytest.mark.usefixtures("small")
def test_a_tpus_reads_are_waited_for_and_in_bounds(capfd):
    """The simulated TPU (reads done when waited for, memory NaN before) has the same bits.

    It raises on reads past an array and reports races between reads and arithmetic.
    """
    simulated = case("tpu, grouped", interpret=pltpu.InterpretParams(detect_races=True))()
    np.testing.assert_array_equal(simulated, case("tpu, grouped")())
    assert "RACE" not in capfd.readouterr().out


def pool(pages, H, C):
    rng = np.random.default_rng(pages)
    shapes = ((pages, 2, H, C), (pages, 2, C, H))
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


@pytest.mark.parametrize("kernels", ["gpu", "tpu_interpret"])
@pytest.mark.parametrize("S", [4, 32])
def test_a_block_is_written_to_its_page_and_nowhere_else(kernels, S):
    page_B, offset_B = np.array([3, 0, 8, 0]), np.random.default_rng(0).integers(0, 32 // S, 4) * S
    before, new = pool(9, 64, 32), pool(4, 64, S)
    expected = [np.array(a) for a in before]
    for b, (page, offset) in enumerate(zip(page_B, offset_B, strict=True)):
        expected[0][page, :, :, offset : offset + S] = new[0][b]
        expected[1][page, :, offset : offset + S] = new[1][b]
    found = KERNELS[kernels].write_pages(*before, *new, page_B, offset_B)
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours[1:], wanted[1:])  # page 0 is nobody's


@pytest.mark.parametrize(("H", "C"), [(64, 128), (128, 16)])
def test_a_tpu_copies_pages_as_plain_xla_does(H, C):
    """Pages of a small pool go to places of a large one, in every layout; the rest stays."""
    large, few = pool(9, H, C), pool(4, H, C)
    where = jnp.array([7, 0, 2, 0]), jnp.array([3, 1, 0, 2])
    found, wanted = (
        KERNELS[name].copy_pages(large, few, *where) for name in ("tpu_interpret", "xla")
    )
    for ours, theirs, before, new in zip(found, wanted, large, few, strict=True):
        np.testing.assert_array_equal(ours[1:], theirs[1:])  # page 0 gets one of two
        np.testing.assert_array_equal(ours[jnp.array([7, 2])], new[jnp.array([3, 0])])
        np.testing.assert_array_equal(ours[1], before[1])


# For accelerators that are not there.


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("make", [rows, pages])
def test_what_only_a_gpu_would_round_or_overflow(make, monkeypatch, capsys):
    """Read from the programs for Triton: float32 is not rounded, and offsets have 64 bits.

    The interpreter shows neither: with `triton.dot` at the default precision, which is TF32 on a
    GPU, all other tests of this file passed. Two layers over pages have two kernels each.
    """
    printing = functools.partial(triton.pl.pallas_call, debug=True)
    monkeypatch.setattr(triton.pl, "pallas_call", printing)
    mesh = make_mesh(data=1, model=1, devices=jax.devices()[:1])
    (heads,) = (it for it in HEADS[make.__name__, "gpu"] if it[0] == 40)
    run, arguments = make(KERNELS["gpu"], heads, mesh)
    with an_h100():
        text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.split("\n") if "xla.gpu.triton" in line]
    programs = capsys.readouterr().out.split("The Triton module for pallas_call ")[1:]
    dots = [program.count("tt.dot") for program in programs]
    assert not any("tf32" in program for program in programs)
    if make is rows:
        assert dots == [4, 6, 8]
        return
    (k_PKHC, _), _ = arguments[1]
    assert k_PKHC.dtype == jnp.float32 and k_PKHC.size * k_PKHC.dtype.itemsize > 2**32
    assert len(programs) == len(calls) == 2 * 2 and all(dots)
    assert sum("xi64>" in program for program in programs) == 2  # not `combine`


def compiled(what, target, **environment):
    """(bytes of queries or of a pool, the program's own, TPU kernels, split ones) of each heads."""
    program = ROOT / "tests" / "compiled_kernels.py"
    done = ran(program, what, target, JAX_PLATFORMS="cpu", **environment)
    return [tuple(map(int, line.split()[-4:])) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not LIBTPU.exists(), reason="needs the TPU's compiler: `make preflight`")
@pytest.mark.parametrize("tpu", ["v5p:2x2x1", pytest.param("v5e:2x2", marks=pytest.mark.slow)])
def test_a_tpus_kernels_compile(tpu):
    """VMEM holds blocks of their real size, two cores share both directions of attention in rows.

    Over pages inside shard_map, a loop and several layers none of the pools is copied: the
    program's own memory is far below one pool's.
    """
    ((*_, calls, split),) = compiled("rows", tpu, PYTHONPATH=str(ROOT))
    assert (calls, split) == (2, 2 if tpu.startswith("v5p") else 1)
    lines = compiled("pages", tpu, PYTHONPATH=str(ROOT))
    assert len(lines) == len(HEADS["pages", "tpu"])
    assert all(own < size / 8 and calls >= 6 for size, own, calls, _ in lines), lines


@pytest.mark.slow
@pytest.mark.skipif(
    not PLUGIN.is_dir() or jax.__version_info__ >= (0, 11),
    reason=f"needs the GPU's compiler in {PLUGIN}, and JAX 0.10, which does not look for a GPU",
)
@pytest.mark.parametrize(("what", "most"), [("rows", 12), ("pages", 1 / 4)])
def test_a_gpus_kernels_compile(what, most):
    """Memory is linear in the row, and no pool is copied; tiles fit on the chip and in registers.

    The compiler refuses tiles that take more shared memory than the GPU has.
    """
    no_spills = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true" if what == "rows" else ""
    lines = compiled(what, "gpu", PYTHONPATH=f"{ROOT}:{PLUGIN}", XLA_FLAGS=no_spills)
    assert len(lines) == 3 * len(HEADS[what, "gpu"])
    assert all(own < most * size for size, own, *_ in lines), lines


# A whole step.


class Noted(dict):
    """A table that tells when it is read."""

    def __init__(self, table, note):
        super().__init__(table)
        self.note = note

    def __getitem__(self, key):
        self.note()
        return super().__getitem__(key)


@pytest.fixture
def traced(monkeypatch):
    """The kernels that were traced; they have several blocks, of pages and of a row's tokens."""
    traced, make_splash = set(), splash_tpu.splash.make_splash_mha_single_device

    def noted(what, give=lambda *_, **__: 1):
        return lambda *args, **how: traced.add(what) or give(*args, **how)

    monkeypatch.setattr(paged_tpu, "pages_per_block", noted("blocks"))
    monkeypatch.setattr(paged_gpu, "pages_per_split", noted("splits"))
    monkeypatch.setattr(
        splash_tpu.splash, "make_splash_mha_single_device", noted("splash", make_splash)
    )
    monkeypatch.setattr(splash_tpu, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(flash_gpu, "TILES", Noted(flash_gpu.TILES, noted("flash")))
    monkeypatch.setitem(PRESETS, "small", Qwen2Config(64, 64, 128, 2, 4, 2, 16, True))
    monkeypatch.setattr(jax, "jit", jit)
    return traced


def stepped(kernels):
    """A step of plain XLA's programs or an accelerator's: (programs, samples, changes, metrics)."""
    sizes = {"max_prompt_tokens": 17, "max_response_tokens": 20, "page_tokens": 16}
    how = {"model": {"preset": "small", "kernels": kernels}, "mesh": {"data": 2, "model": 2}}
    built = programs("qwen2", "", **how, rollout=sizes, learner={"row_tokens": 160})
    before, groups, state, metrics = step(built, cursors=(0, 7, 12, 100))
    changes = jax.tree.map(lambda after, before: np.asarray(after) - before, state.params, before)
    return built, by_request(groups), jax.tree_util.tree_leaves_with_path(changes), metrics


@pytest.mark.parametrize(
    ("kernels", "used"),
    [
        ("gpu_interpret", {"splits", "flash"}),
        pytest.param("tpu_interpret", {"blocks", "splash"}, marks=pytest.mark.slow),
    ],
)
def test_an_accelerators_kernels_sample_and_train_as_plain_xla_does(traced, kernels, used):
    """A whole step with its programs, interpreted: the same tokens, the rest to rounding."""
    _, expected, expected_changes, expected_metrics = stepped("xla")
    assert not traced
    built, responses, changes, metrics = stepped(kernels)
    assert traced == used
    assert built.learning.kernels.shares_prompts == ("splash" not in used)
    assert responses.keys() == expected.keys() and len(responses) == 16
    for request, response in responses.items():
        wanted, close = expected[request], {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_array_equal(response.tokens_T, wanted.tokens_T)
        np.testing.assert_allclose(response.behavior_logp_T, wanted.behavior_logp_T, **close)
    assert metrics["grad_norm"] > 0.01
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for (path, found), (_, wanted) in zip(changes, expected_changes, strict=True):
        # Softmax does not see a key's bias: Adam makes its step of a gradient that is rounding.
        rounding = 1e-2 if "k_bias" in str(path) else 1e-4
        error = np.linalg.norm(found - wanted)
        assert error < rounding * np.linalg.norm(found) + 1e-9, path
