"""A session samples groups with one set of weights at a time: it joins scheduler and engine.

A session keeps what neither of them knows: the tokens' ids. Data flow of `Session.step`:

    scheduler.next_block -> engine.prefill of new prompts -> engine.copy of samples that change
    shards -> engine.prefill of partial responses -> engine.decode of one block -> tokens to the
    host's pages -> scheduler.complete -> responses of ended requests -> groups

A request is (stream, cursor, sample). A stream has a random key and a way of sampling: training is
one, each evaluation set another, and they share slots, pages and programs. A request's tokens
depend on no schedule and no neighbour, except with partial rollouts. Axis letters: those of
`scheduler`, its P among them; C tokens of a page, S of a block, Z streams, L layers, A experts.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax.episodes import Answer, End, Environments, Where
from dapo_jax.process import hosts
from dapo_jax.sampler.cache import NULL_PAGE
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.engine import Engine
from dapo_jax.sampler.plan import Moves, Plan, Prefill, Sample
from dapo_jax.sampler.scheduler import Scheduler
from dapo_jax.tasks.datasets import Dataset
from dapo_jax.types import TRAINING, Group, Prompt, Response, RolloutStats, Status
from sharding import rules

# An environment's answer of at most so many tokens is fed in the block, one a decode step; with a
# longer one the keys and values of the whole sequence are computed again, together.
LONG_ANSWER = 64
# With partial rollouts an answer is taken so many blocks behind its turn, however fast it comes:
# which groups are complete first depends on no clock.
ANSWER_BLOCKS = 4
_NOTHING = Response(np.zeros(0, np.int32), np.zeros(0, np.float32), Status.RUNNING)


class Stream(NamedTuple):
    """Requests that are sampled alike, with random numbers of their own.

    name, dataset: of an evaluation set, all of which is one stream.
    """

    key: jax.Array
    sampling: Sampling
    name: str = ""
    dataset: Dataset | None = None


@dataclasses.dataclass(eq=False)
class _Unfinished:
    """An unfinished group, by which the scheduler names its samples.

    stream: its place among the session's. responses: an unfinished one is as of its submission, the
    last step's end, the loss of its slot or its environment's answer, whichever came last.
    is_episode: whether it has an environment. prompt_route_TLA: of its newest prefill.
    """

    stream: int
    cursor: int
    prompt: Prompt
    responses: list[Response]
    is_episode: bool
    prompt_route_TLA: np.ndarray | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Names it: stream and cursor."""
        return self.stream, self.cursor

    def so_far(self) -> Group:
        """Returns the group with what there is of it."""
        return Group(self.cursor, self.prompt, tuple(self.responses), self.stream)


class Session:
    """Samples groups until the caller has what it needs.

    With partial rollouts it may go on with newer weights (`pause`, `resume`): responses under way
    keep their pages, whose keys and values stay those of the weights that made them (as in
    PipelineRL, arXiv 2509.19128). stats: the work since the weights came.
    """

    def __init__(
        self, engine: Engine, params, *streams: Stream, environments: Environments | None = None
    ):
        """Compiles what is missing and makes empty pages.

        params: the sampler's, on the mesh. A stream's limit is at most what the cache is planned
        for. environments: answer the turns of the prompts that have one (tasks/README.md).
        """
        self._environments = environments or Environments({}, None, max_turns=0)  # plays none
        self._stalled = False  # no slot has anything to decode
        self._part = ""  # that `_timed` times
        self._engine, cache = engine, engine.cache
        self.streams, self._samplings = streams, tuple(stream.sampling for stream in streams)
        engine.compile(*self._samplings)
        self.resume(params)
        run_key_Z = np.stack([jax.random.key_data(stream.key) for stream in streams])
        self._run_key_Z = hosts.place(run_key_Z, rules.replicated(engine.mesh))
        self._truncates_Z = np.array([s.top_p < 1 or s.top_k > 0 for s in self._samplings])
        self._prompt_pages, self._pages = engine.new_pages()
        self._scheduler = Scheduler(cache, engine.shards)
        self._groups: dict[tuple[int, int], _Unfinished] = {}
        # Sampled tokens lie in the host's pages as their keys and values do in the device's.
        pool = (engine.shards, cache.pages, cache.page_tokens)
        self._token_DPC, self._logp_DPC = np.zeros(pool, np.int32), np.zeros(pool, np.float32)
        routes = engine.config.routes
        self._route_DPCLA = np.zeros((*pool, *routes), np.uint8) if routes else None
        self._decoded = 0  # blocks so far
        self._asked: dict[Where, int] = {}  # turn without an answer -> blocks decoded then

    def resume(self, params) -> None:
        """Continues with these weights."""
        self._params = params
        parts = ("prefill", "decode", "host", *["environment"] * self._engine.cache.turns)
        self.stats = RolloutStats(seconds=dict.fromkeys(parts, 0.0))

    def close(self) -> None:
        """Frees the pages; nothing can be sampled after it."""
        self._environments.close()
        self._params = self._prompt_pages = self._pages = None

    def submit(
        self,
        cursor: int,
        prompt: Prompt,
        *,
        group_size: int,
        max_tokens: Sequence[int] | None = None,
        stream: int = 0,
        begun: Sequence[Response] = (),
    ) -> None:
        """Asks for `group_size` samples of a prompt, after all that were asked for.

        max_tokens: a limit for each of them, at most the stream's; None: the stream's. stream: its
        place among the session's; cursors name groups within one. begun: an earlier session's
        responses, of which whole blocks are kept; the rest is sampled again, or fed in an episode.

        The prompt has 1 to `Cache.max_prompt_tokens` tokens: data sets have no others.
        """
        limit = self._samplings[stream].max_response_tokens
        limits = [limit] * group_size if max_tokens is None else list(max_tokens)
        responses = list(begun) or [_NOTHING] * group_size
        is_episode = self._environments.is_episode(prompt)
        first_tokens = [
            self._whole_blocks(response, limit) if response.is_unfinished else None
            for response, limit in zip(responses, limits, strict=True)
        ]
        group = _Unfinished(stream, cursor, prompt, responses, is_episode)
        self._groups[group.key] = group
        self._scheduler.submit(
            group, len(prompt.token_ids), limits, first_tokens=first_tokens, parks=is_episode
        )

    def _whole_blocks(self, response: Response, limit: int) -> int:
        """Counts the tokens of a partial response to keep, rounded down to whole blocks.

        At least one more is to come, or is fed again: the end of a turn without an answer yet.
        """
        fed_again = int(response.status is Status.WAITING)  # the token that ended a turn
        tokens = min(len(response.tokens_T) - fed_again, limit - 1)
        return tokens - tokens % self._engine.cache.block_tokens

    def cancel(self, cursor: int) -> None:
        """Forgets an unfinished group of training; the tokens sampled for it are discarded."""
        group = self._groups.pop((TRAINING, cursor))
        self._scheduler.cancel(group)
        self._environments.close(group.key)

    def pause(self) -> list[Group]:
        """Ends a step: returns training's unfinished groups so far, and lets go of the weights.

        They continue after `resume`, or in another session that they are submitted to.
        """
        self._params, unfinished = None, []
        for (group, g), sample in self._scheduler.occupied.items():
            if group.stream == TRAINING:
                group.responses[g] = self._so_far(sample)
        for group in self._groups.values():
            if group.stream == TRAINING:
                unfinished.append(group.so_far().continued())
                group.responses = list(unfinished[-1].responses)
        return unfinished

    @property
    def unfinished(self) -> list[tuple[int, int]]:
        """Lists (stream, cursor) of groups neither finished nor cancelled, as submitted."""
        return list(self._groups)

    @property
    def slots(self) -> int:
        """Counts the slots of all shards."""
        return self._engine.shards * self._engine.cache.slots

    @property
    def idle_slots(self) -> int:
        """Counts the slots that no sample submitted so far will fill."""
        return self._scheduler.idle_slots

    def step(self, *, more: bool = False) -> list[Group]:
        """Decodes one block with filled slots; returns the groups that finished.

        They are in order of streams and cursors. more: as of `Scheduler.next_block`.
        """
        with self._timed("host"):
            if self._engine.cache.turns:
                with self._timed("environment"):
                    self._take_answers()
            if self._scheduler.has_work:
                self._decode(self._scheduler.next_block(more=more))
            return self._finished()

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Adds the seconds inside to a part, and takes them off the part around it."""
        around, self._part, start = self._part, part, time.perf_counter()
        yield
        spent, self._part = time.perf_counter() - start, around
        self.stats.seconds[part] += spent
        if around:
            self.stats.seconds[around] -= spent

    def _decode(self, plan: Plan) -> None:
        """Carries a plan out: prefills, copies, one block of decode steps, and what ended by it."""
        for sample in plan.preempted:
            sample.prefix.group.responses[sample.index] = self._so_far(sample)
        with self._timed("prefill"):
            # In this order: a prompt computed here may move, and leave its pages to a response.
            self._prefill(plan.prefills)
            self._move(plan.moves)
            self._prefill(plan.recomputes)
        self._stalled = not len(plan.shard_N)  # parked samples have all pages
        if self._stalled:
            return
        stream_N, cursor_N = np.array([group.key for group in plan.group_N]).T
        # Truncated streams first: there `sampling.truncate` looks for them.
        rows, page_P, row_N = self._scheduler.table(
            self._engine.sizes, behind_N=~self._truncates_Z[stream_N]
        )
        rows["token"][row_N], rows["page"][row_N] = self._next_tokens(plan), plan.page_N
        rows["stream"][row_N], rows["cursor"][row_N] = stream_N, cursor_N
        given_NS, known_logp_NS, is_end_NS = self._known(plan)
        if self._engine.cache.turns:
            rows["given"][row_N] = given_NS
        with self._timed("decode"):
            pools = self._prompt_pages, self._pages
            self._pages, *sampled = self._engine.decode(
                self._params, *pools, self._run_key_Z, rows, page_P, self._samplings
            )
        self._decoded += 1
        sampled = [a if a is None else a[:, row_N].swapaxes(0, 1) for a in sampled]
        used_N, stopped_N = self._keep(plan, *sampled, given_NS, known_logp_NS, is_end_NS)
        given_N = np.minimum((given_NS > 0).sum(axis=1), used_N)
        self.stats.add_block(
            int(used_N.max(initial=0)),
            self.slots,
            used_N - given_N,
            stream_N == TRAINING,
            waiting=plan.waiting,
            cache_use=plan.cache_use,
        )
        self._end(self._scheduler.complete(used_N, stopped_N))

    def _prefill(self, prefills: list[Prefill]) -> None:
        """Computes the keys and values of prompts, or of partial responses that were admitted."""
        C = self._engine.cache.page_tokens
        for rows, page_RI in prefills:
            tokens_RT = np.zeros((len(page_RI), page_RI.shape[1] * C), np.int32)
            tokens_R, begin_R = np.zeros((2, len(page_RI)), np.int32)
            # Of the prompt, and of the response.
            page_R2I = np.full((len(page_RI), 2, page_RI.shape[1]), NULL_PAGE, np.int32)
            for r, (group, sample) in rows.items():
                fed, begin_R[r] = group.prompt.token_ids, len(group.prompt.token_ids) - 1
                tokens_R[r] = begin_R[r]
                if sample:
                    fed = np.append(fed, group.responses[sample.index].tokens_T)
                    tokens_R[r] += sample.tokens
                tokens_RT[r, : tokens_R[r]] = fed[: tokens_R[r]]
                page_R2I[r, int(sample is not None)] = page_RI[r]
            of_rows = tokens_RT, tokens_R, begin_R, page_R2I
            self._prompt_pages, self._pages, route_RTLA = self._engine.prefill(
                self._params, self._prompt_pages, self._pages, *of_rows
            )
            for r, (group, sample) in rows.items():
                route_TLA = None if route_RTLA is None else route_RTLA[r, : tokens_R[r]].copy()
                if sample:
                    self._restore(group.responses[sample.index], sample, route_TLA)
                    continue
                self.stats.prefilled_prompts += 1
                group.prompt_route_TLA = route_TLA
        jax.block_until_ready((self._prompt_pages, self._pages))

    def _restore(self, response: Response, sample: Sample, route_TLA) -> None:
        """Puts the tokens of a partial response into the pages that it was given.

        route_TLA: the computed ones, of prompt and response. Tokens that were sampled or fed keep
        the routes that they had.
        """
        C = self._engine.cache.page_tokens
        index_T = np.arange(sample.tokens)
        where = (sample.prefix.shard, sample.pages[index_T // C], index_T % C)
        self._token_DPC[where] = response.tokens_T[: sample.tokens]
        self._logp_DPC[where] = response.behavior_logp_T[: sample.tokens]
        if route_TLA is not None:
            known_TLA = response.route_TLA[: len(route_TLA)]
            route_TLA = np.concatenate([known_TLA, route_TLA[len(known_TLA) :]])
            self._route_DPCLA[where] = route_TLA[len(route_TLA) - sample.tokens :]

    def _move(self, moves: Moves) -> None:
        """Copies the pages of samples that change shards, on the devices and on the host."""
        self._prompt_pages = self._engine.copy(self._prompt_pages, moves.prompt_pages_M4)
        self._pages = self._engine.copy(self._pages, moves.pages_M4)
        d, at, e, to = moves.pages_M4.T
        for table in (self._token_DPC, self._logp_DPC, self._route_DPCLA):
            if table is not None:
                table[e, to] = table[d, at]

    def _next_tokens(self, plan: Plan) -> np.ndarray:
        """Finds the token that each occupied slot feeds first: its newest, or its prompt's last."""
        # -1: the last of a full page.
        newest_N = plan.sampled_N % self._engine.cache.page_tokens - 1
        token_N = self._token_DPC[plan.shard_N, plan.newest_page_N, newest_N]
        for n in np.flatnonzero(plan.sampled_N == 0).tolist():
            token_N[n] = plan.group_N[n].prompt.token_ids[-1]
        return token_N

    def _known(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Finds the tokens of a block that are known [N, S].

        They are an environment's, and those before them of a sample that starts again. Returns
        (token + 1, else 0; log-probability; whether it ends a turn without an answer yet).
        """
        given_NS = np.zeros((len(plan.group_N), self._engine.cache.block_tokens), np.int32)
        logp_NS, is_end_NS = np.zeros(given_NS.shape, np.float32), np.zeros(given_NS.shape, bool)
        rows = zip(plan.group_N, plan.sample_N, plan.sampled_N, strict=True)
        for n, (group, sample, first) in enumerate(rows if self._engine.cache.turns else ()):
            if group.is_episode:
                known = group.responses[sample]
                tokens_T = known.tokens_T[first : first + given_NS.shape[1]]
                given_NS[n, : len(tokens_T)] = tokens_T + 1
                logp_NS[n, : len(tokens_T)] = known.behavior_logp_T[first:][: len(tokens_T)]
                left = len(known.tokens_T) - first
                if known.status is Status.WAITING and 0 < left <= given_NS.shape[1]:
                    is_end_NS[n, left - 1] = True
        return given_NS, logp_NS, is_end_NS

    def _keep(self, plan: Plan, token_NS, logp_NS, route_NSLA, given_NS, known_logp_NS, is_end_NS):
        """Keeps a block's tokens; returns how many each slot uses, and whether they end in a stop.

        The tokens that a slot samples after its stop token or its limit are not used.
        """
        cache, S = self._engine.cache, token_NS.shape[1]
        is_stop_NS = np.isin(token_NS, self._samplings[0].stop_ids) & (given_NS == 0) | is_end_NS
        logp_NS = np.where(given_NS > 0, known_logp_NS, logp_NS)
        stop_N = np.where(is_stop_NS.any(axis=1), is_stop_NS.argmax(axis=1), S)
        used_N = np.minimum(stop_N + 1, np.minimum(plan.left_N, S))
        offset_NS = (plan.sampled_N % cache.page_tokens)[:, None] + np.arange(S)
        where = (plan.shard_N[:, None], plan.page_N[:, None], offset_NS)
        self._token_DPC[where], self._logp_DPC[where] = token_NS, logp_NS
        if route_NSLA is not None:
            self._route_DPCLA[where] = route_NSLA
        return used_N, used_N == stop_N + 1

    def _end(self, ended: list[Sample]) -> None:
        """Stores the responses of ended samples.

        Those with an environment have ended a turn, on which it is asked.
        """
        for sample in ended:
            group = sample.prefix.group
            if not group.is_episode:
                status = Status.STOPPED if sample.stopped else Status.CUT
                group.responses[sample.index] = self._response(sample, status)
                continue
            # Without room for more it is unfinished until its environment has graded it.
            status = Status.WAITING if sample.stopped else Status.RUNNING
            response = group.responses[sample.index] = self._response(sample, status)
            room = self._samplings[group.stream].max_response_tokens - sample.tokens
            where = (*group.key, sample.index)
            if self._engine.cache.partial_rollouts:
                self._asked[where] = self._decoded
            self._environments.ask(where, group.prompt, response, room)

    def _finished(self) -> list[Group]:
        """Takes out the groups of which nothing is left, in order of streams and cursors."""
        ended = [
            key
            for key, group in sorted(self._groups.items())
            if not any(response.is_unfinished for response in group.responses)
        ]
        return [self._groups.pop(key).so_far() for key in ended]

    def _take_answers(self) -> None:
        """Lets samples go on whose environments have answered, or ends them."""
        for (*key, sample), answer in self._arrived():
            if (group := self._groups.get(tuple(key))) is None:
                continue  # cancelled meanwhile
            response = group.responses[sample]
            if isinstance(answer, End):
                group.responses[sample] = dataclasses.replace(response, **answer._asdict())
                self._scheduler.end(group, sample)
                continue
            more = len(answer)
            group.responses[sample] = dataclasses.replace(
                response,
                tokens_T=np.append(response.tokens_T, np.int32(answer)),
                behavior_logp_T=np.append(response.behavior_logp_T, np.zeros(more, np.float32)),
                given_T=np.append(~response.sampled_T, np.ones(more, bool)),
                status=Status.RUNNING,
            )
            first = 0
            if more > LONG_ANSWER:
                limit = self._samplings[group.stream].max_response_tokens
                first = self._whole_blocks(group.responses[sample], limit)
            self._scheduler.resume(group, sample, first_tokens=first)

    def _arrived(self) -> list[tuple[Where, Answer]]:
        """Returns the answers to take now; waits where one is due, or where all wait for one."""
        idle = self._stalled or not self._scheduler.has_work
        if not self._engine.cache.partial_rollouts:
            return self._environments.answers(wait=idle)
        until = self._decoded - ANSWER_BLOCKS
        if idle:
            until = max(until, min(self._asked.values(), default=until))
        due = [where for where, decoded in self._asked.items() if decoded <= until]
        for where in due:
            del self._asked[where]
        return self._environments.answers(due, wait=True)

    def _so_far(self, sample: Sample) -> Response:
        """Makes a response of a sample that has not ended; more is known of one fed again."""
        known = sample.prefix.group.responses[sample.index]
        if not (sample.prefix.parks and sample.tokens < len(known.tokens_T)):
            return self._response(sample, Status.RUNNING)
        route_TLA = self._route(sample)  # also of an answer that was fed in part
        if route_TLA is None or len(route_TLA) <= len(known.route_TLA):
            return known
        return dataclasses.replace(known, route_TLA=route_TLA)

    def _response(self, sample: Sample, status: Status) -> Response:
        tokens_T, logp_T = (
            pool_DPC[sample.prefix.shard, sample.pages].reshape(-1)[: sample.tokens]
            for pool_DPC in (self._token_DPC, self._logp_DPC)
        )
        # Fewer where the tokens of a block that was not whole are sampled again.
        before = sample.prefix.group.responses[sample.index]
        ends = tuple(min(end, sample.tokens) for end in before.ends)
        given_T, route_TLA = before.given_T, self._route(sample)
        if given_T is not None:
            given_T = np.pad(given_T, (0, sample.tokens - len(given_T)))
        return Response(tokens_T, logp_T, status, ends=ends, given_T=given_T, route_TLA=route_TLA)

    def _route(self, sample: Sample) -> np.ndarray | None:
        if self._route_DPCLA is None:
            return None
        pages_PCLA = self._route_DPCLA[sample.prefix.shard, sample.pages]
        route_TLA = pages_PCLA.reshape(-1, *pages_PCLA.shape[2:])[: sample.tokens]
        # None where the prompt has one token: nothing to prefill.
        of_prompt = sample.prefix.group.prompt_route_TLA
        return route_TLA if of_prompt is None else np.concatenate([of_prompt, route_TLA])
