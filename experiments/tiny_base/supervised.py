"""Supervised training of a base policy on pairs of prompt and solution text.

Axis letters as in models/transformer.py: B rows, T tokens, D width.
"""

import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx

from dapo_jax.logprobs import Softmax, head_loss
from dapo_jax.tasks.tokenizer import Tokenizer, load_tokenizer
from models.hf import save_hf
from models.kernels.packed import packed_attention
from models.parameters import ModelConfig
from models.transformer import abstract_params, segment_positions
from sharding.mesh import make_mesh


def packed_batches(
    pairs_of: Callable[[int, int], Iterable[tuple[str, str]]],
    tokenizer: Tokenizer,
    *,
    num_steps: int,
    rows: int,
    row_tokens: int,
) -> Iterator[np.ndarray]:
    """Packs texts into `num_steps` batches [3, rows, row_tokens]: tokens, segments, target masks.

    pairs_of(seed, step): (prompt, solution) texts, from which the batches from `step` on are made;
    it is called with seeds 0, 1, .... A solution ends in the stop token, or is cut at a row's end.
    """
    eos = tokenizer.stop_ids[0]

    def all_batches():
        step = 0
        for seed in itertools.count():
            filled = [[]]  # rows of (token, segment, whether it is a target)
            for prompt, solution in pairs_of(seed, step):
                prompt_ids, ids = tokenizer.encode(prompt), [*tokenizer.encode(solution), eos]
                ids = ids[: row_tokens - len(prompt_ids)]
                if len(filled[-1]) + len(prompt_ids) + len(ids) > row_tokens:
                    filled.append([])
                row = filled[-1]
                segment = 1 + (row[-1][1] if row else 0)
                row += [(id, segment, 0) for id in prompt_ids] + [(id, segment, 1) for id in ids]
            for i in range(0, len(filled) - rows + 1, rows):
                batch = np.zeros((3, rows, row_tokens), np.int32)
                for b, row in enumerate(filled[i : i + rows]):
                    batch[:, b, : len(row)] = np.transpose(row)
                yield batch
                step += 1

    return itertools.islice(all_batches(), num_steps)


def fit(
    config: ModelConfig,
    params,
    pairs_of: Callable[[int, int], Iterable[tuple[str, str]]],
    out: pathlib.Path,
    *,
    num_steps: int,
    rows: int,
    row_tokens: int,
    peak_rate: float,
) -> None:
    """Minimises the solutions' cross-entropy by AdamW on a warm-up and cosine; saves the model.

    out: a directory with the tokenizer, whose weights are written over: in bfloat16, half the size
    in the repository. pairs_of, rows, row_tokens: of `packed_batches`. peak_rate: the greatest
    learning rate.
    """
    tokenizer = load_tokenizer(out, stop_tokens=None, chat="none")
    graph, _ = abstract_params(config)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak_rate, num_steps // 25, num_steps, 1e-4)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )
    opt_state = optimizer.init(params)
    softmax = Softmax(1.0, tokenizer.vocab_size, make_mesh(data=-1, model=1))

    def loss_fn(params, batch):
        tokens_BT, segment_BT, target_BT = batch
        model = nnx.merge(graph, params)
        positions_BT = segment_positions(segment_BT)
        no_branch_BT = jnp.zeros_like(segment_BT)
        x_BTD, _ = model.hidden(
            tokens_BT,
            positions_BT,
            lambda q, k, v, window: packed_attention(q, k, v, segment_BT, no_branch_BT),
        )
        weight_BT = target_BT[:, 1:]
        head = head_loss(
            x_BTD[:, :-1],
            model.head(),
            tokens_BT[:, 1:],
            weight_BT,
            lambda logp, _, weight: (-logp * weight, {}),
            softmax,
        )
        return head.loss / jnp.sum(weight_BT)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    how = {"num_steps": num_steps, "rows": rows, "row_tokens": row_tokens}
    start_seconds = time.monotonic()
    for i, batch in enumerate(packed_batches(pairs_of, tokenizer, **how)):
        params, opt_state, loss = step(params, opt_state, batch)
        if (i + 1) % 100 == 0:
            seconds = time.monotonic() - start_seconds
            logging.info("step %d  loss %.4f  %.0f s", i + 1, loss, seconds)
    for old in ("config.json", "model.safetensors"):
        (out / old).unlink(missing_ok=True)
    save_hf(params, config, out, dtype="bfloat16")
