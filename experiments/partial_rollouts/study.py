"""Effects of earlier policies' tokens on learning, and what partial rollouts save in decoding."""

from dapo_jax.report.compare import accuracy_over, final_score, mean
from experiments.study import ACCURACY, CLIPPED, ENTROPY, TOKENS, Claim, Study

ROAD = final_score("road", "mean@4")
STEPS = mean("decode steps a step", "engine/decode_steps", form="{:.0f}")
BUSY = mean("busy slots while decoding, %", "engine/occupancy", scale=100)
AREA = accuracy_over(650_000)

STUDY = Study(
    title="Responses that go on in the next step, against steps that finish theirs",
    config="configs/forks.py",
    settings={"num_steps": "30", "eval.every_steps": "15"},
    arms={"off": "rollout.partial_rollout_steps=0", "on": "rollout.partial_rollout_steps=2"},
    quantities=(
        STEPS,
        BUSY,
        mean("trained tokens of earlier policies, %", "staleness/tokens_fraction", scale=100),
        mean("their mean age over all, steps", "staleness/mean_steps", form="{:.2f}"),
        ACCURACY,
        AREA,
        ROAD,
        TOKENS,
        ENTROPY,
        *CLIPPED,
    ),
    drawn=("accuracy/mean", "engine/decode_steps", "response_tokens/mean"),
    over_tokens=True,
    claims=[
        Claim(quantity, "on", sign, "off")
        for quantity, sign in ((STEPS, -1), (BUSY, +1), (ACCURACY, -1), (AREA, +1))
    ],
)
