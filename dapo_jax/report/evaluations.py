"""Two evaluations of one set, compared problem by problem on the problems that both have.

An evaluation is eval/<steps>.<set>.<settings>.json with its responses in .jsonl.gz beside it.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from dapo_jax.logs.files import read_rollouts
from dapo_jax.printable import printable_lines
from dapo_jax.report.runs import shortened
from dapo_jax.report.statistics import Interval, paired_share_interval
from dapo_jax.tasks.readers import problem_of

SHOWN_PROBLEMS = 10  # on either side
SHOWN_CHARACTERS = 90  # of a problem
# Settings without a meaning: of generated problems, where a file is read; see `Comparison.alone`.
UNUSED, NOT_COMPARED = ("levels", "count", "split"), ("max_prompt_tokens",)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem: its place and text in one line, and the share of responses that are right."""

    name: str
    prompt: str
    mean: float


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """One evaluation of one set. label: the names of the workdir and of the file.

    problems: by (source, row, answer, number among the problems that share these three).
    """

    label: str
    name: str
    settings: Mapping
    problems: Mapping[tuple, Problem]


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
    found, stem = [], path.name.removesuffix(".json")
    for name in sets:
        responses = path.with_name(f"{stem if 'label' in document else f'{step}.{name}'}.jsonl.gz")
        if not responses.is_file():
            raise FileNotFoundError(
                f"{responses}, the responses of {path}, is missing (log.eval_responses)"
            )
        settings = document.get("settings", {}).get(name, {})
        unused = (*NOT_COMPARED, *UNUSED * bool(settings.get("path")))
        settings = {
            key: value
            for key, value in settings.items()
            if key not in unused and value not in ("", None, [], {})
        }
        label = f"{path.resolve().parents[1].name}/{stem}"
        found.append(Evaluated(label, name, settings, _problems(responses)))
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
        prompt, right = str(found[0]["prompt"]), sum(row["correct"] for row in found)
        text = shortened(" ".join(problem_of(prompt).split()), limit=SHOWN_CHARACTERS)
        name = f"{place[0]} row {place[1]}: {text}".strip()
        problems[*place, alike[*place]] = Problem(name, prompt, right / len(found))
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
        return paired_share_interval(
            *([pair[which].mean for pair in self.pairs] for which in (1, 0))
        )

    def lines(self) -> list[str]:
        """Describes both and their difference, then the problems that moved most; safe to print."""
        i, P = self.interval, len(self.pairs)
        mean_a, mean_b = (sum(pair[which].mean for pair in self.pairs) / P for which in (0, 1))
        better = sum(other.mean > one.mean for one, other in self.pairs)
        worse = sum(other.mean < one.mean for one, other in self.pairs)
        difference = f"b - a {100 * i.difference:+.1f} points"
        if P > 1:
            bounds = f"[{100 * i.low:+.1f}, {100 * i.high:+.1f}]"
            difference += f" {bounds} (95 %, paired by problem)"
        a, b = self.a.settings, self.b.settings
        differing = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        lines = [
            *(f"a: {self.a.label}", f"b: {self.b.label}"),
            *(f"   {key}: a {a.get(key)}, b {b.get(key)}" for key in differing),
            f"mean over {P} problems: a {mean_a:.1%}, b {mean_b:.1%}, {difference}",
            f"b is better on {better}, equal on {P - better - worse}, worse on {worse}",
        ]
        if self.alone:
            lines.append(f"{self.alone} problems are in one of them alone, and left out")
        if reworded := sum(one.prompt != other.prompt for one, other in self.pairs):
            lines.append(f"{reworded} have another prompt in b: a template, or another problem")
        gains = self.pairs[: min(better, SHOWN_PROBLEMS)]
        losses = self.pairs[P - min(worse, SHOWN_PROBLEMS) :]
        lines += [
            f"  {one.mean:6.1%} -> {other.mean:6.1%}  {100 * (other.mean - one.mean):+6.1f}  "
            f"{one.name}"
            for one, other in [*gains, *losses]
        ]
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


def compared(paths: Sequence[str | pathlib.Path]) -> list[str]:
    """Compares results with the first one of their set: lines for a terminal.

    Raises as `read` and `compare` do, and ValueError where no set is there twice.
    """
    first: dict[str, Evaluated] = {}
    found = [evaluated for path in paths for evaluated in read(path)]
    others = [of for of in found if first.setdefault(of.name, of) is not of]
    if not others:
        names = ", ".join(first)
        raise ValueError(f"--evaluation: nothing is compared: of {names} there is one result each")
    return [line for of in others for line in compare(first[of.name], of).lines()]
