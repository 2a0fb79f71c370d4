"""Six ways in which a run goes wrong, beside one that does not: a seed each."""

from dapo_jax.report.quantities import final_score, last, mean
from experiments.study import Study

STUDY = Study(
    title="Reading a run",
    config="configs/forks.py",
    settings={
        "num_steps": "30",
        "eval.every_steps": "10",
        "log.rollouts_every_steps": "10",
        "log.samples_every_steps": "0",
    },
    arms={
        "healthy": "",
        "collapse": "learner.learning_rate=1e-3 algo.eps_high=0.05",
        "explosion": "learner.learning_rate=5e-3",
        "length_creep": "algo.overlong_factor=0.0 algo.overlong_filtering=True "
        "algo.loss_aggregation=sequence_mean",
        "format": "data.train.task=experiments.reading_a_run.task:AnyAnswer",
        "no_groups": "data.train.args=\"{'closed': 1.0}\" rollout.max_generation_batches=1",
        "gap": "rollout.top_p=0.8",
    },
    quantities=(
        final_score("road", "mean@4"),
        final_score("long", "mean@4"),
        last("accuracy, %", "accuracy/mean", scale=100),
        last("entropy, nats", "entropy", form="{:.3f}"),
        last("response tokens", "response_tokens/mean"),
        last("truncated, %", "response_tokens/truncated_fraction", scale=100),
        last("informative groups", "groups/informative"),
        mean("ratio gap", "ratio_gap", form="{:.2g}"),
        last("gradient norm", "grad_norm", form="{:.2f}"),
    ),
    drawn={
        "accuracy/mean": "accuracy of the sampled responses",
        "eval/road/mean@4": "held-out accuracy, road problems",
        "entropy": "policy entropy, nats",
        "response_tokens/mean": "response length, tokens",
        "groups/informative": "informative groups",
        "ratio_gap": "sampler/learner gap, mean |ratio - 1|",
    },
    claims=(),
    seeds=(0,),
)
