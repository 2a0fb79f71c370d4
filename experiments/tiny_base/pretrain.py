"""Pre-train the tiny base policy: a weak student of arithmetic that reinforcement can improve.

    python -m experiments.tiny_base.pretrain            # rebuilds experiments/tiny_base/checkpoint

The student first learns from right solutions, then from flawed ones: a quarter of the steps are
wrong, some end without the line that the verifier looks for, and some go over a step again and
again. So it knows more than it shows, as a large base model does.
"""

import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sentencepiece
from absl import app, flags, logging
from flax import nnx

from dapo_jax.logprobs import head_loss
from dapo_jax.tasks.arithmetic import generate, worked_solution
from dapo_jax.tasks.readers import PROMPT_TEMPLATE
from dapo_jax.tasks.tokenizer import load_tokenizer
from models import save_hf
from models.kernels.packed import packed_attention
from models.qwen2 import PRESETS
from models.transformer import Transformer, segment_positions, split
from sharding.mesh import make_mesh

LEVELS = (1, 2, 3, 4)
FLAWED_SHARE = 0.2  # of the optimizer steps, the last ones
WRONG_STEPS = 0.25  # share of wrong operations
UNFORMATTED = 0.12  # share of solutions without "Answer:"
RAMBLERS = 0.15  # share of solutions that go over a step again ...
RAMBLE = 0.85  # ... with this probability, and then again
ROW_TOKENS = 128
ROWS = 32
SEED = 0

FLAGS = flags.FLAGS
flags.DEFINE_string("out", str(pathlib.Path(__file__).parent / "checkpoint"), "Target directory.")
flags.DEFINE_integer("num_steps", 5_000, "Optimizer steps.", lower_bound=1)


def solved_problems(count: int, seed: int, *, flawed: bool):
    """`count` (prompt text, solution text) pairs of the train split."""
    rng = np.random.default_rng([SEED, seed])
    for problem in generate(LEVELS, count, int(rng.integers(2**62)), split="train"):
        ramble = RAMBLE if rng.random() < RAMBLERS else 0.0
        flaws = {"wrong": WRONG_STEPS, "ramble": ramble, "unformatted": UNFORMATTED}
        solution = worked_solution(problem, rng, **{k: v * flawed for k, v in flaws.items()})
        yield PROMPT_TEMPLATE.format(problem=problem.question), solution


def train_tokenizer(path: pathlib.Path, vocab_size: int) -> None:
    """A byte-fallback BPE in which each half of the prompt template is one piece."""
    texts = (part for pair in solved_problems(4_000, seed=2**31, flawed=True) for part in pair)
    before, after = (part.strip("\n") for part in PROMPT_TEMPLATE.split("{problem}"))
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(text.removeprefix(before).removesuffix(after) for text in texts),
            model_writer=file,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            # Matched after spaces have become the visible U+2581.
            user_defined_symbols=[part.replace(" ", "\u2581") for part in (before, after, "\n")],
            pad_id=0,
            eos_id=1,
            bos_id=-1,
            unk_id=2,
            max_sentence_length=100_000,
            minloglevel=2,
        )


def packed_batches(tokenizer, *, num_steps: int):
    """`num_steps` batches [3, rows, tokens]: packed tokens, segments and target masks."""
    eos = tokenizer.stop_ids[0]
    shape = (ROWS, ROW_TOKENS)
    step, seed = 0, 0
    while step < num_steps:
        pairs = list(solved_problems(1_000, seed, flawed=step >= num_steps * (1 - FLAWED_SHARE)))
        seed += 1
        rows = [([], [], [])]
        for prompt, solution in pairs:
            prompt_ids, ids = tokenizer.encode(prompt), [*tokenizer.encode(solution), eos]
            ids = ids[: ROW_TOKENS - len(prompt_ids)]
            if len(rows[-1][0]) + len(prompt_ids) + len(ids) > ROW_TOKENS:
                rows.append(([], [], []))
            tokens, segments, targets = rows[-1]
            segments += [1 + (segments[-1] if segments else 0)] * (len(prompt_ids) + len(ids))
            tokens += prompt_ids + ids
            targets += [0] * len(prompt_ids) + [1] * len(ids)
        for i in range(0, len(rows) - ROWS + 1, ROWS):
            batch = np.zeros((3, *shape), np.int32)
            for b, row in enumerate(rows[i : i + ROWS]):
                for k, values in enumerate(row):
                    batch[k, b, : len(values)] = values
            yield batch
            step += 1


def main(_):
    out = pathlib.Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    config = PRESETS["tiny"]
    train_tokenizer(out / "tokenizer.model", config.vocab_size)
    tokenizer = load_tokenizer(out, stop_tokens=None, chat="none")
    graph, params = split(Transformer(config, key=jax.random.key(SEED)))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 2e-3, FLAGS.num_steps // 25, FLAGS.num_steps, 1e-4
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )
    opt_state = optimizer.init(params)
    mesh = make_mesh(data=-1, model=1)

    def loss_fn(params, batch):
        tokens_BT, segment_BT, target_BT = batch
        model = nnx.merge(graph, params)
        positions_BT = segment_positions(segment_BT)
        no_branch_BT = jnp.zeros_like(segment_BT)
        x_BTD = model.hidden(
            tokens_BT,
            positions_BT,
            lambda q, k, v: packed_attention(q, k, v, segment_BT, no_branch_BT),
            remat="full",
        )
        weight_BT = target_BT[:, 1:]
        loss, _, _ = head_loss(
            x_BTD[:, :-1],
            model.head(),
            tokens_BT[:, 1:],
            weight_BT,
            lambda logp, weight: -logp * weight,
            temperature=1.0,
            vocab_size=tokenizer.vocab_size,
            mesh=mesh,
        )
        return loss / jnp.sum(weight_BT)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    start_seconds = time.monotonic()
    for i, batch in enumerate(packed_batches(tokenizer, num_steps=FLAGS.num_steps)):
        params, opt_state, loss = step(params, opt_state, batch)
        if (i + 1) % 100 == 0:
            seconds = time.monotonic() - start_seconds
            logging.info("step %d  loss %.4f  %.0f s", i + 1, loss, seconds)
    for old in ("config.json", "model.safetensors"):
        (out / old).unlink(missing_ok=True)
    save_hf(params, config, out, dtype="bfloat16")  # half the size in the repository


if __name__ == "__main__":
    app.run(main)
