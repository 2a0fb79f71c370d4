"""Runs as tables: read from their directories, and from and to a small file, rows.jsonl.gz.

Row s of metrics.jsonl describes responses of the policy after s finished steps, and eval/<n>.json
the policy after n: both share the axis "finished rollout steps".

A line of rows.jsonl.gz is a run: {"arm", "seed", "config": {dotted key: value}, "starts": [time,
commit, changed, versions, devices and digests of prompts of each start], "evaluations": {set:
{score: {finished steps: value}}}, "metrics": {key: [value a row, null where missing]}}. 100 steps
take about 10 kB.
"""

import collections
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence

import pandas as pd

from configs.base import RENAMED
from dapo_jax.logs import files
from dapo_jax.logs.metrics import METRICS, TASK, Metric

TOKENS = "sampled_tokens_total"  # of a row
# The times of one machine are left out of a file, but not the quantities of its schedule.
LEFT_OUT = ("engine/", "seconds_in_rollout/")
KEPT = ("engine/decode_steps", "engine/drawn_tokens", "engine/occupancy")
OF_A_START = ("time", "commit", "changed", "versions", "devices", "prompts")  # not of the machine


@dataclasses.dataclass(eq=False)
class Run:
    """The contents of a run's directory; run[key] has a column of either table.

    rows: metrics.jsonl, given as dicts or as columns: a row a step, a float64 column a metric.
    scores: given as eval/<set>/<score> -> {finished steps: value}, a column each; those of
    `evaluate` have their settings behind the set's name. NaN is what is missing. config: dotted key
    -> value. starts: the lines of starts.jsonl. arm: the name shared by the runs of a sweep that
    differ in their seed alone. workdir: None for a run from a file of rows.
    """

    rows: pd.DataFrame
    scores: pd.DataFrame
    config: Mapping[str, object]
    starts: Sequence[Mapping] = ()
    arm: str = ""
    workdir: pathlib.Path | None = None

    def __post_init__(self):
        rows, scores = pd.DataFrame(self.rows), pd.DataFrame(self.scores, dtype=float)
        numbers = [key for key in rows if not key.startswith(("eval/", "digest/"))]
        self.rows = rows[numbers].astype(float).set_axis(rows["step"].astype(int))
        self.scores = scores.set_axis(scores.index.astype(int)).sort_index()

    def __getitem__(self, key: str) -> pd.Series:
        """Returns the values of a metric or score by finished steps; all NaN where it is none."""
        table = self.scores if key.startswith("eval/") else self.rows
        return table[key] if key in table else pd.Series(math.nan, table.index)

    @property
    def seed(self) -> int:
        """The config's seed; 0 without a config.json."""
        return self.config.get("seed", 0)

    @property
    def finished_steps(self) -> int:
        """The number of finished rollout steps."""
        return int(self.rows.index[-1]) + 1


def load_run(workdir: str | pathlib.Path, *, arm: str = "") -> Run:
    """Reads metrics.jsonl, eval/*.json, config.json and starts.jsonl; only the first is required.

    Raises FileNotFoundError without metrics.jsonl, ValueError without a row and for a broken file.
    """
    workdir = pathlib.Path(workdir)
    path, config_path = workdir / "metrics.jsonl", workdir / "config.json"
    if not (rows := files.read_rows(path)):
        raise ValueError(f"{path} has no rows yet: the run in {workdir} has not finished a step")
    config = flatten(files.read_json(config_path)) if config_path.is_file() else {}
    results = map(files.read_json, workdir.glob("eval/[0-9]*.json"))
    scores = collections.defaultdict(dict)
    for result in sorted(results, key=lambda it: it["step"]):
        if result["step"] > rows[-1]["step"] + 1:  # of before the run was cut back
            continue
        for name, of_set in result["sets"].items():
            name = f"{name} {result.get('label', '')}".strip()  # only those of `evaluate` have one
            for score, value in of_set.items():
                if score.startswith(("mean@", "pass@", "maj@", TASK)):
                    scores[f"eval/{name}/{score}"][result["step"]] = value
    return Run(rows, scores, config, files.read_starts(workdir / "starts.jsonl"), arm, workdir)


def flatten(tree: Mapping) -> dict[str, object]:
    """{"algo": {"eps_low": 0.2}} -> {"algo.eps_low": 0.2}."""
    return pd.json_normalize(tree).to_dict("records")[0]


def load_sweep(folder: pathlib.Path) -> dict[str, Run]:
    """Reads the runs of a sweep's folder with a finished step: label -> run, arm by arm."""
    plan, runs = files.read_json(folder / "sweep.json"), {}
    for arm, seed in itertools.product(plan["arms"], plan["seeds"]):
        path = folder / sweep_label(arm, seed) / "metrics.jsonl"
        if path.is_file() and files.read_rows(path):
            runs[sweep_label(arm, seed)] = load_run(path.parent, arm=arm)
    return runs


def sweep_label(arm: str, seed: int) -> str:
    """Names a run of a sweep, as its folder inside the sweep's is named."""
    return f"{arm}/seed_{seed}"


def write_rows(path: pathlib.Path, runs: Mapping[str, Run]) -> None:
    """Writes the runs, a line each, without the machine's paths; equal ones as equal bytes."""
    files.write_zipped_rows(path, map(_line_of, runs.values()))


def read_rows_file(path: pathlib.Path) -> dict[str, Run]:
    """Reads the output of `write_rows`: label -> run, with the arm and seed of each."""
    runs = map(_run_of, files.read_zipped_rows(path))
    return {sweep_label(run.arm, run.seed): run for run in runs}


def _line_of(run: Run) -> dict:
    evaluations = collections.defaultdict(dict)
    for key, values in run.scores.items():
        _, name, score = key.split("/", 2)
        evaluations[name][score] = {step: _rounded(it) for step, it in values.dropna().items()}
    kept = [key for key in run.rows if key in KEPT or not key.startswith(LEFT_OUT)]
    columns = run.rows[kept].dropna(axis="columns", how="all").items()
    return {
        "arm": run.arm,
        "seed": run.seed,
        "config": {
            key: pathlib.PurePath(value).name if str(value).startswith("/") else value
            for key, value in run.config.items()
        },
        "starts": [{key: it[key] for key in OF_A_START if key in it} for it in run.starts],
        "evaluations": evaluations,
        "metrics": {key: [*map(_rounded, values)] for key, values in columns},
    }


def _rounded(value: float) -> float:
    """A number to six significant digits; whole ones stay, as integers."""
    return int(value) if value.is_integer() else float(f"{value:.6g}")


def _run_of(line: Mapping) -> Run:
    scores = {
        f"eval/{name}/{score}": values
        for name, of_set in line["evaluations"].items()
        for score, values in of_set.items()
    }
    config = {RENAMED.get(key, key): value for key, value in line["config"].items()}
    return Run(line["metrics"], scores, config, line["starts"], line["arm"])


def arms_of(runs: Mapping[str, Run]) -> list[str]:
    """Lists the arms as they first appear."""
    return list(dict.fromkeys(run.arm for run in runs.values()))


def complete(runs: Mapping[str, Run]) -> tuple[dict[str, Run], list[str]]:
    """(runs with as many steps as their arm's config asks for, a text for each other run)."""
    wanted = collections.Counter()
    for run in runs.values():
        wanted[run.arm] = max(wanted[run.arm], run.config.get("num_steps", 0))
    short = {
        label: f"{label} has {run.finished_steps} of {wanted[run.arm]} steps"
        for label, run in runs.items()
        if run.finished_steps < wanted[run.arm]
    }
    return {label: runs[label] for label in runs if label not in short}, list(short.values())


def mean_scores(runs: Mapping[str, Run]) -> dict[str, str]:
    """Returns the mean@k of the runs' evaluation sets: name -> key, as they first appear."""
    keys = (key for run in runs.values() for key in run.scores if "/mean@" in key)
    return {score_name(key): key for key in keys}


def score_name(key: str) -> str:
    """Names eval/<set>/<score> as a person reads it."""
    return key.removeprefix("eval/").replace("/", " ", 1)


def own_metrics(runs: Mapping[str, Run]) -> list[Metric]:
    """Returns a metric for each key of the rows that METRICS lacks: a task's, a loss's, yours."""
    keys = set().union(*(run.rows for run in runs.values())) - {metric.key for metric in METRICS}
    whose = {True: ", the task's own", False: ""}
    names = {it: it.removeprefix(TASK).replace("_", " ") + whose[TASK in it] for it in sorted(keys)}
    taken = {metric.summary for metric in METRICS}
    names |= {key: f"{name}, your own" for key, name in names.items() if name in taken}
    return [
        Metric(key, "", "", panel=name, summary=name)
        for key, name in names.items()
        if not key.startswith(("alarm/", "seconds", "verdicts/"))
    ]


def tokens_before(run: Run) -> pd.Series:
    """Returns the tokens sampled by finished steps, those of a fork's parent among them."""
    total = run[TOKENS]
    before = total.iloc[0] - run["engine/drawn_tokens"].fillna(total).iloc[0]
    return pd.concat([pd.Series([before], total.index[:1]), total.set_axis(total.index + 1)])


def commit_text(start: Mapping) -> str:
    """The short commit of a start, with "and changes" for modified files; "unknown" without git."""
    if not start.get("commit"):
        return "unknown"
    return start["commit"][:9] + (" and changes" if start.get("changed") else "")
