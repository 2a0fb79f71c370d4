"""Compiled programs are kept for the next start: where, for whom, and with which faults."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from dapo_jax.cli import compile_cache
from dapo_jax.logs.metrics import untimed

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A process says what it loaded and compiled, and where that lies.
PROGRAM = """
import json, sys, jax, jax.numpy as jnp
from dapo_jax.cli import compile_cache
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name.rpartition("/")[2]))
compile_cache.enable(several="several" in sys.argv)
jax.jit(lambda x: jax.lax.sort(jnp.tanh(x @ x)).sum())(jnp.ones((8, 8)))
folder = jax.config.jax_compilation_cache_dir
print(json.dumps([seen.count("cache_hits"), seen.count("cache_misses"), folder]))
"""


def clean(**more):
    """The environment without a choice of the cache, but for `more`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_CACHE", "XLA_"))}
    return kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | more


def start(*arguments, limit="", **more):
    """(hits, misses, folder, what was said) of a process."""
    command = f'{limit} exec "$0" "$@"'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, "-c", PROGRAM, *arguments],
        env=clean(**more),
        capture_output=True,
        text=True,
        check=True,
    )
    return *json.loads(done.stdout), done.stderr


def test_the_next_start_loads_what_the_first_has_compiled(tmp_path):
    hits, misses, folder, said = start(XDG_CACHE_HOME=str(tmp_path))
    assert hits == 0 and misses > 0 and said == ""
    assert pathlib.Path(folder) == tmp_path / "dapo_jax/programs" / compile_cache.machine()
    assert pathlib.Path(folder).stat().st_mode & 0o777 == 0o700
    assert start(XDG_CACHE_HOME=str(tmp_path)) == (misses, 0, folder, "")


def test_it_lies_in_the_home_where_the_convention_says_so(tmp_path):
    _, _, folder, _ = start(HOME=str(tmp_path), XDG_CACHE_HOME="relative")
    assert pathlib.Path(folder).is_relative_to(tmp_path / ".cache" / "dapo_jax")


@pytest.mark.parametrize(
    "choice", [{"JAX_COMPILATION_CACHE_DIR": ""}, {"JAX_ENABLE_COMPILATION_CACHE": "false"}]
)
def test_whoever_wants_no_cache_has_none(tmp_path, choice):
    hits, _, folder, said = start(XDG_CACHE_HOME=str(tmp_path), **choice)
    assert (hits, folder or None, said) == (0, None, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_chosen_folder_is_taken_and_several_hosts_have_no_default(tmp_path):
    chosen = str(tmp_path / "chosen")
    *_, folder, _ = start(JAX_COMPILATION_CACHE_DIR=chosen, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert folder == chosen
    *_, folder, _ = start("several", JAX_COMPILATION_CACHE_DIR=chosen)
    assert folder == chosen
    *_, folder, _ = start("several", XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert folder is None and not (tmp_path / "xdg").exists()


@pytest.mark.parametrize(
    "place",
    [{"XDG_CACHE_HOME": "/dev/null"}, {"HOME": "/nonexistent"}],
    ids=["a file", "no home"],
)
def test_without_a_folder_to_write_the_program_runs_and_says_so(place):
    hits, _, folder, said = start(**place)
    assert (hits, folder) == (0, None) and len(said.splitlines()) == 1
    assert said.startswith("compiled programs are not kept for the next start: ")


def test_programs_that_another_user_could_write_are_not_run(tmp_path, monkeypatch):
    """A cached program is machine code."""
    compile_cache._require_own(tmp_path)
    for mode in (0o720, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(OSError, match="can be written by other users"):
            compile_cache._require_own(tmp_path)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(OSError, match="can be written by other users"):
        compile_cache._require_own(tmp_path)


def test_an_empty_home_is_not_the_root(monkeypatch):
    """Python takes it for /, and root made /.cache there."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    with pytest.raises(OSError, match="HOME is empty"):
        compile_cache.default_folder()


def test_a_damaged_program_is_compiled_anew(tmp_path):
    """A process was killed while it wrote one."""
    _, misses, folder, _ = start(XDG_CACHE_HOME=str(tmp_path))
    path = sorted(pathlib.Path(folder).glob("*-cache"))[0]
    path.write_bytes(path.read_bytes()[:99])
    hits, again, *_ = start(XDG_CACHE_HOME=str(tmp_path))
    assert (hits, again) == (misses - 1, 1)


def test_a_program_of_another_cpu_or_number_of_cores_lies_elsewhere(monkeypatch):
    names = {compile_cache.machine()}
    with contextlib.suppress(AttributeError):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(99))
        names.add(compile_cache.machine())
    text = "vendor_id : X\nflags : avx2\ncpu MHz : 1\n\nvendor_id : X\n"
    monkeypatch.setattr(pathlib.Path, "read_text", lambda _: text)
    names.add(compile_cache.machine())
    text = text.replace("avx2", "avx2 amx")
    names.add(compile_cache.machine())
    assert len(names) == 4
    text = text.replace("MHz : 1", "MHz : 2")
    assert compile_cache.machine() in names


@pytest.mark.slow
def test_a_run_with_loaded_programs_has_the_rows_of_one_with_fresh_ones(tmp_path):
    def rows(name):
        recipe = ("--config=tests/small_config.py", "--config.num_steps=2")
        command = [sys.executable, "-m", "dapo_jax.train", f"--workdir={tmp_path / name}", *recipe]
        env = clean(XDG_CACHE_HOME=str(tmp_path / "cache"))
        subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [untimed(json.loads(line)) for line in lines]

    fresh = rows("on_policy")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*-cache")}
    assert len(fresh) == 2 and any("jit_update" in path.name for path in kept)
    assert rows("loaded") == fresh
    assert kept == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*-cache")}
