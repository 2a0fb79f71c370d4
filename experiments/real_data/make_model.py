"""Write a small random Qwen2.5 policy with the real vocabulary, which ends its responses.

python -m experiments.real_data.make_model --tokenizer=DIR --out=DIR

Random weights alone would draw the stop token once in 151,936 tokens: every response would be cut
off, with the same reward. So all embeddings share one direction, which the norms carry to the head,
and the stop token's column of the head reads it.
"""

import math
import pathlib
import shutil

import jax
from absl import app, flags

from dapo_jax.tasks.tokenizer import load_tokenizer
from models.hf import save_hf
from models.qwen2 import Qwen2Config
from models.transformer import Transformer, split

CONFIG = Qwen2Config(
    vocab_size=151_936,
    width=64,
    mlp_width=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_embeddings=False,
)
STOP_TOKEN = "<|endoftext|>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MEAN_RESPONSE_TOKENS = 8
SEED = 0

FLAGS = flags.FLAGS
flags.DEFINE_string("tokenizer", None, "Directory of Qwen2.5's tokenizer files.", required=True)
flags.DEFINE_string("out", None, "Target directory, in Hugging Face's format.", required=True)


def random_params(vocab_size: int, stop_id: int):
    """Random parameters under which each token is the stop token once in MEAN_RESPONSE_TOKENS.

    Rows of the embedding from `vocab_size` up are padding, which is never sampled.
    """
    _, params = split(Transformer(CONFIG, key=jax.random.key(SEED)))
    # Coordinate 0 of every embedding is 1, the others about 0.02, so after the last norm it is
    # close to sqrt(width), while the other tokens' logits are near 0.
    params["embed_VD"] = params["embed_VD"].at[:, 0].set(1.0)
    logit = math.log((vocab_size - 1) / (MEAN_RESPONSE_TOKENS - 1))
    params["head_DV"] = params["head_DV"].at[0, stop_id].set(logit / math.sqrt(CONFIG.width))
    return params


def main(_):
    source, out = pathlib.Path(FLAGS.tokenizer), pathlib.Path(FLAGS.out)
    tokenizer = load_tokenizer(source, stop_tokens=[STOP_TOKEN], chat="none")
    (stop_id,) = tokenizer.stop_ids
    params = random_params(tokenizer.vocab_size, stop_id)
    save_hf(params, CONFIG, out, dtype="float32", extra_config={"eos_token_id": stop_id})
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, out / name)
    print(f"{out}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")


if __name__ == "__main__":
    app.run(main)
