"""A study: arms of a config over seeds, predictions made before, a table and a figure after.

    python -m experiments.study NAME --workdir=DIR [--seeds=0,1]
    python -m experiments.study NAME

The first makes the runs, of all seeds or of these, goes on where it stopped, and puts their rows
into experiments/NAME, beside those of other seeds. Both write result.md and figure.png there from
rows.jsonl.gz. experiments/NAME/study.py has the Study. The exit status is the sweep's.
"""

import collections
import dataclasses
import functools
import importlib
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from absl import app, flags

from configs.base import KEYS
from configs.compare import as_json
from dapo_jax.logs.files import json_line, write_file
from dapo_jax.logs.metrics import METRICS, score_metric
from dapo_jax.report import compare, plots, statistics
from dapo_jax.report.compare import Quantity
from dapo_jax.report.runs import (
    Run,
    commit_text,
    flatten,
    read_rows_file,
    sweep_label,
    write_rows,
)
from dapo_jax.sweep import plan as plans
from dapo_jax.sweep.__main__ import sweep

HERE = pathlib.Path(__file__).parent
ROWS, RESULT, FIGURE = "rows.jsonl.gz", "result.md", "figure.png"
SETTINGS = {"log.rollouts_every_steps": "0", "log.samples_every_steps": "0"}  # of all studies
DEFAULTS = json.loads(json.dumps({name: key.default for name, key in KEYS.items()}))
TITLES = {  # of curves
    "accuracy/mean": "accuracy of the sampled responses",
    "clip_fraction/high": "tokens clipped high",
    "clip_fraction/low": "tokens clipped low",
    "engine/decode_steps": "decode steps a rollout step",
    "entropy": "policy entropy, nats",
    "eval/guess/mean@8": "held-out games won, %",
    "eval/long/mean@8": "accuracy on the longest level",
    "grad_norm": "gradient norm",
    "ratio_gap": "ratio gap of the first update",
    "response_tokens/mean": "response length, tokens",
    "response_tokens/truncated_fraction": "truncated responses",
    "response_tokens/wrong": "length of wrong answers, tokens",
    "routes/differ": "routes that differ",
    "task/loop_lines": "lines in loops a response",
    "task/right_road": "share of the rare road",
}
# Quantities of several studies.
ACCURACY = compare.last("accuracy, %", "accuracy/mean", scale=100)
ALL_STEPS = compare.mean("accuracy, mean of all steps, %", "accuracy/mean", scale=100)
ENTROPY = compare.last("entropy, nats", "entropy", form="{:.3f}")
TOKENS = compare.last("response tokens", "response_tokens/mean")
LONG, ROAD = (compare.final_score(name, "mean@8") for name in ("long", "road"))
CLIPPED = tuple(
    compare.mean(f"clipped {bound}, %", f"clip_fraction/{bound}", scale=100, form="{:.2f}")
    for bound in ("high", "low")
)
table = functools.partial(compare.table, aligned=False)  # of a page
HOW_TO_READ = "[how to read it](../README.md#how-to-read-a-result)"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A prediction: the quantity of an arm lies above (+1) or below (-1) another arm's."""

    quantity: Quantity
    arm: str
    sign: int
    than: str


@dataclasses.dataclass(frozen=True)
class Study:
    """The runs of a study and how they are read.

    title: of result and figure. config: the config. arms: name -> "KEY=V KEY=V", as
    `dapo_jax.sweep` takes them. settings: of all arms, dotted key -> value as text. quantities: the
    columns of the table. drawn: keys of TITLES, the figure's curves: metrics or
    eval/<set>/<score>; over_tokens: over the tokens sampled so far and not over the steps. claims:
    made before the runs. post_hoc: asked once they were there, to explain them.
    """

    title: str
    config: str
    arms: Mapping[str, str]
    quantities: Sequence[Quantity]
    drawn: Sequence[str]
    claims: Sequence[Claim]
    post_hoc: Sequence[Claim] = ()
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    over_tokens: bool = False
    seeds: Sequence[int] = tuple(range(5))

    def plan(self) -> plans.Plan:
        """The sweep that makes the runs."""
        return plans.make(
            config=self.config,
            settings=SETTINGS | self.settings,
            grid=[],
            named=[f"{name}: {settings}" for name, settings in self.arms.items()],
            seeds="".join(f"{seed}," for seed in self.seeds),
        )

    def finished(self, runs: Mapping[str, Run]) -> tuple[dict[str, Run], list[str]]:
        """(the study's runs in the order of its arms, why each of the others is missing).

        A run counts if all its steps are there and its config has what the study asks for: the
        settings, and the keys in which the arms differ. A key that is newer than a run has its
        default.
        """
        configs = {arm: flatten(as_json(config)) for arm, config in self.plan().configs.items()}
        first, *others = configs.values()
        varied = {key for of in others for key in {**first, **of} if first.get(key) != of.get(key)}
        asked = tuple(f"{key}." for key in {*varied, *self.settings})
        kept, missing = {}, []
        for arm, seed in itertools.product(self.arms, self.seeds):
            label, wanted = sweep_label(arm, seed), configs[arm]
            if label not in runs:
                missing.append(f"{label} has not been run")
                continue
            run, here = runs[label], DEFAULTS | runs[label].config
            keys = [key for key in {**wanted, **here} if f"{key}.".startswith(asked)]
            other = [key for key in keys if here.get(key) != wanted.get(key)]
            if other:
                missing.append(f"{label} is of another config ({', '.join(other)})")
            elif [*run.rows.index] != [*range(wanted["num_steps"])]:
                missing.append(f"{label} has {len(run.rows)} of {wanted['num_steps']} steps")
            else:
                kept[label] = run
        return kept, missing


def load(name: str):
    """The study of a folder; raises ValueError, with what there is, for another name.

    It is a Study, or has seeds and a `read` of its own, as rounded_weights: it returns (the text,
    the figure), of a folder's rows, and measures these seeds first where a workdir is given.
    """
    names = sorted(file.parent.name for file in HERE.glob("*/study.py"))
    if name not in names:
        raise ValueError(f"there is no study {name!r}; there are {', '.join(names)}")
    return importlib.import_module(f"experiments.{name}.study").STUDY


def result(study: Study, runs: Mapping[str, Run]) -> str:
    """The study's tables as Markdown: each arm's quantities, each claim with its interval."""
    kept, missing = study.finished(runs)
    claims, n = [*study.claims, *study.post_hoc], len(study.claims)
    tested = compare.measured(list(dict.fromkeys(claim.quantity for claim in claims)), kept)
    p_N = [_p(claim, tested, study.seeds) for claim in claims]
    held_N = [*statistics.holm(p_N[:n]), *statistics.holm(p_N)[n:]]
    words = [("confirmed", "refuted")] * n
    words += [("significant", "significant, reversed")] * len(study.post_hoc)
    rows = [_judged(*claim, tested) for claim in zip(claims, held_N, words, strict=True)]
    lines = [f"# {study.title}", ""]
    if missing:
        lines += [f"Missing: {'; '.join(missing)}.", ""]
    lines += _means(study, kept)
    heads = ["difference, paired by seed", "p, Holm", "verdict"]
    for head, part in (("prediction", rows[:n]), ("post hoc", rows[n:])):
        for above, row in reversed([*itertools.pairwise(part)]):
            row[0] = "" if row[0] == above[0] else row[0]
        if part:
            lines += ["", *table(["quantity", head, *heads], part)]
    return "\n".join([*lines, "", _origin(kept), ""])


def _means(study: Study, runs: Mapping[str, Run]) -> list[str]:
    """Lines: a row for each quantity, a column for each arm; at last what all arms have alike."""
    values = compare.measured(study.quantities, runs)
    work = compare.measured(compare.WORK, runs).dropna(axis="columns", how="all")
    names = {quantity.name for quantity in values}
    others = [quantity for quantity in work if quantity.name not in names]
    cells = compare.spreads(values.join(work[others])).T
    is_alike = (cells.nunique(axis="columns") == 1) & (len(cells.columns) > 1)
    counts = collections.Counter(run.arm for run in runs.values())
    heads = [arm if n == len(study.seeds) else f"{arm} ({n} seeds)" for arm, n in counts.items()]
    rows = [[quantity.name, *texts] for quantity, *texts in cells[~is_alike].itertuples()]
    alike = [f"{quantity.name} {text}" for quantity, text, *_ in cells[is_alike].itertuples()]
    lines = [f"Mean ± standard deviation over {len(study.seeds)} seeds; {HOW_TO_READ}.", ""]
    lines += table(["", *heads], rows)
    return lines + ["", f"In every arm: {', '.join(alike)}."] * bool(alike)


def _p(claim: Claim, values: pd.DataFrame, seeds: Sequence[int]) -> float:
    """The p-value by the scatter of the arms that have all seeds; NaN if its own do not."""
    whole = values[claim.quantity].unstack("arm").reindex(seeds).dropna(axis="columns")
    if not {claim.arm, claim.than} <= {*whole}:
        return math.nan
    return statistics.pooled_interval(whole, claim.arm, claim.than).p


def _judged(claim: Claim, p: float, words: Sequence[str], values: pd.DataFrame) -> list[str]:
    """The cells of a claim, which both tests have to bear out or to speak against.

    p: corrected; NaN while a seed is missing. words: for either verdict.
    """
    _, interval = compare.paired(values, claim.quantity, claim.arm, claim.than)
    verdict = "incomplete" if math.isnan(p) else "not significant"
    if max(p, interval.p) < statistics.ALPHA:
        verdict = words[interval.difference * claim.sign < 0]
    return [
        claim.quantity.name,
        f"{claim.arm} {'above' if claim.sign > 0 else 'below'} {claim.than}",
        " ".join(claim.quantity.texts(interval)),
        "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}",
        verdict,
    ]


def _origin(runs: Mapping[str, Run]) -> str:
    """Names the commits and versions of the rows, and how long the runs took."""
    starts = [start for run in runs.values() for start in run.starts]
    commits = dict.fromkeys(map(commit_text, starts))
    jax = dict.fromkeys(start["versions"]["jax"] for start in starts)
    hours = sum(run["seconds/total"].sum() for run in runs.values()) / 3600
    made = f"commit {', '.join(commits)}; JAX {', '.join(jax)}"
    return f"{len(runs)} runs, {hours:.1f} hours of one core in all; {made}."


def figure(study: Study, runs: Mapping[str, Run]) -> plots.Figure:
    """The study's curves: a panel for each of them, with its title from TITLES."""
    kept, _ = study.finished(runs)
    units = {metric.key: metric.unit for metric in METRICS}
    units |= {key: score_metric(key).unit for key in study.drawn if key.startswith("eval/")}
    panels = [plots.Panel(TITLES[it], units.get(it, ""), {TITLES[it]: it}) for it in study.drawn]
    seeds = len({run.seed for run in kept.values()})
    title = f"{study.title}\nmeans over {seeds} seeds, bands from the lowest to the highest"
    return plots.chosen(kept, panels, title=title, over_tokens=study.over_tokens)


def add_rows(study: Study, made: pathlib.Path, folder: pathlib.Path) -> None:
    """Adds the finished runs of a sweep's file of rows to the study's own, in its order."""
    runs = read_rows_file(folder / ROWS) if (folder / ROWS).exists() else {}
    runs |= study.finished(read_rows_file(made))[0]
    labels = itertools.starmap(sweep_label, itertools.product(study.arms, study.seeds))
    write_rows(folder / ROWS, {label: runs[label] for label in labels if label in runs})


def look_into(
    file: pathlib.Path,
    measure: Callable[[pathlib.Path], list[dict]],
    measures: Sequence[tuple[str, str, str]],
    pairs: Sequence[tuple[str, str]],
) -> None:
    """Prints tables of a file's rows; with --workdir, measures them there first.

    measures: (key, title, format) of a row's numbers, beside its "arm" and "seed". The tables are
    the arms' means over the seeds, and the differences of pairs of arms, paired by seed.
    """
    if flags.FLAGS.workdir:
        write_file(file, b"".join(map(json_line, measure(pathlib.Path(flags.FLAGS.workdir)))))
    rows = pd.read_json(file, lines=True, precise_float=True).set_index(["arm", "seed"])
    values = pd.DataFrame({Quantity(title, float, form): rows[k] for k, title, form in measures})
    tables = [compare.means(values, {}), *compare.differences(values, pairs)]
    print("\n".join(compare.lines_of(tables)))


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        sys.exit(f"experiments.study: give the name of one study, not {argv[1:]}")
    try:
        study, folder = load(argv[1]), HERE / argv[1]
        seeds = [int(seed) for seed in flags.FLAGS.seeds] or study.seeds
        if not set(seeds) <= set(study.seeds):
            raise ValueError(f"--seeds={seeds}: the study's are {[*study.seeds]}")
        workdir = pathlib.Path(flags.FLAGS.workdir) if flags.FLAGS.workdir else None
        if hasattr(study, "read"):
            text, drawn = study.read(folder, workdir, seeds)
            return write(folder, text, drawn)
        if workdir:
            sweep(dataclasses.replace(study, seeds=seeds).plan(), workdir, jobs=flags.FLAGS.jobs)
            add_rows(study, workdir / ROWS, folder)
        runs = read_rows_file(folder / ROWS)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"experiments.study: {error}")
    return write(folder, result(study, runs), figure(study, runs))


def write(folder: pathlib.Path, text: str, drawn: plots.Figure) -> None:
    """Writes and prints a study's result."""
    write_file(folder / RESULT, text.encode())
    write_file(folder / FIGURE, plots.rendered(drawn))
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "", "Where the runs are made; '': read the committed rows.")
    flags.DEFINE_list("seeds", [], "Those of the study of which runs are made; '': all.")
    flags.DEFINE_integer("jobs", 2, "Runs at once.", lower_bound=1)
    app.run(main)
