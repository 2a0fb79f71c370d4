"""Data: what is read, merged, dropped, refused and counted, and the stream of prompts."""

import json
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizers import bpe, load
from small_config import set_of

from dapo_jax.tasks.datasets import Mixture, load_dataset, tokenize
from dapo_jax.tasks.math_problems import MathProblems
from dapo_jax.tasks.readers import read_rows
from dapo_jax.tasks.rows import DataError
from dapo_jax.tasks.templates import PROMPT_TEMPLATE
from dapo_jax.types import Example
from dapo_jax.verifier import RULES, check_ground_truth

MESSAGE = {"role": "user", "content": "a"}


def read(path, **settings):
    return MathProblems(path=str(path), **settings).load()


def load_prompts(path, tokenizer, *, max_prompt_tokens, **settings):
    """A file's prompts and report, as a command loads them."""
    settings = set_of(path=str(path), **settings)
    loaded = load_dataset("data.train", settings, tokenizer, max_prompt_tokens=max_prompt_tokens)
    return loaded.prompts, loaded.report


def dapo_row(problem, answer):
    prompt = [{"content": problem, "role": "user"}]
    return {"prompt": prompt, "reward_model": {"ground_truth": answer, "style": "rule"}}


def write_dapo(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def lines(tmp_path):
    """Writes rows, or bytes as they are, as lines of d.jsonl."""

    def write(*rows, name="d.jsonl"):
        rows = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"\n".join(rows) + b"\n")
        return tmp_path / name

    return write


def rows_accounted(report):
    merged = report.duplicates + report.conflicting_rows
    return report.kept + merged + report.overlong + report.bad_rows


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """One token a byte, so that lengths in tests are lengths of text."""
    folder = tmp_path_factory.mktemp("bytes")
    bpe(special=["<|endoftext|>"]).save(str(folder / "tokenizer.json"))
    return load(folder)


def test_rows_are_merged_by_roles_and_texts_and_two_answers_are_a_conflict(tmp_path):
    """Also across record batches; an empty system message asks for no default one."""
    rows = [("a", "1"), ("b", "2"), ("a", "1"), ("c", "3"), ("b", "5"), ("b", "2"), ("a", " 1 ")]
    rows = [dapo_row(*row) for row in rows] + [dapo_row("a", "1")] * 2000
    system = {"role": "system", "content": ""}
    rows += [{**rows[0], "prompt": [message]} for message in (system, {**system, "content": "a"})]
    rows[-2]["prompt"].append(rows[0]["prompt"][0])
    examples, report = read(write_dapo(tmp_path / "d.parquet", rows))
    assert [(e.text, e.answer, e.source, e.row) for e in examples] == [
        ("a", "1", "d.parquet", 0),
        ("c", "3", "d.parquet", 3),
        ("\n\na", "1", "d.parquet", 2007),
        ("a", "1", "d.parquet", 2008),
    ]
    assert (report.rows, report.kept, report.duplicates) == (2009, 4, 2002)
    assert (report.conflicting_prompts, report.conflicting_rows) == (1, 3)
    assert rows_accounted(report) == report.rows


@pytest.mark.parametrize(
    ("rules", "template", "asks_for", "notes"),
    [
        ("dapo", "", "Answer:", 0),
        ("strict_box", "", r"\boxed{}", 0),
        ("symbolic", "boxed", r"\boxed{}", 0),
        ("dapo", "none", None, 0),
        ("strict_box", "dapo", "Answer:", 1),
        ("dapo", "Say {problem} twice.", None, 0),
    ],
)
def test_a_plain_prompt_asks_for_what_its_rules_read(lines, rules, template, asks_for, notes):
    path = lines({"prompt": "1+1", "answer": 2})
    (example,), report = read(path, rules=rules, template=template)
    text = template.replace("{problem}", "1+1") if "{" in template else "1+1"
    assert text in example.text and (example.text == text) == (asks_for is None)
    assert asks_for is None or asks_for in example.text
    note = r"  1 of 1 prompts do not ask for what rules=strict_box read (\boxed)"
    assert report.lines()[1:] == [note] * notes


@pytest.mark.parametrize(("rules", "notes"), [("symbolic", 1), ("dapo", 0)])
def test_truths_that_are_no_more_than_texts_are_noted(lines, rules, notes):
    rows = [{"prompt": text, "answer": text} for text in ("no solution", "7", "x^2", "3:2")]
    _, report = read(lines(*rows), rules=rules)
    note = "  2 of 4 answers are compared as texts, such as 'no solution'"
    assert report.lines()[1:] == [note] * notes


def answer(text):
    return {"prompt": "a", "answer": text}


JSONL, GSM8K, BOXED = ({"kind": kind} for kind in ("jsonl", "gsm8k", "math_solutions"))
UNMATCHED = ("cm", "6\nor 7"), ("7" * 400,), ("7" * 101, "{7"), (r"\(\)",), ("$",)
BEGUN = [MESSAGE, {"role": "assistant", "content": "So\nAnswer: 2"}]
BAD_LINES = (
    (JSONL, b'{"prompt": "a\xff", "answer": "1"}', "utf-8"),
    (JSONL, b'{"prompt": "a", "answer"', "invalid JSON"),
    (JSONL, b"[1]", "the row is a list, not a dict"),
    (JSONL, {"prompt": "a", "solution": "1"}, "'answer' is missing; there are 'prompt', 'sol"),
    (JSONL, answer(None), "answer is null"),
    (JSONL, answer(["1", "2"]), "answer has 2 answers, not one"),
    (JSONL, b'{"prompt": "a", "answer": NaN}', "answer is nan"),
    (JSONL, answer("b #### 1"), 'has "####" before its result: set kind=gsm8k'),
    (JSONL, {"prompt": "  ", "answer": "1"}, "prompt is empty"),
    (JSONL, {"prompt": [{"content": "a"}], "answer": "1"}, "'role' is missing; there are 'con"),
    (JSONL, {"prompt": [{**MESSAGE, "content": None}], "answer": "1"}, "content is null"),
    (JSONL, b'{"prompt": "a \\ud83d", "answer": "1"}', "prompt is not valid Unicode"),
    (JSONL, {"prompt": BEGUN, "answer": "2"}, "ends with an assistant's message that is right"),
    (GSM8K, {"question": "q", "answer": "x #### ,"}, 'after "####" is empty'),
    (BOXED, {"problem": "q", "solution": "So 7."}, "last box of solution is null"),
    # An answer that nothing can match.
    *(
        ({"rules": rules}, answer(text), f"the answer {text!r}"[:60])
        for rules, texts in zip(RULES, UNMATCHED, strict=True)
        for text in (*texts, "\u200b")
    ),
)


@pytest.mark.parametrize(("how", "bad", "reason"), BAD_LINES)
def test_a_bad_row_is_named_or_skipped(lines, how, bad, reason):
    good = {"prompt": BEGUN, "question": "q", "answer": "#### 1" if how == GSM8K else "1"}
    good |= {"problem": "q", "solution": r"\boxed{1}"}
    path = lines(b"", good, bad)
    with pytest.raises(DataError, match=r"set data\.on_bad_row=skip") as caught:
        read(path, **how)
    said = str(caught.value)
    assert said.startswith(f"{path}, line 3: ") and reason in said
    assert ("no response can match" in said and "verifier.rules" in said) == ("rules" in how)
    examples, report = read(path, **how, on_bad_row="skip")
    assert [e.row for e in examples] == [2]
    assert (report.rows, report.bad_rows, report.kept) == (2, 1, 1)
    assert report.notes[0].startswith("skipped d.jsonl, line 3: ")
    assert reason.replace("\\", "\\\\") in str(report.lines()) or reason in str(report.lines())


def test_a_file_of_another_format_is_never_skipped(lines):
    latin = "prompt,answer\ncafé,1".encode("latin-1")
    for name, content, message in (
        ("d.parquet", b'{"prompt": "a"}', r"d\.parquet is no readable parquet file.*kind"),
        ("d.csv", latin, r"d\.csv is no readable CSV file"),
        ("d.csv", b"prompt,answer,answer\na,1,2", "two columns 'answer'"),
    ):
        with pytest.raises(DataError, match=message):
            read(lines(content, name=name), on_bad_row="skip")


X = '"{x}",\n?'
WILD = [{"problem": "1+1?", "solution": {"value": 2.0}}, {"problem": X, "solution": {"value": 0.5}}]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "list.json", "lines.json", "a.csv"])
def test_files_in_the_wild_are_read_by_the_names_of_their_fields(tmp_path, name):
    """The same two rows in the format of the path's ending."""
    path = tmp_path / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(WILD), path)
    elif path.suffix == ".csv":
        rows = '\ufeffproblem,solution.value\r\n1+1?,2\r\n"""{x}"",\n?",0.5\r\n'
        path.write_bytes(rows.encode())
    else:
        as_lines = "\n".join(map(json.dumps, WILD))
        path.write_text(json.dumps(WILD) if name.startswith("list") else as_lines)
    fields = {"prompt_field": "problem", "answer_field": "solution.value"}
    examples, report = read(path, **fields, template="none")
    assert [(e.text, e.answer) for e in examples] == [("1+1?", "2"), (X, "0.5")]
    assert rows_accounted(report) == report.rows == 2
    examples, _ = read(path, **fields, template="dapo")
    assert examples[1].text == PROMPT_TEMPLATE.replace("{problem}", X)
    episodes, _ = read(path, prompt_field="problem", environment="any:Game")
    assert [len(episode.extra) for episode in episodes] == [2, 2]  # each begins with a whole row


def test_a_number_is_written_out_as_an_answer(lines):
    given = {"0.1": "0.1", "42.0": "42", "-0.0": "0", "1e-7": "0.0000001", '"00a"': "00a"}
    given |= {number: number for number in ("1" + "0" * 250, "12345678901234567")}
    rows = (f'{{"prompt": "{i}", "answer": {number}}}' for i, number in enumerate(given))
    assert [it.answer for it in read(lines(*map(str.encode, rows)))[0]] == [*given.values()]


def test_a_number_that_was_rounded_is_refused(tmp_path, lines):
    """0.1 of a float32 column is 0.10000000149011612, which no right answer equals."""
    table = {"problem": ["a", "b", "c"], "answer": pa.array([0.1, 0.5, None], pa.float32())}
    pq.write_table(pa.table(table), tmp_path / "single.parquet")
    examples, report = read(tmp_path / "single.parquet", kind="math", on_bad_row="skip")
    assert ([example.answer for example in examples], report.bad_rows) == (["0.5"], 2)
    with pytest.raises(DataError, match="rounded by a computation"):
        read(lines({"problem": "a", "answer": 0.1 + 0.2}), kind="math")


FRACTION, ROOT = r"\frac{1}{2}", r"\frac{1}{\sqrt{2}}"
SEVERAL = {"final_answer": ["$2$"], "is_multiple_answer": False, "unit": None}
Q, P = {"question": "q"}, {"problem": "q"}
PUBLISHED = {
    "GSM8K": ("gsm8k", Q | {"answer": "So 1,200 + 34.\n#### 1,234"}, "1234"),
    "MATH-500": ("math", P | {"solution": "", "answer": FRACTION, "level": 1}, FRACTION),
    "AIME, as text": ("math", P | {"id": 0, "answer": "033"}, "33"),
    "AIME, as a number": ("math", P | {"problem_idx": 1, "answer": 33}, "33"),
    "Minerva": ("math_solutions", P | {"solution": r"$\boxed{1}$ no: $\boxed{4e3}$ erg"}, "4e3"),
    "MATH": ("math_solutions", P | {"level": "5", "solution": rf"So $\boxed{{{ROOT}}}$."}, ROOT),
    "OlympiadBench": ("olympiad_bench", Q | SEVERAL, "$2$"),
    "a list as text": ("math", P | {"answer": r'["\\frac{1}{2}"]'}, FRACTION),
    "a list by Python": ("math", P | {"answer": r"['\sqrt 2']"}, r"\sqrt 2"),
    "an interval": ("math", P | {"answer": "[1, 2]"}, "[1, 2]"),
    "of one's own": ("parquet", {"prompt": "q", "answer": 7}, "7"),
    "no braces": ("math_solutions", P | {"solution": rf"$\boxed {FRACTION}$."}, FRACTION),
}


@pytest.mark.parametrize(("kind", "row", "answer"), PUBLISHED.values(), ids=PUBLISHED)
def test_files_as_published(tmp_path, kind, row, answer):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "d.parquet")
    (example,), _ = read(tmp_path / "d.parquet", kind=kind)
    assert example.answer == answer
    assert example.text == PROMPT_TEMPLATE.replace("{problem}", "q")


def test_rows_of_ones_own(tmp_path):
    """A field that is missing or null is named; what `make` refuses is a bad row like any other."""
    path = tmp_path / "d.csv"
    path.write_text("country,capital\nPeru,Lima\nMali,\nPeru,Lima\nOman,?\nChad\nx=1, y?,2\n")

    def make(row):
        if row["capital"] == "?":
            raise ValueError("nobody knows")
        return ({"role": "user", "content": row["country"]},), row["capital"], {"n": 1}

    examples, report = read_rows(str(path), ["country", "capital"], make, on_bad_row="skip")
    assert [(e.text, e.answer, e.extra) for e in examples] == [("Peru", "Lima", {"n": 1})]
    *reasons, cut = [note.partition("(from 0): ")[2] for note in report.notes[:4]]
    assert reasons == ["the answer is empty", "nobody knows", "capital is null"]
    assert cut.startswith("there is no column for '2'")  # an answer of "y?" was learned
    with pytest.raises(DataError, match="'town' is missing; there are 'country', 'capital'"):
        read_rows(str(path), ["town"], make)


def test_each_row_is_in_the_report(tmp_path, byte_tokenizer):
    rows = [dapo_row("a", "1")] * 1500 + [dapo_row("b", "1"), dapo_row("b", "2")]
    rows += [dapo_row("toolong", "1")] + [dapo_row("", "1")] * 6
    source = write_dapo(tmp_path / "d.parquet", rows)
    prompts, report = load_prompts(source, byte_tokenizer, max_prompt_tokens=5, on_bad_row="skip")
    assert [prompt.token_ids.tolist() for prompt in prompts] == [byte_tokenizer.encode("a")]
    assert rows_accounted(report) == report.rows
    assert report.lines() == [
        "d.parquet: 1,509 rows, 1,499 duplicates merged, 1 prompts with conflicting answers "
        "dropped (2 rows), 6 bad rows skipped, 1 prompts over 5 tokens dropped; 1 prompts kept "
        "(1 tokens on average, 1 at most)",
        "  skipped d.parquet, row 1503 (from 0): prompt[0].content is empty (6 such rows)",
        "  2 of 2 prompts do not ask for what rules=dapo read (Answer:)",
    ]


def test_bad_rows_are_listed_by_their_reasons(lines):
    rows = [{"question": f"{i}?", "answer": f"so #### {i}"} for i in range(7)]
    with pytest.raises(DataError) as refused:
        read(lines(*rows, b"broken", {"prompt": "x", "answer": None}))
    first, second, third = str(refused.value).split("\n")
    assert first.endswith("or kind=gsm8k or gsm8k_jsonl) (7 such rows)")
    assert second.startswith("  line 8: invalid JSON") and third.startswith("  line 9: answer is")


def test_repeated_prompts_are_counted(lines):
    for times, said in (((32, 32), ["each prompt is there 32 times"]), ((3, 2), [])):
        rows = [{"prompt": f"{i}?", "answer": "1"} for i, n in enumerate(times) for _ in range(n)]
        examples, report = read(lines(*rows))
        assert len(examples) == 2 and [note[:29] for note in report.notes] == said


def test_two_spellings_of_an_answer_are_no_conflict(lines):
    others = [{"prompt": "b", "answer": text} for text in "12"]
    source = lines(*map(answer, ("1/2", "0.5", r"\frac{2}{4}")), *others)
    for rules, kept, dropped in (("strict", ["1/2"], 2), ("strict_box", [], 5)):
        examples, report = read(source, rules=rules)
        assert [example.answer for example in examples] == kept
        assert report.conflicting_rows == dropped


def test_shards_are_read_in_the_order_of_their_names(tmp_path, lines, byte_tokenizer):
    for shard in ("b", "a", "c"):
        texts = (f"{shard}0", f"{shard}1", "again")
        lines(*({"prompt": text, "answer": "1"} for text in texts), name=f"train-{shard}.jsonl")
    how = {"max_prompt_tokens": 9, "template": "none"}
    prompts, report = load_prompts(tmp_path / "train-*.jsonl", byte_tokenizer, **how)
    found = [(prompt.example.text, prompt.example.source) for prompt in prompts]
    assert [text for text, _ in found] == ["a0", "a1", "again", "b0", "b1", "c0", "c1"]
    assert found[3][1] == "train-b.jsonl"
    assert (report.rows, report.duplicates) == (9, 2)
    lines(b"broken", name="train-d.jsonl")
    with pytest.raises(DataError, match=r"train-\*\.jsonl, train-d\.jsonl, line 1: invalid JSON"):
        load_prompts(tmp_path / "train-*.jsonl", byte_tokenizer, **how)


def test_a_system_message_comes_before_each_prompt(lines, byte_tokenizer):
    how = {"max_prompt_tokens": 99, "system": "Be brief."}
    (prompt,), _ = load_prompts(lines(answer("1")), byte_tokenizer, template="none", **how)
    turns = [("system", "Be brief."), ("user", "a")]
    assert [(it["role"], it["content"]) for it in prompt.example.prompt] == turns
    source = lines({"prompt": [{"role": "system", "content": ""}, MESSAGE], "answer": "1"})
    message = r"data\.train\.system = 'Be brief.', but d.jsonl, row 1 has"
    with pytest.raises(DataError, match=message):
        load_prompts(source, byte_tokenizer, **how)


def test_max_prompts_keeps_the_first_usable_ones(lines, byte_tokenizer):
    source = lines(*({"prompt": "x" * length, "answer": "1"} for length in (3, 9, 40, 50)))
    how = {"max_prompt_tokens": 45, "template": "none"}
    prompts, report = load_prompts(source, byte_tokenizer, max_prompts=2, **how)
    assert (len(prompts), report.kept, report.longest_tokens, report.overlong) == (2, 2, 9, 1)
    assert report.lines()[-1] == "  the first 2 of 3 usable prompts (max_prompts)"


def test_a_set_that_cannot_be_used_is_named_by_its_key(tmp_path, lines, byte_tokenizer):
    source = lines({"prompt": [MESSAGE], "answer": "1"}, b"broken")
    for path, template, error, message in (
        (tmp_path / "no.jsonl", "", FileNotFoundError, r"data\.train: No data file.*set path"),
        (source, "chat", DataError, r"data\.train\.template = 'chat': must be one of none, "),
        (source, "dapo", DataError, r"(?s)line 1: prompt has messages, which take no template"),
        (source, "", DataError, r"(?s)No prompt is left.*1 prompts over 0 tokens.*line 2"),
    ):
        how = {"max_prompt_tokens": 0, "on_bad_row": "skip", "template": template}
        with pytest.raises(error, match=message):
            load_prompts(path, byte_tokenizer, **how)


def test_a_prompt_of_no_tokens_is_refused_where_the_data_is_loaded():
    blank = Example(({**MESSAGE, "content": " "},), "1", "mine", 1)
    nothing = types.SimpleNamespace(encode_chat=lambda messages, tools: [])
    with pytest.raises(DataError, match=r"^mine, row 1: the prompt is empty, it has no tokens"):
        tokenize([blank], nothing, "data.train", max_prompt_tokens=9)


def test_stream_epochs_are_permutations_by_seed_and_cursor_in_any_process():
    items = [f"item{i}" for i in range(50)]
    mixture = Mixture({"a": types.SimpleNamespace(prompts=items)}, {"a": 1.0})
    stream, other = map(mixture.stream, (7, 8))
    taken = [stream[i] for i in range(200)]
    # As another process takes them: an order by Python's own hashes would be another each time.
    assert (stream[10**12], *taken[:3]) == ("item38", "item23", "item32", "item26")
    epochs = [tuple(taken[first : first + 50]) for first in range(0, 200, 50)]
    assert len(set(epochs)) == 4
    assert all(sorted(epoch) == sorted(items) for epoch in epochs)
    assert [other[i] for i in range(200)] != taken


def test_dapo_math_17k(shared):
    """The longest of all has 1540 tokens; the others' are not counted here."""
    examples, report = read(shared / "data" / "dapo_math_17k" / "dapo-math-17k.parquet")
    assert (report.rows, report.kept, report.duplicates) == (17917, 17279, 616)
    assert (report.conflicting_prompts, report.conflicting_rows) == (11, 22)
    assert rows_accounted(report) == report.rows
    qwen = load(shared / "data" / "qwen25_tokenizer")
    longest = sorted(examples, key=lambda example: len(example.text))[-50:]
    for limit, overlong in ((1539, 1), (1540, 0)):
        assert tokenize(longest, qwen, "", max_prompt_tokens=limit)[1] == overlong
    head, tail = PROMPT_TEMPLATE.split("{problem}")  # the published one
    assert all(e.text.startswith(head) and e.text.endswith(tail) for e in examples)
    for truth in {example.answer for example in examples}:
        for rules in RULES:
            check_ground_truth(truth, rules=rules)


@pytest.mark.parametrize("name, rows", [("train", 7473), ("test", 1319)])
def test_gsm8k(shared, name, rows):
    examples, report = read(shared / "data" / "gsm8k" / f"{name}.jsonl", kind="gsm8k_jsonl")
    assert report.rows == report.kept == rows
    assert all(e.answer.removeprefix("-").isdigit() for e in examples)
