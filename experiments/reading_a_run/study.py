"""Six ways in which a run goes wrong, beside one that does not: a seed each."""

from dapo_jax.report.compare import final_score, last, mean
from experiments.study import Study

TASKS = "data.train.task=experiments.reading_a_run.task"

STUDY = Study(
    title="Reading a run",
    config="configs/forks.py",
    settings={
        "num_steps": "24",
        "rollout.max_generation_batches": "3",
        "eval.every_steps": "12",
    },
    arms={
        "healthy": "",
        "collapse": "data.train.args=\"{'closed': 0.7, 'easy': 0.3}\" algo.filter_groups=reward "
        "algo.overlong_cache_tokens=216 learner.learning_rate=3e-4 "
        "rollout.num_prompts=8 rollout.generation_prompts=16",
        "explosion": "data.train.task=experiments.forks_base.task:RandomRewards "
        "data.train.args=\"{'easy': 1.0}\" algo.overlong_factor=0.0 "
        "algo.eps_low=0.99 algo.eps_high=10.0 "
        "rollout.max_response_tokens=64 learner.learning_rate=5e-4",
        "length_creep": f"{TASKS}:WellChecked data.train.args=\"{{'long': 1.0}}\" "
        "algo.overlong_factor=0.0 rollout.max_response_tokens=352 learner.row_tokens=704 "
        "learner.learning_rate=2e-4 "
        "rollout.num_prompts=8 rollout.generation_prompts=16 updates_per_step=4",
        "format": f"{TASKS}:AnyAnswer",
        "no_groups": "data.train.args=\"{'easy': 0.7, 'closed': 0.3}\"",
        "gap": "rollout.top_p=0.8",
    },
    quantities=(
        final_score("road", "mean@4"),
        final_score("long", "mean@4"),
        last("accuracy, %", "accuracy/mean", scale=100),
        last("entropy, nats", "entropy", form="{:.3f}"),
        last("response tokens", "response_tokens/mean"),
        last("informative groups, last third", "groups/informative"),
        last("groups sampled", "groups/sampled"),
        mean("ratio gap", "ratio_gap", form="{:.1e}"),
        last("gradient norm", "grad_norm", form="{:.2f}"),
    ),
    drawn={
        "accuracy/mean": "accuracy of the sampled responses",
        "eval/road/mean@4": "held-out accuracy, road problems",
        "eval/long/mean@4": "held-out accuracy, long problems",
        "entropy": "policy entropy, nats",
        "response_tokens/mean": "response length, tokens",
        "groups/informative": "informative groups",
        "grad_norm": "gradient norm before clipping",
        "no_answer_fraction": "responses without an answer",
        "ratio_gap": "sampler/learner gap",
    },
    claims=(),
    seeds=(0,),
)
