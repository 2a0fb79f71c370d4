r"""Environments: what answers the turns of an episode, and rewards it in the end.

A data set names one in the config, `--config.data.train.environment=my_games:Guess`, a class (or a
function that makes one) of one of two contracts:

* TRL's `environment_factory`: its constructor takes nothing; `reset(**columns) -> str | None`
  begins an episode, and its text goes behind the prompt's last message; every other public method
  is a tool, with type hints and a docstring that has Args. The model calls tools as its chat
  template shows them. An episode ends with the turn that calls none.
* A stepped one (SkyRL-Gym, Gym, Gymnasium): `reset`, or SkyRL-Gym's `init`, then `step(text)` gets
  each turn and returns what the model reads next, as `step_of` reads it.

Both may have `is_done() -> bool`, `get_reward() -> float` (or `reward`), `correct` and `close()`;
where there is no reward the task grades the last turn. Methods may be async. All calls of an
episode run in one thread, and in one event loop (`place`). Host only: no jax.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import re
import time
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from dapo_jax.outside import imported
from dapo_jax.tasks import calls
from dapo_jax.tasks.calls import Call
from dapo_jax.tasks.place import Place
from dapo_jax.tasks.rows import UNANSWERED
from dapo_jax.types import (
    REWARDED,
    Example,
    Message,
    Verdict,
    finite_number,
    plain_text,
    true_or_false,
)

REWARDS = ("get_reward", "reward", "correct")
LIFECYCLE = {"reset", "init", "step", "close", "is_done", *REWARDS}
MAX_ERROR_CHARS = 300
MAX_CHARS = 100_000  # of what one call says: a megabyte takes seconds to encode
MAX_CALLS = 32  # of a turn
TRIES, FIRST_PAUSE_SECONDS = 3, 0.25  # at least so many
MISTAKES = (TypeError, NameError, AttributeError, ImportError)  # of the class
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6}")


class EnvironmentFailed(ValueError):
    """What failed outside a tool, or answered otherwise when it was asked again."""


class EnvironmentRefused(EnvironmentFailed):
    """A mistake of an environment: trying again would not mend it."""


@dataclasses.dataclass(frozen=True)
class Factory:
    """Makes the environments of a data set.

    name: "module:Class". seconds: the longest that one call may take. judges: whether the class
    rewards its episodes, and the task does not grade them; None: nobody has looked.
    """

    name: str
    make: Callable[[], Any]
    seconds: float
    judges: bool | None = None

    @classmethod
    def of(cls, key: str, name: str, seconds: float) -> "Factory":
        """Imports the class that a data set's key names; ValueError where it has no contract."""
        setting = f"{key}.environment = {name!r}"
        factory = cls(name, imported(setting, name), seconds)
        if not factory.can("reset", "init"):
            raise ValueError(f"{setting}, which has neither reset nor init")
        if not (factory.is_stepped or factory.tools):
            raise ValueError(f"{setting}, which has neither step nor tools")
        return factory

    @functools.cached_property
    def kind(self) -> Any:
        """The class of what is made; one of what a function makes, which is called once for it."""
        make = self.make
        while isinstance(make, functools.partial):
            make = make.func
        return make if inspect.isclass(make) else self._made()

    def _made(self) -> Any:
        place = Place(self.name)
        try:
            made = place.call(lambda: _constructed(self.make, {}), self.seconds)
            with contextlib.suppress(Exception):
                place.call(lambda: made.close(), self.seconds)
            return made
        except Exception as error:
            raise ValueError(f"{self.name} cannot be made: {_shown(error)}") from error
        finally:
            place.end()

    def can(self, *names: str) -> bool:
        """Returns whether the class has one of these methods."""
        return any(callable(getattr(self.kind, name, None)) for name in names)

    @property
    def is_stepped(self) -> bool:
        """Returns whether the class is of the stepped contract."""
        return self.can("step")

    @property
    def is_skyrl(self) -> bool:
        """Returns whether `init` begins an episode, and steps reward it."""
        return self.can("init") and not self.can("reset")

    @functools.cached_property
    def tools(self) -> dict[str, Callable]:
        """The tools of a class of TRL's contract, by name; some are an object's alone."""
        for holder in () if self.is_stepped else (lambda: self.kind, self._made):
            members = inspect.getmembers(holder(), inspect.isroutine)
            if own := {it: tool for it, tool in members if it[0] != "_" and it not in LIFECYCLE}:
                return own
        return {}

    @functools.cached_property
    def schemas(self) -> list[dict]:
        """The tools as the chat template shows them; ValueError for one without hints or Args."""
        from transformers.utils import get_json_schema

        try:
            return [get_json_schema(_without_self(tool)) for tool in self.tools.values()]
        except Exception as error:
            raise ValueError(f"{self.name} has a tool without a schema: {error}") from error

    def introduced(self, example: Example) -> Example:
        """Puts what a new episode says first behind the prompt's last message.

        One whose `reset` is declared to return None says nothing, and is not begun.
        """
        opening, reset = "", getattr(self.kind, "reset", None)
        if reset is None or inspect.signature(reset).return_annotation not in (None, "None"):
            with Episode(self, example) as episode:
                opening = episode.opening
        *before, last = example.prompt
        last = {**last, "content": last["content"] + opening}
        return dataclasses.replace(example, prompt=(*before, last), opening=opening)

    def judges_in(self, example: Example) -> bool:
        """Finds out in an episode of its own who judges: the class where it has a reward.

        A stepped one may reward its steps: it gets an empty turn, as a model may write.
        """
        if not example.opening and (self.is_skyrl or any(hasattr(self.kind, it) for it in REWARDS)):
            return True
        with Episode(self, example) as episode:
            if self.is_stepped and not episode.has_reward:
                episode.answer("")
            return episode.has_reward


def _without_self(tool: Callable) -> Callable:
    is_method = "self" in inspect.signature(tool).parameters
    return types.MethodType(tool, object()) if is_method else tool


class Episode(contextlib.AbstractContextManager):
    """One environment in the middle of an episode, in a place of its own until it is closed.

    reads(text, schemas): a turn's tool calls. turns: how many there were; calls: those of the last
    one. measures: of calls, those that failed and those that took too long. said: what both sides
    have read of each other. Raises EnvironmentFailed for what fails outside a tool.
    """

    def __init__(
        self, factory: Factory, example: Example, reads=lambda text, _: calls.either(text)
    ):
        self.turns, self.said, self.calls = 0, [], []
        self.measures = dict.fromkeys(("calls", "failed_calls", "timeouts"), 0.0)
        self._factory, self._reads = factory, reads
        self._environment = self._reward = None
        self._place: Place | None = Place(f"an episode of {factory.name}")
        self._has_begun = False
        try:
            self.opening = self._begun(example)
            self._has_begun = True
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_) -> None:
        self.close()

    def _begun(self, example: Example) -> str:
        """Makes the environment and resets it; returns what it says first, as it did before."""
        name, *before = self._factory.name, *example.prompt[:-1]
        last, opening = example.prompt[-1], example.opening or ""
        prompt = [*before, {**last, "content": last["content"].removesuffix(opening)}]
        columns = {"prompt": prompt}
        if example.answer != UNANSWERED:
            columns["answer"] = example.answer
        if isinstance(example.extra, Mapping):  # a row, as its file has it
            columns |= example.extra
        columns = self._outside("columns", lambda: copy.deepcopy(columns))

        def make():  # what comes late is closed too
            self._environment = _constructed(self._factory.make, columns)

        self._outside("__init__", make)
        if begin := getattr(self._environment, "reset", None):
            # The row's, so that all episodes of a group begin alike, and each replay.
            seed = {"seed": zlib.crc32(f"{example.source} {example.row}".encode())}
            value = self._outside("reset", lambda: begin(**_accepted(begin, columns, seed)))
        else:
            value = self._outside("init", lambda: self._environment.init(copy.deepcopy(prompt)))
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
            value = value[0]  # an observation and its info
        messages = self._read("reset", messages_of, value)
        if not begin:
            if messages[: len(prompt)] != prompt:
                raise EnvironmentRefused(f"{name}.init replaces the prompt: it may add to it")
            messages = messages[len(prompt) :]
        opening = plain_text(messages)
        if example.opening not in (None, opening):
            raise EnvironmentRefused(
                f"{name} begins with {opening!r:.200}, and in the prompt with "
                f"{example.opening!r:.200}: all episodes of a row have to begin alike. Let reset "
                "take `seed`, which is the row's, and draw by it alone: threads share the module "
                "random"
            )
        return opening

    @property
    def has_reward(self) -> bool:
        """Returns whether the environment has a reward of its own, or has given one."""
        is_known = self._reward is not None or self._factory.is_skyrl
        return is_known or any(map(self._has, REWARDS))

    def answer(self, text: str) -> list[Message]:
        """Gives a turn to the environment; returns what the model reads next, [] at the end."""
        self.turns += 1
        if self._factory.is_stepped:
            messages = self._step(text)
        else:
            self.calls = list(self._reads(text, self._factory.schemas))
            messages = [self._called(call, i) for i, call in enumerate(self.calls)]
        is_over = messages and self._read("is_done", _maybe, self._given("is_done"))
        return [] if is_over else messages

    def verdict(self) -> Verdict | None:
        """Grades the episode; None where the task is to.

        It is correct by the environment's word, or where its reward is above 0; where there is no
        word, dynamic sampling looks at rewards.
        """
        name, judges, reward = self._factory.name, self._factory.judges, self._reward
        if self._has("get_reward"):
            reward = self._read("get_reward", finite_number, self._given("get_reward"))
        elif (own := self._given("reward")) is not None:
            own = self._read("reward", finite_number, own)
            if reward not in (None, own):
                raise EnvironmentRefused(f"{name}.reward is {own:g}, and its steps' is {reward:g}")
            reward = own
        correct = self._read("correct", _maybe, self._given("correct"))
        if reward is None and correct is None:
            if not judges:
                return None
            reward = 0.0  # of no steps
        elif judges is False:
            raise EnvironmentRefused(f"{name} gives a reward, and had none: give it get_reward")
        reward = float(correct) if reward is None else reward
        is_correct = bool(reward > 0 if correct is None else correct)
        status = REWARDED if correct is None else "correct" if correct else "wrong"
        return Verdict(is_correct, None, status, reward, {"reward": reward})

    def close(self) -> None:
        """Lets go of what the environment holds, once; what that raises is said and counted."""
        if self._place is None:
            return
        self.measures["failed_closes"] = 0.0
        try:
            if self._place.is_taken and not self._has_begun:  # what comes late is closed behind it
                self._place.later(functools.partial(self._value, "close"))
            else:
                self._given("close")
        except EnvironmentFailed as error:
            self.measures["failed_closes"] = 1.0
            logging.log_first_n(logging.WARNING, "close: %s", 1, error)
        self._place.end()
        self._place = None

    def _has(self, name: str) -> bool:
        is_there = inspect.getattr_static(self._environment, name, self) is not self
        return is_there or (
            hasattr(type(self._environment), "__getattr__") and hasattr(self._environment, name)
        )

    def _given(self, name: str) -> Any:
        """Returns what an attribute of the environment is, or gives; None without it."""
        return self._outside(name, functools.partial(self._value, name))

    def _value(self, name: str) -> Any:
        # A property may raise AttributeError itself.
        value = getattr(self._environment, name) if self._has(name) else None
        return value() if callable(value) else value

    def _step(self, text: str) -> list[Message]:
        value = self._outside("step", lambda: self._environment.step(text))
        messages, reward = self._read("step", step_of, value)
        if reward is not None:
            self._reward = (self._reward or 0.0) + reward
        return messages

    def _called(self, call: Call, number: int) -> Message:
        """Calls a tool; the model reads its answer, or what is wrong with the call."""
        self.measures["calls"] += 1
        tools, name = self._factory.tools, "tool"
        try:
            if isinstance(call, str) or number >= MAX_CALLS:
                raise ValueError(f"{call}" if number < MAX_CALLS else f"over {MAX_CALLS} calls")
            if call["name"] not in tools:
                raise ValueError(f"there is no tool {call['name']!r}, only {', '.join(tools)}")
            name, arguments = call["name"], call["arguments"]
            method = getattr(self._environment, name)
            inspect.signature(method).bind(**arguments)
            value = self._in_place(lambda: method(**arguments))
        except Exception as error:  # it may be the model's doing
            self.measures["failed_calls"] += 1
            self.measures["timeouts"] += isinstance(error, TimeoutError)
            value = f"Error: {_shown(error)}"
        return {"role": "tool", "name": name, "content": self._read(name, _answer_text, value)}

    def _outside(self, name: str, call: Callable) -> Any:
        """Calls what is no tool: its failure is not the model's. name: of it, for messages."""
        try:
            return self._in_place(call)
        except Exception as error:
            what = f"{type(error).__name__}: {_shown(error)}"
            kind = EnvironmentRefused if isinstance(error, MISTAKES) else EnvironmentFailed
            raise kind(f"{self._factory.name}.{name} failed: {what}") from error

    def _in_place(self, call: Callable) -> Any:
        if self._place.is_taken:  # by a tool that took too long
            self._place.end()
            self._place = Place(f"an episode of {self._factory.name}")
        return self._place.call(call, self._factory.seconds)

    def _read(self, name: str, reader: Callable, value: Any) -> Any:
        try:
            return reader(value)
        except (TypeError, ValueError, KeyError) as error:
            where = f"{self._factory.name}.{name} gives {value!r:.200}"
            raise EnvironmentRefused(f"{where}: {_shown(error)}") from error


def step_of(value: Any) -> tuple[list[Message], float | None]:
    """Reads what a step returns: (what the model reads next, [] at the end; its reward, if any).

    That is what the model reads alone (None: the end), Gym's (observation, reward, done[, info]),
    Gymnasium's (observation, reward, terminated, truncated, info), or SkyRL-Gym's dict of
    observations, reward and done. Raises ValueError for all else.
    """
    if isinstance(value, Mapping) and "role" not in value:
        observation, reward, ends = value["observations"], value["reward"], [value["done"]]
    elif isinstance(value, tuple) and 3 <= len(value) <= 5:
        observation, reward, *ends = value
        if ends[1:] and not isinstance(ends.pop(), Mapping | None):
            raise ValueError("the last of four or five has to be the info")
    elif isinstance(value, list) and not value:
        raise ValueError("None ends an episode, no empty list")
    else:
        return messages_of(value), None
    ends = [_maybe(end) for end in ends]
    # A tool that says nothing ends no episode.
    messages = messages_of(observation) or messages_of("")
    return [] if any(ends) else messages, None if reward is None else finite_number(reward)


def messages_of(value: Any) -> list[Message]:
    """Reads a text, its parts, a message or several of them; None is none of them.

    Raises ValueError for all else: what a model reads is never made up from an object.
    """
    value = [value] if isinstance(value, Mapping) else [] if value is None else value
    if isinstance(value, list) and all(_has(it, "role", "content") for it in value):
        return [{**it, "content": _text_of(it["content"])} for it in value]
    return [{"role": "user", "content": _text_of(value)}]


def _text_of(value: Any) -> str:
    if isinstance(value, list) and value and all(_has(it, "type", "text") for it in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise ValueError("it has to be a text, or messages of texts (role, content)")
    return _cut(value)


def _has(value: Any, *keys: str) -> bool:
    return isinstance(value, Mapping) and all(key in value for key in keys)


def _answer_text(value: Any) -> str:
    """Writes what a tool returns: texts as they are, all else as JSON, or as Python shows it.

    ValueError for an object that has no text but its address, which is another each time.
    """
    with contextlib.suppress(ValueError):
        return _text_of(value)
    try:
        text = json.dumps(value, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    if _ADDRESS.search(text):
        raise ValueError("an object has no text")
    return _cut(text)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _maybe(value: Any) -> bool | None:
    return None if value is None else true_or_false(value)


def _cut(text: str) -> str:
    """Shortens a text, and replaces halves of surrogate pairs, which no tokenizer takes."""
    more = f" ... ({len(text) - MAX_CHARS:,} characters more)" if len(text) > MAX_CHARS else ""
    return text[:MAX_CHARS].encode(errors="replace").decode() + more


def _shown(error: BaseException) -> str:
    with contextlib.suppress(Exception):  # an error may be one that cannot be shown
        return str(error)[:MAX_ERROR_CHARS] or type(error).__name__
    return type(error).__name__


def retried(seconds: float, call: Callable[[], Any]) -> Any:
    """Returns what a call gives; where environments fail it is tried again, with longer pauses.

    The last try begins before so many seconds are over, or is the third.
    """
    start, pause, tries = time.monotonic(), FIRST_PAUSE_SECONDS, 1
    while True:
        try:
            return call()
        except EnvironmentFailed as error:
            is_over = time.monotonic() - start + pause > seconds and tries >= TRIES
            if is_over or isinstance(error, EnvironmentRefused):
                raise
            logging.log_first_n(logging.WARNING, "%s; it is tried again", 3, error)
        time.sleep(min(pause, seconds / TRIES))
        pause, tries = 2 * pause, tries + 1


def _constructed(make: Callable, columns: Mapping) -> Any:
    """Makes an environment; one of SkyRL-Gym takes its settings and the row's columns.

    Its settings are the column env_config: keys that are attributes too, as OmegaConf's.
    """
    parameters = inspect.signature(make).parameters
    known = {"env_config": _Settings(columns.get("env_config") or {}), "extras": dict(columns)}
    return make(**{name: value for name, value in known.items() if name in parameters})


class _Settings(dict):
    __getattr__ = dict.get


def _accepted(method: Callable, columns: Mapping, more: Mapping) -> dict:
    """Returns the columns that a method takes, all where it takes any; of `more` what it names."""
    parameters = inspect.signature(method).parameters.values()
    named = {it.name for it in parameters}
    takes_any = any(it.kind is inspect.Parameter.VAR_KEYWORD for it in parameters)
    taken = columns if takes_any else {name: columns[name] for name in named & columns.keys()}
    return {name: more[name] for name in named & more.keys()} | dict(taken)
