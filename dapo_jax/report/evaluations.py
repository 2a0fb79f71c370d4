"""Evaluations, problem by problem: a page of the responses, and paired comparisons of two.

An evaluation is eval/<steps>.<set>.<settings>.json with its responses in .jsonl.gz beside it. Two
are compared on the problems that both have.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from dapo_jax.printable import printable_lines
from dapo_jax.report import page
from dapo_jax.report.statistics import Interval, paired_share_interval
from dapo_jax.run.files import read_rollouts

PAGE_RESPONSES = 4  # shown of a problem
SHOWN_PROBLEMS = 10  # of a comparison in the terminal, on either side
SHOWN_CHARACTERS = 90  # of a problem in the terminal
OF_GENERATED = ("levels", "count", "split")  # settings without a meaning for a file


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem's responses, as the rows of the file have them."""

    prompt: str
    truth: str
    rows: Sequence[Mapping]

    @property
    def place(self) -> str:
        """The source, where the file has it, and the row there."""
        return f"{self.rows[0].get('source', '')} row {self.rows[0]['row']}".strip()

    @property
    def text(self) -> str:
        """The problem in one line, without DAPO's template around it."""
        return page.problem_of(self.prompt)

    @property
    def mean(self) -> float:
        """The share of responses that are right."""
        return sum(row["correct"] for row in self.rows) / len(self.rows)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """One evaluation of one set: its scores and settings, and its problems.

    problems: by (source, row, answer, number among the problems that share these three).
    """

    path: pathlib.Path
    name: str
    scores: Mapping[str, float]
    settings: Mapping
    problems: Mapping[tuple, Problem]

    @property
    def label(self) -> str:
        """The names of the workdir and of the file."""
        return f"{self.path.resolve().parents[1].name}/{self.path.name.removesuffix('.json')}"

    @property
    def given(self) -> dict[str, object]:
        """The settings with a value, without those of generated problems where a file is read."""
        unused = OF_GENERATED if self.settings.get("path") else ()
        return {
            name: value
            for name, value in self.settings.items()
            if name not in unused and value not in ("", None, [], {})
        }


def read(path: str | pathlib.Path) -> list[Evaluated]:
    """Reads the sets of a result with their responses.

    Raises FileNotFoundError where one of its files is missing, ValueError for another file.
    """
    path = pathlib.Path(path)
    try:
        document = json.loads(path.read_text())
        sets, step = document["sets"], document["step"]
    except (IsADirectoryError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no evaluation, an eval/*.json with 'step' and 'sets'"
        ) from error
    found = []
    for name, scores in sets.items():
        stem = path.name.removesuffix(".json")
        responses = path.with_name(f"{stem if 'label' in document else f'{step}.{name}'}.jsonl.gz")
        if not responses.is_file():
            raise FileNotFoundError(
                f"{responses}, the responses of {path}, is missing (log.eval_responses)"
            )
        settings = document.get("settings", {}).get(name, {})
        found.append(Evaluated(path, name, scores, settings, _problems(responses)))
    return found


def _problems(path: pathlib.Path) -> dict[tuple, Problem]:
    rows: dict[tuple, list] = {}
    try:
        for row in read_rollouts(path):
            # The cursor alone identifies a problem; early files have neither it nor the source.
            key = row.get("source", ""), row["row"], str(row["ground_truth"]), row.get("cursor")
            rows.setdefault(key, []).append(row)
    except (EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    problems, alike = {}, collections.Counter()
    for (*place, _), found in rows.items():
        problem = Problem(
            str(found[0]["prompt"]), place[2], sorted(found, key=lambda row: row["sample"])
        )
        problems[*place, alike[*place]] = problem
        alike[*place] += 1
    return problems


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two evaluations on the problems they share: b - a, problem by problem.

    pairs: (a's problem, b's), the greatest gain first. alone: the number of problems in one of them
    only.
    """

    a: Evaluated
    b: Evaluated
    pairs: Sequence[tuple[Problem, Problem]]
    alone: int

    @property
    def interval(self) -> Interval:
        """The mean difference with its 95 % interval, paired by problem."""
        mean_a_P, mean_b_P = zip(
            *((one.mean, other.mean) for one, other in self.pairs), strict=True
        )
        return paired_share_interval(mean_b_P, mean_a_P)

    @property
    def counts(self) -> tuple[int, int, int]:
        """(better, equal, worse) problems of b."""
        better = sum(other.mean > one.mean for one, other in self.pairs)
        worse = sum(other.mean < one.mean for one, other in self.pairs)
        return better, len(self.pairs) - better - worse, worse

    def said(self) -> list[str]:
        """Describes the two evaluations, their difference and the counts."""
        i, P, (better, equal, worse) = self.interval, len(self.pairs), self.counts
        mean_a, mean_b = (sum(pair[which].mean for pair in self.pairs) / P for which in (0, 1))
        difference = f"b - a {100 * i.difference:+.1f} points"
        if P > 1:
            bounds = f"[{100 * i.low:+.1f}, {100 * i.high:+.1f}]"
            difference += f" {bounds} (95 %, paired by problem)"
        lines = [
            "\n".join([f"a: {self.a.label}", f"b: {self.b.label}", *self._differing()]),
            f"mean over {P} problems: a {mean_a:.1%}, b {mean_b:.1%}, {difference}",
            f"b is better on {better}, equal on {equal}, worse on {worse}",
        ]
        if self.alone:
            lines.append(f"{self.alone} problems are in one of them alone, and left out")
        if reworded := sum(one.prompt != other.prompt for one, other in self.pairs):
            lines.append(f"{reworded} have another prompt in b: a template, or another problem")
        return lines

    def _differing(self) -> list[str]:
        """A line for each setting that differs: another possible cause of the difference."""
        a, b = self.a.given, self.b.given
        return [
            f"   {name}: a {a.get(name)}, b {b.get(name)}"
            for name in {**a, **b}
            if a.get(name) != b.get(name) and name != "max_prompt_tokens"  # see `alone`
        ]

    def moves(self) -> list[tuple[str, str, str, str]]:
        """(a's mean, b's mean, b - a, problem) as texts, the greatest gain first."""
        return [
            (
                f"{one.mean:.1%}",
                f"{other.mean:.1%}",
                f"{100 * (other.mean - one.mean):+.1f}",
                f"{one.place}: {one.text}",
            )
            for one, other in self.pairs
        ]

    def lines(self) -> list[str]:
        """The description, then the problems that moved most, up and down; safe to print."""
        better, equal, _ = self.counts
        moves, lines = self.moves(), self.said()
        gains, losses = moves[: min(better, SHOWN_PROBLEMS)], moves[better + equal :]
        for one, other, points, problem in [*gains, *losses[-SHOWN_PROBLEMS:]]:
            cut = problem[:SHOWN_CHARACTERS] + "..." * (len(problem) > SHOWN_CHARACTERS)
            lines.append(f"  {one:>6} -> {other:>6}  {points:>6}  {cut}")
        return [printable_lines(line) for line in lines]


def compare(a: Evaluated, b: Evaluated) -> Comparison:
    """Compares two evaluations, which may differ in policy, settings and k.

    Problems are the same if source, row and answer are equal; two evaluations of a single source
    each may name it differently. Raises ValueError where no problem is shared.
    """
    single = all(len({source for source, *_ in of.problems}) == 1 for of in (a, b))
    ours, theirs = ({key[single:]: p for key, p in of.problems.items()} for of in (a, b))
    shared = [(problem, theirs[key]) for key, problem in ours.items() if key in theirs]
    if not shared:
        raise ValueError(f"{a.label} and {b.label} have no problem in common (source, row, answer)")
    shared.sort(key=lambda pair: pair[0].mean - pair[1].mean)
    return Comparison(a, b, shared, len(ours.keys() ^ theirs.keys()))


def compared(paths: Sequence[str | pathlib.Path]) -> tuple[list[Evaluated], list[Comparison]]:
    """Reads results, and compares those of one set with the first of it."""
    found = [evaluated for path in paths for evaluated in read(path)]
    first: dict[str, Evaluated] = {}
    others = [of for of in found if first.setdefault(of.name, of) is not of]
    return found, [compare(first[of.name], of) for of in others]


def lines(found: Sequence[Evaluated], comparisons: Sequence[Comparison]) -> list[str]:
    """The comparisons of the results of one set, as lines for a terminal."""
    if len(found) > 1 and not comparisons:
        names = ", ".join(of.name for of in found)
        return [f"nothing is compared: the sets are {names}, and none is there twice"]
    return [line for comparison in comparisons for line in comparison.lines()]


def write_page(
    paths: Sequence[str | pathlib.Path],
    found: Sequence[Evaluated],
    comparisons: Sequence[Comparison],
    *,
    folder: str = "",
) -> pathlib.Path:
    """Writes evaluation.html into a folder beside the first result; returns its path.

    It has the comparisons of the results of one set, all scores, problems and responses.
    """
    target = pathlib.Path(paths[0]).resolve().parent / folder / "evaluation.html"
    sections = {"evaluations": found, "comparisons": comparisons, "responses": PAGE_RESPONSES}
    page.write(target, page.html("Evaluation", **sections))
    return target
