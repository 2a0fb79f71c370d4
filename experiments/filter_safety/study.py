"""Dynamic sampling: what length penalties teach where half of the problems are out of reach."""

from experiments.study import ENTROPY, LONG, TOKENS, Claim, Study

STUDY = Study(
    title="Three filters where half of the problems are out of reach",
    config="configs/forks.py",
    settings={
        "data.train.args": "{'long': 1.0, 'wrong_keys': 0.5}",
        "algo.overlong_cache_tokens": "216",
        "rollout.num_prompts": "8",
        "rollout.generation_prompts": "16",
        "learner.learning_rate": "2e-4",
        "num_steps": "30",
        "eval.every_steps": "10",
        "eval.samples_per_prompt": "8",
        "eval.sets.road.k": "0",
    },
    arms={
        "by_correctness": "algo.filter_groups=correctness",
        "by_reward": "algo.filter_groups=reward",
        "no_filter": "algo.dynamic_sampling=False",
    },
    quantities=(LONG, TOKENS, ENTROPY),
    drawn=("eval/long/mean@8", "response_tokens/mean", "entropy"),
    claims=[
        Claim(quantity, arm, -1, "by_correctness")
        for quantity in (LONG, TOKENS)
        for arm in ("by_reward", "no_filter")
    ],
)
