"""`train --dry_run`: the refusals of a start, the report of the data, and the memory of a step.

Nothing is loaded to the devices, locked, or written but to the hub's cache. Preflight compiles.
"""

import math
import pathlib
from collections.abc import Callable, Iterator

import jax
from ml_collections import ConfigDict

from dapo_jax import hub, learner
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.printable import printable
from dapo_jax.setup import auto_sizes, checks, components, start
from dapo_jax.tasks.tokenizer import Tokenizer
from sharding import hosts

MIB = 2**20
SHOWN_CHARS = 1_000  # of a prompt


def run(
    config: ConfigDict,
    workdir: pathlib.Path,
    origin: start.Origin | None,
    say: Callable[[str], None],
) -> None:
    """Refuses what a start in `workdir` would refuse before its weights, and reports the rest.

    origin: that of --start. Raises ValueError or OSError, as the start does.
    """
    start.check(config)
    hub.fetch(hub.paths(config), origin and origin.workdir, workdir)
    origin = hosts.on_main(lambda: start.origin_of(workdir, origin))
    directory = components.epath.Path(config.checkpoint.directory or workdir / "checkpoints")
    there = Checkpoints(directory, keep=None) if directory.is_dir() else None
    step = hosts.on_main(there.latest_step) if there else None
    start.check_parent(config, step, origin)
    tokenizer, programs, data, chosen = start.prepare(config, workdir)
    say("\n".join([*data.report_lines(), *example_lines(data, tokenizer)]))
    ours = fingerprint.of_run(config, data) | {"origin": origin and str(origin)}
    if step is not None:
        checks.check_steps_left(config, step, directory)
        if theirs := hosts.on_main(lambda: there.fingerprint_of(step)):
            where = f"checkpoint {step} in {directory}"
            fingerprint.require_same(theirs, ours, report=say, where=where)
    say(
        "\n".join(
            [*chosen, auto_sizes.padding_line(config, programs, data), *memory_lines(programs)]
        )
    )
    say("\n".join(_next_lines(config, workdir, step, origin)))


def example_lines(data: components.Data, tokenizer: Tokenizer) -> list[str]:
    """Shows the first prompt of each set as the policy reads it, and its answer."""
    sets = data.train.sets | {name: of.dataset for name, of in data.eval_sets.items()}
    lines = []
    for key, dataset in sets.items():
        prompt = dataset.prompts[0]
        text = tokenizer.decode(prompt.token_ids.tolist())
        if len(text) > SHOWN_CHARS:
            text = f"{text[:SHOWN_CHARS]} [... {len(text) - SHOWN_CHARS:,} more characters]"
        lines.append(f"the first prompt of {key}, whose answer is {prompt.example.answer!r}:")
        lines += [f"  | {printable(line)}" for line in text.split("\n")]
    return lines


def device_bytes(tree) -> int:
    """Counts the bytes of ShapeDtypeStructs with shardings on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def memory(programs: components.Programs) -> dict[str, dict[str, int]]:
    """Phase of a step -> what a device holds in it -> bytes; what programs need beside is not in.

    As shapes and shardings say it: the rounded copies and activations inside the compiled programs
    are the compiler's.
    """
    longest = components.row_lengths(programs.config)[-1]
    shape = (*components.batch_shape(programs.config), longest)
    batch = learner.abstract_batch(shape, programs.mesh)
    state = {
        "state": device_bytes(programs.state),
        "start weights": device_bytes(programs.start_weights),
    }
    pages = {"keys and values": device_bytes(programs.engine.pages)}
    kept = pages if programs.config.rollout.partial_rollout_steps else {}
    return {
        "rollout": state | {"sampler's weights": device_bytes(programs.engine.params)} | pages,
        "update": state
        | {"gradients": device_bytes(programs.state.params), "batch": device_bytes(batch)}
        | kept,
    }


def memory_lines(programs: components.Programs) -> Iterator[str]:
    """Says what a device holds in each phase, and what it has where that is known."""
    device, mesh = jax.local_devices()[0], programs.mesh
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    yield f"devices: {mesh.size} x {device.device_kind}, mesh {axes}"
    yield "memory of a device, MiB, without the programs' temporaries:"
    for phase, parts in memory(programs).items():
        held = "  ".join(f"{name} {size / MIB:,.1f}" for name, size in parts.items() if size)
        yield f"  {phase:8} {sum(parts.values()) / MIB:10,.1f}  =  {held}"
    has = (device.memory_stats() or {}).get("bytes_limit")
    yield f"  the device has {has / MIB:,.0f}" if has else "  what the device has is not known here"


def _next_lines(config: ConfigDict, workdir, step: int | None, origin) -> Iterator[str]:
    r = config.rollout
    yield (
        f"a step: {r.num_prompts} prompts x {r.group_size} responses of at most "
        f"{r.max_response_tokens} tokens, {config.updates_per_step} updates"
    )
    if step is None:
        first = f"step {origin.step} would be the first, from {origin}" if origin else "step 0"
        first = first if origin else f"{first} would be the first, of {config.num_steps}"
        where = "has no checkpoint" if workdir.exists() else "is not there yet"
        yield f"dry run: {workdir} {where}; {first}"
    elif step == config.num_steps:
        yield f"dry run: the run in {workdir} has finished all {step} steps; none would come"
    else:
        yield f"dry run: step {step} of {config.num_steps} would come next in {workdir}"
    yield "Nothing was written, loaded to devices or compiled."
