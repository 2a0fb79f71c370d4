"""Estimates the seconds of a config's step on a TPU slice by arithmetic: nothing is compiled.

    python -m experiments.preflight.estimate --config=configs/qwen2_5_32b.py --topology=v5p:8x8x4
        [--slices=2] [--mean_response_tokens=4000] [--decode=0.5] [--update=0.25]

The sampler's own scheduler runs on drawn response lengths, and the learner's own packer makes rows
of them. At a chip's published rates, and of what the model has a part of on a device,

    a decode step   max(bytes of weights / memory rate, 2 FLOP a weight and row / FLOP rate)
                    + bytes of live keys and values / memory rate
    a prefill       2 FLOP a weight and token / FLOP rate
    an update       (6 FLOP a weight and entry of a row, 4 with LoRA, and 12 a pair of tokens that
                    attend, layer and value of a head) / FLOP rate

with, of a mixture's experts, the weights of a token's own, but for what is read. Decode steps are
divided by the efficiency --decode, the others by --update.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from absl import flags
from clu.parameter_overview import count_parameters
from jax.sharding import AbstractMesh
from ml_collections import ConfigDict

from dapo_jax import learner
from dapo_jax.cli import command
from dapo_jax.losses import takes_old_logp
from dapo_jax.packing import plan_update
from dapo_jax.preflight.__main__ import define_flags
from dapo_jax.preflight.chips import Chip, chip_of
from dapo_jax.preflight.compile import topology_devices, without_weights
from dapo_jax.rollout import IDLE_SHARE
from dapo_jax.sampler.cache import Cache, decode_sizes
from dapo_jax.sampler.engine import token_bytes
from dapo_jax.sampler.scheduler import Scheduler
from dapo_jax.setup import auto_sizes, checks, components
from models.kernels import kernels_for
from models.parameters import ModelConfig
from models.transformer import abstract_params
from sharding import rules
from sharding.mesh import AXES

# Low and high on one H200 (commit 5e82132), of published rates: decode steps of 256 slots, updates
# of four rows with all activations recomputed. experiments/preflight/README.md has the times.
DECODE, UPDATE = (0.31, 0.59), (0.18, 0.29)
INFORMATIVE = (0.35, 0.5)  # of the groups that are sampled; the paper's Figure 3b, low and high
MEAN_SHARE = 4_537 / 20_480  # the mean length at the end of the paper's run, of the greatest
# Of log-lengths between and within problems: 12,494 generations of models of Qwen2.5's family.
SIGMA_PROBLEMS, SIGMA_SAMPLES = 0.81, 0.61
PROMPT_TOKENS = 145  # the mean of the paper's training data, with Qwen2.5's tokenizer
MEAN_STEPS = 8  # with partial responses partial over: a step that ends late leaves less to the next
LEFT_OUT = """exchanges between chips, the host between blocks, copies between shards, evaluation,
the verifier, saves, log-probabilities of a KL term; no TPU has confirmed it"""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device with its part of a model: seconds at the chip's published rates.

    model_degree: the devices that share a copy of the sampler's weights. value_bytes: of a weight,
    key or value there. lora: whether the learner trains LoRA's factors alone. old_logprobs: whether
    it has a forward pass more, for its own old log-probabilities.
    """

    chip: Chip
    sizes: ModelConfig
    model_degree: int = 1
    value_bytes: int = 2
    lora: bool = False
    old_logprobs: bool = False

    @functools.cached_property
    def weights(self) -> int:
        """Counts what a step multiplies with: all but an embedding that is not the head too."""
        s = self.sizes
        unused = 0 if s.tie_embeddings else s.vocab_size * s.width
        return count_parameters(abstract_params(s)[1]) - unused

    @functools.cached_property
    def active(self) -> int:
        """Counts those that one token is multiplied with: of experts, its own."""
        s = self.sizes
        if not s.routes:
            return self.weights
        (layers, of_token), experts = s.routes, s.axis_sizes["E"]
        shapes = (p.shape(s.axis_sizes) for p in s.layer.parameters if "E" in p.axes)
        return self.weights - layers * sum(map(math.prod, shapes)) // experts * (experts - of_token)

    def decode_seconds(self, rows: int, live_tokens):
        """Returns the time of a step of so many rows, whose slots read so many tokens in all."""
        read = self.value_bytes * self.weights / self.chip.hbm_rate
        multiplied = 2 * self.active * rows / self.chip.flop_rate
        how = {"bytes_per_value": self.value_bytes, "model_degree": self.model_degree}
        live = live_tokens * token_bytes(self.sizes, **how) / self.chip.hbm_rate
        return max(read, multiplied) / self.model_degree + live

    def update_seconds(self, entries: int, sequence_N: Sequence[int], devices: int) -> float:
        """Returns the time of an update on so many devices.

        entries: of all rows, padding too. sequence_N: tokens of each prompt and response.
        """
        s, n = self.sizes, np.asarray(sequence_N, float)
        forwards = 1 + self.old_logprobs
        flop = ((2 if self.lora else 4) + 2 * forwards) * self.active * entries
        flop += (
            (8 + 4 * forwards) * (n * (n + 1) / 2).sum() * s.num_layers * s.num_heads * s.head_dim
        )
        return float(flop) / (devices * self.chip.flop_rate)


def response_lengths(mean: float, *, groups: int, group_size: int, longest: int, seed: int):
    """Draws log-normal lengths [P, G], int, of the given mean after they are cut at `longest`."""
    rng = np.random.default_rng(seed)
    spread_P1 = SIGMA_PROBLEMS * rng.standard_normal((groups, 1))
    shape_PG = np.exp(spread_P1 + SIGMA_SAMPLES * rng.standard_normal((groups, group_size)))
    low, high = 0.0, float(longest)
    for _ in range(60):
        middle = (low + high) / 2
        below = np.clip(middle * shape_PG, 1, longest).mean() < mean
        low, high = (middle, high) if below else (low, middle)
    return np.clip(np.round(high * shape_PG), 1, longest).astype(int)


def simulate(
    length_PG: Sequence[Sequence[int]],
    cache: Cache,
    *,
    shards: int,
    prompt_tokens: int,
    decode_seconds: Callable[[int, np.ndarray], np.ndarray],
    partial_rollout_steps: int = 0,
    every_steps: int = 1,
) -> tuple[float, float]:
    """Runs the scheduler on groups of these lengths: (seconds of decoding, tokens prefilled).

    decode_seconds: of a step, by the program's rows and the tokens that each shard's slots read.
    Shards wait for each other after each block. The tokens are of a shard, padding included.
    partial_rollout_steps: groups of so many more steps are begun; a step ends when enough are
    complete and none is older, and the mean is returned. every_steps: between two prefills of all
    responses.
    """
    groups, begun = len(length_PG), []
    skipped, counted = (partial_rollout_steps + 1, MEAN_STEPS) if partial_rollout_steps else (0, 1)
    scheduler, seconds, tokens = Scheduler(cache, shards), 0.0, 0.0
    sizes = [rows for rows, _ in decode_sizes(cache, kernel=True)]

    def more() -> bool:
        return len(begun) < groups * (step + 1 + partial_rollout_steps)

    def ends(waiting: Sequence[int]) -> bool:
        old = any(step - begun[number] >= partial_rollout_steps for number in waiting)
        return len(begun) - len(waiting) >= groups * (step + 1) and not old

    for step in range(skipped + counted):
        if step == skipped:
            seconds = tokens = 0.0
        if step % every_steps == 0:
            tokens += sum(it.tokens for it in scheduler.occupied.values()) / shards
        while not ends(scheduler.unfinished):
            if scheduler.idle_slots >= IDLE_SHARE * shards * cache.slots:
                while scheduler.idle_slots and more():
                    limits = length_PG[len(begun) % groups]
                    scheduler.submit(
                        len(begun), prompt_tokens, limits, keeps=cache.partial_rollouts
                    )
                    begun.append(step)
            plan = scheduler.next_block(more=more())
            used_N = np.minimum(plan.left_N, cache.block_tokens)
            steps_D, occupied_D = np.zeros(shards), np.bincount(plan.shard_N, minlength=shards)
            np.maximum.at(steps_D, plan.shard_N, used_N)
            live_D = np.bincount(plan.shard_N, plan.sampled_N + prompt_tokens - 1, shards)
            rows = next(rows for rows in sizes if rows >= occupied_D.max())
            seconds += (steps_D * decode_seconds(rows, live_D)).max()
            pages = sum(call.page_RI.size for call in (*plan.prefills, *plan.recomputes))
            tokens += pages * cache.page_tokens / shards
            scheduler.complete(used_N, np.zeros(len(used_N), bool))
    return seconds / counted, tokens / counted


def step_seconds(
    config: ConfigDict, chip: Chip, mesh: AbstractMesh, *, mean: float, informative: float
) -> np.ndarray:
    """Returns the seconds [3] of a step at published rates: decoding, prefills, updates."""
    r, c, sizes = config.rollout, config.learner, components.model_sizes(config)
    kernels = kernels_for(config.model.kernels, "tpu")
    prompt_tokens = min(PROMPT_TOKENS, r.max_prompt_tokens)
    value_bytes = 4 if config.model.compute_dtype == "float32" else 2
    kind = {"lora": c.lora_rank > 0, "old_logprobs": takes_old_logp(config.algo)}
    device = Device(chip, sizes, mesh.shape["model"], value_bytes, **kind)
    how = {"groups": math.ceil(r.num_prompts / informative), "group_size": r.group_size}
    length_PG = response_lengths(mean, **how, longest=r.max_response_tokens, seed=0)
    decoding, prefilled = simulate(
        length_PG.tolist(),
        components.cache_of(config, sizes, mesh, kernels, cache_bytes=r.cache_mib * 2**20),
        shards=rules.row_degree(mesh),
        prompt_tokens=prompt_tokens,
        decode_seconds=device.decode_seconds,
        partial_rollout_steps=r.partial_rollout_steps,
        every_steps=config.checkpoint.every_steps,
    )
    prefills = 2 * device.active * prefilled / (device.model_degree * chip.flop_rate)
    updates, rows = 0.0, c.micro_batch_rows
    for update_PG in np.split(length_PG[: r.num_prompts], config.updates_per_step):
        planned, row_tokens = plan_update(
            [prompt_tokens] * len(update_PG),
            update_PG.tolist(),
            row_lengths=learner.row_lengths(c),
            micro_batch_rows=rows,
            share_prompts=kernels.shares_prompts,
        )
        entries, sequence_N = -(-len(planned) // rows) * rows * row_tokens, update_PG.ravel()
        updates += device.update_seconds(entries, sequence_N + prompt_tokens - 1, mesh.size)
    return np.array([decoding, prefills, updates])


def mesh_of(config: ConfigDict, topology: str) -> AbstractMesh:
    """Makes the config's mesh on a topology's devices. ValueError where it does not cover them."""
    m, shape = config.mesh, topology.partition(":")[2].split("x")
    if not all(n.isdecimal() and int(n) for n in shape):
        raise ValueError(f"--topology={topology}: give the chips along each axis, as in v5p:8x8x4")
    devices = math.prod(map(int, shape)) * chip_of(topology).devices_per_chip
    data = devices // m.model if m.data == -1 else m.data
    if data * m.model != devices:
        raise ValueError(
            f"mesh.data = {m.data} and mesh.model = {m.model} do not cover the {devices} devices "
            f"of --topology={topology}; choose a mesh.model that divides them, and mesh.data = -1"
        )
    return AbstractMesh((m.slices, data, m.model), AXES)


def main(_):
    given = flags.FLAGS
    config, chip = without_weights(given.config), chip_of(given.topology)
    config.mesh.slices = given.slices or config.mesh.slices
    checks.check(config)
    c, r = config.learner, config.rollout
    decode = DECODE if given.decode is None else (given.decode, given.decode)
    update = UPDATE if given.update is None else (given.update, given.update)
    if not all((c.row_tokens, c.micro_batch_rows, r.slot_tokens, r.cache_mib)):
        devices = topology_devices(given.topology, slices=config.mesh.slices)
        auto_sizes.fit_training(config, devices=devices, device_bytes=chip.hbm_bytes)
    mesh = mesh_of(config, given.topology)
    checks.check_divides(config, mesh)
    mean = given.mean_response_tokens or MEAN_SHARE * r.max_response_tokens
    if mean > r.max_response_tokens:
        raise ValueError(f"--mean_response_tokens={mean:g} is above rollout.max_response_tokens")
    shares = INFORMATIVE if config.algo.dynamic_sampling else (1.0, 1.0)
    ends = []  # slow, fast
    for share, d, u in zip(shares, decode, update, strict=True):
        parts = step_seconds(config, chip, mesh, mean=mean, informative=share) / (d, u, u)
        ends.append((parts[0] + parts[1], parts[2], parts.sum()))
    print(f"{'seconds':10}{'low':>9}{'high':>9}")
    for name, slow, fast in zip(("rollout", "update", "step"), *ends, strict=True):
        print(f"{name:10}{fast:9.1f}{slow:9.1f}")
    rates = f"{chip.hbm_rate / 1e9:,.0f} GB/s and {chip.flop_rate / 1e12:g} TFLOP/s"
    print(f"responses of {mean:,.0f} tokens; of {mesh.size} devices, each of {rates}, decoding has")
    print(f"{decode}, the rest {update}; informative: {shares} of the groups\nleft out: {LEFT_OUT}")


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_float("mean_response_tokens", None, "Of the step.", lower_bound=1)
    share = {"lower_bound": 0.001, "upper_bound": 1}
    flags.DEFINE_float("decode", None, "The efficiency, in place of what was measured.", **share)
    flags.DEFINE_float("update", None, "The efficiency, in place of what was measured.", **share)
    command.run(main)
