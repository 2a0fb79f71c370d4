"""What TensorBoard shows beside numbers: recipe, samples, and a run's row of its HParams tab."""

import json
from collections.abc import Iterator, Mapping, Sequence

from dapo_jax.run.display import Sample, printable

# Of the recipe, what decides no number of a run.
NO_HPARAMS = ("log.", "checkpoint.", "alarms.", "mesh.")


def of_recipe(config: Mapping) -> str:
    """The recipe as Markdown; config: JSON-able."""
    return _block(json.dumps(config, indent=1))


def of_samples(samples: Sequence[Sample]) -> str:
    """Sampled responses with their verdicts as Markdown; nothing in them is read as such."""
    parts = []
    for sample in samples:
        verdict = "correct" if sample.correct else f"wrong ({sample.status})"
        end = "truncated" if sample.truncated else "stop"
        numbers = f"{verdict}, reward {sample.reward:+.2f}, {sample.response_tokens} tokens, {end}"
        answers = f"truth {sample.truth}\nprediction {sample.prediction}"
        parts += [numbers, _block(answers), "prompt", _block(sample.prompt), "response"]
        parts += [_block(sample.response), "---"]
    return "\n\n".join(parts)


def sample_of(row: Mapping, prompt: str) -> Sample:
    """The sample that a row of rollouts/<step>.jsonl.gz has."""
    names = {"truth": "ground_truth", "response_tokens": "tokens"}
    same = ("response", "prediction", "correct", "status", "reward", "truncated")
    given = {name: row[name] for name in same} | {to: row[name] for to, name in names.items()}
    return Sample(prompt=prompt, **given)


def hparams(config: Mapping) -> dict[str, bool | float | str]:
    """The recipe's keys that TensorBoard compares runs by, with their values."""
    return {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in _leaves(config)
        if not key.startswith(NO_HPARAMS)
    }


def scores(config: Mapping) -> list[str]:
    """The metrics by which they are compared: mean@k of every evaluation set, and the accuracy."""
    sets = config["eval"]["sets"] if config["eval"]["every_steps"] > 0 else {}
    k = config["eval"]["samples_per_prompt"]
    counts = {name: k if of_set["k"] is None else of_set["k"] for name, of_set in sets.items()}
    means = [f"eval/{name}/mean@{count}" for name, count in counts.items() if count]
    return [*means, "accuracy/mean"]


def _leaves(config: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _block(text: str) -> str:
    """A code block of Markdown."""
    return "\n".join("    " + printable(line) for line in text.split("\n"))
