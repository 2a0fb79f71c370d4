"""One step's rollouts: sample and verify, as a stream, until enough groups are informative."""

import bisect
import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.algorithm import first_informative, informative_groups
from dapo_jax.sampler.engine import Block, Finished, Session
from dapo_jax.tasks.base import Task, grade_many
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import Prompt, Verdict
from sharding import hosts


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
    # The engine's: prefill, decode, host. verify: in the background; verify_wait: waiting for it.
    seconds: dict[str, float]
    blocks: list[Block]


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What one step sampled (in prompt order), and which of it the update trains on.

    sampled: P groups, the last one kept being the last; at the cap, as many as it allows. kept:
    indices into `sampled`, ascending. cursor: of the next unseen prompt. issued: groups asked for;
    those after the sampled ones were not needed, and their prompts come again in the next step.
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


@dataclasses.dataclass(frozen=True)
class Verified:
    """A finished group's responses as texts, and the verdict on each."""

    texts: list[str]
    verdicts: list[Verdict]


def verified(finished: Finished, prompt: Prompt, *, tokenizer: Tokenizer, task: Task) -> Verified:
    """Decode and grade a finished group's responses."""
    texts = [tokenizer.decode(response.tokens.tolist()) for response in finished.responses]
    return Verified(texts, grade_many(task, texts, prompt.example))


def group_of(finished: Finished, prompt: Prompt, found: Verified) -> Group:
    """What was drawn and what the verifier said, put together."""
    return Group(
        cursor=finished.cursor,
        prompt=prompt,
        responses=[response.tokens for response in finished.responses],
        behavior_logp=[response.behavior_logp for response in finished.responses],
        stopped_G=np.array([response.stopped for response in finished.responses]),
        texts=found.texts,
        verdicts=found.verdicts,
    )


def collect(
    session: Session,
    prompt_at: Callable[[int], Prompt],
    verify: Callable[[Finished, Prompt], Verified],
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

    prompt_at(cursor): the stream's prompts. verify(finished, prompt): a group's texts and verdicts;
    every process verifies its share of the groups, and all get all verdicts.
    """
    limit = cursor + (max_prompts if dynamic_sampling else num_prompts)
    with _Stream(session, prompt_at, verify, cursor, group_size=group_size) as stream:
        while True:
            # No group behind enough informative ones can be among the first.
            enough = dynamic_sampling and len(stream.informative) >= num_prompts
            end = stream.informative[num_prompts - 1] + 1 if enough else limit
            stream.cancel_from(end)
            if cursor + stream.in_order >= end:
                break
            while cursor + stream.issued < end:
                hoped_for = stream.hoped_for(expected_rate, num_prompts=num_prompts)
                if dynamic_sampling and (session.idle_slots == 0 or hoped_for >= num_prompts):
                    break
                stream.issue()
            found = f"{len(stream.informative)} informative of " if dynamic_sampling else ""
            report(f"rollout: {found}{len(stream.groups)} groups, {num_prompts} wanted")
            stream.advance()
    sampled = [stream.groups[place] for place in range(cursor, end)]
    kept = np.arange(num_prompts)
    if dynamic_sampling:
        correct_PG = np.stack([group.correct_G for group in sampled])
        kept = first_informative(correct_PG, num_prompts=num_prompts)
    work = total_work(session, requests=stream.issued * group_size, verify_seconds=stream.seconds)
    return Rollouts(sampled, kept, end, stream.issued, work)


class _Stream:
    """Groups under way: issued in prompt order, finished in any order, verified behind decoding.

    groups: those with verdicts, by cursor. informative: which of them are, ascending. in_order:
    how many have verdicts before the first one that has none. Verdicts are taken up one block of
    decode steps after the group finished, waiting if need be, so what is issued when does not
    hang on the verifier's speed.
    """

    def __init__(self, session, prompt_at, verify, cursor, *, group_size):
        self.groups: dict[int, Group] = {}
        self.informative: list[int] = []
        self.in_order = 0
        self.issued = 0
        self.seconds = {"verify": 0.0, "verify_wait": 0.0}
        self._session, self._prompt_at, self._verify = session, prompt_at, verify
        self._cursor, self._group_size = cursor, group_size
        self._pending: list[tuple[Finished, concurrent.futures.Future | None]] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(1)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._pool.shutdown(cancel_futures=True)

    def issue(self) -> None:
        """Ask for the next prompt's group."""
        place = self._cursor + self.issued
        self._session.submit(place, self._prompt_at(place).token_ids, group_size=self._group_size)
        self.issued += 1

    def hoped_for(self, expected_rate: float, *, num_prompts: int) -> float:
        """Informative groups to expect of all issued ones, less one standard deviation.

        The share of informative ones is that of the groups in order: those that finished early
        may be of another kind. The expectation counts like a quarter of the step.
        """
        prior = num_prompts / 4
        informative = bisect.bisect_left(self.informative, self._cursor + self.in_order)
        rate = (informative + expected_rate * prior) / (self.in_order + prior)
        under_way = self.issued - len(self.groups)
        spread = math.sqrt(under_way * rate * (1 - rate))
        return len(self.informative) + under_way * rate - spread

    def cancel_from(self, end: int) -> None:
        """Give up the groups of the prompts from `end` on."""
        for place in self._session.unfinished:
            if place >= end:
                self._session.cancel(place)

    def advance(self) -> None:
        """One block of decode steps; take up the verdicts on what finished before it."""
        pending, self._pending = self._pending, []
        if self._session.unfinished:
            for finished in self._session.step():
                self._pending.append((finished, self._begin(finished)))
        start = time.perf_counter()
        for group in self._judged(pending):
            self.groups[group.cursor] = group
            if informative_groups(group.correct_G[None])[0]:
                bisect.insort(self.informative, group.cursor)
        while self._cursor + self.in_order in self.groups:
            self.in_order += 1
        self.seconds["verify_wait"] += time.perf_counter() - start

    def _begin(self, finished: Finished) -> concurrent.futures.Future | None:
        """Verification in the background, if it is this process's group."""
        if not hosts.is_mine(finished.cursor):
            return None
        prompt = self._prompt_at(finished.cursor)
        return self._pool.submit(self._timed_verify, finished, prompt)

    def _judged(self, pending) -> list[Group]:
        """The pending groups with their verdicts, in the same order on every process."""
        if not pending:
            return []
        mine = {finished.cursor: job.result() for finished, job in pending if job is not None}
        found = {cursor: it for share in hosts.gather(mine) for cursor, it in share.items()}
        return [
            group_of(finished, self._prompt_at(finished.cursor), found[finished.cursor])
            for finished, _ in pending
        ]

    def _timed_verify(self, finished: Finished, prompt: Prompt) -> Verified:
        start = time.perf_counter()
        found = self._verify(finished, prompt)
        self.seconds["verify"] += time.perf_counter() - start
        return found


def total_work(session: Session, *, requests: int, verify_seconds: dict[str, float]) -> Work:
    """Totals of the session's blocks."""
    blocks = session.blocks
    waiting = [block for block in blocks if block.waiting]

    def slot_steps(of: Sequence[Block]) -> int:
        return sum(block.steps * len(block.useful_B) for block in of)

    def drawn_tokens(of: Sequence[Block]) -> int:
        return sum(int(block.useful_B.sum()) for block in of)

    return Work(
        drawn_tokens=drawn_tokens(blocks),
        slot_steps=slot_steps(blocks),
        busy_slot_steps=drawn_tokens(blocks),
        waiting_slot_steps=slot_steps(waiting),
        busy_waiting_slot_steps=drawn_tokens(waiting),
        requests=requests,
        prefilled_prompts=session.prefilled_prompts,
        cache_use=max((block.cache_use for block in blocks), default=0.0),
        seconds=session.seconds | verify_seconds,
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
