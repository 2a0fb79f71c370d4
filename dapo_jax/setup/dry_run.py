"""`train --dry_run`: the refusals of a start, the report of the data, and the memory of a step.

Nothing is loaded to the devices, locked, or written but to the hub's cache. Preflight compiles.
"""

import pathlib

from ml_collections import ConfigDict

from dapo_jax import hub
from dapo_jax.checkpoints import begun, fingerprint
from dapo_jax.checkpoints.begun import Parent
from dapo_jax.checkpoints.same_run import FORK, RESUME, require
from dapo_jax.checkpoints.store import Checkpoints, DamagedError
from dapo_jax.printable import printable, shortened
from dapo_jax.process import hosts
from dapo_jax.setup import components, memory, start
from dapo_jax.tasks.tokenizer import Tokenizer
from models import hf

SHOWN_CHARS = 1_000  # of a prompt


def dry_run(config: ConfigDict, workdir: pathlib.Path, parent: Parent | None) -> None:
    """Refuses what a start in `workdir` would refuse before its weights, and reports the rest."""
    say = print if hosts.is_main_host() else lambda line: None
    if workdir.is_file():
        raise ValueError(f"--workdir={workdir} is a file: give a folder's name")
    directory, step, question = begun.directory_of(config, workdir), None, RESUME
    saves = hosts.on_main(directory.is_dir)
    start.accept_and_fetch(config, training=True, weights=bool(saves or parent))
    parent = hosts.on_main(lambda: begun.parent_of(workdir, parent))
    if saves:
        there = Checkpoints(directory, keep=None)
        step = there.latest_step()
    if step is not None:
        begun.require_steps_left(config, step, there.directory)
    elif parent:
        there, step, question = start.parents_checkpoints(config, parent), parent.step, FORK
    run = start.plan_training(config, workdir, parent)
    config = run.config
    if path := config.model.path:
        hf.check_files(hub.local(path), run.programs.sizes, needed=hub.local(path) == path)
    say("\n".join([*run.lines(), *example_lines(run.data, run.tokenizer)]))
    ours = fingerprint.of_run(config, run.data, parent)
    try:
        if step is not None and (theirs := hosts.on_main(lambda: there.fingerprint_of(step))):
            require(question, theirs, ours, f"checkpoint {step} in {there.directory}", say)
    except DamagedError as error:
        say(f"{error}: a start would try the checkpoint before")
    say("memory of a device, MiB, without the programs' temporaries:")
    say("\n".join(memory.lines(memory.phases(run.programs), memory.MIB)))
    if limit := memory.device_limit():
        say(f"  the device has {limit / memory.MIB:,.0f}")
    done = f"{step or 0} of {config.num_steps} steps are done in {workdir}"
    say(f"dry run: {done}. Nothing was written or compiled")


def example_lines(data: components.Data, tokenizer: Tokenizer) -> list[str]:
    """Shows the first prompt of each set as the policy reads it, and its answer."""
    lines = []
    for key, dataset in data.sets.items():
        prompt = dataset.prompts[0]
        text = shortened(tokenizer.decode(prompt.token_ids.tolist()), limit=SHOWN_CHARS)
        lines.append(f"the first prompt of {key}, whose answer is {prompt.example.answer!r}:")
        lines += [f"  | {printable(line)}" for line in text.split("\n")]
    return lines
