"""DAPO training (arXiv 2503.14476): one SPMD program samples, grades and updates.

    python -m dapo_jax.train --config=configs/tiny.py --workdir=DIR [--config.algo.eps_high=0.24]

The same command resumes a run that was stopped. --start=run:DIR@STEP begins with checkpoint STEP of
the run in DIR, under another recipe (a fork). On several hosts the command is given on each of
them, with --distributed. Exit status: 0 done; 75 stopped by a signal with the last finished step
saved, to be given again; anything else is an error. `rl_step` is one RL step, top to bottom.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from dapo_jax import carry_over
from dapo_jax.algorithm import shaped_reward
from dapo_jax.carry_over import collect_carrying
from dapo_jax.evaluate import Evaluation, settings_of, streams
from dapo_jax.learner import TrainState, warmup_learning_rate
from dapo_jax.losses import ADVANTAGES
from dapo_jax.report import plots
from dapo_jax.report.runs import load_run, summary_lines
from dapo_jax.rollout import TRAINING, collect, minibatches, success_by
from dapo_jax.run import (
    build,
    checks,
    command,
    compiled,
    digests,
    dry_run,
    ending,
    hub,
    restore,
    writers,
)
from dapo_jax.run.alarms import (
    Alarms,
    cap_advice,
    require_finite_start,
    require_finite_to_save,
)
from dapo_jax.run.chain import STATE
from dapo_jax.run.failures import telling_saved_steps
from dapo_jax.run.files import append_log
from dapo_jax.run.metrics import Step, Stopwatch, step_row
from dapo_jax.run.record import Record, banner, claim, result_row
from dapo_jax.run.snapshots import Snapshots
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.tasks.datasets import RemainingStream
from dapo_jax.types import Rollouts
from sharding import hosts


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same while a recipe runs; the training state and the progress do not."""

    config: ConfigDict
    programs: build.Programs
    data: build.Data
    start_weights: dict | None
    update: Callable
    old_logprobs: Callable | None
    sets: dict[str, build.EvalSet]  # that are evaluated now and then
    streams: tuple[Stream, ...]  # of every session: training's, then those of the sets
    record: Record
    alarms: Alarms
    snapshots: Snapshots
    first_step: int
    begin_step: int  # the run's first, not 0 in a fork

    def sampler_weights(self, state: TrainState) -> dict:
        """The weights as the sampler shards them."""
        return self.programs.reshard(state.params, self.start_weights)

    def rides(self, step: int) -> bool:
        """Whether the policy that a step samples is evaluated in the same session."""
        return bool(self.sets) and step % self.config.eval.every_steps == 0

    def evaluate(self, weights: dict, finished_steps: int) -> None:
        """Evaluates all sets in a session of their own."""
        session = Session(self.programs.engine, weights, *self.streams)
        with Evaluation(session, self.sets, first_stream=TRAINING + 1) as evaluation:
            self.scores(evaluation, finished_steps, in_row=False)

    def scores(self, evaluation: Evaluation, finished_steps: int, *, in_row: bool) -> dict:
        """Ends an evaluation, writes its results, and returns them as keys of a metrics row."""
        results = evaluation.finish(
            report=self.record.display.phase,
            keep=functools.partial(self.record.responses, finished_steps),
        )
        self.record.results(finished_steps, results, settings_of(self.config))
        self.record.evaluation(finished_steps, result_row(results), in_row=in_row)
        return result_row(results)


def train(config: ConfigDict, workdir: pathlib.Path, origin: restore.Origin | None = None) -> None:
    """Runs, or resumes, the recipe in `workdir` until config.num_steps rollout steps are done.

    origin: the checkpoint of another run to begin with.
    """
    stopped = None
    with contextlib.ExitStack() as stack:
        run, state, progress = start(config, workdir, stack, origin)
        begins = run.first_step == run.begin_step
        if begins and run.sets and not run.rides(run.first_step):  # a fork: all have a first point
            run.evaluate(run.sampler_weights(state), run.first_step)
        for step in range(run.first_step, config.num_steps):
            state, progress, stopped = rl_step(run, step, state, progress)
            if stopped:
                break
    if stopped:
        if hosts.is_main_host():
            append_log(workdir, stopped)
        raise SystemExit(stopped)
    if hosts.is_main_host():
        summary = load_run(workdir)
        plots.save(plots.curves({workdir.name: summary}), workdir / "curves.png")
        text = "\n".join([*summary_lines(summary), f"curves: {workdir / 'curves.png'}"])
        print(text)
        append_log(workdir, text)
        print(f"digest: {ending.write(workdir)} (of {ending.NAME}; dapo_jax.audit compares it)")


def rl_step(
    run: Run, step: int, state: TrainState, progress: dict
) -> tuple[TrainState, dict, str | None]:
    """Samples, grades and trains one step, and records it.

    Returns (state, progress, the message to stop with or None).
    """
    config, watch = run.config, Stopwatch()
    weights = run.sampler_weights(state)
    rollouts, scores = sample(run, step, weights, progress, watch)
    if stopped := at_generation_cap(run, step, rollouts):
        run.snapshots.take(step, state, saved(progress), force=True)
        return state, progress, stopped

    # Rewards (Eq. 7 and 13), and advantages inside each group (Eq. 9, or another scale).
    reward_PG = shaped_reward(
        rollouts.correct_PG, rollouts.score_PG, rollouts.length_PG, **overlong(config)
    )
    advantage_PG = advantages(config, rollouts, reward_PG)
    run.record.rollouts(step, rollouts, reward_PG)  # behind the updates

    # One pass over the kept groups, an update a mini-batch (Eq. 8 and 12).
    del weights  # their memory is the update's
    rate = warmup_learning_rate(step, **schedule(config))
    with watch("update"):
        state, updates = take_updates(run, state, rollouts, advantage_PG, rate)
    sums = digests.sums_on_devices(state)

    sampled_tokens = progress["sampled_tokens_total"] + rollouts.stats.sampled_tokens
    retired = retire_solved(run, rollouts, progress)
    done = Step(
        *(config, step, rollouts, reward_PG, updates, rate, sampled_tokens, scores),
        retired_prompts=len(retired),
    )
    done, stopped = run.alarms.look(done, progress["row"])
    ends = step + 1 == config.num_steps
    if run.sets and (ends or (stopped and run.rides(step + 1))):  # no step follows
        with watch("evaluate"):
            run.evaluate(run.sampler_weights(state), step + 1)
    with watch("save"):
        made = run.record.wait() | {STATE: digests.of_state(state, sums)}
    row = run.record.chained(step_row(done, watch.seconds()), made, progress["row"])
    progress = {
        "cursor": rollouts.cursor,
        "sampled_tokens_total": sampled_tokens,
        "row": row,
        "carried": rollouts.carried,
        "retired": sorted(retired.items()),
    }
    with watch("save"):
        require_finite_to_save(state, updates, step)
        force = ends or bool(stopped)
        run.snapshots.take(step + 1, state, saved(progress), force=force)
    run.record.step(row | step_row(done, watch.seconds()), rollouts, reward_PG)
    return state, progress, stopped


def start(config: ConfigDict, workdir: pathlib.Path, stack: contextlib.ExitStack, origin=None):
    """(run, state, progress) before the first step to do: new, or of a checkpoint.

    Everything is refused, loaded and compiled here. What has to be closed goes onto the stack.
    """
    checks.check(config)
    writers.check(config.log.writers)
    hub.fetch(hub.paths(config), origin and origin.workdir, workdir)
    origin = claim(config, workdir, stack, origin)
    checkpoints = build.checkpoints(config, workdir, keep=config.checkpoint.keep)
    stack.enter_context(telling_saved_steps(checkpoints.latest_step, checkpoints.directory))
    snapshots = stack.enter_context(
        Snapshots(
            checkpoints,
            every_steps=config.checkpoint.every_steps,
            say=print,
            on_failed_save=config.checkpoint.on_failed_save,
        )
    )
    restore.check_parent(config, checkpoints, origin)
    tokenizer = build.tokenizer(config)
    programs = build.programs(config, tokenizer.vocab_size)
    checks.check_divides(config, programs.mesh)
    hosts.on_main(lambda: checks.check_same_recipe(config, workdir))
    data = build.load_data(config, tokenizer, training=True)
    begun = restore.restore(config, workdir, programs, data, checkpoints, origin)
    run = ready(config, workdir, stack, tokenizer, programs, data, begun, snapshots)
    carried = carry_over.from_json(begun.progress.get("carried", ()))
    return run, begun.state, begun.progress | {"carried": carried}


def ready(config, workdir, stack, tokenizer, programs, data, begun, snapshots) -> Run:
    """Loads and compiles what every step needs, and opens the record in `workdir`."""
    start_weights = programs.load_start_weights()
    require_finite_start(programs, begun.directory, begun.step, begun.state, start_weights)

    record = stack.enter_context(Record(config, workdir, begun, tokenizer))
    snapshots.say = record.display.last_line
    record.display.line(banner(config, programs, data, workdir, begun))
    record.display.phase("compiling the update")
    update, old_logprobs = programs.compile_update(), programs.compile_old_logprobs()
    record.display.phase("compiling the sampler")
    sets = data.eval_sets if config.eval.every_steps > 0 else {}
    key = build.key(config, build.ROLLOUT_STREAM)
    training = Stream(key, build.sampling(config, tokenizer))
    of_run = (training, *streams(config, sets))
    programs.engine.compile(*(stream.sampling for stream in of_run))
    return Run(
        config=config,
        programs=programs,
        data=data,
        start_weights=start_weights,
        update=update,
        old_logprobs=old_logprobs,
        sets=sets,
        streams=of_run,
        record=record,
        alarms=Alarms(programs, record.display.line),
        snapshots=snapshots,
        first_step=begun.step,
        begin_step=begun.begin_step,
    )


def saved(progress: dict) -> dict:
    """The progress as a checkpoint describes it."""
    return progress | {"carried": carry_over.to_json(progress["carried"])}


def sample(
    run: Run, step: int, weights: dict, progress: dict, watch: Stopwatch
) -> tuple[Rollouts, dict[str, float]]:
    """Samples and grades one step's groups (Eq. 11), and beside them an evaluation that is due.

    Returns (the rollouts, the scores as keys of a metrics row). The evaluation's requests, which
    run to their ends, are asked for first: training's fill the slots that they leave.
    """
    session = Session(run.programs.engine, weights, *run.streams)
    sets = run.sets if run.rides(step) else {}
    with Evaluation(session, sets, first_stream=TRAINING + 1) as evaluation:
        with watch("rollout"):
            rollouts = sample_groups(run, session, progress, evaluation)
        if not sets:
            return rollouts, {}
        with watch("evaluate"):
            return rollouts, run.scores(evaluation, finished_steps=step, in_row=True)


def sample_groups(run: Run, session: Session, progress: dict, evaluation: Evaluation) -> Rollouts:
    """Samples until enough of training's groups are informative."""
    r, stream = run.config.rollout, remaining(run, progress).__getitem__
    step = {
        "group_size": r.group_size,
        "num_prompts": r.num_prompts,
        "max_prompts": r.generation_prompts * r.max_generation_batches,
        "dynamic_sampling": run.config.algo.dynamic_sampling,
        "report": run.record.display.phase,
        "success": success_by(run.config.algo.filter_groups, **overlong(run.config)),
        "beside": evaluation.take,
    }
    step["expected_rate"] = min(1.0, r.num_prompts / r.generation_prompts)
    if last := progress["row"]:
        step["expected_rate"] = last["groups/informative"] / last["groups/sampled"]
    of_run = (session, stream, run.data.train.grade)
    cursor, carried = progress["cursor"], progress["carried"]
    sizes = {"group_size": r.group_size, "max_tokens": r.max_response_tokens}
    if not (r.carry_over_steps and carry_over.fits(carried, **sizes)):  # a fork, of another recipe
        cursor, carried = min([cursor, *(it.cursor for it in carried)]), []
    if steps := r.carry_over_steps:
        return collect_carrying(*of_run, cursor, carried, carry_over_steps=steps, **step)
    return collect(*of_run, cursor, **step)


def remaining(run: Run, progress: dict) -> RemainingStream:
    """The training prompts in the order of sampling, without those that are retired."""
    retired = dict(progress.get("retired", ()))
    at_least = checks.generation_batch(run.config)[1]
    return RemainingStream(run.data.stream, retired, at_least=at_least)


def retire_solved(run: Run, rollouts: Rollouts, progress: dict) -> dict[int, int]:
    """The retired prompts after a step, in which some may have been solved."""
    least, found = run.config.algo.retire_pass_rate, []
    if least > 0:
        found = [it.cursor for it in rollouts.sampled if it.correct_G.mean() >= least]
    retired = remaining(run, progress).retire(found, next_cursor=rollouts.cursor)
    prompts, (key, batch) = len(run.data.stream), checks.generation_batch(run.config)
    if len(progress.get("retired", ())) <= prompts - batch < len(retired):
        run.record.display.line(
            f"{len(retired):,} of {prompts:,} prompts are retired (algo.retire_pass_rate = "
            f"{least}): fewer than rollout.{key} = {batch:,} remain, so later epochs have all again"
        )
    return retired


def at_generation_cap(run: Run, step: int, rollouts: Rollouts) -> str | None:
    """The message to stop with where the cap left too few groups and the recipe says to stop."""
    r, kept = run.config.rollout, len(rollouts.kept)
    if kept == r.num_prompts:
        return None
    message = (
        f"step {step}: {r.max_generation_batches} generation batches of {r.generation_prompts} "
        f"prompts gave {kept} informative groups of the {r.num_prompts} wanted, at an accuracy of "
        f"{rollouts.correct_PG.mean():.1%} (rollout.on_generation_cap = {r.on_generation_cap!r}). "
        f"{cap_advice(run.config, rollouts)}"
    )
    if r.on_generation_cap == "stop":
        return message
    run.record.display.line(f"{message}. The step trains on {kept} groups")
    return None


def overlong(config: ConfigDict) -> dict[str, float]:
    """The settings of the soft overlong punishment (Eq. 13)."""
    return {
        "max_tokens": config.rollout.max_response_tokens,
        "cache_tokens": config.algo.overlong_cache_tokens,
        "factor": config.algo.overlong_factor,
    }


def schedule(config: ConfigDict) -> dict[str, float]:
    """The settings of the learning rate."""
    c = config.learner
    return {"learning_rate": c.learning_rate, "warmup_steps": c.warmup_steps}


def advantages(config: ConfigDict, rollouts: Rollouts, reward_PG: np.ndarray) -> np.ndarray:
    """The advantages of the kept groups' responses, scaled as the recipe says; others' are 0."""
    kept, advantage_PG = rollouts.kept, np.zeros_like(reward_PG)
    scaled = ADVANTAGES[config.algo.advantage_scale]
    advantage_PG[kept] = scaled(reward_PG[kept], rollouts.length_PG[kept])
    return advantage_PG


def take_updates(run: Run, state: TrainState, rollouts: Rollouts, advantage_PG, rate: float):
    """(state, each update's metrics) after one pass over the kept groups."""
    config, updates = run.config, []
    per_update = config.rollout.num_prompts // config.updates_per_step
    chunks = minibatches(rollouts.kept, groups_per_update=per_update)
    batches = (
        run.programs.minibatch([rollouts.sampled[p] for p in chosen], advantage_PG[chosen])
        for chosen in chunks
    )
    if run.old_logprobs:  # of all of them, before the first update
        old_logprobs = functools.partial(run.old_logprobs, state.params, run.start_weights)
        batches = [dataclasses.replace(b, old_logp_BT=old_logprobs(b)) for b in batches]
    for i, batch in enumerate(batches):
        run.record.display.phase(f"update: {i + 1}/{len(chunks)}")
        state, metrics = run.update(state, run.start_weights, batch, rate)
        # The host is one ahead: it packs while the devices take the update before.
        jax.block_until_ready(updates[-1:])
        updates.append(metrics)
    return state, hosts.fetch(updates)


def main(_):
    hosts.start(several=DISTRIBUTED.value, cpu_devices=CONFIG.value.mesh.cpu_devices)
    if not DRY_RUN.value:
        compiled.keep(several=DISTRIBUTED.value)
    origin = restore.Origin.parse(START.value) if START.value is not None else None
    workdir = pathlib.Path(WORKDIR.value)
    if DRY_RUN.value:
        say = print if hosts.is_main_host() else lambda line: None
        dry_run.run(CONFIG.value, workdir, origin, say)
    else:
        train(CONFIG.value, workdir, origin)


if __name__ == "__main__":
    CONFIG = command.define_config()
    WORKDIR = command.define_workdir()
    START = command.define_start()
    DISTRIBUTED = command.define_distributed()
    DRY_RUN = flags.DEFINE_bool(
        "dry_run", False, "Stop after the checks, the data's report and the memory; write nothing."
    )
    command.run(main)
