"""Pre-trains a small mixture of experts as tiny_base is: 8 experts, of which 2 a token.

    python -m experiments.experts.pretrain --num_steps=1000 --out=runs/experts/begun
    python -m experiments.experts.pretrain --num_steps=900 --out=runs/experts/base \\
        --start=runs/experts/begun
"""

import pathlib

from absl import app, flags

from experiments.experts.study import LEVELS
from experiments.tiny_base.pretrain import pretrain
from models.qwen3_moe import Qwen3MoeConfig

FLAGS = flags.FLAGS  # --out and --num_steps are tiny_base's
flags.DEFINE_string("start", "", "A directory whose weights it begins with.")
MIXTURE = Qwen3MoeConfig(
    *(384, 64, 192, 3, 4, 2, 16, True),
    num_experts=8,
    experts_per_token=2,
    expert_width=64,
    norm_topk=True,
)


def main(_):
    how = {"num_steps": FLAGS.num_steps, "levels": LEVELS, "start": FLAGS.start}
    pretrain(MIXTURE, pathlib.Path(FLAGS.out), **how)


if __name__ == "__main__":
    app.run(main)
