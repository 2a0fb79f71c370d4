"""Plays the episodes of a session's samples behind decoding: a turn in, tokens or an end out.

    session.step -> environments.ask(a turn that ended) ... environments.answers -> session.step

Each turn is answered behind the sampler, on the process that the group belongs to. What was sampled
is never encoded again: an answer is the tokens that the chat template puts between two turns
(`Tokenizer.between`). Bits of samples depend on no schedule, so answers may come at any time; with
partial rollouts the session says when it takes them. An environment that fails outside a tool is
made anew, after pauses that grow, and gets the turns again, and so does one whose episode goes on
in another session. They have to be answered with the same tokens. After environment_seconds the run
stops with the row and the conversation, or leaves the episode's group out.
"""

import concurrent.futures
import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED
from typing import NamedTuple

import numpy as np

from dapo_jax.process import hosts
from dapo_jax.tasks.environments import (
    EnvironmentFailed,
    EnvironmentRefused,
    Episode,
    Factory,
    retried,
)
from dapo_jax.tasks.place import TIMED_OUT, in_thread
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import LEFT_OUT, Message, Prompt, Response, Status, Verdict

Where = tuple[int, int, int]  # stream, cursor and sample


class End(NamedTuple):
    """The end of an episode: what its `Response` has then.

    status: STOPPED, or CUT where there was no room to go on. verdict: None where the task grades
    the last turn. turns: all that both sides said.
    """

    status: Status
    measures: Mapping[str, float]
    verdict: Verdict | None = None
    turns: Sequence[Message] = ()


Answer = Sequence[int] | End  # to a turn: tokens to go on with, or the end


def _said(turn: str, messages: Sequence[Message]) -> list[Message]:
    answers = ({"role": "environment", "content": it["content"]} for it in messages)
    return [{"role": "assistant", "content": turn}, *answers]


class Environments:
    """The environments of a session's data sets, by config key, and their episodes.

    on_failure: "stop" or "leave_out". most_open: environments that are open at once; 0: any number.
    """

    def __init__(
        self,
        factories: Mapping[str, Factory],
        tokenizer: Tokenizer,
        *,
        max_turns: int,
        on_failure: str = "stop",
        most_open: int = 0,
    ):
        self._factories, self._tokenizer, self._max_turns = factories, tokenizer, max_turns
        self._on_failure = on_failure
        self._may_open = threading.Semaphore(most_open or sys.maxsize)
        self._lock = threading.Lock()  # of the next three, which the threads of turns change
        self._episodes: dict[Where, Episode] = {}
        self._cancelled: set[tuple[int, int]] = set()  # stream and cursor
        self._is_closed = False
        # The turns of all processes without answers yet; None: another one answers.
        self._asked: dict[Where, concurrent.futures.Future | None] = {}

    def is_episode(self, prompt: Prompt) -> bool:
        """Returns whether a prompt's data set has an environment."""
        return prompt.key in self._factories

    def ask(self, where: Where, prompt: Prompt, response: Response, room: int) -> None:
        """Gives a turn that ended to its environment; all processes call it alike.

        response: so far; it waits, or has no room left. room: the tokens that it may still have;
        one at least has to be sampled.
        """
        run = functools.partial(self._run, where, prompt, response, room)
        self._asked[where] = in_thread(run) if hosts.is_mine(where[1]) else None

    def close(self, group: tuple[int, int] | None = None) -> None:
        """Lets go of the episodes of a cancelled group; None: of all.

        One whose turn is being answered is closed behind the answer.
        """
        with self._lock:
            self._cancelled.add(group)
            self._is_closed |= group is None
            gone = [where for where in self._episodes if self._lets_go(where)]
            for where in gone:
                self._close(self._episodes.pop(where))

    def _lets_go(self, where: Where) -> bool:
        return self._is_closed or where[:2] in self._cancelled

    def _close(self, episode: Episode) -> None:
        """Closes an episode behind everything else; a program's end waits for it."""

        def close():
            episode.close()
            self._may_open.release()

        in_thread(close, program_waits=True)

    def answers(
        self, due: Collection[Where] | None = None, *, wait: bool
    ) -> list[tuple[Where, Answer]]:
        """Returns answers, on all processes the same, in one order.

        due: the turns whose answers are waited for; None: there are those that came, and where it
        is to `wait`, one at least. Raises EnvironmentFailed, with the row and the conversation.
        """
        asked = self._asked if due is None else due
        if not asked:
            return []
        here = {where: job for where in asked if (job := self._asked[where])}
        if wait:
            until = FIRST_COMPLETED if due is None else ALL_COMPLETED
            concurrent.futures.wait(here.values(), return_when=until)
        answers = [(where, job.result()) for where, job in here.items() if job.done()]
        everyone = [answer for share in hosts.gather(answers) for answer in share]
        everyone.sort(key=operator.itemgetter(0))
        for where, answer in everyone:
            del self._asked[where]
            if isinstance(answer, str):
                raise EnvironmentFailed(answer)
        return everyone

    def _run(self, where: Where, prompt: Prompt, response: Response, room: int) -> Answer | str:
        """Answers a turn, or says why not: without an answer the run would wait for ever."""
        try:
            answered = functools.partial(self._answered, where, prompt, response, room)
            return retried(self._factories[prompt.key].seconds, answered)
        except BaseException as error:
            if self._lets_go(where):
                return End(Status.CUT, {})  # nobody reads it
            reason, turns = f"{prompt.example.source}, row {prompt.example.row}: {error}", []
            with contextlib.suppress(Exception):  # what failed may be the decoding
                turns = [self._text(turn_T) for turn_T in response.turns_T[::2]]
            if self._on_failure == "leave_out" and isinstance(error, EnvironmentFailed):
                said = [it for text in turns for it in _said(text, ())]
                said.append({"role": "environment", "content": reason})
                return End(Status.STOPPED, {}, Verdict(False, None, LEFT_OUT, 0.0), said)
            numbered = enumerate(turns, start=1)
            return reason + "".join(f"; turn {i}: {text!r:.300}" for i, text in numbered)

    def _answered(self, where: Where, prompt: Prompt, response: Response, room: int) -> Answer:
        with self._lock:
            episode = self._episodes.pop(where, None)
        episode, answer = episode or self._replayed(where, prompt, response), None
        try:
            answer = self._next(episode, response, room)
        finally:
            with self._lock:
                goes_on = not (answer is None or isinstance(answer, End) or self._lets_go(where))
                if goes_on:
                    self._episodes[where] = episode
            if not goes_on:
                self._close(episode)
        return answer

    def _replayed(self, where: Where, prompt: Prompt, response: Response) -> Episode:
        """Begins an episode anew and repeats its turns but for the last.

        Raises EnvironmentFailed where an answer has other tokens than the response, but for that of
        a tool that took too long: it may answer now.
        """
        factory, turns_T = self._factories[prompt.key], response.turns_T
        with contextlib.ExitStack() as on_failure:
            self._may_open.acquire()
            on_failure.callback(self._may_open.release)
            if self._lets_go(where):
                raise EnvironmentRefused("its group was cancelled")
            episode = Episode(factory, prompt.example, self._tokenizer.tool_calls)
            on_failure.enter_context(episode)
            for turn_T, answer_T in zip(turns_T[:-1:2], turns_T[1::2], strict=True):
                text = self._text(turn_T)
                messages = episode.answer(text)
                tokens = self._between(episode, messages, turn_T) if messages else []
                same = list(tokens) == answer_T.tolist()
                if not same and TIMED_OUT not in self._text(answer_T):
                    raise EnvironmentFailed(
                        f"{factory.name} answers {messages!r:.200} to a turn to which it answered "
                        f"{self._text(answer_T)!r:.200} before: it has to be the same each time"
                    )
                episode.said += _said(text, messages)
            on_failure.pop_all()
        return episode

    def _next(self, episode: Episode, response: Response, room: int) -> Answer:
        stopped, turn_T = response.status is Status.WAITING, response.turns_T[-1]
        text = self._text(turn_T)
        messages = episode.answer(text) if stopped else []
        if messages and episode.turns < self._max_turns:
            tokens = self._between(episode, messages, turn_T)
            if len(tokens) < room:
                episode.said += _said(text, messages)
                return tokens
            stopped = False
        episode.said += _said(text, ())
        verdict, measures = episode.verdict(), episode.measures
        episode.close()
        measures["turns"] = float(len(response.turns_T[::2]))
        measures["environment_tokens"] = float(np.sum(~response.sampled_T))
        return End(Status.STOPPED if stopped else Status.CUT, measures, verdict, episode.said)

    def _between(self, episode: Episode, messages: Sequence[Message], turn_T) -> list[int]:
        try:
            return self._tokenizer.between(messages, int(turn_T[-1]), *episode.calls)
        except ValueError as error:
            raise EnvironmentRefused(f"the chat template {error}") from error

    def _text(self, tokens_T: np.ndarray) -> str:
        return self._tokenizer.decode(tokens_T.tolist())
