"""The paged key-value cache: how many slots and pages a device's memory budget holds.

Host only, no jax: the scheduler and preflight plan with it without devices.
"""

import bisect
import dataclasses
import math

import numpy as np

NULL_PAGE = 0  # the page that no request owns: idle rows of a batch write there
# Batches are padded to a multiple. On a CPU a row has the learner's bits among XLA_ROWS, whatever
# the others are.
ROWS, XLA_ROWS = 32, 8
# What plain XLA decodes, as parts of the slots and of the response pages: the first that holds the
# occupied slots and their full pages. The longest responses are left at last, a few slots with many
# pages. Elsewhere than on a CPU the bits of a row may differ.
PARTS = ((1 / 4, 1 / 8), (1 / 2, 1 / 4), (1, 1 / 4), (1, 1 / 2), (1, 1))
COPIED = 1 / 2  # of the pool, which plain XLA copies at most: where more is live it reads all
FEW_ROWS = (32, 64, 128, 192, 256, 384, 512)  # as slots fall empty: a step costs by the row
ROW_SCALARS = (
    *("active", "stream", "cursor", "sample", "token", "sampled", "limit", "prompt_tokens"),
    *("reader", "page"),
)
# The most samples of a group on one of several shards, where a kernel attends. Sharing a prompt
# saves only its prefill there, and a group of long responses would keep all shards waiting for one.
SPREAD_READERS = 4
WATERMARK_BLOCKS = 2  # blocks of growth for which admission leaves pages free
SPARE_PROMPTS = 3  # prompts kept in pages, as a multiple of the fewest that fill the slots


def round_up(number: int, multiple: int) -> int:
    """Returns the least multiple that is not below the number."""
    return -(-number // multiple) * multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """One data shard's cache consists of pages of `page_tokens` tokens; these are its sizes.

    Page 0 of either pool is NULL_PAGE. Prompts have a pool of their own, and at most `readers`
    slots share a prompt's pages. A block of `block_tokens` decode steps divides a page.
    `max_prompt_tokens` and `max_response_tokens` bound a request. `partial_rollouts`: responses may
    begin with tokens that an earlier session sampled. `turns`: responses may have tokens that are
    given, not sampled. `rows`: batches are padded to a multiple.
    """

    slots: int = 0  # these three are `plan_cache`'s to find
    pages: int = 0
    prompt_pages: int = 0
    readers: int
    page_tokens: int
    block_tokens: int
    max_prompt_tokens: int
    max_response_tokens: int
    partial_rollouts: bool = False
    turns: bool = False
    rows: int = ROWS

    @property
    def pages_per_prompt(self) -> int:
        """Counts the pages of the longest prompt (I)."""
        return self.pages_of_prompt(self.max_prompt_tokens)

    @property
    def pages_per_response(self) -> int:
        """Counts the pages of the longest response (J)."""
        return -(-self.max_response_tokens // self.page_tokens)

    def pages_of_prompt(self, prompt_tokens: int) -> int:
        """Counts a prompt's pages; its last token needs none: it is fed when decoding begins."""
        return -(-(prompt_tokens - 1) // self.page_tokens)

    def padded(self, slots: int) -> int:
        """Rounds slots up to the rows of a batch."""
        return round_up(slots, self.rows)

    @property
    def buckets(self) -> dict[int, int]:
        """Maps the padded rows that prefill is compiled for, in pages, to the rows of a call.

        1, 2, 4 and so on, and the longest prompt; where partial responses are computed too, up to
        the longest prompt and response. A call has as many tokens as the longest prompt, or a row.
        """
        prompt, longest = self.pages_per_prompt, self.pages_per_prompt
        if self.partial_rollouts or self.turns:
            whole = self.max_prompt_tokens + self.max_response_tokens
            longest = -(-whole // self.page_tokens)
        powers = [2**i for i in range(longest.bit_length()) if 2**i < longest]
        return {
            pages: max(1, prompt // pages) for pages in sorted({*powers, prompt, longest}) if pages
        }

    @property
    def row_dtype(self) -> np.dtype:
        """Declares a slot's row as it travels to the device; the columns are listed nowhere else.

        All int32. The next token to feed is `token`; `sampled` of at most `limit` tokens of sample
        `sample` for the prompt at `cursor` of `stream` have been sampled. The prompt but for its
        last token, `prompt_tokens`, lies in `prompt_pages`, which this slot reads as number
        `reader`; the other tokens in `response_pages`, numbered as in the block's list of pages.
        The block is written to page `page` of the pool.
        `given`: of the block's tokens those that are given, plus 1 each, and 0 for the sampled.
        """
        tables = {"prompt_pages": self.pages_per_prompt, "response_pages": self.pages_per_response}
        tables |= {"given": self.block_tokens} if self.turns else {}
        tables = [(name, np.int32, (width,)) for name, width in tables.items()]
        return np.dtype([*((name, np.int32) for name in ROW_SCALARS), *tables])


def plan_cache(
    limits: Cache, *, cache_bytes: int, token_bytes: int, slot_tokens: int, copies: bool
) -> Cache:
    """Plans the slots and pages that a device's memory budget holds; limits: all other sizes.

    token_bytes: of one token's keys and values on the device. There is a slot for every
    `slot_tokens` response tokens of cache: longer responses take pages that shorter ones leave.
    The keys and values of the block being decoded count too, and (copies) what plain XLA attends
    to: each slot's open page, and COPIED pages of the pool. Not counted are a CPU's float32 copies
    of bfloat16 pages, and those that windows see. Raises ValueError where one request of the
    greatest length would not fit.
    """
    page_bytes = token_bytes * limits.page_tokens
    # Every occupied slot has a page to itself, and admission keeps pages free for growth.
    slot_tokens = max(slot_tokens, limits.page_tokens + WATERMARK_BLOCKS * limits.block_tokens)

    def cache(budget_bytes: int, slots: int) -> Cache:
        rows = XLA_ROWS if copies else ROWS
        longest = limits.pages_per_prompt
        prompt_pages = longest + SPARE_PROMPTS * -(-slots // limits.readers) * min(longest, 2) + 1
        planned = dataclasses.replace(limits, slots=slots, rows=rows, prompt_pages=prompt_pages)
        open_tokens = limits.page_tokens if copies else limits.block_tokens
        block_bytes = planned.padded(slots) * open_tokens * token_bytes
        left = budget_bytes - block_bytes - prompt_pages * page_bytes
        pages = max(0, left // page_bytes)
        return dataclasses.replace(planned, pages=int(pages / (1 + COPIED * copies)))

    def plan(budget_bytes: int) -> Cache | None:
        def too_many(slots: int) -> bool:
            pages = cache(budget_bytes, slots).pages
            return (pages - 1) * limits.page_tokens < slots * slot_tokens

        candidates = range(1, budget_bytes // (token_bytes * slot_tokens) + 1)
        slots = max(1, bisect.bisect_left(candidates, True, key=too_many))
        planned = cache(budget_bytes, slots)
        return planned if planned.pages > planned.pages_per_response else None

    planned = plan(cache_bytes)
    if planned is None:
        enough_mib = -(-cache_bytes // 2**20)
        while plan(enough_mib * 2**20) is None:
            enough_mib += 1 + enough_mib // 50
        raise ValueError(
            f"rollout.cache_mib = {cache_bytes / 2**20:g} does not hold one prompt of "
            f"{limits.max_prompt_tokens} tokens and one response of "
            f"{limits.max_response_tokens} on a device; {enough_mib} does"
        )
    return planned


def decode_sizes(cache: Cache, *, kernel: bool) -> list[tuple[int, int]]:
    """Lists the (rows, pages) of a shard that decoding is compiled for, the smallest first.

    kernel: whether one reads the live pages alone; then programs have all pages, and FEW_ROWS.
    """
    if kernel:
        all_rows = cache.padded(cache.slots)
        sizes = {(rows, cache.pages) for rows in (*FEW_ROWS, all_rows) if rows <= all_rows}
    else:
        sizes = set()
        most = min(cache.pages, 1 + cache.slots * (cache.pages_per_response - 1))
        for slots, pages in PARTS:
            rows, size = cache.padded(math.ceil(cache.slots * slots)), math.ceil(most * pages)
            sizes.add((rows, size if size <= math.ceil(cache.pages * COPIED) else cache.pages))
    return sorted(sizes)
