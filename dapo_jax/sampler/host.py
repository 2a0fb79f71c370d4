"""The host's side of generation: pads prompts to a bucket, places them, runs, fetches."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.sampler.decode import Samples, Sampling, generate
from sharding import hosts, rules

SMALLEST_BUCKET_TOKENS = 32


def bucket_tokens(length: int, *, max_tokens: int) -> int:
    """The padded prompt length: the next power of two, at most `max_tokens`: few programs."""
    bucket = SMALLEST_BUCKET_TOKENS
    while bucket < length:
        bucket *= 2
    return min(bucket, max_tokens)


class Sampler:
    """Generates on a mesh; one compiled program a (bucket, batch, group size, sampling) shape."""

    def __init__(self, graph, mesh: Mesh, *, max_prompt_tokens: int):
        self._mesh = mesh
        self._max_prompt_tokens = max_prompt_tokens
        self._generate = jax.jit(
            functools.partial(generate, graph),
            static_argnames=("group_size", "sampling"),
            out_shardings=rules.rows(mesh),
        )

    def __call__(
        self,
        params,
        run_key,
        prompts: Sequence[np.ndarray],
        cursors: Sequence[int],
        *,
        group_size: int,
        sampling: Sampling,
    ) -> Samples:
        """Samples, as numpy arrays, of `group_size` responses to each prompt (token ids).

        Raises ValueError for an empty prompt and for one of more than `max_prompt_tokens`.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        for cursor, length in zip(cursors, lengths, strict=True):
            if not 1 <= length <= self._max_prompt_tokens:
                raise ValueError(
                    f"the prompt at cursor {cursor} has {length} tokens; it needs at least 1 and "
                    f"at most rollout.max_prompt_tokens = {self._max_prompt_tokens}"
                )
        T = bucket_tokens(int(lengths.max()), max_tokens=self._max_prompt_tokens)
        prompt_PT = np.full((len(prompts), T), sampling.pad_id, np.int32)
        for row, prompt in zip(prompt_PT, prompts, strict=True):
            row[T - len(prompt) :] = prompt
        arrays = hosts.place(
            (prompt_PT, lengths, np.asarray(cursors, np.int32)), rules.rows(self._mesh)
        )
        samples = self._generate(params, run_key, *arrays, group_size=group_size, sampling=sampling)
        return hosts.fetch(samples)
