"""Readers of the reference vectors in ../shared/golden (see the README there).

Each takes the `shared` folder (the fixture of that name) and returns typed cases under the
project's names for things; `arrays` gives any part of policy_loss.npz as it is stored.
"""

import functools
import json
import pathlib
import types
from typing import Any

import numpy as np

REFERENCE_MODES = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}


class Case(types.SimpleNamespace):
    """One stored case; the function that reads it says which fields it has."""


def arrays(shared: pathlib.Path, prefix: str) -> dict[str, np.ndarray]:
    """The arrays of policy_loss.npz below `prefix`, named without it."""
    start = f"{prefix}/"
    return {
        name.removeprefix(start): array
        for name, array in _policy_loss(shared).items()
        if name.startswith(start)
    }


def rows(shared: pathlib.Path, file: str) -> list[dict[str, Any]]:
    """The objects of one JSON-lines file of ../shared/golden."""
    lines = (shared / "golden" / file).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def policy_loss_cases(shared: pathlib.Path) -> list[Case]:
    """Every `pl*` case: the inputs of one update's policy loss and the reference's results.

    Inputs are float32, results float64. aggregated: {mode: its loss and gradient_RT}.
    """
    cases = []
    for name in _case_names(shared, "pl"):
        stored = arrays(shared, name)
        eps_low, eps_high, dual_clip = stored["in/clip"].tolist()
        cases.append(
            Case(
                name=name,
                **_loss_inputs(stored),
                eps_low=eps_low,
                eps_high=eps_high,
                dual_clip=dual_clip,
                loss_RT=stored["mat64"],
                aggregated={
                    mode: _loss_and_gradient(stored, reference)
                    for mode, reference in REFERENCE_MODES.items()
                },
                clip_fraction=float(stored["pg_clipfrac64"]),
                dual_clip_fraction=float(stored["pg_clipfrac_lower64"]),
                mean_log_ratio=-float(stored["ppo_kl64"]),
            )
        )
    return cases


def accumulation_cases(shared: pathlib.Path) -> list[Case]:
    """Every `acc*` case: one mini-batch spread over ranks and micro-batches.

    true, legacy: the true loss and the reference's. Clip settings are not stored; the config's
    reproduce the numbers.
    """
    cases = []
    for name in _case_names(shared, "acc"):
        stored = arrays(shared, name)
        true, legacy = (
            {
                mode: _loss_and_gradient(stored, f"{reference}/{scope}")
                for mode, reference in REFERENCE_MODES.items()
            }
            for scope in ("global", "legacy")
        )
        cases.append(
            Case(
                name=name,
                **_loss_inputs(stored),
                eps_low=0.2,
                eps_high=0.28,
                dual_clip=10.0,
                rank_micro_R2=stored["in/rank_micro"],
                true=true,
                legacy=legacy,
            )
        )
    return cases


def advantage_cases(shared: pathlib.Path) -> list[Case]:
    """Every `grpo/*` case: rewards of groups and advantages; rows of a group follow each other."""
    cases = []
    for name in _case_names(shared, "grpo/"):
        stored = arrays(shared, name)
        num_groups = len(np.unique(stored["in/group"]))
        mask_RT = stored["in/mask"]
        first_token_R1 = mask_RT.argmax(axis=1, keepdims=True)
        advantage_R1 = np.take_along_axis(stored["adv"], first_token_R1, axis=1)
        cases.append(
            Case(
                name=name,
                reward_PG=stored["in/token_level_rewards"].sum(axis=1).reshape(num_groups, -1),
                advantage_PG=advantage_R1.reshape(num_groups, -1),
            )
        )
    return cases


def overlong_cases(shared: pathlib.Path) -> list[Case]:
    """Every `overlong/*` case: lengths, correctness, and the length penalties and rewards."""
    cases = []
    for name in _case_names(shared, "overlong/"):
        stored = arrays(shared, name)
        max_tokens, cache_tokens, factor = stored["in/cfg"].tolist()
        cases.append(
            Case(
                name=name,
                max_tokens=int(max_tokens),
                cache_tokens=int(cache_tokens),
                factor=factor,
                length_R=stored["in/length"],
                correct_R=stored["in/score"] > 0,
                penalty_R=stored["penalty"],
                reward_R=stored["reward"],
            )
        )
    return cases


def dynamic_sampling_cases(shared: pathlib.Path) -> list[Case]:
    """Every row of dynamic_sampling.jsonl: scripted generation batches and what is kept of them.

    filtered_by: the quantity whose variance the reference filters on. Where it gives up at the cap
    on generation batches, `error` names the exception and the results are None.
    """
    return [
        Case(
            name=row["id"],
            num_prompts=row["train_batch_size"],
            max_generation_batches=row["max_num_gen_batches"],
            filtered_by=row["metric"],
            correct_NPG=np.array([batch["acc"] for batch in row["gen_batches"]]),
            reward_NPG=np.array([batch["reward"] for batch in row["gen_batches"]]),
            kept_responses=row["kept_trajectories"],
            generation_batches=row["num_gen_batches"],
            error=row["error"],
        )
        for row in rows(shared, "dynamic_sampling.jsonl")
    ]


@functools.cache
def _policy_loss(shared: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(shared / "golden" / "policy_loss.npz") as stored:
        return dict(stored)


def _case_names(shared: pathlib.Path, start: str) -> list[str]:
    index = json.loads((shared / "golden" / "policy_loss_index.json").read_text(encoding="utf-8"))
    names = [name for name in index if name.startswith(start)]
    assert names, f"policy_loss_index.json names no case that starts with {start!r}"
    return sorted(names)


def _loss_inputs(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        "logp_RT": stored["in/new"],
        "behavior_logp_RT": stored["in/old"],
        "advantage_RT": stored["in/adv"],
        "mask_RT": stored["in/mask"],
    }


def _loss_and_gradient(stored: dict[str, np.ndarray], scope: str) -> Case:
    return Case(loss=float(stored[f"{scope}/loss64"]), gradient_RT=stored[f"{scope}/grad64"])
