"""One decode step of transformers, for `gpu_decode`: run by the Python of torch's environment.

A model of the given sizes with random weights and a cache of random keys and values, as `generate`
keeps it, samples one more token of every slot. Where the slots do not fit, half as many are tried.
Prints one JSON line: the device, the slots, and the best seconds of a step.
"""

import argparse
import json
import time

SIZES = ("layers", "width", "heads", "kv", "head_dim", "mlp", "vocab", "tied")
WORK = ("slots", "context", "repeats")


def step_seconds(a, slots: int, device: str) -> float:
    """The best time of a step; each leaves one more token in the cache."""
    import torch
    from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=a.vocab,
        hidden_size=a.width,
        intermediate_size=a.mlp,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv,
        head_dim=a.head_dim,
        max_position_embeddings=a.context + 64,
        tie_word_embeddings=bool(a.tied),
    )
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2ForCausalLM(config).eval()
        cache = DynamicCache()
        for layer in range(a.layers):
            shape = (slots, a.kv, a.context, a.head_dim)
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        token = torch.ones((slots, 1), dtype=torch.long)
    seconds = []
    with torch.no_grad():
        for _ in range(1 + a.repeats):
            start = time.perf_counter()
            logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
            token = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
            token.cpu()
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in (*SIZES, *WORK):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    a = parser.parse_args()
    import torch

    slots, device = a.slots, "cuda" if torch.cuda.is_available() else "cpu"
    while True:
        try:
            step_s = step_seconds(a, slots, device)
            print(json.dumps({"device": device, "slots": slots, "step_s": step_s}))
            return
        except torch.OutOfMemoryError:
            slots //= 2
        if not slots:
            raise SystemExit("not one slot fits")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
