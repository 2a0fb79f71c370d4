"""The peer of `episodes`: TRL's GRPOTrainer with an environment, by the Python of its own.

    TORCH_PYTHON experiments/benchmarks/trl_episodes.py [--call_seconds=0.1] [--groups=32]

The model of 1.25 M parameters with random weights, 64 tokens of a prompt and episodes of four
turns, in which a turn ends at one of as many stop tokens and a tool gives 16 tokens. The time is of
sampling and of the tool's calls. Nothing of this project is imported.
"""

import argparse
import contextlib
import time

with contextlib.suppress(ModuleNotFoundError):  # what lists our modules imports them without torch
    import tokenizers
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

GROUP, PROMPT, RESPONSE, TURNS, TURN, GIVEN, VOCAB = 8, 64, 512, 4, 48, 16, 2_048
TEMPLATE = """{% for m in messages %}t1 {{ m.content }} {% for c in m.tool_calls or () %}
{{ c.function.name }} {{ c.function.arguments }} {% endfor %}t0 {% endfor %}
{% if add_generation_prompt %}t2{% endif %}"""
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def tokenizer_of_words():
    """Makes a tokenizer whose tokens are the words t0, t1 and so on."""
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t3")
    whole = tokenizers.Tokenizer(words)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    named = {"eos_token": "t0", "pad_token": "t2047", "unk_token": "t3"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, **named)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {}
    return tokenizer


def main(call_seconds: float, groups: int) -> None:
    """Prints the tokens per second of one sampling."""

    class Fixed:
        def reset(self, **columns):
            pass

        def look(self) -> str:
            """Looks."""
            time.sleep(call_seconds)
            return " ".join(["t4"] * (GIVEN - 3))  # the template has three more

    # A random model calls no tool by itself: every turn that stops is a call.
    stopped = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    stops = list(range(VOCAB // TURN))
    grpo_trainer.parse_response = lambda tokenizer, ids, **how: (
        dict(stopped) if ids[-1] in stops else {"role": "assistant", "content": ""}
    )
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    model.generation_config.eos_token_id = stops
    config = GRPOConfig(
        output_dir="trl_out",
        **{"per_device_train_batch_size": groups * GROUP, "num_generations": GROUP, "max_steps": 1},
        **{"max_completion_length": RESPONSE, "max_tool_calling_iterations": TURNS - 1},
        **{"temperature": 1.0, "bf16": False, "use_cpu": True},
        **{"report_to": [], "save_strategy": "no", "gradient_checkpointing": False},
    )
    question = [{"role": "user", "content": " ".join(["t5"] * (PROMPT - 3))}]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": question}] * groups),
        processing_class=tokenizer_of_words(),
        environment_factory=Fixed,
    )
    generate = trainer._generate

    def timed(prompts):
        start, cpu_start, found = time.perf_counter(), time.process_time(), generate(prompts)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        tokens = sum(map(len, found[1]))
        given = tokens - sum(map(sum, found[2]))
        cost = f"{tokens / seconds:,.0f} tokens/s, {tokens / cpu_seconds:,.0f} a CPU second"
        print(f"{cost}, {tokens:,} tokens, given {given / tokens:.0%}", flush=True)
        return found

    trainer._generate = timed
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call_seconds", type=float, default=0.0)
    parser.add_argument("--groups", type=int, default=32)
    main(**vars(parser.parse_args()))
