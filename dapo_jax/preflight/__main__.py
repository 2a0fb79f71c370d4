"""Will a recipe fit a TPU slice, and how long will a step take? Its compiler says, without a TPU.

    python -m dapo_jax.preflight --config=configs/qwen2_5_32b.py --topology=v5p:8x8x4
        [--slices=2] [--suggest] [--json=FILE] [--png=FILE] [--mean_response_tokens=4000]

The recipe's own programs (update, prefill, decoding for training and for evaluation, reshard) are
compiled ahead of time for the topology. Reported: the bytes that a chip holds in each phase, the
costs of each program with its loops counted in full, what it takes at least, and a simulated RL
step and run. Exit status: 0 if it fits, 1 if it does not, with the setting to change.

Needs the package libtpu: `make preflight` installs it beside the environment.
"""

import collections
import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import sys
import time
import types

import jax
import numpy as np
from absl import flags
from jax.experimental import topologies
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from dapo_jax.preflight import hlo_cost, simulate
from dapo_jax.preflight.chips import GIB, Chip, chip_of
from dapo_jax.preflight.simulate import Work
from dapo_jax.run import build, checks, command
from models.qwen2 import Qwen2Config, abstract_params
from sharding import rules

LIBTPU = pathlib.Path(sys.prefix) / "tpu" / "libtpu" / "libtpu.so"  # where make puts it
# The compiler asks for no chip and for no metadata server.
COMPILER_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Mean response length over a run of the paper, of the greatest length: 743 to 4,537 of 20,480.
MEAN_LENGTHS = tuple(tokens / 20_480 for tokens in (743, 1_700, 2_650, 3_600, 4_537))
INFORMATIVE = 0.5  # of the groups sampled; the paper's generation batches are three times a step's
WANTED_HEADROOM = 0.10
KEPT_FOR_PROGRAMS = 0.15  # of the memory, where settings are proposed

PARTS = ("state", "sampler's weights", "keys and values", "batch and start weights", "temporaries")
ADVICE = (
    "Set learner.remat to offload, lower learner.micro_batch_rows, learner.row_tokens or "
    "rollout.cache_mib, raise mesh.model, or take a larger topology; --suggest proposes settings"
)


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program on one device; bytes.

    arguments, outputs (those not in the place of an argument), temporaries. fixed: what it costs
    without its dynamic loop; turn: what one turn of that loop adds.
    """

    name: str
    arguments: int
    outputs: int
    temporaries: int
    fixed: Work
    turn: Work
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Phase:
    """What a device holds while something runs; parts: name -> bytes."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class DoesNotFit(Exception):
    """The compiler found that a program needs more memory than there is."""


def topology_devices(topology: str, *, slices: int):
    """The devices of so many slices, none of which is there. ValueError where it is unknown."""
    jax.config.update("jax_platforms", "cpu")
    if LIBTPU.exists():
        os.environ.setdefault("TPU_LIBRARY_PATH", str(LIBTPU))
    for name, value in COMPILER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    chip = chip_of(topology)
    name = f"{chip.name}:{topology.partition(':')[2]}"
    several = {"num_slices": slices} if slices > 1 else {}
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **several, **dict(chip.description)
        )
    except Exception as error:  # of several kinds, all from the compiler
        if "libtpu" in str(error):
            message = f"the TPU's compiler, libtpu, is missing: run `make preflight` ({error})"
            raise ValueError(message) from error
        raise ValueError(f"--topology={topology}: {error}") from error
    return description.devices


def with_sizes(config: ConfigDict) -> ConfigDict:
    """The recipe with its model's sizes alone: no weights are there, nor needed."""
    config = config.copy_and_resolve_references()
    if config.model.preset:
        config.model.path = ""
    return config


def lowered_programs(config: ConfigDict, policy: build.Programs) -> dict[str, jax.stages.Lowered]:
    """The recipe's programs by name, ready for the compiler."""
    sizes = policy.sizes
    ids = types.SimpleNamespace(  # a tokenizer's, as far as the programs know it
        stop_ids=(sizes.vocab_size - 1,), pad_id=0, vocab_size=sizes.vocab_size
    )
    sampling = build.sampling(config, ids)
    evaluating = build.eval_samplings(config, ids).values() if config.eval.every_steps else ()
    with jax.set_mesh(policy.mesh):
        sampler = policy.engine.lower(sampling)
        programs = {"reshard": policy.reshard.lower(policy.state.params, policy.start_weights)}
        for i, how in enumerate(dict.fromkeys(how for how in evaluating if how != sampling)):
            lowered = policy.engine.lower(how)
            key = next(k for k in lowered if k[0] == "decode")
            programs[f"decode (evaluation{f' {i + 1}' if i else ''})"] = lowered[key]
    prefills = sorted(key[2] for key in sampler if key[0] == "prefill")
    programs["decode"] = next(low for key, low in sampler.items() if key[0] == "decode")
    mean_pages = policy.engine.cache.bucket(
        min(simulate.PROMPT_TOKENS, config.rollout.max_prompt_tokens)
    )
    for bucket in sorted({mean_pages, *prefills[-1:]} - {0}):
        programs[f"prefill[{bucket}]"] = sampler["prefill", None, bucket]
    programs["update"] = policy.lower_update()
    return programs


def compiled(name: str, lowered: jax.stages.Lowered) -> Program:
    """Compile a program and count what it costs. DoesNotFit where the memory is too small."""
    start = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)
        raise DoesNotFit(f"{name}: {said}") from error
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    text = program.as_text()

    # The only loops without a length: micro-batches of an update, steps of a block of decoding.
    def work(turns: int) -> Work:
        cost = hlo_cost.count(text, loop_times=collections.defaultdict(lambda: turns))
        return Work(cost.flops, cost.hbm_bytes, cost.collectives)

    fixed = work(0)
    return Program(
        name,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        fixed,
        minus(work(1), fixed),
        seconds,
    )


def minus(more: Work, less: Work) -> Work:
    """What one has and the other has not."""
    times = collections.Counter()
    for sign, collectives in ((1, more.collectives), (-1, less.collectives)):
        for c in collectives:
            times[dataclasses.replace(c, times=0.0)] += sign * c.times
    return Work(
        more.flops - less.flops,
        more.hbm_bytes - less.hbm_bytes,
        tuple(dataclasses.replace(c, times=n) for c, n in times.items() if n),
    )


def on_a_device(tree) -> int:
    """Bytes of ShapeDtypeStructs with shardings on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def phases(policy: build.Programs, programs: dict[str, Program]) -> list[Phase]:
    """What a device holds while each program runs."""
    state = on_a_device(policy.state)
    weights, pages = on_a_device(policy.engine.params), on_a_device(policy.engine.pages)
    sampling = {"state": state, "sampler's weights": weights, "keys and values": pages}
    resharding = {"state": state, "sampler's weights": weights}
    held = []
    for name, program in programs.items():
        if name == "update":
            parts = {"state": state, "batch and start weights": program.arguments - state}
        else:
            parts = resharding if name == "reshard" else sampling
        held.append(Phase(name, parts | {"temporaries": program.temporaries}))
    return held


def attention_flops(sizes: Qwen2Config, *, row_tokens: int, remat: str) -> float:
    """Of splash attention in one row, forward and backward: a kernel, which the counter skips.

    It visits the blocks on and below the diagonal: T * T / 2 pairs. Forward it has two products,
    backward four for keys and values and three for queries, as it computes the scores in each.
    """
    recomputed = 2 if remat in ("full", "offload", "keep_products") else 0
    products = 2 + recomputed + 7
    pairs = row_tokens**2 / 2
    return products * 2 * pairs * sizes.num_heads * sizes.head_dim * sizes.num_layers


@dataclasses.dataclass(frozen=True)
class Step:
    """One simulated RL step at a mean response length; seconds."""

    mean_response_tokens: int
    rollout: float
    prefill: float
    update: float
    reshard: float
    sampled_tokens: int
    trained_tokens: int
    occupancy: float
    blocks: int
    micro_batches: int
    parameters: int
    flop_rate: float  # of all devices, published

    @property
    def total(self) -> float:
        return self.rollout + self.prefill + self.update + self.reshard

    @property
    def mfu_of_update(self) -> float:
        """6 FLOP a parameter and trained token, of what the devices could do in the time."""
        return 6 * self.parameters * self.trained_tokens / (self.update * self.flop_rate)


def parameter_count(sizes: Qwen2Config) -> int:
    """Of the whole model."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(sizes)[1]))


def simulated_step(
    config: ConfigDict,
    policy: build.Programs,
    programs: dict[str, Program],
    chip: Chip,
    mean: float,
) -> Step:
    """One RL step whose responses have a mean of so many tokens."""
    r, sizes, cache = config.rollout, policy.sizes, policy.engine.cache
    shards, model_ways = policy.engine.shards, policy.mesh.shape["model"]
    groups = r.num_prompts
    if config.algo.dynamic_sampling:
        groups = math.ceil(r.num_prompts / INFORMATIVE)
    length_PG = simulate.response_lengths(
        mean, groups=groups, group_size=r.group_size, longest=r.max_response_tokens, seed=0
    )
    token_bytes = 2 * sizes.num_layers * sizes.num_kv_heads // model_ways * sizes.head_dim
    token_bytes *= 2  # bfloat16
    decode = programs["decode"]
    turn = simulate.seconds(decode.turn, chip)
    memory_rate = chip.hbm_rate * simulate.MEMORY_REACHES

    def step_seconds(live_tokens_S):
        # The kernel reads the live pages of the responses; the rest is counted in the program.
        memory_S = turn.memory + live_tokens_S * token_bytes / memory_rate
        return np.maximum(turn.products, memory_S) + turn.exchange

    rollout = simulate.simulate_rollout(
        length_PG.reshape(-1),
        shards=shards,
        slots=cache.slots,
        pages=cache.pages,
        page_tokens=cache.page_tokens,
        block_tokens=cache.block_tokens,
        step_seconds=step_seconds,
        block_seconds=simulate.seconds(decode.fixed, chip).in_turn + simulate.HOST_SECONDS_A_BLOCK,
    )
    bucket = policy.engine.cache.bucket(min(simulate.PROMPT_TOKENS, r.max_prompt_tokens))
    prefill = 0.0
    if bucket:
        calls = math.ceil(groups / (shards * policy.engine.cache.prefill_rows(bucket)))
        prefill = calls * simulate.seconds(programs[f"prefill[{bucket}]"].fixed, chip).in_turn

    kept_PG = length_PG[: r.num_prompts]
    prompt = min(simulate.PROMPT_TOKENS, r.max_prompt_tokens)
    per_update = r.num_prompts // config.updates_per_step
    micro = sum(
        simulate.micro_batches(
            (kept_PG[i : i + per_update].reshape(-1) + prompt - 1).tolist(),
            row_tokens=config.learner.row_tokens,
            rows=config.learner.micro_batch_rows,
        )
        for i in range(0, r.num_prompts, per_update)
    )
    update = programs["update"]
    rows = config.learner.micro_batch_rows / rules.row_ways(policy.mesh)
    kernel = attention_flops(
        sizes, row_tokens=config.learner.row_tokens, remat=config.learner.remat
    )
    one = dataclasses.replace(update.turn, flops=update.turn.flops + rows * kernel / model_ways)
    updating = micro * simulate.seconds(one, chip).overlapped
    updating += config.updates_per_step * simulate.seconds(update.fixed, chip).overlapped
    return Step(
        mean_response_tokens=round(float(length_PG.mean())),
        rollout=rollout.seconds,
        prefill=prefill,
        update=updating,
        reshard=simulate.seconds(programs["reshard"].fixed, chip).in_turn,
        sampled_tokens=rollout.tokens,
        trained_tokens=int(kept_PG.sum()) + kept_PG.size * prompt,
        occupancy=rollout.occupancy,
        blocks=rollout.blocks,
        micro_batches=micro,
        parameters=parameter_count(sizes),
        flop_rate=policy.mesh.size * chip.flop_rate,
    )


@dataclasses.dataclass(frozen=True)
class Report:
    """All that was found for one recipe on one topology."""

    recipe: str
    where: str
    chip: Chip
    chips: int
    mesh: dict[str, int]
    slots: int
    pages: int
    reshard_bytes: float
    programs: dict[str, Program]
    held: list[Phase]
    step: Step
    run: list[Step]
    num_steps: int
    seconds: float

    @property
    def fullest(self) -> Phase:
        return max(self.held, key=lambda phase: phase.total)

    @property
    def headroom(self) -> float:
        """The share of the memory that is left in the fullest phase."""
        return 1 - self.fullest.total / self.chip.hbm_bytes

    @property
    def run_hours(self) -> float:
        """Of all rollout steps, at the lengths of the paper's run; evaluations are not counted."""
        return self.num_steps * float(np.mean([step.total for step in self.run])) / 3_600


def examine(config: ConfigDict, devices, *, recipe: str, where: str, mean: float, say) -> Report:
    """Compile everything for these devices and put it together. DoesNotFit, ValueError."""
    start = time.perf_counter()
    chip = chip_of(where)
    checks.check(config)
    vocab_size = build.model_sizes(config).vocab_size
    policy = build.programs(config, vocab_size, devices=devices)
    checks.check_divides(config, policy.mesh)
    cache = policy.engine.cache
    if cache.slots < 1:
        raise DoesNotFit("rollout.cache_mib holds no slot")
    lowered = lowered_programs(config, policy)
    programs = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {name: pool.submit(compiled, name, low) for name, low in lowered.items()}
        for name, job in jobs.items():
            programs[name] = job.result()
            say(f"compiled {name} in {programs[name].compile_seconds:.0f} s")
    longest = config.rollout.max_response_tokens
    return Report(
        recipe=recipe,
        where=where,
        chip=chip,
        chips=len(devices) // chip.devices_per_chip,
        mesh=dict(policy.mesh.shape),
        slots=cache.slots,
        pages=cache.pages,
        reshard_bytes=sum(c.bytes * c.times for c in programs["reshard"].fixed.collectives),
        programs=programs,
        held=phases(policy, programs),
        step=simulated_step(config, policy, programs, chip, mean),
        run=[
            simulated_step(config, policy, programs, chip, part * longest) for part in MEAN_LENGTHS
        ],
        num_steps=config.num_steps,
        seconds=time.perf_counter() - start,
    )


def lines(report: Report) -> list[str]:
    """The report for a person."""
    chip, step = report.chip, report.step
    mesh = ", ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    out = [
        f"{report.recipe} on {report.where}: {report.chips} chips, mesh {mesh}",
        f"a data shard has {report.slots} slots and {report.pages} pages",
        "",
        f"{'GiB a device':22}"
        + "".join(f"{name:>{len(name) + 3}}" for name in PARTS)
        + "   in all",
    ]
    for phase in report.held:
        sizes = (f"{phase.parts.get(name, 0) / GIB:{len(name) + 3}.2f}" for name in PARTS)
        out.append(f"{phase.name:22}{''.join(sizes)}{phase.total / GIB:9.2f}")
    out += [
        f"of {chip.hbm_bytes / GIB:.2f} GiB: {report.headroom:.1%} free in {report.fullest.name}",
        "",
        f"{'a device, once':22}{'TFLOP':>12}{'GB memory':>12}{'GB exchanged':>14}"
        f"{'products s':>12}{'memory s':>12}{'exchange s':>12}",
    ]
    for name, program in report.programs.items():
        for label, work in ((name, program.fixed), (f"  a turn of {name}", program.turn)):
            if work is program.turn and not work.flops:
                continue  # no dynamic loop
            least = simulate.seconds(work, chip)
            moved = sum(c.bytes * c.times for c in work.collectives)
            out.append(
                f"{label:22}{work.flops / 1e12:12.3f}{work.hbm_bytes / 1e9:12.3f}"
                f"{moved / 1e9:14.3f}"
                f"{least.products:12.4f}{least.memory:12.4f}{least.exchange:12.4f}"
            )
            kinds = collections.Counter()
            for c in work.collectives:
                kinds[c.kind if c.groups else f"{c.kind} between slices"] += c.bytes * c.times
            if kinds:
                parts = (f"{kind} {size / 1e9:.3f} GB" for kind, size in kinds.items())
                out.append(f"{'':24}{', '.join(parts)}")
    out += [
        "",
        f"a simulated step, responses of {step.mean_response_tokens:,} tokens in the mean:",
        f"  rollout {step.rollout:.0f} s + prefill {step.prefill:.1f} s (occupancy "
        f"{step.occupancy:.0%}, {step.blocks:,} blocks), update {step.update:.0f} s "
        f"({step.micro_batches} micro-batches, MFU {step.mfu_of_update:.0%}), reshard "
        f"{step.reshard:.2f} s ({report.reshard_bytes / 1e9:.1f} GB to a device)",
        f"  {step.total / 60:.1f} minutes; {step.sampled_tokens / step.total:,.0f} sampled tokens "
        f"a second, {step.sampled_tokens / step.rollout:,.0f} in the rollout",
        f"a run of {report.num_steps} steps: {report.run_hours:.0f} hours, "
        f"{report.run_hours * report.chips:,.0f} chip-hours (responses grow as the paper's did, to "
        f"{report.run[-1].mean_response_tokens:,} tokens)",
        "",
        "assumed: "
        f"{simulate.PRODUCTS_REACH:.0%} of the published FLOP/s, {simulate.MEMORY_REACHES:.0%} of "
        f"the memory's rate, {simulate.LINKS_REACH:.0%} of the links' (rings over one axis of the "
        f"torus), {1e3 * simulate.HOST_SECONDS_A_BLOCK:.0f} ms of the host a block, "
        f"{INFORMATIVE:.0%} of the groups informative, log-normal lengths (sigma "
        f"{simulate.SIGMA_PROBLEMS} between, {simulate.SIGMA_SAMPLES} within problems). No TPU "
        "has confirmed them. Evaluations, saves and the verifier are not counted",
    ]
    return out


def advice(report: Report) -> str:
    """What to change where it does not fit, or hardly."""
    over = report.fullest.total - (1 - WANTED_HEADROOM) * report.chip.hbm_bytes
    mib = math.ceil(over / 2**20)
    if report.fullest.name == "update":
        return (
            "lower learner.micro_batch_rows or learner.row_tokens, set learner.remat to offload, "
            "or raise mesh.model: the update needs the most"
        )
    return f"lower rollout.cache_mib by {mib} or raise mesh.model: sampling needs the most"


def plot(report: Report, path: pathlib.Path) -> None:
    """The memory of every phase, and where a step's time goes, as bars."""
    figure = Figure(figsize=(9, 6), layout="tight")
    memory, times = figure.subplots(2, 1, height_ratios=(3, 1))
    names = [phase.name for phase in report.held]
    left = np.zeros(len(names))
    for part in PARTS:
        size = np.array([phase.parts.get(part, 0) / GIB for phase in report.held])
        if size.any():
            memory.barh(names, size, left=left, label=part)
            left += size
    memory.axvline(report.chip.hbm_bytes / GIB, color="black", linestyle="--")
    memory.set_xlabel(f"GiB a device; dashed: the {report.chip.hbm_bytes / GIB:g} that there are")
    memory.invert_yaxis()
    memory.set_xlim(0, 1.3 * report.chip.hbm_bytes / GIB)
    memory.legend(loc="lower right", fontsize="small")
    memory.set_title(f"{report.recipe} on {report.where}")
    step, start = report.step, 0.0
    for name in ("prefill", "rollout", "reshard", "update"):
        seconds = getattr(step, name)
        times.barh(["one step"], [seconds / 60], left=[start / 60], label=name)
        start += seconds
    times.set_xlabel(f"minutes, simulated, at {step.mean_response_tokens:,} tokens a response")
    times.set_xlim(0, 1.3 * start / 60)
    times.legend(loc="center right", fontsize="small")
    figure.savefig(path, dpi=110)


def as_json(report: Report) -> dict:
    """The report for a program."""
    return {
        "recipe": report.recipe,
        "topology": report.where,
        "chips": report.chips,
        "mesh": report.mesh,
        "slots_a_shard": report.slots,
        "hbm_bytes": report.chip.hbm_bytes,
        "headroom": report.headroom,
        "phases": {phase.name: phase.parts for phase in report.held},
        "programs": {
            name: dataclasses.asdict(program) for name, program in report.programs.items()
        },
        "step": dataclasses.asdict(report.step)
        | {"total": report.step.total, "mfu_of_update": report.step.mfu_of_update},
        "run_hours": report.run_hours,
        "chip_hours": report.run_hours * report.chips,
        "seconds": report.seconds,
        "jax": jax.__version__,
    }


def suggested(config: ConfigDict, devices, chip: Chip, *, slices: int) -> dict[str, int]:
    """Settings of mesh and batch that should fit, by arithmetic alone.

    The fewest chips for a copy of the sampler's weights that leave room for the state, for as much
    again of keys and values and for the programs: less is exchanged then. ValueError where none do.
    """
    sizes = build.model_sizes(config)
    parameters, chips = parameter_count(sizes), len(devices) // slices
    usable = (1 - WANTED_HEADROOM - KEPT_FOR_PROGRAMS) * chip.hbm_bytes
    state = 12 * parameters / chips
    ways = [n for n in range(1, sizes.num_kv_heads + 1) if sizes.num_kv_heads % n == 0]
    for model in (n for n in ways if chips % n == 0 and sizes.num_heads % n == 0):
        weights = 2 * parameters / model
        cache = usable - state - weights
        if cache > weights / 2:
            rows = chips // model * slices
            return {
                "mesh.slices": slices,
                "mesh.data": -1,
                "mesh.model": model,
                "learner.micro_batch_rows": rows,
                "rollout.cache_mib": int(cache / 2**20) // 64 * 64,
            }
    raise ValueError(
        f"{parameters / 1e9:.1f} billion parameters do not fit {chips} chips of {chip.name}: "
        f"{state / GIB:.1f} GiB of state and {2 * parameters / ways[-1] / GIB:.1f} of weights over "
        f"{ways[-1]} chips, of {chip.hbm_bytes / GIB:g}; take a larger topology"
    )


def main(_):
    config, topology = with_sizes(CONFIG.value), TOPOLOGY.value
    slices = SLICES.value or config.mesh.slices
    config.mesh.slices = slices
    devices = topology_devices(topology, slices=slices)
    where = topology if slices == 1 else f"{topology} x {slices}"
    recipe = pathlib.Path(flags.FLAGS["config"].config_filename).stem
    if SUGGEST.value:
        proposal = suggested(config, devices, chip_of(topology), slices=slices)
        print("proposed:", " ".join(f"--config.{key}={value}" for key, value in proposal.items()))
        config.update_from_flattened_dict(proposal)
    mean = MEAN.value or round(MEAN_LENGTHS[-1] * config.rollout.max_response_tokens)
    try:
        report = examine(config, devices, recipe=recipe, where=where, mean=mean, say=say)
    except DoesNotFit as error:
        print(f"{recipe} on {where} does not fit: {error}\n{ADVICE}")
        sys.exit(1)
    print("\n".join(lines(report)))
    for flag, write in ((JSON, write_json), (PNG, plot)):
        if flag.value:
            write(report, pathlib.Path(flag.value))
            print(f"written: {flag.value}")
    print(f"preflight took {report.seconds:.0f} s with JAX {jax.__version__}")
    if report.headroom < WANTED_HEADROOM:
        print(f"less than {WANTED_HEADROOM:.0%} is free: {advice(report)}")
    if report.headroom < 0:
        print("it does not fit")
        sys.exit(1)
    print("it fits")


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def write_json(report: Report, path: pathlib.Path) -> None:
    """The report as a file."""
    path.write_text(json.dumps(as_json(report), indent=1) + "\n")


if __name__ == "__main__":
    CONFIG = command.define_config()
    TOPOLOGY = flags.DEFINE_string("topology", None, "A slice: v5p:8x8x4.", required=True)
    SLICES = flags.DEFINE_integer("slices", None, "How many of them; the recipe's mesh.slices.")
    SUGGEST = flags.DEFINE_bool("suggest", False, "Propose mesh and batch settings, and take them.")
    MEAN = flags.DEFINE_float("mean_response_tokens", None, "Of the simulated step.")
    JSON = flags.DEFINE_string("json", None, "Write the report here.")
    PNG = flags.DEFINE_string("png", None, "Draw memory and time here.")
    command.run(main)
