"""The start of every command, in stages: a plan, a policy to sample, a run that trains.

    refuse settings -> fetch names on the hub -> lock the folder -> read tokenizer and data
    -> fill in open sizes -> plan mesh and programs -> restore weights -> record and compile

A config is a wish until `plan` resolves it into a new one, without open keys. `plan` takes no lock,
writes no file, loads nothing to devices and compiles nothing (preflight; `plan_training`: a dry
run). `open_run` has all that a training step needs, setup/policy.py the weights of a policy. They
raise ValueError and OSError, with the setting to change, on all processes alike. README.md says
what a fork shares with its parent.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging
from clu import parameter_overview
from ml_collections import ConfigDict

from configs.base import leaves, without_effect
from configs.compare import as_json, filled
from dapo_jax import hub, losses
from dapo_jax.checkpoints import begun, fingerprint
from dapo_jax.checkpoints.begun import Parent
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.checkpoints.same_run import FORK, RESUME, Question, require, require_together
from dapo_jax.checkpoints.snapshots import Snapshots
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.evaluation import settings_of
from dapo_jax.learner import TrainState
from dapo_jax.logs import metrics, writers
from dapo_jax.logs.alarms import Alarms, require_finite
from dapo_jax.logs.files import json_digest, locked, read_rows
from dapo_jax.logs.metrics import Stopwatch
from dapo_jax.logs.record import Record
from dapo_jax.process import compile_cache, hosts
from dapo_jax.rollout import StepPlan
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import auto_sizes, checks, components
from dapo_jax.tasks.datasets import Dataset
from dapo_jax.tasks.tokenizer import Tokenizer
from models.hf_config import read_config


@dataclasses.dataclass(frozen=True)
class Planned:
    """A config with all sizes, its tokenizer and data, and its programs, not yet compiled.

    config: resolved. data: what the command reads of it. chosen: a line with the keys that were
    open.
    """

    config: ConfigDict
    tokenizer: Tokenizer
    data: components.Data
    programs: components.Programs
    chosen: list[str]

    def lines(self) -> list[str]:
        """Says what devices, data and sizes a step has."""
        r, mesh = self.config.rollout, self.programs.mesh
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        routed = self.config.model.path if self.programs.sizes.routes else ""
        aux = routed and read_config(hub.local(routed)).get("router_aux_loss_coef")
        return [
            f"devices: {mesh.size} x {jax.devices()[0].device_kind}, mesh {axes}",
            *self.data.report_lines(),
            f"a step: {r.num_prompts} prompts x {r.group_size} responses of at most "
            f"{r.max_response_tokens} tokens, {self.config.updates_per_step} updates",
            *self.chosen,
            *without_effect(self.config).values(),
            *[f"router_aux_loss_coef = {aux} of config.json: there is no such loss"] * bool(aux),
        ]

    def session(self, weights: dict, *streams: Stream) -> Session:
        """Begins a session of these streams; weights: the sampler's."""
        environments = components.environments(self.config, self.data, self.tokenizer)
        return Session(self.programs.engine, weights, *streams, environments=environments)


@dataclasses.dataclass(frozen=True)
class Run(Planned):
    """All that a step needs, but the state that it changes.

    step: finished steps, the first to do. begin_step: the run's own first, which is not 0 in a
    fork. start_weights: those that LoRA adapts, or that the KL term has; else None. update:
    learner.update, compiled. recompute_old_logp: the learner's, or None where the loss takes none.
    streams: of every session, training's first, then those of `sets`, which are evaluated now and
    then. best: as of `best_key`. seconds: of loading and compiling.
    """

    step: int
    begin_step: int
    start_weights: dict | None
    record: Record
    snapshots: Snapshots
    alarms: Alarms
    step_plan: StepPlan
    sets: dict[str, Dataset]
    best: str
    streams: tuple[Stream, ...]
    update: Callable
    recompute_old_logp: Callable | None
    seconds: dict[str, float]

    def evaluates_in(self, step: int) -> bool:
        """Returns whether the policy that a step samples is evaluated in the same session."""
        return bool(self.sets) and step % self.config.eval.every_steps == 0

    def may_resume_at(self, step: int) -> bool:
        """Returns whether no keys and values of earlier steps are used from that step on."""
        partial = self.config.rollout.partial_rollout_steps > 0
        return not partial or step % self.config.checkpoint.every_steps == 0


def accept_and_fetch(config: ConfigDict, *unread: str, training: bool, weights=True) -> None:
    """Refuses a config that no run can have, or that processes differ in; fetches from the hub.

    unread: how keys begin whose paths the command does not read. weights: whether it reads them.
    """
    check(config, training=training)
    require_together({"recipe": as_json(config)})
    hub.fetch(hub.paths(config, *unread), weights=weights)


def check(config: ConfigDict, *, training: bool = True) -> None:
    """Refuses a config that no run can have (ValueError), before anything is written."""
    checks.check(config)
    if training:
        for name in config.log.writers:
            writers.find(name)
        metrics.own_metrics(config.log.metrics)
        for key in losses.CUSTOM:
            losses.function_of(key, config.algo[key])
    if config.model.family and pathlib.Path(config.model.path or "/nowhere").is_dir():
        components.model_sizes(config)


def plan(
    wish: ConfigDict,
    read: Callable,
    fit: Callable = auto_sizes.fit_training,
    *,
    training: bool,
    chosen: Mapping[str, Any] | None = None,
    devices=None,
) -> Planned:
    """Resolves a config into a new one, and plans its programs; the only place where one is.

    What it leaves open is as `chosen` before, else by the model, then by the tokenizer and the
    data, then by the devices. read(config) -> (tokenizer, data). fit(config, tokenizer, data):
    fills in the sizes that are open then. devices: of a compile-only topology; None: this
    program's.
    """
    config, given = filled(wish, chosen or {}), dict(leaves(wish))
    auto_sizes.fit_model(config, training=training)
    components.model_sizes(config)  # refuses before the data is read, which takes minutes
    tokenizer, data = read(config)
    if training:
        auto_sizes.fit_data(config, data, given=given)
    fit(config, tokenizer, data)
    checks.check(config)
    new = ", ".join(f"{key} = {value!r}" for key, value in leaves(config) if value != given[key])
    line = [f"chosen by the model, the data and the devices: {new}"] if new else []
    programs = components.programs(config, tokenizer.vocab_size, devices=devices)
    if training:
        checks.check_divides(config, programs.mesh)
    return Planned(config, tokenizer, data, programs, line)


def plan_training(config: ConfigDict, workdir: pathlib.Path, parent: Parent | None) -> Planned:
    """Plans the run in `workdir`; refuses that of another config."""
    read = functools.partial(read_data, training=True)
    chosen = hosts.on_main(lambda: begun.chosen_before(workdir, parent))
    planned = plan(config, read, training=True, chosen=chosen)
    hosts.on_main(lambda: require_own(RESUME, planned.config, workdir))
    return planned


def require_own(question: Question, config: ConfigDict, workdir: pathlib.Path) -> None:
    """Refuses the folder of another run by its config.json, if it has any (ValueError)."""
    if theirs := begun.config_of(workdir):
        require(question, {"recipe": theirs}, {"recipe": as_json(config)}, f"{workdir}")


def read_data(config: ConfigDict, **which: bool):
    """Reads (tokenizer, data), and takes the tokenizer's chat and date into the config of `plan`.

    which: of `load_data`.
    """
    tokenizer = components.tokenizer(config)
    config.tokenizer.update(chat=tokenizer.chat, date=tokenizer.date)
    return tokenizer, components.load_data(config, tokenizer, **which)


def open_run(
    config: ConfigDict, workdir: pathlib.Path, given: Parent | None, stack: contextlib.ExitStack
) -> tuple[Run, TrainState, Progress]:
    """Begins, or resumes, the run in `workdir`; given: the parent of --start. stack: closes it."""
    watch = Stopwatch()
    accept_and_fetch(config, training=True)
    compile_cache.enable()
    hosts.on_main(lambda: _lock(config, workdir, stack))
    parent = hosts.on_main(lambda: begun.parent_of(workdir, given))
    c = config.checkpoint
    directory = begun.directory_of(config, workdir)
    own = Checkpoints(directory, keep=c.keep, keep_period=c.keep_period)
    # From here on a stop saves.
    snapshots = stack.enter_context(Snapshots(own, every_steps=c.every_steps, say=print))
    if parent and own.latest_step() is None:
        parents_checkpoints(config, parent).close()  # refuses, before the data is read
    planned = plan_training(config, workdir, parent)
    config, programs = planned.config, planned.programs
    step, state, progress, parent = _restored(planned, own, workdir, parent)
    start_weights = programs.load_start_weights()
    require_finite_start(config, step, state, start_weights)

    begin_step, origin = (parent.step, str(parent)) if parent else (0, None)
    record = Record(
        config,
        workdir,
        first_step=step,
        begin_step=begin_step,
        last_row=progress.row,
        about={
            "origin": origin,
            "prompts": [it["digest"] for it in own.fingerprint["data"].values()],
            **hub.record(),
        },
    )
    say = stack.enter_context(record).display
    snapshots.say = say.line
    resuming = "" if step == begin_step else f", resuming after {step} steps"
    overview = parameter_overview.get_parameter_overview(state.params, include_stats=False)
    say.line("\n".join([overview, *planned.lines(), f"workdir: {workdir}{resuming}"]))
    if parent:
        say.line(f"a fork of checkpoint {parent.step} in {parent.workdir}")
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        say.line(
            "note: rollout.top_p or top_k cuts the sampler's distribution, but not the update's: "
            "their ratio is below 1 from the start"
        )
    alarms = Alarms(config, programs.state, vocab_size=planned.tokenizer.vocab_size, say=say.line)
    sets = planned.data.eval_sets if config.eval.every_steps > 0 else {}
    key = components.key(config, components.ROLLOUT_STREAM)
    training = Stream(key, components.sampling(config, planned.tokenizer))
    of_sets = components.eval_streams(config, planned.tokenizer, sets) if sets else ()
    streams = (training, *of_sets)
    with watch("compile"):
        with hosts.saying_seconds("compiling the update", say.phase):
            of_learner = programs.compile_learner()
        with hosts.saying_seconds("compiling the sampler", say.phase):
            programs.engine.compile(*(stream.sampling for stream in streams))
    spent = watch.seconds()
    run = Run(
        config=config,
        tokenizer=planned.tokenizer,
        data=planned.data,
        programs=programs,
        chosen=planned.chosen,
        step=step,
        begin_step=begin_step,
        start_weights=start_weights,
        record=record,
        snapshots=snapshots,
        alarms=alarms,
        step_plan=components.step_plan(config, planned.data),
        sets=sets,
        best=best_key(config, sets),
        streams=streams,
        update=of_learner["update"],
        recompute_old_logp=of_learner.get("old_logp"),
        seconds=spent | {"load": spent["total"] - spent["compile"]},
    )
    return run, state, progress


def _lock(config: ConfigDict, workdir: pathlib.Path, stack: contextlib.ExitStack) -> None:
    """Makes the folders this run's until the stack is closed; ValueError where they are taken."""
    elsewhere = config.checkpoint.directory
    places = {workdir.resolve(), pathlib.Path(elsewhere or workdir).resolve()}
    for place in places if "://" not in elsewhere else {workdir}:
        stack.enter_context(locked(place))


def _restored(planned: Planned, own: Checkpoints, workdir: pathlib.Path, parent: Parent | None):
    """Reads (finished steps, state, progress, parent); gives `own` the run's fingerprint."""
    config, programs, log = planned.config, planned.programs, logging.warning
    ours = fingerprint.of_run(config, planned.data, parent)
    same = functools.partial(require, RESUME, ours=ours, report=log)
    if restored := own.restore_latest(programs.state, require=same, report=log):
        step, state, progress = restored
        begun.require_steps_left(config, step, own.directory)
        # A new --workdir does not know it: its checkpoint.directory does.
        origin = (own.fingerprint_of(step) or {}).get("origin")
        own.fingerprint = ours | {"origin": origin}
        return step, state, Progress.from_json(progress), origin and Parent.parse(origin)
    own.fingerprint, first = ours, parent.step if parent else 0
    hosts.on_main(lambda: begun.require_unsaved(config, workdir, own.directory, first))
    if not parent:
        return 0, programs.start_state(), Progress(), None
    same = functools.partial(require, FORK, ours=ours)
    with contextlib.closing(parents_checkpoints(config, parent)) as saved:
        state, progress = saved.restore(parent.step, programs.state, require=same)
    return parent.step, state, Progress.from_json(progress).of_fork(), parent


def best_key(config: ConfigDict, sets: Mapping[str, Dataset]) -> str:
    """Names the set of checkpoint.best in `Progress.scores`; "" without one.

    With a digest: scores of another set, of other prompts or settings, say nothing beside its own.
    """
    if not (name := config.checkpoint.best):
        return ""
    measured = [settings_of(config)[name], fingerprint.of_prompts(sets[name].prompts)]
    return f"{name} {json_digest(measured)}"


def parents_checkpoints(config: ConfigDict, parent: Parent) -> Checkpoints:
    """Opens the checkpoints of a fork's parent, on all processes alike. config: the fork's."""
    return Checkpoints(hosts.on_main(lambda: parent.checkpoints(config.num_steps)), keep=None)


def require_finite_start(config: ConfigDict, step: int, loaded, start_weights: dict | None) -> None:
    """Refuses a start model or a checkpoint with numbers that are not finite (ValueError)."""
    if step:
        advice = "move it away to go on with the one before, or give another --workdir"
        require_finite(loaded, f"checkpoint {step}", advice=advice)
    elif start_weights is None:
        start_weights = loaded
    path = config.model.path
    model = f"model.path = {path!r}" if path else f"random weights of seed {config.seed}"
    require_finite(start_weights, model, advice="give another model.path")


def is_finished(config: ConfigDict, workdir: pathlib.Path, parent: Parent | None) -> bool:
    """Returns whether the run in `workdir` has done all steps of this config, which is its own."""
    if not all((workdir / name).is_file() for name in ("metrics.jsonl", "config.json")):
        return False
    check(config)
    rows = read_rows(workdir / "metrics.jsonl")
    if not rows or rows[-1]["step"] + 1 != config.num_steps:
        return False
    require_own(RESUME, filled(config, begun.chosen_before(workdir)), workdir)
    begun.parent_of(workdir, parent)
    # Killed on its way to more steps there may be no checkpoint of this one.
    return begun.config_of(workdir).get("num_steps") == config.num_steps
