"""Plays the episodes of a session's samples behind decoding: a turn in, tokens or an end out.

    session.step -> environments.ask(a turn that ended) ... environments.answers -> session.step

Each turn is answered in a thread of its own, on the process that the group belongs to. What was
sampled is never encoded again: an answer is the tokens that the chat template puts between two
turns (`Tokenizer.between`). Bits of samples depend on no schedule, so answers may come at any time;
with partial rollouts the session says when it takes them. An environment that fails outside a tool
is made anew and gets the turns again, and so does one whose episode goes on in another session.
They have to be answered with the same tokens; after ATTEMPTS the run stops with the row and the
conversation.
"""

import contextlib
import operator
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.process import hosts
from dapo_jax.tasks.environments import TIMED_OUT, EnvironmentFailed, Episode, Factory
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


class _Played(NamedTuple):
    """An episode, and what its sides said."""

    episode: Episode
    said: list[Message]

    def close(self) -> None:
        """Closes the environment, behind whoever lets go of it: it may take its time."""

        def run():
            with contextlib.suppress(EnvironmentFailed):
                self.episode.close()

        threading.Thread(target=run, daemon=True).start()

    def add(self, turn: str, messages: Sequence[Message]) -> None:
        answers = ({"role": "environment", "content": it["content"]} for it in messages)
        self.said.extend(({"role": "assistant", "content": turn}, *answers))


class Environments:
    """The environments of a session's data sets, by config key, and their episodes."""

    def __init__(self, factories: Mapping[str, Factory], tokenizer: Tokenizer, *, max_turns: int):
        self._factories, self._tokenizer, self._max_turns = factories, tokenizer, max_turns
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

    def close(self, number: int | None = None) -> None:
        """Lets go of the episodes of a cancelled group; None: of all."""
        for where in list(self._played):  # their threads add and take some
            if number in (None, where[0]) and (played := self._played.pop(where, None)):
                played.close()

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
            with contextlib.suppress(Exception):  # what failed may be the decoding
                turns = enumerate(map(self._text, response.turns_T[::2]), start=1)
                answer += "".join(f"\n  turn {i}: {text!r:.300}" for i, text in turns)
        self._answers.put((where, answer))

    def _answered(self, where: Where, prompt: Prompt, response: Response, room: int) -> Answer:
        for attempt in range(1, ATTEMPTS + 1):
            played = self._played.pop(where, None)
            try:
                played = played or self._replayed(prompt, response)
                return self._next(where, played, response, room)
            except EnvironmentFailed:
                if played:
                    played.close()
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError

    def _replayed(self, prompt: Prompt, response: Response) -> _Played:
        """Begins an episode anew and repeats its turns but for the last.

        Raises EnvironmentFailed where an answer has other tokens than the response, but for that of
        a tool that took too long: it may answer now.
        """
        factory, turns_T = self._factories[prompt.key], response.turns_T
        played = _Played(Episode(factory, prompt.example, self._tokenizer.tool_calls), [])
        for turn_T, answer_T in zip(turns_T[:-1:2], turns_T[1::2], strict=True):
            text = self._text(turn_T)
            messages = played.episode.answer(text)
            found = self._tokenizer.between(messages, int(turn_T[-1])) if messages else []
            same = list(found) == answer_T.tolist()
            if not same and TIMED_OUT not in self._text(answer_T):
                raise EnvironmentFailed(
                    f"{factory.name} answers {messages!r:.200} to a turn to which it answered "
                    f"{self._text(answer_T)!r:.200} before: it has to be the same each time"
                )
            played.add(text, messages)
        return played

    def _next(self, where: Where, played: _Played, response: Response, room: int) -> Answer:
        episode, is_cut, text = played.episode, False, self._text(response.turns_T[-1])
        messages = episode.answer(text) if response.stopped else []
        if messages and episode.turns < self._max_turns:
            tokens = self._tokenizer.between(messages, int(response.tokens_T[-1]))
            if len(tokens) < room:
                played.add(text, messages)
                self._played[where] = played
                return Answer(tokens)
            is_cut = True
        played.add(text, ())
        verdict, measures = episode.verdict(), episode.measures()
        episode.close()
        measures["turns"] = float(len(response.turns_T[::2]))
        measures["environment_tokens"] = float(np.sum(~response.sampled_T))
        return Answer(verdict=verdict, measures=measures, turns=played.said, is_cut=is_cut)

    def _text(self, tokens_T: np.ndarray) -> str:
        return self._tokenizer.decode(tokens_T.tolist())
