"""Two evaluations of one set, compared problem by problem on the problems that both have.

An evaluation is eval/<steps>.<set>.<settings>.json with its responses in .jsonl.gz beside it.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """One evaluation of one set. label: the names of the workdir and of the file.

    problems: a row each: PLACE, the number among those with an equal one, the prompt, and the share
    of responses that are right.
    """

    label: str
    name: str
    settings: Mapping
    problems: pd.DataFrame


def read(path: str | pathlib.Path) -> list[Evaluated]:
    """Reads the sets of a result with their responses; ValueError for a file of another kind."""
    path = pathlib.Path(path).resolve()
    document, stem, found = read_json(path), path.name.removesuffix(".json"), []
    if "sets" not in document:
        raise ValueError(f"{path} is no evaluation: it has no 'sets'")
    for name in document["sets"]:
        # A file of training's evaluations is of all sets, one of `evaluate` of a single one.
        of_set = stem if "label" in document else f"{document['step']}.{name}"
        settings = document.get("settings", {}).get(name, {})
        problems = _problems(path.with_name(f"{of_set}.jsonl.gz"))
        found.append(Evaluated(f"{path.parents[1].name}/{stem}", name, settings, problems))
    return found


def _problems(path: pathlib.Path) -> pd.DataFrame:
    responses = pd.DataFrame(read_zipped_rows(path)).astype(dict.fromkeys(PLACE, str))
    problems = responses.groupby([*PLACE, "cursor"], sort=False, as_index=False)
    problems = problems.agg({"prompt": "first", "correct": "mean"})
    return problems.assign(number=problems.groupby(PLACE).cumcount())


def compare(a: Evaluated, b: Evaluated) -> list[str]:
    """Describes b - a: settings, means with a 95 % interval, problems that moved most.

    Problems are the same if source, row and answer are equal; two evaluations of a single source
    each may name it differently. Raises ValueError where no problem is shared. The lines are safe
    to print.
    """
    single = all(of.problems["source"].nunique() == 1 for of in (a, b))
    both = a.problems.merge(b.problems, on=[*PLACE[single:], "number"], suffixes=("", "_b"))
    if both.empty:
        raise ValueError(f"{a.label} and {b.label} have no problem in common (source, row, answer)")
    both = both.assign(gain=both["correct_b"] - both["correct"])
    both = both.sort_values("gain", ascending=False, kind="stable")
    (of_a, of_b), found = both[["correct", "correct_b"]].mean(), paired_share_interval(both["gain"])
    P, better, worse = len(both), (both["gain"] > 0).sum(), (both["gain"] < 0).sum()
    alone = len(a.problems) + len(b.problems) - 2 * P
    moved = [both.head(min(better, SHOWN_PROBLEMS)), both.tail(min(worse, SHOWN_PROBLEMS))]
    lines = [f"a: {a.label}", f"b: {b.label}"]
    for key in {**a.settings, **b.settings}:
        if a.settings.get(key) != b.settings.get(key):
            lines.append(f"   {key}: a {a.settings.get(key)}, b {b.settings.get(key)}")
    lines += [
        f"mean over {P} problems: a {of_a:.1%}, b {of_b:.1%}, b - a {100 * found.difference:+.1f} "
        f"points [{100 * found.low:+.1f}, {100 * found.high:+.1f}] (95 %, paired by problem)",
        f"b is better on {better}, equal on {P - better - worse}, worse on {worse}; {alone} "
        "problems are in one of them alone, and left out",
    ]
    for it in pd.concat(moved).itertuples():
        text = shortened(" ".join(problem_of(it.prompt).split()), limit=SHOWN_CHARACTERS)
        shares = f"{it.correct:6.1%} -> {it.correct_b:6.1%}  {100 * it.gain:+6.1f}"
        lines.append(f"  {shares}  " + f"{it.source} row {it.row}: {text}".strip())
    return [printable_lines(line) for line in lines]


def compared(paths: Sequence[str | pathlib.Path]) -> list[str]:
    """Compares results with the first of their set, line by line; ValueError without any pair."""
    first: dict[str, Evaluated] = {}
    found = [evaluated for path in paths for evaluated in read(path)]
    others = [of for of in found if first.setdefault(of.name, of) is not of]
    if not others:
        names = ", ".join(first)
        raise ValueError(f"--evaluation: nothing is compared: of {names} there is one result each")
    return [line for of in others for line in compare(first[of.name], of)]
