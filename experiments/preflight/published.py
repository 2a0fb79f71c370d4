"""Compares the estimate with published seconds: decoding and training of dense models on TPUs.

    python -m experiments.preflight.published [--only=decode]     # needs `make preflight` once

Our programs for the published sizes are compiled for the published slice, and estimated with the
assumptions of estimate/simulate.py. The measured programs are others': MaxText's training
and the decoders of SGLang-JAX, Levanter and PyTorch/XLA, so agreement is no more than that the
range is of the right size. Prints a table of estimated and measured seconds a step.

Sources, all for bfloat16:
[1] github.com/sgl-project/sglang-jax docs/cookbook/base/benchmarks/qwen3_benchmark.md @fe09d95:
    inter-token latency at a fixed number of sequences, 1,024 sampled tokens each.
[2] github.com/marin-community/marin, "Levanter TPU RL Rollout Parity", 2026: device seconds of a
    decode loop.
[3] pytorch.org/blog/path-achieve-low-inference-latency: milliseconds a token, one sequence.
[4] github.com/AI-Hypercomputer/tpu-recipes training/trillium/Llama3.1-8B-MaxText/v6e-8 @a9e0929,
    Llama3.1-70B-MaxText/v6e-32 @3596002, training/ironwood @0797d9c: seconds of a logged step.
[5] github.com/AI-Hypercomputer/maxtext MaxText/configs/{v5e,v5p}/README.md @0ed7bd5: TFLOP/s a
    chip, with all of the attention square counted; the seconds follow from sizes and batch.
"""

import dataclasses
import time
import types

import jax
import numpy as np
from absl import app, flags

from configs import base
from dapo_jax.preflight.chips import chip_of
from dapo_jax.preflight.compile import DoesNotFit, compiled, topology_devices
from dapo_jax.run import build
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.engine import Engine, token_bytes
from experiments.benchmarks import common
from experiments.preflight.estimate import simulate
from experiments.preflight.estimate.hlo_cost import program_cost
from models.families import register
from models.parameters import ModelConfig
from models.transformer import Layer

FLAGS = flags.FLAGS
PAGE = 128


class LlamaConfig(ModelConfig):
    """Sizes of a model of Llama's or Qwen3's kind: no biases; Qwen3's small norms are left out."""

    layer = Layer
    model_type = "published"
    architecture = "Published"


SIZES = {
    "Llama 7B": LlamaConfig(32_000, 4_096, 11_008, 32, 32, 32, 128, False),
    "Llama 65B": LlamaConfig(32_000, 8_192, 22_016, 80, 64, 64, 128, False),
    "Llama-3.1-8B": LlamaConfig(128_256, 4_096, 14_336, 32, 32, 8, 128, False),
    "Llama-3.1-70B": LlamaConfig(128_256, 8_192, 28_672, 80, 64, 8, 128, False),
    "Qwen3-8B": LlamaConfig(151_936, 4_096, 12_288, 36, 32, 8, 128, False),
    "Qwen3-32B": LlamaConfig(151_936, 5_120, 25_600, 64, 64, 8, 128, False),
    "MaxText 16B": LlamaConfig(32_000, 4_096, 28_672, 32, 64, 64, 128, False),
    "MaxText 32B": LlamaConfig(32_000, 8_192, 28_672, 32, 64, 64, 128, False),
}
register(LlamaConfig, SIZES)


@dataclasses.dataclass(frozen=True)
class Decode:
    """A decode step: of so many sequences, with so many tokens each on average."""

    model: str
    topology: str
    ways: int
    sequences: int
    context: int
    measured: float  # seconds
    source: str


@dataclasses.dataclass(frozen=True)
class Train:
    """An optimizer step: of so many sequences a device."""

    model: str
    topology: str
    ways: int
    sequences: int
    tokens: int
    remat: str
    measured: float
    source: str


DECODES = (
    Decode("Qwen3-8B", "v6e:2x2", 4, 8, 1_536, 5.99e-3, "[1]"),
    Decode("Qwen3-8B", "v6e:2x2", 4, 64, 1_536, 11.11e-3, "[1]"),
    Decode("Qwen3-8B", "v6e:2x2", 4, 256, 1_536, 30.0e-3, "[1]"),
    Decode("Qwen3-8B", "v6e:2x2", 4, 64, 4_608, 21.13e-3, "[1]"),
    Decode("Qwen3-32B", "v6e:2x2", 4, 64, 1_536, 29.48e-3, "[1]"),
    Decode("Qwen3-8B", "v6e:2x4", 8, 32, 768, 6.71e-3, "[2]"),
    Decode("Llama 7B", "v4:2x2x2", 8, 1, 128, 3.8e-3, "[3]"),
    Decode("Llama 65B", "v4:2x2x4", 16, 1, 128, 14.5e-3, "[3]"),
)
TRAINS = (
    Train("Llama-3.1-8B", "v6e:2x4", 1, 3, 8_192, "offload", 3.443, "[4]"),
    Train("Llama-3.1-70B", "v6e:4x8", 1, 2, 8_192, "offload", 17.79, "[4]"),
    Train("Llama-3.1-70B", "tpu7x:4x4x4", 1, 2, 8_192, "full", 12.2, "[4]"),
    Train("MaxText 16B", "v5e:16x16", 1, 6, 2_048, "full", 10.3, "[5]"),
    Train("MaxText 32B", "v5e:16x16", 1, 4, 2_048, "full", 12.1, "[5]"),
    Train("MaxText 32B", "v5p:4x4x4", 4, 28, 2_048, "full", 8.5, "[5]"),
)


def recipe(point: Decode | Train):
    """The recipe of a point's model and mesh."""
    config = base.get_config()
    config.model.family, config.model.preset = __name__, point.model
    config.mesh.model = point.ways
    config.rollout.num_prompts = config.updates_per_step = 1
    return config


def programs_of(point: Decode | Train, config):
    """(the recipe's programs on the point's slice, the slice)."""
    devices = topology_devices(point.topology, slices=1)
    built = build.programs(config, build.model_sizes(config).vocab_size, devices=devices)
    return built, simulate.Slice.of(built.mesh, chip_of(point.topology))


def decode_seconds(point: Decode) -> list[float]:
    """The estimate of a decode step, fast and slow."""
    config = recipe(point)
    built, where = programs_of(point, config)
    sizes, pages = built.sizes, -(-point.context // PAGE)
    cache = Cache(
        slots=point.sequences // built.engine.shards,
        pages=point.sequences * (pages + 1) + 1,
        prompt_pages=2,
        readers=1,
        page_tokens=PAGE,
        block_tokens=16,
        max_prompt_tokens=PAGE,
        max_response_tokens=2 * pages * PAGE,
    )
    kernels = built.learning.kernels
    engine = Engine(sizes, built.mesh, cache, params=built.engine.params, kernels=kernels)
    ids = types.SimpleNamespace(stop_ids=(0,), pad_id=0, vocab_size=sizes.vocab_size)
    with jax.set_mesh(built.mesh):
        lowered = engine.lower(build.sampling(config, ids))
    decode = next(low for key, low in lowered.items() if key[0] == "decode")
    decode = program_cost(compiled("decode", decode).text)
    read = token_bytes(sizes, bytes_per_value=2, model_degree=point.ways)
    live = point.sequences * point.context * read / where.chip.hbm_rate
    slots = point.sequences * sum(times for _, times in decode.turn.kernels)
    return [
        where.seconds(decode.turn, a) + live / a.pages + slots * a.slot_seconds
        for a in simulate.ENDS
    ]


def train_seconds(point: Train) -> list[float]:
    """The estimate of an optimizer step of one micro-batch, fast and slow."""
    config = recipe(point)
    config.learner.row_tokens = point.tokens
    config.learner.remat = point.remat
    config.rollout.max_prompt_tokens = PAGE
    config.rollout.max_response_tokens = point.tokens - PAGE
    devices = len(topology_devices(point.topology, slices=1))
    config.learner.micro_batch_rows = devices // point.ways * point.sequences
    config.rollout.group_size = config.learner.micro_batch_rows
    built, where = programs_of(point, config)
    with jax.set_mesh(built.mesh):
        update = {"update": program_cost(compiled("update", built.lower_update(point.tokens)).text)}
    whole_1BT = np.ones((1, config.learner.micro_batch_rows, point.tokens), np.int32)
    return [simulate.Simulator(built, update, where, a).update(whole_1BT) for a in simulate.ENDS]


def main(_):
    rows, inside = [], 0
    for point in (*DECODES, *TRAINS):
        kind = type(point).__name__.lower()
        name = f"{kind} {point.model}, {point.topology}, {point.sequences} sequences"
        if FLAGS.only not in name:
            continue
        start = time.perf_counter()
        estimate = decode_seconds if kind == "decode" else train_seconds
        try:
            fast, slow = estimate(point)
        except DoesNotFit as error:
            print(f"{name} does not fit: {error}", flush=True)
            continue
        is_inside = fast <= point.measured <= slow
        inside += is_inside
        unit, form = (1e3, ".1f") if kind == "decode" else (1, ".2f")
        rows.append(
            [
                *(name, f"{fast * unit:{form}} to {slow * unit:{form}}"),
                f"{point.measured * unit:{form}} {'ms' if unit > 1 else 's'}",
                *("inside" if is_inside else "outside", point.source),
                f"{time.perf_counter() - start:.0f}",
            ]
        )
        print(rows[-1], flush=True)
    header = ["point", "estimated", "measured", "", "source", "compiled in s"]
    print(f"\n{inside} of {len(rows)} inside\n{common.table(header, rows)}")


if __name__ == "__main__":
    flags.DEFINE_string("only", "", "Points with this in their names.")
    app.run(main)
