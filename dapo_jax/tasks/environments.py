r"""Environments: what answers the turns of an episode, and rewards it in the end.

A data set names one in the config, `--config.data.train.environment=my_games:Guess`, a class of
one of two contracts:

* TRL's `environment_factory`: its constructor takes nothing; `reset(**columns) -> str | None`
  begins an episode, and its text goes behind the prompt's last message; every other public method
  is a tool, with type hints and a docstring that has Args. The model calls tools as its chat
  template shows them. An episode ends with the turn that calls none.
* A stepped one (SkyRL-Gym, Gymnasium): `reset`, or SkyRL-Gym's `init`, then `step(text)` gets each
  turn and returns what the model reads next: a text or messages; None where the episode ends;
  SkyRL-Gym's dict of observations, reward and done, or Gymnasium's tuple of five.

Both may have `is_done() -> bool`, `get_reward() -> float` (or `reward`) and `correct`; where there
is no reward the task grades the last turn. Methods may be async. Host only: no jax.
"""

import asyncio
import concurrent.futures
import dataclasses
import inspect
import json
import re
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.outside import imported
from dapo_jax.types import Example, Message, Verdict

LIFECYCLE = {"reset", "init", "step", "close", "is_done", "get_reward", "reward", "correct"}
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
MAX_ERROR_CHARS = 300
TIMED_OUT = "no answer within"


class EnvironmentFailed(ValueError):
    """What failed outside a tool, or answered otherwise when it was asked again."""


@dataclasses.dataclass(frozen=True)
class Factory:
    """Makes the environments of a data set.

    name: "module:Class". seconds: the longest that one call may take.
    """

    name: str
    make: Callable[[], Any]
    seconds: float

    @classmethod
    def of(cls, key: str, name: str, seconds: float) -> "Factory":
        """Imports the class that a data set's key names; ValueError where it has no contract."""
        found = imported(f"{key}.environment = {name!r}", name)
        if not any(callable(getattr(found, it, None)) for it in ("reset", "init")):
            raise ValueError(f"{key}.environment = {name!r}, which has neither reset nor init")
        return cls(name, found, seconds)

    @property
    def is_stepped(self) -> bool:
        """Returns whether the class is of the stepped contract."""
        return callable(getattr(self.make, "step", None))

    @property
    def tools(self) -> list[Callable]:
        """Lists the tools of a class of TRL's contract."""
        members = [] if self.is_stepped else inspect.getmembers(self.make, inspect.isroutine)
        return [it for name, it in members if not name.startswith("_") and name not in LIFECYCLE]

    def schemas(self) -> list[dict]:
        """Describes the tools for the chat template; ValueError for one without hints or Args."""
        from transformers.utils import get_json_schema

        try:
            return [get_json_schema(_without_self(tool)) for tool in self.tools]
        except Exception as error:
            raise ValueError(f"{self.name} has a tool without a schema: {error}") from error

    def introduced(self, example: Example) -> Example:
        """Puts what a new episode says first behind the prompt's last message."""
        text = Episode(self, example).opening
        if not text:
            return example
        *before, last = example.prompt
        last = {**last, "content": last["content"] + text}
        return dataclasses.replace(example, prompt=(*before, last))


def _without_self(tool: Callable) -> Callable:
    is_method = "self" in inspect.signature(tool).parameters
    return types.MethodType(tool, object()) if is_method else tool


class Episode:
    """One environment in the middle of an episode.

    reads(text, schemas): a turn's tool calls in the model's own form; where it finds none,
    `tool_calls` looks. turns: how many there were; measures: of calls, those that failed and those
    that took too long. said: what both sides have read of each other. Raises EnvironmentFailed for
    what fails outside a tool.
    """

    def __init__(self, factory: Factory, example: Example, reads=lambda text, schemas: ()):
        self.turns, self.said = 0, []
        self.measures = dict.fromkeys(("calls", "failed_calls", "timeouts"), 0.0)
        self._factory, self._reads, self._reward = factory, reads, None
        columns = {"prompt": list(example.prompt), "answer": example.answer}
        columns |= example.extra if isinstance(example.extra, Mapping) else {}
        self._environment = self._outside(lambda: _constructed(factory.make, columns))
        begin = getattr(self._environment, "reset", None)
        if begin is None:
            messages, _ = self._outside(lambda: self._environment.init(columns["prompt"]))
            if list(messages[: len(example.prompt)]) != list(example.prompt):
                raise EnvironmentFailed(
                    f"{factory.name}.init replaces the prompt: it may add to it"
                )
            self.opening = "".join(m["content"] for m in messages[len(example.prompt) :])
        else:
            self.opening = self._outside(lambda: begin(**_accepted(begin, columns)))
        if isinstance(self.opening, tuple):  # Gymnasium's observation and info
            self.opening = self.opening[0]
        self.opening = "" if self.opening is None else str(self.opening)

    def answer(self, text: str) -> list[Message]:
        """Gives a turn to the environment; returns what the model reads next, [] at the end."""
        self.turns += 1
        if self._factory.is_stepped:
            said = self._step(text)
        else:
            calls = self._reads(text, self._factory.schemas()) or tool_calls(text)
            said = [self._called(call) for call in calls]
        if said and self._given("is_done"):
            return []
        return [{**message, "content": _encodable(message["content"])} for message in said]

    def verdict(self) -> Verdict | None:
        """Grades the episode; None where the class has no reward."""
        names = ("get_reward", "reward")
        own = [it for it in names if getattr(self._environment, it, None) is not None]
        reward = self._given(own[0]) if own else self._reward
        correct = self._given("correct")
        if reward is None and correct is None:
            return None
        reward = float(correct if reward is None else reward)
        correct = bool(reward > 0 if correct is None else correct)
        return Verdict(correct, f"{reward:g}", "correct" if correct else "wrong", reward)

    def close(self) -> None:
        """Lets go of what the environment holds."""
        self._given("close")

    def _given(self, name: str) -> Any:
        """Returns what an attribute of the environment is, or gives; None without it."""
        found = getattr(self._environment, name, None)
        return self._outside(found) if callable(found) else found

    def _step(self, text: str) -> list[Message]:
        found, done, reward = self._outside(lambda: self._environment.step(text)), False, None
        if isinstance(found, Mapping):
            done, reward = found["done"], found["reward"]
            # A tool that says nothing ends no episode.
            found = found["observations"] or [{"role": "user", "content": ""}]
        elif isinstance(found, tuple):
            found, reward, *ends = found
            done = any(ends[:2])
        if reward is not None:
            self._reward = (self._reward or 0.0) + float(reward)
        if found is None or done:
            return []
        return [{"role": "user", "content": found}] if isinstance(found, str) else list(found)

    def _called(self, call: Mapping | str) -> Message:
        """Calls a tool; the model reads its answer, or what is wrong with the call."""
        self.measures["calls"] += 1
        names = {tool.__name__ for tool in self._factory.tools}
        name, arguments = "", {}
        try:
            if isinstance(call, str):
                raise ValueError(call)
            name, arguments = call["name"], call["arguments"]
            if name not in names:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(sorted(names))}")
            method = getattr(self._environment, name)
            inspect.signature(method).bind(**arguments)
            answer = within(self._factory.seconds, lambda: method(**arguments))
            content = answer if isinstance(answer, str) else json.dumps(answer, default=str)
        except Exception as error:  # it may be the model's doing
            self.measures["failed_calls"] += 1
            self.measures["timeouts"] += isinstance(error, TimeoutError)
            content = f"Error: {str(error)[:MAX_ERROR_CHARS] or type(error).__name__}"
        known = name if isinstance(name, str) and name else "tool"
        return {"role": "tool", "name": _encodable(known), "content": content}

    def _outside(self, call: Callable) -> Any:
        """Calls what is no tool: its failure is not the model's."""
        try:
            return within(self._factory.seconds, call)
        except Exception as error:
            what = f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}"
            raise EnvironmentFailed(f"{self._factory.name} failed: {what}") from error


def _constructed(make: Callable, columns: Mapping) -> Any:
    """Makes an environment; one of SkyRL-Gym takes its settings and the row's columns.

    Its settings are the column env_config: keys that are attributes too, as OmegaConf's.
    """
    parameters = inspect.signature(make).parameters
    known = {"env_config": _Settings(columns.get("env_config", {})), "extras": dict(columns)}
    return make(**{name: value for name, value in known.items() if name in parameters})


class _Settings(dict):
    __getattr__ = dict.get


def _accepted(method: Callable, columns: Mapping) -> dict:
    """Returns the columns that a method takes, all where it takes any."""
    parameters = inspect.signature(method).parameters.values()
    if any(it.kind is inspect.Parameter.VAR_KEYWORD for it in parameters):
        return dict(columns)
    return {it.name: columns[it.name] for it in parameters if it.name in columns}


async def _awaited(value: Any) -> Any:
    return await value


def in_thread(call: Callable) -> concurrent.futures.Future:
    """Begins a call, maybe an async one, in a thread of its own that no program waits for."""
    found: concurrent.futures.Future = concurrent.futures.Future()

    def run():
        try:
            value = call()
            found.set_result(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
        except Exception as error:
            found.set_exception(error)
        except BaseException as error:  # of exit(), which a tool that runs code may be given
            found.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, name="environment", daemon=True).start()
    return found


def within(seconds: float, call: Callable) -> Any:
    """Returns what a call gives; TimeoutError where it takes too long.

    A thread that hangs cannot be ended: it is left behind.
    """
    found = in_thread(call)
    if not concurrent.futures.wait([found], seconds).done:
        raise TimeoutError(f"{TIMED_OUT} {seconds:g} s")
    return found.result()


def _encodable(text: Any) -> Any:
    """Replaces halves of surrogate pairs, which a call's JSON may have and no tokenizer takes."""
    return text.encode(errors="replace").decode() if isinstance(text, str) else text


def tool_calls(text: str) -> list[Mapping | str]:
    """Reads the tool calls of a turn: {"name", "arguments"}, or what is wrong with one, a text.

    The forms of models without a response_template: of Qwen, Hermes and SmolLM (JSON in
    <tool_call>, one or a list) and of Llama 3 (the turn is the JSON, its arguments are
    "parameters").
    """
    blocks = _CALL.findall(text)
    bare = text.strip().removeprefix("<|python_tag|>")
    if not blocks and bare.startswith("{") and '"name"' in bare:
        blocks = [bare]
    calls: list[Mapping | str] = []
    for block in blocks:
        try:
            found = json.loads(block)
        except (ValueError, RecursionError) as error:
            calls.append(f"the call is no JSON: {error}")
            continue
        for call in found if isinstance(found, list) else [found]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                calls.append('a call has to be {"name": ..., "arguments": {...}}')
                continue
            arguments = call.get("arguments", call.get("parameters", {}))
            if not isinstance(arguments, dict):
                calls.append(f"the arguments of {call['name']} have to be an object")
                continue
            calls.append({"name": call["name"], "arguments": arguments})
    return calls
