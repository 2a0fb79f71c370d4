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
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs.base import eval_settings
from dapo_jax.rollout import Grading
from dapo_jax.run import build, checks, command, compiled
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
from dapo_jax.sampler.session import Session, Stream
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


class Evaluation:
    """Evaluates sets in a session that may sample other groups beside theirs.

    All requests are submitted at once: where this is done first, the tails of training's groups and
    theirs overlap. What each gives depends on the weights alone. Use it as a context manager.

    first_stream: of the session's streams that of the first set; the others' follow.
    """

    def __init__(self, session: Session, sets: Mapping[str, build.EvalSet], *, first_stream: int):
        self._session = session
        self._sets = dict(enumerate(sets.items(), start=first_stream))
        self._groups: list[Group] = []
        # Not through `self`: in a cycle the session, with its pages and the weights, would outlive
        # its last use until Python looks for cycles.
        graders = {stream: chosen.dataset.grade for stream, (_, chosen) in self._sets.items()}
        self._grading = Grading(lambda group: graders[group.stream](group))
        for stream, (_, chosen) in self._sets.items():
            for cursor, prompt in enumerate(chosen.dataset.prompts):
                session.submit(cursor, prompt, group_size=chosen.k, stream=stream)

    def __enter__(self) -> "Evaluation":
        return self

    def __exit__(self, *error) -> None:
        self._grading.__exit__(*error)

    def take(self, finished: Sequence[Group]) -> None:
        """Takes finished groups of the sets; they are graded behind the decoding."""
        self._groups += self._grading.exchange(finished)

    def finish(
        self,
        *,
        report: Callable[[str], None],
        keep: Callable[[str, Sequence[Group]], None] = lambda name, groups: None,
    ) -> dict[str, dict[str, float]]:
        """Samples what is unfinished, which is theirs alone, and returns each set's scores.

        keep: is given each set's name and groups of responses.
        """
        while self._session.unfinished:
            report(f"evaluate: {len(self._session.unfinished)} groups to go")
            self.take(self._session.step())
        self.take([])
        results = {}
        for stream, (name, _) in self._sets.items():
            groups = [group for group in self._groups if group.stream == stream]
            groups.sort(key=lambda group: group.cursor)
            results[name] = summarize(groups)
            keep(name, groups)
        return results


def streams(config: ConfigDict, sets: Mapping[str, build.EvalSet]) -> list[Stream]:
    """Returns the streams of the sets, each with its own randomness, the same each time."""
    stream = build.key(config, build.EVAL_STREAM)
    return [
        Stream(jax.random.fold_in(stream, zlib.crc32(name.encode())), chosen.sampling)
        for name, chosen in sets.items()
    ]


def evaluate(
    config: ConfigDict,
    programs: build.Programs,
    params,
    sets: Mapping[str, build.EvalSet],
    *,
    report: Callable[[str], None],
    keep: Callable[[str, Sequence[Group]], None] = lambda name, groups: None,
) -> dict[str, dict[str, float]]:
    """Evaluates the sets alone, with programs for them. `params` are the sampler's.

    keep: is given each set's name and groups of responses.
    """
    session = Session(programs.engine, params, *streams(config, sets))
    with Evaluation(session, sets, first_stream=0) as evaluation:
        return evaluation.finish(report=report, keep=keep)


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
    compiled.keep(several=DISTRIBUTED.value)
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
    say(evaluation_line(step, result_row(results)))
    for name, scores in results.items():
        if scores["no_answer_fraction"] > 0.8:
            say(no_answer_line(name, eval_settings(config)[name], scores["no_answer_fraction"]))
    say(f"written to {' '.join(map(str, paths))}, the responses to .jsonl.gz beside it")


def no_answer_line(name: str, settings: dict, fraction: float) -> str:
    """Says that hardly a response had an answer, and which settings it may be."""
    share = f"{name}: {fraction:.0%} of the responses have no answer that is found"
    if settings["task"]:
        return f"{share}; does eval.sets.{name}.task = {settings['task']!r} grade what it writes?"
    return (
        f"{share}; does the prompt say where to put it? (eval.sets.{name}.template = "
        f"{settings['template']!r}, rules = {settings['rules']!r}; template=dapo asks for a line "
        '"Answer: ...")'
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
