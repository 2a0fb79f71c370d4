"""Tasks: examples with ground truth, and the grading of responses to them (README.md)."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from dapo_jax.outside import imported
from dapo_jax.tasks.rows import DataError, DataReport
from dapo_jax.tasks.tokenizer import Tokenizer, begun_answer
from dapo_jax.types import Example, Group, Verdict, finite_number, true_or_false

BUILT_IN = {
    "math": "dapo_jax.tasks.math_problems:MathProblems",
    "arithmetic": "dapo_jax.tasks.arithmetic:Arithmetic",
    "countdown": "experiments.tasks.countdown:Countdown",
    "multiple_choice": "experiments.tasks.multiple_choice:MultipleChoice",
    "format_answer": "experiments.tasks.format_answer:FormatAnswer",
    "reasoning_gym": "experiments.tasks.reasoning_gym:ReasoningGym",
}


# Settings of a data set that a task may well have a parameter of its own for.
_OF_EVALUATION = {"k", "temperature", "top_p", "top_k", "max_tokens", "weight", "args"}


class Task(Protocol):
    """A loader of examples and grader of responses: any class with these two methods.

    A method `grade_many(responses, example) -> list[Verdict]` is used where there is one: it
    grades all responses to an example at once. So is `same(pairs) -> list[bool]`, which tells which
    pairs of predictions are one answer, for maj@k.
    """

    def load(self) -> Iterable[Example] | tuple[list[Example], DataReport]:
        """Returns the examples, always the same and in the same order; maybe with a report."""

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades one response, the same each time; may run in another thread.

        A response begins with what its prompt has of it: a begun answer, a template's <think>.

        Dynamic sampling looks at `Verdict.correct` alone; `Verdict.score` is the reward.
        """


def make_task(key: str, settings: Mapping) -> Task:
    """Makes the task that a data set names, out of the settings that it takes.

    key: the config key of the data set, for messages. settings["task"]: a name of BUILT_IN or
    "module:Class"; "": the built-in one for settings["kind"]. Raises DataError where there is no
    such task, or where it takes other settings.
    """
    name = settings["task"] or ("arithmetic" if settings["kind"] == "arithmetic" else "math")
    where = f"{key}.task = {name!r}"
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        known = f'Built in are {", ".join(BUILT_IN)}; a custom one is named "module:Class".'
        raise DataError(f"{where}: there is no such task. {known}")
    task_class = imported(where, path, ("load", "grade"))
    signature = inspect.signature(task_class)
    for field in ("path", "prompt_field", "answer_field", "template"):
        if settings[field] and field not in signature.parameters:
            raise DataError(
                f"{key}.{field} = {settings[field]!r}, but {where} takes no {field} and would "
                f"ignore it; leave it empty ({key}.{field}=), or change {key}.task or {key}.kind"
            )
    arguments = {it: settings[it] for it in signature.parameters if it in settings}
    if elsewhere := settings["args"].keys() & settings.keys() - _OF_EVALUATION:
        names = ", ".join(sorted(elsewhere))
        raise DataError(f"{key}.args has {names}, which the config has keys for: --help lists them")
    arguments |= settings["args"]
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise DataError(f"{where}: {error} ({key}.args); it takes {signature}") from error
    return task_class(**arguments)


def load_examples(task: Task, name: str) -> tuple[list[Example], DataReport]:
    """Loads a task's examples and their report; all are kept where the task gives no report.

    Raises DataError for what is no example.
    """
    loaded, report = task.load(), None
    if isinstance(loaded, tuple) and len(loaded) == 2 and isinstance(loaded[1], DataReport):
        loaded, report = loaded
    where = f"{type(task).__name__}.load()"
    if not isinstance(loaded, Iterable) or isinstance(loaded, str | bytes):
        raise DataError(f"{where} gave {loaded!r:.80}, but must give examples")
    examples = list(loaded)
    for row, example in enumerate(examples):
        if not _is_example(example):
            raise DataError(
                f"{where}, example {row} (from 0): {example!r:.80} is no Example with messages "
                '{"role": text, "content": text} as its prompt and a text as its answer'
            )
    return examples, report or DataReport(name, rows=len(examples), kept=len(examples))


def _is_example(example: object) -> bool:
    try:
        texts = [message[key] for message in example.prompt for key in ("role", "content")]
    except (AttributeError, KeyError, TypeError):
        return False
    return bool(texts) and all(isinstance(text, str) for text in [*texts, example.answer])


def grade_many(task: Task, responses: Sequence[str], example: Example) -> list[Verdict]:
    """Grades all responses to an example; raises DataError where the task gives no verdicts."""
    if hasattr(task, "grade_many"):
        given = task.grade_many(responses, example)
    else:
        given = (_grade(task, response, example) for response in responses)
    name = type(task).__name__
    where = f"{example.source}, row {example.row}"
    verdicts = [_checked(name, verdict, where) for verdict in given]
    if len(verdicts) != len(responses):
        raise DataError(f"{name} gave {len(verdicts)} verdicts on {len(responses)} responses")
    return verdicts


def _grade(task: Task, response: str, example: Example) -> object:
    """Returns the task's verdict, or notes the response on the exception of the task."""
    try:
        return task.grade(response, example)
    except Exception as error:
        error.add_note(
            f"({type(task).__name__}.grade, {example.source}, row {example.row}: answer "
            f"{example.answer!r:.80}, response {response!r:.300})"
        )
        raise


def _checked(name: str, verdict: object, where: str) -> Verdict:
    """Returns a verdict of plain values, with a copy of its measures; DataError for none."""
    try:
        correct = true_or_false(verdict.correct)
        score = None if verdict.score is None else finite_number(verdict.score)
        measures = {key: finite_number(value) for key, value in (verdict.measures or {}).items()}
        texts = verdict.prediction or "", verdict.status
        if all(isinstance(it, str) for it in texts) and all(map(str.isidentifier, measures)):
            return Verdict(correct, verdict.prediction, verdict.status, score, measures or None)
    except (TypeError, ValueError, AttributeError):
        pass
    raise DataError(f"{name} graded a response {verdict!r:.200}, which is no Verdict ({where})")


def graded(group: Group, *, task: Task, tokenizer: Tokenizer) -> Group:
    """Decodes a group's responses, and grades each behind what the prompt has of its answer.

    Of an episode the last turn is graded, unless its environment has.
    """
    texts = [tokenizer.decode(response.tokens_T.tolist()) for response in group.responses]
    example = group.prompt.example
    begun = begun_answer(example.prompt, tokenizer)
    open_ = [response for response in group.responses if response.verdict is None]
    last = [begun + tokenizer.decode(response.turns_T[-1].tolist()) for response in open_]
    of_last = iter(grade_many(task, last, example) if open_ else ())
    verdicts = []
    for response in group.responses:
        verdict = next(of_last) if response.verdict is None else response.verdict
        measures = {**(verdict.measures or {}), **(response.measures or {})}
        verdicts.append(verdict._replace(measures=measures or None))
    return group.graded(texts, verdicts)
