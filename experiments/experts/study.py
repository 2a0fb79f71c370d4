"""A small mixture of experts: what the replay of routes changes, by precision."""

from dapo_jax.report.compare import final_score, mean
from experiments.study import CLIPPED, Claim, Study

STEPS = 6
LEVELS = (1, 2)  # steps of a problem
WITHOUT = "algo.replay_routes=False"
DIFFER = mean("routes that differ, %", "routes/differ", scale=100, form="{:.3f}")
GAP = mean("ratio gap, %", "ratio_gap", scale=100, form="{:.3f}")
LOW = CLIPPED[1]

STUDY = Study(
    title="Routes of a small mixture, replayed and not",
    config="configs/tiny.py",
    settings={
        "model.family": "qwen3_moe",
        "model.path": "runs/experts/base",
        "num_steps": str(STEPS),
        "data.train.levels": str(LEVELS),
        "rollout.num_prompts": "16",
        "rollout.generation_prompts": "24",
        "rollout.max_response_tokens": "48",
        "algo.overlong_cache_tokens": "12",
        "learner.learning_rate": "2e-4",
        "learner.warmup_steps": "2",
        "mesh.cpu_devices": "1",
        "eval.sets.arithmetic.levels": str(LEVELS),
        "eval.sets.arithmetic.count": "64",
        "eval.every_steps": str(STEPS),
        "checkpoint.every_steps": str(STEPS),
    },
    arms={
        "bfloat16": "model.compute_dtype=bfloat16",
        "bfloat16_without": f"model.compute_dtype=bfloat16 {WITHOUT}",
        "float32": "model.compute_dtype=float32",
        "float32_without": f"model.compute_dtype=float32 {WITHOUT}",
    },
    quantities=(DIFFER, GAP, *CLIPPED, final_score("arithmetic", "mean@8")),
    drawn=("routes/differ", "ratio_gap", "clip_fraction/low", "accuracy/mean"),
    claims=[
        Claim(GAP, "bfloat16", -1, "bfloat16_without"),
        Claim(LOW, "bfloat16", -1, "bfloat16_without"),
        Claim(LOW, "float32", -1, "float32_without"),
        Claim(DIFFER, "bfloat16_without", +1, "float32_without"),
    ],
    seeds=(0, 1, 2),
)
