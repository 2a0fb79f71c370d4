"""Numbers that are not finite: in start models, checkpoints, settings, updates and rewards.

Whatever is injected, no saved array may be anything but finite, and no run may go on with wrong
numbers in silence: it is refused, or stops, or a line says what is left out.
"""

import contextlib
import dataclasses
import io
import pathlib
import shutil
from collections.abc import Callable, Iterator

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from configs import base
from dapo_jax import learner, train
from dapo_jax.cli import failures
from dapo_jax.logs.alarms import require_finite
from dapo_jax.logs.files import read_rows
from dapo_jax.setup import components
from dapo_jax.tasks.arithmetic import Arithmetic
from dapo_jax.types import Group, Prompt, Response
from experiments.faults.config import get_config
from experiments.faults.parts import Outcome, Part
from sharding import hosts
from sharding.mesh import make_mesh

NOT_FINITE = (np.nan, np.inf, -np.inf)
WEIGHTS = "model.safetensors"
# What no device can compute with, and a rate at which every weight would be replaced.
REFUSED = (
    ("learner.learning_rate", 1e39),
    ("learner.learning_rate", 1e6),
    ("learner.learning_rate", np.nan),
    ("learner.adam_eps", 1e-50),
    ("learner.max_grad_norm", 1e39),
    ("learner.weight_decay", 1e39),
    ("rollout.temperature", 1e-42),
    ("algo.overlong_factor", 1e39),
)
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


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a run: its status, all that it printed, its last row."""

    status: int
    text: str
    row: dict

    @property
    def is_healthy(self) -> bool:
        """True if it went on to its end, with right answers and without an alarm."""
        return self.status == 0 and self.row["accuracy/mean"] > 0 and not self.row.get("alarms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored(Arithmetic):
    """Arithmetic whose right answers have a score of the config's choice."""

    score: float = 0.0

    def grade_many(self, responses, example):
        """Grades all responses to an example."""
        verdicts = super().grade_many(responses, example)
        return [v._replace(score=self.score if v.correct else -1.0) for v in verdicts]


def small_config():
    """Makes the config of the preemption test shorter: three steps, nothing evaluated."""
    config = get_config()
    config.num_steps = 3
    config.eval.every_steps = 0
    config.checkpoint.every_steps = 1
    config.checkpoint.keep = 9
    config.log.samples_every_steps = 0
    config.log.rollouts_every_steps = 0
    return config


def run(config, workdir: pathlib.Path) -> Ended:
    """Runs `train` and ends as its command does; status -1 is a traceback."""
    printed, status, message = io.StringIO(), 0, ""
    try:
        with contextlib.redirect_stdout(printed):
            train.train(config, workdir)
    except SystemExit as end:
        status, message = 1, str(end.code)
    except (ValueError, OSError) as error:
        status, message = 1 if failures.raised_by_us(error) else -1, str(error)
    rows = read_rows(workdir / "metrics.jsonl") if (workdir / "metrics.jsonl").exists() else []
    return Ended(status, f"{printed.getvalue()}\n{message}", rows[-1] if rows else {})


def bad_checkpoints(config, workdir: pathlib.Path, *, but: int = 0) -> list[int]:
    """Lists the run's checkpoints that hold anything not finite, but for one."""
    if not (workdir / "checkpoints").is_dir():
        return []
    programs = components.programs(config, components.tokenizer(config).vocab_size)
    checkpoints = components.checkpoints(config, workdir, keep=None)
    bad = []
    for step in range(1, (checkpoints.latest_step() or 0) + 1):
        if step != but and (workdir / "checkpoints" / str(step)).is_dir():
            leaves = jax.tree.leaves(checkpoints.restore(step, programs.state)[0])
            bad += [step] * (not all(np.isfinite(np.asarray(leaf)).all() for leaf in leaves))
    checkpoints.close()
    return bad


def refused(fault: str, config, workdir: pathlib.Path, name: str, *, but: int = 0) -> Outcome:
    """Judges a run that has to be refused with a message that holds `name`."""
    end, bad = run(config, workdir), bad_checkpoints(config, workdir, but=but)
    lost = f"checkpoints {bad} are not finite" if bad else ""
    survived = end.status == 1 and not end.row and not bad
    return Outcome(fault, survived, said=name in end.text, lost=lost)


def frozen_model(rng, number: int, folder: pathlib.Path) -> Outcome:
    """Puts one into a start model that LoRA adapts."""
    return model_directory(rng, number, folder, lora_rank=4)


def model_directory(rng, number: int, folder: pathlib.Path, *, lora_rank: int = 0) -> Outcome:
    """Puts one number that is not finite into a start model."""
    config, value = small_config(), NOT_FINITE[number % 3]
    model = folder / "model"
    shutil.copytree(config.model.path, model)
    tensors = load_file(model / WEIGHTS)
    name = str(rng.choice(sorted(tensors)))
    tensors[name].reshape(-1)[rng.integers(tensors[name].size)] = value
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    config.model.path = str(model)
    config.learner.lora_rank = lora_rank
    return refused(f"{value} in {name} of the start model", config, folder / "run", name)


def checkpoint(rng, number: int, folder: pathlib.Path) -> Outcome:
    """Saves a checkpoint with one number that is not finite, whole otherwise."""
    config, value = small_config(), NOT_FINITE[number % 3]
    programs = components.programs(config, components.tokenizer(config).vocab_size)
    leaves, structure = jax.tree.flatten(programs.state)
    names, arrays = learner.leaf_names(programs.state), [np.ones(a.shape, a.dtype) for a in leaves]
    i = int(rng.choice([i for i, leaf in enumerate(leaves) if leaf.ndim > 0]))
    arrays[i].reshape(-1)[rng.integers(arrays[i].size)] = value
    placed = hosts.place(arrays, [leaf.sharding for leaf in leaves])
    row = {"step": 0, "groups/informative": 4, "groups/sampled": 8}
    progress = {"cursor": 8, "sampled_tokens_total": 1, "row": row}
    checkpoints = components.checkpoints(config, folder / "run", keep=None)
    checkpoints.save(1, jax.tree.unflatten(structure, placed), progress)
    checkpoints.close()
    return refused(
        f"{value} in {names[i]} of a checkpoint", config, folder / "run", names[i], but=1
    )


def setting(rng, number: int, folder: pathlib.Path) -> Outcome:
    """Gives a setting that is not finite in float32, or a learning rate over 1."""
    name, value = REFUSED[number % len(REFUSED)]
    config = small_config()
    config.update_from_flattened_dict({name: value})
    return refused(f"{name} = {value}", config, folder, name)


def in_memory(rng, number: int, _) -> Outcome:
    """Puts a number that is not finite into weights that lie split over all devices."""
    dtype = rng.choice([np.float32, ml_dtypes.bfloat16])
    mesh = make_mesh(data=-1, model=1)
    shape = (3, 8 * mesh.size, 5)
    tree = {"layers": {name: rng.normal(size=shape).astype(dtype) for name in "abc"}}
    name, index = str(rng.choice(list("abc"))), tuple(int(rng.integers(n)) for n in shape)
    value = NOT_FINITE[number % 3]
    tree["layers"][name][index] = value
    tree = jax.device_put(tree, NamedSharding(mesh, PartitionSpec(None, "data")))
    place = f"layers.{name}{list(index)} is {value}"
    try:
        require_finite(tree, "weights in memory")
    except ValueError as error:
        return Outcome(f"{value} in memory", True, said=place in str(error))
    return Outcome(f"{value} in memory", False, said=False, lost="it was not found")


def one_update(rng, number: int, _) -> Outcome:
    """Puts a number that is not finite into what one update computes from."""
    config = small_config()
    programs, update = compiled_update()
    state, value = programs.start_state(), float(rng.choice(NOT_FINITE))
    lengths, vocab = rng.integers(4, 30, (2, 8)), programs.learning.vocab_size
    groups = [
        Group(
            i,
            Prompt(rng.integers(0, vocab, 12).astype(np.int32)),
            tuple(
                Response(
                    rng.integers(0, vocab, n).astype(np.int32),
                    -rng.random(n).astype(np.float32),
                    True,
                )
                for n in lengths[i]
            ),
        )
        for i in range(2)
    ]
    advantage_PG, rate = rng.normal(size=(2, 8)).astype(np.float32), config.learner.learning_rate
    where = ("advantage", "log-probability", "weights")[number % 3]
    if where == "advantage":
        advantage_PG[rng.integers(2), rng.integers(8)] = value
    elif where == "log-probability":  # log 0 is one that the clip handles
        groups[1].responses[rng.integers(8)].behavior_logp_T[0] = value = np.nan
    else:  # finite, and too large for what is computed from it
        value = 1e38
        state = state.replace(params=jax.tree.map(lambda p: p * np.float32(1e36), state.params))
    before = jax.device_get(state)
    after, metrics = update(state, None, programs.minibatch(groups, advantage_PG), np.float32(rate))
    after, metrics = jax.device_get((after, metrics))
    same = jax.tree.map(np.array_equal, before, after)
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    taken = bool(metrics["taken"])
    survived = finite and (taken or all(jax.tree.leaves(same)))
    name = learner.checked_names(programs.state)[int(metrics["bad"])] if not taken else ""
    lost = "" if survived else "the state was changed"
    return Outcome(f"{value} in an update's {where}", survived, said=bool(name), lost=lost)


def compiled_update():
    """Compiles the small recipe's update once."""
    if not _COMPILED:
        config = small_config()
        programs = components.programs(config, components.tokenizer(config).vocab_size)
        _COMPILED.append((programs, programs.compile_update()))
    return _COMPILED[0]


_COMPILED: list = []


def whole_run(fault: str, config, folder: pathlib.Path) -> Outcome:
    """Judges a run that may end as it likes, but not go wrong in silence."""
    end, bad = run(config, folder), bad_checkpoints(config, folder)
    if bad:
        return Outcome(fault, False, said=False, lost=f"checkpoints {bad} are not finite")
    if end.status < 0:
        return Outcome(fault, False, said=False, lost=f"a traceback: {end.text.strip()[-200:]}")
    if end.is_healthy:
        return Outcome(fault, True)
    said = end.status == 1 or "alarm at step" in end.text
    return Outcome(fault, True, said=said, lost="" if said else "it went on in silence")


def absurd(rng, number: int, folder: pathlib.Path) -> Outcome:
    """Runs with settings that are allowed and absurd."""
    settings, config = ABSURD[number % len(ABSURD)], small_config()
    config.update_from_flattened_dict(settings)
    return whole_run(", ".join(f"{k} = {v}" for k, v in settings.items()), config, folder)


def reward(rng, number: int, folder: pathlib.Path) -> Outcome:
    """Runs with a grader whose scores are not finite, as they are or in float32."""
    config, score = small_config(), SCORES[number % len(SCORES)]
    config.data.train = base.dataset(task=f"{__name__}:Scored", count=200, args={"score": score})
    return whole_run(f"a score of {score}", config, folder)


KINDS: dict[Callable, int] = {
    model_directory: 10,
    checkpoint: 10,
    setting: 8,
    in_memory: 6,
    frozen_model: 4,
    one_update: 8,
    absurd: 10,
    reward: 4,
}


def inject(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Injects `count` faults: one of each kind by turns, as many as KINDS says."""
    turns = [(i / times, i, kind) for kind, times in KINDS.items() for i in range(times)]
    turns.sort(key=lambda turn: turn[0])
    for at in range(count):
        _, number, kind = turns[at % len(turns)]
        own = folder / str(at)
        own.mkdir()
        yield kind(np.random.default_rng([seed, at]), number, own)
        shutil.rmtree(own)


PART = Part(
    title="numbers not finite: model, checkpoint, settings, updates, rewards",
    full=sum(KINDS.values()),
    short=4,
    inject=inject,
)
