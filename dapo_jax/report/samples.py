"""Sampled responses for a person to read: a bounded choice from rollouts/<step>.jsonl.gz.

Runs, steps and verdicts take turns, so that whatever the limit cuts off, some of each is there.
"""

import contextlib
import itertools
import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence

from dapo_jax.report.curves import arms
from dapo_jax.report.runs import Run, thinned
from dapo_jax.run.files import read_rollouts
from dapo_jax.tasks.readers import PROMPT_TEMPLATE

PAGE_BYTES = 1_000_000  # of all samples together
STEPS = 9  # of a run
RESPONSES = 12  # of a step
READ_RESPONSES = 1_000  # of a step's file: the first ones
HEAD, TAIL = 800, 400  # tokens shown of a response; characters of one without its tokens
VERDICTS = ("right", "wrong", "truncated")
FIELDS = ("ground_truth", "prediction", "status", "reward", "tokens", "trained")


def verdict(row: Mapping) -> str:
    """Says in a word how a response ended; "truncated" is one that is cut off and not right."""
    return "right" if row["correct"] else "truncated" if row["truncated"] else "wrong"


def choose(runs: Mapping[str, Run], *, limit_bytes: int = PAGE_BYTES) -> list[dict]:
    """Chooses samples of each arm's first run that has rollouts, in order of run and step.

    A sample is {"run", "step", "verdict", "prompt" (without what PROMPT_TEMPLATE puts around a
    problem), the FIELDS, "text"}; with "texts" and "logp" of its tokens instead of the text
    where the file has them; "cut" is [where, how many] tokens of its middle, or characters, were
    left out. limit_bytes: of all of them, as JSON.
    """
    queues = []
    for arm in arms(runs).values():
        found = (_by_turns(label, run) for label, run in arm.items())
        queues += itertools.islice(filter(None, found), 1)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    chosen, used = [], 0
    for sample in filter(None, turns):
        used += len(json.dumps(sample))
        if used > limit_bytes:
            break
        chosen.append(sample)
    order = {label: i for i, label in enumerate(runs)}
    return sorted(chosen, key=lambda sample: (order[sample["run"]], sample["step"]))


def _by_turns(label: str, run: Run) -> list[dict]:
    """The samples of a run, the most wanted first: one of each step, then a second one, ..."""
    paths = (run.workdir / "rollouts").glob("*.jsonl.gz") if run.workdir else ()
    named = ((path.name.removesuffix(".jsonl.gz"), path) for path in paths)
    files = sorted((int(step), path) for step, path in named if step.isdigit())
    by_step = [
        [_sample(label, step, row) for row in _of_step(_read(path))]
        for step, path in thinned(files, limit=STEPS)
    ]
    return [sample for turn in itertools.zip_longest(*by_step) for sample in turn if sample]


def _read(path: pathlib.Path) -> list[dict]:
    """The first rows of a file; of one that is cut or broken, those before that."""
    rows = []
    with contextlib.suppress(EOFError, OSError, ValueError, zlib.error):
        rows.extend(itertools.islice(read_rollouts(path), READ_RESPONSES))
    return rows


def _of_step(rows: Sequence[Mapping]) -> list[Mapping]:
    """Up to RESPONSES of a step's rows: the verdicts take turns, rows with their tokens first."""
    by_verdict: dict[str, list[Mapping]] = {name: [] for name in VERDICTS}
    for row in sorted(rows, key=lambda row: "token_texts" not in row):
        by_verdict[verdict(row)].append(row)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_verdict.values()))
    return list(itertools.islice(filter(None, turns), RESPONSES))


def _sample(label: str, step: int, row: Mapping) -> dict:
    sample = {"run": label, "step": step, "verdict": verdict(row)}
    sample |= {field: row.get(field) for field in FIELDS}
    before, after = PROMPT_TEMPLATE.split("{problem}")
    sample["prompt"] = str(row.get("prompt")).removeprefix(before).removesuffix(after)
    if "token_texts" in row:
        texts, cut = _without_middle(row["token_texts"])
        logp, _ = _without_middle(row["token_logp"])
        return sample | {"texts": texts, "logp": logp, "cut": cut}
    text, cut = _without_middle(row["response"])
    return sample | {"text": text, "cut": cut}


def _without_middle(items):
    """A text or list without its middle, and [where, how many] are missing; None where none."""
    left_out = len(items) - HEAD - TAIL
    if left_out <= 0:
        return items, None
    return items[:HEAD] + items[-TAIL:], [HEAD, left_out]
