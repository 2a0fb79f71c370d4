"""Numbers that are not finite: in start models, checkpoints, settings and rewards.

Whatever is injected, no saved array may be anything but finite, and no run may go on with wrong
numbers in silence: it is refused, or stops, or an alarm says what is left out.
"""

import dataclasses
import pathlib
import shutil

import jax
import numpy as np
import pytest
from conftest import FULL, cases
from safetensors.numpy import load_file, save_file
from small_config import small

from configs import base
from dapo_jax import learner, train
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.logs.files import read_rows
from dapo_jax.process import failures, hosts
from dapo_jax.sampler import cache
from dapo_jax.setup import components
from dapo_jax.tasks.arithmetic import Arithmetic

pytestmark = pytest.mark.faults
NOT_FINITE = (np.nan, np.inf, -np.inf)
WEIGHTS = "model.safetensors"
# What is allowed and absurd.
ABSURD = (
    {"learner.learning_rate": 1.0, "learner.warmup_steps": 0},
    {"learner.learning_rate": 0.05, "learner.warmup_steps": 0},
    {"learner.weight_decay": 1e38, "learner.warmup_steps": 0},
    {"rollout.temperature": 1e-36},
    {"rollout.temperature": 1e36},
    {"learner.max_grad_norm": 1e38},
    {"learner.adam_eps": 1e-37, "learner.adam_b1": 0.0, "learner.adam_b2": 0.0},
    {"algo.eps_high": 1e38, "algo.dual_clip": 1e38},
    {"algo.overlong_factor": 3e38, "rollout.max_response_tokens": 24},
    {"algo.kl_coef": 1e38},
)
SCORES = (1e300, np.inf, np.nan, 2e38)  # the first is infinite in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored(Arithmetic):
    """Arithmetic whose right answers have a score of the config's choice."""

    score: float = 0.0

    def grade_many(self, responses, example):
        verdicts = super().grade_many(responses, example)
        return [v._replace(score=self.score if v.correct else -1.0) for v in verdicts]


@pytest.fixture
def config(monkeypatch):
    """The small config: three steps, nothing evaluated."""
    monkeypatch.setattr(cache, "PARTS", ((1, 1),))  # one program for decoding
    never = {"eval.every_steps": 0, "log.samples_every_steps": 0, "log.rollouts_every_steps": 0}
    return small(num_steps=3, **never, **{"checkpoint.every_steps": 1, "checkpoint.keep": 9})


def programs(config) -> components.Programs:
    return components.programs(config, components.tokenizer(config).vocab_size)


def assert_refused(config, workdir: pathlib.Path, words: str, *, saved=()) -> None:
    """Starts a run, which is refused with these words before a row, and before another save."""
    with pytest.raises((ValueError, OSError)) as raised:
        train.train(config, workdir)
    assert words in str(raised.value) and failures.raised_by_us(raised.value)
    assert not (workdir / "metrics.jsonl").exists() or not read_rows(workdir / "metrics.jsonl")
    names = (path.name for path in workdir.glob("checkpoints/*"))
    assert [name for name in names if name.isdigit()] == [*saved]


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("seed", cases(1, 7))
def test_a_number_in_a_start_model_is_refused(seed, lora_rank, config, tmp_path):
    """Also in one that LoRA adapts."""
    rng, model = np.random.default_rng(seed), tmp_path / "model"
    shutil.copytree(config.model.path, model)
    tensors = load_file(model / WEIGHTS)
    name = str(rng.choice(sorted(tensors)))
    tensors[name].reshape(-1)[rng.integers(tensors[name].size)] = NOT_FINITE[seed % 3]
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    config.model.path, config.learner.lora_rank = str(model), lora_rank
    assert_refused(config, tmp_path / "run", "values that are not finite; give another model.path")


@pytest.mark.parametrize("seed", cases(1, 10))
def test_a_number_in_a_checkpoint_is_refused_by_its_name(seed, config, tmp_path):
    """One that is whole otherwise."""
    rng, state = np.random.default_rng(seed), programs(config).state
    leaves, structure = jax.tree.flatten(state)
    names, arrays = [*learner.named(state)], [np.ones(a.shape, a.dtype) for a in leaves]
    i = int(rng.choice([i for i, leaf in enumerate(leaves) if leaf.ndim > 0]))
    arrays[i].reshape(-1)[rng.integers(arrays[i].size)] = NOT_FINITE[seed % 3]
    placed = hosts.place(arrays, [leaf.sharding for leaf in leaves])
    row = {"step": 0, "groups/informative": 4, "groups/sampled": 8}
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=None)
    progress = {"cursor": 8, "sampled_tokens_total": 1, "row": row}
    checkpoints.save(1, jax.tree.unflatten(structure, placed), progress)
    checkpoints.close()
    assert_refused(config, tmp_path, names[i], saved=["1"])


@pytest.mark.slow
@pytest.mark.parametrize("settings", (*ABSURD, *SCORES) if FULL else ABSURD[:1], ids=str)
def test_absurd_settings_and_scores_are_not_wrong_in_silence(settings, config, tmp_path, capsys):
    """A run may end as it likes: refused, stopped, with alarms, or learning; saves are finite."""
    if isinstance(settings, float):
        args = {"score": settings}
        config.data.train = base.dataset(task=f"{__name__}:Scored", count=200, args=args)
    else:
        config.update_from_flattened_dict(settings)
    try:
        train.train(config, tmp_path)
    except SystemExit as end:
        assert isinstance(end.code, str)
    except (ValueError, OSError) as error:
        assert failures.raised_by_us(error)
    else:
        row = read_rows(tmp_path / "metrics.jsonl")[-1]
        is_healthy = row["accuracy/mean"] > 0 and not row.get("alarms")
        assert is_healthy or "alarm at step" in capsys.readouterr().out
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=None)
    for step in range(1, (checkpoints.latest_step() or 0) + 1):
        state, _ = checkpoints.restore(step, programs(config).state)
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state))
    checkpoints.close()
