"""Tokenizers of bytes and a few added tokens, as a directory of Hugging Face's has them."""

import json

import tokenizers

from dapo_jax.tasks.tokenizer import PlainText, load_tokenizer

WHOLE = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}  # transformers'
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def bpe(*, special=CONTROL, ordinary=(), begins=False):
    """A BPE of bytes and added tokens; begins: it puts one before a text, as Llama 3's does."""
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({s: i for i, s in enumerate(symbols)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(it, normalized=False) for it in special])
    made.add_tokens([tokenizers.AddedToken(it, normalized=False) for it in ordinary])
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
        )
    return made


def written(folder, template=CHATML, made=None, **config):
    """Writes a tokenizer's directory, by default of bytes and ChatML; returns the folder."""
    folder.mkdir(exist_ok=True)
    (made or bpe()).save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": CONTROL[-1]} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(path, stop_tokens=None, chat="none", **how):
    return load_tokenizer(path, stop_tokens=stop_tokens, chat=chat, **how)


def user(text):
    return [{"role": "user", "content": text}]


class Letters(PlainText):
    """A tokenizer of letters, whose stop token is 0; its template begins no answer."""

    stop_ids = (0,)

    def encode(self, text):
        return [*map(ord, text)]

    def decode(self, ids):
        return "".join(chr(id) for id in ids if id)

    def between(self, messages, stop_id, *made):
        assert stop_id == 0
        return self.encode("".join(message["content"] for message in messages))
