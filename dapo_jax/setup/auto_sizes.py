"""Sizes that a config leaves open (0), chosen by the model, the lengths and the devices.

In order: `fit_model`, then the data is read, then `fit_lengths` and `fit_cache`; in training
`fit_data` and `fit_training`. configs/any_model.py leaves most open.
"""

import bisect
import math
import os
import pathlib
from collections.abc import Mapping

import jax
from clu.parameter_overview import count_parameters
from ml_collections import ConfigDict

from configs import base
from dapo_jax import hub, learner
from dapo_jax.process import hosts
from dapo_jax.setup import components, memory
from models import families
from models.hf_config import load_config, read_config
from models.kernels import kernels_for, platform_of
from models.transformer import abstract_params
from sharding import rules

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
ANY_CACHE_MIB = 2**24  # holds a request of any model
# Tokens of a micro-batch on each group of devices, where they are chosen: fewer leave the cores
# waiting for weights; more are padding, or activations that may not fit.
MICRO_BATCH_TOKENS = {"cpu": 1_024, "tpu": 16_384, "gpu": 16_384}
MEAN_SHARE = 0.3  # of the limit is what a response is expected to have
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
            f"--model={path} is a run's directory, which --workdir takes; dapo_jax.convert makes a "
            "model's of its policy"
        )
    if not config.model.family:
        model_type = read_config(path).get("model_type")
        config.model.family = model_type if model_type in families.BUILT_IN else "qwen2"
    if not config.model.compute_dtype:
        config.model.compute_dtype = "float32" if memory.device_limit() is None else "bfloat16"
    if not r.max_prompt_tokens:  # as many as there can be, until the data has been read
        positions = _positions(config)
        reserved = r.max_response_tokens or (positions // 2 if training else 1)
        r.max_prompt_tokens = positions - reserved
        if training:
            r.max_prompt_tokens = min(r.max_prompt_tokens, base.KEYS[PROMPT_KEY].default)
        if r.max_prompt_tokens < 1:
            raise ValueError(
                f"rollout.max_response_tokens = {r.max_response_tokens} leaves no position for a "
                f"prompt: {path} has {positions} (max_position_embeddings in its config.json)"
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


def fit_data(config: ConfigDict, data: components.Data, *, given: Mapping) -> None:
    """Fills in a training config's lengths and first generation batch.

    data: without sets where it is not read (preflight). given: the values before `fit_model`.
    """
    r, train = config.rollout, data.train
    known = given[PROMPT_KEY] or not data.sets
    longest = r.max_prompt_tokens if known else data.longest_prompt()
    fit_lengths(config, longest, most=LONGEST_TRAINED)
    if not r.generation_prompts:
        there = [len(train.sets[key].prompts) / share for key, share in train.shares.items()]
        r.generation_prompts = max(1, int(min([2 * r.num_prompts, *there])))


def _positions(config: ConfigDict) -> int:
    path = hub.local(config.model.path)
    return components.positions_of(path, load_config(path)) or 2 * LONGEST_RESPONSE


def fit_training(config: ConfigDict, *_, devices=None, device_bytes: int | None = None) -> None:
    """Fills in the sizes that a training config leaves open (0), whatever its tokenizer and data.

    A micro-batch has as many tokens as keep the devices busy, but no more than half of what an
    update is expected to have: the rest of the last one is padding. Its rows hold the longest
    sequence. devices, device_bytes: of a compile-only topology; None: this program's.
    """
    c, r = config.learner, config.rollout
    mesh = components.mesh_of(config, devices)
    degree = rules.row_degree(mesh)
    most = MICRO_BATCH_TOKENS.get(platform_of(mesh), MICRO_BATCH_TOKENS["tpu"])
    of_group = r.max_prompt_tokens + r.group_size * MEAN_SHARE * r.max_response_tokens
    expected = r.num_prompts / config.updates_per_step * of_group / degree
    tokens = min(most, int(expected / 2))
    kernels = kernels_for(config.model.kernels, platform_of(mesh))
    largest = kernels.page_tokens(r.page_tokens, 1)  # of all sizes of heads
    longest = r.max_prompt_tokens + r.max_response_tokens - 1
    longest += kernels.of_pages(largest).part_multiple - 1  # before the response
    multiple = learner.row_multiple(longest)
    if not c.row_tokens:
        # Two rows where there is enough: attention costs by the row's length.
        row = tokens if tokens < most else most // 2
        c.row_tokens = -(-max(longest, row) // multiple) * multiple
    if not c.micro_batch_rows:
        c.micro_batch_rows = degree * max(1, tokens // c.row_tokens)
    requests = r.generation_prompts * r.group_size
    fit_cache(config, requests, training=True, devices=devices, device_bytes=device_bytes)


def fit_cache(config, requests: int, *, training=False, devices=None, device_bytes=None) -> None:
    """Fills in the cache: slots for so many requests, as memory and a CPU's cores allow.

    training: whether the training state is on the devices too. devices, device_bytes: as of
    `fit_training`. Raises ValueError where not one request fits beside the weights.
    """
    r = config.rollout
    r.slot_tokens = r.slot_tokens or max(1, math.ceil(r.max_response_tokens * SLOT_SHARE))
    if r.cache_mib:
        return
    sizes, mesh = components.model_sizes(config), components.mesh_of(config, devices)
    kernels = kernels_for(config.model.kernels, platform_of(mesh))
    wanted = min(MOST_SLOTS, -(-requests // rules.row_degree(mesh)))
    if platform_of(mesh) == "cpu":
        parameters = count_parameters(abstract_params(sizes)[1])
        enough = -(-CPU_SLOTS_TIMES_PARAMETERS // (parameters * rules.row_degree(mesh)))
        wanted = min(wanted, max(FEWEST_CPU_SLOTS, enough))
    if (device := device_bytes or memory.device_limit()) is None:
        most = HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most /= jax.local_device_count()
    else:
        r.cache_mib = ANY_CACHE_MIB  # of these programs only what lies beside it is asked
        built = components.programs(config, 0, devices=devices)
        r.cache_mib = 0
        held = memory.beside_cache(built) if training else memory.device_bytes(built.engine.params)
        most = CACHE_SHARE * (device - held)
    most_mib = int(min(hosts.gather(most)) / 2**20)  # all processes have the same programs

    def slots(mib: int) -> int:
        try:
            size = mib * 2**20
            return components.cache_of(config, sizes, mesh, kernels, cache_bytes=size).slots
        except ValueError:
            return 0

    # The fewest that hold the requests: rows of more slots are computed in every step.
    mib = 1 + bisect.bisect_left(range(1, max(1, most_mib)), wanted, key=slots)
    if most_mib < mib or not slots(mib):
        whole = f" of {device / 2**20:,.0f}" if device else ""
        raise ValueError(
            f"a prompt of {r.max_prompt_tokens:,} tokens with a response of "
            f"{r.max_response_tokens:,} (rollout.max_response_tokens, --max_tokens) does not fit "
            f"in the {max(0, most_mib):,} MiB that a device{whole} has for the cache; "
            "lower that or rollout.page_tokens, or raise mesh.model"
        )
    r.cache_mib = mib
