"""The outputs of a run: config, rows, responses, evaluations, samples, printed lines."""

import concurrent.futures
import contextlib
import functools
import hashlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from configs.compare import as_json
from dapo_jax.logs import files
from dapo_jax.logs.display import Display, evaluation_line
from dapo_jax.logs.metrics import DIGESTS, LOGP, STATE, TASK, TOKENS, VERDICTS
from dapo_jax.logs.provenance import add_start
from dapo_jax.logs.writers import Writers
from dapo_jax.printable import conversation
from dapo_jax.process import hosts
from dapo_jax.tasks.templates import problem_of
from dapo_jax.types import Group, Rollouts

SHOWN_SAMPLES = 4


class Record(contextlib.AbstractContextManager):
    """The outputs of one run in its workdir. Use it as a context manager.

    Every process calls it alike; only the main one prints and writes. first_step: of this process's
    work; begin_step: the run's own first. last_row: of the step before, written if the run was
    killed between the checkpoint and the row. about: what else its line of starts.jsonl has.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: pathlib.Path,
        *,
        first_step: int,
        begin_step: int,
        last_row: Mapping | None,
        about: Mapping[str, Any],
    ):
        self._is_main = hosts.is_main_host()
        log = functools.partial(files.append_log, workdir) if self._is_main else None
        self.workdir, self._log = workdir, config.log
        self.display = Display(config.num_steps, first_step, log)
        self._background = concurrent.futures.ThreadPoolExecutor(1)
        document, last_step = as_json(config), first_step - 1 if first_step > begin_step else None
        if self._is_main:
            add_start(workdir, {"first_step": first_step, **about})
            for note in files.begin_rows(workdir, first_step, begin_step, last_row):
                self.display.line(note)
            # Once the rows are cut: a killed run's look finished beside a config of fewer steps.
            files.write_json(workdir / "config.json", document)
        names = config.log.writers if self._is_main else ()
        self._writers = Writers(names, self.display.line, document, workdir, last_step)

    def __exit__(self, kind, error, traceback) -> None:
        self.display.close()
        self._background.shutdown()
        if self._is_main and error is not None:
            files.append_log(self.workdir, f"ended by {kind.__name__}: {error}")
        self._writers("close")

    def rollouts(self, step: int, rollouts: Rollouts, reward_PG) -> None:
        """Begins to digest all responses, and to write rollouts/<step>.jsonl.gz if it is due."""
        if self._is_main:
            self._files = self._background.submit(self._keep, step, rollouts, reward_PG)

    def _keep(self, step: int, rollouts: Rollouts, reward_PG) -> dict[str, str]:
        if _every(self._log.rollouts_every_steps, step):
            rows = rollout_rows(rollouts, reward_PG)
            files.write_zipped_rows(self.workdir / "rollouts" / f"{step}.jsonl.gz", rows, level=1)
        return sample_digests(rollouts.sampled, reward_PG)

    def digests(self, arrays: Mapping) -> dict[str, str]:
        """Returns the digests of the step's samples and state once its responses are on disk.

        arrays: `digests.of_arrays` of the state. The main process has them alone. Raises the error
        of a write that failed.
        """
        if not self._is_main:
            return {}
        return self._files.result() | {STATE: files.json_digest(arrays)}

    def responses(self, finished_steps: int, name: str, groups: Sequence[Group]) -> None:
        """Writes an evaluation set's responses to eval/<finished rollout steps>.<set>.jsonl.gz."""
        if self._is_main and self._log.eval_responses:
            write_responses(self.workdir, f"{finished_steps}.{name}", groups)

    def results(
        self, finished_steps: int, results: dict, settings: Mapping[str, dict]
    ) -> dict[str, float]:
        """Writes and shows scores, with how each set was sampled; returns them as keys of a row."""
        scores = result_row(results)
        if self._is_main:
            document = {"step": finished_steps, "sets": results, "settings": settings}
            files.write_json(self.workdir / "eval" / f"{finished_steps}.json", document)
        self._writers("evaluation", finished_steps, scores)
        self.display.line(evaluation_line(finished_steps, scores))
        return scores

    def step(self, row: dict, rollouts: Rollouts, reward_PG) -> None:
        """Writes and shows a finished step's row, and every so many steps samples."""
        if self._is_main:
            files.append_line(self.workdir / "metrics.jsonl", row)
        self._writers("step", {k: v for k, v in row.items() if k not in DIGESTS})
        is_due = _every(self._log.samples_every_steps, row["step"])
        if is_due and (shown := samples(rollouts, reward_PG)):
            self.display.samples(row["step"], shown)
            self._writers("samples", row["step"], shown)
        self.display.step(row)


def write_own_results(
    workdir: pathlib.Path, finished_steps: int, results: dict, settings: Mapping[str, dict]
) -> list[pathlib.Path]:
    """Writes what `evaluate` found, a file a set: eval/<finished steps>.<set>.<settings>.json.

    Neither training's result nor another setting's is overwritten. Returns the paths.
    """
    paths = []
    for name, scores in results.items() if hosts.is_main_host() else ():
        label = settings_label(settings[name])
        paths.append(workdir / "eval" / f"{finished_steps}.{name}.{label}.json")
        document = {"step": finished_steps, "sets": {name: scores}}
        files.write_json(paths[-1], document | {"settings": {name: settings[name]}, "label": label})
    return paths


def settings_label(settings: Mapping) -> str:
    """Names a set's settings: those that people change, then six digits of the digest of all."""
    few = f"t{settings['temperature']:g}_p{settings['top_p']:g}_k{settings['k']}"
    if settings["max_prompts"]:
        few += f"_n{settings['max_prompts']}"
    return f"{few}_{settings['rules']}_s{settings['seed']}.{files.json_digest(settings)[:6]}"


def write_responses(workdir: pathlib.Path, name: str, groups: Sequence[Group]) -> None:
    """Writes an evaluation's responses to eval/<name>.jsonl.gz, one a line."""
    rows = (response_row(group, g) for group in groups for g in range(len(group.responses)))
    files.write_zipped_rows(workdir / "eval" / f"{name}.jsonl.gz", rows, level=1)


def result_row(results: dict) -> dict[str, float]:
    """The scores as keys of a metrics row: eval/<set>/<score>."""
    return {
        f"eval/{name}/{key}": value
        for name, scores in results.items()
        for key, value in scores.items()
        if "@" in key or key.startswith(TASK)
    }


def rollout_rows(rollouts: Rollouts, reward_PG) -> Iterator[dict]:
    """The step's responses for rollouts/<step>.jsonl.gz, one dict each."""
    trained = set(rollouts.kept.tolist())
    for p, group in enumerate(rollouts.sampled):
        for g in range(len(group.responses)):
            yield response_row(group, g, reward=float(reward_PG[p, g])) | {"trained": p in trained}


def response_row(group: Group, sample: int, **scores: float) -> dict:
    """One sampled response with its prompt, verdict and scores, ready for JSON."""
    example, response = group.prompt.example, group.responses[sample]
    return {
        "cursor": group.cursor,
        "sample": sample,
        "source": example.source,
        "row": example.row,
        "prompt": example.text,
        "response": response.text,
        **({"turns": response.turns} if response.turns else {}),
        "ground_truth": example.answer,
        "prediction": response.verdict.prediction,
        "correct": response.verdict.correct,
        "status": response.verdict.status,
        **scores,
        **({"measures": dict(response.verdict.measures)} if response.verdict.measures else {}),
        "tokens": len(response.tokens_T),
        "truncated": not response.stopped,
    }


def sample_digests(groups: Sequence[Group], reward_PG: np.ndarray) -> dict[str, str]:
    """Digests all that a step sampled, bit by bit: tokens, log-probabilities and verdicts."""
    tokens, logp, verdicts = (hashlib.sha256() for _ in range(3))
    for group, reward_G in zip(groups, reward_PG, strict=True):
        for response in group.responses:
            about = [group.cursor, len(response.tokens_T), bool(response.stopped), response.ends]
            tokens.update(files.json_line(about))
            tokens.update(np.ascontiguousarray(response.tokens_T, "<i4"))
            logp.update(np.ascontiguousarray(response.behavior_logp_T, "<f4"))
            verdict = response.verdict
            grade = [verdict.correct, verdict.prediction, verdict.status, verdict.score]
            verdicts.update(files.json_line([*grade, verdict.measures]))
        verdicts.update(np.ascontiguousarray(reward_G, "<f8"))
    return {TOKENS: tokens.hexdigest(), LOGP: logp.hexdigest(), VERDICTS: verdicts.hexdigest()}


def samples(rollouts: Rollouts, reward_PG) -> list[dict]:
    """The first response of the step's first groups, for a person to read."""
    shown = []
    for p, group in enumerate(rollouts.sampled[:SHOWN_SAMPLES]):
        row = response_row(group, 0, reward=float(reward_PG[p, 0]))
        if turns := row.pop("turns", None):
            row["response"] = conversation(turns)
        shown.append(row | {"prompt": problem_of(row["prompt"])})
    return shown


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0
