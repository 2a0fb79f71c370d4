"""Random rewards: what the two clips do to the entropy where nothing can be learned."""

from dapo_jax.report.compare import last
from experiments.study import CLIPPED, Claim, Study, Trend

ENTROPY = last("entropy, nats, last 10 steps", "entropy", form="{:.3f}")

STUDY = Study(
    title="Random rewards: entropy by the clip range",
    config="configs/forks.py",
    settings={
        "data.train.task": "experiments.forks_base.task:RandomRewards",
        "algo.overlong_factor": "0.0",
        "data.train.args": "{'easy': 1.0}",
        "rollout.max_response_tokens": "64",
        "learner.learning_rate": "5e-4",
        "num_steps": "30",
        "eval.every_steps": "0",
    },
    arms={
        "high=0.2": "algo.eps_high=0.2",
        "high=0.28": "algo.eps_high=0.28",
        "high=0.4": "algo.eps_high=0.4",
        "high=none": "algo.eps_high=10.0",
        "low=0.1_high=0.28": "algo.eps_low=0.1 algo.eps_high=0.28",
        "unclipped": "algo.eps_low=0.99 algo.eps_high=10.0",
    },
    quantities=(
        ENTROPY,
        *CLIPPED,
        last("response tokens", "response_tokens/mean"),
    ),
    drawn={
        "entropy": "policy entropy, nats",
        "clip_fraction/high": "tokens clipped high",
        "clip_fraction/low": "tokens clipped low",
        "response_tokens/mean": "response length, tokens",
    },
    claims=(
        Claim(ENTROPY, "high=0.28", +1, "high=0.2"),
        Claim(ENTROPY, "high=0.4", +1, "high=0.2"),
        Claim(ENTROPY, "high=none", +1, "high=0.2"),
        Claim(ENTROPY, "low=0.1_high=0.28", +1, "high=0.28"),
        Claim(ENTROPY, "unclipped", -1, "high=0.2"),
    ),
    trends=[Trend(ENTROPY, ["high=0.2", "high=0.28", "high=0.4", "high=none"])],
)
