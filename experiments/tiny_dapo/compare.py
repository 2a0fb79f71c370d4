"""A markdown table of runs: start, end, and the score at the sampling budget that all reached.

python -m experiments.tiny_dapo.compare --workdir=runs/dapo_0 --workdir=runs/grpo_0 ...
"""

import numpy as np
from absl import app, flags

from dapo_jax.report.__main__ import load
from dapo_jax.report.runs import Run, tokens_before

METRIC = ("arithmetic", "mean@8")


def score_at(run: Run, budget_tokens: float) -> float:
    """The evaluation score when `budget_tokens` had been sampled, linear between evaluations."""
    tokens, scores = tokens_before(run.rows), run.evaluations[METRIC]
    return float(np.interp(budget_tokens, [tokens[step] for step in scores], list(scores.values())))


def table(runs: dict[str, Run]) -> list[str]:
    """Markdown rows, one a run."""
    total = {name: run.rows[-1]["sampled_tokens_total"] for name, run in runs.items()}
    budget = min(total.values())
    lines = [
        f"| run | steps | tokens sampled | minutes | {METRIC[1]} base | end | gain | "
        f"at {budget / 1e6:.2f} M tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        first, *_, last = run.evaluations[METRIC].values()
        minutes = sum(row["seconds/total"] for row in run.rows) / 60
        lines.append(
            f"| {name} | {len(run.rows)} | {total[name] / 1e6:.2f} M | {minutes:.1f} | "
            f"{first:.3f} | {last:.3f} | {last - first:+.3f} | {score_at(run, budget):.3f} |"
        )
    return lines


def main(_):
    print("\n".join(table(load(WORKDIRS.value))))


if __name__ == "__main__":
    WORKDIRS = flags.DEFINE_multi_string("workdir", None, "A run's directory.", required=True)
    app.run(main)
