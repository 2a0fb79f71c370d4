"""Runs read from their directories, and the summary of a run: first against last.

Row s of metrics.jsonl describes responses of the policy after s finished steps, and eval/<n>.json
the policy after n: both share the axis "finished rollout steps".
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.logs.display import format_duration
from dapo_jax.logs.files import read_json, read_rows, read_starts
from dapo_jax.logs.metrics import METRICS, TASK, score_metric

AVERAGED_STEPS = 10  # first and last values of noisy rows are means over at most so many steps
Key = str | tuple[str, str]  # of a run's rows, or of its evaluations


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a run's directory.

    rows: metrics.jsonl, in order. evaluations: set and metric -> {finished steps: value}, for
    instance ("arithmetic", "mean@8") -> {0: 0.31, 10: 0.42}; those of `evaluate` have their
    settings in the set's name. config: dotted key -> value. starts: the lines of starts.jsonl.
    arm: the name shared by the runs of a sweep that differ in their seed alone; "" without a sweep.
    workdir: None for a run from a file of rows.
    """

    rows: list[dict]
    evaluations: dict[tuple[str, str], dict[int, float]]
    config: dict[str, object]
    starts: list[dict] = dataclasses.field(default_factory=list)
    arm: str = ""
    workdir: pathlib.Path | None = dataclasses.field(default=None, compare=False)

    @property
    def seed(self) -> int | None:
        """The config's seed; None without a config.json."""
        return self.config.get("seed")

    @property
    def finished_steps(self) -> int:
        """The number of finished rollout steps."""
        return self.rows[-1]["step"] + 1


def load_run(workdir: str | pathlib.Path, *, arm: str = "") -> Run:
    """Reads metrics.jsonl, eval/*.json, config.json and starts.jsonl; only the first is required.

    Raises FileNotFoundError without metrics.jsonl, ValueError without a row and for a broken file.
    """
    workdir = pathlib.Path(workdir)
    path, config_path = workdir / "metrics.jsonl", workdir / "config.json"
    if not (rows := read_rows(path)):
        raise ValueError(f"{path} has no rows yet: the run in {workdir} has not finished a step")
    config = flatten(read_json(config_path)) if config_path.is_file() else {}
    starts = read_starts(workdir / "starts.jsonl")
    evaluations = _read_evaluations(workdir / "eval", rows[-1]["step"] + 1)
    return Run(rows, evaluations, config, starts, arm, workdir)


def load_sweep(folder: pathlib.Path) -> dict[str, Run]:
    """Reads the runs of a sweep's folder with a finished step: label -> run, arm by arm."""
    plan, runs = read_json(folder / "sweep.json"), {}
    for label, arm in ((sweep_label(a, seed), a) for a in plan["arms"] for seed in plan["seeds"]):
        path = folder / label / "metrics.jsonl"
        if path.is_file() and read_rows(path):
            runs[label] = load_run(path.parent, arm=arm)
    return runs


def sweep_label(arm: str, seed: int | None) -> str:
    """Names a run of a sweep, as its folder inside the sweep's is named."""
    return f"{arm}/seed_{seed}"


def _read_evaluations(folder: pathlib.Path, steps: int) -> dict[tuple[str, str], dict[int, float]]:
    """Reads the scores of policies after at most so many steps: a run may have been cut back."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    results = (it for it in map(read_json, folder.glob("[0-9]*.json")) if it["step"] <= steps)
    for result in sorted(results, key=lambda it: it["step"]):
        for name, metrics in result["sets"].items():
            name = f"{name} {result.get('label', '')}".strip()  # only those of `evaluate` have one
            for metric, value in metrics.items():
                if metric.startswith(("mean@", "pass@", "maj@", TASK)) and value is not None:
                    curves.setdefault((name, metric), {})[result["step"]] = value
    return curves


def flatten(tree: Mapping, prefix: str = "") -> dict[str, object]:
    """{"algo": {"eps_low": 0.2}} -> {"algo.eps_low": 0.2}."""
    flat = {}
    for key, value in tree.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {}
        flat |= inner or {f"{prefix}{key}": value}
    return flat


def by_arm(runs: Mapping[str, Run]) -> dict[str, dict[int | None, Run]]:
    """Groups runs: arm (the label, where a run has none) -> seed -> run, as they first appear."""
    arms: dict[str, dict[int | None, Run]] = {}
    for label, run in runs.items():
        arms.setdefault(run.arm or label, {})[run.seed] = run
    return arms


def complete(runs: Mapping[str, Run]) -> tuple[dict[str, Run], list[str]]:
    """(runs with as many steps as their arm's config asks for, a text for each other run)."""
    wanted = {
        arm: max(run.config.get("num_steps", 0) for run in of_seed.values())
        for arm, of_seed in by_arm(runs).items()
    }
    short = {
        label: f"{label} has {run.finished_steps} of {steps} steps"
        for label, run in runs.items()
        if run.finished_steps < (steps := wanted[run.arm or label])
    }
    return {label: runs[label] for label in runs if label not in short}, list(short.values())


def mean_scores(runs: Mapping[str, Run]) -> dict[str, Key]:
    """The mean@k of the runs' evaluation sets, in order of first appearance."""
    pairs = (pair for run in runs.values() for pair in run.evaluations)
    return {" ".join(pair): pair for pair in pairs if pair[1].startswith("mean@")}


def own_metrics(runs: Mapping[str, Run]) -> dict[str, str]:
    """Returns the keys of rows that METRICS lacks and names for them: a task's, a loss's, yours."""
    elsewhere = ("eval/", "alarm/", "digest/", "seconds", "verdicts/")
    keys = dict.fromkeys(key for run in runs.values() for row in run.rows for key in row)
    own = [it for it in keys.keys() - {it.key for it in METRICS} if not it.startswith(elsewhere)]
    of = {True: ", the task's own", False: ""}
    return {it: it.removeprefix(TASK).replace("_", " ") + of[TASK in it] for it in sorted(own)}


def column(rows: Sequence[Mapping], key: str) -> np.ndarray:
    """The rows' values of a key, [rows] float64, NaN where missing."""
    return np.array([row.get(key) for row in rows], dtype=np.float64)  # of None makes NaN


def points(run: Run, key: Key) -> Mapping[int, float | None]:
    """Finished steps -> value of a key of the rows, or of a pair of the evaluations."""
    if isinstance(key, tuple):
        return run.evaluations.get(key, {})
    return {row["step"]: row.get(key) for row in run.rows}


def tokens_before(rows: Sequence[Mapping]) -> dict[int, float]:
    """Finished steps -> tokens sampled before, by the parent too where the run is a fork."""
    spent = {row["step"] + 1: float(row.get("sampled_tokens_total", 0)) for row in rows}
    begin = rows[0]["step"]
    drawn = rows[0].get("engine/drawn_tokens", spent[begin + 1])
    return {begin: spent[begin + 1] - drawn} | spent


def summary_lines(run: Run) -> list[str]:
    """The end of a run in a few aligned lines: first -> last (best), then the totals."""
    found = changes(run) | {name: f"{text:>8}" for name, text in totals(run).items()}
    width = max(map(len, found))
    return [f"{name:<{width}}  {text}" for name, text in found.items()]


def changes(run: Run) -> dict[str, str]:
    """Name -> "first -> last" of the evaluations and of the metrics that have a summary.

    Evaluations compare the first file with the last. Metrics compare the means over a tenth of the
    rows at either end, 1 to AVERAGED_STEPS of them. Where higher is better, the best one follows.
    """
    many = min(AVERAGED_STEPS, max(1, len(run.rows) // 10))
    rows = [(metric.summary, metric.key, metric, many) for metric in METRICS if metric.summary]
    scores = [
        (f"{name} {score}", (name, score), score_metric(f"eval/{name}/{score}"), 1)
        for name, score in run.evaluations
    ]
    found = {}
    for name, key, metric, edge in (*scores, *rows):
        pairs = np.array([*points(run, key).items()], np.float64)
        steps, values = pairs[np.isfinite(pairs[:, 1])].T
        if len(values):
            shown = values[:edge].mean(), values[-edge:].mean(), values.max()
            first, last, best = (metric.text(value).strip() for value in shown)
            found[name] = f"{first:>8} -> {last:>8}"
            if metric.higher_is_better:
                found[name] += f"   best {best} at step {steps[values.argmax()]:.0f}"
    return found


def totals(run: Run) -> dict[str, str]:
    """Name -> formatted sums over the rows: steps, time, tokens, tokens per second, skips."""
    timed = [column(run.rows, key) for key in ("seconds/total", "seconds/load", "seconds/compile")]
    seconds, wall = float(np.nansum(timed[0])), float(np.nansum(timed))
    known = tokens_before(run.rows).values()
    tokens = max(known) - min(known)  # a fork's own
    skipped, idle = np.nansum(column(run.rows, "updates_skipped")), idle_steps(run)
    found = {
        "rollout steps": str(len(run.rows)),
        "wall time": seconds > 0 and format_duration(wall),
        "sampled tokens": tokens > 0 and f"{int(tokens):,}",
        "sampled tokens per second": min(tokens, seconds) > 0 and f"{tokens / seconds:,.0f}",
        "steps without an update": idle > 0 and str(idle),
        "updates skipped": skipped > 0 and f"{skipped:.0f}",
        "starts": len(run.starts) > 1 and str(len(run.starts)),
        "commit": run.starts and run.starts[-1].get("commit") and commit_text(run.starts[-1]),
    }
    return {name: text for name, text in found.items() if text}


def idle_steps(run: Run) -> int:
    """Counts the steps in which no update had a gradient that is not zero."""
    return sum(row.get("updates", 1) <= row.get("updates_zero_gradient", 0) for row in run.rows)


def commit_text(start: Mapping) -> str:
    """The short commit of a start, with "and changes" for modified files; "unknown" without git."""
    if not start.get("commit"):
        return "unknown"
    return start["commit"][:9] + (" and changes" if start.get("changed") else "")
