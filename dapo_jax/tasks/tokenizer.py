"""Text to token ids and back: transformers' tokenizers, and sentencepiece for the tiny model.

A Hugging Face directory is read by transformers' AutoTokenizer, so that ids are its ids whatever
the layout of the files. Nothing is stripped from a response but the stop token that ended it.
"""

import contextlib
import datetime
import difflib
import functools
import json
import logging
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sentencepiece
from etils import epath
from etils.epath import PathLike

from dapo_jax.tasks.calls import TAGGED, Call, either, said
from dapo_jax.tasks.turns import Turns
from dapo_jax.types import Message, plain_text

IN_TOKENIZER_JSON = ("vocab.json", "merges.txt")  # not read where it is there
# What a directory may have that says how text becomes ids, and with which of them a response ends.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", *IN_TOKENIZER_JSON),
    *("added_tokens.json", "special_tokens_map.json", "chat_template.jinja"),
    *("generation_config.json", "config.json"),
)
ROLES = ("user", "assistant")  # in turn
BREAK = "\ufdd0"  # no text has it: stands in one that shall be no token of a template
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
MORE_TEMPLATES = "additional_chat_templates"  # a folder of named ones, for other users
MAX_ERROR_CHARS = 200
ANY = 2**31  # rows of a model that has one for each id
PROBE = "\n What is  12+3?\nAnswer: \u00bd \u00e9\U0001f680, is it so, is it"


class PlainText:
    """Turns messages into tokens without a chat template, by the tokenizer's `encode`."""

    chat, date, opening = "none", "", ""

    def between(self, messages: Sequence[Message], stop_id: int, *made: Call) -> list[int]:
        """Encodes what is between a turn that ended with stop_id and the next: the messages.

        made: the turn's calls, which they answer.
        """
        return self.encode(f"\n\n{plain_text(messages)}\n\n")

    def check_turns(self, *, with_tools: bool) -> list[str]:
        """Returns what a person should know of episodes; ValueError where there can be none."""
        return [f"no chat template shows the tools: tell of them ({TAGGED})"] if with_tools else []

    def tool_calls(self, text: str, tools: Sequence[Mapping]) -> list[Call]:
        """Reads a turn's calls, {"name", "arguments"}, or what is wrong with one.

        tools: their schemas, which say what type an argument has.
        """
        return either(said(text))

    def plainly(self, text: str) -> str:
        """Marks a text that `encode_chat` is to read as plain, without tokens of a template."""
        return text

    def encode_chat(self, messages: Sequence[Message], tools=None) -> list[int]:
        """Encodes a prompt of messages ({"role", "content"}), ready for the model's answer."""
        return self.encode(plain_text(messages))

    def _known(self, ids: list[int]) -> list[int]:
        """Returns the ids of a text; ValueError where the model has no row for one of them."""
        if (id := max(ids, default=0)) >= self.vocab_size:
            raise ValueError(
                f"{self.decode([id])!r} is token {id}, but the model has {self.vocab_size} rows of "
                "embeddings: take it out of the text, or set tokenizer.path to the model's own"
            )
        return ids


class HuggingFaceTokenizer(PlainText):
    """The tokenizer, chat template and end tokens of a Hugging Face directory.

    vocab_size: 1 + the largest id that exists and has a row in the model, which may have more.
    stop_ids: ids that end a response, at least one.
    chat: "template" or "none", how messages become a prompt.
    date: the day that the template writes; "": today's, or that it writes none.
    opening: what the template begins an answer with, behind its header: "<think>\\n", or "".
    """

    def __init__(
        self,
        folder: epath.Path,
        *,
        stop_tokens: Sequence[str] | None,
        chat: str,
        rows: int = ANY,
        date: str = "",
        chat_args: Mapping[str, Any] | None = None,
    ):
        self._folder, self._chat_args = folder, chat_args or {}
        with _of_library(folder, "has a tokenizer that cannot be read"), _local(folder) as files:
            self._tokenizer = _transformers().AutoTokenizer.from_pretrained(
                files, local_files_only=True, trust_remote_code=False
            )
        if chat == "auto":
            chat = "template" if self._tokenizer.chat_template else "none"
        self.chat, template = chat, ""
        if chat == "template":
            with _of_library(folder, 'has no chat template: add it or set tokenizer.chat="none"'):
                template = self._tokenizer.get_chat_template()
            self._tokenizer.chat_template = _on_day(template, date)
            self.date = date if self._tokenizer.chat_template != template else ""
            self.opening = self._opening()
        for name in self._chat_args:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                logging.warning("tokenizer.chat_args has %s, which no template reads", name)
        ids = {text: id for text, id in self._tokenizer.get_vocab().items() if id < rows}
        self.vocab_size = 1 + max(ids.values())
        if stop_tokens is None:
            ends = self._tokenizer.convert_ids_to_tokens(_end_ids(folder, self.vocab_size))
            ends += [text for text in ["<|endoftext|>"] if text in ids]
            if chat == "template" or not ends:
                ends.insert(0, self._tokenizer.eos_token)
            if chat == "template":
                ends.insert(0, self._end_of_turn())
            stop_tokens = list(filter(None, ends))
        self.stop_ids = _stop_ids(stop_tokens, ids, folder)

    def _rendered(self, *texts: str, **arguments) -> str:
        """Renders a conversation by the template; "" where it takes no such conversation."""
        messages = [{"role": ROLES[i % 2], "content": text} for i, text in enumerate(texts)]
        return self._render(messages, **arguments)

    def _render(self, messages: Sequence[Message], **arguments) -> str:
        arguments = {**self._chat_args, **arguments}
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        except Exception:
            return ""

    @functools.cached_property
    def _turns(self) -> Turns:
        has_template = getattr(self._tokenizer, "response_template", None)
        ends = self._tokenizer.convert_ids_to_tokens(self.stop_ids)
        return Turns(self._render, self._parse if has_template else None, ends, self.opening)

    def _opening(self) -> str:
        """Returns what a prompt has behind the header that an earlier answer has too."""
        talk = self._rendered("a question", "an answer", "more")
        header, is_there, _ = talk.partition("an answer")
        is_begun = is_there and self._asked.startswith(header)
        return self._asked.removeprefix(header) if is_begun else ""

    @functools.cached_property
    def _asked(self) -> str:
        return self._rendered("a question", add_generation_prompt=True)

    def _end_of_turn(self) -> str | None:
        """Returns the special token that the template writes behind an answer; None without one."""
        _, is_there, behind = self._rendered("a question", "an answer").rpartition("an answer")
        if not is_there:  # the template leaves answers out
            return None
        special = [it.content for it in self._tokenizer.added_tokens_decoder.values() if it.special]
        return max(filter(behind.lstrip().startswith, special), key=len, default=None)

    def _ids(self, text: str, **how) -> list[int]:
        return self._known(self._tokenizer(text, **how).input_ids)

    def encode(self, text: str) -> list[int]:
        """Encodes plain text: nothing is added, and no text becomes a special token."""
        return self._ids(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids without the stop token at their end."""
        return self._tokenizer.decode(_text_ids(ids, self))

    def between(self, messages: Sequence[Message], stop_id: int, *made: Call) -> list[int]:
        end = self._tokenizer.convert_ids_to_tokens(stop_id)
        messages = [it | {"content": self.plainly(it["content"])} for it in messages]
        if self.chat == "none":
            return self._encoded(f"\n\n{plain_text(messages)}\n\n", end)
        return self._encoded(self._turns.between(messages, end, made), end)

    def _encoded(self, text: str, before: str) -> list[int]:
        """Encodes a template's text as it stands behind a token; `plainly` has marked what is none.

        The token is before each piece: some tokenizers put a space before what begins a text.
        """
        before = before if before in self._added else ""
        pieces = (f"{before}{piece}" for piece in text.split(BREAK))
        of_pieces = (self._ids(piece, add_special_tokens=False) for piece in pieces)
        return [id for ids in of_pieces for id in ids[len(before) > 0 :]]

    def plainly(self, text: str) -> str:
        for token, is_of_template in self._added.items():
            if is_of_template and token in text and len(token.strip()) > 1:
                text = text.replace(token, f"{token[0]}{BREAK}{token[1:]}")
        return text

    @functools.cached_property
    def _added(self) -> dict[str, bool]:
        """The added tokens, and whether they are special or in the chat template."""
        template = str(self._tokenizer.chat_template or "") if self.chat == "template" else ""
        added = self._tokenizer.added_tokens_decoder.values()
        return {it.content: it.special or it.content in template for it in added}

    def check_turns(self, *, with_tools: bool) -> list[str]:
        if self.chat == "none":
            return super().check_turns(with_tools=with_tools)
        try:
            notes = self._turns.check(with_tools=with_tools)
        except ValueError as error:
            raise ValueError(f"{self._folder} has a chat template that {error}") from error
        if self._turns.rewrites_turns():
            notes.append("the chat template rewrites earlier turns: here they stay as sampled")
        return notes

    def tool_calls(self, text: str, tools: Sequence[Mapping]) -> list[Call]:
        if self.chat == "none":
            return super().tool_calls(text, tools)
        return self._turns.read(text, tools)

    def _parse(self, text: str, tools: Sequence[Mapping]) -> list[Call]:
        """Reads calls by the files' response_template; none in what it does not read.

        Some look for the end token, which a turn's text does not have.
        """
        given = {"prefix": self._asked, "tools": list(tools)}
        for end in (*self._tokenizer.convert_ids_to_tokens(self.stop_ids), ""):
            with contextlib.suppress(Exception):  # the model wrote what the template does not read
                message = self._tokenizer.parse_response(text + end, **given)
                if made := [call.get("function", call) for call in message.get("tool_calls", ())]:
                    return [{key: call[key] for key in ("name", "arguments")} for call in made]
        return []

    def encode_chat(self, messages: Sequence[Message], tools=None) -> list[int]:
        if self.chat == "none":
            return self._ids(plain_text(messages), split_special_tokens=True)
        roles = [message["role"] for message in messages]
        begun = roles[-1:] == ["assistant"]  # an answer's first words, to go on from
        given = self._chat_args | ({"tools": list(tools)} if tools else {})
        given |= {"add_generation_prompt": not begun, "continue_final_message": begun}
        with _of_library(self._folder, f"has no prompt for roles {roles} by its template"):
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **given)
        first, *more = text.split(BREAK, 1)
        ids = self._ids(first, add_special_tokens=False)
        before = self._tokenizer.convert_ids_to_tokens(self.stop_ids[0])
        return ids + (self._encoded(*more, before) if more else [])


class SentencePieceTokenizer(PlainText):
    """A sentencepiece model with the same methods; a prompt of messages is plain text."""

    def __init__(self, file: epath.Path, *, stop_tokens: Sequence[str] | None, rows: int = ANY):
        self._processor = sentencepiece.SentencePieceProcessor()
        with _of_library(file, "is not a sentencepiece model"):
            self._processor.LoadFromSerializedProto(file.read_bytes())
        self.vocab_size = min(self._processor.vocab_size(), rows)
        ids = {self._processor.id_to_piece(id): id for id in range(self.vocab_size)}
        if stop_tokens is None:
            ends = [*_end_ids(file.parent, self.vocab_size), self._processor.eos_id()]
            stop_tokens = [self._processor.id_to_piece(id) for id in ends if id >= 0]
        self.stop_ids = _stop_ids(stop_tokens, ids, file)

    def encode(self, text: str) -> list[int]:
        return self._known(self._processor.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(_text_ids(ids, self))


Tokenizer = HuggingFaceTokenizer | SentencePieceTokenizer


def begun_answer(messages: Sequence[Message], tokenizer: Tokenizer) -> str:
    """Returns what a prompt has of the answer: its last message, or what the template opens."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[-1]["content"]
    return tokenizer.opening


def load_tokenizer(
    path: PathLike, *, stop_tokens: Sequence[str] | None, chat: str, rows: int = ANY, **template
) -> Tokenizer:
    """Reads a tokenizer from a Hugging Face directory or a sentencepiece model.

    path: a directory, maybe in a bucket, or a .model file; a directory that has tokenizer.model
    alone is one too. stop_tokens, chat, template: as the keys tokenizer.* have them. rows:
    embedding rows of the model, which may be fewer than the tokenizer's ids.

    Raises FileNotFoundError for missing files and ValueError for files, stop tokens or templates
    that do not fit; both name the setting to change.
    """
    path = epath.Path(path)
    of_tokenizer = FILES[:-2]  # the last two are a model's too
    there = [name for name in of_tokenizer if (path / name).exists()] if path.is_dir() else []
    if there not in ([], ["tokenizer.model"]):
        template |= {"chat": chat, "rows": rows}
        return HuggingFaceTokenizer(path, stop_tokens=stop_tokens, **template)
    model_file = path / "tokenizer.model" if there else path
    if model_file.suffix != ".model" or not model_file.exists():
        raise FileNotFoundError(
            f"{path} is neither a directory with a tokenizer's files nor a sentencepiece .model "
            "file: set tokenizer.path."
        )
    if chat == "template":
        raise ValueError(
            f"{model_file} is a sentencepiece model, which has no chat template: set "
            'tokenizer.chat="none".'
        )
    return SentencePieceTokenizer(model_file, stop_tokens=stop_tokens, rows=rows)


def save_for_transformers(model_file: epath.Path, folder: epath.Path) -> list[str]:
    """Writes a sentencepiece model as tokenizer.json, from which AutoTokenizer has the same ids.

    Returns the names of the written files. A model without an equal there (one that is no BPE, or
    that changes a text before it splits it) is copied as it is, with a warning.
    """
    import tokenizers

    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model_file.read_bytes())
    ids = {name: getattr(processor, f"{name}_id")() for name in ("bos", "eos", "pad", "unk")}
    named = {f"{name}_token": processor.id_to_piece(id) for name, id in ids.items() if id >= 0}
    given = {"bos_token": None, "add_prefix_space": False, "legacy": False, **named}
    config = {
        **named,
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Without it transformers splits texts as Qwen2 does, where config.json is of a Qwen2.
        "auto_map": {"AutoTokenizer": [None, "tokenization.PreTrainedTokenizerFast"]},
    }
    with _local(model_file.parent) as files:
        library = _transformers().LlamaTokenizer.from_pretrained(files, **given).backend_tokenizer
    spec = json.loads(library.to_str())
    # Spaces are marked before pieces that are whole phrases are looked for.
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    spec |= {"normalizer": mark, "pre_tokenizer": None}
    for token in spec["added_tokens"]:
        token["normalized"] = not token["special"]
    text = json.dumps(spec, ensure_ascii=False)
    probe = "  ".join(processor.decode([id]) for id in range(processor.vocab_size())) + PROBE
    if tokenizers.Tokenizer.from_str(text).encode(probe).ids != processor.encode(probe):
        logging.warning("transformers has other ids than %s; use it with sentencepiece", model_file)
        model_file.copy(folder / "tokenizer.model")
        return ["tokenizer.model"]
    files = {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(config, indent=2),
        "tokenization.py": "from transformers import PreTrainedTokenizerFast\n",
        "generation_config.json": json.dumps({"eos_token_id": ids["eos"]}),
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    return list(files)


def _on_day(template: str, date: str) -> str:
    """Writes the day into a chat template where it asks the clock; ValueError for no date."""
    try:
        day = datetime.date.fromisoformat(date) if date else None
    except ValueError as error:
        raise ValueError(f"tokenizer.date is {date!r}: must be a day, as 2026-11-27") from error
    return _CLOCK.sub(lambda it: repr(day.strftime(it[2])), template) if day else template


def _text_ids(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    return ids[:-1] if len(ids) and ids[-1] in tokenizer.stop_ids else ids


def _stop_ids(stop_tokens: Sequence[str], ids: Mapping[str, int], file) -> tuple[int, ...]:
    if not stop_tokens:
        raise ValueError(f"{file} names no end-of-sequence token: set tokenizer.stop_tokens.")
    for text in stop_tokens:
        if text not in ids:
            near = ", ".join(difflib.get_close_matches(f"{text}", ids, n=3)) or "none"
            raise ValueError(
                f"tokenizer.stop_tokens: {text!r} is no token's text in {file}, or has no row; "
                f"near: {near}"
            )
    return tuple(dict.fromkeys(ids[text] for text in stop_tokens))


def _end_ids(folder: epath.Path, vocab_size: int) -> list[int]:
    """Lists the ids that end a text by generation_config.json, or config.json without it."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        given = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if given is not None:
            ids = given if isinstance(given, list) else [given]
            if not all(type(id) is int and 0 <= id < vocab_size for id in ids):
                raise ValueError(
                    f"{file}: eos_token_id is {given!r}, but ids with a row are below {vocab_size}"
                )
            return ids
    return []


def _transformers():
    """Imports transformers, which takes a second; it would say that it does without torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


@contextlib.contextmanager
def _local(folder: epath.Path) -> Iterator[PathLike]:
    """Yields the directory, or a local copy of a bucket's files of its tokenizer."""
    if "://" not in str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        for name in FILES:
            if (folder / name).exists():
                pathlib.Path(copy, name).write_bytes((folder / name).read_bytes())
        yield copy


@contextlib.contextmanager
def _of_library(file: epath.Path, problem: str) -> Iterator[None]:
    """Makes a ValueError, with the file, of what a tokenizer's library raises."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        raise ValueError(f"{file} {problem}: {text} (tokenizer.path).") from error
