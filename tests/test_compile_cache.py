"""Compiled programs are kept for the next start: where, for whom, and with which faults."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from processes import ROOT
from runs import rows_without_timings

from dapo_jax.process import compile_cache

# A process says what it loaded and compiled, and where that lies.
PROGRAM = """
import json, jax, jax.numpy as jnp
from dapo_jax.process import compile_cache
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name.rpartition("/")[2]))
compile_cache.enable(several=False)
jax.jit(lambda x: jax.lax.sort(jnp.tanh(x @ x)).sum())(jnp.ones((8, 8)))
folder = jax.config.jax_compilation_cache_dir
print(json.dumps([seen.count("cache_hits"), seen.count("cache_misses"), folder]))
"""


def ran_clean(*arguments, **more) -> subprocess.CompletedProcess:
    """Runs `python ARGUMENTS` without a choice of the cache in the environment, but for `more`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_CACHE", "XLA_"))}
    env = kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | more
    how = {"env": env, "cwd": ROOT, "check": True, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *arguments], **how)


def start(cache):
    """(hits, misses, folder, what was said) of a process."""
    done = ran_clean("-c", PROGRAM, XDG_CACHE_HOME=str(cache))
    return *json.loads(done.stdout), done.stderr


def test_the_next_start_loads_what_the_first_has_compiled(tmp_path):
    hits, misses, folder, said = start(tmp_path)
    assert hits == 0 and misses > 0 and said == ""
    assert pathlib.Path(folder) == tmp_path / "dapo_jax/programs" / compile_cache.machine()
    assert start(tmp_path) == (misses, 0, folder, "")


def test_the_environment_chooses_and_several_hosts_have_no_default(monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("a folder is chosen"))
    compile_cache.enable(several=False)  # conftest.py has chosen one
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    compile_cache.enable(several=True)


def test_a_program_of_another_cpu_or_number_of_cores_lies_elsewhere(monkeypatch):
    names = {compile_cache.machine()}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(99), raising=False)
    names.add(compile_cache.machine())
    for flags in ("avx2", "avx2 amx"):
        text = f"model name : X\nflags : {flags}\ncpu MHz : 1\n\nmodel name : X\n"
        monkeypatch.setattr(pathlib.Path, "read_text", lambda _, text=text: text)
        names.add(compile_cache.machine())
    assert len(names) == 4
    monkeypatch.setattr(pathlib.Path, "read_text", lambda _: text.replace("MHz : 1", "MHz : 2"))
    assert compile_cache.machine() in names


@pytest.mark.slow
def test_a_run_with_loaded_programs_has_the_rows_of_one_with_fresh_ones(tmp_path):
    def rows(name):
        flags = (f"--workdir={tmp_path / name}", "--config.num_steps=2")
        command = ("-m", "dapo_jax.train", "--config=tests/small_config.py", *flags)
        ran_clean(*command, XDG_CACHE_HOME=str(tmp_path / "cache"))
        return rows_without_timings(tmp_path / name)

    fresh = rows("on_policy")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*-cache")}
    assert len(fresh) == 2 and any("jit_update" in path.name for path in kept)
    assert rows("loaded") == fresh
    assert kept == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*-cache")}
