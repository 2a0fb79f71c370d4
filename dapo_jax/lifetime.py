"""The beginning and the end of a run: all that surrounds the loop of RL steps.

`begin` refuses, loads and compiles everything before the first step; `conclude` writes the summary,
and the curves after the last one.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable

from ml_collections import ConfigDict

from dapo_jax import evaluate, hub, learner, rollout
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.checkpoints.snapshots import Snapshots
from dapo_jax.cli import failures
from dapo_jax.logs import alarms, files
from dapo_jax.logs.metrics import Stopwatch
from dapo_jax.logs.record import Record
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import checks, components, policy, start
from dapo_jax.tasks.datasets import RemainingStream
from dapo_jax.types import Rollouts
from sharding import hosts


@dataclasses.dataclass(frozen=True)
class Run:
    """The constants of a run; its training state and progress change from step to step."""

    config: ConfigDict
    programs: components.Programs
    data: components.Data
    start_weights: dict | None
    update: Callable
    old_logprobs: Callable | None
    sets: dict[str, components.EvalSet]  # that are evaluated now and then
    streams: tuple[Stream, ...]  # of every session: training's, then those of the sets
    record: Record
    alarms: alarms.Alarms
    snapshots: Snapshots
    first_step: int
    begin_step: int  # the run's first, not 0 in a fork
    start_seconds: dict[str, float]  # of loading and compiling, before the first step

    def sampler_weights(self, state: learner.TrainState) -> dict:
        """Returns the weights as the sampler shards them."""
        return self.programs.reshard(state.params, self.start_weights)

    def remaining(self, progress: Progress) -> RemainingStream:
        """Returns the training prompts in the order of sampling, without those that are retired."""
        at_least = checks.generation_batch(self.config)[1]
        return RemainingStream(self.data.stream, progress.retired, at_least=at_least)

    def retire_solved(self, rollouts: Rollouts, progress: Progress) -> dict[int, int]:
        """Returns the retired prompts after a step, in which some may have been solved."""
        least, found = self.config.algo.retire_pass_rate, []
        if least > 0:
            found = [it.cursor for it in rollouts.sampled if it.correct_G.mean() >= least]
        retired = self.remaining(progress).retire(found, next_cursor=rollouts.cursor)
        prompts, (key, batch) = len(self.data.stream), checks.generation_batch(self.config)
        if len(progress.retired) <= prompts - batch < len(retired):
            self.record.display.line(
                f"{len(retired):,} of {prompts:,} prompts are retired (algo.retire_pass_rate = "
                f"{least}): fewer than rollout.{key} = {batch:,} remain, so later epochs have all "
                "again"
            )
        return retired

    def evaluates_in(self, step: int) -> bool:
        """Returns whether the policy that a step samples is evaluated in the same session."""
        return bool(self.sets) and step % self.config.eval.every_steps == 0

    def may_resume_at(self, step: int) -> bool:
        """Returns whether a stopped run may go on from there; with partial rollouts, not always.

        There no keys and values of the steps before are used.
        """
        carries = self.config.rollout.partial_rollout_steps > 0
        return not carries or step % self.config.checkpoint.every_steps == 0

    def evaluate_alone(self, state: learner.TrainState, finished_steps: int) -> None:
        """Evaluates all sets in a session of their own."""
        session = Session(self.programs.engine, self.sampler_weights(state), *self.streams)
        how = {"first_stream": rollout.TRAINING + 1}
        with evaluate.Evaluation(session, self.sets, **how) as evaluation:
            self.scores(evaluation, finished_steps)

    def scores(self, evaluation: evaluate.Evaluation, finished_steps: int) -> dict[str, float]:
        """Ends an evaluation, writes its results, and returns them as keys of a metrics row."""
        results = evaluation.finish(
            report=self.record.display.phase,
            keep=functools.partial(self.record.responses, finished_steps),
        )
        return self.record.results(finished_steps, results, evaluate.settings_of(self.config))


def begin(config: ConfigDict, workdir: pathlib.Path, stack: contextlib.ExitStack, origin=None):
    """Returns (run, state, progress) before the first step to do: new, or of a checkpoint.

    Everything is refused, loaded and compiled here. Things to be closed go onto the stack.
    """
    watch = Stopwatch()
    start.check(config)
    hub.fetch(hub.paths(config), origin and origin.workdir, workdir)
    origin = start.claim(config, workdir, stack, origin)
    checkpoints = components.checkpoints(config, workdir, keep=config.checkpoint.keep)
    saved = failures.telling_saved_steps(checkpoints.latest_step, checkpoints.directory)
    stack.enter_context(saved)
    snapshots = stack.enter_context(
        Snapshots(
            checkpoints,
            every_steps=config.checkpoint.every_steps,
            say=print,
            on_failed_save=config.checkpoint.on_failed_save,
        )
    )
    start.check_parent(config, checkpoints.latest_step(), origin)
    parts = start.prepare(config, workdir)
    first = start.restore(config, workdir, parts, checkpoints, origin)
    run = ready(config, workdir, stack, parts, first, snapshots, watch)
    return run, first.state, first.progress


def ready(config, workdir, stack, parts: start.Parts, first: start.Start, snapshots, watch) -> Run:
    """Loads and compiles all that every step needs, and opens the record in `workdir`."""
    tokenizer, programs, data, chosen = parts
    start_weights = programs.load_start_weights()
    policy.require_finite_start(programs, first.directory, first.step, first.state, start_weights)

    record = stack.enter_context(
        Record(
            config,
            workdir,
            first_step=first.step,
            begin_step=first.begin_step,
            last_row=first.progress.row,
            about={"origin": first.origin and str(first.origin), **hub.record()},
        )
    )
    snapshots.say = record.display.line
    record.display.line("\n".join([start.banner(config, parts, workdir, first), *chosen]))
    sets = data.eval_sets if config.eval.every_steps > 0 else {}
    key = components.key(config, components.ROLLOUT_STREAM)
    training = Stream(key, components.sampling(config, tokenizer))
    streams = (training, *evaluate.streams(config, sets))
    with watch("compile"):
        record.display.phase("compiling the update")
        update, old_logprobs = programs.compile_update(), programs.compile_old_logprobs()
        record.display.phase("compiling the sampler")
        programs.engine.compile(*(stream.sampling for stream in streams))
    spent = watch.seconds()
    return Run(
        config=config,
        programs=programs,
        data=data,
        start_weights=start_weights,
        update=update,
        old_logprobs=old_logprobs,
        sets=sets,
        streams=streams,
        record=record,
        alarms=alarms.Alarms(
            config, programs.state, vocab_size=tokenizer.vocab_size, say=record.display.line
        ),
        snapshots=snapshots,
        first_step=first.step,
        begin_step=first.begin_step,
        start_seconds=spent | {"load": spent["total"] - spent["compile"]},
    )


def conclude(workdir: pathlib.Path) -> None:
    """Draws the curves of a run that has done its steps, and prints its summary."""
    if hosts.is_main_host():
        text = "\n".join(summary(workdir, draw=True))
        print(text)
        files.append_log(workdir, text)


def summary(workdir: pathlib.Path, *, draw: bool) -> list[str]:
    """Returns the lines that sum up a run; draw: with its curves drawn anew."""
    from dapo_jax.report import plots, runs  # matplotlib: not before the first step

    run, curves = runs.load_run(workdir), workdir / "curves.png"
    if draw:
        plots.save(plots.curves({workdir.name: run}), curves)
    return [*runs.summary_lines(run), f"curves: {curves}"]


def require_trained(workdir: pathlib.Path) -> None:
    """Ends all processes with status 1 after a run of which no update had a gradient."""
    from dapo_jax.report import runs

    if hosts.on_main(lambda: runs.idle_steps(run := runs.load_run(workdir)) == len(run.rows)):
        raise SystemExit(
            "error: nothing was trained: no step had an update with a gradient. The alarms, in "
            "log.txt too, name the settings to look at"
        )


def finished_lines(config: ConfigDict, workdir: pathlib.Path, origin) -> list[str]:
    """Returns the summary of a run that has done all steps of this config; [] for any other."""
    if not all((workdir / name).is_file() for name in ("metrics.jsonl", "config.json")):
        return []
    start.check(config)
    rows = files.read_rows(workdir / "metrics.jsonl")
    done = rows[-1]["step"] + 1 if rows else 0
    if done != config.num_steps:
        return []
    checks.check_same_recipe(config, workdir)
    if files.read_json(workdir / "config.json").get("num_steps") != done:
        return []  # killed on its way to more steps: there may be no checkpoint of this one
    start.origin_of(workdir, origin)
    return [
        f"finished: {done} of {done} steps in {workdir}; raise num_steps to go on, as "
        f"--config.num_steps={2 * done}",
        *summary(workdir, draw=not (workdir / "curves.png").is_file()),  # a kill after the last row
    ]
