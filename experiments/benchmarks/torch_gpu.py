"""The peer of `gpu`: transformers with torch on one GPU, by the Python of its own environment.

    python experiments/benchmarks/torch_gpu.py [--small]

Random weights. A decode step: bfloat16, with a cache of random keys and values as `generate` keeps
it. An update: four rows of one response each,
float32 weights under autocast, all layers recomputed, the head in pieces, fused AdamW. Nothing of
this project is imported.
"""

import argparse
import contextlib
import time

with contextlib.suppress(ModuleNotFoundError):  # what lists our modules imports them without torch
    import torch
    from torch.utils.checkpoint import checkpoint
    from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

SIZES = {  # width, feed-forward, layers, heads, key/value heads, vocabulary
    "0.5b": (896, 4_864, 24, 14, 2, 151_936),
    "1.5b": (1_536, 8_960, 28, 12, 2, 151_936),
    "tiny": (128, 512, 4, 4, 2, 384),
}
PROMPT, ROWS, PIECE, REPEATS = 64, 4, 2_048, 3


def device() -> str:
    """Names the GPU, or the CPU where there is none."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def model_of(name: str, dtype):
    """Makes a model with random weights."""
    width, mlp, layers, heads, kv, vocab = SIZES[name]
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    with torch.device(device()):
        return Qwen2ForCausalLM(config).to(dtype)


def best_seconds(run) -> float:
    """The least time of a call, after one that warms up; a call ends by reading a number."""
    seconds = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        run().item()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def decode(name: str, context: int, slots: int) -> str:
    """Times a step that samples one more token of every slot."""
    model = model_of(name, torch.bfloat16).eval()
    c, cache = model.config, DynamicCache()
    shape = (2, slots, c.num_key_value_heads, context, c.hidden_size // c.num_attention_heads)
    for layer in range(c.num_hidden_layers):
        cache.update(*torch.randn(shape, dtype=torch.bfloat16, device=device()), layer)
    token = torch.ones((slots, 1), dtype=torch.long, device=device())

    @torch.no_grad()
    def step():
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
        return torch.multinomial(logits[:, -1].float().softmax(-1), 1).sum()

    seconds = best_seconds(step)
    return f"{1e3 * seconds:.2f} ms a step of {slots} slots, {slots / seconds:,.0f} tokens/s"


def update(name: str, row_tokens: int) -> str:
    """Times an update with DAPO's loss."""
    model = model_of(name, torch.float32).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fused = device() == "cuda"
    adam = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.1, fused=fused)
    vocab = model.config.vocab_size
    ids_RT = torch.randint(1, vocab, (ROWS, 1, row_tokens), device=device())
    old_logp = torch.log(torch.tensor(1.0 / vocab, device=device()))
    advantage_R = torch.randn(ROWS, device=device())

    def loss_of(hidden_BTD, target_BT, advantage):
        logits_BTV = model.lm_head(hidden_BTD).float()
        logp_BT = torch.log_softmax(logits_BTV, -1).gather(-1, target_BT[..., None])[..., 0]
        ratio_BT = torch.exp(logp_BT - old_logp)
        clipped_BT = torch.clamp(ratio_BT, 0.8, 1.28)
        return -torch.minimum(ratio_BT * advantage, clipped_BT * advantage).sum()

    def step():
        adam.zero_grad(set_to_none=True)
        for ids_BT, advantage in zip(ids_RT, advantage_R, strict=True):
            with torch.autocast(device(), dtype=torch.bfloat16):
                hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
                loss = torch.zeros((), device=device())
                for first in range(PROMPT - 1, row_tokens - 1, PIECE):
                    end = min(first + PIECE, row_tokens - 1)
                    piece = hidden_BTD[:, first:end], ids_BT[:, first + 1 : end + 1], advantage
                    loss = loss + checkpoint(loss_of, *piece, use_reentrant=False)
            (loss / (ROWS * (row_tokens - PROMPT))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        return norm

    return f"{best_seconds(step):.3f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="Toy sizes: shows that it works.")
    small = parser.parse_args().small
    updates = (("tiny", 256),) if small else (("0.5b", 4_096), ("0.5b", 22_528), ("1.5b", 4_096))
    decodes = (("tiny", 64, 4),) if small else (("0.5b", 1_024, 256), ("0.5b", 4_096, 256))
    where = torch.cuda.get_device_name() if device() == "cuda" else "a CPU"
    print(f"{where}, torch {torch.__version__}\n\n| row | result |\n| --- | --- |")
    for run, works in ((update, updates), (decode, decodes)):
        for name, tokens, *slots in works:
            found = run(name, tokens, *slots)
            print(f"| {run.__name__}, {name}, {tokens:,} tokens | {found} |", flush=True)
            if device() == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
