"""Continuous batching: slots that are refilled as responses end, over a paged cache.

One `Session` samples with one set of weights. The host keeps the books between blocks of decode
steps: which request is in which slot, which pages it has, and who comes next. Data flow of
`Session.step`:

    queue of groups -> a shard's ready requests (prompt prefilled once a group) -> slots
    slots -> decode_block on every shard -> tokens appended, ended requests leave, groups finish

The books are plain Python in a fixed order, so the same submissions give the same schedule; and a
request's tokens depend on no schedule at all.
"""

import collections
import concurrent.futures
import dataclasses
import heapq
import math
import os
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.sampler.decode import NULL_PAGE, Sampling, Slots, decode_block, prefill
from models.kernels import Kernels
from models.kernels.xla import PageTable
from models.qwen2 import Qwen2Config
from sharding import hosts, rules

# Batches are padded to a multiple: products of other sizes have other bits in each row. 16 was
# enough on the CPUs tried first, AMD's Zen 5 needs 32.
ROWS = 32
# What plain XLA decodes, as parts of the slots and of the response pages: the first that holds the
# occupied slots and their pages. Fewer rows on a CPU only: elsewhere they have other bits.
PARTS = ((1 / 4, 1 / 8), (1 / 2, 1 / 4), (1 / 2, 1 / 2), (1, 1 / 2), (1, 3 / 4), (1, 1))
IN_FLIGHT = 3  # groups whose prompts are kept, over the least that fill the slots


@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of one data shard, in pages of `page_tokens` tokens; page 0 is nobody's.

    Prompts have pages of their own, which at most `readers` slots share. A block of
    `block_tokens` decode steps divides a page. `max_prompt_tokens` and `max_response_tokens`
    bound what one request may take.
    """

    slots: int
    pages: int
    prompt_pages: int
    readers: int
    page_tokens: int
    block_tokens: int
    max_prompt_tokens: int
    max_response_tokens: int

    @property
    def pages_per_prompt(self) -> int:
        """Of the longest one (I); a prompt's last token is fed when decoding begins."""
        return -(-(self.max_prompt_tokens - 1) // self.page_tokens)

    @property
    def pages_per_response(self) -> int:
        """Of the longest one (J)."""
        return -(-self.max_response_tokens // self.page_tokens)


def plan_cache(
    config: Qwen2Config,
    *,
    cache_bytes: int,
    slot_tokens: int,
    readers: int,
    page_tokens: int,
    block_tokens: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
    bytes_per_value: int,
    model_ways: int,
    copies: bool,
) -> Cache:
    """The slots and pages that a device's memory budget holds.

    There is a slot for every `slot_tokens` response tokens of cache: longer responses take pages
    that shorter ones leave. The keys and values of the block being decoded count too, and
    (copies) those of the parts of the pool that plain XLA attends to, of 3/4 at most. Raises
    ValueError where one request of the greatest length would not fit.
    """
    check_heads(config, model_ways)
    heads = config.num_kv_heads // model_ways
    token_bytes = 2 * config.num_layers * heads * config.head_dim * bytes_per_value
    page_bytes = token_bytes * page_tokens

    def cache(budget_bytes: int, slots: int) -> Cache:
        limits = Cache(
            slots=slots,
            pages=0,
            prompt_pages=0,
            readers=readers,
            page_tokens=page_tokens,
            block_tokens=block_tokens,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
        )
        longest = limits.pages_per_prompt
        prompt_pages = longest + IN_FLIGHT * -(-slots // readers) * min(longest, 2) + 1
        left = budget_bytes - padded(slots) * block_tokens * token_bytes - prompt_pages * page_bytes
        pages = max(0, left // page_bytes)
        pages = pages * 4 // 7 if copies else pages
        return dataclasses.replace(limits, prompt_pages=prompt_pages, pages=pages)

    def plan(budget_bytes: int) -> Cache | None:
        slots = max(1, budget_bytes // (token_bytes * slot_tokens))
        while slots > 1 and (cache(budget_bytes, slots).pages - 1) * page_tokens < (
            slots * slot_tokens
        ):
            slots -= 1
        planned = cache(budget_bytes, slots)
        return planned if planned.pages > planned.pages_per_response else None

    planned = plan(cache_bytes)
    if planned is None:
        enough_mib = -(-cache_bytes // 2**20)
        while plan(enough_mib * 2**20) is None:
            enough_mib += 1 + enough_mib // 50
        raise ValueError(
            f"rollout.cache_mib = {cache_bytes / 2**20:g} does not hold one prompt of "
            f"{max_prompt_tokens} tokens and one response of {max_response_tokens} on a device; "
            f"{enough_mib} does"
        )
    return planned


def decode_sizes(cache: Cache, *, kernel: bool, few_rows: bool) -> list[tuple[int, int]]:
    """(rows, pages) of a shard that decoding is compiled for, the smallest first."""
    return sorted(
        {
            (padded(math.ceil(cache.slots * slots)), math.ceil(cache.pages * pages))
            for slots, pages in (((1, 1),) if kernel else PARTS)
            if slots == 1 or few_rows
        }
    )


def padded(slots: int) -> int:
    """Rows of a batch for so many slots."""
    return -(-slots // ROWS) * ROWS


def check_heads(config: Qwen2Config, model_ways: int) -> None:
    """ValueError where the key/value heads do not divide over the "model" axis."""
    if config.num_kv_heads % model_ways:
        raise ValueError(
            f"mesh.model = {model_ways} does not divide the model's {config.num_kv_heads} "
            "key/value heads, which decoding splits over it; the nearest that does is "
            f"{math.gcd(config.num_kv_heads, model_ways)}"
        )


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response: tokens, the stop token included, and their log-probabilities."""

    tokens: np.ndarray
    behavior_logp: np.ndarray
    stopped: bool  # False: cut off at the length limit


@dataclasses.dataclass(frozen=True)
class Finished:
    """A whole group: the responses to the prompt at `cursor`, by sample index."""

    cursor: int
    responses: list[Response]


@dataclasses.dataclass(eq=False)
class Group:
    """Samples of one prompt that are being drawn, at most as many as may share its pages.

    limits: the greatest number of tokens of each.
    """

    cursor: int
    prompt: np.ndarray
    samples: range
    limits: list[int]
    pages: list[int] = dataclasses.field(default_factory=list)
    unfinished: int = 0


@dataclasses.dataclass(eq=False)
class Request:
    """One (prompt, sample) and the response so far, a piece a block.

    Between blocks `drawn_tokens` is also the number of tokens in its own pages: the prompt's last
    one comes first there, and the newest one is fed in the next block.
    """

    group: Group
    sample: int
    max_tokens: int
    pages: list[int] = dataclasses.field(default_factory=list)
    drawn_tokens: int = 0
    drawn: list[np.ndarray] = dataclasses.field(default_factory=list)
    logp: list[np.ndarray] = dataclasses.field(default_factory=list)


class Shard:
    """The books of one data shard: free pages, who is ready, and who is in which slot."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.free_pages = list(range(NULL_PAGE + 1, cache.pages))
        self.free_prompt_pages = list(range(NULL_PAGE + 1, cache.prompt_pages))
        self.ready: collections.deque[Request] = collections.deque()
        self.slots: list[Request | None] = [None] * cache.slots
        self.by_age: list[int] = []  # occupied slots, the longest in first

    @property
    def wanted(self) -> int:
        """Free slots that no ready request will take."""
        return self.slots.count(None) - len(self.ready)

    def accept(self, group: Group, prompt_pages: int) -> None:
        """Pages for a group's prompt; its samples are ready."""
        group.pages = take(self.free_prompt_pages, prompt_pages)
        group.unfinished = len(group.samples)
        self.ready.extend(
            Request(group, sample, limit)
            for sample, limit in zip(group.samples, group.limits, strict=True)
        )

    def admit(self) -> None:
        """Ready requests to free slots, lowest slot first, while there are pages.

        Those in slots keep what they will take in two blocks: a request that is let in too soon
        has to be given up again.
        """
        for b, occupant in enumerate(self.slots):
            growth = 2 * len(self.by_age) * self.cache.block_tokens // self.cache.page_tokens
            if occupant is None and self.ready and len(self.free_pages) > growth:
                self.slots[b] = self.ready.popleft()
                self.slots[b].pages = take(self.free_pages, 1)
                self.by_age.append(b)

    def grow(self) -> int:
        """A page for every slot whose last one is full; returns how many tokens were given up.

        Where none is left, the youngest request starts again later: its tokens will be the same.
        """
        given_up = 0
        for b in list(self.by_age):
            request = self.slots[b]
            if request is None:
                continue
            if request.drawn_tokens == len(request.pages) * self.cache.page_tokens:
                if not self.free_pages:
                    youngest = self.slots[self.by_age[-1]]
                    given_up += youngest.drawn_tokens
                    self.leave(self.by_age[-1])
                    again = Request(youngest.group, youngest.sample, youngest.max_tokens)
                    self.ready.appendleft(again)
                if self.slots[b] is not None:
                    request.pages += take(self.free_pages, 1)
        return given_up

    def leave(self, b: int) -> None:
        """Slot b is free again, and so are its request's own pages."""
        give(self.free_pages, self.slots[b].pages)
        self.slots[b] = None
        self.by_age.remove(b)

    def finish(self, group: Group) -> None:
        """The prompt's pages are free again."""
        give(self.free_prompt_pages, group.pages)


def take(free: list[int], count: int) -> list[int]:
    """The lowest free pages, so that those in use stay together at the pool's beginning."""
    return [heapq.heappop(free) for _ in range(count)]


def give(free: list[int], pages: list[int]) -> None:
    """Pages back to the free ones; the list is emptied."""
    for page in pages:
        heapq.heappush(free, page)
    pages.clear()


@dataclasses.dataclass
class Block:
    """What one block of decode steps did, for the metrics and the timeline.

    cursor_B: of the request in each slot of all shards, -1 in a free one. useful_B: tokens of its
    response that each slot drew. waiting: whether there were requests left to fill slots with.
    """

    start_seconds: float
    end_seconds: float
    steps: int
    cursor_B: np.ndarray
    sample_B: np.ndarray
    useful_B: np.ndarray
    waiting: bool
    cache_use: float


class Engine:
    """The compiled programs of one model on one mesh, for `Session` to run."""

    def __init__(self, config: Qwen2Config, mesh: Mesh, cache: Cache, *, params, kernels: Kernels):
        """params: ShapeDtypeStructs, with shardings, of models.qwen2.unstack's layout.

        kernels: how the programs attend and multiply.
        """
        check_heads(config, mesh.shape["model"])
        if cache.page_tokens % cache.block_tokens:
            raise ValueError(
                f"rollout.page_tokens = {cache.page_tokens} is not a multiple of "
                f"rollout.block_tokens = {cache.block_tokens}"
            )
        self.config, self.mesh, self.cache = config, mesh, cache
        self.shards = rules.row_ways(mesh)
        self._axis = "model" if mesh.shape["model"] > 1 else None
        self.params = params
        self._rows = rules.rows(mesh)
        self._page_spec = PartitionSpec(rules.ROW_AXES, "model")
        self._prompt_pages, self._pages = map(self._pool, (cache.prompt_pages, cache.pages))
        self._new_pages = jax.jit(
            lambda: jax.tree.map(
                lambda s: jnp.zeros(s.shape, s.dtype), (self._prompt_pages, self._pages)
            ),
            out_shardings=jax.tree.map(lambda s: s.sharding, (self._prompt_pages, self._pages)),
        )
        self._programs: dict[tuple, jax.stages.Compiled] = {}
        self._kernels = kernels
        self.sizes = decode_sizes(
            cache, kernel=kernels.attend_pages is not None, few_rows=kernels.fewer_rows
        )

    @property
    def pages(self):
        """ShapeDtypeStructs, with shardings, of a session's pages."""
        return self._prompt_pages, self._pages

    @property
    def prompt_buckets(self) -> list[int]:
        """Padded prompt lengths that prefill is compiled for, in pages: powers of two."""
        longest = self.cache.pages_per_prompt
        powers = [2**i for i in range(longest.bit_length()) if 2**i < longest]
        return [*powers, longest] if longest else []

    def bucket(self, prompt_tokens: int) -> int:
        """The bucket of a prompt, by its own length alone; 0 where nothing is prefilled."""
        pages = -(-(prompt_tokens - 1) // self.cache.page_tokens)
        return next(b for b in (0, *self.prompt_buckets) if b >= pages)

    def prefill_rows(self, bucket: int) -> int:
        """Prompts of one prefill call on each shard: as many tokens in every bucket."""
        return max(1, self.cache.pages_per_prompt // bucket)

    def lower(self, sampling: Sampling) -> dict[tuple, jax.stages.Lowered]:
        """All programs that a session may run, by (name, sampling, *sizes), before compilation."""
        lowered = {("prefill", None, b): self._lower_prefill(b) for b in self.prompt_buckets}
        return lowered | {
            ("decode", sampling, *size): self._lower_decode(sampling, *size) for size in self.sizes
        }

    def compile(self, sampling: Sampling) -> None:
        """Compile all that a session may run, so that nothing is compiled later."""
        if any(name == "decode" and how == sampling for name, how, *_ in self._programs):
            return
        self._new_pages.lower().compile()
        missing = {k: v for k, v in self.lower(sampling).items() if k not in self._programs}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = pool.map(lambda lowered: lowered.compile(), missing.values())
            self._programs |= dict(zip(missing, compiled, strict=True))

    @property
    def program_names(self) -> list[str]:
        """What has been compiled: prefill[pages of a prompt], decode[rows, pages]."""
        return [f"{name}{sizes}" for name, _, *sizes in self._programs]

    def size(self, slots: int, pages: int) -> tuple[int, int]:
        """(rows, pages) of the smallest decode program for so many in use on a shard."""
        return next(size for size in self.sizes if size[0] >= slots and size[1] >= pages)

    def new_pages(self):
        """(prompt pages, response pages) on the mesh, zeroed."""
        return self._new_pages()

    def prefill(self, params, prompt_pages, tokens_RT, page_RI):
        """Run prefill for [shards * rows] prompts of one bucket; the old pages are gone."""
        program = self._programs["prefill", None, page_RI.shape[1]]
        return program(params, prompt_pages, *hosts.place((tokens_RT, page_RI), self._rows))

    def decode(self, params, prompt_pages, pages, run_key, state_BX, page_P, sampling):
        """Run a block; (pages, token_SB, logp_SB), the latter two as numpy arrays.

        state_BX: int32, what `split_state` takes apart. page_P: the pages that its tables number.
        """
        size = (len(state_BX) // self.shards, len(page_P) // self.shards)
        program = self._programs["decode", sampling, *size]
        state_BX, page_P = hosts.place((state_BX, page_P), self._rows)
        pages, *drawn = program(params, prompt_pages, pages, run_key, state_BX, page_P)
        return pages, *hosts.fetch(drawn)

    def _pool(self, pages: int):
        """ShapeDtypeStructs of a (k_PKHC, v_PKCH) a layer, of so many pages a shard."""
        C, H = self.cache.page_tokens, self.config.head_dim
        dtype = jax.tree.leaves(self.params)[0].dtype

        def array(*tile):
            return jax.ShapeDtypeStruct(
                (self.shards * pages, self.config.num_kv_heads, *tile),
                dtype,
                sharding=NamedSharding(self.mesh, self._page_spec),
            )

        return ((array(H, C), array(C, H)),) * self.config.num_layers

    def _lower_prefill(self, bucket: int) -> jax.stages.Lowered:
        def run(params, prompt_pages, tokens_RT, page_RI):
            return prefill(
                params, prompt_pages, tokens_RT, page_RI, config=self.config, axis=self._axis
            )

        rows = self.shards * self.prefill_rows(bucket)
        tokens_RT = self._host_array(rows, bucket * self.cache.page_tokens)
        page_RI = self._host_array(rows, bucket)
        out = self._specs(self._prompt_pages)
        arguments = (self.params, self._prompt_pages, tokens_RT, page_RI)
        return self._lower(run, arguments, out, donate=1)

    def _lower_decode(self, sampling: Sampling, rows: int, pages: int) -> jax.stages.Lowered:
        cache = self.cache

        def run(params, prompt_pages, pages, run_key, state_BX, page_P):
            slots, table = split_state(state_BX, cache)
            return decode_block(
                params,
                prompt_pages,
                pages,
                jax.random.wrap_key_data(run_key),
                slots,
                table,
                page_P,
                config=self.config,
                sampling=sampling,
                block_tokens=cache.block_tokens,
                readers=cache.readers,
                kernels=self._kernels,
                axis=self._axis,
            )

        run_key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=rules.replicated(self.mesh))
        state_BX = self._host_array(self.shards * rows, state_columns(cache))
        page_P = self._host_array(self.shards * pages)
        tokens = PartitionSpec(None, rules.ROW_AXES)
        out = (self._specs(self._pages), tokens, tokens)
        arguments = (self.params, self._prompt_pages, self._pages, run_key, state_BX, page_P)
        return self._lower(run, arguments, out, donate=2)

    def _host_array(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._rows)

    def _specs(self, arrays):
        return jax.tree.map(lambda array: array.sharding.spec, arrays)

    def _lower(self, run, arguments, out, *, donate: int) -> jax.stages.Lowered:
        mapped = jax.shard_map(
            run, mesh=self.mesh, in_specs=self._specs(arguments), out_specs=out, check_vma=False
        )
        options = dict(self._kernels.compiler_options)
        return jax.jit(mapped, donate_argnums=donate, compiler_options=options).lower(*arguments)


def state_columns(cache: Cache) -> int:
    """Columns of state_BX."""
    return len(dataclasses.fields(Slots)) + 3 + cache.pages_per_prompt + cache.pages_per_response


def split_state(state_BX, cache: Cache) -> tuple[Slots, PageTable]:
    """Slots and PageTable from the one array that goes to the device for a block."""
    names = [field.name for field in dataclasses.fields(Slots)]
    columns = dict(zip(names, state_BX.T, strict=False))
    columns["active_B"] = columns["active_B"] > 0
    first = len(names) + 3
    prompt_tokens_B, response_tokens_B, rank_B = state_BX.T[len(names) : first]
    table = PageTable(
        prompt_BI=state_BX[:, first : first + cache.pages_per_prompt],
        response_BJ=state_BX[:, first + cache.pages_per_prompt :],
        prompt_tokens_B=prompt_tokens_B,
        response_tokens_B=response_tokens_B,
        rank_B=rank_B,
    )
    return Slots(**columns), table


class Session:
    """Samples groups with one set of weights until the caller has what it needs."""

    def __init__(self, engine: Engine, params, run_key, sampling: Sampling):
        """params: the sampler's, on the mesh. Raises ValueError for an impossible limit."""
        if sampling.max_response_tokens > engine.cache.max_response_tokens:
            raise ValueError(
                f"responses of {sampling.max_response_tokens} tokens were asked for, but the cache "
                f"is planned for {engine.cache.max_response_tokens}"
            )
        engine.compile(sampling)
        self.engine = engine
        self.blocks: list[Block] = []
        self.seconds = {"prefill": 0.0, "decode": 0.0, "host": 0.0}
        self.prefilled_prompts = 0
        self.given_up_tokens = 0  # drawn, but lost to a cancelled group or to a lack of pages
        self._params, self._sampling = params, sampling
        self._run_key = hosts.place(jax.random.key_data(run_key), rules.replicated(engine.mesh))
        self._prompt_pages, self._pages = engine.new_pages()
        self._queue: collections.deque[Group] = collections.deque()
        self._shards = [Shard(engine.cache) for _ in range(engine.shards)]
        self._home: dict[Group, Shard] = {}  # of the groups whose prompts are in pages
        self._responses: dict[int, list[Response | None]] = {}  # unfinished, by cursor

    def submit(
        self,
        cursor: int,
        prompt: np.ndarray,
        *,
        group_size: int,
        max_tokens: Sequence[int] | None = None,
    ) -> None:
        """Ask for `group_size` samples of a prompt (token ids), after all that were asked for.

        max_tokens: an end for each of them, at most the sampling's; None: the sampling's.
        Raises ValueError for an empty prompt, or one of more than `max_prompt_tokens`.
        """
        cache = self.engine.cache
        if not 1 <= len(prompt) <= cache.max_prompt_tokens:
            raise ValueError(
                f"the prompt at cursor {cursor} has {len(prompt)} tokens; it needs at least 1 and "
                f"at most rollout.max_prompt_tokens = {cache.max_prompt_tokens}"
            )
        prompt = np.asarray(prompt, np.int32)
        limit = self._sampling.max_response_tokens
        limits = [limit] * group_size if max_tokens is None else list(max_tokens)
        if len(limits) != group_size or not all(1 <= tokens <= limit for tokens in limits):
            raise ValueError(f"max_tokens needs {group_size} numbers from 1 to {limit}")
        for first in range(0, group_size, cache.readers):
            samples = range(first, min(first + cache.readers, group_size))
            self._queue.append(Group(cursor, prompt, samples, limits[first : samples.stop]))
        self._responses[cursor] = [None] * group_size

    def cancel(self, cursor: int) -> None:
        """Forget an unfinished group, whatever of it was drawn."""
        done = self._responses.pop(cursor)
        self.given_up_tokens += sum(len(r.tokens) for r in done if r is not None)
        self._queue = collections.deque(g for g in self._queue if g.cursor != cursor)
        for group, shard in list(self._home.items()):
            if group.cursor == cursor:
                for b in [b for b in shard.by_age if shard.slots[b].group is group]:
                    self.given_up_tokens += shard.slots[b].drawn_tokens
                    shard.leave(b)
                shard.ready = collections.deque(r for r in shard.ready if r.group is not group)
                shard.finish(group)
                del self._home[group]

    @property
    def unfinished(self) -> list[int]:
        """Cursors of the groups that were asked for and are neither finished nor cancelled."""
        return list(self._responses)

    @property
    def idle_slots(self) -> int:
        """Slots that no request asked for so far will fill."""
        queued = sum(len(group.samples) for group in self._queue)
        return max(0, sum(shard.wanted for shard in self._shards) - queued)

    def step(self) -> list[Finished]:
        """One block of decode steps with refilled slots; the groups that finished, by cursor."""
        start = time.perf_counter()
        prefill_before = self.seconds["prefill"]
        self._assign_groups()
        for shard in self._shards:
            self.given_up_tokens += shard.grow()
            shard.admit()
        state_BX, page_P = self._state()
        launched = time.perf_counter()
        self._pages, token_SB, logp_SB = self.engine.decode(
            self._params,
            self._prompt_pages,
            self._pages,
            self._run_key,
            state_BX,
            page_P,
            self._sampling,
        )
        decoded = time.perf_counter()
        finished = self._harvest(token_SB, logp_SB, launched, decoded)
        prefilled = self.seconds["prefill"] - prefill_before
        self.seconds["decode"] += decoded - launched
        self.seconds["host"] += time.perf_counter() - decoded + launched - start - prefilled
        return finished

    def _assign_groups(self) -> None:
        """Queued groups, in order, to the shards with most slots to fill; prefill their prompts.

        A prefill call has a row for several prompts of a bucket: rows that nobody needs yet are
        given to the next groups.
        """
        rows: dict[int, list[list[Group]]] = {}
        while self._queue:
            group = self._queue[0]
            bucket = self.engine.bucket(len(group.prompt))
            prompt_pages = -(-(len(group.prompt) - 1) // self.engine.cache.page_tokens)
            taken = rows.setdefault(bucket, [[] for _ in self._shards])
            able = [
                d
                for d, shard in enumerate(self._shards)
                if len(shard.free_prompt_pages) >= prompt_pages
                and (shard.wanted > 0 or (bucket and self._has_spare_row(taken, d, bucket)))
            ]
            if not able:
                break
            d = max(able, key=lambda d: (self._shards[d].wanted, -d))
            self._queue.popleft()
            self._shards[d].accept(group, prompt_pages)
            self._home[group] = self._shards[d]
            taken[d].append(group)
        for bucket, taken in rows.items():
            if bucket:
                self._prefill(bucket, taken)

    def _has_spare_row(self, taken: list[list[Group]], d: int, bucket: int) -> bool:
        """Whether the prefill calls that must be made have a row left for shard d."""
        rows = self.engine.prefill_rows(bucket)
        calls = -(-max(map(len, taken)) // rows)
        return len(taken[d]) < calls * rows

    def _prefill(self, bucket: int, groups_D: list[list[Group]]) -> None:
        start = time.perf_counter()
        rows = self.engine.prefill_rows(bucket)
        shape = (len(groups_D) * rows, bucket)
        for first in range(0, max(map(len, groups_D)), rows):
            tokens_RT = np.zeros((shape[0], bucket * self.engine.cache.page_tokens), np.int32)
            page_RI = np.full(shape, NULL_PAGE, np.int32)
            for d, groups in enumerate(groups_D):
                for r, group in enumerate(groups[first : first + rows]):
                    tokens_RT[d * rows + r, : len(group.prompt) - 1] = group.prompt[:-1]
                    page_RI[d * rows + r, : len(group.pages)] = group.pages
                    self.prefilled_prompts += 1
            self._prompt_pages = self.engine.prefill(
                self._params, self._prompt_pages, tokens_RT, page_RI
            )
        jax.block_until_ready(self._prompt_pages)
        self.seconds["prefill"] += time.perf_counter() - start

    def _state(self) -> tuple[np.ndarray, np.ndarray]:
        """(state_BX of the occupied slots of each shard, page_P: the pages in its tables).

        Tables number the pages in use; where the whole pool is attended to, as the pool does.
        """
        cache, D = self.engine.cache, len(self._shards)
        first = len(dataclasses.fields(Slots)) + 3
        own = first + cache.pages_per_prompt
        used = [sorted(page for b in s.by_age for page in s.slots[b].pages) for s in self._shards]
        rows, pages = self.engine.size(
            max(len(shard.by_age) for shard in self._shards), max(map(len, used)) + 1
        )
        state = np.zeros((D, rows, state_columns(cache)), np.int32)
        page_DP = np.full((D, pages), NULL_PAGE, np.int32)
        for shard, state_BX, page_P, in_use in zip(self._shards, state, page_DP, used, strict=True):
            in_use = range(cache.pages) if pages == cache.pages else [NULL_PAGE, *in_use]
            page_P[: len(in_use)] = in_use
            number = {page: i for i, page in enumerate(in_use)}
            for row_X, b in zip(state_BX, sorted(shard.by_age), strict=False):
                request = shard.slots[b]
                group, drawn = request.group, request.drawn_tokens
                prompt_tokens = len(group.prompt) - 1
                row_X[:first] = (
                    True,
                    group.cursor,
                    request.sample,
                    request.drawn[-1][-1] if drawn else group.prompt[-1],
                    prompt_tokens + drawn,
                    drawn,
                    request.max_tokens,
                    request.pages[drawn // cache.page_tokens],
                    drawn % cache.page_tokens,
                    prompt_tokens,
                    drawn,
                    request.sample - group.samples.start,
                )
                row_X[first : first + len(group.pages)] = group.pages
                row_X[own : own + len(request.pages)] = [number[page] for page in request.pages]
        return state.reshape(-1, state.shape[-1]), page_DP.reshape(-1)

    def _harvest(self, token_SB, logp_SB, start: float, end: float) -> list[Finished]:
        """Append what the block drew, let ended requests leave, and close its record."""
        S = self.engine.cache.block_tokens
        is_stop_SB = np.isin(token_SB, self._sampling.stop_ids)
        stop_B = np.where(is_stop_SB.any(axis=0), is_stop_SB.argmax(axis=0), S)
        B = len(self._shards) * self.engine.cache.slots
        block = Block(
            start_seconds=start,
            end_seconds=end,
            steps=0,
            cursor_B=np.full(B, -1, np.int64),
            sample_B=np.zeros(B, np.int32),
            useful_B=np.zeros(B, np.int32),
            waiting=bool(self._queue) or any(shard.ready for shard in self._shards),
            cache_use=max(1 - len(s.free_pages) / (s.cache.pages - 1) for s in self._shards),
        )
        finished = []
        for d, shard in enumerate(self._shards):
            first_column = d * (token_SB.shape[1] // len(self._shards))
            for column, b in enumerate(sorted(shard.by_age), start=first_column):
                request, slot = shard.slots[b], d * len(shard.slots) + b
                drawn, stop = request.drawn_tokens, int(stop_B[column])
                used = min(stop + 1, S, request.max_tokens - drawn)
                stopped = used == stop + 1
                request.drawn.append(token_SB[:used, column].copy())
                request.logp.append(logp_SB[:used, column].copy())
                request.drawn_tokens += used
                block.steps = max(block.steps, used)
                block.cursor_B[slot] = request.group.cursor
                block.sample_B[slot] = request.sample
                block.useful_B[slot] = used
                if stopped or request.drawn_tokens == request.max_tokens:
                    shard.leave(b)
                    finished += self._finish(shard, request, stopped)
        self.blocks.append(block)
        return sorted(finished, key=lambda f: f.cursor)

    def _finish(self, shard: Shard, request: Request, stopped: bool) -> list[Finished]:
        """Keep a response; its prompt's group, if this was the last one."""
        group = request.group
        tokens, logp = np.concatenate(request.drawn), np.concatenate(request.logp)
        responses = self._responses[group.cursor]
        responses[request.sample] = Response(tokens, logp, stopped)
        group.unfinished -= 1
        if group.unfinished == 0:
            shard.finish(group)
            del self._home[group]
        if None in responses:
            return []
        del self._responses[group.cursor]
        return [Finished(group.cursor, responses)]
