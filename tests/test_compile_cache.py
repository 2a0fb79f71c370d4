"""Compiled programs are kept for the next start: where, for whom, and with which faults."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from processes import ROOT

from dapo_jax.process import compile_cache

# A process says what it loaded and compiled, and where that lies.
PROGRAM = """
import json, jax, jax.numpy as jnp
from dapo_jax.process import compile_cache
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name.rpartition("/")[2]))
compile_cache.enable()
jax.jit(lambda x: jax.lax.sort(jnp.tanh(x @ x)).sum())(jnp.ones((8, 8)))
folder = jax.config.jax_compilation_cache_dir
print(json.dumps([seen.count("cache_hits"), seen.count("cache_misses"), folder]))
"""


def start(cache):
    """(hits, misses, folder, what was said) of a process for which the environment chooses none."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_CACHE", "XLA_"))}
    env = kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}
    how = {"env": env, "cwd": ROOT, "check": True, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", PROGRAM], **how)
    return *json.loads(done.stdout), done.stderr


def test_the_next_start_loads_what_the_first_has_compiled(tmp_path):
    hits, misses, folder, said = start(tmp_path)
    assert hits == 0 and misses > 0 and said == ""
    assert pathlib.Path(folder) == tmp_path / "dapo_jax/programs" / compile_cache.machine()
    assert start(tmp_path) == (misses, 0, folder, "")


def test_the_environment_chooses_and_several_hosts_have_no_default(monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("a folder is chosen"))
    compile_cache.enable()  # conftest.py has chosen one
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setattr(compile_cache.hosts, "started", lambda: True)
    compile_cache.enable()


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
