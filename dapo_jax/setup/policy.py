"""The policy of a run, read by other commands: its config, its checkpoint, and what must agree."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable

from ml_collections import ConfigDict

from configs.compare import complete, current, filled
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.begun import BEST, best_step, chosen_before, directory_of
from dapo_jax.checkpoints.same_run import EVALUATE, Question, require
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.logs.files import read_json
from dapo_jax.process import compile_cache, hosts
from dapo_jax.setup import auto_sizes, components, start
from models import families


@dataclasses.dataclass(frozen=True)
class Policy(start.Planned):
    """A policy to sample, after `step` finished steps; weights: the sampler's."""

    step: int
    weights: dict


def run_config(workdir: pathlib.Path, *, trust_code: bool) -> ConfigDict:
    """Returns the config of the run in a directory, for these devices and not those that trained.

    trust_code: whether a module that it names as the model's family may be imported.
    """
    file = workdir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: {workdir} holds no training run")
    config = current(read_json(file))
    family = config.model.family
    if family and family not in families.BUILT_IN and not trust_code:
        raise ValueError(
            f"{file}: model.family = {family!r} is a custom module; --trust_code imports it"
        )
    complete(config)
    config.mesh.slices, config.mesh.data, config.mesh.model = 1, -1, 1
    config.model.kernels = "auto"
    config.algo.policy_loss = "none"  # nothing is trained, and the run's may be gone
    return config


def restored(
    programs: components.Programs,
    checkpoints: Checkpoints,
    step: int | None,
    question: Question = EVALUATE,
) -> tuple[int, dict, dict | None]:
    """Returns of a run (finished steps, what was trained, the weights that LoRA adapts, or None).

    step: None: the newest; 0: the policy before the first step. Raises FileNotFoundError where
    there is no such checkpoint, ValueError where the config, or the start model, is not the run's.
    """
    config, lora = programs.config, programs.settings.lora
    newest = checkpoints.latest_step()
    step = newest if step is None else step
    if step is None:
        raise FileNotFoundError(f"{checkpoints.directory} is empty: there is no policy in it")
    ours = fingerprint.of_policy(config, weights=lora is not None or not step)
    same = functools.partial(require, question, ours=ours)
    if step:
        params = checkpoints.restore(step, programs.state, require=same)[0].params
    else:  # the newest checkpoint says what the run began with
        if newest is not None and (theirs := checkpoints.fingerprint_of(newest)):
            same(theirs, where=f"checkpoint {newest} in {checkpoints.directory}")
        params = programs.start_params()
    # The KL term, which needs start weights too, is training's.
    return step, params, programs.load_start_weights() if lora else None


def load_policy(
    config: ConfigDict,
    workdir: pathlib.Path | None,
    fit: Callable = auto_sizes.fit_training,
    *,
    question: Question = EVALUATE,
    evaluates: bool = False,
    step: int | str | None = None,
) -> tuple[start.Planned, int, dict, dict | None]:
    """Loads the policy of a run's checkpoint: (plan, finished steps, what is trained, start's).

    workdir: the run's; None: there is only the config's model. fit: as of `plan`. question: what
    has to be the run's. evaluates: whether the evaluation sets are read. step: of the checkpoint,
    or "best"; None: the newest.
    """
    if step not in (None, BEST) and not str(step).isdecimal():
        raise ValueError(f"--step={step}: must be a number of finished steps, or best")
    unread = ("data.",) if evaluates else ("data.", "eval.")
    if workdir and not hosts.on_main(workdir.is_dir):
        raise FileNotFoundError(f"--workdir={workdir}: there is no such directory")
    chosen = hosts.on_main(lambda: chosen_before(workdir))
    if workdir:  # before a model is fetched
        hosts.on_main(lambda: start.require_own(question, filled(config, chosen), workdir))
    start.accept_and_fetch(config, *unread, training=False)
    compile_cache.enable()
    read = functools.partial(start.read_data, training=False, evaluates=evaluates)
    if not evaluates:  # `sample` leaves open what the run has chosen for its own problems
        chosen = {"tokenizer.date": chosen.get("tokenizer.date", "")}
    planned = start.plan(config, read, fit, training=False, chosen=chosen)
    config, programs = planned.config, planned.programs
    if workdir is None:
        loaded = 0, programs.load_weights(dtype=config.model.compute_dtype), None
    else:
        with contextlib.closing(Checkpoints(directory_of(config, workdir), keep=None)) as saved:
            if step == BEST:
                step = hosts.on_main(lambda: best_step(config, workdir))
            step = None if step is None else int(step)
            loaded = restored(programs, saved, step, question)
    start.require_finite_start(config, *loaded)
    return planned, *loaded


def open_policy(*arguments, **keywords) -> Policy:
    """Loads a policy, as `load_policy` does, and gives the sampler its weights."""
    planned, step, *trained = load_policy(*arguments, **keywords)
    return Policy(**vars(planned), step=step, weights=planned.programs.reshard(*trained))
