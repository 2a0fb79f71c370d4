"""What a run writes and shows: config, rows, responses, evaluations, samples, the live display."""

import json
import pathlib
from collections.abc import Iterator

import jax
from clu import parameter_overview
from ml_collections import ConfigDict

from dapo_jax.run.build import Data, Programs
from dapo_jax.run.display import Display, Sample
from dapo_jax.run.files import MetricsWriter, atomic_file, write_rollouts
from dapo_jax.run.timeline import plot_timeline
from dapo_jax.tasks.readers import PROMPT_TEMPLATE
from dapo_jax.types import Rollouts
from sharding import hosts

SHOWN_SAMPLES = 4


class Record:
    """The outputs of one run in its workdir. Use it as a context manager.

    Every process calls it alike; only the main one prints and writes. first_step: the first that
    this process does. last_row: the row of the step before, from the checkpoint; it is written if
    the run was killed between the two.
    """

    def __init__(
        self, config: ConfigDict, workdir: pathlib.Path, *, first_step: int, last_row: dict | None
    ):
        self.workdir = workdir
        self.display = Display(config.num_steps, first_step, quiet=not hosts.is_main_host())
        self._config, self._first_step, self._last_row = config, first_step, last_row
        self._writer: MetricsWriter | None = None

    def __enter__(self) -> "Record":
        if hosts.is_main_host():
            _write_json(
                self.workdir / "config.json", json.loads(self._config.to_json_best_effort())
            )
            resume_step = self._first_step - 1 if self._first_step else None
            self._writer = MetricsWriter(self.workdir, resume_step=resume_step)
            if self._first_step and not self._writer.has_row(resume_step):
                self._writer.write(self._last_row)
        self.display.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.display.__exit__(*exception)
        if self._writer is not None:
            self._writer.close()

    def rollouts(self, step: int, rollouts: Rollouts, reward_PG) -> None:
        """Writes all responses to rollouts/<step>.jsonl.gz, every so many steps."""
        if hosts.is_main_host() and _every(self._config.log.rollouts_every_steps, step):
            rows = rollout_rows(rollouts, reward_PG)
            write_rollouts(self.workdir / "rollouts" / f"{step}.jsonl.gz", rows)

    def step(self, row: dict, rollouts: Rollouts, reward_PG) -> None:
        """Writes and shows a finished step's row; every so many steps samples and the timeline."""
        if self._writer is not None:
            self._writer.write(row)
        if _every(self._config.log.samples_every_steps, row["step"]):
            self.display.samples(row["step"], samples(rollouts, reward_PG))
            if hosts.is_main_host():
                plot_timeline(rollouts.stats.blocks, self.workdir / "timeline.png")
        self.display.step(row)


def banner(
    config: ConfigDict, programs: Programs, data: Data, params, where: pathlib.Path, first_step: int
) -> str:
    """Says what is about to run: parameters, mesh, data, and where it goes."""
    device, r = jax.devices()[0], config.rollout
    lines = [
        parameter_overview.get_parameter_overview(params, include_stats=False),
        f"devices: {jax.device_count()} x {device.device_kind}, mesh "
        + ", ".join(f"{axis} {size}" for axis, size in programs.mesh.shape.items()),
        *data.report_lines(),
        f"a step: {r.num_prompts} prompts x {r.group_size} responses of at most "
        f"{r.max_response_tokens} tokens, {config.updates_per_step} updates",
        f"workdir: {where}" + (f", resuming after {first_step} steps" if first_step else ""),
    ]
    if r.top_p < 1 or r.top_k > 0:
        lines.append(
            "note: rollout.top_p or top_k cuts the sampler's distribution, but not the update's: "
            "their ratio is below 1 from the start"
        )
    return "\n".join(lines)


def write_results(workdir: pathlib.Path, finished_steps: int, results: dict) -> None:
    """Writes the scores of every evaluation set to eval/<finished rollout steps>.json."""
    if hosts.is_main_host():
        document = {"step": finished_steps, "sets": results}
        _write_json(workdir / "eval" / f"{finished_steps}.json", document)


def result_row(results: dict) -> dict[str, float]:
    """The scores as keys of a metrics row: eval/<set>/<score>."""
    return {
        f"eval/{name}/{key}": value
        for name, scores in results.items()
        for key, value in scores.items()
        if "@" in key
    }


def rollout_rows(rollouts: Rollouts, reward_PG) -> Iterator[dict]:
    """The step's responses for rollouts/<step>.jsonl.gz, one dict each."""
    trained = set(rollouts.kept.tolist())
    for p, group in enumerate(rollouts.sampled):
        example = group.prompt.example
        for g, response in enumerate(group.responses):
            yield {
                "cursor": group.cursor,
                "sample": g,
                "source": example.source,
                "row": example.row,
                "prompt": example.text,
                "response": response.text,
                "ground_truth": example.answer,
                "prediction": response.verdict.prediction,
                "correct": response.verdict.correct,
                "status": response.verdict.status,
                "reward": float(reward_PG[p, g]),
                "tokens": len(response.tokens_T),
                "truncated": not response.stopped,
                "trained": p in trained,
            }


def samples(rollouts: Rollouts, reward_PG) -> list[Sample]:
    """The first response of the step's first groups, for a person to read."""
    before, after = PROMPT_TEMPLATE.split("{problem}")
    shown = []
    for p, group in enumerate(rollouts.sampled[:SHOWN_SAMPLES]):
        example, response = group.prompt.example, group.responses[0]
        shown.append(
            Sample(
                prompt=example.text.removeprefix(before).removesuffix(after),
                response=response.text,
                truth=example.answer,
                prediction=response.verdict.prediction,
                correct=response.verdict.correct,
                status=response.verdict.status,
                reward=float(reward_PG[p, 0]),
                response_tokens=len(response.tokens_T),
                truncated=not response.stopped,
            )
        )
    return shown


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0


def _write_json(path: pathlib.Path, content: dict) -> None:
    with atomic_file(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
