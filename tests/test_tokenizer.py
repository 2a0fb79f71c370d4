"""Tokenizers: ids, round trips, stop tokens, chat templates and what is refused."""

import json

import numpy as np
import pytest
import sentencepiece
from byte_tokenizers import CHATML, CONTROL, WHOLE, bpe, load, user, written
from transformers import AutoTokenizer

from dapo_jax.convert import convert
from dapo_jax.tasks.base import graded
from dapo_jax.tasks.templates import templated
from dapo_jax.types import Example, Group, Prompt, Response, Status, plain_text
from experiments.tasks.format_answer import FormatAnswer

TEXTS = [
    *("", " ", "Let $x^2 = \\frac{3}{4}$.\n\nAnswer: 42", "已知函数 $f(x)=x^2$ 求 $f(3)$ 的值。"),
    *("🚀 😶‍🌫️ ½ Ünïcödé ไทย \u202e right-to-left", "  two  spaces\t\ttabs\r\n\x00 null"),
]


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """A byte-level BPE of 256 bytes and 3 control tokens, laid out as Qwen2.5's is."""
    folder, tokenizer = tmp_path_factory.mktemp("bpe"), bpe()
    tokenizer.enable_truncation(max_length=7)
    tools = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    return written(folder, tools + "{% endfor %}" + CHATML, tokenizer, pad_token="<|endoftext|>")


@pytest.fixture(scope="module")
def piece_file(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("sentencepiece") / "tokenizer"
    how = {"model_type": "bpe", "vocab_size": 300, "hard_vocab_limit": False, "pad_id": 3}
    how |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    how |= {"byte_fallback": True, "add_dummy_prefix": False, "minloglevel": 2}
    texts = iter(["What is 12+3?", "12+3=15", "Answer: 15"] * 10)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=str(prefix), **how
    )
    return prefix.with_suffix(".model")


# For tokenizer_config.json, generation_config.json, config.json, and a chat: the stop tokens.
ENDS = (
    ({}, None, None, False, [256]),
    ({}, None, None, True, [258, 256]),  # an instruct model's end of turn
    ({}, {"eos_token_id": [257, 258]}, None, False, [257, 258, 256]),
    ({}, None, {"eos_token_id": 258}, False, [258, 256]),
    ({}, {"eos_token_id": [257]}, {"eos_token_id": 258}, False, [257, 256]),
    # Qwen2.5's base models name <|endoftext|> alone: right answers had <|im_end|> behind them.
    ({"eos_token": "<|endoftext|>"}, {"eos_token_id": 256}, None, True, [258, 256]),
)


@pytest.mark.parametrize(("config", "generation", "model", "chat", "stop_ids"), ENDS)
def test_the_models_own_end_tokens_stop(
    bpe_folder, tmp_path, config, generation, model, chat, stop_ids
):
    folder = copy_of(bpe_folder, tmp_path, **config)
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content:
            (folder / name).write_text(json.dumps(content))
    assert load(folder, chat="template" if chat else "none").stop_ids == tuple(stop_ids)


def test_stop_tokens_are_chosen_by_text_in_order_and_once(bpe_folder):
    tokenizer = load(bpe_folder, stop_tokens=["<|im_end|>", "<|endoftext|>", "<|im_end|>"])
    assert tokenizer.stop_ids == (258, 256)
    with pytest.raises(ValueError, match=r"stop_tokens: '<\|endoftxt\|>'.*<\|endoftext\|>"):
        load(bpe_folder, stop_tokens=["<|endoftxt|>"])
    with pytest.raises(ValueError, match="stop_tokens: 5 is no token's text"):  # it is an id
        load(bpe_folder, stop_tokens=[5])


def test_an_id_beyond_the_models_rows_is_refused_only_where_a_text_a_stop_or_a_template_makes_it(
    bpe_folder, piece_file, tmp_path
):
    """Gemma 3 of 1B could not start: an image's placeholder was one id more than its rows."""
    image = "<|image|>"
    folder = copy_of(bpe_folder, tmp_path)
    bpe(special=(*CONTROL, image)).save(str(folder / "tokenizer.json"))
    tokenizer = load(folder, chat="template", rows=259)
    assert tokenizer.vocab_size == 259 and max(tokenizer.encode(f"no {image}")) < 256
    message = "'<.image.>' is token 259, but the model has 259 rows of embeddings: take it out"
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat(user(f"no {image}"))
    assert max(tokenizer.between(user(f"no {image}"), 258)) < 259
    with pytest.raises(ValueError, match=r"stop_tokens: '<.image.>' is no token's text in"):
        load(folder, stop_tokens=[image], rows=259)
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 259]}')
    with pytest.raises(ValueError, match=r"\[258, 259\], but ids with a row are below 259"):
        load(folder, rows=259)
    assert load(folder).vocab_size == 260
    assert load(piece_file, rows=290).vocab_size == 290
    with pytest.raises(ValueError, match="model has 99 rows of"):
        load(piece_file, rows=99).encode("\u00bd~")


def copy_of(folder, to, **config):
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / "tokenizer_config.json").read_text()) | config
    (to / "tokenizer_config.json").write_text(json.dumps(content))
    return to


def test_a_template_that_is_missing_broken_or_refuses_is_named(bpe_folder, tmp_path):
    with pytest.raises(ValueError, match=r"\['tool'\].*no tools here"):
        load(bpe_folder, chat="template").encode_chat([{"role": "tool", "content": "x"}])
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match=r'no chat template.*tokenizer\.chat="none"'):
        load(tmp_path, chat="template", stop_tokens=["<|im_end|>"])
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    message = r"no prompt for roles \['user'\] by its template: Expected"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, chat="template").encode_chat(user("x"))


ENDS_NOWHERE = {"generation_config.json": '{"eos_token_id": [true]}'}
ENDS_NOWHERE["tokenizer.json"] = bpe().to_str()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, r"nowhere is neither .* set tokenizer\.path"),
        ({}, "neither a directory with a tokenizer's files nor a sent"),
        ({"tokenizer.model": "no"}, "tokenizer.model is not a sentencepiece m"),
        ({"tokenizer.json": "{"}, r"cannot be read: .*\(tokenizer\.path\)"),
        ({"tokenizer.json": bpe(special=["</s>"]).to_str()}, "names no end-of-sequence token"),
        (ENDS_NOWHERE, r"generation_config.json: eos_token_id is .*but ids with a row"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path, files, message):
    for name, content in (files or {}).items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError if files else FileNotFoundError, match=message):
        load(tmp_path / "nowhere" if files is None else tmp_path)


def test_a_sentencepiece_model_is_read_alone_or_in_its_folder(piece_file):
    tokenizer = load(piece_file.parent, chat="auto")
    assert (tokenizer.chat, tokenizer.stop_ids) == ("none", (2,))
    assert load(piece_file, stop_tokens=["<s>"]).stop_ids == (1,)
    for text in [*TEXTS[:-1], "  two  spaces\t\ttabs\r\n", "a </s> b"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.decode([*ids, 2]) == text
        assert 2 not in ids and tokenizer.encode_chat(user(text)) == ids
    with pytest.raises(ValueError, match=r'tokenizer\.chat="none"'):
        load(piece_file, chat="template")
    (piece_file.parent / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load(piece_file.parent).encode_chat(user(text)) == ids


TAGS = ("<think>", "</think>", "<answer>", "</answer>")
EOS, BOS = {"eos_token": "<|im_end|>"}, {"bos_token": "<|endoftext|>"}
ADDS, LLAMA = {"add_bos_token": True}, {"tokenizer_class": "LlamaTokenizerFast"}
MERGES = {
    "vocab.json": bpe(special=()).get_vocab(),
    "merges.txt": "#version: 0.2\n",
    "added_tokens.json": {text: 256 + i for i, text in enumerate(CONTROL)},
}
PIECES = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"} | ADDS
# name -> (tokenizer.json, tokenizer_config.json, other files)
LAYOUTS = {
    "special tokens": (bpe(), EOS, {}),
    "tokens named in special_tokens_map.json alone": (
        bpe(),
        {"chat_template": "{{ bos_token }}" + CHATML},
        {"special_tokens_map.json": BOS | EOS},
    ),
    "a begin token by a post-processor": (bpe(begins=True), EOS, {}),
    "a begin token by add_bos_token": (bpe(), LLAMA | BOS | EOS | ADDS, {}),
    "vocab.json and merges.txt": (None, {"tokenizer_class": "Qwen2Tokenizer"} | EOS, MERGES),
    "tokenizer.model": (None, PIECES, {"generation_config.json": {"eos_token_id": [2, 5]}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_is_read_as_transformers_reads_it(layout, tmp_path, piece_file):
    """Prompts are compared with transformers' calls, stop tokens with what the files name."""
    library, config, files = LAYOUTS[layout]
    if library:
        library.save(str(tmp_path / "tokenizer.json"))
    elif "vocab.json" not in files:
        (tmp_path / "tokenizer.model").write_bytes(piece_file.read_bytes())
    files = {"tokenizer_config.json": {"chat_template": CHATML} | config} | files
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours, chat = load(tmp_path), load(tmp_path, chat="auto")
    assert (ours.chat, chat.chat) == ("none", "template")
    for text in [*TEXTS, "a <|im_end|> b", " <think> 6*7 </think>"]:
        messages = [{"role": "system", "content": "Be brief. "}, *user(text)]
        assert chat.encode_chat(messages) == theirs.apply_chat_template(messages, **WHOLE)
        plain = theirs(text, split_special_tokens=True).input_ids
        assert ours.encode_chat(user(text)) == plain
        ids = ours.encode(text)
        assert ids == plain[len(plain) - len(ids) :]
        for stop in ([], [ours.stop_ids[0]]):
            assert ours.decode([*ids, *stop]) == theirs.decode(ids)
    ends = theirs.convert_ids_to_tokens([2, 5] if layout == "tokenizer.model" else [258, 256])
    assert theirs.convert_ids_to_tokens(chat.stop_ids) == ends


@pytest.mark.parametrize("special", [True, False])
def test_a_response_loses_the_token_that_stopped_it_alone(special, tmp_path):
    """Whether it and the tags of a form are special tokens or ordinary ones."""
    tokens, text = (*CONTROL, *TAGS), "<think>6*7</think><answer>42</answer>"
    made = bpe(special=tokens * special, ordinary=tokens * (not special))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for stop_tokens in (None, ["<|im_start|>"]):
        tokenizer = load(tmp_path, stop_tokens=stop_tokens)
        ids = np.asarray([*theirs(text).input_ids, tokenizer.stop_ids[0]], np.int32)
        prompt = Prompt(ids[:1], Example((), "42", "s", 0))
        response = Response(ids, np.zeros(len(ids), np.float32), status=Status.STOPPED)
        task = FormatAnswer(path="x", rules="strict")
        group = graded(Group(0, prompt, (response,)), task=task, tokenizer=tokenizer)
        assert (group.responses[0].text, group.correct_G[0]) == (text, True)


def test_an_exported_sentencepiece_model_has_its_ids_in_transformers(tmp_path):
    """The sentences around a question are single pieces, whose spaces are marks."""
    source = "experiments/tiny_base/checkpoint"
    convert(f"hf:{source}", f"hf:{tmp_path}", dtype="float32")
    assert not (tmp_path / "tokenizer.model").exists()
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load(source)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.stop_ids[0], 0)
    trusting = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert trusting("a  b").input_ids == theirs("a  b").input_ids == ours.encode("a  b")
    assert load(tmp_path).stop_ids == ours.stop_ids
    asked = plain_text(templated("What is 12+3?", "dapo")) + "Answer: 15 <0x41> </s>"
    for text in [*TEXTS, asked, asked.replace(" ", "  "), "\u2581x"]:
        ids = theirs(text, split_special_tokens=True).input_ids
        assert ids == ours.encode_chat(user(text))
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.fixture(scope="module")
def qwen_folder(shared):
    return shared / "data" / "qwen25_tokenizer"


def test_qwen_vectors(qwen_folder):
    """Its ids, and its chats: the template has a system message where there is none."""
    plain, chat = load(qwen_folder), load(qwen_folder, chat="template")
    vectors = json.loads((qwen_folder / "tokenizer_test_vectors.json").read_text(encoding="utf-8"))
    assert len(vectors) == 48
    for vector in vectors:
        assert plain.encode(vector["text"]) == vector["ids"], vector["text"]
    assert (plain.vocab_size, plain.stop_ids) == (151665, (151643,))
    assert chat.stop_ids == (151645, 151643)  # the instruct model's files name <|im_end|>
    assert 151644 not in plain.encode("<|im_start|>")
    assert chat.decode([9707, 151645]) == "Hello"
    theirs = AutoTokenizer.from_pretrained(qwen_folder)
    for messages in (user("1+1=?"), [{"role": "system", "content": "只说中文。"}, *user("\n 🚀 ")]):
        assert chat.encode_chat(messages) == theirs.apply_chat_template(messages, **WHOLE)


@pytest.mark.parametrize(
    ("changed", "opening"),
    [
        ({}, ""),
        ({"<|im_start|>assistant\n": "<|im_start|>assistant\n<think>\n"}, "<think>\n"),
        ({"<|im_start|>assistant\n": "<|im_start|>assistant\n<think>\n\n</think>\n\n"}, None),
        ({"for m in messages": "for m in messages if m.role == 'user'"}, ""),
    ],
)
def test_what_the_template_begins_of_an_answer(bpe_folder, tmp_path, changed, opening):
    """A template that leaves answers out names no end, either."""
    template = CHATML
    for old, new in changed.items():
        assert old in template
        template = template.replace(old, new)
        opening = new.removeprefix(old) if opening is None else opening
    folder = copy_of(bpe_folder, tmp_path, chat_template=template, eos_token="<|endoftext|>")
    found = load(folder, chat="template")
    assert found.opening == opening
    assert found.stop_ids == ((256,) if "m.role" in str(changed) else (258, 256))


def test_the_templates_arguments_are_given_to_it(bpe_folder, tmp_path, caplog):
    closed = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    folder = copy_of(bpe_folder, tmp_path, chat_template=CHATML + closed)
    for args, opening in (({}, ""), ({"enable_thinking": False}, "<think></think>")):
        tokenizer = load(folder, chat="template", chat_args=args)
        assert tokenizer.opening == opening
        assert tokenizer.decode(tokenizer.encode_chat(user("hi"))).endswith(f"assistant\n{opening}")
    assert not caplog.messages
    load(folder, chat="template", chat_args={"thinking": False})
    assert "tokenizer.chat_args has thinking, which no template reads" in caplog.text


def test_a_template_writes_the_day_that_is_set(bpe_folder, tmp_path):
    dated = "{% if strftime_now is defined %}{{ strftime_now( '%d %b %Y' ) }}{% endif %}" + CHATML
    found = copy_of(bpe_folder, tmp_path, chat_template=dated)
    tokenizer = load(found, chat="template", date="2024-02-29")
    assert tokenizer.date == "2024-02-29"
    assert tokenizer.decode(tokenizer.encode_chat(user("hi"))).startswith("29 Feb 2024<|im_start|>")
    assert load(found, chat="none", date="2024-02-29").date == ""
    with pytest.raises(ValueError, match=r"tokenizer\.date is 'today': must be a day"):
        load(found, chat="template", date="today")


def test_a_begun_answer_is_gone_on_from(bpe_folder, tmp_path):
    tokenizer = load(copy_of(bpe_folder, tmp_path, chat_template=CHATML), chat="template")
    begun = [*user("6 * 7?"), {"role": "assistant", "content": "Let me think."}]
    ids = tokenizer.encode_chat(begun)
    assert ids == tokenizer.encode_chat(user("6 * 7?")) + tokenizer.encode("Let me think.")
