"""DAPO training (arXiv 2503.14476): one SPMD program samples, grades and updates.

    python -m dapo_jax.train --config=configs/tiny.py --workdir=DIR [--config.algo.eps_high=0.24]

A step of DAPO differs from one of GRPO in four ways: the upper clip is higher (Eq. 10), groups that
are all right or all wrong are replaced by new ones (Eq. 11), every token weighs the same (Eq. 12),
and length is punished softly before it is cut (Eq. 13). `rl_step` is one step in the paper's order.

The same command resumes a run that was stopped. --start=run:DIR@STEP begins with checkpoint STEP,
or best, of the run in DIR, under another config (a fork). On several hosts it is given on each of
them, with --distributed. Exit status: 0: done. 75: stopped by a signal, or by storage that fails
for a while: run the same command again. 1: an error, or no step had an update with a gradient.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping

import jax
from absl import flags

from dapo_jax import algorithm, learner, losses, rollout
from dapo_jax.checkpoints import begun, digests
from dapo_jax.checkpoints.progress import Progress, best_of
from dapo_jax.cli import command, config_flags
from dapo_jax.evaluation import Evaluation, settings_of
from dapo_jax.logs import alarms, metrics
from dapo_jax.process import hosts
from dapo_jax.sampler.session import Session
from dapo_jax.setup import components, dry_run, start
from sharding import rules


def train(config, workdir: pathlib.Path, parent=None, profile: int | None = None) -> None:
    """Runs, or resumes, the config in `workdir` until config.num_steps rollout steps are done.

    parent: the begun.Parent of a fork. profile: the step to write a trace of.
    """
    if hosts.on_main(lambda: start.is_finished(config, workdir, parent)):
        return conclude(workdir, was_finished=True)
    if profile is not None and not 0 <= profile < config.num_steps:
        raise ValueError(f"--profile={profile}: give one of the steps 0 to {config.num_steps - 1}")
    with contextlib.ExitStack() as stack:
        run, state, progress = start.open_run(config, workdir, parent, stack)
        if profile is not None and profile < run.step:
            raise ValueError(f"--profile={profile}: that step is done; the next is {run.step}")
        # Not evaluated yet: a fork's start between two evaluations, and the last policy of a run
        # whose num_steps was lowered to the steps that it has.
        begins = run.step == run.begin_step and not run.evaluates_in(run.step)
        result = workdir / "eval" / f"{run.step}.json"
        is_due = run.sets and (begins or run.step == config.num_steps)
        if is_due and hosts.on_main(lambda: not result.is_file()):
            evaluate_alone(run, state, run.step)
        session = None  # of partial rollouts: it goes on in the next step
        for step in range(run.step, config.num_steps):
            folder = workdir / "profile" / str(jax.process_index() or "")
            with jax.profiler.trace(folder) if step == profile else contextlib.nullcontext():
                stepped = rl_step(run, step, state, progress, session)
            state, progress, session, stop_message = stepped
            if stop_message:
                raise SystemExit(stop_message)
    return conclude(workdir)


def rl_step(run: start.Run, step: int, state: learner.TrainState, progress: Progress, session):
    """Takes one RL step: (state, progress, session, the message to stop with, if any).

    session: of the step before, where partial rollouts keep their pages of the cache; else None.
    """
    watch = metrics.Stopwatch(jax.profiler.TraceAnnotation)

    # Groups are sampled and graded until enough are informative (dynamic sampling, Eq. 11).
    rollouts, scores, session = sample(run, step, state, progress, session, watch)
    if stop_message := at_generation_cap(run, step, rollouts):
        return state, progress, None, stop_message

    reward_PG = reward(run.config, rollouts)  # correctness (Eq. 7) and length (Eq. 13)
    # Compared inside each group (Eq. 9), by a row of losses.ADVANTAGES.
    tokens_PG, scale = rollouts.sampled_tokens_PG, run.config.algo.advantage_scale
    advantage_PG = losses.advantages(reward_PG, rollouts.kept, tokens_PG, scale=scale)
    run.record.rollouts(step, rollouts, reward_PG)  # written beside the updates

    # One mini-batch of the kept groups after the other (Eq. 8, 10 and 12).
    rate = learner.scheduled_rate(step, run.programs.settings, num_steps=run.config.num_steps)
    with watch("update"):
        state, updates = update(run, state, rollouts, advantage_PG, rate)

    done = metrics.Step(run.config, step, rollouts, reward_PG, updates, rate, scores)
    return finish(run, done, state, progress, session, watch)


def sample(run: start.Run, step: int, state, progress: Progress, session, watch):
    """Samples and grades one step's groups (Eq. 11), and beside them an evaluation that is due.

    Returns (the rollouts, the scores as entries of a metrics row, the session of partial rollouts).
    The evaluation's requests are submitted first; training's prompts fill the slots that they
    leave.
    """
    r, weights = run.config.rollout, run.programs.reshard(state.params, run.start_weights)
    if session:
        session.resume(weights)
    else:
        session = run.session(weights, *run.streams)
    del weights
    # Expected of the groups to come: as in the step before, or by the config's sizes.
    informative_share = min(1.0, r.num_prompts / r.generation_prompts)
    if last := progress.row:
        informative_share = last["groups/informative"] / last["groups/sampled"]
    cursor, partial = rollout.taken_up(run.step_plan, progress.cursor, progress.partial)
    with Evaluation(session, is_due=run.evaluates_in(step)) as evaluation:
        with watch("rollout"):
            rollouts = rollout.collect(
                session,
                run.step_plan,
                cursor,
                partial,
                informative_share=informative_share,
                report=run.record.display.phase,
                on_other_groups=evaluation.take,
            )
        goes_on = session if r.partial_rollout_steps else None
        if not run.evaluates_in(step):
            return rollouts, {}, goes_on
        with watch("evaluate"):
            return rollouts, scores_of(run, evaluation, finished_steps=step), goes_on


def at_generation_cap(run: start.Run, step: int, rollouts) -> str | None:
    """The message to stop with where the cap left too few groups and the config says to stop."""
    r, kept = run.config.rollout, len(rollouts.kept)
    if kept == r.num_prompts:
        return None
    message = (
        f"step {step}: {r.max_generation_batches} generation batches of {r.generation_prompts} "
        f"prompts gave {kept} informative groups of {r.num_prompts}, at an accuracy of "
        f"{rollouts.correct_PG.mean():.1%}. {alarms.cap_advice(run.config, rollouts)}"
    )
    if r.on_generation_cap == "stop":
        return message
    run.record.display.line(f"{message}. The step trains on {kept} groups")
    return None


def reward(config, rollouts):
    """Rewards each response [P, G]: its correctness or score, less the overlong punishment."""
    graded = (rollouts.correct_PG, rollouts.score_PG, rollouts.length_PG)
    return algorithm.shaped_reward(*graded, **components.overlong(config))


def update(run: start.Run, state: learner.TrainState, rollouts, advantage_PG, rate: float):
    """(state, each update's metrics) after one pass over the kept groups."""
    programs, updates = run.programs, []
    batches = learner.minibatches(rollouts, advantage_PG, programs.settings, programs.mesh)
    if run.recompute_old_logp:  # of all of them, before the first update
        policy = (state.params, run.start_weights)
        batches = [
            dataclasses.replace(batch, old_logp_BT=run.recompute_old_logp(*policy, batch))
            for batch in batches
        ]
    rate = hosts.place(rate, rules.replicated(programs.mesh))
    for i, batch in enumerate(batches):
        run.record.display.phase(f"update: {i + 1}")
        state, values = run.update(state, run.start_weights, batch, rate)
        # The host is one ahead: it packs while the devices take the update before.
        jax.block_until_ready(updates[-1:])
        updates.append(values)
    return state, hosts.fetch(updates)


def finish(
    run: start.Run,
    done: metrics.Step,
    state: learner.TrainState,
    progress: Progress,
    session: Session | None,
    watch: metrics.Stopwatch,
):
    """Keeps the books of a step whose updates are taken; returns what `rl_step` does.

    The order, by which rows and checkpoints agree after a kill at any instant:

    1. A state that is not finite ends the run. The row of metrics is made, once, with the digests
       of the state and of the responses, and the alarms look at it.
    2. Where a run may resume, the session of partial rollouts is closed: checkpoints have no keys
       and values. The last policy is evaluated by itself, a stopped run's if that is due.
    3. The previous snapshot is saved if its policy is the best so far. Where a run may resume, a
       snapshot of state and progress, this row in it, is taken, and saved if it is due; the last
       step waits for its save, so that a run with its last row has its last checkpoint.
    4. The row is written and shown. After a kill before this, the next start takes it from the
       checkpoint.
    """
    config, step, rollouts = run.config, done.step, done.rollouts
    alarms.require_finite_state(state, step)
    with watch("save"):
        arrays = digests.of_arrays(state)
        digested = run.record.digests(arrays)

    tokens = progress.sampled_tokens_total + rollouts.stats.sampled_tokens
    seconds = (run.seconds if step == run.step else {}) | watch.seconds()
    before = run.snapshots.spent_seconds()
    seconds |= {"snapshot": before, "total": seconds["total"] + before}
    done = dataclasses.replace(done, sampled_tokens_total=tokens, seconds=seconds)
    row = metrics.step_row(done) | digested
    stop_message = run.alarms.look(row, done, before=progress.row or {})

    is_last = step + 1 == config.num_steps
    resumable = is_last or bool(stop_message) or run.may_resume_at(step + 1)
    if session and resumable:
        session.close()
        session = None

    evaluated = {step: done.evaluation}
    if run.sets and (is_last or (stop_message and run.evaluates_in(step + 1))):
        evaluated[step + 1] = evaluate_alone(run, state, step + 1)

    scores = with_scores(progress.scores, evaluated, run)
    if best_of(scores, range(run.begin_step + 1, step + 1)) == step:
        run.snapshots.keep(step)  # the policy that this step has sampled and evaluated
    progress = Progress(rollouts.cursor, tokens, row, rollouts.partial, scores)
    if resumable:
        run.snapshots.take(step + 1, state, progress, arrays, force=is_last or bool(stop_message))

    run.record.step(row, rollouts, done.reward_PG)
    return state, progress, session, stop_message


def with_scores(scores: Mapping, rows: Mapping[int, Mapping], run: start.Run) -> dict:
    """Adds what evaluations found, rows by finished steps, to the scores of checkpoint.best.

    Those of another set, of other prompts or settings, cannot be compared and go.
    """
    if not run.best:
        return {}
    of_set, mean = dict(scores.get(run.best, {})), f"eval/{run.config.checkpoint.best}/mean@"
    for finished_steps, row in rows.items():
        of_set |= {str(finished_steps): row[key] for key in row if key.startswith(mean)}
    return {run.best: of_set}


def evaluate_alone(run: start.Run, state: learner.TrainState, finished_steps: int):
    """Evaluates all sets in a session of their own; returns the scores as entries of a row."""
    weights = run.programs.reshard(state.params, run.start_weights)
    session = run.session(weights, *run.streams)
    with Evaluation(session) as evaluation:
        return scores_of(run, evaluation, finished_steps)


def scores_of(run: start.Run, evaluation, finished_steps: int) -> dict[str, float]:
    """Ends an evaluation, writes its results, and returns them as entries of a metrics row."""
    results = evaluation.finish(
        report=run.record.display.phase,
        keep=lambda name, groups: run.record.responses(finished_steps, name, groups),
    )
    return run.record.results(finished_steps, results, settings_of(run.config))


def conclude(workdir: pathlib.Path, *, was_finished: bool = False) -> None:
    """Prints a finished run's summary and draws its curves; status 1 where nothing was trained."""
    from dapo_jax.report import summary  # matplotlib: not before the first step

    trained = hosts.on_main(lambda: summary.conclude(workdir, was_finished=was_finished))
    if not trained:
        raise SystemExit(
            "error: nothing was trained: no step had an update with a gradient; the alarms say why"
        )


def main(_):
    given = flags.FLAGS
    config, workdir = given.config, pathlib.Path(given.workdir)
    hosts.start(several=given.distributed, cpu_devices=config.mesh.cpu_devices)
    text, parent = given.start, None
    if text is not None:
        parent = hosts.on_main(lambda: begun.Parent.parse(text, workdir))
    if given.dry_run:
        return dry_run.dry_run(config, workdir, parent)
    return train(config, workdir, parent, given.profile)


if __name__ == "__main__":
    config_flags.define_config()
    command.define_workdir()
    command.define_distributed()
    flags.DEFINE_string("start", None, "run:DIR@STEP: the checkpoint of a run to begin with.")
    flags.DEFINE_integer("profile", None, "Trace this step, from 0, into WORKDIR/profile.")
    flags.DEFINE_bool("dry_run", False, "Check all, report data and memory, and write nothing.")
    command.run(main)
