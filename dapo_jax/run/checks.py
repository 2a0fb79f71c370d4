"""Every refusal of a run's settings, each with the value, the limit and the key to change."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import numpy as np
from ml_collections import ConfigDict

from configs.base import eval_settings, mixture_settings
from dapo_jax import algorithm, losses
from dapo_jax.run.files import read_json
from dapo_jax.run.recipes import MAY_CHANGE, recipe_differences
from dapo_jax.sampler.cache import DRAFT_TOKENS
from dapo_jax.tasks.math_problems import RULES
from models.families import Family
from models.lora import MATRICES
from models.parameters import ModelConfig
from models.transformer import REMAT
from sharding import rules

# What devices have numbers in: the least normal one, and the greatest.
TINY32, MAX32 = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
CHOICES = {
    "model.compute_dtype": ("float32", "bfloat16"),
    "algo.loss": losses.LOSSES,
    "algo.ratio": losses.RATIOS,
    "algo.gate": losses.GATES,
    "algo.advantage_scale": losses.ADVANTAGES,
    "algo.loss_aggregation": losses.AGGREGATIONS,
    "algo.filter_groups": algorithm.FILTERS,
    "verifier.rules": RULES,
    "rollout.on_generation_cap": ("train", "stop"),
    "rollout.draft_tokens": DRAFT_TOKENS,
    "data.on_bad_row": ("error", "skip"),
    "tokenizer.chat": ("none", "template"),
    "learner.remat": tuple(REMAT),
    "checkpoint.on_failed_save": ("stop", "continue"),
}
# What a number must be -> (the keys, the test).
BOUNDS = {
    "at least 1": (
        """num_steps updates_per_step rollout.num_prompts rollout.max_prompt_tokens
        rollout.max_response_tokens rollout.generation_prompts rollout.max_generation_batches
        rollout.cache_mib rollout.slot_tokens rollout.page_tokens rollout.block_tokens
        learner.micro_batch_rows learner.max_skipped_updates eval.samples_per_prompt
        checkpoint.every_steps checkpoint.keep mesh.slices""",
        lambda value: value >= 1,
    ),
    "at least 0, and finite in float32": (
        """rollout.top_k rollout.carry_over_steps algo.eps_low algo.eps_high algo.kl_coef
        algo.kl_cov_coef algo.tis_cap algo.overlong_factor algo.overlong_cache_tokens
        learner.warmup_steps learner.weight_decay learner.lora_rank alarms.min_entropy
        alarms.max_ratio_gap eval.every_steps eval.max_prompts mesh.cpu_devices
        log.samples_every_steps log.rollouts_every_steps eval.temperature""",
        lambda value: 0 <= value <= MAX32,
    ),
    "greater than 0 and finite in float32": (
        "rollout.temperature learner.adam_eps learner.max_grad_norm learner.lora_alpha",
        lambda value: TINY32 <= value <= MAX32,
    ),
    "greater than 1 and finite in float32": ("algo.dual_clip", lambda value: 1 < value <= MAX32),
    "over 0 and at most 1": (
        "rollout.top_p learner.learning_rate eval.top_p algo.kl_cov_share",
        lambda value: 0 < value <= 1,
    ),
    "from 0 to 1": ("algo.retire_pass_rate", lambda value: 0 <= value <= 1),
    "from 0 to below 1": ("learner.adam_b1 learner.adam_b2", lambda value: 0 <= value < 1),
    "from 0 to 4294967295": ("seed", lambda value: 0 <= value < 2**32),
}

# What makes a policy, beside its weights: the model, its tokenizer and LoRA's shape. Where and how
# it is computed may differ.
POLICY_KEYS = ("model.", "tokenizer.", "learner.lora_")
FREE_KEYS = ("model.kernels",)


def check(config: ConfigDict) -> None:
    """Refuses settings that cannot work, as far as the recipe alone tells (ValueError)."""

    def value(name: str):
        return functools.reduce(getattr, name.split("."), config)

    for name, choices in CHOICES.items():
        message = f"{name} = {value(name)!r}; choose one of {', '.join(map(str, choices))}"
        _require(value(name) in choices, message)
    for bound, (names, holds) in BOUNDS.items():
        for name in names.split():
            _require(holds(value(name)), f"{name} = {value(name)}, but must be {bound}")
    _check_algorithm(config)
    _check_lora(config.learner)
    for name, settings in eval_settings(config).items():
        _check_data_set(f"eval.sets.{name}", settings)
        message = f"eval.sets.{name}.weight is set, but is for training sets; see max_prompts"
        _require(config.eval.sets[name].weight is None, message)
        _require(
            settings["temperature"] > 0 or settings["k"] == 1,
            f"eval.sets.{name} is decoded greedily (temperature = 0): its {settings['k']} "
            "responses to a problem would all be the same; set k to 1",
        )
    training = mixture_settings(config)
    message = "data.train.weight = 0, and no set of data.mixture has a weight: nothing to train on"
    _require(bool(training), message)
    _require(
        len(training) == 1 or config.algo.retire_pass_rate == 0,
        f"algo.retire_pass_rate = {config.algo.retire_pass_rate}, but there are {len(training)} "
        "training sets (data.mixture): prompts are retired by the epochs of one; set it to 0",
    )
    for key, settings in training.items():
        _check_data_set(key, settings)
        for name in ("k", "temperature", "top_p"):
            message = f"{key}.{name} is set, but is for evaluation sets; set rollout's keys"
            _require(settings[name] is None, message)
    r = config.rollout
    longest = r.max_prompt_tokens + r.max_response_tokens - 1
    _require(
        config.learner.row_tokens >= longest,
        f"learner.row_tokens = {config.learner.row_tokens} does not hold the longest sequence: "
        f"rollout.max_prompt_tokens + max_response_tokens - 1 = {longest}",
    )


def _check_algorithm(config: ConfigDict) -> None:
    r, a = config.rollout, config.algo
    _require(
        r.group_size >= 2,
        f"rollout.group_size = {r.group_size}, but a group of 1 has no advantage; use 2 or more",
    )
    _check_loss(a, r.carry_over_steps)
    _require(
        r.num_prompts % config.updates_per_step == 0,
        f"rollout.num_prompts = {r.num_prompts} does not divide by updates_per_step = "
        f"{config.updates_per_step}; each update takes the same number of groups",
    )
    capacity = r.generation_prompts * r.max_generation_batches
    _require(
        not a.dynamic_sampling or capacity >= r.num_prompts,
        f"rollout.generation_prompts * max_generation_batches = {r.generation_prompts} * "
        f"{r.max_generation_batches} = {capacity} prompts can never give rollout.num_prompts = "
        f"{r.num_prompts} informative groups; raise one of the first two",
    )
    _require(
        a.overlong_cache_tokens <= r.max_response_tokens,
        f"algo.overlong_cache_tokens = {a.overlong_cache_tokens} exceeds "
        f"rollout.max_response_tokens = {r.max_response_tokens}",
    )


def _check_loss(algo: ConfigDict, carry_over_steps: int) -> None:
    a = algo
    _require(
        a.eps_low < 1 or (a.eps_low == 1 and a.gate == "cispo"),
        f"algo.eps_low = {a.eps_low}, but the ratio's bound 1 - eps_low is > 0 (algo.gate = "
        "'cispo' may do without, with 1.0)",
    )
    for name, default in (("ratio", "token"), ("gate", "clip"), ("tis_cap", 0.0)):
        _require(
            a.loss == "dapo" or a[name] == default,
            f"algo.{name} = {a[name]!r} is a choice of algo.loss = 'dapo', but that is {a.loss!r}; "
            f"set algo.{name} = {default!r}",
        )
    _require(
        a.tis_cap == 0 or carry_over_steps > 0,
        f"algo.tis_cap = {a.tis_cap} is for tokens of earlier policies, which there are none of "
        "with rollout.carry_over_steps = 0; set that to 1 or more, or algo.tis_cap to 0",
    )
    _require(
        a.tis_cap == 0 or a.ratio == "token",
        f"algo.tis_cap = {a.tis_cap} is for single tokens, but algo.ratio = {a.ratio!r} is one of "
        "whole responses; set one of them to its default",
    )


def _check_lora(learner: ConfigDict) -> None:
    matrices = ", ".join(MATRICES)
    for target in learner.lora_targets:
        message = f"learner.lora_targets has {target!r}, which is unknown; there are {matrices}"
        _require(target in MATRICES, message)
    _require(
        learner.lora_rank == 0 or len(learner.lora_targets) > 0,
        f"learner.lora_rank = {learner.lora_rank}, but learner.lora_targets is empty; name some of "
        f"{matrices}",
    )


def _check_data_set(key: str, settings: dict) -> None:
    for name, holds, bound in (
        ("k", lambda k: k >= 1, "at least 1, or 0 to leave the set out"),
        ("max_prompts", lambda prompts: prompts >= 0, "at least 0"),
        ("weight", lambda value: 0 < value < math.inf, "finite and at least 0"),
        ("temperature", lambda value: 0 <= value < math.inf, "finite and at least 0"),
        ("top_p", lambda value: 0 < value <= 1, "over 0 and at most 1"),
        ("rules", lambda rules: rules in RULES, f"one of {', '.join(RULES)}"),
    ):
        value = settings.get(name)  # None: left open, as sampling is of the training set
        _require(value is None or holds(value), f"{key}.{name} = {value!r}, but must be {bound}")


def check_model(
    config: ConfigDict, family: Family, sizes: ModelConfig, positions: int | None
) -> None:
    """Refuses a model directory that the family, preset or lengths do not fit (ValueError).

    family: that of model.family. sizes: those of the directory model.path.
    positions: how many it was made for, where it says.
    """
    path, preset = config.model.path, config.model.preset
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    _require(
        positions is None or longest <= positions,
        f"rollout.max_prompt_tokens + max_response_tokens = {longest} exceeds the "
        f"{positions} positions of {path} (max_position_embeddings in its config.json; "
        "rope_scaling there with rope_type 'yarn' makes them more)",
    )
    _require(
        type(sizes) is family.config,
        f"model.family = {config.model.family!r} computes model_type {family.config.model_type!r}, "
        f"but {path} has {sizes.model_type!r} (in its config.json); set model.family to the family "
        "of the directory",
    )
    if preset and sizes != family.presets[preset]:
        ours, theirs = (dataclasses.asdict(c) for c in (family.presets[preset], sizes))
        differing = [f"{k} is {theirs[k]}, not {v}" for k, v in ours.items() if theirs[k] != v]
        raise ValueError(
            f"{path} is no model of the sizes model.preset = {preset!r}: {'; '.join(differing)}; "
            'give another path, or set model.preset to ""'
        )


def check_vocabulary(tokenizer_ids: int, sizes: ModelConfig) -> None:
    """Refuses a tokenizer with more ids than the model has embedding rows (ValueError)."""
    _require(
        tokenizer_ids <= sizes.vocab_size,
        f"the tokenizer has {tokenizer_ids} ids, but the model only {sizes.vocab_size} embedding "
        "rows; set tokenizer.path to the model's own tokenizer",
    )


def check_divides(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Refuses a training batch that the mesh's groups of devices do not divide (ValueError)."""
    ways, rows = rules.row_ways(mesh), config.learner.micro_batch_rows
    shape = " * ".join(f"{axis} {mesh.shape[axis]}" for axis in rules.ROW_AXES)
    _require(
        rows % ways == 0,
        f"learner.micro_batch_rows = {rows} does not divide over the mesh's {shape} = {ways} "
        f"groups of devices; the nearest that does is {max(ways, round(rows / ways) * ways)}",
    )


def generation_batch(config: ConfigDict) -> tuple[str, int]:
    """(the key of rollout, its value): the number of prompts that a step begins with."""
    size = "generation_prompts" if config.algo.dynamic_sampling else "num_prompts"
    return size, config.rollout[size]


def check_enough_prompts(config: ConfigDict, key: str, prompts: int, share: float) -> None:
    """Refuses a training set with fewer prompts than one generation batch takes (ValueError).

    key: the set's. share: the part of the prompts that are of this set.
    """
    size, taken = generation_batch(config)
    part = "" if share == 1 else f"its part, {share:.1%}, of "
    _require(
        prompts >= int(share * taken),
        f"{key} has {prompts} usable prompts, fewer than {part}one generation batch of "
        f"rollout.{size} = {taken}; add data or lower that key"
        + (f" or {key}.weight" if part else ""),
    )


def check_same_recipe(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Refuses a directory whose config.json is another recipe's, or cut short (ValueError)."""
    file = workdir / "config.json"
    if not file.exists():
        return
    try:
        theirs = read_json(file)
    except ValueError as error:
        raise ValueError(f"{error}; or remove it: checkpoints have the recipe too") from error
    ours = json.loads(config.to_json_best_effort())
    differing = recipe_differences(theirs, ours, but=MAY_CHANGE)
    _require(
        not differing,
        f"{workdir} holds a run of another recipe: {'; '.join(differing)}. Give the old "
        "values to resume it, or another --workdir to start a new run",
    )


def check_steps_left(config: ConfigDict, finished_steps: int, directory) -> None:
    """Refuses fewer steps than the run has done (ValueError)."""
    _require(
        finished_steps <= config.num_steps,
        f"num_steps = {config.num_steps}, but the run in {directory} has finished "
        f"{finished_steps} steps; give num_steps = {finished_steps} or more",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
