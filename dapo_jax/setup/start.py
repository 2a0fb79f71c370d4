"""The one start of every command: `open_run`.

A fork continues its parent's policy, optimizer moments, place in the prompt stream and randomness,
under another config: forks of one checkpoint share prompts and sampling noise until their weights
differ. The parent is read and never written to.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
from absl import logging
from clu import parameter_overview
from etils import epath
from ml_collections import ConfigDict

from configs.base import leaves
from dapo_jax import hub, losses
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.fingerprint import Parent
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.checkpoints.snapshots import Snapshots
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.cli import compile_cache
from dapo_jax.cli.config_flags import as_json
from dapo_jax.learner import TrainState
from dapo_jax.logs import writers
from dapo_jax.logs.alarms import Alarms, require_finite
from dapo_jax.logs.files import locked, read_json, read_rows
from dapo_jax.logs.metrics import Stopwatch
from dapo_jax.logs.record import Record
from dapo_jax.rollout import StepPlan
from dapo_jax.sampler.session import Stream
from dapo_jax.setup import auto_sizes, checks, components, policy
from dapo_jax.tasks.tokenizer import Tokenizer
from sharding import hosts


@dataclasses.dataclass
class Run:
    """A run as far as `open_run` opens it: what belongs to later stages is None.

    chosen: a line with the keys that the config left open. step: finished steps, the first to do.
    start_weights: those that LoRA adapts, or that the KL term has. streams: of every session,
    training's first, then those of `sets`, which are evaluated now and then.
    """

    config: ConfigDict
    workdir: pathlib.Path | None = None
    tokenizer: Tokenizer | None = None
    data: components.Data | None = None
    programs: components.Programs | None = None
    chosen: list[str] = dataclasses.field(default_factory=list)
    parent: Parent | None = None
    step: int | None = None
    params: dict | None = None
    start_weights: dict | None = None
    state: TrainState | None = None
    progress: Progress | None = None
    checkpoints: Checkpoints | None = None
    record: Record | None = None
    snapshots: Snapshots | None = None
    alarms: Alarms | None = None
    update: Callable | None = None
    old_logprobs: Callable | None = None
    step_plan: StepPlan | None = None
    sets: dict[str, components.EvalSet] = dataclasses.field(default_factory=dict)
    streams: tuple[Stream, ...] = ()
    seconds: dict[str, float] | None = None  # of loading and compiling

    @property
    def begin_step(self) -> int:
        """The run's own first step, which is not 0 in a fork."""
        return self.parent.step if self.parent else 0

    def sampler_weights(self, params: dict) -> dict:
        """Returns weights as the sampler shards them."""
        return self.programs.reshard(params, self.start_weights)

    def take_policy(self) -> dict:
        """Returns the policy's weights for the sampler, and lets go of what they are made of."""
        weights = self.sampler_weights(self.params)
        self.params = self.start_weights = None
        return weights

    def lines(self) -> list[str]:
        """Says what devices, data and sizes a step has."""
        r, mesh = self.config.rollout, self.programs.mesh
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        return [
            f"devices: {mesh.size} x {jax.devices()[0].device_kind}, mesh {axes}",
            *self.data.report_lines(),
            f"a step: {r.num_prompts} prompts x {r.group_size} responses of at most "
            f"{r.max_response_tokens} tokens, {self.config.updates_per_step} updates",
            *self.chosen,
        ]

    def evaluates_in(self, step: int) -> bool:
        """Returns whether the policy that a step samples is evaluated in the same session."""
        return bool(self.sets) and step % self.config.eval.every_steps == 0

    def may_resume_at(self, step: int) -> bool:
        """Returns whether no keys and values of earlier steps are used from that step on."""
        partial = self.config.rollout.partial_rollout_steps > 0
        return not partial or step % self.config.checkpoint.every_steps == 0


def open_run(
    config: ConfigDict,
    workdir: pathlib.Path | None,
    until: str,
    *,
    reads: str = "training",
    fit: Callable[[Run], None] | None = None,
    parent: Parent | None = None,
    step: int | None = None,
    stack: contextlib.ExitStack | None = None,
    devices=None,
    may_differ: tuple[str, ...] = (),
) -> Run:
    """Opens a run, or a model's policy, in the one order that all commands have.

        refuse settings -> fetch names on the hub -> lock the folder -> read tokenizer and data
        -> fill in open sizes -> plan mesh and programs -> restore weights -> record and compile

    until: "programs": nothing is locked, written, loaded to devices or compiled (a dry run,
    preflight). "policy": with the weights of a policy to sample (evaluate, sample, convert).
    "training": all that a step needs.
    workdir: the run's; None: there is only the config's model. reads: the data sets: "training",
    with those that are evaluated; "evaluation" alone; "" none. fit: fills in what the config leaves
    open, once the data is read; None: as training does. parent: that of --start. step: of the
    policy's checkpoint; None: the newest. stack: closes what training opens. devices: of a
    compile-only topology. may_differ: keys of the policy that may differ from the run's.

    Raises ValueError and OSError, with the setting to change, on all processes alike.
    """
    watch, run, trains = Stopwatch(), Run(config, workdir), reads == "training"
    check(config, training=trains)
    # One with other settings would wait for ever.
    fingerprint.require_alike(hosts.gather(as_json(config)), fingerprint.config_differences)
    unread = {"training": (), "evaluation": ("data.",), "": ("data.", "eval.")}[reads]
    hub.fetch(hub.paths(config, *unread))
    if until != "programs":
        compile_cache.enable(several=hosts.count() > 1)
    if until == "training":
        _lock(config, workdir, stack)
    if trains:
        run.parent = hosts.on_main(lambda: fingerprint.parent_of(workdir, parent))
        _open_checkpoints(run, stack)

    given, plans_training = dict(leaves(config)), trains or devices is not None
    auto_sizes.fit_model(config, training=plans_training)
    if devices is None:
        begun = run.parent.workdir if run.parent else workdir
        if not config.tokenizer.date:
            config.tokenizer.date = hosts.on_main(lambda: fingerprint.day_of(begun))
        _read(run, reads)
    if plans_training:
        auto_sizes.fit_data(config, run.data, given=given)
    if fit:
        fit(run)
    else:
        auto_sizes.fit_training(config)
    checks.check(config)
    if found := [f"{key} = {value!r}" for key, value in leaves(config) if value != given[key]]:
        run.chosen = [f"chosen by the model, the data and the devices: {', '.join(found)}"]

    ids = run.tokenizer.vocab_size if run.tokenizer else components.model_sizes(config).vocab_size
    run.programs = components.programs(config, ids, devices=devices)
    if plans_training:
        checks.check_divides(config, run.programs.mesh)
    if trains:
        hosts.on_main(lambda: fingerprint.require_same_config(config, workdir))
    if until == "policy":
        _load_policy(run, step, may_differ)
    if until == "training":
        _restore(run)
        _begin(run, stack, watch)
    return run


def check(config: ConfigDict, *, training: bool = True) -> None:
    """Refuses a config that no run can have (ValueError), before anything is written."""
    looks = [lambda: checks.check(config)]
    if training:
        looks += [functools.partial(writers.find, name) for name in config.log.writers]
        if ":" in config.algo.policy_loss:
            looks.append(lambda: losses.policy_loss(config.algo.policy_loss))
    if config.model.family and pathlib.Path(config.model.path or "/nowhere").is_dir():
        looks.append(lambda: components.model_sizes(config))
    checks.together(*looks)


def _lock(config: ConfigDict, workdir: pathlib.Path, stack: contextlib.ExitStack) -> None:
    """Makes the folders this run's until the stack is closed; ValueError where they are taken."""

    def lock():
        elsewhere = config.checkpoint.directory
        places = {workdir.resolve(), pathlib.Path(elsewhere or workdir).resolve()}
        for place in places if "://" not in elsewhere else {workdir}:
            stack.enter_context(locked(place))

    hosts.on_main(lock)


def _open_checkpoints(run: Run, stack: contextlib.ExitStack | None) -> None:
    """Opens the run's checkpoints, from here on saved at a stop; refuses a parent without its own.

    Without a stack they are only read, where there are any.
    """
    config, c = run.config, run.config.checkpoint
    directory = checkpoint_directory(config, run.workdir)
    if stack:
        there = run.checkpoints = Checkpoints(directory, keep=c.keep, keep_period=c.keep_period)
        snapshots = Snapshots(there, every_steps=c.every_steps, say=print)
        run.snapshots = stack.enter_context(snapshots)
    elif hosts.on_main(directory.is_dir):
        run.checkpoints = Checkpoints(directory, keep=None)
    if run.checkpoints:
        run.step = hosts.on_main(run.checkpoints.latest_step)
    if run.parent and run.step is None:  # a fork with checkpoints of its own needs it no more
        parents_checkpoints(config, run.parent).close()


def checkpoint_directory(config: ConfigDict, workdir: pathlib.Path) -> epath.Path:
    """Returns the directory of a run's checkpoints."""
    return epath.Path(config.checkpoint.directory or workdir / "checkpoints")


def _read(run: Run, reads: str) -> None:
    """Reads the tokenizer, and the data sets where the command has some."""
    config = run.config

    def read():
        run.tokenizer = components.tokenizer(config)
        if reads:
            training = reads == "training"
            run.data = components.load_data(config, run.tokenizer, training=training)

    checks.together(lambda: components.model_sizes(config), read)


def _load_policy(run: Run, step: int | None, may_differ: tuple[str, ...]) -> None:
    """Loads the weights of the run's checkpoint, or of the model where there is no run."""
    config, programs = run.config, run.programs
    if run.workdir is None:
        run.step, run.params = 0, programs.load_weights(dtype=config.model.compute_dtype)
    else:
        where = checkpoint_directory(config, run.workdir)
        with contextlib.closing(Checkpoints(where, keep=None)) as saved:
            found = policy.restored(programs, saved, step, may_differ=may_differ)
        run.step, run.params, run.start_weights = found
    _require_finite(run, run.params)


def _restore(run: Run) -> None:
    """Reads the checkpoint that the run continues, and gives `checkpoints` its fingerprint."""
    config, programs, there = run.config, run.programs, run.checkpoints
    ours = fingerprint.of_run(config, run.data, run.parent)
    there.fingerprint = ours
    if restored := there.restore_latest(programs.state, report=logging.warning):
        run.step, run.state, progress = restored
        # A new --workdir does not know it: its checkpoint.directory does.
        theirs = ours["origin"] = (there.fingerprint_of(run.step) or {}).get("origin")
        run.parent = theirs and Parent.parse(theirs)
        fingerprint.require_steps_left(config, run.step, there.directory)
    else:
        where = (config, run.workdir, there.directory, run.begin_step)
        hosts.on_main(lambda: fingerprint.require_unsaved(*where))
        if run.parent:
            run.step = run.parent.step
            same = functools.partial(fingerprint.require_parent, ours=ours)
            with contextlib.closing(parents_checkpoints(config, run.parent)) as saved:
                run.state, progress = saved.restore(run.step, programs.state, require=same)
        else:
            run.step, run.state, progress = 0, programs.start_state(), {}
    run.progress = Progress.from_json(progress)
    run.start_weights = programs.load_start_weights()
    _require_finite(run, run.state)


def _begin(run: Run, stack: contextlib.ExitStack, watch: Stopwatch) -> None:
    """Opens the record in the run's folder, and compiles all that a step needs."""
    config, programs = run.config, run.programs
    run.record = stack.enter_context(
        Record(
            config,
            run.workdir,
            first_step=run.step,
            begin_step=run.begin_step,
            last_row=run.progress.row,
            about={"origin": run.parent and str(run.parent), **hub.record()},
        )
    )
    say, run.snapshots.say = run.record.display, run.record.display.line
    say.line("\n".join(banner(run)))
    run.alarms = Alarms(config, programs.state, vocab_size=run.tokenizer.vocab_size, say=say.line)
    run.step_plan = components.step_plan(config, run.data)
    run.sets = run.data.eval_sets if config.eval.every_steps > 0 else {}
    key = components.key(config, components.ROLLOUT_STREAM)
    training = Stream(key, components.sampling(config, run.tokenizer))
    evaluating = components.eval_streams(config, run.tokenizer) if run.sets else ()
    run.streams = (training, *evaluating)
    with watch("compile"):
        say.phase("compiling the update")
        run.update, run.old_logprobs = programs.compile_update(), programs.compile_old_logprobs()
        say.phase("compiling the sampler")
        programs.engine.compile(*(stream.sampling for stream in run.streams))
    spent = watch.seconds()
    run.seconds = spent | {"load": spent["total"] - spent["compile"]}


def banner(run: Run) -> list[str]:
    """Says what is about to run: parameters, mesh, data, where it goes, and where it began."""
    resuming = "" if run.step == run.begin_step else f", resuming after {run.step} steps"
    lines = [
        parameter_overview.get_parameter_overview(run.state.params, include_stats=False),
        *run.lines(),
        f"workdir: {run.workdir}{resuming}",
    ]
    if run.parent:
        lines.append(f"a fork of checkpoint {run.parent.step} in {run.parent.workdir}")
    if run.config.rollout.top_p < 1 or run.config.rollout.top_k > 0:
        lines.append(
            "note: rollout.top_p or top_k cuts the sampler's distribution, but not the update's: "
            "their ratio is below 1 from the start"
        )
    return lines


def is_finished(config: ConfigDict, workdir: pathlib.Path, parent: Parent | None) -> bool:
    """Returns whether the run in `workdir` has done all steps of this config, which is its own."""
    if not all((workdir / name).is_file() for name in ("metrics.jsonl", "config.json")):
        return False
    check(config)
    rows = read_rows(workdir / "metrics.jsonl")
    if not rows or rows[-1]["step"] + 1 != config.num_steps:
        return False
    fingerprint.require_same_config(config, workdir)
    fingerprint.parent_of(workdir, parent)
    # Killed on its way to more steps there may be no checkpoint of this one.
    return read_json(workdir / "config.json").get("num_steps") == config.num_steps


def parents_checkpoints(config: ConfigDict, parent: Parent) -> Checkpoints:
    """Opens the checkpoints of a fork's parent; refuses, before it is read, one that is not there.

    config: the fork's. Raises FileNotFoundError and ValueError, on all processes alike.
    """

    def find():
        file = parent.workdir / "config.json"
        theirs = read_json(file) if file.is_file() else {}
        if "checkpoint" not in theirs:  # a model's directory has a config.json too
            raise FileNotFoundError(f"--start={parent}: {file} is missing, or no run's config")
        directory = epath.Path(theirs["checkpoint"]["directory"] or parent.workdir / "checkpoints")
        steps = sorted(int(it.name) for it in directory.glob("*") if it.name.isdecimal())
        if parent.step not in steps:
            raise FileNotFoundError(
                f"--start={parent}: {directory} has no checkpoint {parent.step}, only {steps}"
            )
        if config.num_steps <= parent.step:
            raise ValueError(
                f"num_steps = {config.num_steps}, but --start={parent} begins after {parent.step} "
                "steps, which count too"
            )
        return directory

    return Checkpoints(hosts.on_main(find), keep=None)


def _require_finite(run: Run, loaded) -> None:
    """Refuses a start model or a checkpoint with numbers that are not finite (ValueError)."""
    path, weights = run.config.model.path, run.start_weights
    if run.step:
        advice = "move it away to go on with the one before, or give another --workdir"
        require_finite(loaded, f"checkpoint {run.step}", advice=advice)
    elif weights is None:
        weights = loaded
    if weights is not None:
        model = f"model.path = {path!r}" if path else f"random weights of seed {run.config.seed}"
        require_finite(weights, model, advice="give another model.path")
