"""Pre-train the tiny base policy: a weak student of arithmetic that reinforcement can improve.

    python -m experiments.tiny_base.pretrain            # rebuilds experiments/tiny_base/checkpoint

The student first learns from right solutions, then from flawed ones: a quarter of the steps are
wrong, some end without the line that the verifier looks for, and some go over a step again and
again. So it knows more than it shows, as a large base model does.
"""

import pathlib

import jax
import numpy as np
import sentencepiece
from absl import app, flags

from dapo_jax.tasks.arithmetic import Arithmetic, worked_solution
from dapo_jax.tasks.templates import PROMPT_TEMPLATE
from experiments.tiny_base.supervised import fit
from models.hf import load_params
from models.parameters import ModelConfig
from models.qwen2 import PRESETS
from models.transformer import Transformer, split

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


def solved_problems(count: int, seed: int, *, flawed: bool, levels=LEVELS):
    """`count` (prompt text, solution text) pairs of the train split."""
    rng = np.random.default_rng([SEED, seed])
    problems = Arithmetic(levels=levels, count=count, seed=int(rng.integers(2**62))).problems()
    for problem in problems:
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


def main(_):
    pretrain(PRESETS["tiny"], pathlib.Path(FLAGS.out), num_steps=FLAGS.num_steps)


def pretrain(
    config: ModelConfig, out: pathlib.Path, *, num_steps: int, levels=LEVELS, start: str = ""
) -> None:
    """Makes a directory with a tokenizer and a model of these sizes, trained on such solutions.

    start: a directory whose weights it begins with; "": random ones.
    """
    out.mkdir(parents=True, exist_ok=True)
    train_tokenizer(out / "tokenizer.model", config.vocab_size)
    if start:
        params = load_params(start, config, dtype="float32")
    else:
        _, params = split(Transformer(config, key=jax.random.key(SEED)))
    sound_steps = num_steps * (1 - FLAWED_SHARE)

    def pairs_of(seed: int, step: int):
        return solved_problems(1_000, seed, flawed=step >= sound_steps, levels=levels)

    how = {"num_steps": num_steps, "rows": ROWS, "row_tokens": ROW_TOKENS}
    fit(config, params, pairs_of, out, **how, peak_rate=2e-3)


if __name__ == "__main__":
    app.run(main)
