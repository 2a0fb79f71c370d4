"""Refusals of a run's settings, each with the value, the limit and the key to change."""

import dataclasses
from collections.abc import Iterator

import jax
from ml_collections import ConfigDict

from configs.base import eval_settings, key_of, leaves, mixture_settings
from dapo_jax.cli.config_flags import refuse
from models.families import Family
from models.lora import MATRICES
from models.parameters import ModelConfig
from sharding import rules

Conditions = Iterator[tuple[bool, str]]  # each holds, or is refused in these words


def check(config: ConfigDict) -> None:
    """Refuses settings that cannot work, as the config alone tells (ValueError): all at once."""
    conditions = (*_of_config(config), *_of_algorithm(config))
    refuse([refusal for holds, refusal in conditions if not holds])


def _of_config(config: ConfigDict) -> Conditions:
    for name, value in leaves(config):
        refusal = key_of(name).refusal(value)
        yield not refusal, f"{name} = {value!r}, {refusal}"
    for name, settings in eval_settings(config).items():
        message = f"eval.sets.{name}.weight is set, but is for training sets"
        yield config.eval.sets[name].weight is None, message
        yield (
            settings["temperature"] > 0 or settings["k"] == 1,
            f"eval.sets.{name} is decoded greedily (temperature = 0): set k to 1, as its "
            f"{settings['k']} responses to a problem would all be the same",
        )
    best, sets = config.checkpoint.best, eval_settings(config) if config.eval.every_steps else {}
    message = f"checkpoint.best = {best!r}, but the evaluation sets are {', '.join(sets) or 'none'}"
    yield best in ("", *sets), message
    every, partial = config.checkpoint.every_steps, config.rollout.partial_rollout_steps
    yield (
        not (best and partial) or config.eval.every_steps % max(every, 1) == 0,
        f"checkpoint.best = {best!r}, but with partial rollouts a policy is saved at multiples of "
        f"checkpoint.every_steps = {every} only: set eval.every_steps to one",
    )
    training = mixture_settings(config)
    yield bool(training), "data.train.weight = 0, and no set of data.mixture has a weight"
    for key, settings in training.items():
        for name in ("k", "temperature", "top_p", "top_k"):
            message = f"{key}.{name} is set, but is for evaluation sets; set rollout's keys"
            yield settings[name] is None, message
    r = config.rollout
    longest = r.max_prompt_tokens + r.max_response_tokens - 1
    yield (
        config.learner.row_tokens == 0 or config.learner.row_tokens >= longest,
        f"learner.row_tokens = {config.learner.row_tokens} does not hold the longest sequence: "
        f"rollout.max_prompt_tokens + max_response_tokens - 1 = {longest}",
    )

    yield (
        not (r.open_environments and r.partial_rollout_steps),
        f"rollout.open_environments = {r.open_environments}, but episodes that go on in the next "
        "step (rollout.partial_rollout_steps) stay open: set one of the two to 0",
    )


def _of_algorithm(config: ConfigDict) -> Conditions:
    r, a = config.rollout, config.algo
    yield (
        a.eps_low < 1 or (a.eps_low == 1 and a.policy_loss == "cispo"),
        f"algo.eps_low = {a.eps_low}, but the ratio's bound 1 - eps_low is > 0 (algo.policy_loss = "
        "'cispo' may do without, with 1.0)",
    )
    yield (
        a.tis_cap == 0 or a.old_logprobs == "learner",
        f"algo.tis_cap = {a.tis_cap} weighs the learner's old log-probabilities, but "
        f"algo.old_logprobs = {a.old_logprobs!r}; set that to 'learner'",
    )
    yield (
        a.tis_cap == 0 or a.ratio == "token",
        f"algo.tis_cap = {a.tis_cap} is for single tokens, but algo.ratio = {a.ratio!r} is not",
    )
    yield (
        not config.updates_per_step or r.num_prompts % config.updates_per_step == 0,
        f"rollout.num_prompts = {r.num_prompts} does not divide by updates_per_step = "
        f"{config.updates_per_step}",
    )
    capacity = r.generation_prompts * r.max_generation_batches
    yield (
        not (a.dynamic_sampling and capacity) or capacity >= r.num_prompts,
        f"rollout.generation_prompts * max_generation_batches = {capacity} prompts can never give "
        f"rollout.num_prompts = {r.num_prompts} informative groups",
    )
    yield (
        not r.max_response_tokens or a.overlong_cache_tokens <= r.max_response_tokens,
        f"algo.overlong_cache_tokens = {a.overlong_cache_tokens} exceeds "
        f"rollout.max_response_tokens = {r.max_response_tokens}",
    )


def check_model(
    config: ConfigDict, family: Family, sizes: ModelConfig, positions: int | None
) -> None:
    """Refuses a model directory that family, preset or lengths do not fit (ValueError).

    positions: how many the directory names; None: none.
    """
    path, preset, refusals = config.model.path, config.model.preset, []
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if positions is not None and longest > positions:
        refusals.append(
            f"rollout.max_prompt_tokens + max_response_tokens = {longest} exceeds the {positions} "
            f"positions of {path} (max_position_embeddings in its config.json; rope_scaling of "
            "type 'yarn' makes them more)"
        )
    if type(sizes) is not family.config:
        refusals.append(
            f"model.family = {config.model.family!r} computes model_type "
            f"{family.config.model_type!r}, but {path} has {sizes.model_type!r}; set model.family "
            "to that"
        )
    elif preset:
        ours, theirs = (dataclasses.asdict(c) for c in (family.presets[preset], sizes))
        if wrong := [f"{k} is {theirs[k]}, not {v}" for k, v in ours.items() if theirs[k] != v]:
            refusals.append(
                f"{path} is no model of the sizes model.preset = {preset!r}: {'; '.join(wrong)}"
            )
    refuse(refusals)


def check_lora(learner: ConfigDict, sizes: ModelConfig) -> None:
    """Refuses LoRA of matrices that a model lacks, or of none (ValueError)."""
    matrices = {p.name.partition("_")[0] for p in sizes.layer.parameters if "E" not in p.axes}
    able = [target for target in MATRICES if target in matrices]
    targets = tuple(learner.lora_targets)
    if learner.lora_rank and (not targets or set(targets) - set(able)):
        raise ValueError(
            f"learner.lora_targets = {targets}, but LoRA of model_type {sizes.model_type!r} "
            f"adapts {', '.join(able)}: name some of these (experts and routers are left alone)"
        )


def check_divides(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Refuses a training batch that the mesh's groups of devices do not divide (ValueError)."""
    degree, rows = rules.row_degree(mesh), config.learner.micro_batch_rows
    if rows % degree:
        shape = " * ".join(f"{axis} {mesh.shape[axis]}" for axis in rules.ROW_AXES)
        nearest = max(degree, round(rows / degree) * degree)
        raise ValueError(
            f"learner.micro_batch_rows = {rows} does not divide over the mesh's {shape} = {degree} "
            f"groups of devices; the nearest that does is {nearest}"
        )


def check_enough_prompts(config: ConfigDict, key: str, prompts: int, share: float) -> None:
    """Refuses a training set of fewer prompts than its share of a generation batch (ValueError)."""
    size = "generation_prompts" if config.algo.dynamic_sampling else "num_prompts"
    taken = config.rollout[size]
    if prompts < int(share * taken):
        part = "" if share == 1 else f"its part, {share:.1%}, of "
        raise ValueError(
            f"{key} has {prompts} usable prompts, fewer than {part}one generation batch of "
            f"rollout.{size} = {taken}; lower that" + (f" or {key}.weight" if part else "")
        )
