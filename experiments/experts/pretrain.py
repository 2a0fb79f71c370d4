"""Pre-trains a small mixture of experts as tiny_base is: 8 experts, of which 2 a token.

python -m experiments.experts.pretrain --out=runs/experts/base --num_steps=1000
"""

import pathlib

from absl import app, flags

from experiments.tiny_base.pretrain import pretrain
from models.qwen3_moe import Qwen3MoeConfig

FLAGS = flags.FLAGS  # --out and --num_steps are tiny_base's
MIXTURE = Qwen3MoeConfig(
    *(384, 64, 192, 3, 4, 2, 16, True),
    num_experts=8,
    experts_per_token=2,
    expert_width=64,
    norm_topk=True,
)
LEVELS = (1, 2)  # steps of a problem


def main(_):
    pretrain(MIXTURE, pathlib.Path(FLAGS.out), num_steps=FLAGS.num_steps, levels=LEVELS)


if __name__ == "__main__":
    app.run(main)
