"""Pre-train the base policy that hesitates: the student of `task.py`, made from tiny_base.

    python -m experiments.forks_base.pretrain      # rebuilds experiments/forks_base/checkpoint
    python -m experiments.forks_base.pretrain --start=experiments/forks_base/checkpoint --seed=1

It starts from tiny_base's weights, which know the arithmetic, and keeps its tokenizer. The second
command goes on from what the first made, with other problems.
"""

import pathlib
import shutil

import numpy as np
from absl import app, flags

from dapo_jax.tasks.templates import PROMPT_TEMPLATE
from experiments.forks_base.task import Forks, solution
from experiments.tiny_base.supervised import fit
from models.hf import load_params
from models.hf_config import load_config

HERE = pathlib.Path(__file__).parent
MIXTURE = {"easy": 0.1, "road": 0.35, "long": 0.45, "closed": 0.1}
ROW_TOKENS = 512
ROWS = 4

FLAGS = flags.FLAGS
flags.DEFINE_string("start", str(HERE.parent / "tiny_base" / "checkpoint"), "Model to start from.")
flags.DEFINE_string("out", str(HERE / "checkpoint"), "Target directory.")
flags.DEFINE_integer("num_steps", 2_200, "Optimizer steps.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of the problems and solutions.", lower_bound=0)


def solved_problems(count: int, seed: int):
    """`count` (prompt text, solution text) pairs of the train split."""
    rng = np.random.default_rng([FLAGS.seed, seed])
    for problem in Forks(count=count, seed=int(rng.integers(2**62)), **MIXTURE).problems():
        yield PROMPT_TEMPLATE.format(problem=problem.question), solution(problem, rng)


def main(_):
    out = pathlib.Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    start = pathlib.Path(FLAGS.start)
    if start.resolve() != out.resolve():
        shutil.copyfile(start / "tokenizer.model", out / "tokenizer.model")
    config = load_config(start)
    params = load_params(start, config, dtype="float32")
    how = {"num_steps": FLAGS.num_steps, "rows": ROWS, "row_tokens": ROW_TOKENS}
    fit(config, params, lambda seed, step: solved_problems(500, seed), out, **how, peak_rate=1.5e-3)


if __name__ == "__main__":
    app.run(main)
