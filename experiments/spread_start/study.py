"""A start in bfloat16, trained in bfloat16: as it is, with its weights spread, and in float32."""

from dapo_jax.report.compare import accuracy_over, final_score, mean
from experiments.study import CLIPPED, Claim, Study

STEPS = 8
BF16 = "model.compute_dtype=bfloat16"
AREA = accuracy_over(32_000)
ALL_STEPS = mean("accuracy, mean of all steps, %", "accuracy/mean", scale=100)
HELD_OUT = final_score("sums", "mean@8")

STUDY = Study(
    title="SmolLM2-135M published in bfloat16",
    config="configs/smollm2_135m.py",
    settings={
        "model.path": "runs/smollm2_135m_bfloat16",
        "num_steps": str(STEPS),
        "eval.every_steps": str(STEPS),
        "eval.samples_per_prompt": "8",
        "checkpoint.every_steps": str(STEPS),
    },
    arms={
        "as_published": f"{BF16} learner.spread_start=False",
        "as_published_4x": f"{BF16} learner.spread_start=False learner.learning_rate=2e-5",
        "spread": f"{BF16} learner.spread_start=True",
        "float32": "model.compute_dtype=float32 learner.spread_start=False",
    },
    quantities=(AREA, ALL_STEPS, HELD_OUT, *CLIPPED),
    drawn={
        "accuracy/mean": "accuracy of the sampled responses",
        "entropy": "policy entropy, nats",
        "clip_fraction/low": "tokens clipped low",
        "grad_norm": "gradient norm",
    },
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
