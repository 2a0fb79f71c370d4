"""What bfloat16 costs a run of SmolLM2-135M, and what of it the old log-probabilities mend."""

from dapo_jax.report import compare
from experiments.eps_high_real.study import EQUAL_STEPS, score
from experiments.eps_high_real.study import STUDY as SUMS
from experiments.study import CLIPPED, Claim, Study

GAP = compare.mean("ratio gap", "ratio_gap", form="{:.4f}")
HELD_OUT = score("mean@8")
ROUNDED = "model.compute_dtype=bfloat16"
BY_LEARNER = f"{ROUNDED} algo.old_logprobs=learner"

STUDY = Study(
    title="bfloat16 on SmolLM2-135M",
    config="configs/smollm2_135m.py",
    settings=SUMS.settings,
    arms={
        "float32": "model.compute_dtype=float32",
        "bfloat16_before": ROUNDED,  # by commit 735a471, where each array was rounded everywhere
        "bfloat16": ROUNDED,
        "learner": BY_LEARNER,
        "learner_tis": f"{BY_LEARNER} algo.tis_cap=2.0",
    },
    quantities=(EQUAL_STEPS, HELD_OUT, GAP, *CLIPPED),
    drawn=SUMS.drawn | {"ratio_gap": "mean |ratio - 1| of learner to sampler"},
    over_tokens=True,
    claims=[
        Claim(GAP, "bfloat16", -1, "bfloat16_before"),
        Claim(CLIPPED[1], "learner", -1, "bfloat16"),
        Claim(EQUAL_STEPS, "float32", +1, "bfloat16_before"),
        Claim(EQUAL_STEPS, "learner", +1, "bfloat16"),
    ],
    seeds=(0, 1, 2),
)
