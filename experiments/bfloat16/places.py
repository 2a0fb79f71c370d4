"""The places where bfloat16 rounds: this text, teacher-forced, one kind of array at a time.

    python -m experiments.bfloat16.places --model=runs/smollm2_135m

Weights are rounded throughout. Each line: the mean |difference| of a token's log-probability, in
nats, from the run in which no activation is rounded. Sampler and learner differ by as much again
wherever they add up in another order, since then other activations are rounded up.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
from absl import app, flags
from flax import nnx

from dapo_jax.tasks.tokenizer import load_tokenizer
from models import hf, transformer
from models.hf_config import load_config
from models.kernels.xla import attention
from models.precision import rounded

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "runs/smollm2_135m", "A Hugging Face directory.")
PLACES = {  # of a layer's products by their einsum, and what attention and the head read
    "BTD,DNH->BTNH": "input of queries",
    "BTD,DKH->BTKH": "input of keys and values",
    "attention": "queries, keys and values in attention",
    "BTNH,NHD->BTD": "attention's result",
    "BTD,DF->BTF": "input of the feed-forward",
    "kept": "gate and up, kept for the backward pass",
    "BTF,FD->BTD": "gate times up",
    "head": "input of the head",
}


nearest = functools.partial(rounded, dtype=jnp.bfloat16)


def logps(graph, params, tokens_BT, places):
    """Computes log p of each token behind the first, with what is named in `places` rounded."""

    def at(place, x):
        return nearest(x) if place in places else x

    def product(project, spec, x, w, weights):
        out = project(spec, at(spec, x), w)
        return at("kept", out) if spec == "BTD,DF->BTF" else out

    def attend(*qkv, window):
        return attention(*(at("attention", x) for x in qkv), mask_BTS)

    mask_BTS = transformer.causal_mask(jnp.ones_like(tokens_BT))
    model = nnx.merge(graph, params)
    with mock.patch.object(transformer, "product", product):
        x_BTD, _ = model.hidden(tokens_BT, jnp.arange(tokens_BT.shape[1])[None], attend)
    logp_BTV = jax.nn.log_softmax(transformer.logits(at("head", x_BTD), model.head()))
    return jnp.take_along_axis(logp_BTV[:, :-1], tokens_BT[:, 1:, None], axis=2)[..., 0]


def main(_):
    config = load_config(FLAGS.model)
    graph, _ = transformer.abstract_params(config)
    params = jax.tree.map(nearest, hf.load_params(FLAGS.model, config, dtype="float32"))
    tokens_BT = jnp.array(
        [load_tokenizer(FLAGS.model, stop_tokens=None, chat="none").encode(__doc__)]
    )
    run = jax.jit(functools.partial(logps, graph), static_argnames="places")
    exact_BT = run(params, tokens_BT, places=frozenset())
    for name, places in {**{PLACES[p]: {p} for p in PLACES}, "all of them": set(PLACES)}.items():
        off_BT = jnp.abs(run(params, tokens_BT, places=frozenset(places)) - exact_BT)
        print(f"{float(off_BT.mean()):.4f}  {name}", flush=True)


if __name__ == "__main__":
    app.run(main)
