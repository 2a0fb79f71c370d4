"""The policy of a run, read by other commands: its config, its checkpoint, and what must agree."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable

from ml_collections import ConfigDict

from configs.compare import complete, current
from dapo_jax.checkpoints import fingerprint
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
    return config


def restored(
    programs: components.Programs,
    checkpoints: Checkpoints,
    step: int | None,
    *,
    may_differ: tuple[str, ...] = (),
) -> tuple[int, dict, dict | None]:
    """(finished steps, what was trained, the start weights where LoRA adapts them) of a run.

    step: None: the newest; 0: the policy before the first step. may_differ: keys of the policy that
    may differ from the run's. Raises FileNotFoundError where there is no such checkpoint,
    ValueError where the config, or the start model, is not the run's.
    """
    config, lora = programs.config, programs.learning.lora
    newest = checkpoints.latest_step()
    step = newest if step is None else step
    if step is None:
        raise FileNotFoundError(f"{checkpoints.directory} is empty: there is no policy in it")

    def same(theirs: dict, where: str) -> None:
        fingerprint.require_policy(config, theirs["recipe"], where, may_differ=may_differ)

    params = checkpoints.restore(step, programs.state, require=same)[0].params if step else None
    known = step or newest  # a checkpoint that says what the run began with
    if theirs := checkpoints.fingerprint_of(known) if known is not None else None:
        where = f"checkpoint {known} in {checkpoints.directory}"
        same(theirs, where)
        begins = lora is not None or not step
        fingerprint.require_start_model(config, theirs, where, weights=begins)
    # The KL term, which needs start weights too, is training's.
    start_weights = programs.load_start_weights() if lora else None
    return step, params if step else programs.start_params(), start_weights


def load_policy(
    config: ConfigDict,
    workdir: pathlib.Path | None,
    fit: Callable = auto_sizes.fit_training,
    *,
    evaluates: bool = False,
    step: int | str | None = None,
    may_differ: tuple[str, ...] = (),
) -> tuple[start.Planned, int, dict, dict | None]:
    """Loads the policy of a run's checkpoint: (plan, finished steps, what is trained, start's).

    workdir: the run's; None: there is only the config's model. fit: as of `plan`. evaluates:
    whether the evaluation sets are read. step: of the checkpoint, or "best"; None: the newest.
    may_differ: keys of the policy that may differ from the run's.
    """
    if step not in (None, fingerprint.BEST) and not str(step).isdecimal():
        raise ValueError(f"--step={step}: must be a number of finished steps, or best")
    unread = ("data.",) if evaluates else ("data.", "eval.")
    start.accept_and_fetch(config, *unread, training=False)
    compile_cache.enable()
    read = functools.partial(start.read_data, training=False, evaluates=evaluates)
    begun = hosts.on_main(lambda: start.begun_with(workdir))
    # `sample` leaves open what the run has chosen for its own problems.
    chosen = begun if evaluates else {"tokenizer.date": begun.get("tokenizer.date", "")}
    planned = start.plan(config, read, fit, training=False, chosen=chosen)
    config, programs = planned.config, planned.programs
    if workdir is None:
        found = 0, programs.load_weights(dtype=config.model.compute_dtype), None
    else:
        directory = start.directory_of(config, workdir)
        with contextlib.closing(Checkpoints(directory, keep=None)) as saved:
            if step == fingerprint.BEST:
                of = (workdir, directory, config.checkpoint.best)
                step = hosts.on_main(lambda: fingerprint.best_step(*of))
            step = None if step is None else int(step)
            found = restored(programs, saved, step, may_differ=may_differ)
    start.require_finite_start(config, *found)
    return planned, *found


def open_policy(*arguments, **keywords) -> Policy:
    """Loads a policy, as `load_policy` does, and gives the sampler its weights."""
    planned, step, *trained = load_policy(*arguments, **keywords)
    return Policy(**vars(planned), step=step, weights=planned.programs.reshard(*trained))
