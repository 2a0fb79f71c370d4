"""eps_high, and DAPO against naive GRPO, on SmolLM2-135M: sums, while its entropy collapses."""

import itertools
import math

from dapo_jax.report.compare import Quantity, accuracy_over
from experiments.study import CLIPPED, Claim, Study

RATE = 5e-6
NO_CLIP = 1e9
BUDGET_TOKENS = 32_000
CLIPS = {"eps_0.2": 0.2, "eps_0.28": 0.28, "no_upper_clip": NO_CLIP}
RATES = {"": RATE, "_rate_x2": 2 * RATE}
NAIVE = "naive_grpo"
LONGER = "num_steps=20 checkpoint.keep=3"  # it samples fewer tokens a step
STEPS = 8  # after which all arms are compared


def accuracy_of_steps(run) -> float:
    """Mean accuracy, in percent, of the first steps."""
    return 100 * run["accuracy/mean"].head(STEPS).mean()


def score(name: str, of: str = "sums") -> Quantity:
    """A score on a held-out set after STEPS steps, in percent."""

    def value(run) -> float:
        return 100 * run[f"eval/{of}/{name}"].get(STEPS, math.nan)

    return Quantity(f"held out {name} after {STEPS} steps, %", value)


def entropy_at_end(run) -> float:
    """Entropy of the trained tokens in the last of STEPS steps, in nats."""
    return run["entropy"][STEPS - 1]


AREA = accuracy_over(BUDGET_TOKENS)
EQUAL_STEPS = Quantity(f"accuracy, mean of the first {STEPS} steps, %", accuracy_of_steps)
ENTROPY = Quantity(f"entropy of trained tokens, step {STEPS - 1}, nats", entropy_at_end, "{:.3f}")

STUDY = Study(
    title="eps_high on SmolLM2-135M",
    config="configs/smollm2_135m.py",
    settings={
        "num_steps": str(STEPS),
        "eval.every_steps": str(STEPS),
        "eval.samples_per_prompt": "8",
        "checkpoint.every_steps": str(STEPS),
    },
    arms={
        f"{clip}{name}": f"algo.eps_high={eps} learner.learning_rate={rate}"
        for name, rate in RATES.items()
        for clip, eps in CLIPS.items()
    }
    | {
        f"{NAIVE}{name}": f"preset={NAIVE} learner.learning_rate={rate} {LONGER}"
        for name, rate in RATES.items()
    },
    quantities=(AREA, EQUAL_STEPS, score("mean@8"), score("pass@8"), ENTROPY, *CLIPPED),
    drawn=("accuracy/mean", "entropy", "clip_fraction/high", "response_tokens/mean"),
    over_tokens=True,
    claims=[
        Claim(AREA, f"{above}{name}", +1, f"{below}{name}")
        for name in RATES
        for above, below in (("eps_0.28", "eps_0.2"), ("no_upper_clip", "eps_0.28"))
    ]
    + [
        Claim(quantity, f"eps_0.28{name}", sign, f"{NAIVE}{name}")
        for name in RATES
        for quantity, sign in ((AREA, -1), (EQUAL_STEPS, +1))
    ],
    seeds=(0, 1, 2),
)
COMPARED = (
    *((f"{b}{rate}", f"{a}{rate}") for rate in RATES for a, b in itertools.pairwise(CLIPS)),
    *((f"{arm}_rate_x2", arm) for arm in (*CLIPS, NAIVE)),
    *((f"eps_0.28{rate}", f"{NAIVE}{rate}") for rate in RATES),
)
