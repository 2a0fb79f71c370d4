"""Two evaluations of one set, compared problem by problem on the problems that both have.

An evaluation is eval/<steps>.<set>.<settings>.json with its responses in .jsonl.gz beside it.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from dapo_jax.logs.files import read_json, read_zipped_rows
from dapo_jax.printable import printable_lines, shortened
from dapo_jax.report.statistics import paired_share_interval
from dapo_jax.tasks.templates import problem_of

SHOWN_PROBLEMS = 10  # on either side
SHOWN_CHARACTERS = 90  # of a problem


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """One evaluation of one set. label: the names of the workdir and of the file.

    problems: by (source, row, answer, number among the problems that share these three), the share
    of responses that are right, and the problem's place and text in one line.
    """

    label: str
    name: str
    settings: Mapping
    problems: Mapping[tuple, tuple[float, str]]


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


def _problems(path: pathlib.Path) -> dict[tuple, tuple[float, str]]:
    rows = collections.defaultdict(list)
    for row in read_zipped_rows(path):
        rows[row["source"], row["row"], str(row["ground_truth"]), row["cursor"]].append(row)
    problems, alike = {}, collections.Counter()
    for (*place, _), found in rows.items():
        text = " ".join(problem_of(str(found[0]["prompt"])).split())
        name = f"{place[0]} row {place[1]}: {shortened(text, limit=SHOWN_CHARACTERS)}".strip()
        problems[*place, alike[*place]] = sum(row["correct"] for row in found) / len(found), name
        alike[*place] += 1
    return problems


def compare(a: Evaluated, b: Evaluated) -> list[str]:
    """Describes b - a: settings, means with a 95 % interval, problems that moved most.

    Problems are the same if source, row and answer are equal; two evaluations of a single source
    each may name it differently. Raises ValueError where no problem is shared. The lines are safe
    to print.
    """
    single = all(len({source for source, *_ in of.problems}) == 1 for of in (a, b))
    ours, theirs = ({key[single:]: p for key, p in of.problems.items()} for of in (a, b))
    pairs = [(mean, theirs[key][0], name) for key, (mean, name) in ours.items() if key in theirs]
    if not pairs:
        raise ValueError(f"{a.label} and {b.label} have no problem in common (source, row, answer)")
    pairs.sort(key=lambda pair: pair[0] - pair[1])  # the greatest gain first
    P, (a_P, b_P, _) = len(pairs), zip(*pairs, strict=True)
    found = paired_share_interval(b_P, a_P)
    better = sum(y > x for x, y in zip(a_P, b_P, strict=True))
    worse = sum(y < x for x, y in zip(a_P, b_P, strict=True))
    moved = [*pairs[: min(better, SHOWN_PROBLEMS)], *pairs[P - min(worse, SHOWN_PROBLEMS) :]]
    lines = [
        f"a: {a.label}",
        f"b: {b.label}",
        *(
            f"   {key}: a {a.settings.get(key)}, b {b.settings.get(key)}"
            for key in {**a.settings, **b.settings}
            if a.settings.get(key) != b.settings.get(key)
        ),
        f"mean over {P} problems: a {sum(a_P) / P:.1%}, b {sum(b_P) / P:.1%}, b - a "
        f"{100 * found.difference:+.1f} points [{100 * found.low:+.1f}, {100 * found.high:+.1f}] "
        "(95 %, paired by problem)",
        f"b is better on {better}, equal on {P - better - worse}, worse on {worse}; "
        f"{len(ours.keys() ^ theirs.keys())} problems are in one of them alone, and left out",
        *(
            f"  {one:6.1%} -> {other:6.1%}  {100 * (other - one):+6.1f}  {name}"
            for one, other, name in moved
        ),
    ]
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
