"""A policy to sample from, with no training around it: a model's directory, or a run's checkpoint.

configs/any_model.py leaves open what depends on the model, the data and the devices. In order:
`fit_model` (family, type of numbers, positions), then the data is read, then `fit_lengths`, then
`fit_cache`. A run's policy has all of it in its recipe.
"""

import json
import math
import os
import pathlib
from collections.abc import Container, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from dapo_jax.run import build, checks, hub, identity
from dapo_jax.run.alarms import require_finite_start
from dapo_jax.run.files import read_json
from dapo_jax.run.recipe import complete, recipe_differences
from dapo_jax.tasks.tokenizer import Tokenizer
from models import families
from models.hf_config import load_config, read_config
from models.kernels import kernels_for, platform_of
from models.transformer import abstract_params
from sharding import hosts, rules
from sharding.mesh import make_mesh

LONGEST_RESPONSE = 20_480  # tokens, where the model has positions for more
MOST_SLOTS = 512  # on each group of devices: more of them save little
CACHE_SHARE = 0.8  # of what the weights leave of a device; programs need the rest
HOST_SHARE = 0.25  # of a host's memory, where it is the device
SLOT_SHARE = 0.5  # of the longest response is what a slot is planned with: few are so long


class Policy(NamedTuple):
    """A policy to sample from: its recipe, tokenizer, programs, and weights for them."""

    config: ConfigDict
    tokenizer: Tokenizer
    programs: build.Programs
    weights: dict


def run_recipe(workdir: pathlib.Path, *, trust_code: bool) -> ConfigDict:
    """The recipe of the run in a directory, for these devices and not those that trained.

    trust_code: whether a module that it names as the model's family may be imported. Raises
    FileNotFoundError where there is no run, ValueError for a module that is not trusted.
    """
    file = workdir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: {workdir} holds no training run")
    recipe = ConfigDict(read_json(file))
    if not trust_code:
        require_built_in({"model.family": recipe.model.family}, families.BUILT_IN, file)
    complete(recipe)
    recipe.mesh.slices, recipe.mesh.data, recipe.mesh.model = 1, -1, 1
    recipe.model.kernels = "auto"
    return recipe


def require_built_in(named: Mapping[str, str], built_in: Container[str], file) -> None:
    """Refuses a run's recipe that names modules to import (ValueError): it may be a stranger's.

    named: key of the recipe in `file` -> what it names. built_in: names that are this project's.
    """
    for key, name in named.items():
        if name and name not in built_in:
            raise ValueError(
                f"{file}: {key} = {name!r} is a module that is no part of this project; if you "
                "trust the run, --trust_code imports it"
            )


def of_run(
    config: ConfigDict, workdir: pathlib.Path, step: int | None, *, but: tuple[str, ...] = ()
) -> tuple[int, Policy]:
    """(finished steps, the policy after them) of the run in a directory; None: the newest.

    but: keys of the config that may differ from the run's. Raises FileNotFoundError where there is
    no such checkpoint, ValueError where the config, or the start model, is not the run's.
    """
    tokenizer = build.tokenizer(config)
    programs = build.programs(config, tokenizer.vocab_size)
    step, params, start_weights = restored(programs, workdir, step, but=but)
    return step, Policy(config, tokenizer, programs, programs.reshard(params, start_weights))


def restored(
    programs: build.Programs, workdir: pathlib.Path, step: int | None, *, but: tuple[str, ...] = ()
) -> tuple[int, dict, dict | None]:
    """(finished steps, what was trained, the start weights where LoRA adapts them) of a run.

    step: as of `of_run`, which says what is raised; 0: the policy before the first step.
    """
    config, lora = programs.config, programs.learning.lora
    checkpoints = build.checkpoints(config, workdir, keep=None)
    newest = hosts.on_main(checkpoints.latest_step)
    step = newest if step is None else step
    if step is None:
        raise FileNotFoundError(f"{checkpoints.directory} is empty: there is no policy in it")
    if step:
        params = checkpoints.restore(step, programs.state)[0].params
    known = step or newest  # a checkpoint that says what the run began with
    if identity_ := checkpoints.identity_of(known) if known is not None else None:
        where = f"checkpoint {known} in {checkpoints.directory}"
        check_recipe(config, identity_["recipe"], where, but=but)
        begins = lora is not None or not step
        identity.require_start_model(config, identity_, where, weights=begins)
    checkpoints.close()
    params = params if step else programs.start_params()
    # The KL term, which needs them too, is training's.
    start_weights = programs.load_start_weights() if lora else None
    require_finite_start(programs, checkpoints.directory, step, params, start_weights)
    return step, params, start_weights


def check_same(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Refuses a config that makes another policy than the run's in `workdir` (ValueError).

    Without a config.json there is nothing to compare; `check_recipe` compares the checkpoint's.
    """
    file = workdir / "config.json"
    if file.exists():
        check_recipe(config, read_json(file), f"the run in {workdir}")


def check_recipe(
    config: ConfigDict, theirs: dict, where: str, *, but: tuple[str, ...] = ()
) -> None:
    """Refuses a config that makes another policy than a run's recipe does (ValueError).

    That is the model, its tokenizer and LoRA's shape, and the seed where it makes the weights. A
    path may be written in another way. but: further keys that may differ.
    """
    ours = json.loads(config.to_json_best_effort())
    compared = checks.POLICY_KEYS + (() if config.model.path else ("seed",))
    differing = recipe_differences(theirs, ours, among=compared, but=checks.FREE_KEYS + but)
    if differing:
        raise ValueError(
            f"{where} is of another policy: {'; '.join(differing)}. Give the run's recipe and "
            "values (its config.json), or its own --workdir"
        )


def of_model(config: ConfigDict, tokenizer: Tokenizer) -> Policy:
    """The policy of model.path, whose lengths and cache are fitted."""
    programs = build.programs(config, tokenizer.vocab_size)
    weights = programs.load_weights(dtype=config.model.compute_dtype)
    require_finite_start(programs, None, 0, weights, None)
    return Policy(config, tokenizer, programs, programs.reshard(weights, None))


def named(config: ConfigDict) -> dict:
    """Returns the names of a model and its tokenizer, JSON-able."""
    tokenizer = json.loads(config.tokenizer.to_json())
    return {"model": config.model.path, **{f"tokenizer.{key}": v for key, v in tokenizer.items()}}


def fit_model(config: ConfigDict) -> None:
    """Fills in what the model's directory and the devices say: family, dtype, most positions.

    Raises FileNotFoundError where there is none, ValueError where it does not fit.
    """
    path, r = hub.local(config.model.path), config.rollout
    if (pathlib.Path(path) / "metrics.jsonl").is_file():
        raise ValueError(
            f"--model={path} is a run's directory, which --workdir takes; `python -m "
            f"dapo_jax.convert --from=run:{path} --to=hf:DIR` makes a model's of its policy"
        )
    if not config.model.family:
        model_type = read_config(path).get("model_type")
        config.model.family = model_type if model_type in families.BUILT_IN else "qwen2"
    if not config.model.compute_dtype:
        on_cpu = _device_bytes() is None
        config.model.compute_dtype = "float32" if on_cpu else "bfloat16"
    positions = build.positions_of(path, load_config(path)) or 2 * LONGEST_RESPONSE
    # As many as there can be, until the data has been read.
    r.max_prompt_tokens = r.max_prompt_tokens or positions - max(1, r.max_response_tokens)
    if r.max_prompt_tokens < 1:
        raise ValueError(
            f"--max_tokens={r.max_response_tokens} leaves no position for a prompt: {path} has "
            f"{positions} (max_position_embeddings in its config.json)"
        )
    config.learner.row_tokens = max(config.learner.row_tokens, 2 * positions)


def fit_lengths(config: ConfigDict, prompt_tokens: int) -> None:
    """Fills in how long responses may be, behind prompts of at most so many tokens."""
    path, r = hub.local(config.model.path), config.rollout
    positions = build.positions_of(path, load_config(path)) or 2 * LONGEST_RESPONSE
    r.max_prompt_tokens = prompt_tokens
    if not r.max_response_tokens:
        r.max_response_tokens = min(LONGEST_RESPONSE, positions - prompt_tokens)


def fit_cache(config: ConfigDict, requests: int) -> None:
    """Fills in the cache: slots for so many requests, as far as the devices have memory.

    Raises ValueError, with the settings to change, where not one request fits beside the weights.
    """
    m, r = config.mesh, config.rollout
    r.slot_tokens = min(r.slot_tokens, max(1, math.ceil(r.max_response_tokens * SLOT_SHARE)))
    if r.cache_mib:
        return
    sizes = build.model_sizes(config)
    mesh = make_mesh(data=m.data, model=m.model, slices=m.slices)
    kernels = kernels_for(config.model.kernels, platform_of(mesh))
    wanted = min(MOST_SLOTS, -(-requests // rules.row_ways(mesh)))
    if (device := _device_bytes()) is None:
        most = HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most /= jax.local_device_count()
    else:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(sizes)[1]))
        weights = parameters * jnp.dtype(config.model.compute_dtype).itemsize
        most = CACHE_SHARE * (device - weights / mesh.shape["model"])

    def slots(mib: int) -> int:
        try:
            return build.cache_plan(config, sizes, mesh, kernels, cache_bytes=mib * 2**20).slots
        except ValueError:
            return 0

    most_mib = max(1, int(most) // 2**20)
    mib = 1
    while mib < most_mib and slots(mib) < wanted:
        mib = min(most_mib, mib + 1 + mib // 8)
    if not slots(mib):
        raise ValueError(_no_room(config, most, device, mesh.shape["model"]))
    r.cache_mib = mib


def _no_room(config: ConfigDict, left_bytes: float, device_bytes: int | None, ways: int) -> str:
    """Says that no request fits, and the settings to change."""
    r, mib = config.rollout, 2**20
    text = (
        f"a prompt of {r.max_prompt_tokens:,} tokens with a response of {r.max_response_tokens:,} "
        "(--max_tokens) does not fit in the "
    )
    if device_bytes is None:
        return f"{text}{left_bytes / mib:,.0f} MiB of a CPU device's cache; lower --max_tokens"
    weights = device_bytes - left_bytes / CACHE_SHARE
    return (
        f"{text}{max(0.0, left_bytes) / mib:,.0f} MiB that a device of {device_bytes / mib:,.0f} "
        f"has for the cache beside {weights / mib:,.0f} MiB of weights "
        f"({config.model.compute_dtype}). Lower --max_tokens, or split the weights over more "
        f"devices than {ways} (mesh.model)"
    )


def _device_bytes() -> int | None:
    """The memory of a device that programs may take; None for a CPU, which tells of none."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else None
