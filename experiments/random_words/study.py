"""Random rewards of the first words alone: the upper clip where words are equal, and unequal."""

from dapo_jax.report.compare import last
from experiments.study import CLIPPED, Claim, Study, Trend

ENTROPY = last("entropy, nats, last 10 steps", "entropy", form="{:.3f}")
START = {
    "equal": "data.train.args=\"{'easy': 1.0}\" rollout.max_response_tokens=3",
    "unequal": "data.train.args=\"{'road': 1.0}\" rollout.max_response_tokens=4",
}
HIGH = {"0.2": "0.2", "0.28": "0.28", "0.4": "0.4", "none": "10.0"}

STUDY = Study(
    title="Random rewards of the first words: entropy by eps_high",
    config="configs/forks.py",
    settings={
        "data.train.task": "experiments.forks_base.task:RandomRewards",
        "algo.overlong_factor": "0.0",
        "algo.overlong_cache_tokens": "1",
        "learner.row_tokens": "112",
        "learner.learning_rate": "1e-3",
        "num_steps": "30",
        "eval.every_steps": "0",
    },
    arms={
        f"{words}_high={high}": f"{settings} algo.eps_high={value}"
        for words, settings in START.items()
        for high, value in HIGH.items()
    },
    quantities=(
        ENTROPY,
        *CLIPPED,
    ),
    drawn={
        "entropy": "policy entropy, nats",
        "clip_fraction/high": "tokens clipped high",
        "clip_fraction/low": "tokens clipped low",
    },
    claims=tuple(
        Claim(ENTROPY, f"{words}_high={high}", sign, f"{words}_high=0.2")
        for words, sign in (("equal", -1), ("unequal", +1))
        for high in list(HIGH)[1:]
    ),
    trends=[Trend(ENTROPY, [f"{words}_high={high}" for high in HIGH]) for words in START],
    seeds=tuple(range(8)),
)
