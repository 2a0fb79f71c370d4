"""The page of runs: one Markdown file of tables and responses, beside its pictures."""

import contextlib
import itertools
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence

from dapo_jax.logs.display import described
from dapo_jax.logs.files import read_rollouts
from dapo_jax.report import compare
from dapo_jax.report.runs import Run, by_arm, summary_lines
from dapo_jax.tasks.readers import problem_of

SAMPLES = 8  # of a step, each to another problem


def render(runs: Mapping[str, Run], *, pictures: Sequence[str] = (), baseline: str = "") -> str:
    """Renders the page of runs by label; responses stand in it as code.

    pictures: files beside it. baseline: the arm that the others are compared with; "": the first.
    """
    title = f"# {next(iter(runs))}"
    if len(runs) > 1:
        title = f"{len(runs)} runs of {len(by_arm(runs))} arms"
        title = compare.markdown(runs, baseline=baseline, title=title)
    lines = [title, *(f"![{name}]({name})" for name in pictures)]
    for label, run in runs.items():
        lines += [f"## {label}: first and last", _code(summary_lines(run))]
    lines += [f"## {head}\n\n{_code(rows)}" for head, rows in samples(runs)]
    return "\n\n".join(lines) + "\n"


def samples(runs: Mapping[str, Run]) -> Iterator[tuple[str, list[str]]]:
    """Yields (title, responses) of the first and last step of each arm's first run that has some.

    They are of rollouts/<step>.jsonl.gz: one to each of the first problems.
    """
    arms = set()
    for label, run in runs.items():
        files = (run.workdir / "rollouts").glob("[0-9]*.jsonl.gz") if run.workdir else ()
        steps = {int(file.name.split(".")[0]): file for file in files}
        if steps and (arm := run.arm or label) not in arms:
            arms.add(arm)
            for step in dict.fromkeys((min(steps), max(steps))):
                yield f"{label}: samples of step {step}", _responses(steps[step])


def _responses(path: pathlib.Path) -> list[str]:
    rows = []
    with contextlib.suppress(EOFError, OSError, ValueError, zlib.error):  # cut or broken: its start
        firsts = (row for row in read_rollouts(path) if not row.get("sample"))
        rows.extend(itertools.islice(firsts, SAMPLES))
    return [described(row | {"prompt": problem_of(row["prompt"])}) for row in rows]


def _code(texts: Sequence[str]) -> str:
    return "    " + "\n".join(texts).replace("\n", "\n    ")
