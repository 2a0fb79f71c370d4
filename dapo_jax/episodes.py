"""Plays the episodes of a session's samples behind decoding: a turn in, tokens or an end out.

    session.step -> environments.ask(a turn that ended) ... environments.answers -> session.step

Each turn is answered in a thread of its own, on the process that the group belongs to. What was
sampled is never encoded again: an answer is the tokens that the chat template puts between two
turns (`Tokenizer.between`). Bits of samples depend on no schedule, so answers may come at any time.
An environment that fails outside a tool is made anew and gets the turns again, which have to be
answered alike; after ATTEMPTS the run stops with the row and the conversation.
"""

import dataclasses
import itertools
import operator
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.process import hosts
from dapo_jax.tasks.environments import EnvironmentFailed, Episode, Factory, replayed
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import Message, Prompt, Response, Verdict

ATTEMPTS = 3
Where = tuple[int, int]  # the session's number of a group, and the sample


class Answer(NamedTuple):
    """What an environment says to a turn: tokens to go on with, or with none the episode's end.

    verdict: None where the task grades the last turn. turns: all that both sides said. is_cut:
    whether there was no room to go on.
    """

    tokens: Sequence[int] = ()
    verdict: Verdict | None = None
    measures: Mapping[str, float] | None = None
    turns: Sequence[Message] = ()
    is_cut: bool = False


@dataclasses.dataclass
class _Played:
    """An episode, and what was said in it."""

    episode: Episode | None = None
    turns: list[str] = dataclasses.field(default_factory=list)
    answers: list[list[Message]] = dataclasses.field(default_factory=list)

    def conversation(self) -> list[Message]:
        said = []
        for text, answer in itertools.zip_longest(self.turns, self.answers, fillvalue=()):
            said.append({"role": "assistant", "content": text})
            said += [{"role": "environment", "content": it["content"]} for it in answer]
        return said


class Environments:
    """The environments of a session's data sets, by config key, and their episodes."""

    def __init__(self, factories: Mapping[str, Factory], tokenizer: Tokenizer, *, max_turns: int):
        self._factories = {
            key: dataclasses.replace(it, reads=tokenizer.tool_calls)
            for key, it in factories.items()
        }
        self._tokenizer, self._max_turns = tokenizer, max_turns
        self._played: dict[Where, _Played] = {}
        self._asked = 0  # of all processes, without answers yet
        self._mine = 0
        self._answers: queue.SimpleQueue = queue.SimpleQueue()

    def plays(self, prompt: Prompt) -> bool:
        """Returns whether a prompt's data set has an environment."""
        return prompt.key in self._factories

    def ask(self, where: Where, cursor: int, prompt: Prompt, response: Response, room: int) -> None:
        """Gives a turn that ended to its environment; all processes call it alike.

        room: the tokens that the response may still have; one at least has to be sampled.
        """
        self._asked += 1
        if hosts.is_mine(cursor):
            self._mine += 1
            arguments = (where, prompt, response, room)
            threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def forget(self, number: int) -> None:
        """Lets go of the episodes of a cancelled group."""
        for where in [where for where in self._played if where[0] == number]:
            self._played.pop(where, None)

    def answers(self, *, wait: bool) -> list[tuple[Where, Answer]]:
        """Returns the answers that there are, on all processes the same, in one order.

        wait: for one at least. Raises EnvironmentFailed, with the row and the conversation.
        """
        if not self._asked:
            return []
        found = []
        while self._mine and (not self._answers.empty() or (wait and not found)):
            found.append(self._answers.get())
            self._mine -= 1
        everyone = [it for theirs in hosts.gather(found) for it in theirs]
        everyone.sort(key=operator.itemgetter(0))
        self._asked -= len(everyone)
        for _, answer in everyone:
            if isinstance(answer, str):
                raise EnvironmentFailed(answer)
        return everyone

    def _run(self, where: Where, prompt: Prompt, response: Response, room: int) -> None:
        try:
            answer = self._answered(where, prompt, response, room)
        except BaseException as error:  # without an answer the run would wait for ever
            answer = f"{prompt.example.source}, row {prompt.example.row}: {error}"
            turns = self._played[where].turns if where in self._played else []
            answer += "".join(f"\n  turn {i}: {text!r:.300}" for i, text in enumerate(turns, 1))
        self._answers.put((where, answer))

    def _answered(self, where: Where, prompt: Prompt, response: Response, room: int) -> Answer:
        played = self._played.setdefault(where, _Played())
        played.turns.append(self._tokenizer.decode(response.last_turn_T.tolist()))
        factory = self._factories[prompt.key]
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if played.episode is None:
                    turns, answers = played.turns[:-1], played.answers
                    played.episode = replayed(factory, prompt.example, turns, answers)
                return self._next(where, played, response, room)
            except EnvironmentFailed:
                played.episode = None
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError

    def _next(self, where: Where, played: _Played, response: Response, room: int) -> Answer:
        episode, is_cut = played.episode, False
        messages = episode.answer(played.turns[-1]) if response.stopped else []
        if messages and episode.turns < self._max_turns:
            tokens = self._tokenizer.between(messages, int(response.tokens_T[-1]))
            if len(tokens) < room:
                played.answers.append(messages)
                return Answer(tokens)
            is_cut = True
        verdict, measures = episode.verdict(), episode.measures()
        episode.close()
        self._played.pop(where, None)
        measures["turns"] = float(len(played.turns))
        measures["environment_tokens"] = float(np.sum(~response.sampled_T))
        said = played.conversation()
        return Answer(verdict=verdict, measures=measures, turns=said, is_cut=is_cut)
