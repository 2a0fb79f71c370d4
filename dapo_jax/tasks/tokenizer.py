"""Text to token ids and back: Qwen2.5's byte-level BPE, and sentencepiece for the tiny model.

Text from a data set is only ever text. Where a problem or a message contains the text of a control
token ("<|endoftext|>"), it is encoded as ordinary characters, in plain prompts and inside a chat
template alike: only the template itself can put a control token into a prompt. This is stricter
than transformers, which would end the turn there. A control token is one that the tokenizer's
files mark as special; `decode` strips exactly those. Otherwise decode(encode(text)) is the text, up
to the tokenizer's own normalisation (NFC for Qwen2.5).
"""

import difflib
import json
import re
from collections.abc import Collection, Sequence
from typing import Protocol

import jinja2
import jinja2.sandbox
import sentencepiece
import tokenizers
from etils import epath
from etils.epath import PathLike

from dapo_jax.types import Message, plain_text

# Lone surrogates cannot occur in valid text, so these marks cannot collide with any content.
_SHIELD_OPEN, _SHIELD_CLOSE = "\udc00", "\udc01"


class Tokenizer(Protocol):
    """A tokenizer turns text and messages into ids, and ids into text.

    vocab_size: 1 + the largest id that exists; a model's padded vocabulary may be larger.
    stop_ids: ids that end a response, at least one.
    pad_id: an id for filling arrays. It may equal a stop id: build masks from lengths, not from it.
    """

    vocab_size: int
    stop_ids: tuple[int, ...]
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Encodes plain text. Nothing is added, and no text becomes a control token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, control tokens stripped; raises ValueError for one that does not exist."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Encodes a prompt of messages ({"role", "content"}), ready for the model's answer."""


def load_tokenizer(path: PathLike, *, stop_tokens: Sequence[str] | None, chat: str) -> Tokenizer:
    """Reads a tokenizer from a directory or a sentencepiece file.

    path: a directory with tokenizer.json (and tokenizer_config.json, chat_template.jinja where
        there are any), else with tokenizer.model; or a sentencepiece `.model` file.
    stop_tokens: the texts of the tokens that end a response. None takes the base model's:
        <|endoftext|> where it exists, else the end-of-sequence token that the files name.
        An instruct model needs its end of turn (<|im_end|> for Qwen2.5) named here.
    chat: "none" (the contents of the messages as plain text) or "template" (the chat template of
        tokenizer_config.json, with the prompt for the assistant's turn added).

    Raises FileNotFoundError for missing files and ValueError for files, stop tokens or templates
    that do not fit; both name the setting to change.
    """
    path = epath.Path(path)
    if chat not in ("none", "template"):
        raise ValueError(f'tokenizer.chat = {chat!r}: must be "none" or "template".')
    if stop_tokens is not None and (isinstance(stop_tokens, str) or not stop_tokens):
        raise ValueError(
            f"tokenizer.stop_tokens = {stop_tokens!r}: must be a list of one token text or more."
        )
    if not path.exists():
        raise FileNotFoundError(f"No tokenizer at {path}: set tokenizer.path.")
    if (path / "tokenizer.json").is_file():
        return HuggingFaceTokenizer(path, stop_tokens=stop_tokens, chat=chat)
    model_file = path / "tokenizer.model" if path.is_dir() else path
    if not model_file.is_file() or model_file.suffix != ".model":
        raise FileNotFoundError(
            f"{path} is neither a directory with tokenizer.json or tokenizer.model nor a "
            "sentencepiece .model file: set tokenizer.path."
        )
    if chat == "template":
        raise ValueError(
            f"{model_file} is a sentencepiece model, which has no chat template: set "
            'tokenizer.chat="none".'
        )
    return SentencePieceTokenizer(model_file, stop_tokens=stop_tokens)


class HuggingFaceTokenizer:
    """A tokenizer.json, with the chat template and special tokens of its tokenizer_config.json."""

    def __init__(self, folder: epath.Path, *, stop_tokens: Sequence[str] | None, chat: str):
        file = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file.read_bytes())
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} is not a tokenizer: {error} (tokenizer.path).") from error
        # Some published files carry the truncation of their last user.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # special text in a problem stays text

        added = self._tokenizer.get_added_tokens_decoder()
        self._control_id = {token.content: id for id, token in added.items() if token.special}
        self._control_text = {id: text for text, id in self._control_id.items()}
        longest_first = sorted(self._control_id, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

        config = _read_json(folder / "tokenizer_config.json")
        if stop_tokens is None:
            if "<|endoftext|>" in self._control_id:
                stop_tokens = ["<|endoftext|>"]
            elif eos_token := _token_text(config.get("eos_token")):
                stop_tokens = [eos_token]
            else:
                raise ValueError(
                    f"{folder} names no end-of-sequence token: set tokenizer.stop_tokens."
                )
        names = [token.content for token in added.values()]
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.stop_ids = _stop_ids(stop_tokens, self._tokenizer.token_to_id, names, file)
        pad_token = _token_text(config.get("pad_token"))
        pad_id = self._tokenizer.token_to_id(pad_token) if pad_token else None
        self.pad_id = self.stop_ids[0] if pad_id is None else pad_id
        self._template = _chat_template(folder, config) if chat == "template" else None
        self._template_tokens = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(config.get(name)))
        }

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(_existing(ids, self.vocab_size), skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            return self.encode(plain_text(messages))
        shielded = [
            {key: self._shield(value) for key, value in message.items()} for message in messages
        ]
        try:
            rendered = self._template.render(
                messages=shielded, add_generation_prompt=True, **self._template_tokens
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"The chat template refuses a prompt of roles {[m['role'] for m in messages]}: "
                f"{error} (tokenizer.chat)."
            ) from error
        ids, start = [], 0
        for control in self._control_pattern.finditer(rendered):
            ids += self.encode(self._unshield(rendered[start : control.start()]))
            ids.append(self._control_id[control.group()])
            start = control.end()
        return ids + self.encode(self._unshield(rendered[start:]))

    def _shield(self, text: str) -> str:
        return self._control_pattern.sub(
            lambda found: f"{_SHIELD_OPEN}{self._control_id[found.group()]}{_SHIELD_CLOSE}", text
        )

    def _unshield(self, text: str) -> str:
        return re.sub(
            f"{_SHIELD_OPEN}(\\d+){_SHIELD_CLOSE}",
            lambda found: self._control_text[int(found.group(1))],
            text,
        )


class SentencePieceTokenizer:
    """A sentencepiece model; a prompt of messages is plain text."""

    def __init__(self, file: epath.Path, *, stop_tokens: Sequence[str] | None):
        try:
            self._processor = sentencepiece.SentencePieceProcessor()
            self._processor.LoadFromSerializedProto(file.read_bytes())
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{file} is not a sentencepiece model: {error} (tokenizer.path)."
            ) from error
        self.vocab_size = self._processor.vocab_size()
        pieces = [self._processor.id_to_piece(id) for id in range(self.vocab_size)]
        if stop_tokens is None:
            if self._processor.eos_id() < 0:
                raise ValueError(
                    f"{file} names no end-of-sequence token: set tokenizer.stop_tokens."
                )
            stop_tokens = [pieces[self._processor.eos_id()]]
        ids = {piece: id for id, piece in enumerate(pieces)}
        self.stop_ids = _stop_ids(stop_tokens, ids.get, pieces, file)
        pad_id = self._processor.pad_id()
        self.pad_id = pad_id if pad_id >= 0 else self.stop_ids[0]

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(_existing(ids, self.vocab_size))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(plain_text(messages))


def _existing(ids: Sequence[int], vocab_size: int) -> list[int]:
    ids = [int(id) for id in ids]
    for id in ids:
        if not 0 <= id < vocab_size:
            raise ValueError(
                f"Token id {id} does not exist: the tokenizer has ids 0 to {vocab_size - 1}. "
                "The sampler must mask the padded part of the model's vocabulary."
            )
    return ids


def _stop_ids(stop_tokens, id_of, names: Collection[str], file: epath.Path) -> tuple[int, ...]:
    ids = []
    for text in dict.fromkeys(stop_tokens):
        id = id_of(text)
        if id is None:
            near = difflib.get_close_matches(text, names, n=3)
            hint = f" Near matches: {', '.join(near)}." if near else ""
            raise ValueError(
                f"Stop token {text!r} is not in {file}.{hint} Change tokenizer.stop_tokens."
            )
        ids.append(id)
    return tuple(ids)


def _read_json(file: epath.Path) -> dict:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error} (tokenizer.path).") from error


def _token_text(token: str | dict | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _chat_template(folder: epath.Path, config: dict) -> jinja2.Template:
    """Compiles the chat template in the environment that transformers documents for templates."""
    own_file = folder / "chat_template.jinja"
    source = (
        own_file.read_text(encoding="utf-8") if own_file.is_file() else config.get("chat_template")
    )
    if not isinstance(source, str):
        raise ValueError(
            f"{folder} has no chat template (the text chat_template of tokenizer_config.json, or "
            'chat_template.jinja): add it or set tokenizer.chat="none".'
        )
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"The chat template of {folder} is broken: {error}.") from error
