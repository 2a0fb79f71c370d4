"""Estimates a config's seconds a step, and hours, on a topology by arithmetic: nothing is compiled.

    python -m experiments.preflight.estimate --config=configs/qwen2_5_32b.py --topology=v5p:8x8x4
        [--slices=2] [--mean_response_tokens=4000] [--decode=0.5] [--update=0.25]

Over a run lengths grow and informative groups become fewer, as in the paper's; steps at some of its
points are estimated. The sampler's own scheduler runs on drawn response lengths, and the learner's
own packer makes rows of them. At a chip's published rates, and of what the model has a part of on a
device,

    a decode step   max(bytes of weights / memory rate, 2 FLOP a weight and row / FLOP rate)
                    + bytes of live keys and values / memory rate
    a prefill       2 FLOP a weight and token / FLOP rate
    an update       (6 FLOP a weight and entry of a row, 4 with LoRA, and 12 a pair of tokens that
                    attend, layer and value of a head) / FLOP rate

with, of a mixture's experts, the weights of a token's own, but for what is read. Decode steps are
divided by the efficiency --decode, the others by --update. On a node of GPUs an update also has the
time in which its exchanges cross the links, of which nothing is hidden behind products.
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
# The paper's run, smoothed: step, mean tokens of trained responses (Figure 7a), share of the groups
# that are all right (Figure 3b).
COURSE = np.array(
    [
        *[(0, 740, 0.0), (5, 570, 0.0), (10, 660, 0.01), (20, 870, 0.05), (40, 1_220, 0.11)],
        *[(60, 1_440, 0.25), (80, 1_550, 0.29), (100, 1_990, 0.33), (120, 2_600, 0.37)],
        *[(150, 2_890, 0.39), (180, 3_790, 0.4), (210, 4_040, 0.44), (240, 4_230, 0.44)],
        *[(270, 4_010, 0.47), (300, 3_980, 0.49), (330, 4_540, 0.51)],
    ]
)
LONGEST = 20_480  # its limit, of which these lengths are taken as shares
INFORMATIVE = 0.5, 0.2  # of the sampled groups; from the first to the last as all-right ones rise
# Tokens of all-right groups, of those with both: 593 such groups of Qwen2.5's family, three sets.
ALL_RIGHT = 0.54
POINTS = (0.0, 0.03, 0.12, 0.3, 0.55, 0.8, 1.0)  # of the run, where a step is estimated
NODE = 8  # GPUs that links join
# Of log-lengths between and within problems: 12,494 generations of models of Qwen2.5's family.
SIGMA_PROBLEMS, SIGMA_SAMPLES = 0.81, 0.61
PROMPT_TOKENS = 145  # the mean of the paper's training data, with Qwen2.5's tokenizer
MEAN_STEPS = 8  # with partial responses partial over: a step that ends late leaves less to the next
LEFT_OUT = """exchanges between chips (but for those of a node's updates), the host between blocks,
copies between shards, evaluation, the verifier, saves, log-probabilities of a KL term; neither a
TPU nor a node has confirmed it"""


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
        sums = 2 * 2 * rows * self._exchanged_in_layers  # two a layer, each there and back
        return max(read, multiplied) / self.model_degree + live + sums

    @property
    def _exchanged_in_layers(self) -> float:
        """The seconds in which one collective a layer takes a token's activations over links."""
        s, m = self.sizes, self.model_degree
        sent = s.num_layers * s.width * self.value_bytes * (m - 1) / m
        return sent / self.chip.link_rate if self.chip.link_rate else 0.0

    def exchange_seconds(self, micro_batches: int, tokens: int, data: int) -> float:
        """Returns the time of an update's exchanges over links; 0 where the chip gives none.

        A micro-batch gathers the weights twice, and scatters gradients in float32 unless LoRA's. A
        layer of a split model gathers and scatters activations 11 times, the recomputed ones too:
        the compiler's count. tokens: of all rows of one of `data` shards.
        """
        if not self.chip.link_rate:
            return 0.0
        of_weight = 2 * self.value_bytes + (0 if self.lora else 4)
        sent = micro_batches * of_weight * self.weights / self.model_degree * (data - 1) / data
        return sent / self.chip.link_rate + 11 * tokens * self._exchanged_in_layers

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


def course_at(progress: float) -> tuple[float, float, float]:
    """Returns a run's state when so much of it is done, as the paper's was.

    These are the mean length of trained responses, of the greatest, and the shares of sampled
    groups that are informative, and all right.
    """
    step_N, tokens_N, right_N = COURSE.T
    tokens, right = (np.interp(progress * step_N[-1], step_N, a) for a in (tokens_N, right_N))
    first, last = INFORMATIVE
    return tokens / LONGEST, first - (first - last) * right / right_N[-1], right


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
                    scheduler.submit(len(begun), prompt_tokens, limits)
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
    config: ConfigDict,
    chip: Chip,
    mesh: AbstractMesh,
    *,
    mean: float,
    informative: float,
    all_right: float = 0.0,
) -> np.ndarray:
    """Returns a step's seconds [4] at published rates: decoding, prefills, updates, exchanges.

    mean: of trained responses. informative, all_right: shares of the sampled groups.
    """
    r, c, sizes = config.rollout, config.learner, components.model_sizes(config)
    kernels = kernels_for(config.model.kernels, "gpu" if chip.gpu else "tpu")
    chip = chip if mesh.size <= NODE else dataclasses.replace(chip, link_rate=0.0)
    prompt_tokens = min(PROMPT_TOKENS, r.max_prompt_tokens)
    value_bytes = 4 if config.model.compute_dtype == "float32" else 2
    kind = {"lora": c.lora_rank > 0, "old_logprobs": takes_old_logp(config.algo)}
    device = Device(chip, sizes, mesh.shape["model"], value_bytes, **kind)
    how = {"groups": math.ceil(r.num_prompts / informative), "group_size": r.group_size}
    length_PG = response_lengths(mean, **how, longest=r.max_response_tokens, seed=0)
    # Every so many groups, one that is all right.
    before_P = np.floor(all_right * np.arange(len(length_PG) + 1))
    is_right_P = np.diff(before_P) > 0
    length_PG[is_right_P] = np.ceil(ALL_RIGHT * length_PG[is_right_P])
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
    updates, exchanges, rows = 0.0, 0.0, c.micro_batch_rows
    data, trained_PG = mesh.size // device.model_degree, length_PG[~is_right_P][: r.num_prompts]
    for update_PG in np.split(trained_PG, config.updates_per_step):
        planned, row_tokens = plan_update(
            [prompt_tokens] * len(update_PG),
            update_PG.tolist(),
            row_lengths=learner.row_lengths(c),
            micro_batch_rows=rows,
            share_prompts=kernels.shares_prompts,
            part_multiple=kernels.part_multiple,
        )
        micro_batches, sequence_N = -(-len(planned) // rows), update_PG.ravel()
        entries = micro_batches * rows * row_tokens
        updates += device.update_seconds(entries, sequence_N + prompt_tokens - 1, mesh.size)
        exchanges += device.exchange_seconds(micro_batches, entries // data, data)
    return np.array([decoding, prefills, updates, exchanges])


def run_seconds(
    config: ConfigDict, chip: Chip, mesh: AbstractMesh, *, mean: float | None
) -> np.ndarray:
    """Returns the seconds [POINTS, 4] of steps over a run, as `step_seconds` does.

    mean: of responses in all of them; None: as the paper's grew. Without dynamic sampling every
    group is trained on.
    """
    steps = []
    for point in POINTS:
        share, informative, right = course_at(point)
        if not config.algo.dynamic_sampling:
            informative, right = 1.0, 0.0
        of_step = {"informative": informative, "all_right": right}
        tokens = mean or share * config.rollout.max_response_tokens
        steps.append(step_seconds(config, chip, mesh, mean=tokens, **of_step))
    return np.array(steps)


def over_run(of_point_N: np.ndarray) -> np.ndarray:
    """Returns the mean over a run of what is given at POINTS, along the first axis."""
    return np.trapezoid(of_point_N, POINTS, axis=0)


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
    mean = given.mean_response_tokens
    if mean and mean > r.max_response_tokens:
        raise ValueError(f"--mean_response_tokens={mean:g} is above rollout.max_response_tokens")
    parts = run_seconds(config, chip, mesh, mean=mean)
    ends = []  # slow, fast
    for d, u in zip(decode, update, strict=True):
        of_parts = parts / (d, u, u, 1)
        rollout, updates = of_parts[:, :2].sum(axis=1), of_parts[:, 2:].sum(axis=1)
        ends.append(np.array([rollout, updates, rollout + updates]))
    means = [over_run(of_points.T) for of_points in ends]
    print(f"{'seconds':10}{'low':>9}{'high':>9}   from the first step to the last, low and high")
    for name, slow, fast, *steps in zip(("rollout", "update", "step"), *means, *ends, strict=True):
        first, last = (f"{steps[1][i]:,.1f} to {steps[0][i]:,.1f}" for i in (0, -1))
        print(f"{name:10}{fast:9.1f}{slow:9.1f}   {first}; {last}")
    slow, fast = (config.num_steps * seconds[2] / 3_600 for seconds in means)
    print(f"{'hours':10}{fast:9.1f}{slow:9.1f}   of {config.num_steps} steps")
    first, last = (mean or course_at(point)[0] * r.max_response_tokens for point in (0, 1))
    shares = INFORMATIVE if config.algo.dynamic_sampling else (1.0, 1.0)
    rates = f"{chip.hbm_rate / 1e9:,.0f} GB/s and {chip.flop_rate / 1e12:g} TFLOP/s"
    print(
        f"responses of {first:,.0f} tokens at first, {last:,.0f} at the end; of the groups {shares}"
    )
    print(f"are informative; of {mesh.size} devices, each of {rates}, decoding has")
    print(f"{decode}, the rest {update}")
    print(f"left out: {LEFT_OUT}")


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_float("mean_response_tokens", None, "Of all steps.", lower_bound=1)
    share = {"lower_bound": 0.001, "upper_bound": 1}
    flags.DEFINE_float("decode", None, "The efficiency, in place of what was measured.", **share)
    flags.DEFINE_float("update", None, "The efficiency, in place of what was measured.", **share)
    command.run(main)
