"""Two evaluations of one set, compared problem by problem on the problems that both have.

An evaluation is eval/<steps>.<set>.<settings>.json with its responses in .jsonl.gz beside it.
"""

import itertools
import pathlib
from collections.abc import Mapping, Sequence

import pandas as pd

from dapo_jax.logs.files import read_json, read_zipped_rows
from dapo_jax.printable import printable_lines, shortened
from dapo_jax.report.statistics import paired_share_interval
from dapo_jax.tasks.templates import problem_of

SHOWN_PROBLEMS = 10  # on either side
SHOWN_CHARACTERS = 90  # of a problem
PLACE = ["source", "row", "ground_truth"]  # of a problem, beside its number among those alike


# The names of the workdir and of the file, the settings, and a row for each problem: PLACE, the
# number among those with an equal one, the prompt, and the share of responses that are right.
Evaluated = tuple[str, Mapping, pd.DataFrame]


def read(path: str | pathlib.Path) -> dict[str, Evaluated]:
    """Reads the sets of a result with their responses; ValueError for a file of another kind."""
    path = pathlib.Path(path).resolve()
    document, stem, evaluations = read_json(path), path.name.removesuffix(".json"), {}
    if "sets" not in document:
        raise ValueError(f"{path} is no evaluation: it has no 'sets'")
    for name in document["sets"]:
        # A file of training's evaluations is of all sets, one of `evaluate` of a single one.
        of_set = stem if "label" in document else f"{document['step']}.{name}"
        responses = pd.DataFrame(read_zipped_rows(path.with_name(f"{of_set}.jsonl.gz")))
        responses = responses.astype(dict.fromkeys(PLACE, str))
        problems = responses.groupby([*PLACE, "cursor"], sort=False, as_index=False)
        problems = problems.agg({"prompt": "first", "correct": "mean"})
        problems["number"] = problems.groupby(PLACE).cumcount()
        settings = document.get("settings", {}).get(name, {})
        evaluations[name] = f"{path.parents[1].name}/{stem}", settings, problems
    return evaluations


def compare(a: Evaluated, b: Evaluated) -> list[str]:
    """Describes b - a: settings, means with a 95 % interval, problems that moved most.

    Problems are the same if source, row and answer are equal; two evaluations of a single source
    each may name it differently. Raises ValueError where no problem is shared. The lines are safe
    to print.
    """
    (label_a, settings_a, problems_a), (label_b, settings_b, problems_b) = a, b
    single = all(table["source"].nunique() == 1 for table in (problems_a, problems_b))
    both = problems_a.merge(problems_b, on=[*PLACE[single:], "number"], suffixes=("", "_b"))
    if both.empty:
        raise ValueError(f"{label_a} and {label_b} have no problem in common (source, row, answer)")
    both["gain"] = both["correct_b"] - both["correct"]
    both = both.sort_values("gain", ascending=False, kind="stable")
    (mean_a, mean_b), gain = both[["correct", "correct_b"]].mean(), both["gain"]
    interval = paired_share_interval(gain)
    P, better, worse = len(both), (gain > 0).sum(), (gain < 0).sum()
    alone = len(problems_a) + len(problems_b) - 2 * P
    moved = [both.head(min(better, SHOWN_PROBLEMS)), both.tail(min(worse, SHOWN_PROBLEMS))]
    lines = [f"a: {label_a}", f"b: {label_b}"]
    for key in {**settings_a, **settings_b}:
        if settings_a.get(key) != settings_b.get(key):
            lines.append(f"   {key}: a {settings_a.get(key)}, b {settings_b.get(key)}")
    lines += [
        f"mean over {P} problems: a {mean_a:.1%}, b {mean_b:.1%}, b - a {100 * gain.mean():+.1f} "
        f"points [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}] (95 %, paired by problem)",
        f"b is better on {better}, equal on {P - better - worse}, worse on {worse}; {alone} "
        "problems are in one of them alone, and left out",
    ]
    for problem in pd.concat(moved).itertuples():
        text = shortened(" ".join(problem_of(problem.prompt).split()), limit=SHOWN_CHARACTERS)
        shares = f"{problem.correct:6.1%} -> {problem.correct_b:6.1%}  {100 * problem.gain:+6.1f}"
        lines.append(f"  {shares}  " + f"{problem.source} row {problem.row}: {text}".strip())
    return [printable_lines(line) for line in lines]


def compared(paths: Sequence[str | pathlib.Path]) -> list[str]:
    """Compares results with the first of their set, line by line; ValueError without any pair."""
    first: dict[str, Evaluated] = {}
    lines: list[str] = []
    for name, evaluated in itertools.chain(*(read(path).items() for path in paths)):
        if first.setdefault(name, evaluated) is not evaluated:
            lines += compare(first[name], evaluated)
    if not lines:
        names = ", ".join(first)
        raise ValueError(f"--evaluation: nothing is compared: of {names} there is one result each")
    return lines
