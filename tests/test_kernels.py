"""The table of kernels: what each platform gets, what is refused, and the pod's whole path."""

import jax
import numpy as np
import pytest
from runs import responses, rows_without_timings

from configs import tiny
from dapo_jax import train
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.setup import components
from models.kernels import (
    KERNELS,
    flash_gpu,
    kernels_for,
    paged_gpu,
    paged_tpu,
    platform_of,
    splash_tpu,
)
from models.qwen2 import PRESETS, Qwen2Config
from sharding.mesh import make_mesh
from tests.quick import jit


@pytest.mark.parametrize(
    ("name", "platform", "row"),
    [
        *(("auto", name, name) for name in ("cpu", "gpu", "tpu")),
        ("auto", "another", "xla"),
        *(("xla", name, "xla") for name in ("gpu", "another")),
        *((name, "cpu", name) for name in ("tpu_interpret", "gpu_interpret")),
    ],
)
def test_a_name_is_taken_where_the_platform_can_run_it(name, platform, row):
    assert kernels_for(name, platform) is KERNELS[row]
    assert platform_of(make_mesh(data=-1, model=1)) == "cpu"


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


@pytest.mark.parametrize(
    ("name", "platform", "message"),
    [
        ("tpuv5", "cpu", "'tpuv5' is unknown; choose one of auto, cpu, gpu, gpu_interpret, tpu, "),
        ("tpu", "cpu", "only, .* are cpu; .* auto, cpu, gpu_interpret, tpu_interpret, xla$"),
        ("tpu_interpret", "tpu", "runs on cpu only, .* are tpu; .* auto, tpu, xla$"),
    ],
)
def test_other_names_and_other_platforms_are_refused(name, platform, message):
    with pytest.raises(ValueError, match=message):
        kernels_for(name, platform)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_platforms_row_is_compiled_and_the_other_one_interpreted(platform):
    """A GPU's kernels, interpreted on that GPU, would give the same tokens and take hours."""
    for name, interpret in ((platform, False), (f"{platform}_interpret", True)):
        kernels = KERNELS[name]
        for kernel in (kernels.attend_rows, kernels.attend_pages):
            assert kernel.keywords == {"interpret": interpret}


def flat(params):
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def small_config(kernels):
    """Two steps of a small random model, whose responses end at digits: rewards are of lengths."""
    config = tiny.get_config()
    config.model.kernels = kernels
    config.tokenizer.path, config.tokenizer.stop_tokens = config.model.path, tuple("0123456789")
    config.model.path, config.model.preset = "", "small"
    config.num_steps, config.updates_per_step = 2, 1
    config.data.train.count = 200
    config.rollout.num_prompts, config.rollout.group_size = 2, 4
    config.rollout.generation_prompts = 4
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 33, 40
    config.rollout.cache_mib = 1
    config.algo.dynamic_sampling = False
    config.algo.overlong_cache_tokens = 40
    config.learner.row_tokens, config.learner.micro_batch_rows = 160, 2
    config.mesh.data, config.mesh.model = 2, 2
    config.eval.every_steps = 0
    config.checkpoint.every_steps, config.checkpoint.keep = 1, 2
    return config


# What tells how full the cache is, of which plain XLA has less: a part is for copies of pages.
OF_THE_CACHE = ("engine/occupancy", "engine/cache_use")
OF_BITS = "digest/"


class Noted(dict):
    """A table that tells when it is read."""

    def __init__(self, table, note):
        super().__init__(table)
        self.note = note

    def __getitem__(self, key):
        self.note()
        return super().__getitem__(key)


@pytest.fixture(scope="module")
def traced():
    """The kernels that were traced; they have several blocks, of pages and of a row's tokens."""
    traced, make_splash = set(), splash_tpu.make_splash_mha_single_device

    def one_page(what):
        traced.add(what)
        return 1

    def splash(*args, **options):
        traced.add("splash")
        return make_splash(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_tpu, "pages_per_block", lambda v_PKCH: one_page("blocks"))
        patch.setattr(paged_gpu, "pages_per_split", lambda page_tokens: one_page("splits"))
        patch.setattr(splash_tpu, "make_splash_mha_single_device", splash)
        patch.setattr(splash_tpu, "BLOCK_TOKENS", 128)
        patch.setattr(flash_gpu, "TILES", Noted(flash_gpu.TILES, lambda: traced.add("flash")))
        patch.setitem(PRESETS, "small", Qwen2Config(384, 64, 128, 2, 4, 2, 16, True))
        patch.setattr(jax, "jit", jit)
        yield traced


def trained(kernels, workdir):
    """Trains: (workdir, programs, how the second step changed the parameters)."""
    train.train(small_config(kernels), workdir)
    programs = components.programs(small_config(kernels), vocab_size=384)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=None)
    params = [checkpoints.restore(step, programs.state)[0].params for step in (1, 2)]
    checkpoints.close()
    change = jax.tree.map(lambda before, after: np.asarray(after) - before, *params)
    return workdir, programs, change


@pytest.fixture(scope="module")
def plain(traced, tmp_path_factory):
    found = trained("xla", tmp_path_factory.mktemp("runs") / "plain")
    assert not traced
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interpreted", "used"),
    [("tpu_interpret", {"blocks", "splash"}), ("gpu_interpret", {"splits", "flash"})],
)
def test_an_accelerators_kernels_train_as_plain_xla_does(
    traced, plain, tmp_path, interpreted, used
):
    """Two whole steps with its programs, interpreted: the same tokens, the rest to rounding."""
    traced.clear()
    (ours, programs, change), (expected_run, _, expected_change) = (
        trained(interpreted, tmp_path / "run"),
        plain,
    )
    assert traced == used
    assert len(programs.engine.sizes) == 2
    assert programs.learning.kernels.shares_prompts == ("splash" not in used)
    for step in range(2):
        assert responses(ours, step) == responses(expected_run, step)
    for row, expected in zip(*map(rows_without_timings, (ours, expected_run)), strict=True):
        found, wanted = (
            {k: v for k, v in r.items() if not k.startswith((*OF_THE_CACHE, OF_BITS))}
            for r in (row, expected)
        )
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert row["grad_norm"] > 0.1
    for name, delta in flat(change).items():
        # Softmax does not see a key's bias: Adam makes its step of a gradient that is rounding.
        rounding = 1e-2 if "k_bias" in name else 1e-4
        np.testing.assert_array_less(
            np.linalg.norm(delta - flat(expected_change)[name]),
            rounding * np.linalg.norm(delta) + 1e-9,
            err_msg=name,
        )
