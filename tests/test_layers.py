"""The architecture's rules, read from the source: who may import what."""

import ast

import mutate
import pytest
from processes import ROOT, ran

# Rooms (modules or packages) by floor, from the top; imports point downward, or sideways inside a
# room. A new room has to be given its floor here.
FLOORS = (
    ("experiments",),
    ("dapo_jax.train", "dapo_jax.sweep"),
    ("dapo_jax.evaluate", "dapo_jax.sample", "dapo_jax.convert", "dapo_jax.preflight"),
    ("dapo_jax.report",),
    ("dapo_jax.setup",),
    ("dapo_jax.checkpoints", "dapo_jax.evaluation"),
    ("dapo_jax.hub",),
    ("dapo_jax.logs",),
    ("dapo_jax.cli",),
    ("dapo_jax.rollout",),
    ("dapo_jax.sampler", "dapo_jax.learner", "dapo_jax.grading"),
    ("dapo_jax.logprobs", "dapo_jax.losses", "dapo_jax.episodes"),
    ("models", "dapo_jax.tasks", "dapo_jax.packing"),
    ("dapo_jax.outside",),
    ("dapo_jax.verifier", "dapo_jax.process"),
    ("sharding", "configs", "dapo_jax.types", "dapo_jax.printable", "dapo_jax.algorithm"),
)
PACKAGES = ("dapo_jax", "models", "sharding", "configs", "experiments")
FLOOR_OF = {room: len(FLOORS) - i for i, rooms in enumerate(FLOORS) for room in rooms}
# Rooms without devices, and those parts of others that are.
HOST_ROOMS = (
    *("dapo_jax.tasks", "dapo_jax.packing", "dapo_jax.types", "dapo_jax.verifier"),
    *("dapo_jax.printable", "dapo_jax.outside"),
    *("dapo_jax.sampler.cache", "dapo_jax.sampler.plan", "dapo_jax.sampler.slots"),
    "dapo_jax.sampler.scheduler",
    *("dapo_jax.logs.metrics", "dapo_jax.logs.files", "dapo_jax.logs.display", "dapo_jax.report"),
    "dapo_jax.preflight.chips",
)
ACCELERATOR_PACKAGES = {"jax", "jaxlib", "flax", "optax", "orbax", "models", "sharding"}
# Host rooms may not import these either: they compute with jax arrays.
DEVICE_ROOMS = ("dapo_jax.algorithm", "dapo_jax.logprobs", "dapo_jax.losses")


def sources():
    """{dotted module name: source} of the project's packages."""
    files = [f for package in PACKAGES for f in (ROOT / package).rglob("*.py")]
    return {
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f.read_text()
        for f in files
    }


def imports(source):
    """Dotted names that a source imports, anywhere in it; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports absolute"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(module):
    """The room that a module, or a name inside one, belongs to; None where it is not ours."""
    parts = module.split(".")
    return next((r for r in (".".join(parts[:2]), parts[0]) if r in FLOOR_OF), None)


def faults_of(module, source):
    """Lists what `module` imports against the rules, one sentence each."""
    found, here = imports(source), room(module)
    if module == "dapo_jax":  # every command imports it
        return [f"dapo_jax imports {name}" for name in sorted(found) if room(name)]
    faults, is_host = [], any(module == of or module.startswith(f"{of}.") for of in HOST_ROOMS)
    for name in sorted(found):
        there, top = room(name), name.split(".")[0]
        if there not in (None, here) and FLOOR_OF[there] >= FLOOR_OF[here]:
            faults.append(f"{module} imports {name}, but {there} does not lie below {here}")
        if is_host and (top in ACCELERATOR_PACKAGES or there in DEVICE_ROOMS):
            faults.append(f"{module} is a host module, but imports {name}")
    return faults


def test_every_module_has_a_floor():
    modules = [name for name in sources() if name != "dapo_jax"]
    assert len(modules) > 10
    missing = [name for name in modules if room(name) is None]
    assert not missing, f"give {missing} a floor in FLOORS"


def test_no_module_breaks_the_rules():
    faults = [fault for name, text in sources().items() for fault in faults_of(name, text)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("dapo_jax.algorithm", "from dapo_jax import learner", "learner does not lie below"),
        ("dapo_jax.packing", "from dapo_jax.algorithm import f", "host module, but imports"),
        ("dapo_jax.sampler.cache", "import jax.numpy as jnp", "host module, but imports jax"),
    ],
)
def test_what_is_forbidden_is_found(module, source, fault):
    assert any(fault in found for found in faults_of(module, source))


# Several define a flag of the same name: each is imported as if it were the only one.
IMPORTS = """
import importlib, sys
import dapo_jax.train
unneeded = {"dapo_jax.report", "matplotlib", "jinja2", "pandas"} & {*sys.modules}
assert not unneeded, f"a start of training loads {unneeded}"
from absl import flags, logging
common = set(flags.FLAGS)
for name in sys.argv[1:]:
    importlib.import_module(name)
    for flag in set(flags.FLAGS) - common:
        delattr(flags.FLAGS, flag)
"""


def test_every_experiment_imports_and_training_loads_no_report():
    files = [f for f in (ROOT / "experiments").rglob("*.py") if "runs" not in f.parts]
    modules = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
    assert len(modules) > 15
    ran("-c", IMPORTS, *(m.removesuffix(".__init__") for m in modules))


def test_each_mutation_is_a_line_that_is_there():
    for mutation in mutate.mutations():
        assert mutate.mutated(mutation, ROOT) and mutation.tests
