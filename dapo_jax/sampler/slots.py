"""The slots and pages of all data shards, as tables.

Host only, no jax. Axis letters: those of `scheduler`.
"""

import numpy as np

from dapo_jax.sampler.cache import NULL_PAGE, Cache
from dapo_jax.sampler.plan import Sample


class Pages:
    """The free pages of one pool on every shard; NULL_PAGE is never free."""

    def __init__(self, shards: int, pages: int):
        self.free_DP = np.ones((shards, pages), bool)
        self.free_DP[:, NULL_PAGE] = False

    @property
    def free_D(self) -> np.ndarray:
        """Counts the free pages of each shard."""
        return self.free_DP.sum(axis=1)

    def count(self, d: int) -> int:
        """Counts the free pages of shard d."""
        return int(self.free_DP[d].sum())

    def take(self, d: int, count: int) -> np.ndarray:
        """Takes the lowest free pages of shard d; so pages in use stay together."""
        pages = np.flatnonzero(self.free_DP[d])[:count]
        self.free_DP[d, pages] = False
        return pages

    def take_one_each(self, shard_N: np.ndarray) -> np.ndarray:
        """Takes the lowest free page for each entry; entries lie in order of shards."""
        count_D = np.bincount(shard_N, minlength=len(self.free_DP))
        return np.concatenate([self.take(d, count) for d, count in enumerate(count_D.tolist())])

    def give_back(self, d: int, pages: np.ndarray) -> None:
        """Makes pages of shard d free."""
        self.free_DP[d, pages] = True


class Slots:
    """The rows of all slots: an array [D, B, ...] for each column; a row without a sample is 0.

    The columns are those of `Cache.row_dtype` and, of the sample in the slot, `occupant`, itself,
    its `group` and `admission`, and `pages`, the number of its own. `sample` is its index.
    """

    def __init__(self, cache: Cache, shards: int):
        dtypes = {name: dtype for name, (dtype, _) in cache.row_dtype.fields.items()}
        dtypes |= dict.fromkeys(("occupant", "group"), np.dtype(object))
        dtypes |= dict.fromkeys(("pages", "admission"), np.dtype(np.int64))
        self._columns = {
            name: np.zeros((shards, cache.slots, *dtype.shape), dtype.base)
            for name, dtype in dtypes.items()
        }

    def __getitem__(self, column: str) -> np.ndarray:
        return self._columns[column]

    @property
    def active_DB(self) -> np.ndarray:
        """Marks the occupied slots."""
        return self["active"] > 0

    @property
    def count_D(self) -> np.ndarray:
        """Counts each shard's occupied slots."""
        return self.active_DB.sum(axis=1)

    def occupied(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (shard_N, slot_N) of the occupied slots, in order."""
        return np.nonzero(self.active_DB)

    def sample(self, d: int, b: int) -> Sample:
        """Returns the sample in a slot, with the tokens and pages that it has."""
        sample = self["occupant"][d, b]
        sample.tokens = int(self["sampled"][d, b])
        sample.pages = self["response_pages"][d, b, : self["pages"][d, b]].copy()
        return sample

    def enter(self, d: int, b: int, sample: Sample) -> None:
        """Fills an empty slot."""
        prefix = sample.prefix
        row = {
            "active": 1,
            "occupant": sample,
            "group": prefix.group,
            "sample": sample.index,
            "sampled": sample.tokens,
            "limit": sample.limit,
            "prompt_tokens": prefix.prompt_tokens - 1,
            "reader": prefix.samples.index(sample),
            "pages": len(sample.pages),
            "admission": sample.admission,
        }
        for name, value in row.items():
            self[name][d, b] = value
        self["prompt_pages"][d, b, : len(prefix.pages)] = prefix.pages
        self["response_pages"][d, b, : len(sample.pages)] = sample.pages

    def leave(self, d: int, b: int) -> Sample:
        """Empties a slot; returns the sample with what it had."""
        sample = self.sample(d, b)
        for column_DB in self._columns.values():
            column_DB[d, b] = 0
        return sample

    def add_pages(self, shard_N: np.ndarray, slot_N: np.ndarray, page_N: np.ndarray) -> None:
        """Gives each of these slots one more page."""
        pages_N = self["pages"][shard_N, slot_N]
        self["response_pages"][shard_N, slot_N, pages_N] = page_N
        self["pages"][shard_N, slot_N] = pages_N + 1
