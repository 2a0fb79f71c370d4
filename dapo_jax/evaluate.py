"""Evaluates a policy on sets of problems: mean@k, pass@k and maj@k.

    python -m dapo_jax.evaluate --config=configs/tiny.py --workdir=DIR [--step=N]

evaluates the checkpoint after N rollout steps (default: the newest) into
DIR/eval/N.<set>.<settings>.json, and the responses beside it. The run in DIR may be going on. The
config has to be the run's in all that makes the policy; how it is evaluated may differ.
"""

import collections
import json
import math
import pathlib
import zlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs.base import eval_settings
from dapo_jax.rollout import collect
from dapo_jax.run import build, checks, command
from dapo_jax.run.alarms import require_finite_start
from dapo_jax.run.display import evaluation_line
from dapo_jax.run.files import read_json
from dapo_jax.run.metrics import TASK, mean_measures
from dapo_jax.run.record import (
    result_row,
    settings_label,
    write_own_results,
    write_responses,
)
from dapo_jax.sampler.session import Session
from dapo_jax.types import Group, Verdict
from sharding import hosts


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimates, unbiased, how likely k samples hold a correct one (arXiv 2107.03374, Eq. 1)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_is_correct(verdicts: Sequence[Verdict]) -> bool:
    """Says whether the most frequent prediction is right (maj@k); the earliest wins a tie.

    Responses without a prediction have no vote.
    """
    votes = collections.Counter(v.prediction for v in verdicts if v.prediction is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(v.correct for v in verdicts if v.prediction == winner)


def summarize(groups: Sequence[Group]) -> dict[str, float]:
    """Summarizes one set from its groups of k responses: scores are means over problems."""
    correct_PK = np.stack([group.correct_G for group in groups])
    length_PK = np.stack([group.length_G for group in groups])
    k = correct_PK.shape[1]
    responses = [response for group in groups for response in group.responses]
    powers = [2**i for i in range(1, k.bit_length()) if 2**i < k] + [k]
    return {
        f"mean@{k}": float(correct_PK.mean()),
        f"maj@{k}": float(
            np.mean([majority_is_correct([r.verdict for r in g.responses]) for g in groups])
        ),
        **{
            f"pass@{n}": float(np.mean([pass_at_k(k, int(c), n) for c in correct_PK.sum(axis=1)]))
            for n in powers
        },
        "problems": len(groups),
        "response_tokens/mean": float(length_PK.mean()),
        "truncated_fraction": float(1 - np.mean([group.stopped_G for group in groups])),
        "no_answer_fraction": float(
            np.mean([response.verdict.prediction is None for response in responses])
        ),
        **{f"{TASK}{name}": mean for name, mean in mean_measures(responses).items()},
    }


def evaluate(
    config: ConfigDict,
    programs: build.Programs,
    params,
    sets: dict[str, build.EvalSet],
    *,
    report: Callable[[str], None],
    keep: Callable[[str, Sequence[Group]], None] = lambda name, groups: None,
) -> dict[str, dict[str, float]]:
    """Evaluates every set. `params` are the sampler's; the randomness is the same each time.

    keep: is given each set's name and groups of responses.
    """
    results = {}
    for name, chosen in sets.items():
        prompts = chosen.dataset.prompts
        stream = build.key(config, build.EVAL_STREAM)
        key = jax.random.fold_in(stream, zlib.crc32(name.encode()))  # each set its own
        rollouts = collect(
            Session(programs.engine, params, key, chosen.sampling),
            prompts.__getitem__,
            chosen.dataset.grade,
            0,
            group_size=chosen.k,
            num_prompts=len(prompts),
            max_prompts=len(prompts),
            expected_rate=1.0,
            dynamic_sampling=False,
            report=lambda message, name=name: report(f"evaluate {name}: {message}"),
        )
        results[name] = summarize(rollouts.sampled)
        keep(name, rollouts.sampled)
    return results


def settings_of(config: ConfigDict) -> dict[str, dict]:
    """Returns all that an evaluation's numbers depend on beside the policy, by set; JSON-able."""
    common = {
        "seed": config.seed,
        "max_prompt_tokens": config.rollout.max_prompt_tokens,
        "max_response_tokens": config.rollout.max_response_tokens,
        "compute_dtype": config.model.compute_dtype,
    }
    filled = {name: settings | common for name, settings in eval_settings(config).items()}
    return json.loads(json.dumps(filled))  # tuples become lists, as they are read back


def check_same_policy(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Refuses a config that makes another policy than the run's in `workdir` (ValueError).

    Without a config.json there is nothing to compare; `check_recipe` compares the checkpoint's.
    """
    file = workdir / "config.json"
    if file.exists():
        check_recipe(config, read_json(file), f"the run in {workdir}")


def check_recipe(config: ConfigDict, theirs: dict, where: str) -> None:
    """Refuses a config that makes another policy than a run's recipe does (ValueError).

    That is the model, its tokenizer and LoRA's shape, and the seed where it makes the weights. A
    path may be written in another way.
    """
    ours = json.loads(config.to_json_best_effort())
    compared = checks.POLICY_KEYS + (() if config.model.path else ("seed",))
    differing = checks.recipe_differences(theirs, ours, among=compared, but=checks.FREE_KEYS)
    if differing:
        raise ValueError(
            f"{where} is of another policy: {'; '.join(differing)}. Give the run's recipe and "
            "values (its config.json), or its own --workdir"
        )


def main(_):
    config = CONFIG.value
    hosts.start(several=DISTRIBUTED.value, cpu_devices=config.mesh.cpu_devices)
    checks.check(config)
    if not eval_settings(config):
        raise ValueError("eval.sets has no set with k > 0: there is nothing to evaluate; add one")
    workdir = pathlib.Path(WORKDIR.value)
    hosts.on_main(lambda: require_directory(workdir))
    hosts.on_main(lambda: check_same_policy(config, workdir))
    say = print if hosts.is_main_host() else lambda message: None
    tokenizer = build.tokenizer(config)
    programs = build.programs(config, tokenizer.vocab_size)
    data = build.load_data(config, tokenizer, training=False)
    say("\n".join(data.report_lines()))
    checkpoints = build.checkpoints(config, workdir, keep=None)
    step = hosts.on_main(checkpoints.latest_step) if STEP.value is None else STEP.value
    if step is None:
        raise FileNotFoundError(f"{checkpoints.directory} is empty: there is nothing to evaluate")
    if step == 0:
        params = programs.start_params()
    else:
        params = checkpoints.restore(step, programs.state)[0].params
        if identity := checkpoints.identity_of(step):
            where = f"checkpoint {step} in {checkpoints.directory}"
            check_recipe(config, identity["recipe"], where)
    checkpoints.close()
    # LoRA adapts them; the KL term, which needs them too, is training's.
    start_weights = programs.load_start_weights() if programs.learning.lora else None
    require_finite_start(programs, checkpoints.directory, step, params, start_weights)
    sampler_params = programs.reshard(params, start_weights)
    settings = settings_of(config)

    def keep(name, groups):
        if hosts.is_main_host():
            label = settings_label(settings[name])
            write_responses(workdir, f"{step}.{name}.{label}", groups)

    results = evaluate(config, programs, sampler_params, data.eval_sets, report=say, keep=keep)
    paths = write_own_results(workdir, step, results, settings)
    say(evaluation_line({"step": step - 1, **result_row(results)}))
    for name, scores in results.items():
        if scores["no_answer_fraction"] > 0.8:
            say(no_answer_line(name, eval_settings(config)[name], scores["no_answer_fraction"]))
    say(f"written to {' '.join(map(str, paths))}, the responses to .jsonl.gz beside it")


def no_answer_line(name: str, settings: dict, fraction: float) -> str:
    """Says that hardly a response had an answer, and which settings it may be."""
    return (
        f"{name}: {fraction:.0%} of the responses have no answer that is found; does the prompt "
        f"say where to put it? (eval.sets.{name}.template = {settings['template']!r}, rules = "
        f'{settings["rules"]!r}; template=dapo asks for a line "Answer: ...")'
    )


def require_directory(workdir: pathlib.Path) -> None:
    """Raises FileNotFoundError where there is no such directory."""
    if not workdir.is_dir():
        raise FileNotFoundError(f"--workdir={workdir}: there is no such directory")


if __name__ == "__main__":
    CONFIG = command.define_config()
    WORKDIR = command.define_workdir()
    STEP = flags.DEFINE_integer(
        "step", None, "Finished rollout steps of the checkpoint; 0: the start policy."
    )
    DISTRIBUTED = command.define_distributed()
    command.run(main)
