"""DAPO training (arXiv 2503.14476): one SPMD program samples, verifies and updates.

    python -m dapo_jax.train --config=configs/tiny.py --workdir=DIR [--config.algo.eps_high=0.24]

The same command resumes a run that was stopped. On several hosts it is given on each of them, with
--distributed. Exit status: 0 done; 75 stopped by SIGTERM with the last finished step saved, to be
given again; anything else is an error. `train` holds one RL step, top to bottom.
"""

import contextlib
import json
import pathlib

import jax
from absl import flags, logging
from clu import parameter_overview
from ml_collections import ConfigDict

from dapo_jax.algorithm import group_advantage, outcome_reward, soft_overlong_penalty
from dapo_jax.evaluate import evaluate, result_row, write_results
from dapo_jax.learner import make_batch, place_batch, warmup_learning_rate
from dapo_jax.report import plots
from dapo_jax.report.runs import load_run, summary_lines
from dapo_jax.rollout import collect, minibatches, rollout_rows
from dapo_jax.run import build, checks, command
from dapo_jax.run.display import Display, Sample, evaluation_line
from dapo_jax.run.files import MetricsWriter, atomic_file, write_rollouts
from dapo_jax.run.metrics import Step, Stopwatch, step_row
from dapo_jax.run.snapshots import Boundaries
from dapo_jax.run.timeline import plot_timeline
from dapo_jax.sampler.session import Session
from dapo_jax.tasks.readers import PROMPT_TEMPLATE
from dapo_jax.types import Batch, Rollouts
from sharding import hosts

SHOWN_SAMPLES = 4


def train(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Run, or resume, the recipe in `workdir` until config.num_steps rollout steps are done."""
    checks.check(config)
    with contextlib.ExitStack() as stack:
        checkpoints = build.checkpoints(config, workdir, keep=config.checkpoint.keep)
        boundaries = stack.enter_context(
            Boundaries(checkpoints, every_steps=config.checkpoint.every_steps, say=print)
        )
        tokenizer = build.tokenizer(config)
        programs = build.programs(config, tokenizer.vocab_size)
        checks.check_divides(config, programs.mesh)
        hosts.on_main(lambda: checks.check_same_recipe(config, workdir))
        data = build.load_data(config, tokenizer, training=True)
        restored = checkpoints.restore_latest(programs.state, report=logging.warning)
        if restored is None:
            first_step, state = 0, programs.start_state()
            progress = {"cursor": 0, "sampled_tokens_total": 0, "row": None}
        else:
            first_step, state, progress = restored
        start_weights = programs.load_start_weights()
        record_config(config, workdir)
        run_key = build.key(config, build.ROLLOUT_STREAM)
        r, algo = config.rollout, config.algo
        sampling = build.sampling(config, tokenizer)

        display = stack.enter_context(
            Display(config.num_steps, first_step, quiet=not hosts.is_main_host())
        )
        boundaries.say = display.last_line
        display.line(banner(config, programs, data, state.params, workdir, first_step))
        writer = None
        if hosts.is_main_host():
            resume_step = first_step - 1 if first_step else None
            writer = stack.enter_context(MetricsWriter(workdir, resume_step=resume_step))
            if first_step and not writer.has_row(first_step - 1):
                writer.write(progress["row"])  # killed between the checkpoint and its row

        def evaluate_now(params):
            return evaluate(config, programs, params, data.eval_sets, report=display.phase)

        display.phase("compiling the update")
        update = programs.compile_update()
        display.phase("compiling the sampler")
        programs.engine.compile(sampling)
        for chosen in data.eval_sets.values() if config.eval.every_steps else ():
            programs.engine.compile(chosen.sampling)
        sampler_params = programs.reshard(state.params, start_weights)
        if first_step == 0 and config.eval.every_steps and data.eval_sets:
            results = evaluate_now(sampler_params)
            write_results(workdir, 0, results)
            display.line(evaluation_line({"step": -1, **result_row(results)}))

        for step in range(first_step, config.num_steps):
            watch = Stopwatch()

            # Sample and verify until there are enough informative groups (Eq. 11).
            with watch("rollout"):
                rollouts = collect(
                    Session(programs.engine, sampler_params, run_key, sampling),
                    data.stream.__getitem__,
                    data.train.grade,
                    progress["cursor"],
                    group_size=r.group_size,
                    num_prompts=r.num_prompts,
                    max_prompts=r.generation_prompts * r.max_generation_batches,
                    expected_rate=informative_rate(config, progress["row"]),
                    dynamic_sampling=algo.dynamic_sampling,
                    report=display.phase,
                )
            if len(rollouts.kept) < r.num_prompts:
                message = generation_cap_message(config, step, rollouts)
                if r.on_generation_cap == "stop":
                    boundaries.passed(step, state, progress, force=True)
                    stack.close()
                    raise SystemExit(message)
                display.line(f"{message}. The step trains on {len(rollouts.kept)} groups")

            # Rewards (Eq. 7 and 13) and advantages inside each group (Eq. 9).
            reward_PG = outcome_reward(
                rollouts.correct_PG, rollouts.score_PG
            ) + soft_overlong_penalty(
                rollouts.length_PG,
                max_tokens=r.max_response_tokens,
                cache_tokens=algo.overlong_cache_tokens,
                factor=algo.overlong_factor,
            )
            advantage_PG = group_advantage(reward_PG)

            # One pass over the kept groups, an update a mini-batch (Eq. 8 and 12).
            learning_rate = warmup_learning_rate(
                step,
                learning_rate=config.learner.learning_rate,
                warmup_steps=config.learner.warmup_steps,
            )
            del sampler_params  # their memory is the update's
            updates = []
            groups_per_update = r.num_prompts // config.updates_per_step
            chunks = minibatches(rollouts.kept, groups_per_update=groups_per_update)
            with watch("update"):
                for i, chosen in enumerate(chunks):
                    display.phase(f"update: {i + 1}/{len(chunks)}")
                    batch = minibatch(config, programs, rollouts, advantage_PG, chosen)
                    state, metrics = update(state, start_weights, batch, learning_rate)
                    # The host is one ahead: it packs while the devices take the update before.
                    jax.block_until_ready(updates[-1:])
                    updates.append(metrics)
                updates = hosts.fetch(updates)
            sampler_params = programs.reshard(state.params, start_weights)

            results = {}
            if is_due(step, config.eval.every_steps, config.num_steps) and data.eval_sets:
                with watch("evaluate"):
                    results = evaluate_now(sampler_params)
                write_results(workdir, step + 1, results)

            sampled_tokens_total = progress["sampled_tokens_total"] + rollouts.stats.sampled_tokens
            finished = Step(
                config=config,
                step=step,
                rollouts=rollouts,
                reward_PG=reward_PG,
                updates=updates,
                learning_rate=learning_rate,
                sampled_tokens_total=sampled_tokens_total,
                evaluation=result_row(results),
            )
            save_rollouts(config, workdir, step, rollouts, reward_PG)
            progress = {
                "cursor": rollouts.cursor,
                "sampled_tokens_total": sampled_tokens_total,
                "row": step_row(finished, watch.seconds()),
            }
            with watch("save"):
                last = step + 1 == config.num_steps
                boundaries.passed(step + 1, state, progress, force=last)
            row = step_row(finished, watch.seconds())
            if writer is not None:
                writer.write(row)
            every = config.log.samples_every_steps
            if every and step % every == 0:
                display.samples(step, samples(rollouts, reward_PG))
                if hosts.is_main_host():
                    plot_timeline(rollouts.stats.blocks, workdir / "timeline.png")
            display.step(row)
    if hosts.is_main_host():
        run = load_run(workdir)
        plots.save(plots.curves({workdir.name: run}), workdir / "curves.png")
        print("\n".join([*summary_lines(run), f"curves: {workdir / 'curves.png'}"]))


def minibatch(config, programs, rollouts: Rollouts, advantage_PG, chosen) -> Batch:
    """One update's batch on the mesh: the responses of the groups `chosen`, packed into rows."""
    num_micro, rows, row_tokens = build.batch_shape(config)
    batch = make_batch(
        [rollouts.sampled[p] for p in chosen],
        advantage_PG[chosen],
        loss_aggregation=config.algo.loss_aggregation,
        overlong_filtering=config.algo.overlong_filtering,
        row_tokens=row_tokens,
        micro_batch_rows=rows,
        num_micro=num_micro,
        share_prompts=programs.learning.kernels.shares_prompts,
    )
    return place_batch(batch, programs.mesh)


def is_due(step: int, every_steps: int, num_steps: int) -> bool:
    """Whether what is done every so many steps (0: never), and at the end, is due after `step`."""
    return every_steps > 0 and ((step + 1) % every_steps == 0 or step + 1 == num_steps)


def informative_rate(config, row: dict | None) -> float:
    """The share of informative groups to expect of a step: the last one's, or the recipe's."""
    if row is None:
        return min(1.0, config.rollout.num_prompts / config.rollout.generation_prompts)
    return row["groups/informative"] / row["groups/sampled"]


def generation_cap_message(config, step: int, rollouts: Rollouts) -> str:
    """What the generation cap left a step with, and the settings to change."""
    return (
        f"step {step}: {config.rollout.max_generation_batches} generation batches of "
        f"{config.rollout.generation_prompts} prompts gave {len(rollouts.kept)} informative groups "
        f"of the {config.rollout.num_prompts} wanted, at an accuracy of "
        f"{rollouts.correct_PG.mean():.1%} (rollout.on_generation_cap = "
        f"{config.rollout.on_generation_cap!r}). Raise rollout.max_generation_batches and "
        "give the command again, or start anew with other data"
    )


def save_rollouts(config, workdir, step, rollouts: Rollouts, reward_PG) -> None:
    """Every so many steps: all responses to DIR/rollouts/<step>.jsonl.gz."""
    every = config.log.rollouts_every_steps
    if hosts.is_main_host() and every and step % every == 0:
        rows = rollout_rows(rollouts.sampled, reward_PG, rollouts.kept)
        write_rollouts(workdir / "rollouts" / f"{step}.jsonl.gz", rows)


def samples(rollouts: Rollouts, reward_PG) -> list[Sample]:
    """The first response of the step's first groups, for a person to read."""
    before, after = PROMPT_TEMPLATE.split("{problem}")
    return [
        Sample(
            prompt=group.prompt.example.text.removeprefix(before).removesuffix(after),
            response=group.responses[0].text,
            truth=group.prompt.example.answer,
            prediction=group.responses[0].verdict.prediction,
            correct=group.responses[0].verdict.correct,
            status=group.responses[0].verdict.status,
            reward=float(reward_PG[p, 0]),
            response_tokens=len(group.responses[0].tokens_T),
            truncated=not group.responses[0].stopped,
        )
        for p, group in enumerate(rollouts.sampled[:SHOWN_SAMPLES])
    ]


def record_config(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Write DIR/config.json, once the start has succeeded."""
    if hosts.is_main_host():
        with atomic_file(workdir / "config.json") as out:
            recipe = json.loads(config.to_json_best_effort())
            out.write((json.dumps(recipe, indent=1) + "\n").encode())


def banner(config, programs, data, params, workdir, first_step) -> str:
    """What is about to run: parameters, mesh, data, and where it goes."""
    device = jax.devices()[0]
    lines = [
        parameter_overview.get_parameter_overview(params, include_stats=False),
        f"devices: {jax.device_count()} x {device.device_kind}, mesh "
        + ", ".join(f"{axis} {size}" for axis, size in programs.mesh.shape.items()),
        *data.report_lines(),
        f"a step: {config.rollout.num_prompts} prompts x {config.rollout.group_size} responses of "
        f"at most {config.rollout.max_response_tokens} tokens, {config.updates_per_step} updates",
        f"workdir: {workdir}" + (f", resuming after {first_step} steps" if first_step else ""),
    ]
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        lines.append(
            "note: rollout.top_p or top_k cuts the sampler's distribution, but not the update's: "
            "their ratio is below 1 from the start"
        )
    return "\n".join(lines)


def main(_):
    hosts.start(several=DISTRIBUTED.value, cpu_devices=CONFIG.value.mesh.cpu_devices)
    train(CONFIG.value, pathlib.Path(WORKDIR.value))


if __name__ == "__main__":
    CONFIG = command.define_config()
    WORKDIR = flags.DEFINE_string("workdir", None, "The run's directory.", required=True)
    DISTRIBUTED = command.define_distributed()
    command.run(main)
