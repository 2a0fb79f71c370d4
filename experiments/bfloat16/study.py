"""bfloat16 on SmolLM2-135M: what its rounding costs, and what takes the gap out of the ratio."""

from dapo_jax.report.compare import final_score, last, mean
from experiments.eps_high_real.study import AREA
from experiments.eps_high_real.study import STUDY as SUMS
from experiments.study import ALL_STEPS, CLIPPED, Claim, Study

BF16 = "model.compute_dtype=bfloat16"
HELD_OUT = final_score("sums", "mean@8")
ENTROPY = last("entropy of trained tokens, nats", "entropy", form="{:.3f}")

STUDY = Study(
    title="bfloat16 on SmolLM2-135M",
    config="configs/smollm2_135m.py",
    settings=SUMS.settings,
    arms={
        "float32": "model.compute_dtype=float32",
        "bfloat16_before": BF16,
        "bfloat16": BF16,
        "exact": f"{BF16} learner.spread_start=False",
        "learner": f"{BF16} algo.old_logprobs=learner",
        "tis": f"{BF16} algo.old_logprobs=learner algo.tis_cap=2.0",
    },
    quantities=(
        AREA,
        ALL_STEPS,
        HELD_OUT,
        mean("ratio gap, %", "ratio_gap", scale=100, form="{:.2f}"),
        *CLIPPED,
        ENTROPY,
    ),
    drawn=("accuracy/mean", "entropy", "ratio_gap", "clip_fraction/low"),
    over_tokens=True,
    claims=[
        Claim(quantity, above, +1, below)
        for quantity in (AREA, HELD_OUT)
        for above, below in (
            ("float32", "bfloat16_before"),
            ("bfloat16", "bfloat16_before"),
            ("learner", "bfloat16"),
            ("exact", "bfloat16"),
            ("tis", "learner"),
        )
    ],
    post_hoc=[
        Claim(ALL_STEPS, "float32", +1, "bfloat16_before"),
        Claim(ALL_STEPS, "exact", +1, "bfloat16"),
        Claim(ENTROPY, "float32", -1, "bfloat16_before"),
        Claim(ENTROPY, "float32", -1, "bfloat16"),
        Claim(ENTROPY, "exact", -1, "bfloat16"),
        Claim(ENTROPY, "bfloat16", -1, "bfloat16_before"),
    ],
    seeds=(0, 1, 2),
)
