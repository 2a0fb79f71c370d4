"""The page of one or several runs: tables as HTML, curves and samples as data for its scripts."""

import math
import pathlib
from collections.abc import Mapping, Sequence

import jinja2
import numpy as np

from dapo_jax.report import curves, events, runs, samples, statistics
from dapo_jax.report.curves import Curve, Line, Panel
from dapo_jax.report.quantities import finished_steps
from dapo_jax.report.runs import Run
from dapo_jax.report.summary import complete
from dapo_jax.run.metrics import METRICS, Metric, score_metric

TABLE_ROWS = 30  # rows of metrics shown for a run
RUNS_WITH_ROWS = 4  # of more runs no single rows are shown
OPEN_RUNS = 8  # a table of more runs is folded
POINTS = (
    12_000  # of one curve, over all arms; longer ones are thinned, at most to LEAST_POINTS each
)
LEAST_POINTS, MOST_POINTS = 100, 1_000
AXES = {  # what a person may choose for the horizontal axis
    "steps": "finished rollout steps",
    "tokens": "tokens sampled for training",
    "updates": "gradient updates",
    "hours": "hours of the steps",
}


def render(
    loaded: Mapping[str, Run],
    *,
    paper: Mapping[str, list[dict]] | None = None,
    unfinished: Sequence[Mapping] = (),
) -> str:
    """Renders the HTML page of runs by label; it needs no other file.

    paper: what `paper.read` gives. unfinished: points of a sweep that did not end as they should.
    """
    by_arm = curves.arms(loaded)
    finished, short = complete(loaded)
    keys = {
        label: dict.fromkeys(key for row in run.rows for key in row)
        for label, run in loaded.items()
    }
    plain = [Metric(key, "", "") for by_run in keys.values() for key in by_run]
    chosen = samples.choose(loaded)
    # Names, settings and responses may hold anything: all text is escaped, JSON as well.
    folder = pathlib.Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return environment.get_template("page.html.j2").render(
        title=f"DAPO: {_title(loaded, by_arm)}",
        style=(folder / "page.css").read_text(),
        scripts=[(folder / name).read_text() for name in ("curves.js", "samples.js")],
        runs=loaded,
        arms=by_arm,
        seeded=len(loaded) > len(by_arm),
        changes={label: runs.changes(run) for label, run in loaded.items()},
        totals={label: runs.totals(run) for label, run in loaded.items()},
        averaged=sorted({runs.averaged_rows(run.rows) for run in loaded.values()}),
        ends=ends(by_arm),
        ended={arm: len(finished.keys() & of_arm.keys()) for arm, of_arm in by_arm.items()},
        short=short,
        last_rows=statistics.LAST_ROWS,
        differences=arm_differences(by_arm),
        drawing=drawing(by_arm, paper=paper or {}),
        with_paper=bool(paper),
        samples=chosen,
        verdicts=samples.VERDICTS,
        events={label: found for label, run in loaded.items() if (found := events.of_run(run))},
        unfinished=unfinished,
        versions=events.versions(loaded),
        open_runs=OPEN_RUNS,
        keys=keys,
        rows={
            label: runs.thinned(run.rows, limit=TABLE_ROWS)
            for label, run in loaded.items()
            if len(loaded) <= RUNS_WITH_ROWS
        },
        metrics={metric.key: metric for metric in plain + METRICS},
    )


def _title(loaded: Mapping[str, Run], by_arm: Mapping) -> str:
    if len(by_arm) > RUNS_WITH_ROWS:
        return f"{len(loaded)} runs of {len(by_arm)} arms"
    return ", ".join(by_arm)


def arm_differences(by_arm: Mapping[str, Mapping[str, Run]]) -> dict[str, list[str]]:
    """Lists the config keys on which runs differ: key -> the values of each arm, as text."""
    labels = [label for arm in by_arm.values() for label in arm]
    by_key = runs.config_differences({k: v for arm in by_arm.values() for k, v in arm.items()})
    result = {}
    for key, texts in by_key.items():
        of_label = dict(zip(labels, texts, strict=True))
        result[key] = [
            ", ".join(dict.fromkeys(of_label[label] for label in arm)) for arm in by_arm.values()
        ]
    return result


def ends(by_arm: Mapping[str, Mapping[str, Run]]) -> dict[str, list[dict | None]]:
    """Compares the ends of arms: quantity -> for each arm its mean, spread and paired difference.

    {"mean", "spread" (standard deviation over seeds), "difference" (from the first arm on the seeds
    that both have, with its 95 % interval), "excludes_zero"}, numbers as texts; None where an arm
    does not have the quantity. Runs that are not complete are left out.
    """
    finished, _ = complete({k: run for arm in by_arm.values() for k, run in arm.items()})
    values: dict[str, list[dict]] = {}
    metric_of: dict[str, Metric] = {}
    for i, arm in enumerate(by_arm.values()):
        for label, run in arm.items():
            for metric, name, value in _ends_of(run) if label in finished else ():
                metric_of[name] = metric
                of_arm = values.setdefault(name, [{} for _ in by_arm])[i]
                of_arm[label if run.seed is None else run.seed] = value
    return {
        name: [_end(metric_of[name], of_arm, per_arm[0], i > 0) for i, of_arm in enumerate(per_arm)]
        for name, per_arm in values.items()
    }


def _ends_of(run: Run):
    """Yields (metric, name, value at the end) of a run's evaluations and summarized metrics."""
    for (name, score), found in run.evaluations.items():
        if (last := finished_steps(run)) in found:
            yield score_metric(f"eval/{name}/{score}"), f"{name} {score}", found[last]
    for metric in METRICS:
        value = statistics.last_mean(runs.column(run.rows, metric.key)) if metric.summary else None
        if value is not None and math.isfinite(value):
            yield metric, metric.summary, value


def _end(metric: Metric, found: Mapping, first: Mapping, compare: bool) -> dict | None:
    if not found:
        return None
    values = list(found.values())
    cell = {"mean": metric.text(statistics.nan_mean(values)).strip(), "n": len(values)}
    spread = statistics.spread(values)
    cell["spread"] = metric.text(spread).strip().lstrip("+") if len(values) > 1 else ""
    shared = [seed for seed in found if seed in first]
    cell |= {"difference": "", "excludes_zero": False}
    if compare and len(shared) > 1:
        interval = statistics.paired_interval(
            [found[seed] for seed in shared], [first[seed] for seed in shared]
        )
        text = [_signed(metric, v) for v in (interval.difference, interval.low, interval.high)]
        cell["difference"] = "{} [{}, {}]".format(*text)
        cell["excludes_zero"] = interval.excludes_zero
    return cell


def _signed(metric: Metric, value: float) -> str:
    text = metric.text(value).strip()
    return text if text[:1] in "+-" else f"+{text}"


def drawing(by_arm: Mapping[str, Mapping[str, Run]], *, paper: Mapping[str, list[dict]]) -> dict:
    """Gathers what the page's script draws: {"axes", "arms", "panels"}, ready for JSON.

    A line has x in finished steps; "low" and "high" where it is a mean over seeds, "raw" where a
    single run was smoothed; an arm's "axes" translate steps into what else x may show.
    """
    runs_of = [list(arm.values()) for arm in by_arm.values()]
    every = {label: run for arm in by_arm.values() for label, run in arm.items()}
    limit = min(MOST_POINTS, max(LEAST_POINTS, POINTS // len(by_arm)))
    spent = [curves.axes(arm) for arm in runs_of]
    names = [name for name in AXES if name == "steps" or any(name in axes for axes in spent)]
    return {
        "axes": {name: AXES[name] for name in names},
        "arms": [
            {
                "name": name,
                "seeds": sorted(run.seed for run in arm if run.seed is not None),
                "runs": len(arm),
                "axes": {key: _thin_axis(known, limit) for key, known in axes.items()},
            }
            for name, arm, axes in zip(by_arm, runs_of, spent, strict=True)
        ],
        "panels": [
            _panel(panel, runs_of, paper, limit)
            for panel in curves.panels(every, split=len(by_arm) > 1)
        ],
    }


def _panel(panel: Panel, runs_of: Sequence, paper: Mapping, limit: int) -> dict:
    lines = [
        {"arm": i, "curve": kind, **_line(found, limit), "marks": not curve.noisy}
        for kind, curve in enumerate(panel.curves)
        for i, arm in enumerate(runs_of)
        if (found := curves.line(arm, curve))
    ]
    return {
        "title": panel.title,
        "cost": panel.title.startswith(curves.COST),
        "share": panel.unit == "share",
        "log": panel.log,
        "curves": [curve.name for curve in panel.curves],
        "lines": lines,
        "paper": [theirs for key in _paper_keys(panel.curves) for theirs in paper.get(key, ())],
    }


def _paper_keys(shown: Sequence[Curve]) -> list[str]:
    return list(dict.fromkeys("eval" if c.key.startswith("eval/") else c.key for c in shown))


def _line(found: Line, limit: int) -> dict:
    """A line as JSON, thinned to `limit` points, numbers to five digits."""
    kept = np.linspace(0, len(found.x) - 1, min(limit, len(found.x))).round().astype(int)
    result = {"x": found.x[kept].astype(int).tolist(), "y": _numbers(found.y[kept])}
    if found.count.max() > 1:
        result |= {"low": _numbers(found.low[kept]), "high": _numbers(found.high[kept])}
        result["count"] = found.count[kept].tolist()
    if found.raw is not None:
        result["raw"] = _numbers(found.raw[kept])
    return result


def _thin_axis(known: Mapping[int, float], limit: int) -> dict:
    points = runs.thinned([{"x": x, "y": y} for x, y in known.items()], limit=limit)
    return {"x": [point["x"] for point in points], "y": _numbers([p["y"] for p in points])}


def _numbers(values) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
