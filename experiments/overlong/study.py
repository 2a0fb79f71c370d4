"""Overlong responses: punished, masked, or punished softly, where the long solutions are sound."""

from dapo_jax.report.compare import last
from experiments.study import LONG, TOKENS, Claim, Study

CUT = last("truncated, %", "response_tokens/truncated_fraction", scale=100)

STUDY = Study(
    title="What becomes of sound long solutions that the limit cuts",
    config="configs/forks.py",
    settings={
        "data.train.args": "{'long': 1.0}",
        "rollout.num_prompts": "8",
        "rollout.generation_prompts": "16",
        "updates_per_step": "4",
        "num_steps": "30",
        "eval.every_steps": "15",
        "eval.samples_per_prompt": "8",
        "eval.sets.road.k": "0",
    },
    arms={
        "punished": "algo.overlong_factor=0.0",
        "filtered": "algo.overlong_factor=0.0 algo.overlong_filtering=True",
        "soft": "algo.overlong_factor=1.0",
    },
    quantities=(LONG, CUT, TOKENS),
    drawn=("eval/long/mean@8", "response_tokens/truncated_fraction", "response_tokens/mean"),
    claims=(
        Claim(LONG, "filtered", +1, "punished"),
        Claim(LONG, "soft", +1, "punished"),
        Claim(CUT, "soft", -1, "filtered"),
    ),
    post_hoc=(Claim(LONG, "soft", +1, "filtered"),),
)
