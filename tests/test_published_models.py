"""Each family's directories as they are published: config.json, ids, ends and templates.

Of a tokenizer the added tokens have their published ids; the others are letters and fillers.
"""

import json
from typing import NamedTuple

import pytest
import tokenizers
from byte_tokenizers import CHATML

from configs import any_model
from dapo_jax.setup import start
from models import families

ATTENTION = {"attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02}
OF_QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_cache": True}
OF_QWEN |= {"use_sliding_window": False, "bos_token_id": 151_643, "eos_token_id": 151_645}
QWEN2 = OF_QWEN | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = OF_QWEN | ATTENTION | {"vocab_size": 151_936, "head_dim": 128, "rope_scaling": None}
QWEN3 |= {"sliding_window": None, "max_position_embeddings": 40_960, "tie_word_embeddings": False}
LLAMA = ATTENTION | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
LLAMA |= {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8_192}
GEMMA = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256}
GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
GEMMA |= {"rope_local_base_freq": 10_000, "rope_theta": 1_000_000, "vocab_size": 262_144}
GEMMA |= {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
GEMMA |= {"sliding_window": 512, "attention_bias": False, "rms_norm_eps": 1e-6}
GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32_768}
GEMMA |= {"rope_scaling": None, "eos_token_id": [1, 106]}


def sized(width, mlp, layers, heads, kv_heads, **more):
    """The keys of sizes, as they are named in each family's config.json."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict(zip(keys, (width, mlp, layers, heads), strict=True))
    return sizes | {"num_key_value_heads": kv_heads} | more


class Ids(NamedTuple):
    """Counts the ids before the added ones, those with a role, the last; end, template, class."""

    base: int
    named: dict
    last: int
    end: str
    template: str
    kind: str = "Qwen2Tokenizer"


CONTROL = {"<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645}
OF_QWEN2 = Ids(151_643, CONTROL, 151_664, "<|im_end|>", CHATML)
THINKS = CONTROL | {"<think>": 151_667, "</think>": 151_668}
OF_QWEN3 = Ids(151_643, THINKS, 151_668, "<|im_end|>", CHATML)
BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ANSWER = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
TURNS = "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '" + ANSWER
TURNS += "' + m.content + '" + END + "' }}{% else %}{{ '" + USER + "' + m.content }}{% endif %}"
TURNS += "{% endfor %}{% if add_generation_prompt %}{{ '" + ANSWER + "<think>\\n' }}{% endif %}"
OF_R1 = {END: 151_643, USER: 151_644, ANSWER: 151_645, BEGIN: 151_646, "<think>": 151_648}
OF_R1 = Ids(151_643, OF_R1 | {"</think>": 151_649}, 151_664, END, TURNS, "LlamaTokenizerFast")
HEADS = "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
HEADS += "'<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endfor %}"
HEADS += "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
HEADS += "{% endif %}"
NAMED = {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001, "<|start_header_id|>": 128_006}
NAMED |= {"<|end_header_id|>": 128_007, "<|eom_id|>": 128_008, "<|eot_id|>": 128_009}
OF_LLAMA = Ids(128_000, NAMED, 128_255, "<|eot_id|>", HEADS, "PreTrainedTokenizerFast")
SMALL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
OF_SMOLLM = Ids(49_152, SMALL, 49_151, "<|im_end|>", CHATML, "GPT2Tokenizer")
GEMMAS = "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}"
GEMMAS += "<end_of_turn>\n{% endfor %}"
GEMMAS += "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
NAMED = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4}
NAMED |= {"<start_of_turn>": 105, "<end_of_turn>": 106, "<image_soft_token>": 262_144}
OF_GEMMA = Ids(262_144, NAMED, 262_144, "<eos>", GEMMAS, "GemmaTokenizer")
BEGINS = {"<|eot_id|>": "<|begin_of_text|>", END: BEGIN, "<eos>": "<bos>"}

# Name: config.json, tokenizer, generation_config.json's ends; family and preset of these sizes,
# ids that can be sampled, ends of a response, positions.
QWEN_ENDS, GEMMA_ENDS = [151_645, 151_643], [1, 106]
PUBLISHED = {
    "Qwen2.5-7B-Instruct": (
        QWEN2
        | sized(3_584, 18_944, 28, 28, 4, vocab_size=152_064, max_position_embeddings=32_768)
        | {"sliding_window": 131_072, "max_window_layers": 28, "tie_word_embeddings": False},
        *(OF_QWEN2, QWEN_ENDS, "qwen2", "7b", 151_665, {151_643, 151_645}, 32_768),
    ),
    "Qwen2.5-0.5B": (
        QWEN2
        | sized(896, 4_864, 24, 14, 2, vocab_size=151_936, max_position_embeddings=32_768)
        | {"eos_token_id": 151_643, "sliding_window": 32_768, "tie_word_embeddings": True},
        OF_QWEN2._replace(end="<|endoftext|>"),
        *(151_643, "qwen2", "0.5b", 151_665, {151_643, 151_645}, 32_768),
    ),
    "DeepSeek-R1-Distill-Qwen-7B": (
        QWEN2
        | sized(3_584, 18_944, 28, 28, 4, vocab_size=152_064, max_position_embeddings=131_072)
        | {"rope_theta": 10_000, "use_mrope": False, "eos_token_id": 151_643}
        | {"sliding_window": 4_096, "max_window_layers": 28, "tie_word_embeddings": False},
        # transformers adds Qwen2's <|endoftext|>, which the files do not have.
        *(OF_R1, 151_643, "qwen2", "", 151_666, {151_643, 151_665}, 131_072),
    ),
    "Qwen3-8B": (
        QWEN3
        | sized(4_096, 12_288, 36, 32, 8, max_window_layers=36)
        | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        *(OF_QWEN3, QWEN_ENDS, "qwen3", "8b", 151_669, {151_643, 151_645}, 40_960),
    ),
    "Qwen3-30B-A3B": (
        QWEN3
        | sized(2_048, 6_144, 48, 32, 4, decoder_sparse_step=1, mlp_only_layers=[])
        | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
        | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128}
        | {"num_experts_per_tok": 8, "output_router_logits": False}
        | {"router_aux_loss_coef": 0.001},
        *(OF_QWEN3, QWEN_ENDS, "qwen3_moe", "30b_a3b", 151_669, {151_643, 151_645}, 40_960),
    ),
    "Llama-3.1-8B-Instruct": (
        LLAMA
        | sized(4_096, 14_336, 32, 32, 8, vocab_size=128_256, max_position_embeddings=131_072)
        | {"rope_theta": 500_000.0, "rope_scaling": LLAMA3 | {"factor": 8.0}}
        | {"eos_token_id": [128_001, 128_008, 128_009], "tie_word_embeddings": False},
        *(OF_LLAMA, [128_001, 128_008, 128_009], "llama", "3.1-8b"),
        *(128_256, {128_001, 128_008, 128_009}, 131_072),
    ),
    "Llama-3.2-1B": (
        LLAMA
        | sized(2_048, 8_192, 16, 32, 8, vocab_size=128_256, max_position_embeddings=131_072)
        | {"rope_theta": 500_000.0, "rope_scaling": LLAMA3 | {"factor": 32.0}, "head_dim": 64}
        | {"eos_token_id": 128_001, "tie_word_embeddings": True},
        OF_LLAMA._replace(end="<|end_of_text|>", template=""),
        *(128_001, "llama", "3.2-1b", 128_256, {128_001}, 131_072),
    ),
    "SmolLM2-135M-Instruct": (
        LLAMA
        | sized(576, 1_536, 30, 9, 3, vocab_size=49_152, max_position_embeddings=8_192)
        | {"rope_theta": 100_000, "rope_interleaved": False, "is_llama_config": True}
        | {"eos_token_id": 2, "tie_word_embeddings": True},
        *(OF_SMOLLM, 2, "llama", "", 49_152, {0, 2}, 8_192),
    ),
    "gemma-3-270m-it": (
        GEMMA
        | sized(640, 2_048, 18, 4, 1, use_bidirectional_attention=False)
        | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3},
        *(OF_GEMMA, GEMMA_ENDS, "gemma3_text", "270m", 262_144, {1, 106}, 32_768),
    ),
    "gemma-3-1b-it": (
        GEMMA
        | sized(1_152, 6_912, 26, 4, 1, sliding_window_pattern=6)
        | {"cache_implementation": "hybrid"},
        *(OF_GEMMA, GEMMA_ENDS, "gemma3_text", "1b", 262_144, {1, 106}, 32_768),
    ),
    "gemma-3-4b-it": (
        {
            **{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
            **{"boi_token_index": 255_999, "image_token_index": 262_144, "eos_token_id": [1, 106]},
            "text_config": {
                **{"hidden_size": 2_560, "intermediate_size": 10_240, "num_hidden_layers": 34},
                **{"model_type": "gemma3_text", "sliding_window": 1_024},
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {"hidden_size": 1_152, "model_type": "siglip_vision_model"},
        },
        *(OF_GEMMA, GEMMA_ENDS, "gemma3_text", "4b", 262_145, {1, 106}, 131_072),
    ),
}


def write(folder, config, ids: Ids, ends):
    """Writes a published directory without its weights."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inside = {id: text for text, id in ids.named.items() if id < ids.base}
    rest = iter([*letters, *(f"filler{i}" for i in range(ids.base))])
    vocabulary = {inside.get(id) or next(rest): id for id in range(ids.base)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    behind = {id: text for text, id in ids.named.items() if id >= ids.base}
    added = [behind.get(id, f"<|reserved{id}|>") for id in range(ids.base, ids.last + 1)]
    special = [*inside.values(), *added]
    made.add_special_tokens([tokenizers.AddedToken(it, normalized=False) for it in special])
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": ids.kind, "eos_token": ids.end}
    about["bos_token"] = BEGINS.get(ids.end)
    if ids.kind == "GemmaTokenizer":  # in a file of its own
        (folder / "chat_template.jinja").write_text(ids.template)
    elif ids.template:
        about["chat_template"] = ids.template
    files = {"config": config, "tokenizer_config": about}
    for name, content in (files | {"generation_config": {"eos_token_id": ends}}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_directory_is_planned(name, tmp_path):
    """Gemma 3 of 1B and 270M were refused: their own tokenizer has one id more than they rows."""
    config, ids, ends, family, preset, sampled, stop_ids, positions = PUBLISHED[name]
    write(tmp_path, config, ids, ends)
    wish = any_model.get_config()
    wish.model.path, wish.model.compute_dtype = str(tmp_path), "bfloat16"
    wish.data.train.update(kind="arithmetic", count=300)
    wish.rollout.cache_mib = 4_096
    planned = start.plan_training(wish, tmp_path / "run", None)
    sizes, tokenizer = planned.programs.sizes, planned.tokenizer
    assert planned.config.model.family == family
    said = "\n".join(planned.lines())
    assert ("coef = 0.001 of config.json: there is no" in said) == (family == "qwen3_moe")
    assert not preset or sizes == families.load(family).presets[preset]
    assert (tokenizer.vocab_size, {*tokenizer.stop_ids}) == (sampled, stop_ids)
    assert planned.programs.settings.vocab_size == sampled <= sizes.vocab_size
    r = planned.config.rollout
    assert r.max_response_tokens == min(4_096, positions - r.max_prompt_tokens)
    assert tokenizer.chat == ("template" if ids.template else "none")
    prompt_ids = planned.data.train.sets["data.train"].prompts[0].token_ids.tolist()
    begins = tokenizer.decode(prompt_ids).startswith(("<|im_start|>", *BEGINS.values()))
    assert begins == bool(ids.template) and max(prompt_ids) < sampled
    refused = wish.copy_and_resolve_references()
    refused.rollout.max_response_tokens = positions
    with pytest.raises(ValueError, match=f"exceeds the {positions} positions|leaves no position"):
        start.plan_training(refused, tmp_path / "run", None)
