"""Text to token ids and back: Qwen2.5's byte-level BPE, and sentencepiece for the tiny model.

Text from a data set is only ever text. Where a problem or a message contains the text of a control
token ("<|endoftext|>"), it is encoded as ordinary characters, in plain prompts and inside a chat
template alike: only the template itself can put a control token into a prompt. This is stricter
than transformers, which would end the turn there. A control token is one that the tokenizer's
files mark as special; `decode` strips exactly those. Otherwise decode(encode(text)) is the text, up
to the tokenizer's own normalisation (NFC for Qwen2.5).
"""

import base64
import contextlib
import difflib
import json
import logging
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import sentencepiece
import tokenizers
from etils import epath
from etils.epath import PathLike

from dapo_jax.tasks.chat_template import ChatTemplate
from dapo_jax.types import Message, plain_text
from dapo_jax.untrusted import is_local, present, quoted, read_bytes, read_json, read_text

MAX_TOKENIZER_BYTES = 64 * 2**20  # Gemma 3's, of 262,144 tokens, has 33 MB
MAX_TEMPLATE_BYTES = 2**20
MAX_ERROR_CHARS = 200
MAX_HELD = 8  # tokens without a whole character among them; a character has 4 bytes at most

# Lone surrogates cannot occur in valid text, so these marks cannot collide with any content.
_SHIELD_OPEN, _SHIELD_CLOSE = "\udc00", "\udc01"


class Tokenizer(Protocol):
    """A translator of text and messages into ids, and of ids into text.

    vocab_size: 1 + the largest id that exists; a model's padded vocabulary may be larger.
    stop_ids: ids that end a response, at least one.
    pad_id: an id for filling arrays. It may equal a stop id: build masks from lengths, not from it.
    """

    vocab_size: int
    stop_ids: tuple[int, ...]
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Encodes plain text. Nothing is added, and no text becomes a control token."""

    def decode(self, ids: Sequence[int], *, control_tokens: bool = False) -> str:
        """Decodes ids, control tokens stripped or shown; ValueError for an id that is not there."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Encodes a prompt of messages ({"role", "content"}), ready for the model's answer."""


def load_tokenizer(path: PathLike, *, stop_tokens: Sequence[str] | None, chat: str) -> Tokenizer:
    """Reads a tokenizer from a directory or a sentencepiece file.

    path: a directory with tokenizer.json (and tokenizer_config.json, chat_template.jinja where
        there are any), else with tokenizer.model; or a sentencepiece `.model` file.
    stop_tokens: the texts of the tokens that end a response. None takes those of the directory's
        generation_config.json, or config.json, and <|endoftext|> where it exists; with the chat
        template the tokenizer's end-of-sequence token too (<|im_end|> for Qwen2.5-Instruct), and
        without any of them that token alone. A warning is logged where texts given here have none
        of the model's.
    chat: "none" (the contents of the messages as plain text, with the tokens that the tokenizer
        itself puts around a text, such as Llama 3's <|begin_of_text|>) or "template" (the chat
        template of tokenizer_config.json, with the prompt for the assistant's turn added).

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
    if path.is_dir() and present(path / "tokenizer.json"):
        return HuggingFaceTokenizer(path, stop_tokens=stop_tokens, chat=chat)
    model_file = path / "tokenizer.model" if path.is_dir() else path
    if model_file == path and is_local(path):
        model_file = epath.Path(pathlib.Path(path).resolve())  # a link that the user gave
    if not present(model_file) or model_file.suffix != ".model":
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


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Splits decode(ids) into what each token adds to it; joined, the parts are decode(ids).

    A character of several tokens belongs to the last of them, the others add "". A control token
    adds "". Where the parts cannot be told apart (long runs of bytes that are no characters), the
    rest of the text belongs to the token at which that begins.
    """
    whole, texts = tokenizer.decode(ids), []
    # A token's text depends on its place (a first one loses its space): each is decoded behind the
    # one before it, ids[start:known], whose text is `before`.
    start, known, before = 0, 0, ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end])
        if text.endswith("\ufffd") and end < len(ids):
            if end - known >= MAX_HELD:
                break
            texts.append("")
            continue
        texts.append(text[len(before) :])
        if last := tokenizer.decode(ids[known:end]):
            start, before = known, last
        else:
            before = text
        known = end
    texts += [""] * (len(ids) - len(texts))
    found = "".join(texts)
    if not whole.startswith(found):
        return [whole, *[""] * (len(ids) - 1)]
    if ids:
        texts[min(known, len(ids) - 1)] += whole[len(found) :]
    return texts


class HuggingFaceTokenizer:
    """A tokenizer.json, with the chat template and special tokens of its tokenizer_config.json."""

    def __init__(self, folder: epath.Path, *, stop_tokens: Sequence[str] | None, chat: str):
        self._file = file = folder / "tokenizer.json"
        content = read_bytes(file, limit=MAX_TOKENIZER_BYTES)
        with _of_library(file, "is not a tokenizer"):
            _check_char_maps(content)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # Some published files carry the truncation of their last user.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # special text in a problem stays text

        added = self._tokenizer.get_added_tokens_decoder()
        self._control_id = {token.content: id for id, token in added.items() if token.special}
        self._control_text = {id: text for text, id in self._control_id.items()}
        longest_first = sorted(self._control_id, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

        config_file = folder / "tokenizer_config.json"
        config = read_json(config_file) if present(config_file) else {}
        special = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(config.get(name), name, config_file))
        }
        of_turn = special.get("eos_token") if chat == "template" else None
        ends = _ends(folder, of_turn, self._text_of)
        if stop_tokens is None:
            stop_tokens = [*ends, *(text for text in ["<|endoftext|>"] if text in self._control_id)]
            if not stop_tokens and "eos_token" in special:
                stop_tokens = [special["eos_token"]]
            if not stop_tokens:
                raise ValueError(
                    f"{folder} names no end-of-sequence token: set tokenizer.stop_tokens."
                )
        elif ends and set(ends).isdisjoint(stop_tokens):
            logging.warning(
                "tokenizer.stop_tokens = %s has none of the tokens with which the model of %s ends "
                "a response (%s): its responses may go on until they are cut",
                list(stop_tokens),
                folder,
                ", ".join(ends),
            )
        names = [token.content for token in added.values()]
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.stop_ids = _stop_ids(stop_tokens, self._tokenizer.token_to_id, names, file)
        pad_id = self._tokenizer.token_to_id(special.get("pad_token", ""))
        self.pad_id = self.stop_ids[0] if pad_id is None else pad_id
        self._template = _chat_template(folder, config) if chat == "template" else None
        self._template_tokens = special
        # LlamaTokenizer's library adds it by this setting, whatever tokenizer.json says.
        begin = special.get("bos_token", "") if config.get("add_bos_token") is True else ""
        self._begin_ids = [id] if (id := self._tokenizer.token_to_id(begin)) is not None else []

    def _text_of(self, id: int) -> str | None:
        with _of_library(self._file, f"has no token {id}"):
            return self._tokenizer.id_to_token(id)

    def encode(self, text: str) -> list[int]:
        with _of_library(self._file, "cannot encode a text"):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, control_tokens: bool = False) -> str:
        ids = _existing(ids, self.vocab_size)
        with _of_library(self._file, "cannot decode a response"):
            return self._tokenizer.decode(ids, skip_special_tokens=not control_tokens)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            with _of_library(self._file, "cannot encode a text"):
                ids = self._tokenizer.encode(plain_text(messages)).ids
            return ids if ids[:1] == self._begin_ids else self._begin_ids + ids
        shielded = [
            {key: self._shield(value) for key, value in message.items()} for message in messages
        ]
        rendered = self._template.render(shielded, self._template_tokens)
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
        content = read_bytes(file, limit=MAX_TOKENIZER_BYTES)
        self._processor = sentencepiece.SentencePieceProcessor()
        with _of_library(file, "is not a sentencepiece model"):
            self._processor.LoadFromSerializedProto(content)
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

    def decode(self, ids: Sequence[int], *, control_tokens: bool = False) -> str:
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


@contextlib.contextmanager
def _of_library(file: epath.Path, problem: str) -> Iterator[None]:
    """Makes a ValueError, with the file, of all that a tokenizer's library raises."""
    try:
        yield
    except BaseException as error:  # a panic of the library's Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        raise ValueError(f"{file} {problem}: {text} (tokenizer.path).") from error


def _check_char_maps(content: bytes) -> None:
    """Raises ValueError for a map of characters that claims more bytes than it has.

    The library allocates what the map's first four bytes say, up to 16 GiB, and where it gets
    less it aborts the process.
    """

    def check(pairs: list[tuple[str, object]]) -> None:
        for name, value in pairs:
            if name == "precompiled_charsmap" and isinstance(value, str):
                data = base64.b64decode(value)
                if int.from_bytes(data[:4], "little") > len(data):
                    raise ValueError("its precompiled_charsmap is cut off")

    try:
        json.loads(content.decode("utf-8"), object_pairs_hook=check)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _token_text(token: object, name: str, file: epath.Path) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{file}: {name} is {quoted(token)}, but must be a token's text")
    return text


def _ends(folder: epath.Path, eos_token: str | None, text_of) -> list[str]:
    """Lists `eos_token`, and the end tokens that generation_config.json names by id.

    Without the file those of config.json count, as for transformers' `generate`.
    """
    ends = [eos_token] if eos_token else []
    for file in (folder / "generation_config.json", folder / "config.json"):
        given = read_json(file).get("eos_token_id") if present(file) else None
        for id in given if isinstance(given, list) else [given] if given is not None else []:
            text = text_of(id) if type(id) is int and 0 <= id < 2**31 else None
            if text is None:
                raise ValueError(
                    f"{file}: eos_token_id is {quoted(given)}, but the tokenizer has no such id"
                )
            ends.append(text)
        if given is not None:
            break
    return list(dict.fromkeys(ends))


def _chat_template(folder: epath.Path, config: dict) -> ChatTemplate:
    own_file = folder / "chat_template.jinja"
    source = config.get("chat_template")
    if present(own_file):
        source = read_text(own_file, limit=MAX_TEMPLATE_BYTES)
    if not isinstance(source, str):
        raise ValueError(
            f"{folder} has no chat template (the text chat_template of tokenizer_config.json, or "
            'chat_template.jinja): add it or set tokenizer.chat="none".'
        )
    return ChatTemplate(source, str(folder))
