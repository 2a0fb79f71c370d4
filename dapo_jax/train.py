"""DAPO training (arXiv 2503.14476): one SPMD program samples, grades and updates.

    python -m dapo_jax.train --config=configs/tiny.py --workdir=DIR [--config.algo.eps_high=0.24]

A step of DAPO differs from one of GRPO in four ways: the upper clip is higher (Eq. 10), groups that
are all right or all wrong are replaced by new ones (Eq. 11), every token weighs the same (Eq. 12),
and length is punished softly before it is cut (Eq. 13). `rl_step` is one step in the paper's order;
`finish` keeps its books.

The same command resumes a run that was stopped. --start=run:DIR@STEP begins with checkpoint STEP of
the run in DIR, under another config (a fork). On several hosts the command is given on each of
them, with --distributed. Exit status: 0: done. 75: stopped by a signal; the last step that
it can resume at is saved. Run the same command again to resume. Anything else is an error, 1 also
that no step of the run had an update with a gradient.
"""

import contextlib
import dataclasses
import functools
import pathlib

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from dapo_jax import algorithm, evaluate, learner, losses, partial_rollouts, rollout
from dapo_jax.checkpoints import digests
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.cli import command, compile_cache, config_flags
from dapo_jax.lifetime import Run, begin, conclude, finished_lines, require_trained
from dapo_jax.logs import alarms
from dapo_jax.logs.metrics import Step, Stopwatch, step_row
from dapo_jax.sampler.session import Session
from dapo_jax.setup import dry_run, start
from dapo_jax.types import Rollouts
from sharding import hosts


def train(config: ConfigDict, workdir: pathlib.Path, origin=None, profile=None) -> None:
    """Runs, or resumes, the config in `workdir` until config.num_steps rollout steps are done.

    origin: the start.Origin of a fork. profile: the step to write a trace of.
    """
    stopped = None
    if lines := hosts.on_main(lambda: finished_lines(config, workdir, origin)):
        print("\n".join(lines))
        require_trained(workdir)
        return
    with contextlib.ExitStack() as stack:
        run, state, progress = begin(config, workdir, stack, origin)
        if profile is not None and profile not in range(run.first_step, config.num_steps):
            steps = f"{run.first_step} to {config.num_steps - 1}"
            raise ValueError(f"--profile={profile}: give one of the steps to come, {steps}")
        begins = run.first_step == run.begin_step
        if begins and run.sets and not run.evaluates_in(run.first_step):
            run.evaluate_alone(state, run.first_step)  # a fork: all have a first point
        for step in range(run.first_step, config.num_steps):
            folder = workdir / "profile" / str(hosts.number() or "")
            with jax.profiler.trace(folder) if step == profile else contextlib.nullcontext():
                state, progress, stopped = rl_step(run, step, state, progress)
            if stopped:
                raise SystemExit(stopped)
    conclude(workdir)
    require_trained(workdir)


def rl_step(
    run: Run, step: int, state: learner.TrainState, progress: Progress
) -> tuple[learner.TrainState, Progress, str | None]:
    """Takes one RL step: (state, progress, the message to stop with or None)."""
    config, watch = run.config, Stopwatch()

    # Sample and grade groups until enough are informative (dynamic sampling, Eq. 11).
    rollouts, scores, session = sample(run, step, run.sampler_weights(state), progress, watch)
    if stopped := at_generation_cap(run, step, rollouts):
        return state, dataclasses.replace(progress, session=None), stopped

    # Reward correctness (Eq. 7) and length (Eq. 13), and compare inside each group (Eq. 9).
    reward_PG = algorithm.shaped_reward(
        rollouts.correct_PG, rollouts.score_PG, rollouts.length_PG, **overlong(config)
    )
    advantage_PG = advantages(config, rollouts, reward_PG)
    run.record.rollouts(step, rollouts, reward_PG)  # written behind the updates

    # Update on one mini-batch of the kept groups after the other (Eq. 8, 10 and 12).
    rate = learner.scheduled_rate(step, **schedule(config))
    with watch("update"):
        state, updates = take_updates(run, state, rollouts, advantage_PG, rate)

    done = Step(config, step, rollouts, reward_PG, updates, rate, scores)
    return finish(run, done, state, progress, session, watch)


def finish(
    run: Run,
    done: Step,
    state: learner.TrainState,
    progress: Progress,
    session: Session | None,
    watch: Stopwatch,
) -> tuple[learner.TrainState, Progress, str | None]:
    """Keeps the books of a step whose updates are taken: (state, progress, why to stop or None).

    The order, by which rows and checkpoints agree after a kill at any instant:

    1. A state that is not finite ends the run. The state's arrays are digested, and the responses'
       file is waited for.
    2. The row of metrics is made, once, with the digests, and the alarms look at it.
    3. Where a run may resume, the session that carries responses on is closed: checkpoints have no
       keys and values.
    4. A policy that no later step samples is evaluated.
    5. A snapshot of state and progress is taken there, this row in it, and saved if it is due; the
       last one is waited for, so that a run with its last row has its last checkpoint.
    6. The row is written and shown. After a kill before this, the checkpoint's row is written.
    """
    config, step, rollouts = run.config, done.step, done.rollouts
    alarms.require_finite_state(state, step)
    sums = digests.sums_on_devices(state)
    with watch("save"):
        arrays = digests.described(state, sums)
        digested = run.record.digests(arrays)

    retired = run.retire_solved(rollouts, progress)
    tokens = progress.sampled_tokens_total + rollouts.stats.sampled_tokens
    done = dataclasses.replace(
        done,
        sampled_tokens_total=tokens,
        retired_prompts=len(retired),
        seconds=(run.start_seconds if step == run.first_step else {}) | watch.seconds(),
    )
    row = step_row(done) | digested
    stopped = run.alarms.look(row, done, before=progress.row or {})

    ends = step + 1 == config.num_steps
    resumable = ends or bool(stopped) or run.may_resume_at(step + 1)
    if session and resumable:
        session.close()
        session = None

    if run.sets and (ends or (stopped and run.evaluates_in(step + 1))):
        run.evaluate_alone(state, step + 1)

    progress = Progress(rollouts.cursor, tokens, row, rollouts.partial, retired, session)
    if resumable:
        run.snapshots.take(step + 1, state, progress, arrays, force=ends or bool(stopped))

    run.record.step(row, rollouts, done.reward_PG)
    return state, progress, stopped


def sample(
    run: Run, step: int, weights: dict, progress: Progress, watch: Stopwatch
) -> tuple[Rollouts, dict[str, float], Session | None]:
    """Samples and grades one step's groups (Eq. 11), and beside them an evaluation that is due.

    Returns (the rollouts, the scores as keys of a metrics row, the session with partial rollouts).
    The evaluation's requests, which run to their ends, are asked for before training's new ones,
    which fill the slots that they leave.
    """
    if session := progress.session:
        session.resume(weights)
    else:
        session = Session(run.programs.engine, weights, *run.streams)
    goes_on = session if run.config.rollout.partial_rollout_steps else None
    sets = run.sets if run.evaluates_in(step) else {}
    how = {"first_stream": rollout.TRAINING + 1}
    with evaluate.Evaluation(session, sets, **how) as evaluation:
        with watch("rollout"):
            rollouts = sample_groups(run, session, progress, evaluation)
        if not sets:
            return rollouts, {}, goes_on
        with watch("evaluate"):
            return rollouts, run.scores(evaluation, finished_steps=step), goes_on


def sample_groups(
    run: Run, session: Session, progress: Progress, evaluation: evaluate.Evaluation
) -> Rollouts:
    """Samples until enough of training's groups are informative."""
    r, stream = run.config.rollout, run.remaining(progress).__getitem__
    step = {
        "group_size": r.group_size,
        "num_prompts": r.num_prompts,
        "max_prompts": r.generation_prompts * r.max_generation_batches,
        "dynamic_sampling": run.config.algo.dynamic_sampling,
        "report": run.record.display.phase,
        "success": rollout.success_by(run.config.algo.filter_groups, **overlong(run.config)),
        "on_other_groups": evaluation.take,
    }
    step["expected_rate"] = min(1.0, r.num_prompts / r.generation_prompts)
    if last := progress.row:
        step["expected_rate"] = last["groups/informative"] / last["groups/sampled"]
    of_run = (session, stream, run.data.train.grade)
    cursor, partial = progress.cursor, progress.partial
    sizes = {"group_size": r.group_size, "max_tokens": r.max_response_tokens}
    if not (
        r.partial_rollout_steps and partial_rollouts.fits(partial, **sizes)
    ):  # a fork, of another config
        cursor, partial = min([cursor, *(it.cursor for it in partial)]), []
    if steps := r.partial_rollout_steps:
        how = {"partial_rollout_steps": steps, **step}
        return partial_rollouts.collect_partial(*of_run, cursor, partial, **how)
    return rollout.collect(*of_run, cursor, **step)


def at_generation_cap(run: Run, step: int, rollouts: Rollouts) -> str | None:
    """The message to stop with where the cap left too few groups and the config says to stop."""
    r, kept = run.config.rollout, len(rollouts.kept)
    if kept == r.num_prompts:
        return None
    message = (
        f"step {step}: {r.max_generation_batches} generation batches of {r.generation_prompts} "
        f"prompts gave {kept} informative groups of the {r.num_prompts} wanted, at an accuracy of "
        f"{rollouts.correct_PG.mean():.1%} (rollout.on_generation_cap = {r.on_generation_cap!r}). "
        f"{alarms.cap_advice(run.config, rollouts)}"
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
    names = ("learning_rate", "warmup_steps", "decay")
    return {name: config.learner[name] for name in names} | {"num_steps": config.num_steps}


def advantages(config: ConfigDict, rollouts: Rollouts, reward_PG: np.ndarray) -> np.ndarray:
    """The advantages of the kept groups' responses, scaled as the config says; others' are 0."""
    kept, advantage_PG = rollouts.kept, np.zeros_like(reward_PG)
    scaled = losses.ADVANTAGES[config.algo.advantage_scale]
    advantage_PG[kept] = scaled(reward_PG[kept], rollouts.length_PG[kept])
    return advantage_PG


def take_updates(
    run: Run, state: learner.TrainState, rollouts: Rollouts, advantage_PG, rate: float
):
    """(state, each update's metrics) after one pass over the kept groups."""
    config, updates = run.config, []
    per_update = config.rollout.num_prompts // config.updates_per_step
    chunks = rollout.minibatches(rollouts.kept, groups_per_update=per_update)
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
    config, workdir = CONFIG.value, pathlib.Path(WORKDIR.value)
    hosts.start(several=DISTRIBUTED.value, cpu_devices=config.mesh.cpu_devices)
    origin = start.Origin.parse(START.value) if START.value is not None else None
    if DRY_RUN.value:
        dry_run.run(config, workdir, origin, print if hosts.is_main_host() else lambda line: None)
    else:
        compile_cache.enable(several=DISTRIBUTED.value)
        train(config, workdir, origin, PROFILE.value)


if __name__ == "__main__":
    CONFIG = config_flags.define_config()
    WORKDIR = command.define_workdir()
    START = flags.DEFINE_string(
        "start",
        None,
        "run:DIR@STEP: begins with the checkpoint after STEP steps of the run in DIR, its workdir. "
        "Policy, moments, place in the prompt stream and randomness go on, under this config.",
    )
    PROFILE = flags.DEFINE_integer(
        "profile", None, "Write a jax.profiler trace of this step, from 0, into WORKDIR/profile."
    )
    DISTRIBUTED = command.define_distributed()
    DRY_RUN = flags.DEFINE_bool(
        "dry_run", False, "Stop after the checks, the data's report and the memory; write nothing."
    )
    command.run(main)
