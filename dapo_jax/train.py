"""DAPO training (arXiv 2503.14476): one SPMD program samples, verifies and updates.

    python -m dapo_jax.train --config=configs/tiny.py --workdir=DIR [--config.algo.eps_high=0.24]

The same command resumes a run that was stopped. On several hosts it is given on each of them, with
--distributed. Exit status: 0 done; 75 stopped by SIGTERM with the last finished step saved, to be
given again; anything else is an error. `train` holds one RL step, top to bottom.
"""

import contextlib
import functools
import json
import pathlib

import jax
import numpy as np
from absl import flags, logging
from clu import parameter_overview
from ml_collections import ConfigDict, config_flags

from dapo_jax.algorithm import (
    group_advantage,
    informative_groups,
    outcome_reward,
    soft_overlong_penalty,
)
from dapo_jax.evaluate import evaluate, result_row, write_results
from dapo_jax.learner import make_batch, place_batch, warmup_learning_rate
from dapo_jax.report import __main__ as report
from dapo_jax.rollout import collect, graded, minibatches, rollout_rows
from dapo_jax.run import build, checks, command
from dapo_jax.run.metrics import (
    Display,
    MetricsWriter,
    Sample,
    Stopwatch,
    atomic_file,
    evaluation_line,
    write_rollouts,
)
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
        grade = functools.partial(graded, tokenizer=tokenizer, rules=config.verifier.rules)

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
            return evaluate(
                config, programs, params, data.eval_sets, tokenizer, report=display.phase
            )

        display.phase("compiling the update")
        update = programs.compile_update()
        display.phase("compiling the sampler")
        programs.engine.compile(sampling)
        if config.eval.every_steps and data.eval_sets:
            programs.engine.compile(build.eval_sampling(config, tokenizer))
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
                    data.train.__getitem__,
                    grade,
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
            row = {
                "step": step,
                "prompts_seen": rollouts.cursor,
                "sampled_tokens_total": sampled_tokens_total,
                **rollout_metrics(config, rollouts, reward_PG),
                **update_metrics(updates),
                "lr": learning_rate,
                **result_row(results),
            }
            save_rollouts(config, workdir, step, rollouts, reward_PG)
            progress = {
                "cursor": rollouts.cursor,
                "sampled_tokens_total": sampled_tokens_total,
                "row": row | timings(watch, rollouts),
            }
            with watch("save"):
                last = step + 1 == config.num_steps
                boundaries.passed(step + 1, state, progress, force=last)
            row |= timings(watch, rollouts)
            if writer is not None:
                writer.write(row)
            every = config.log.samples_every_steps
            if every and step % every == 0:
                display.samples(step, samples(rollouts, reward_PG))
                if hosts.is_main_host():
                    plot_timeline(rollouts.stats.blocks, workdir / "timeline.png")
            display.step(row)
    if hosts.is_main_host():
        run = report.load_run(workdir)
        report.plot_curves({workdir.name: run}, workdir / "curves.png")
        print("\n".join([*report.summary_lines(run), f"curves: {workdir / 'curves.png'}"]))


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


def rollout_metrics(config, rollouts: Rollouts, reward_PG) -> dict[str, float]:
    """Statistics of the groups up to the last one kept, and of the work that sampling them took.

    `unused_tokens_fraction` counts all that was sampled: groups that are not informative, and those
    that were under way when the step had enough.
    """
    stats, sampled = rollouts.stats, len(rollouts.sampled)
    return {
        "reward/mean": float(reward_PG.mean()),
        "accuracy/mean": float(rollouts.correct_PG.mean()),
        "response_tokens/mean": float(rollouts.length_PG.mean()),
        "response_tokens/max": int(rollouts.length_PG.max()),
        "response_tokens/truncated_fraction": float(1 - rollouts.stopped_PG.mean()),
        "groups/sampled": sampled,
        "groups/informative": int(informative_groups(rollouts.correct_PG).sum()),
        "groups/all_correct": int(rollouts.correct_PG.all(axis=1).sum()),
        "groups/all_wrong": int((~rollouts.correct_PG).all(axis=1).sum()),
        "groups/discarded": sampled - len(rollouts.kept),
        "groups/cancelled": rollouts.issued - sampled,
        "generation_batches": -(-sampled // config.rollout.generation_prompts),
        "engine/occupancy": stats.busy_slot_steps / stats.slot_steps,
        "engine/occupancy_while_waiting": (
            stats.busy_waiting_slot_steps / max(stats.waiting_slot_steps, 1)
        ),
        "engine/requests": stats.requests,
        "engine/prefilled_prompts": stats.prefilled_prompts,
        "engine/cache_use": stats.cache_use,
        "engine/drawn_tokens": stats.sampled_tokens,
        "engine/unused_tokens_fraction": 1 - rollouts.kept_tokens / stats.sampled_tokens,
    }


def update_metrics(updates: list[dict]) -> dict[str, float]:
    """Means over the updates taken; the ratio gap is the first one's, where it is only rounding."""
    taken = [update for update in updates if update["taken"]]
    counts = {"updates": len(taken), "updates_skipped": len(updates) - len(taken)}
    if not taken:
        return counts
    names = (
        "loss",
        "entropy",
        "mean_prob",
        "kl",
        "clip_fraction/high",
        "clip_fraction/low",
        "clip_fraction/dual",
        "grad_norm",
    )
    return {
        **counts,
        **{name: float(np.mean([update[name] for update in taken])) for name in names},
        "ratio_gap": float(updates[0]["ratio_gap"]),
    }


def timings(watch: Stopwatch, rollouts: Rollouts) -> dict[str, float]:
    """Wall seconds of the step's phases, and sampled or trained tokens a second."""
    stats, trained, row = rollouts.stats, rollouts.kept_tokens, watch.row()
    rollout_seconds = max(watch.seconds("rollout"), 1e-9)
    return {
        **row,
        **{f"seconds_in_rollout/{name}": seconds for name, seconds in stats.seconds.items()},
        "tokens_per_second/rollout": stats.sampled_tokens / rollout_seconds,
        "tokens_per_second/rollout_used": trained / rollout_seconds,
        "tokens_per_second/update": trained / max(watch.seconds("update"), 1e-9),
        "tokens_per_second/step": stats.sampled_tokens / row["seconds/total"],
    }


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
        *(line for report in data.reports for line in report.lines()),
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
    CONFIG = config_flags.DEFINE_config_file("config", None, "The run's recipe.", lock_config=True)
    WORKDIR = flags.DEFINE_string("workdir", None, "The run's directory.", required=True)
    DISTRIBUTED = command.define_distributed()
    flags.mark_flag_as_required("config")
    command.run(main)
