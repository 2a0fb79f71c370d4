"""One step's rollouts: sample and verify, as a stream, until enough groups are informative."""

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.algorithm import first_informative
from dapo_jax.data import Prompt
from dapo_jax.sampler.engine import Block, Finished, Session
from dapo_jax.tokenizer import Tokenizer
from dapo_jax.verifier import Verdict, verify_many


@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt and its G responses, on the host. `cursor` is the prompt's place in the stream.

    responses, behavior_logp: G arrays of a response's tokens and their log-probabilities, the stop
    token included. stopped_G: False where the response was cut off at the length limit.
    """

    cursor: int
    prompt: Prompt
    responses: list[np.ndarray]
    behavior_logp: list[np.ndarray]
    stopped_G: np.ndarray
    texts: list[str]
    verdicts: list[Verdict]

    @property
    def length_G(self) -> np.ndarray:
        """Generated tokens of each response."""
        return np.array([len(response) for response in self.responses])

    @property
    def correct_G(self) -> np.ndarray:
        """Raw correctness of each response."""
        return np.array([verdict.correct for verdict in self.verdicts])


@dataclasses.dataclass(frozen=True)
class Work:
    """What sampling a step's groups took. Token counts are of everything drawn, used or not."""

    drawn_tokens: int
    slot_steps: int  # decode steps times slots
    busy_slot_steps: int  # that drew a token of a response,
    waiting_slot_steps: int  # the same two while requests were left to refill slots with
    busy_waiting_slot_steps: int
    requests: int
    prefilled_prompts: int
    cache_use: float  # the greatest share of pages taken
    seconds: dict[str, float]  # prefill, decode, host: the engine's; verify: of the background
    blocks: list[Block]


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What one step sampled (in prompt order), and which of it the update trains on.

    sampled: P groups, the last one kept being the last. kept: indices into `sampled`, ascending.
    cursor: of the next unseen prompt. issued: groups asked for, of which those after the last one
    kept were not needed; their prompts come again in the next step.
    """

    sampled: list[Group]
    kept: np.ndarray
    cursor: int
    issued: int
    work: Work

    @property
    def correct_PG(self) -> np.ndarray:
        """Raw correctness of everything sampled."""
        return np.stack([group.correct_G for group in self.sampled])

    @property
    def length_PG(self) -> np.ndarray:
        """Tokens of everything sampled."""
        return np.stack([group.length_G for group in self.sampled])

    @property
    def stopped_PG(self) -> np.ndarray:
        """False where a response ran into the length limit."""
        return np.stack([group.stopped_G for group in self.sampled])

    @property
    def kept_tokens(self) -> int:
        """Response tokens that the update trains on."""
        return int(sum(self.sampled[p].length_G.sum() for p in self.kept))


def verified(finished: Finished, prompt: Prompt, *, tokenizer: Tokenizer, rules: str) -> Group:
    """Decode a finished group's responses and compare their answers with the prompt's."""
    texts = [tokenizer.decode(response.tokens.tolist()) for response in finished.responses]
    return Group(
        cursor=finished.cursor,
        prompt=prompt,
        responses=[response.tokens for response in finished.responses],
        behavior_logp=[response.behavior_logp for response in finished.responses],
        stopped_G=np.array([response.stopped for response in finished.responses]),
        texts=texts,
        verdicts=verify_many(texts, [prompt.example.answer] * len(texts), rules=rules),
    )


def collect(
    session: Session,
    prompt_at: Callable[[int], Prompt],
    verify: Callable[[Finished, Prompt], Group],
    cursor: int,
    *,
    group_size: int,
    num_prompts: int,
    max_prompts: int,
    expected_rate: float,
    dynamic_sampling: bool,
    report: Callable[[str], None],
) -> Rollouts:
    """Dynamic sampling (Eq. 11) as a stream: sample until `num_prompts` groups are informative.

    A group is informative if some but not all of it is correct. The policy is frozen meanwhile.
    The first informative groups in prompt order are kept, as if prompts had been sampled batch
    after batch and waited for: neither length nor speed of a response decides. Groups are
    verified in the background while decoding goes on. Prompts are issued as slots fall idle, as
    many as the share of informative groups so far lets expect to be needed (`expected_rate`
    before there are any). After `max_prompts` there may be fewer groups than wanted, or none: the
    caller decides what to do then. Without dynamic sampling the first `num_prompts` are all kept.

    prompt_at(cursor): the stream's prompts. verify(finished, prompt): a group with its verdicts.
    """
    limit = max_prompts if dynamic_sampling else num_prompts
    stream = _Stream(session, prompt_at, verify, cursor, group_size=group_size)
    with stream:
        while True:
            if not dynamic_sampling:
                stream.issue(limit - stream.issued)
            elif stream.informative < num_prompts:
                while stream.issued < limit and session.idle_slots > 0:
                    if stream.hoped_for(expected_rate, num_prompts=num_prompts) >= num_prompts:
                        break
                    stream.issue(1)
            else:
                stream.cancel_after(num_prompts)
            kept = stream.kept(num_prompts, dynamic_sampling=dynamic_sampling)
            if kept is not None or (stream.issued == limit and stream.resolved == limit):
                break
            found = f"{stream.informative} informative of " if dynamic_sampling else ""
            report(f"rollout: {found}{stream.resolved} groups, {num_prompts} wanted")
            stream.advance()
    if kept is None:
        count, kept = limit, stream.kept_of(limit, limit)
    else:
        count = kept[-1] + 1 if dynamic_sampling else limit
    sampled = [stream.groups[cursor + p] for p in range(count)]
    return Rollouts(sampled, np.asarray(kept), cursor + count, stream.issued, stream.work())


class _Stream:
    """Groups under way: issued in prompt order, finished in any order, verified behind decoding.

    Verdicts are taken up one block of decode steps after the group finished, waiting if need be,
    so what is issued when does not hang on the verifier's speed.
    """

    def __init__(self, session, prompt_at, verify, cursor, *, group_size):
        self.groups: dict[int, Group] = {}
        self.issued = 0
        self.informative = 0
        self._session, self._prompt_at, self._verify = session, prompt_at, verify
        self._cursor, self._group_size = cursor, group_size
        self._pending: list[concurrent.futures.Future] = []
        self._is_informative: dict[int, bool] = {}
        self._verify_seconds = 0.0
        self._waited_seconds = 0.0
        self._pool = concurrent.futures.ThreadPoolExecutor(1)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._pool.shutdown(cancel_futures=True)

    @property
    def resolved(self) -> int:
        """Groups whose verdicts are known."""
        return len(self.groups)

    def issue(self, count: int) -> None:
        """Ask for the next prompts' groups."""
        for place in range(self._cursor + self.issued, self._cursor + self.issued + count):
            prompt = self._prompt_at(place)
            self._session.submit(place, prompt.token_ids, group_size=self._group_size)
        self.issued += count

    def hoped_for(self, expected_rate: float, *, num_prompts: int) -> float:
        """Informative groups to expect of all issued ones, less one standard deviation.

        The expectation counts like the verdicts of a quarter of the step.
        """
        weight = num_prompts / 4
        rate = (self.informative + expected_rate * weight) / (self.resolved + weight)
        unknown = self.issued - self.resolved
        return self.informative + unknown * rate - math.sqrt(unknown * rate * (1 - rate))

    def kept_of(self, count: int, num_prompts: int) -> list[int]:
        """Places, from the step's first prompt, of the first informative groups of `count`."""
        if count == 0:
            return []
        correct_PG = np.stack([self.groups[self._cursor + p].correct_G for p in range(count)])
        return first_informative(correct_PG, num_prompts=num_prompts).tolist()

    def kept(self, num_prompts: int, *, dynamic_sampling: bool) -> list[int] | None:
        """Places of the groups to keep, once no group still under way could change them."""
        known = next(p for p in range(self.issued + 1) if self._cursor + p not in self.groups)
        if not dynamic_sampling:
            return list(range(num_prompts)) if known >= num_prompts else None
        kept = self.kept_of(known, num_prompts) if self.informative >= num_prompts else []
        return kept if len(kept) == num_prompts else None

    def cancel_after(self, num_prompts: int) -> None:
        """Give up groups that come after enough informative ones: nothing before can need them."""
        found = sorted(place for place, yes in self._is_informative.items() if yes)
        for place in self._session.unfinished:
            if place > found[num_prompts - 1]:
                self._session.cancel(place)

    def advance(self) -> None:
        """One block of decode steps; take up the verdicts on what finished before it."""
        pending, self._pending = self._pending, []
        if self._session.unfinished:
            for finished in self._session.step():
                prompt = self._prompt_at(finished.cursor)
                self._pending.append(self._pool.submit(self._timed_verify, finished, prompt))
        start = time.perf_counter()
        for future in pending:
            group = future.result()
            self.groups[group.cursor] = group
            is_informative = 0 < group.correct_G.sum() < len(group.correct_G)
            self._is_informative[group.cursor] = is_informative
            self.informative += is_informative
        self._waited_seconds += time.perf_counter() - start

    def _timed_verify(self, finished: Finished, prompt: Prompt) -> Group:
        start = time.perf_counter()
        group = self._verify(finished, prompt)
        self._verify_seconds += time.perf_counter() - start
        return group

    def work(self) -> Work:
        """Totals of the session's blocks."""
        blocks = self._session.blocks
        waiting = [block for block in blocks if block.waiting]

        def slot_steps(of):
            return sum(block.steps * len(block.useful_B) for block in of)

        def busy(of):
            return sum(int(block.useful_B.sum()) for block in of)

        return Work(
            drawn_tokens=busy(blocks),
            slot_steps=slot_steps(blocks),
            busy_slot_steps=busy(blocks),
            waiting_slot_steps=slot_steps(waiting),
            busy_waiting_slot_steps=busy(waiting),
            requests=self.issued * self._group_size,
            prefilled_prompts=self._session.prefilled_prompts,
            cache_use=max((block.cache_use for block in blocks), default=0.0),
            seconds={
                **self._session.seconds,
                "verify": self._verify_seconds,
                "verify_wait": self._waited_seconds,
            },
            blocks=blocks,
        )


def minibatches(kept: np.ndarray, *, groups_per_update: int) -> list[np.ndarray]:
    """Consecutive chunks of at most `groups_per_update` groups, as even as can be.

    Adam takes a full step whatever the mini-batch's size: one left-over group must not make one.
    """
    chunks = -(-len(kept) // groups_per_update)
    return np.array_split(kept, chunks) if chunks else []


def rollout_rows(groups: Sequence[Group], reward_PG: np.ndarray, kept: np.ndarray):
    """The step's responses for rollouts/<step>.jsonl.gz, one dict each."""
    trained = set(kept.tolist())
    for p, group in enumerate(groups):
        for g, (text, verdict) in enumerate(zip(group.texts, group.verdicts, strict=True)):
            yield {
                "cursor": group.cursor,
                "sample": g,
                "source": group.prompt.example.source,
                "row": group.prompt.example.row,
                "prompt": group.prompt.example.text,
                "response": text,
                "ground_truth": group.prompt.example.answer,
                "prediction": verdict.prediction,
                "correct": verdict.correct,
                "status": verdict.status,
                "reward": float(reward_PG[p, g]),
                "tokens": len(group.responses[g]),
                "truncated": not bool(group.stopped_G[g]),
                "trained": p in trained,
            }
