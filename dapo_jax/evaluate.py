"""Evaluates a policy on sets of problems: mean@k, pass@k and maj@k.

    python -m dapo_jax.evaluate --workdir=DIR [--step=N] [--config=configs/tiny.py]
    python -m dapo_jax.evaluate --model=MODEL --workdir=DIR --set=NAME:TASK:PATH \\
        [--k=32 --temperature=0.6 --top_p=0.95 --max_tokens=8192]

The first evaluates the checkpoint after N rollout steps ("best": by checkpoint.best; default: the
newest) of the run in DIR, which may be going on. The config has to be the run's in all that makes
the policy. The second evaluates a Hugging Face directory, or ORG/NAME on its hub, with no config
and no run (configs/any_model.py). Both write DIR/eval/N.<set>.<settings>.json and the responses
beside it; `python -m dapo_jax.report --evaluation FILE FILE` compares two, problem by problem.
"""

import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

from absl import flags
from ml_collections import ConfigDict

from configs import compare
from configs.base import eval_settings
from dapo_jax.cli import command, config_flags
from dapo_jax.evaluation import Evaluation, settings_of
from dapo_jax.logs import record
from dapo_jax.logs.display import evaluation_line
from dapo_jax.process import hosts
from dapo_jax.setup import auto_sizes, components, policy
from dapo_jax.tasks.base import BUILT_IN
from dapo_jax.tasks.readers import KINDS
from dapo_jax.tasks.tokenizer import Tokenizer

# The config of a model that comes without one, and this command's flags of it: (key, help).
ANY_MODEL = str(compare.ROOT / "configs" / "any_model.py")
SHORT = {
    "model": ("model.path", "A Hugging Face directory, or ORG/NAME; no config and no run needed."),
    "k": ("eval.samples_per_prompt", "Responses a problem."),
    "temperature": ("eval.temperature", "0: greedy decoding."),
    "top_p": ("eval.top_p", "The share of the probability that is sampled from."),
    "top_k": ("eval.top_k", "The likeliest tokens that are sampled from; 0: all."),
    "max_tokens": ("rollout.max_response_tokens", "Of a response, at most."),
}


def with_keys(arguments: Sequence[str]) -> list[str]:
    """Adds the keys of the config that the command's own flags stand for to a command line.

    Where it names no config, that of any model or the run's own, its mesh too. ValueError for
    --set flags that name no sets.
    """
    values = flags.FlagValues()
    for name in ("workdir", *SHORT):
        flags.DEFINE_string(name, None, "", flag_values=values)
    flags.DEFINE_multi_string("set", [], "", flag_values=values)
    values(["", *arguments], known_only=True)
    sets = [named_set(text) for text in values.set]
    if len(dict(sets)) < len(sets):
        raise ValueError(f"--set={values.set}: each set has a name of its own")
    keys = {f"eval.sets.{name}.{key}": it[key] for name, it in sets for key in it}
    keys |= {key: values[name].value for name, (key, _) in SHORT.items() if values[name].present}
    given = [*arguments, *(f"--config.{key}={value}" for key, value in keys.items())]
    if any(re.match(r"--?config(=|$)", argument) for argument in arguments):
        return given
    of_run = values.workdir and not values.model
    file = pathlib.Path(values.workdir, "config.json") if of_run else ANY_MODEL
    return [f"--config={file}", *given]


def named_set(text: str) -> tuple[str, dict[str, str]]:
    """Reads NAME:TASK:PATH; TASK may be a kind of file, or module:Class; PATH may be empty."""
    name, _, rest = text.partition(":")
    task, colon, path = rest.partition(":")
    if colon and task not in BUILT_IN and task not in KINDS:
        class_name, _, path = path.partition(":")
        colon = class_name.isidentifier() and not path.startswith("//")  # not of gs://bucket
        task = f"{task}:{class_name}"
    if not name.isidentifier() or not task or not colon:
        raise ValueError(
            f"--set={text}: must be NAME:TASK:PATH, for instance aime24:math:aime24.jsonl; TASK is "
            f"{', '.join(BUILT_IN)}, a custom module:Class, or a kind of file: {', '.join(KINDS)}"
        )
    return name, {"kind" if task in KINDS else "task": task, "path": path}


def main(_):
    given, config, workdir = flags.FLAGS, flags.FLAGS.config, pathlib.Path(flags.FLAGS.workdir)
    hosts.start(several=given.distributed, cpu_devices=config.mesh.cpu_devices)
    say = print if hosts.is_main_host() else lambda message: None
    if not eval_settings(config):
        raise ValueError(
            "eval.sets has no set with k > 0: there is nothing to evaluate; add one "
            "(--set=NAME:TASK:PATH)"
        )
    if given.model:
        if (workdir / "config.json").exists():
            raise ValueError(f"--workdir={workdir} is a run's; give --model another one")
        hosts.on_main(lambda: (workdir / "eval").mkdir(parents=True, exist_ok=True))
        config.learner.lora_rank = 0  # a model alone has no factors
        run = policy.open_policy(config, None, fit_model, evaluates=True)
    else:
        run = policy.open_policy(config, workdir, evaluates=True, step=given.step)
    config = run.config
    say("\n".join([*run.chosen, *run.data.report_lines()]))
    settings = settings_of(config, of_model=bool(given.model))

    def keep(name, groups):
        if hosts.is_main_host():
            label = record.settings_label(settings[name])
            record.write_responses(workdir, f"{run.step}.{name}.{label}", groups)

    streams = components.eval_streams(config, run.tokenizer, run.data.eval_sets)
    with Evaluation(run.session(run.weights, *streams)) as evaluation:
        results = evaluation.finish(report=say, keep=keep)
    paths = record.write_own_results(workdir, run.step, results, settings)
    say(evaluation_line(run.step, record.result_row(results)))
    for name, scores in results.items():
        say(interval_line(name, scores, settings[name]))
        if (share := scores["no_answer_fraction"]) > 0.8:
            reads = {key: settings[name][key] for key in ("task", "template", "rules")}
            say(f"{name}: {share:.0%} of the responses have no answer that is found by {reads}")
    say(f"written to {' '.join(map(str, paths))}, the responses to .jsonl.gz beside it")


def fit_model(config: ConfigDict, tokenizer: Tokenizer, data: components.Data) -> None:
    """Fills in lengths and cache for the evaluation sets of a model alone."""
    auto_sizes.fit_lengths(config, data.longest_prompt())
    responses = sum(len(it.prompts) * it.k for it in data.eval_sets.values())
    auto_sizes.fit_cache(config, responses)


def interval_line(name: str, scores: Mapping[str, float], settings: Mapping) -> str:
    """Says a set's mean over problems, its 95 % confidence interval, and how it was sampled."""
    mean = next(key for key in scores if key.startswith("mean@"))
    return (
        f"{name}: {mean} {scores[mean]:.1%} [{scores['interval/low']:.1%}, "
        f"{scores['interval/high']:.1%}] (95 %, over {scores['problems']} problems; temperature "
        f"{settings['temperature']:g}, top-p {settings['top_p']:g}, top-k {settings['top_k']})"
    )


if __name__ == "__main__":
    for flag, (key_, help_) in SHORT.items():
        flags.DEFINE_string(flag, None, f"{help_} Sets --config.{key_}.")
    flags.DEFINE_multi_string("set", [], "NAME:TASK:PATH of a set; TASK may be a kind of file.")
    try:
        sys.argv[1:] = with_keys(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    config_flags.define_config()
    command.define_workdir()
    flags.DEFINE_string("step", None, "Of a run: finished steps of the checkpoint, or best.")
    command.define_distributed()
    command.run(main)
