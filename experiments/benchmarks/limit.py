"""The distance of a decode step from what this machine's memory and arithmetic allow.

    python -m experiments.benchmarks.limit

Measures the copy bandwidth and the rate of a large matrix product on all devices, and counts a
decode step's bytes (weights once a device, live keys and values) and FLOPs. What fits into the
processor's caches is read faster than it is copied: then only the arithmetic is a limit.
"""

import jax
import numpy as np
from absl import app, flags

from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_integer("devices", 2, "Devices that the CPU is counted as.")
PROMPTS, GROUP, PROMPT, RESPONSE, PAGE = 8, 8, 64, 128, 64


def main(_):
    split_cpu(FLAGS.devices)
    rows = []
    for size, config in common.SIZES.items():
        slots = PROMPTS * GROUP
        engine, params = common.make_engine(
            config,
            slots=slots,
            prompt=PROMPT,
            response=RESPONSE,
            pages=slots // FLAGS.devices * RESPONSE // PAGE + 1,
            prompt_pages=PROMPTS // FLAGS.devices + 1,
            readers=GROUP,
            page_tokens=PAGE,
            block_tokens=16,
        )
        how = common.sampling(config, RESPONSE)
        engine.compile(how)
        rng = np.random.default_rng(0)
        groups = [
            (rng.integers(1, config.vocab_size, PROMPT), [RESPONSE] * GROUP) for _ in range(PROMPTS)
        ]
        sessions = [common.run_session(engine, params, groups, how)[0] for _ in range(6)]
        steps = sum(block.steps for block in sessions[0].blocks)
        step_seconds = min(session.seconds["decode"] for session in sessions) / steps
        bandwidth, flops = common.measured_rates(engine.mesh)
        weights = 4 * sum(p.size for p in jax.tree.leaves(params)) - 4 * params["embed_VD"].size
        token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
        # A group's prompt is read once; a response has half its length on average.
        live = (PROMPTS * PROMPT + slots * RESPONSE / 2) * token_bytes
        step_bytes = FLAGS.devices * weights + live
        mean_context = PROMPT + RESPONSE / 2
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * mean_context
        step_flops = slots * (2 * weights / 4 + attention)
        by_bytes, by_flops = step_bytes / bandwidth, step_flops / flops
        rows.append(
            [
                f"{size} M",
                f"{step_seconds * 1e3:.2f}",
                f"{step_bytes / 1e6:.1f} MB",
                f"{by_bytes * 1e3:.2f}",
                f"{step_flops / 1e6:.0f} MFLOP",
                f"{by_flops * 1e3:.2f}",
                f"{by_flops / step_seconds:.0%}",
            ]
        )
        print(rows[-1], flush=True)
    print(
        f"\n{common.machine()}, commit {common.commit()}; copy {bandwidth / 1e9:.1f} GB/s, product "
        f"{flops / 1e9:.0f} GFLOP/s; {slots} slots"
    )
    header = ["parameters", "ms a step", "reads", "ms at copy rate", "work", "ms at product rate"]
    print(common.table([*header, "of the product rate"], rows))


if __name__ == "__main__":
    app.run(main)
