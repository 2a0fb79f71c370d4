"""A start in bfloat16, trained in bfloat16: as it is, with its weights spread, and in float32."""

from experiments.bfloat16.study import BF16, HELD_OUT
from experiments.eps_high_real.study import AREA
from experiments.eps_high_real.study import STUDY as SUMS
from experiments.study import ALL_STEPS, CLIPPED, Claim, Study

STUDY = Study(
    title="SmolLM2-135M published in bfloat16",
    config="configs/smollm2_135m.py",
    settings=SUMS.settings | {"model.path": "runs/smollm2_135m_bfloat16"},
    arms={
        "as_published": f"{BF16} learner.spread_start=False",
        "as_published_4x": f"{BF16} learner.spread_start=False learner.learning_rate=2e-5",
        "spread": f"{BF16} learner.spread_start=True",
        "float32": "model.compute_dtype=float32 learner.spread_start=False",
    },
    quantities=(AREA, ALL_STEPS, HELD_OUT, *CLIPPED),
    drawn=("accuracy/mean", "entropy", "clip_fraction/low", "grad_norm"),
    over_tokens=True,
    claims=[
        Claim(quantity, above, +1, "as_published")
        for quantity in (ALL_STEPS, HELD_OUT)
        for above in ("spread", "float32")
    ],
    post_hoc=[
        Claim(quantity, "spread", +1, "as_published_4x") for quantity in (ALL_STEPS, HELD_OUT)
    ],
    seeds=(0, 1, 2),
)
