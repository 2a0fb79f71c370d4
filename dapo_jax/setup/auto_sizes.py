"""Sizes that a config leaves open (0), chosen by the model, the lengths and the devices.

In order: `fit_model` (family, dtype, positions), then the data is read, then `fit_lengths` and
`fit_cache`; in training `fit_data` and `fit_training`. configs/any_model.py leaves most open.
"""

import bisect
import math
import os
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from configs import base
from dapo_jax import hub, learner
from dapo_jax.setup import components
from models import families
from models.hf_config import load_config, read_config
from models.kernels import kernels_for, platform_of
from models.lora import Lora, init_adapters
from models.transformer import abstract_params
from sharding import hosts, rules
from sharding.mesh import make_mesh

LONGEST_RESPONSE = 20_480  # tokens, where the model has positions for more
LONGEST_TRAINED = 4_096  # the same where a training config leaves it open
CACHE_OF_RESPONSE = 0.2  # L_cache of L_max in the paper
PROMPT_KEY = "rollout.max_prompt_tokens"
MOST_SLOTS = 512  # on each group of devices: more of them save little
# More slots make a CPU's decode step slower, idle ones too, once its cores are busy.
CPU_SLOTS_TIMES_PARAMETERS = 2**33
FEWEST_CPU_SLOTS = 16
CACHE_SHARE = 0.8  # of what the weights leave of a device; programs need the rest
HOST_SHARE = 0.25  # of a host's memory, where it is the device
STATE_BYTES = 12  # a trained parameter and its two moments, float32
# Tokens of a micro-batch on each group of devices, where they are chosen: fewer leave the cores
# waiting for weights; more are padding, or activations that may not fit.
MICRO_BATCH_TOKENS = {"cpu": 1_024, "tpu": 16_384, "gpu": 16_384}
MEAN_SHARE = 0.3  # of the limit is what a response is expected to have
CACHE_KEYS = ("rollout.slot_tokens", "rollout.cache_mib")
SLOT_SHARE = 0.5  # of the longest response is what a slot is planned with: few are so long


def fit_model(config: ConfigDict, *, training: bool = False) -> None:
    """Fills in what the model's directory and the devices say: family, dtype, most positions.

    training: whether longer prompts may be dropped, so that responses have half of the positions.
    Raises FileNotFoundError where there is none, ValueError where it does not fit.
    """
    path, r = hub.local(config.model.path), config.rollout
    if not path:
        return  # random weights: `components.model_sizes` says what is missing
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
    if not r.max_prompt_tokens:  # as many as there can be, until the data has been read
        positions = _positions(config)
        reserved = r.max_response_tokens or (positions // 2 if training else 1)
        r.max_prompt_tokens = positions - reserved
        if training:
            r.max_prompt_tokens = min(r.max_prompt_tokens, base.KEYS[PROMPT_KEY].default)
        if r.max_prompt_tokens < 1:
            raise ValueError(
                f"--max_tokens={r.max_response_tokens} leaves no position for a prompt: {path} has "
                f"{positions} (max_position_embeddings in its config.json)"
            )


def fit_lengths(config: ConfigDict, prompt_tokens: int, *, most: int = LONGEST_RESPONSE) -> None:
    """Fills in how long responses may be, behind prompts of at most so many tokens.

    most: response tokens, where the model has positions for more.
    """
    r, a = config.rollout, config.algo
    r.max_prompt_tokens = prompt_tokens
    if not r.max_response_tokens:
        r.max_response_tokens = min(most, _positions(config) - prompt_tokens)
    if a.overlong_cache_tokens < 0:
        a.overlong_cache_tokens = int(CACHE_OF_RESPONSE * r.max_response_tokens)


def fit_data(config: ConfigDict, data: components.Data, *, given: Mapping[str, object]) -> None:
    """Fills in a training config's lengths and first generation batch. given: its values before."""
    r, sets = config.rollout, [it.dataset for it in data.eval_sets.values()]
    of_train = data.train.sets
    if given[PROMPT_KEY]:
        longest = r.max_prompt_tokens
    else:
        prompts = [p for of in (*of_train.values(), *sets) for p in of.prompts]
        longest = max((len(p.token_ids) for p in prompts), default=1)
    fit_lengths(config, longest, most=LONGEST_TRAINED)
    if not r.generation_prompts:
        there = [len(of_train[key].prompts) / share for key, share in data.train.shares.items()]
        r.generation_prompts = max(1, int(min(2 * r.num_prompts, *there)))


def _positions(config: ConfigDict) -> int:
    path = hub.local(config.model.path)
    return components.positions_of(path, load_config(path)) or 2 * LONGEST_RESPONSE


def fit_training(config: ConfigDict, *, devices=None, device_bytes: int | None = None) -> list[str]:
    """Fills in the sizes that a training config leaves open (0); returns lines that name them.

    A micro-batch has as many tokens as keep the devices busy, but no more than half of what an
    update is expected to have: the rest of the last one is padding. Its rows hold the longest
    sequence. The cache holds the first generation batch, as far as the devices have memory beside
    the training state, and on a CPU as far as its cores are not busy with less.
    devices, device_bytes: of a compile-only topology; None: this program's.
    Raises ValueError as `fit_cache` does, and where the processes' sizes differ.
    """
    c, r = config.learner, config.rollout
    keys = ("learner.row_tokens", "learner.micro_batch_rows", *CACHE_KEYS)
    given = {key: value for key, value in base.leaves(config) if key in keys}
    if devices is None:
        # Before a process with a size left open waits for one that has it.
        first, *others = hosts.gather(given)
        for process, theirs in enumerate(others, start=1):
            if theirs != first:
                raise ValueError(
                    f"process {process} has {theirs}, process 0 has {first}: give all processes "
                    "the same settings"
                )
    chosen = [key for key, value in given.items() if not value]
    if not chosen:
        return []
    mesh = _mesh(config, devices)
    degree = rules.row_degree(mesh)
    most = MICRO_BATCH_TOKENS.get(platform_of(mesh), MICRO_BATCH_TOKENS["tpu"])
    of_group = r.max_prompt_tokens + r.group_size * MEAN_SHARE * r.max_response_tokens
    expected = r.num_prompts / config.updates_per_step * of_group / degree
    tokens = min(most, int(expected / 2))
    longest = r.max_prompt_tokens + r.max_response_tokens - 1
    multiple = learner.row_multiple(longest)
    if not c.row_tokens:
        # Two rows where there is enough: attention costs by the row's length.
        row = tokens if tokens < most else most // 2
        c.row_tokens = -(-max(longest, row) // multiple) * multiple
    if not c.micro_batch_rows:
        c.micro_batch_rows = degree * max(1, tokens // c.row_tokens)
    if any(key in chosen for key in CACHE_KEYS):
        requests = r.generation_prompts * r.group_size
        r.slot_tokens = r.slot_tokens or _slot_tokens(config)
        how = {"devices": devices, "device_bytes": device_bytes}
        fit_cache(config, requests, training=True, **how)
    values = ", ".join(f"{key} = {value}" for key, value in base.leaves(config) if key in chosen)
    return [f"chosen by the lengths and the devices: {values}"]


def _mesh(config: ConfigDict, devices=None):
    m = config.mesh
    return make_mesh(data=m.data, model=m.model, slices=m.slices, devices=devices)


def fit_cache(
    config: ConfigDict,
    requests: int,
    *,
    training: bool = False,
    devices=None,
    device_bytes: int | None = None,
) -> None:
    """Fills in the cache: slots for so many requests, as memory and a CPU's cores allow.

    training: whether the training state is on the devices too. devices, device_bytes: as of
    `fit_training`. Raises ValueError, with the settings to change, where not one request fits
    beside the weights.
    """
    r = config.rollout
    if not training:
        r.slot_tokens = min(r.slot_tokens, _slot_tokens(config))
    if r.cache_mib:
        return
    sizes, mesh = components.model_sizes(config), _mesh(config, devices)
    kernels = kernels_for(config.model.kernels, platform_of(mesh))
    wanted = min(MOST_SLOTS, -(-requests // rules.row_degree(mesh)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(sizes)[1]))
    if platform_of(mesh) == "cpu":
        enough = -(-CPU_SLOTS_TIMES_PARAMETERS // (parameters * rules.row_degree(mesh)))
        wanted = min(wanted, max(FEWEST_CPU_SLOTS, enough))
    if (device := device_bytes or _device_bytes()) is None:
        most = HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most /= jax.local_device_count()
    else:
        weights = parameters * jnp.dtype(config.model.compute_dtype).itemsize
        held = weights / mesh.shape["model"]
        if training:
            divided = mesh.shape["data"] * mesh.shape["model"]  # every slice has all of it
            state = _state_bytes(config, sizes, weights, parameters)
            # With partial rollouts the cache stays beside the update and its gradients.
            gradients = state * 4 / STATE_BYTES if r.partial_rollout_steps else 0
            held += (state + gradients) / divided
        most = CACHE_SHARE * (device - held)
    if devices is None:
        most = min(hosts.gather(most))  # all processes have the same programs

    def slots(mib: int) -> int:
        try:
            return components.cache_plan(
                config, sizes, mesh, kernels, cache_bytes=mib * 2**20
            ).slots
        except ValueError:
            return 0

    # The fewest that hold the requests: rows of more slots are computed in every step.
    sizes_mib = range(1, max(1, int(most) // 2**20))
    mib = 1 + bisect.bisect_left(sizes_mib, wanted, key=slots)
    if most < mib * 2**20 or not slots(mib):
        raise ValueError(_no_room(config, most, device, mesh.shape["model"], training=training))
    r.cache_mib = mib


def _state_bytes(config: ConfigDict, sizes, weights: int, parameters: int) -> int:
    """Counts the bytes of the training state, and of start weights that are kept beside it."""
    c = config.learner
    kept = weights if c.lora_rank or config.algo.kl_coef > 0 else 0
    if c.lora_rank:
        lora = Lora(rank=c.lora_rank, alpha=c.lora_alpha, targets=tuple(c.lora_targets))
        factors = jax.eval_shape(lambda: init_adapters(sizes, lora, key=jax.random.key(0)))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(factors))
    return STATE_BYTES * parameters + kept


def _slot_tokens(config: ConfigDict) -> int:
    """Returns the response tokens that a slot is planned with where that is chosen."""
    return max(1, math.ceil(config.rollout.max_response_tokens * SLOT_SHARE))


def _no_room(
    config: ConfigDict,
    left_bytes: float,
    device_bytes: int | None,
    degree: int,
    *,
    training: bool,
) -> str:
    """Returns the message that no request fits, with the settings to change."""
    r, mib = config.rollout, 2**20
    limit = "rollout.max_response_tokens" if training else "--max_tokens"
    has, held, more = "a CPU device", "", ""
    if device_bytes is not None:
        weights = device_bytes - left_bytes / CACHE_SHARE
        has = f"a device of {device_bytes / mib:,.0f}"
        state = "weights and training state" if training else "weights"
        held = f" beside {weights / mib:,.0f} MiB of {state} ({config.model.compute_dtype})"
        more = f", or split the weights over more devices than {degree} (mesh.model)"
    return (
        f"a prompt of {r.max_prompt_tokens:,} tokens with a response of {r.max_response_tokens:,} "
        f"({limit}), in pages of {r.page_tokens:,} (rollout.page_tokens), does not fit in the "
        f"{max(0.0, left_bytes) / mib:,.0f} MiB that {has} has for the cache{held}. Lower "
        f"rollout.page_tokens or {limit}{more}"
    )


def _device_bytes() -> int | None:
    """The memory of a device that programs may take; None for a CPU, which tells of none."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else None
