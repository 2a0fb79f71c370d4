"""The peer of `peers`: transformers with torch on the CPU, by the Python of its own environment.

    python -m venv runs/torch && runs/torch/bin/pip install torch transformers
    python -m experiments.benchmarks.peers --torch_python=runs/torch/bin/python

Random weights, float32. `generate` samples every response to the longest one's tokens. An update is
DAPO's clipped loss of all of them, a few sequences at a time, and AdamW; before it the
log-probabilities of what was sampled are computed. Nothing of this project is imported.
"""

import argparse
import contextlib
import json
import time

with contextlib.suppress(ModuleNotFoundError):  # what lists our modules imports them without torch
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

AT_ONCE = 8  # sequences of a micro-batch
WARM_TOKENS = 4  # sampled and trained on before the clock runs
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads")


def sampled(model, prompts_BT, new_tokens: int):
    """Samples exactly so many tokens behind each prompt: ids [B, T]."""
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        **how,
    )


def logprobs(model, ids_BT, new_tokens: int):
    """Computes the log-probabilities [B, new tokens] of the sampled ones."""
    logits_BTV = model(ids_BT[:, :-1], logits_to_keep=new_tokens).logits
    return logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, -new_tokens:, None])[..., 0]


def update(model, optimizer, ids_BT, old_logp_BT, advantage_B) -> None:
    """Takes an update with the clipped loss, averaged over all tokens."""
    optimizer.zero_grad()
    for ids, old_logp, advantage in zip(
        *(whole.split(AT_ONCE) for whole in (ids_BT, old_logp_BT, advantage_B)), strict=True
    ):
        ratio = torch.exp(logprobs(model, ids, old_logp.shape[1]) - old_logp)
        gain = torch.minimum(
            ratio * advantage[:, None], ratio.clamp(0.8, 1.28) * advantage[:, None]
        )
        (-gain.sum() / old_logp_BT.numel()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def turn(model, optimizer, prompts_BT, new_tokens: int) -> dict[str, float]:
    """Takes one RL step: the seconds of its sampling, its update, and all of it."""
    marks = [time.perf_counter()]
    ids_BT = sampled(model, prompts_BT, new_tokens)
    marks.append(time.perf_counter())
    with torch.no_grad():
        parts = [logprobs(model, ids, new_tokens) for ids in ids_BT.split(AT_ONCE)]
    marks.append(time.perf_counter())
    update(model, optimizer, ids_BT, torch.cat(parts), torch.randn(len(ids_BT)))
    marks.append(time.perf_counter())
    seconds = {"sampling": marks[1] - marks[0], "update": marks[3] - marks[2]}
    return seconds | {"step": marks[3] - marks[0]}


def main(sizes: dict, prompts: int, group: int, prompt: int, new_tokens: int, repeats: int):
    """Prints the least seconds of each part, as JSON."""
    torch.manual_seed(0)
    no_stop = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **no_stop, tie_word_embeddings=True)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.1, fused=True)
    prompts_BT = torch.randint(1, sizes["vocab_size"], (prompts, prompt)).repeat_interleave(
        group, 0
    )
    turn(model, optimizer, prompts_BT, WARM_TOKENS)
    turns = [turn(model, optimizer, prompts_BT, new_tokens) for _ in range(repeats)]
    print(json.dumps({part: min(seconds[part] for seconds in turns) for part in turns[0]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in (*SIZES, "prompts", "group", "prompt", "new_tokens", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = vars(parser.parse_args())
    main({name: given.pop(name) for name in SIZES}, **given)
