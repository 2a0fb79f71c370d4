"""Four fake CPU devices and one compilation cache for every test; the folder of golden data."""

import os
import pathlib
import signal
import sys
import tempfile

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the Hugging Face hub; test_hub.py has its own
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
# Tests and the processes that they start compile a program once in a session: a config that runs
# several times, a run that is resumed. JAX finds a program by its code, its devices, the compiler's
# options and version. Whoever sets a directory keeps the programs from session to session.
_compiled = tempfile.TemporaryDirectory(prefix="dapo_jax_compiled_")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Behind `nohup` or `&` both are ignored, which programs of tests inherit; a handler they do not.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Tasks and families of one's own are found where PYTHONPATH points.
sys.path += [str(ROOT / "tests" / name) for name in ("ext_tasks", "ext_models")]
FULL = os.environ.get("FAULTS") == "full"  # as many faults as `make faults` injects


def cases(short: int, full: int) -> range:
    """Numbers the faults of a test marked `faults`; a number is the seed of what is injected."""
    return range(full if FULL else short)


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of golden vectors and real data beside the project; skips where there is none."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared (golden vectors and real data), which a plain clone lacks")
    return folder
