"""The end of a run: its curves, and its summary of first against last."""

import pathlib

from dapo_jax.logs.display import format_duration
from dapo_jax.logs.files import append_log, write_file
from dapo_jax.logs.metrics import METRICS, score_metric
from dapo_jax.report import plots, runs

AVERAGED_STEPS = 10  # first and last values of noisy rows are means over at most so many steps


def conclude(workdir: pathlib.Path, *, was_finished: bool) -> bool:
    """Draws a finished run's curves, unless it was so before; returns whether it trained."""
    run, curves = runs.load_run(workdir), workdir / "curves.png"
    if not (was_finished and curves.is_file()):  # a kill after the last row leaves none
        write_file(curves, plots.rendered(plots.curves({workdir.name: run})))
    lines = [*summary_lines(run), f"curves: {curves}"]
    if was_finished:
        done = run.finished_steps
        more = f"raise num_steps to go on, as --config.num_steps={2 * done}"
        lines.insert(0, f"finished: {done} of {done} steps in {workdir}; {more}")
    print("\n".join(lines))
    if not was_finished:
        append_log(workdir, "\n".join(lines))
    return idle_steps(run) < len(run.rows)


def summary_lines(run: runs.Run) -> list[str]:
    """The end of a run in a few aligned lines: first -> last (best), then the totals."""
    lines = changes(run) | {name: f"{text:>8}" for name, text in totals(run).items()}
    width = max(map(len, lines))
    return [f"{name:<{width}}  {text}" for name, text in lines.items()]


def changes(run: runs.Run) -> dict[str, str]:
    """Name -> "first -> last" of the evaluations and of the metrics that have a summary.

    Evaluations compare the first file with the last. Metrics compare the means over a tenth of the
    rows at either end, 1 to AVERAGED_STEPS of them. Where higher is better, the best one follows.
    """
    edge = min(AVERAGED_STEPS, max(1, len(run.rows) // 10))
    scores = [(runs.score_name(key), score_metric(key), 1) for key in run.scores]
    metrics = [
        (metric.summary, metric, edge)
        for metric in METRICS + runs.own_metrics({"": run})
        if metric.summary
    ]
    texts = {}
    for name, metric, n in scores + metrics:
        if len(values := run[metric.key].dropna()):
            shown = values.head(n).mean(), values.tail(n).mean(), values.max()
            first, last, best = (metric.text(value).strip() for value in shown)
            texts[name] = f"{first:>8} -> {last:>8}"
            if metric.higher_is_better:
                texts[name] += f"   best {best} at step {values.idxmax()}"
    return texts


def totals(run: runs.Run) -> dict[str, str]:
    """Name -> formatted sums over the rows: steps, time, tokens, tokens per second, skips."""
    seconds, load, compiling, skipped = (
        run[key].sum()
        for key in ("seconds/total", "seconds/load", "seconds/compile", "updates_skipped")
    )
    known, idle = runs.tokens_before(run), idle_steps(run)
    tokens = known.max() - known.min()  # a fork's own
    texts = {
        "rollout steps": str(len(run.rows)),
        "wall time": seconds > 0 and format_duration(seconds + load + compiling),
        "sampled tokens": tokens > 0 and f"{int(tokens):,}",
        "sampled tokens per second": min(tokens, seconds) > 0 and f"{tokens / seconds:,.0f}",
        "steps without an update": idle > 0 and str(idle),
        "updates skipped": skipped > 0 and f"{skipped:.0f}",
        "starts": len(run.starts) > 1 and str(len(run.starts)),
        "commit": run.starts and run.starts[-1].get("commit") and runs.commit_text(run.starts[-1]),
    }
    return {name: text for name, text in texts.items() if text}


def idle_steps(run: runs.Run) -> int:
    """Counts the steps in which no update had a gradient that is not zero."""
    return int((run["updates"] <= run["updates_zero_gradient"].fillna(0)).sum())
