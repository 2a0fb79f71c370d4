"""The architecture's rules, read from the source: who may import and mention what."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# dapo_jax's modules by layer; imports point downward or sideways. Everything in BELOW knows
# nothing of dapo_jax. A new module has to be given its layer here.
LAYERS = {
    4: ("train", "evaluate", "convert", "preflight", "report", "timeline", "setup", "command"),
    3: ("rollout", "checkpoint", "boundary"),
    2: ("sampler", "learner"),
    1: (
        *("verifier", "tokenizer", "data", "arithmetic", "metrics", "packing"),
        *("estimate", "hlo_cost", "chips"),
    ),
    0: ("algorithm", "logprobs"),
}
BELOW = ("models", "sharding", "configs")
LAYER_OF = {f"dapo_jax.{name}": layer for layer, names in LAYERS.items() for name in names}
HOST_MODULES = [f"dapo_jax.{name}" for name in LAYERS[1]]
ACCELERATOR_PACKAGES = {"jax", "jaxlib", "flax", "optax", "orbax", "models", "sharding"}


def sources():
    """{dotted module name: source} of the project's packages."""
    files = [f for package in ("dapo_jax", *BELOW) for f in (ROOT / package).rglob("*.py")]
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


def mentions(source):
    """Every identifier and dotted name in the code; comments and strings do not count."""
    names = imports(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(ast.unparse(node))
    return names | {part for name in names for part in name.split(".")}


def layer(module):
    """The layer of a dapo_jax module (a package's modules have the package's), else None."""
    return LAYER_OF.get(".".join(module.split(".")[:2]))


def import_faults(module, source):
    """What `module` imports against the rules, one sentence each."""
    package = module.split(".")[0]
    faults = []
    for name in sorted(imports(source)):
        if package in BELOW and name.split(".")[0] == "dapo_jax":
            faults.append(f"{module} imports {name}, but {package} lies below dapo_jax")
        if package == "dapo_jax" and layer(name) is not None and layer(name) > layer(module):
            faults.append(f"{module} (L{layer(module)}) imports {name} (L{layer(name)})")
        if module in HOST_MODULES and name.split(".")[0] in ACCELERATOR_PACKAGES:
            faults.append(f"{module} is a host module, but imports {name}")
        if module in HOST_MODULES and layer(name) == 0:
            faults.append(f"{module} is a host module, but imports {name}, which has jax arrays")
        if name.split(".")[0] == "orbax" and module not in (
            "dapo_jax.checkpoint",
            "dapo_jax.convert",
        ):
            faults.append(f"{module} imports {name}, which is for checkpoint.py and convert.py")
    return faults


def mention_faults(module, source):
    """What `module` names though another place alone may."""
    owners = {
        "jax.make_mesh": module == "sharding.mesh",
        "mesh_utils": module == "sharding.mesh",
        "process_index": module == "sharding.hosts",
        "process_count": module == "sharding.hosts",
        "ConfigDict": module.startswith("configs") or layer(module) == 4,
        "ml_collections": module.startswith("configs") or layer(module) == 4,
    }
    names = mentions(source)
    return [
        f"{module} mentions {name}"
        for name, allowed in owners.items()
        if name in names and not allowed
    ]


def test_every_module_has_a_layer():
    modules = [name for name in sources() if name.startswith("dapo_jax.")]
    assert len(modules) > 10
    missing = [name for name in modules if layer(name) is None]
    assert not missing, f"give {missing} a layer in LAYERS"


def test_imports_point_downward_and_host_modules_are_free_of_jax():
    faults = [fault for name, text in sources().items() for fault in import_faults(name, text)]
    assert not faults, "\n".join(faults)


def test_meshes_processes_and_the_config_are_named_in_their_places_only():
    faults = [fault for name, text in sources().items() for fault in mention_faults(name, text)]
    assert not faults, "\n".join(faults)
    assert "jax.make_mesh" in mentions(sources()["sharding.mesh"])
    assert "process_index" in mentions(sources()["sharding.hosts"])


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("dapo_jax.algorithm", "from dapo_jax import learner", "L0) imports dapo_jax.learner (L2)"),
        ("dapo_jax.sampler.decode", "import dapo_jax.setup", "L2) imports dapo_jax.setup (L4)"),
        ("dapo_jax.learner", "def f():\n    from dapo_jax.train import g", "dapo_jax.train (L4)"),
        ("models.qwen2", "from dapo_jax.logprobs import f", "models lies below dapo_jax"),
        ("sharding.mesh", "import dapo_jax", "sharding lies below dapo_jax"),
        ("dapo_jax.data", "import jax.numpy as jnp", "host module, but imports jax.numpy"),
        ("dapo_jax.data", "from jax import numpy", "host module, but imports jax"),
        ("dapo_jax.metrics", "from dapo_jax.algorithm import f", "host module, but imports"),
        ("dapo_jax.setup", "import orbax.checkpoint as ocp", "for checkpoint.py and convert.py"),
    ],
)
def test_a_forbidden_import_is_found(module, source, fault):
    assert any(fault in found for found in import_faults(module, source))


@pytest.mark.parametrize(
    ("module", "source", "name"),
    [
        ("dapo_jax.setup", "import jax\nmesh = jax.make_mesh((1,), ('data',))", "jax.make_mesh"),
        ("dapo_jax.setup", "from jax import make_mesh", "jax.make_mesh"),
        ("dapo_jax.train", "import jax\nif jax.process_index() == 0: pass", "process_index"),
        ("dapo_jax.learner", "from jax import process_count as n", "process_count"),
        ("dapo_jax.rollout", "def f(config: ConfigDict): pass", "ConfigDict"),
        ("models.hf", "import ml_collections", "ml_collections"),
    ],
)
def test_a_forbidden_mention_is_found(module, source, name):
    assert f"{module} mentions {name}" in mention_faults(module, source)


def test_allowed_imports_and_mentions_are_no_faults():
    source = "import jax\nfrom dapo_jax import learner\nfrom models.qwen2 import split\n"
    assert not import_faults("dapo_jax.setup", source)
    assert not mention_faults("dapo_jax.setup", "from ml_collections import ConfigDict")
    assert not mention_faults("dapo_jax.learner", '"""On jax.process_index."""  # ConfigDict')
    assert not mention_faults("dapo_jax.setup", "from sharding.mesh import make_mesh")
