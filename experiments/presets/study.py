"""The losses of other papers beside DAPO's, as presets of one recipe on the mixture."""

from configs.base import LOSS_PRESETS
from dapo_jax.report.compare import TOKENS, final_score, last, mean
from experiments.study import CLIPPED, Claim, Study

ACCURACY = last("accuracy, %", "accuracy/mean", scale=100)
ENTROPY = last("entropy, nats", "entropy", form="{:.3f}")
LENGTH = last("response tokens", "response_tokens/mean", form="{:.1f}")
LONG = final_score("long", "mean@8")
DECODE = mean("decode steps a step", "engine/decode_steps", form="{:.0f}")

STUDY = Study(
    title="Other papers' losses beside DAPO's",
    config="configs/forks.py",
    settings={
        "num_steps": "24",
        "eval.every_steps": "24",
        "eval.samples_per_prompt": "8",
    },
    arms={
        **{preset: f"preset={preset}" for preset in ("dapo", *LOSS_PRESETS)},
        # Added after the others' result.
        "gspo_wide": "preset=gspo algo.eps_low=3e-3 algo.eps_high=4e-3",
    },
    quantities=(
        ACCURACY,
        final_score("road", "mean@8"),
        LONG,
        ENTROPY,
        LENGTH,
        mean("truncated, %", "response_tokens/truncated_fraction", scale=100),
        last("rare road, %", "task/right_road", scale=100),
        *CLIPPED,
        mean("gradient's norm", "grad_norm", form="{:.2f}"),
        DECODE,
        TOKENS,
    ),
    drawn={
        "accuracy/mean": "accuracy of the sampled responses",
        "entropy": "policy entropy, nats",
        "response_tokens/mean": "response length, tokens",
        "task/right_road": "share of the rare road",
    },
    claims=(
        *(Claim(ACCURACY, preset, +1, "dapo") for preset in ("gspo", "cispo", "scalerl")),
        Claim(ENTROPY, "kl_cov", +1, "dapo"),
        Claim(LENGTH, "dr_grpo", -1, "dapo"),
        Claim(ACCURACY, "reinforce_pp", -1, "dapo"),
        Claim(DECODE, "tis", -1, "dapo"),
        Claim(ACCURACY, "tis", -1, "dapo"),
    ),
    post_hoc=(
        *(Claim(ACCURACY, preset, +1, "dapo") for preset in ("dr_grpo", "kl_cov", "gspo_wide")),
        Claim(LONG, "gspo", +1, "dapo"),
        Claim(TOKENS, "tis", -1, "dapo"),
    ),
)
