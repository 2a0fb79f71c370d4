"""Hugging Face's tokenizer files made of a GGUF file's metadata: byte-level BPE.

The file names the splitting of a text before the merges (tokenizer.ggml.pre), and does not hold it.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax.untrusted import quoted, shown

DIGITS = {"type": "Digits", "individual_digits": True}
# Qwen2.5's expression, and Llama 3's, which takes up to three digits at a time.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


# tokenizer.ggml.pre -> (first step of splitting, whether ByteLevel's own expression splits further,
# the normalizer's name, whether a whole word may be a token that the merges do not make, whether
# texts begin with the bos token where the file does not say)
SPLITS = {
    "smollm": (DIGITS, True, None, False, False),
    "qwen2": (_split(WORDS % ""), False, "NFC", False, False),
    "llama-bpe": (_split(WORDS % "{1,3}"), False, None, True, True),
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # kinds of tokens; an unused one fills the vocabulary up
NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}
END_OF_TURN = "tokenizer.ggml.eot_token_id"


def tokenizer_files(metadata: Mapping[str, Any], file) -> dict[str, dict[str, Any]]:
    """Makes the contents of JSON files by their names, of the metadata of `file`.

    They are tokenizer.json, tokenizer_config.json with the named tokens and the chat template, and
    generation_config.json where a token ends texts. Unused tokens are left out: the model has rows
    for them, and nothing encodes to them.

    Raises ValueError, with the file and the key, for another kind of tokenizer or of splitting, for
    tokens that are missing or given twice, and for merges of tokens that do not exist.
    """

    def get(key, kind, default):
        value = metadata.get(key, default)
        several = isinstance(default, list)
        fits = several == isinstance(value, list)
        if value is not default and not (
            fits and all(type(item) is kind for item in (value if several else [value]))
        ):
            raise ValueError(f"{file}: {key} is {quoted(value)}, but must have {kind.__name__}s")
        return value

    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ValueError(
            f"{file}: tokenizer.ggml.model is {quoted(model)}, but only 'gpt2' (byte-level BPE) is "
            "converted; for a SentencePiece model ('llama') convert the model's Hugging Face "
            "directory, which has its tokenizer.model"
        )
    if pre not in tuple(SPLITS):
        raise ValueError(
            f"{file}: tokenizer.ggml.pre is {quoted(pre)}, but must be one of "
            f"{', '.join(SPLITS)}; convert the model's Hugging Face directory"
        )
    first, splits_further, normalizer, whole_words, begins = SPLITS[pre]
    texts, merges = get("tokenizer.ggml.tokens", str, []), get("tokenizer.ggml.merges", str, [])
    kinds = get("tokenizer.ggml.token_type", int, [])
    if not texts or len(kinds) != len(texts):
        raise ValueError(
            f"{file}: tokenizer.ggml.token_type has {len(kinds)} entries, tokenizer.ggml.tokens "
            f"{len(texts)}, but both must have one for each token"
        )
    ids = {}
    for id, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind != UNUSED and ids.setdefault(text, id) != id:
            raise ValueError(
                f"{file}: tokenizer.ggml.tokens has {shown(text)} twice, as {ids[text]} and {id}"
            )
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise ValueError(
                f"{file}: tokenizer.ggml.merges has {quoted(merge)}, but tokenizer.ggml.tokens has "
                "not all of the two and what they make"
            )

    def named(key):
        id = get(key, int, None)
        if id is not None and ids.get(texts[id] if 0 <= id < len(texts) else None) != id:
            raise ValueError(f"{file}: {key} is {quoted(id)}, but the tokenizer has no such id")
        return id

    special = {name: texts[id] for name, key in NAMED.items() if (id := named(key)) is not None}
    if get("tokenizer.ggml.add_eos_token", bool, False):
        raise ValueError(f"{file}: tokenizer.ggml.add_eos_token is True, but must be False")
    begins = get("tokenizer.ggml.add_bos_token", bool, begins)
    if begins and "bos_token" not in special:
        raise ValueError(f"{file}: tokenizer.ggml.add_bos_token wants a {NAMED['bos_token']}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": id, "content": text, "special": kinds[id] == CONTROL}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for text, id in ids.items()
            if kinds[id] in (CONTROL, USER_DEFINED)
        ],
        "normalizer": normalizer and {"type": normalizer},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [first, byte_level | {"use_regex": splits_further}],
        },
        "post_processor": _begin(special["bos_token"], ids) if begins else None,
        "decoder": byte_level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": ids, "merges": merges, "ignore_merges": whole_words},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if template := get("tokenizer.chat_template", str, ""):
        config["chat_template"] = template
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config | special}
    ends = {id for key in (NAMED["eos_token"], END_OF_TURN) if (id := named(key)) is not None}
    if ends:
        files["generation_config.json"] = {"eos_token_id": sorted(ends)}
    return files


def _begin(text: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """Makes the post-processor that puts one token before a text, and before each of a pair."""
    token = {"SpecialToken": {"id": text, "type_id": 0}}
    one, other = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [token, one],
        "pair": [token, one, token, other],
        "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]}},
    }
