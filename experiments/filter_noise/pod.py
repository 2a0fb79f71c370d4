"""The cost of sampling more groups on a pod: the 32B recipe's step at several numbers of them.

    python -m experiments.filter_noise.pod     # 13 minutes; `make preflight` installs the compiler

Compiles the recipe for v5p:8x8x4 and simulates its rollouts (experiments/preflight/estimate) with
as many groups as a step trains on, and up to 24 times as many. Writes pod.json, which study.py
reads.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import app

from configs import qwen2_5_32b
from dapo_jax.preflight.chips import chip_of
from dapo_jax.preflight.compile import compiled_programs, topology_devices, without_weights
from dapo_jax.report.runs import Run, column
from dapo_jax.run import build
from dapo_jax.run.files import atomic_file
from experiments.preflight.estimate import simulate
from experiments.preflight.estimate.hlo_cost import program_cost

FILE = pathlib.Path(__file__).with_name("pod.json")
TOPOLOGY = "v5p:8x8x4"
MEAN_TOKENS = 2_925  # of a response, over the whole run of the paper
TIMES = (1, 2, 3, 4, 6, 8, 12, 16, 24)


@dataclasses.dataclass(frozen=True)
class Pod:
    """Simulated seconds of a step: what is always there, and a rollout by groups sampled.

    Each with the fast and the slow assumptions of the estimate. times: sampled groups over those of
    a step; rollout: their sampling. fixed: update and reshard.
    """

    recipe: str
    topology: str
    mean_response_tokens: int
    times: Sequence[float]
    rollout: Sequence[Sequence[float]]
    fixed: Sequence[float]


@functools.cache
def committed() -> Pod:
    """The Pod of pod.json."""
    return Pod(**json.loads(FILE.read_text()))


def pod_hours(run: Run, *, end: int, cancelled: float) -> np.ndarray:
    """The pod's time up to the end of each step, for the groups that it sampled.

    end: 0 for the estimate's fast end, 1 for its slow one. cancelled: the share of a group's cost
    that one that was begun and cancelled has. Raises ValueError for a step with more groups than
    were simulated.
    """
    pod, num_prompts = committed(), run.config["rollout.num_prompts"]
    sampled, begun = (column(run.rows, f"groups/{key}") for key in ("sampled", "cancelled"))
    times = (sampled + cancelled * begun) / num_prompts
    if times.max() > pod.times[-1]:
        raise ValueError(f"{times.max():.1f} times the groups of a step: more than in {FILE.name}")
    rollout = np.interp(times, pod.times, pod.rollout[end])
    return np.cumsum(rollout + pod.fixed[end]) / 3600


def main(_):
    config = without_weights(qwen2_5_32b.get_config())
    devices = topology_devices(TOPOLOGY, slices=1)
    built = build.programs(config, build.model_sizes(config).vocab_size, devices=devices)
    compiled = compiled_programs(built, say=print)
    programs = {name: program_cost(program.text) for name, program in compiled.items()}
    where = simulate.Slice.of(built.mesh, chip_of(TOPOLOGY))
    steps = [
        [
            simulate.Simulator(
                built, programs, where, dataclasses.replace(assumed, informative=1 / times)
            ).step(MEAN_TOKENS)
            for times in TIMES
        ]
        for assumed in simulate.ENDS
    ]
    pod = Pod(
        recipe="qwen2_5_32b",
        topology=TOPOLOGY,
        mean_response_tokens=MEAN_TOKENS,
        times=TIMES,
        rollout=[[round(step.rollout + step.prefill) for step in end] for end in steps],
        fixed=[round(end[0].update + end[0].reshard) for end in steps],
    )
    text = json.dumps(dataclasses.asdict(pod), indent=1) + "\n"
    with atomic_file(FILE) as file:
        file.write(text.encode())
    print(text)


if __name__ == "__main__":
    app.run(main)
