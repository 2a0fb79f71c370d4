"""Tokenizers: ids, round trips, stop tokens, chat templates and what is refused."""

import json
import types

import numpy as np
import pytest
import sentencepiece
import tokenizers
from transformers import AutoTokenizer

from dapo_jax.convert import convert
from dapo_jax.setup import dry_run
from dapo_jax.tasks.base import graded
from dapo_jax.tasks.math_problems import MathProblems
from dapo_jax.tasks.readers import templated
from dapo_jax.tasks.tokenizer import load_tokenizer
from dapo_jax.types import Example, Group, Prompt, Response, plain_text
from experiments.tasks.format_answer import FormatAnswer

TEXTS = [
    *("", " ", "Let $x^2 = \\frac{3}{4}$.\n\nAnswer: 42", "已知函数 $f(x)=x^2$ 求 $f(3)$ 的值。"),
    *("🚀 😶‍🌫️ ½ Ünïcödé ไทย \u202e right-to-left", "  two  spaces\t\ttabs\r\n\x00 null"),
]
CHAT_TEMPLATE = """\
{% for m in messages %}
    {% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """A byte-level BPE of 256 bytes and 3 control tokens, laid out as Qwen2.5's is."""
    folder = tmp_path_factory.mktemp("bpe")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: id for id, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.enable_truncation(max_length=7)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "chat_template": CHAT_TEMPLATE,
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def piece_file(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("sentencepiece") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["What is 12+3?", "12+3=15", "Answer: 15"] * 10),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        pad_id=3,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


def load(path, stop_tokens=None, chat="none"):
    return load_tokenizer(path, stop_tokens=stop_tokens, chat=chat)


def user(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("text", TEXTS)
def test_bpe_round_trip_is_exact(bpe_folder, text):
    tokenizer = load(bpe_folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())  # no merges, and the file's truncation is not applied


def test_bpe_ids(bpe_folder):
    tokenizer = load(bpe_folder)
    assert tokenizer.vocab_size == 259
    assert tokenizer.stop_ids == (256,)
    assert tokenizer.pad_id == 256


def test_stop_tokens_are_chosen_by_text_in_order_and_once(bpe_folder):
    tokenizer = load(bpe_folder, stop_tokens=["<|im_end|>", "<|endoftext|>", "<|im_end|>"])
    assert tokenizer.stop_ids == (258, 256)


def test_unknown_stop_token_names_near_matches_and_the_key(bpe_folder):
    with pytest.raises(ValueError, match=r"'<\|endoftxt\|>'.*<\|endoftext\|>.*stop_tokens"):
        load(bpe_folder, stop_tokens=["<|endoftxt|>"])


@pytest.mark.parametrize("stop_tokens", [[], "<|im_end|>"])
def test_stop_tokens_must_be_a_list_with_something_in_it(bpe_folder, stop_tokens):
    with pytest.raises(ValueError, match=r"tokenizer\.stop_tokens"):
        load(bpe_folder, stop_tokens=stop_tokens)


def test_default_stop_token_without_endoftext_is_the_one_the_config_names(bpe_folder, tmp_path):
    spec = json.loads((bpe_folder / "tokenizer.json").read_text())
    spec["added_tokens"][0]["content"] = "</s>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load(tmp_path)
    assert tokenizer.stop_ids == (256,)
    assert tokenizer.pad_id == 256  # no pad token named: the stop token


def test_control_text_in_a_problem_stays_text(bpe_folder):
    tokenizer = load(bpe_folder)
    text = "Stop <|endoftext|> here"
    ids = tokenizer.encode(text)
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text


def test_decode_leaves_out_the_stop_token_alone(bpe_folder):
    tokenizer = load(bpe_folder)
    ids = [257, *tokenizer.encode("Answer: 4"), 258]
    assert (
        tokenizer.decode([*ids, 256]) == tokenizer.decode(ids) == "<|im_start|>Answer: 4<|im_end|>"
    )


def test_decode_refuses_ids_that_do_not_exist(bpe_folder, piece_file):
    for tokenizer in (load(bpe_folder), load(piece_file)):
        for id in (-1, tokenizer.vocab_size):
            with pytest.raises(ValueError, match=f"Token id {id} does not exist"):
                tokenizer.decode([4, id])


def test_chat_template_wraps_the_messages(bpe_folder):
    tokenizer = load(bpe_folder, chat="template")
    messages = [{"role": "system", "content": "Be brief."}, *user("2+2?")]
    turns = ("system\nBe brief.", "user\n2+2?")
    ids = [[257, *tokenizer.encode(turn), 258, *tokenizer.encode("\n")] for turn in turns]
    expected = [*ids[0], *ids[1], 257, *tokenizer.encode("assistant\n")]
    assert tokenizer.encode_chat(messages) == expected


def test_chat_none_is_the_contents_alone(bpe_folder):
    tokenizer = load(bpe_folder)
    assert tokenizer.encode_chat(user("2+2?")) == tokenizer.encode("2+2?")
    messages = [{"role": "system", "content": "Be brief."}, *user("2+2?")]
    assert tokenizer.encode_chat(messages) == tokenizer.encode("Be brief.\n\n2+2?")


def test_template_file_goes_before_the_config(bpe_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bpe_folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("Q: {{ messages[0].content }} A:")
    tokenizer = load(tmp_path, chat="template")
    assert tokenizer.decode(tokenizer.encode_chat(user("2+2?"))) == "Q: 2+2? A:"


def test_refusal_by_the_template_names_the_roles(bpe_folder):
    with pytest.raises(ValueError, match=r"\['tool'\].*no tools here"):
        load(bpe_folder, chat="template").encode_chat([{"role": "tool", "content": "x"}])


def test_template_missing_or_broken(bpe_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match=r'no chat template.*tokenizer\.chat="none"'):
        load(tmp_path, chat="template")
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(
        ValueError, match=r"no prompt for roles \['user'\] by its template: Expected"
    ):
        load(tmp_path, chat="template").encode_chat(user("x"))


def copy_of(folder, to, **config):
    """A copy of a tokenizer's directory, with other values in its tokenizer_config.json."""
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / "tokenizer_config.json").read_text()) | config
    (to / "tokenizer_config.json").write_text(json.dumps(content))
    return to


def test_with_the_chat_template_the_models_end_of_turn_stops(bpe_folder, tmp_path, caplog):
    """An instruct model was sampled past its end of turn.

    By default only <|endoftext|> stopped, which such a model does not write: each response went on
    with turns of its own until it was cut at max_response_tokens.
    """
    folder = copy_of(bpe_folder, tmp_path)
    assert load(folder, chat="template").stop_ids == (258, 256)
    assert load(folder).stop_ids == (256,)  # a base model: plain text ends with the text
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    assert load(folder, chat="template").stop_ids == (258, 257, 256)
    assert load(folder).stop_ids == (257, 258, 256)
    copy_of(bpe_folder, folder, eos_token="<|endoftext|>")
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}')
    assert load(folder, chat="template").stop_ids == (256,)
    assert not caplog.records


def test_without_a_template_the_models_own_end_tokens_stop_too(bpe_folder, tmp_path):
    """`evaluate --model=INSTRUCT` with tokenizer.chat=none graded text behind the end of the turn.

    It took <|endoftext|> alone, though generation_config.json names <|im_end|>, which every other
    stack stops at. Without that file config.json names it.
    """
    folder = copy_of(bpe_folder, tmp_path)
    (folder / "config.json").write_text('{"eos_token_id": 258}')
    assert load(folder).stop_ids == (258, 256)
    (folder / "generation_config.json").write_text('{"eos_token_id": [257]}')
    assert load(folder).stop_ids == (257, 256)
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    assert load(folder).stop_ids == (258, 256)


@pytest.mark.parametrize("begins", [True, False])
def test_a_prompt_has_the_tokens_that_the_tokenizer_puts_around_a_text(
    bpe_folder, tmp_path, begins
):
    """Llama 3 was sampled, trained and scored without <|begin_of_text|>.

    Its tokenizer.json adds the token in a post-processor, which was turned off for all text. A
    chat template writes it, so it is not added there; nor is it to a plain text.
    """
    folder = copy_of(bpe_folder, tmp_path)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if begins:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
        )
        library.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    assert tokenizer.encode_chat(user("2+2?")) == [257] * begins + tokenizer.encode("2+2?")
    assert 257 not in tokenizer.encode("2+2?")
    # A problem that has the token's text has no second token of it.
    assert tokenizer.encode_chat(user("<|im_start|>")).count(257) == begins
    chat = load(folder, chat="template").encode_chat(user("2+2?"))
    assert chat == load(bpe_folder, chat="template").encode_chat(user("2+2?"))


def test_stop_tokens_without_the_models_end_of_turn_are_warned_of(bpe_folder, caplog):
    assert load(bpe_folder, stop_tokens=["<|endoftext|>"], chat="template").stop_ids == (256,)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert message.startswith("tokenizer.stop_tokens = ['<|endoftext|>'] has none of the tokens")
    assert "(<|im_end|>)" in message
    load(bpe_folder, stop_tokens=["<|im_end|>"], chat="template")
    load(bpe_folder, stop_tokens=["<|endoftext|>"])
    assert len(caplog.records) == 1


@pytest.mark.parametrize("ids", ['"x"', "[true]", "1000000000"])
def test_an_end_of_turn_that_is_no_id_is_refused(bpe_folder, tmp_path, ids):
    copy_of(bpe_folder, tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id is .*no such id"):
        load(tmp_path, chat="template")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
            "cannot encode a text: index out of bounds",
        ),
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}},
            "cannot encode a text: WordLevel error",
        ),
    ],
)
def test_what_a_tokenizers_library_dies_of_is_a_value_error(bpe_folder, tmp_path, change, problem):
    """A panic of its Rust is no Exception, and passed all handlers; others had a traceback."""
    spec = json.loads((bpe_folder / "tokenizer.json").read_text()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=rf"{tmp_path} {problem}"):
        load(tmp_path, stop_tokens=["a"]).encode("what")


def test_what_cannot_be_loaded_is_named(bpe_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is neither .* set tokenizer\.path"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither a directory with a tokenizer's files"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.chat = 'chatml'"):
        load(bpe_folder, chat="chatml")
    for name, content, message in (
        ("tokenizer.model", b"not a model", "tokenizer.model is not a sentencepiece model"),
        ("tokenizer.json", b"{", f"{tmp_path} has a tokenizer that cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    (copy_of(bpe_folder, tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read: .*\(tokenizer\.path\)"):
        load(tmp_path)


@pytest.mark.parametrize("text", [*TEXTS[:-1], "  two  spaces\t\ttabs\r\n"])
def test_sentencepiece_round_trip_is_exact(piece_file, text):
    tokenizer = load(piece_file)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_ids(piece_file):
    tokenizer = load(piece_file.parent)  # the folder that holds tokenizer.model
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.pad_id == 3
    ids = tokenizer.encode("12+3=15")
    assert min(ids) >= 4 and max(ids) < tokenizer.vocab_size
    assert load(piece_file, stop_tokens=["<s>"]).stop_ids == (1,)


def test_sentencepiece_control_text_and_control_ids(piece_file):
    tokenizer = load(piece_file)
    assert 2 not in tokenizer.encode("a </s> b")
    assert tokenizer.decode([1, *tokenizer.encode("15"), 2, 3]) == "15"


def test_sentencepiece_chat_is_plain_text_only(piece_file):
    assert load(piece_file).encode_chat(user("12+3")) == load(piece_file).encode("12+3")
    assert load(piece_file, chat="auto").chat == "none"
    with pytest.raises(ValueError, match=r'tokenizer\.chat="none"'):
        load(piece_file, chat="template")


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def token(text, special):
    text, how = text if isinstance(text, tuple) else (text, {})
    return tokenizers.AddedToken(text, special=special, normalized=False, **how)


def bpe(*, special=CONTROL, ordinary=(), metaspace=False):
    """A BPE of bytes, or of letters with Metaspace, and tokens with the given settings."""
    pre, post = tokenizers.pre_tokenizers, tokenizers.decoders
    letters = [*map(chr, range(32, 127)), "\n", "\u2581"]
    symbols = sorted(letters if metaspace else pre.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({s: i for i, s in enumerate(symbols)}, []))
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    made.decoder = post.ByteLevel()
    if metaspace:
        made.pre_tokenizer = pre.Metaspace(prepend_scheme="first")
        made.decoder = post.Metaspace(prepend_scheme="first")
    made.add_tokens([token(text, special=True) for text in special])
    made.add_tokens([token(text, special=False) for text in ordinary])
    return made


def added(*texts, first):
    """added_tokens_decoder of a tokenizer_config.json."""
    how = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {str(first + i): how | {"content": t, "special": True} for i, t in enumerate(texts)}


TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# name -> (tokenizer.json, tokenizer_config.json, other files, the texts that stop in a chat)
LAYOUTS = {
    "special tokens": (bpe(), {"eos_token": "<|im_end|>"}, {}, ["<|im_end|>", "<|endoftext|>"]),
    "an end token that is an ordinary one": (
        bpe(special=(), ordinary=CONTROL),
        {"eos_token": "<|im_end|>"},
        {"generation_config.json": {"eos_token_id": 256}},
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "tokens named in special_tokens_map.json alone": (
        bpe(),
        {"chat_template": "{{ bos_token }}" + CHATML},
        {"special_tokens_map.json": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}},
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "tokens in added_tokens_decoder alone": (
        bpe(special=()),
        {"eos_token": "<|endoftext|>", "added_tokens_decoder": added(*CONTROL, first=256)},
        {},
        ["<|endoftext|>"],
    ),
    "tokens special in added_tokens_decoder alone": (
        bpe(special=(), ordinary=CONTROL),
        {"eos_token": "<|endoftext|>", "added_tokens_decoder": added(*CONTROL, first=256)},
        {},
        ["<|endoftext|>"],
    ),
    "Metaspace, and tokens that strip": (
        bpe(
            special=(("<|im_start|>", {"lstrip": True}), ("<|im_end|>", {"rstrip": True})),
            metaspace=True,
        ),
        {"eos_token": "<|im_end|>"},
        {},
        ["<|im_end|>"],
    ),
    "a begin token by add_bos_token": (
        bpe(),
        {
            "tokenizer_class": "LlamaTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
        },
        {},
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "named templates": (
        bpe(),
        {
            "eos_token": "<|im_end|>",
            "chat_template": [
                {"name": "tool_use", "template": "{{ raise_exception('no') }}"},
                {"name": "default", "template": CHATML},
            ],
        },
        {},
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "a template of other programs": (
        bpe(),
        {"eos_token": "<|im_end|>"},
        {
            "chat_template.jinja": "{{ strftime_now('%Y') | tojson }}{% for m in messages %}"
            "<|im_start|>{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        },
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "tags that are special": (
        bpe(special=(*CONTROL, *TAGS)),
        {"eos_token": "<|im_end|>"},
        {"generation_config.json": {"eos_token_id": [258]}},
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "vocab.json and merges.txt": (
        None,
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"},
        {
            "vocab.json": bpe(special=()).get_vocab(),
            "merges.txt": "#version: 0.2\n",
            "added_tokens.json": {text: 256 + i for i, text in enumerate(CONTROL)},
        },
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "a published tokenizer.model": (
        None,
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        | {"add_bos_token": True},
        {"generation_config.json": {"eos_token_id": [2, 5]}},
        ["</s>", 5],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_is_read_as_transformers_reads_it(layout, tmp_path, piece_file):
    """Tokens that one of three files named were missing, and pieces of a chat had other ids.

    So did templates with blocks, names or functions of other programs end with an error. Prompts
    are compared with transformers' own calls, and the stop tokens with what the files name.
    """
    library, config, files, stops = LAYOUTS[layout]
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
    how = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    for text in [*TEXTS, "a <|im_end|> b", " <think> 6*7 </think>"]:
        messages = [{"role": "system", "content": "Be brief. "}, *user(text)]
        assert chat.encode_chat(messages) == theirs.apply_chat_template(messages, **how)
        plain = theirs(text, split_special_tokens=True).input_ids
        assert ours.encode_chat(user(text)) == plain
        ids = ours.encode(text)
        assert ids == plain[len(plain) - len(ids) :]
        for stop in ([], [ours.stop_ids[0]]):
            assert ours.decode([*ids, *stop]) == theirs.decode(ids)
    texts = theirs.convert_ids_to_tokens([stop for stop in stops if isinstance(stop, int)])
    texts = [stop for stop in stops if isinstance(stop, str)] + texts
    assert theirs.convert_ids_to_tokens(chat.stop_ids) == texts


@pytest.mark.parametrize("rules", ["dapo", "strict", "math_verify"])
@pytest.mark.parametrize("special", [True, False])
def test_what_stopped_a_response_leaves_its_text(special, rules, tmp_path):
    """A stop token that was not "special" stayed: "42<|im_end|>" was wrong under all rules."""
    bpe(special=CONTROL * special, ordinary=CONTROL * (not special)).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    for stop_tokens in (None, ["<|im_start|>"]):
        tokenizer = load(tmp_path, stop_tokens=stop_tokens)
        ids = np.asarray([*tokenizer.encode("6*7:\nAnswer: 42"), tokenizer.stop_ids[0]], np.int32)
        prompt = Prompt(ids[:1], Example((), "42", "s", 0))
        response = Response(ids, np.zeros(len(ids), np.float32), stopped=True)
        group = Group(0, prompt, (response,))
        task = MathProblems(path="x", rules=rules)
        (response,) = graded(group, task=task, tokenizer=tokenizer).responses
        assert (response.text, response.verdict.status) == ("6*7:\nAnswer: 42", "correct")


@pytest.mark.parametrize("special", [True, False])
def test_tags_reach_the_grader(special, tmp_path):
    """No response had the form where the tokenizer marked <think> and <answer> as special."""
    tags = {"special": (*CONTROL, *TAGS)} if special else {"ordinary": TAGS}
    bpe(**tags).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = load(tmp_path)
    text = "<think>6*7</think><answer>42</answer>"
    ids = AutoTokenizer.from_pretrained(tmp_path)(text).input_ids
    assert set(range(259, 263)) < set(ids)
    response = tokenizer.decode([*ids, *tokenizer.stop_ids[:1]])
    task = FormatAnswer(path="x", rules="strict")
    assert response == text
    assert task.grade(response, Example((), "42", "s", 0)).correct


def test_an_exported_sentencepiece_model_has_its_ids_in_transformers(tmp_path):
    """The tiny policy, exported, lost its spaces and its end token in transformers, in silence.

    The sentences around a question are single pieces, whose spaces are marks.
    """
    source = "experiments/tiny_base/checkpoint"
    convert(f"hf:{source}", f"hf:{tmp_path}", dtype="float32")
    assert not (tmp_path / "tokenizer.model").exists()
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load(source)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.stop_ids[0], ours.pad_id)
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


@pytest.fixture(scope="module")
def qwen(qwen_folder):
    return load(qwen_folder)


@pytest.fixture(scope="module")
def qwen_chat(qwen_folder):
    return load(qwen_folder, stop_tokens=["<|im_end|>", "<|endoftext|>"], chat="template")


def test_qwen_vectors(qwen_folder, qwen):
    vectors = json.loads((qwen_folder / "tokenizer_test_vectors.json").read_text(encoding="utf-8"))
    assert len(vectors) == 48
    for vector in vectors:
        assert qwen.encode(vector["text"]) == vector["ids"], vector["text"]


def test_qwen_round_trips(qwen):
    for text in TEXTS:
        assert qwen.decode(qwen.encode(text)) == text
    assert qwen.decode(qwen.encode("e\u0301")) == "\u00e9"  # NFC, as Qwen2.5 was trained


def test_qwen_ids(qwen, qwen_chat, qwen_folder):
    # The instruct model's files name <|im_end|>.
    assert load(qwen_folder, chat="template").stop_ids == (151645, 151643)
    assert qwen.vocab_size == 151665
    assert qwen.stop_ids == (151643,)
    assert qwen.pad_id == 151643
    assert qwen_chat.stop_ids == (151645, 151643)
    assert 151644 not in qwen.encode("<|im_start|>")
    assert qwen_chat.decode([9707, 151645]) == "Hello"


QWEN_DEFAULT_SYSTEM = (
    "<|im_start|>system\n"
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
)


@pytest.mark.parametrize(
    "messages, expected",
    [
        (
            user("1+1=?"),
            QWEN_DEFAULT_SYSTEM + "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "system", "content": "只说中文。"}, *user("\n 🚀 ")],
            "<|im_start|>system\n只说中文。<|im_end|>\n"
            "<|im_start|>user\n\n 🚀 <|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [*user("Hi"), {"role": "assistant", "content": "Yes?"}, *user("2")],
            QWEN_DEFAULT_SYSTEM + "<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nYes?<|im_end|>\n"
            "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_qwen_chat_template(qwen_folder, qwen_chat, messages, expected):
    """The ids are those of the whole expected text, with its control tokens read as such."""
    library = tokenizers.Tokenizer.from_file(str(qwen_folder / "tokenizer.json"))
    assert qwen_chat.encode_chat(messages) == library.encode(expected).ids


@pytest.mark.parametrize(
    ("chat", "shown"),
    [
        ("none", ["1+1?\\x1b[2J", "Answer:"]),
        (
            "template",
            ["<|im_start|>user", "1+1?\\x1b[2J", "Answer:<|im_end|>", "<|im_start|>assistant", ""],
        ),
    ],
)
def test_a_dry_run_shows_the_first_prompt_as_the_policy_reads_it(bpe_folder, chat, shown):
    """It showed the problem's text without the chat template, and control characters as they are.

    An escape sequence in a data set could move the cursor, or hide lines.
    """
    tokenizer = load(bpe_folder, chat=chat)
    messages = user("1+1?\x1b[2J\nAnswer:")
    ids = np.asarray(tokenizer.encode_chat(messages))
    prompt = Prompt(ids, Example(tuple(messages), "2", "f", 0), "data.train")
    train = types.SimpleNamespace(sets={"data.train": types.SimpleNamespace(prompts=[prompt])})
    data = types.SimpleNamespace(train=train, eval_sets={})
    first, *lines = dry_run.example_lines(data, tokenizer)
    assert first == "the first prompt of data.train, whose answer is '2':"
    assert lines == [f"  | {line}" for line in shown]
