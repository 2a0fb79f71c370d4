"""DAPO against naive GRPO over equally many sampled tokens, each at its own learning rate."""

from dapo_jax.report.compare import accuracy_over
from experiments.study import CLIPPED, LONG, ROAD, Claim, Study
from experiments.table1.study import accuracy_at

AREA = accuracy_over(1_750_000)
EARLY, MIDDLE, END = map(accuracy_at, (500_000, 1_000_000, 1_700_000))

STUDY = Study(
    title="DAPO and naive GRPO over equally many sampled tokens",
    config="configs/forks.py",
    settings={"eval.samples_per_prompt": "8", "learner.learning_rate": "1e-4"},
    arms={
        "naive_grpo": "preset=naive_grpo num_steps=200 eval.every_steps=100",
        "dapo": "preset=dapo num_steps=62 eval.every_steps=31",
    },
    quantities=(AREA, EARLY, MIDDLE, END, ROAD, LONG, *CLIPPED),
    drawn=("accuracy/mean", "entropy", "response_tokens/mean", "task/right_road"),
    over_tokens=True,
    claims=[
        Claim(quantity, "dapo", sign, "naive_grpo")
        for quantity, sign in ((AREA, -1), (END, +1), (ROAD, +1), (LONG, +1))
    ],
    post_hoc=[Claim(quantity, "dapo", +1, "naive_grpo") for quantity in (EARLY, MIDDLE)],
)
