"""A figure for each way in which a run goes wrong, beside the run that does not.

python -m experiments.reading_a_run.figures
"""

import pathlib

from absl import app

from dapo_jax.report import plots
from dapo_jax.report.rows import read_rows_file
from experiments.reading_a_run.study import STUDY
from experiments.study import ROWS, panels

HERE = pathlib.Path(__file__).parent
HEALTHY = "healthy"
SHOWN = {
    "collapse": ("no_answer_fraction", "response_tokens/mean", "eval/long/mean@4"),
    "explosion": ("entropy", "grad_norm", "response_tokens/mean"),
    "length_creep": ("response_tokens/mean", "accuracy/mean", "eval/long/mean@4"),
    "format": ("accuracy/mean", "eval/road/mean@4", "groups/informative"),
    "no_groups": ("groups/informative", "accuracy/mean", "eval/road/mean@4"),
    "gap": ("ratio_gap", "accuracy/mean", "eval/road/mean@4"),
}


def main(_):
    runs, missing = STUDY.finished(read_rows_file(HERE / ROWS))
    if missing:
        raise ValueError(f"{HERE / ROWS}: {'; '.join(missing)}")
    for arm, keys in SHOWN.items():
        chosen = {label: run for label, run in runs.items() if run.arm in (HEALTHY, arm)}
        drawn = panels({key: STUDY.drawn[key] for key in keys})
        plots.save(
            plots.chosen(chosen, drawn, (), title=arm.replace("_", " ")), HERE / f"{arm}.png"
        )


if __name__ == "__main__":
    app.run(main)
