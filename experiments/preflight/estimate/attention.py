"""Estimates the time of attention in the learner, on the rows of an update's packed responses.

It is the time of a kernel, models/kernels/splash_tpu.py, whose work depends on the rows' segments.
"""

import math
from collections.abc import Sequence

import numpy as np

from dapo_jax.packing import plan_update
from models.kernels import splash_tpu
from models.parameters import ModelConfig

# Of a step of the kernel that visits no pairs. By the TPU compiler's schedule it has 330 to 380
# bundles, which are 0.2 us on v5p where nothing stalls.
STEP_SECONDS = 0.35e-6


def micro_batches(
    length_PG, *, prompt_tokens: int, row_lengths: Sequence[int], rows: int, share_prompts: bool
) -> np.ndarray:
    """Returns the segments [M, rows, T] of the micro-batches of an update's packed responses.

    T is the best of the row lengths. The rows with the most work come first, as in
    packing.into_micro_batches.
    """
    packed, row_tokens = plan_update(
        [prompt_tokens] * len(length_PG),
        length_PG.tolist(),
        row_lengths=row_lengths,
        micro_batch_rows=rows,
        share_prompts=share_prompts,
    )
    tokens = [[prompt_tokens - 1 + int(length_PG[p, g].sum()) for p, g in row] for row in packed]
    tokens.sort(key=lambda row: -sum(n * (n + 1) for n in row))
    segment_MBT = np.zeros((math.ceil(len(tokens) / rows), rows, row_tokens), np.int32)
    for segment_T, row in zip(segment_MBT.reshape(-1, row_tokens), tokens, strict=False):
        segment_T[: sum(row)] = np.repeat(np.arange(1, len(row) + 1), row)
    return segment_MBT


def attention_seconds(
    segment_MBT,
    sizes: ModelConfig,
    *,
    remat: str,
    row_degree: int,
    model_degree: int,
    flop_rate: float,
) -> np.ndarray:
    """Returns the seconds [M] of a micro-batch's attention on its slowest device.

    Rows are divided among row_degree devices, and each row's heads among model_degree. The products
    run at flop_rate a device: two forward; backward five, in one kernel. Its partial gradients of
    the queries, one for every block of keys, leave the core behind the products.
    """
    M, B, T = segment_MBT.shape
    block = splash_tpu.block_tokens(T)
    segment_RT = np.pad(segment_MBT.reshape(M * B, T), ((0, 0), (0, -T % block)))
    visited_RIJ = np.asarray(splash_tpu.visited_blocks(segment_RT, block))
    visited_R = visited_RIJ.sum((1, 2))
    skipped_R = visited_RIJ[0].size - visited_R
    forward = 2 if remat in ("full", "offload") else 1
    products, kernels = 2 * forward + 5, forward + 1
    flop_R = products * 2 * block**2 * sizes.head_dim * visited_R
    seconds_R = flop_R / flop_rate + kernels * STEP_SECONDS * skipped_R
    seconds_R *= sizes.num_heads / model_degree * sizes.num_layers
    return seconds_R.reshape(M, row_degree, -1).sum(-1).max(-1)
