"""Scripted sampling: the real scheduler, and responses of scripted lengths and correctness."""

import dataclasses
import functools

import numpy as np

from dapo_jax.rollout import StepPlan, collect
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.scheduler import Scheduler
from dapo_jax.types import (
    Example,
    Group,
    PartialGroup,
    Prompt,
    Response,
    Rollouts,
    RolloutStats,
    Verdict,
)

G = 4


@dataclasses.dataclass(frozen=True)
class Script:
    """A script fixes the responses to come: correct_PG, and length_PG in tokens."""

    correct_PG: np.ndarray
    length_PG: np.ndarray

    @functools.cached_property
    def informative(self) -> list[int]:
        """Lists the cursors of the groups of which some, but not all, are correct."""
        return [p for p, correct_G in enumerate(self.correct_PG) if len(set(correct_G)) == 2]


def script(num_correct_P, *, length_tokens=3) -> Script:
    """Scripts so many correct ones of each prompt's G responses, of one length or of P."""
    correct_PG = np.arange(G) < np.asarray(num_correct_P)[:, None]
    length_P1 = np.broadcast_to(length_tokens, len(correct_PG))[:, None]
    return Script(correct_PG, np.broadcast_to(length_P1, correct_PG.shape))


def long_tailed_script(seed: int, *, prompts: int) -> Script:
    """Scripts log-normal lengths: wrong responses are longer, those of medium prompts longest."""
    rng = np.random.default_rng(seed)
    chance_P1 = rng.beta(0.5, 0.5, (prompts, 1))  # of a correct response
    correct_PG = rng.random((prompts, G)) < chance_P1
    medium_P1 = 4 * chance_P1 * (1 - chance_P1)
    log_length_PG = rng.normal(1.5 + 1.5 * medium_P1 + 0.7 * ~correct_PG, 0.8)
    return Script(correct_PG, 1 + np.exp(log_length_PG).astype(int))


def prompt_at(cursor: int) -> Prompt:
    return Prompt(np.array([cursor + 1], np.int32), Example((), "7", "script", cursor))


class ScriptedSession:
    """A real Scheduler behind a Session's methods, with scripted lengths and a roomy cache.

    `calls` is all that was asked of it, in order; a step also has what each slot sampled and which
    groups it finished. others: lengths of groups of stream 1, which are there from the beginning;
    they have the script's last cursors.
    """

    def __init__(self, script: Script, *, slots: int, block_tokens: int, others=()):
        self.resume()
        self._script = script
        longest = int(script.length_PG.max())
        cache = Cache(
            slots=slots,
            pages=3 * slots + 2,
            prompt_pages=len(script.length_PG) + len(others) + 1,
            readers=G,
            page_tokens=-(-longest // block_tokens) * block_tokens,
            block_tokens=block_tokens,
            max_prompt_tokens=2,
            max_response_tokens=longest,
            partial_rollouts=True,
        )
        self._scheduler = Scheduler(cache, shards=1)
        self._names: list[tuple[int, int]] = []
        self._begun: dict[int, PartialGroup] = {}
        for cursor, lengths in enumerate(others, start=len(script.length_PG) - len(others)):
            self._scheduler.submit(len(self._names), 2, np.minimum(lengths, longest).tolist())
            self._names.append((1, cursor))

    def submit(self, cursor, prompt, *, group_size, partial=None, keeps=False) -> None:
        assert prompt.token_ids.tolist() == [cursor + 1]
        self.calls.append(("submit", cursor))
        tokens = ()
        if partial:
            pairs = zip(partial.responses, partial.unfinished_G, strict=True)
            tokens = [len(r.tokens_T) if more else None for r, more in pairs]
            self._begun[cursor] = partial
        lengths = self._script.length_PG[cursor, :group_size].tolist()
        self._scheduler.submit(len(self._names), 2, lengths, first_tokens=tokens, keeps=keeps)
        self._names.append((0, cursor))

    def cancel(self, cursor: int) -> None:
        self.calls.append(("cancel", cursor))
        self._scheduler.cancel(self._names.index((0, cursor)))

    @property
    def unfinished(self) -> list[tuple[int, int]]:
        return [self._names[number] for number in self._scheduler.unfinished]

    @property
    def slots(self) -> int:
        return self._scheduler.cache.slots

    @property
    def idle_slots(self) -> int:
        return self._scheduler.idle_slots

    def step(self, *, more: bool = False) -> list[Group]:
        plan = self._scheduler.next_block(more=more)
        self.stats.prefilled_prompts += sum(np.sum(call.group_R >= 0) for call in plan.prefills)
        used_N = np.minimum(plan.left_N, self._scheduler.cache.block_tokens)
        useful_B = np.zeros(self.slots, int)
        useful_B[plan.slot_N] = used_N
        stream_N = np.array([self._names[number][0] for number in plan.group_N], int)
        before = set(self.unfinished)
        self._scheduler.complete(used_N, np.zeros(len(used_N), bool))
        finished = sorted(before - set(self.unfinished))
        self.calls.append(("step", *useful_B.tolist(), *(cursor for _, cursor in finished)))
        steps, shares = int(useful_B.max()), {"cache_use": plan.cache_use}
        self.stats.add_block(
            steps, self.slots, used_N, stream_N == 0, waiting=plan.waiting, **shares
        )
        return [self._group(*name) for name in finished]

    def _group(self, stream: int, cursor: int) -> Group:
        length_G, begun = self._script.length_PG[cursor], self._begun.get(cursor)
        ends_G = [was.ends for was in begun.responses] if begun else [()] * len(length_G)
        pairs = zip(length_G, ends_G, strict=True)
        made = (Response(np.full(n, cursor), np.zeros(n), True, ends=ends) for n, ends in pairs)
        return Group(cursor, prompt_at(cursor), tuple(made), stream)

    def pause(self) -> list[PartialGroup]:
        taken, slots = [], self._scheduler.occupied
        for number in self._scheduler.unfinished:
            cursor, responses, unfinished_G = self._names[number][1], [], []
            for g, ended in enumerate(self._group(0, cursor).responses):
                more = (number, g) in slots or self._waits(number, g)
                n = slots[number, g][2] if (number, g) in slots else max(ended.ends, default=0)
                n = n if more else len(ended.tokens_T)
                response = Response(np.full(n, cursor), np.zeros(n), not more, ends=ended.ends)
                responses.append(response.continued())
                unfinished_G.append(more)
            taken.append(PartialGroup(cursor, tuple(responses), tuple(unfinished_G)))
        self._begun.update((it.cursor, it) for it in taken)
        return taken

    def resume(self) -> None:
        self.calls: list[tuple] = []
        self.stats = RolloutStats(seconds={"prefill": 1.0, "decode": 2.0, "host": 3.0})

    def _waits(self, number: int, g: int) -> bool:
        ready = [r for shard in self._scheduler._ready for r in shard]
        queued = [(prefix, s) for prefix in self._scheduler._queue for s in prefix.samples]
        return any(p.group == number and s == g for p, s in [*ready, *queued])


def scripted_grade(script: Script):
    """A grader that knows the script: responses have the answer 7 where they are correct."""

    def grade(group: Group) -> Group:
        assert group.prompt.example.row == group.cursor
        correct_G = script.correct_PG[group.cursor]
        right, wrong = Verdict(True, "7", "correct"), Verdict(False, None, "no_answer")
        return group.graded(
            ["Answer: 7" if correct else "7" for correct in correct_G],
            [right if correct else wrong for correct in correct_G],
        )

    return grade


def plan_of(script: Script, *, num_prompts, max_prompts, grade=None, **rules) -> StepPlan:
    return StepPlan(
        prompt_at,
        grade or scripted_grade(script),
        group_size=script.correct_PG.shape[1],
        num_prompts=num_prompts,
        max_prompts=max_prompts,
        max_tokens=int(script.length_PG.max()),
        **rules,
    )


def run(
    script: Script,
    cursor=0,
    *,
    slots=8,
    block_tokens=4,
    expected_rate=0.5,
    max_prompts=None,
    session=None,
    report=lambda message: None,
    on_other_groups=lambda finished: None,
    **rules,
) -> Rollouts:
    """Runs `collect` over a script; the cap, unless given, is the script's end."""
    session = session or ScriptedSession(script, slots=slots, block_tokens=block_tokens)
    plan = plan_of(script, max_prompts=max_prompts or len(script.correct_PG) - cursor, **rules)
    how = {"expected_rate": expected_rate, "report": report, "on_other_groups": on_other_groups}
    return collect(session, plan, cursor, **how)


def cursors(rollouts: Rollouts) -> list[int]:
    """Lists the sampled groups' places in the stream."""
    return [group.cursor for group in rollouts.sampled]


def kept_cursors(rollouts: Rollouts) -> list[int]:
    return [rollouts.sampled[p].cursor for p in rollouts.kept]


def steps(session: ScriptedSession) -> list[tuple]:
    return [call for call in session.calls if call[0] == "step"]
