"""The rules that grade responses: parity with the reference, what "strict" mends, and hardness."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from processes import ran

from dapo_jax.verifier import RULES, STATUSES, Verdict, isolated, verify, verify_many
from dapo_jax.verifier.math_rules import MAX_GROUND_TRUTH_CHARS, dapo_form, strict_form
from dapo_jax.verifier.symbolic_rules import SymbolicVerifier, default_verifier

LOCAL_RULES = [rules for rules in RULES if rules != "math_verify"]
ROOT = pathlib.Path(__file__).resolve().parent.parent


def _rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Parity with the reference


def test_dapo_rules_equal_the_reference_on_every_golden_row(shared):
    rows = _rows(shared / "golden" / "dapo_verifier.jsonl")
    assert len(rows) == 312
    differing = []
    for row in rows:
        verdict = verify(row["solution"], row["ground_truth"], rules="dapo")
        reference = (row["acc"], None if row["pred"] == "[INVALID]" else row["pred"])
        if (verdict.correct, verdict.prediction) != reference:
            differing.append((row["ground_truth"], row["pred"], verdict))
    # The one deviation: the reference's name for "no answer" is not an answer.
    assert differing == [("[INVALID]", "[INVALID]", Verdict(False, None, "no_answer"))]


def test_strict_box_rules_equal_the_reference_on_every_golden_row(shared):
    differing = []
    for row in _rows(shared / "golden" / "dapo_verifier.jsonl"):
        verdict = verify(row["solution"], row["ground_truth"], rules="strict_box")
        if (verdict.correct, verdict.prediction) != (row["strict_acc"], row["strict_pred"]):
            differing.append((row["ground_truth"], row["strict_pred"], verdict))
    # The one deviation: nothing in the box is not the answer "".
    assert differing == [("", "", Verdict(False, "", "empty_ground_truth"))]


def test_strict_rules_reward_all_right_numbers_that_the_reference_rewards(shared):
    rows = _rows(shared / "golden" / "dapo_verifier.jsonl")
    rows = [row for row in rows if row["category"] in ("random", "long", "negative", "format_ok")]
    verdicts = [verify(row["solution"], row["ground_truth"], rules="strict") for row in rows]
    graded = list(zip(rows, verdicts, strict=True))
    lost = [row["id"] for row, verdict in graded if row["acc"] > verdict.correct]
    assert lost == ["v0010"]  # "Answer\n:\n42" is no line of the template's form
    gained = [row for row, verdict in graded if verdict.correct > row["acc"]]
    gained = [row for row in gained if row["category"] == "random"]  # integers all
    assert len(gained) > 10
    for row in gained:
        digits = re.sub("[^0-9-]", "", row["solution"].splitlines()[-1])
        assert digits == row["ground_truth"]


@pytest.mark.parametrize(
    ("response", "ground_truth", "prediction"),
    [
        ("We add.\nAnswer: 7", "7", "7"),
        ("We add.\nanswer  :\n 7 ", "7", "7"),
        ("Answer: 6\nNo.\nAnswer: 7", "7", "7"),
        ("Answer: $7$ apples", "7", "7"),
        (r"Answer: \boxed{7}", "7", "7"),
        (r"Answer: 7 \text{ cm}^2", "7", "7"),
        ("Answer: x = 7", "7", "7"),
        ("Answer: 7,000,000 dollars", "7000000", "7000000"),
        (r"Answer: \frac12", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"Answer: \sqrt3", r"\sqrt{3}", r"\sqrt{3}"),
        ("Answer: 1=7", "7", "7"),  # known false positives
        ("Answer: 1 2", "12", "12"),
        ("Answer: $1$ or $2$", "1", "1"),
    ],
)
def test_dapo_rules_reward(response, ground_truth, prediction):
    assert verify(response, ground_truth, rules="dapo") == Verdict(True, prediction, "correct")


@pytest.mark.parametrize(
    ("response", "prediction", "status"),
    [
        ("Answer: 8", "8", "wrong"),
        ("Answer: 7.", "7.", "wrong"),  # known false negatives
        ("**Answer:** 7", "**7", "wrong"),
        (r"Answer: \(7\)", r"\(7\)", "wrong"),
        ("Answer: 7%", "7%", "wrong"),
        ("It is 7.", None, "no_answer"),
        ("Answer:\n", None, "no_answer"),
        ("Answer: $ $", "", "empty_answer"),
        ("Answer: 7" + "z" * 300, None, "no_answer"),
    ],
)
def test_dapo_rules_do_not_reward(response, prediction, status):
    assert verify(response, "7", rules="dapo") == Verdict(False, prediction, status)


def test_dapo_rules_read_the_last_300_characters():
    assert verify("Answer: 7\n" + "z" * 290, "7", rules="dapo").correct
    assert not verify("Answer: 7\n" + "z" * 293, "7", rules="dapo").correct


def test_dapo_form_reads_a_ground_truth_of_several_lines_line_by_line():
    assert dapo_form("$1$ or\n$2$ or") == "1\n2"


@pytest.mark.parametrize(
    ("response", "ground_truth", "prediction", "status"),
    [
        (r"So \boxed{7}.", "7", "7", "correct"),
        (r"\boxed{6} no \boxed{7}", "7", "7", "correct"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}", "correct"),
        (r"\boxed{ 7}", "7", " 7", "wrong"),
        (r"\boxed{7", "7", None, "no_answer"),
        (r"\boxed{ }", "7", " ", "empty_answer"),
        ("Answer: 7", "7", None, "no_answer"),
        (r"\boxed{7}" + "y" * 92, "7", None, "no_answer"),
    ],
)
def test_strict_box_rules(response, ground_truth, prediction, status):
    verdict = verify(response, ground_truth, rules="strict_box")
    assert verdict == Verdict(status == "correct", prediction, status)


# What "strict" mends


@pytest.mark.parametrize(
    "response",
    [
        *("Answer: 42.", "Answer: **42**", "**Answer:** 42", "**Answer: 42**", "Answer**: 42"),
        *("### Final Answer: 42", "> The final answer: 42", "Answer: *42*", "Answer: `42`"),
        *("Answer: “42”", r"Answer: \(42\)", r"Answer: \[42\]", "Answer: $$42$$"),
        *("Answer:\n\\[\n42\n\\]", "**Answer:**\n\n$$\n42\n$$\nDone."),
        *(r"Answer: $\displaystyle 42$", r"Answer: $\boxed{42}$."),
        *(r"Answer: \boxed{\textbf{42}} dollars", r"Answer: \fbox{42}", "Answer: {42}"),
        *("Answer: 42%", r"Answer: $42\%$", "Answer: 42 seconds", "Answer: 42 km/h", "Answer: 42°"),
        *(r"Answer: 42^{\circ}", r"Answer: 42 \text{ square metres}", "Answer: 42 cm²"),
        *("Answer: 42 个", "Answer: +42", "Answer: 42.0", "Answer: 84/2", "Answer: m + n = 42."),
        *("Answer: f(2) = 42", "Answer: a_{12} = 42", r"Answer: \frac{84}{2} = 42"),
        *("Answer: \uff14\uff12", "Answer\uff1a42", "Answer: 42\u200b", "Answer: 42\u2028Thanks."),
        "Answer: $42 dollars",
    ],
)
def test_strict_rewards_what_plainly_is_the_number(response):
    assert verify(response, "42", rules="strict") == Verdict(True, "42", "correct")


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [
        ("1,000.50", "1000.5"),
        (r"1\,000", "1000"),
        ("1'000", "1000"),
        ("1 000 000", "1000000"),
        (r"1{,}000", "1000"),
        (r"12,\!345", "12345"),
        ("\u20137", "-7"),
        (r"\tfrac{1}{2}", r"\frac{1}{2}"),
        (r"\frac{1}2", r"\frac{1}{2}"),
        (r"\frac{-1}{2}", r"-\frac{1}{2}"),
        ("0.50", r"\frac12"),
        (".5", "1/2"),
        (r"3\frac{1}{2}", "7/2"),
        ("42", "42.0"),
        ("42", "$42$"),
        ("3, 5", "3,5"),
        (r"\left( \frac12 , 3 \right)", r"(\frac{1}{2},3)"),
        (r"\sqrt 2", r"\sqrt{2}"),
        ("f(x) = x^2", "x^2"),
        ("9" * 289, "9" * 289),
        *(
            (r"4.65 \times 10^{5}", "465000"),
            (r"4.65 \cdot 10^5", "4.65e5"),
            ("4.65*10^5", "465,000"),
        ),
        *(("4.65 \u00d7 10⁵", "4.65E+05"), ("6.5e-2", "0.065"), (r"10^{-3} \mathrm{~m}", "1e-3")),
    ],
)
def test_strict_compares_values_not_spellings(answer, ground_truth):
    assert verify(f"Answer: {answer}", ground_truth, rules="strict").correct


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [
        *(("41=42", "42"), ("4 2", "42"), ("42", "4 2"), ("12,34", "1234"), ("35", "3,5")),
        *((r"42\text{0}", "420"), (r"4\text{2}", "42"), (r"\boxed{4}\boxed{2}", "42")),
        *(("$42$ or $43$", "42"), (r"42 \text{ or forty-three}", "42"), ("$4$ $2$", "4")),
        *(("square 42", "42"), ("squares 42", "42"), ("a 42", "42"), ("ways42", "42")),
        *((r"5\dots", "5"), (r"\overline{5}", "5"), ("3.14...", "3.14"), ("42 or 43", "42")),
        *(("42 and 43", "42"), ("x = 41, y = 42", "42"), ("42 Answer: 41", "42"), ("~42", "42")),
        *((r"\neq 42", "42"), ("4²", "42"), ("٤٢", "42"), ("5!", "5"), ("42m", "42"), ("1/0", "1")),
        *(("0.3333", "1/3"), (r"42 \pmod{100}", "42")),
    ],
)
def test_strict_does_not_reward_what_is_something_else(answer, ground_truth):
    verdict = verify(f"Answer: {answer}", ground_truth, rules="strict")
    assert (verdict.correct, verdict.status) == (False, "wrong")


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("It is 42.", "no_answer"),
        ("I found that my Answer: 42", "no_answer"),
        ("z" * 291 + "Answer: 42", "no_answer"),  # the cut line is no line
        ("Answer: 42\nanswer: ", "empty_answer"),
        ("Answer: k=", "empty_answer"),
        ("Answer: 42\nWait.\nAnswer: 41", "wrong"),
    ],
)
def test_strict_wants_the_last_answer_line(response, status):
    verdict = verify(response, "42", rules="strict")
    assert (verdict.correct, verdict.status) == (False, status)


# Answers beside the right one, and other spellings of it


def _graded(rules):
    """The labelled pairs with their verdicts; a bare answer stands where the rules look for it."""
    rows = _rows(ROOT / "tests" / "answers.jsonl")
    form = r"So $\boxed{%s}$." if rules == "strict_box" else "So\nAnswer: %s"
    responses = [row.get("response", form % row.get("answer", "")) for row in rows]
    return rows, verify_many(responses, [row["truth"] for row in rows], rules=rules)


@pytest.mark.parametrize(
    ("rules", "wrong_rewarded", "right_refused"),
    [
        ("dapo", 161, 187),  # the reference's own
        ("strict", 0, 129),
        ("strict_box", 23, 316),
        ("math_verify", 0, 15),  # 14 of them have neither a line "Answer:" nor a box
    ],
)
def test_wrong_answers_are_not_rewarded(rules, wrong_rewarded, right_refused):
    """`strict` rewarded 50 of 568 wrong answers and `math_verify` 139, now none.

    Such as "I give up after 42 tries", "It cannot be 42", `5=7` for 7, `691_{1369}` for 691, `7 km`
    for `7 m`, `x=5` for `y=5`, and "Answer: 42" with "No wait" after it. Of 262 right ones they
    refused 50 and 25. The 23 of `strict_box` have "not", "no wait" or another box around theirs.

    Then `math_verify` refused 99 right ones of 778 more pairs, such as "The largest $n$ is 34",
    `5! = 120`, `(x, y) = (5, 8)` and `6\\pi\\text{ cm}`, and rewarded 70 wrong ones: two boxes with
    "or" between them, "Hence if $n = 34$", `125\\text{ million}`, `x-y=2` for `x+y=2`.
    """
    rows, verdicts = _graded(rules)
    assert sum(row["right"] for row in rows) == 360
    assert len(rows) == 360 + 1248
    wrong = [row for row, v in zip(rows, verdicts, strict=True) if v.correct > row["right"]]
    refused = [row for row, v in zip(rows, verdicts, strict=True) if v.correct < row["right"]]
    assert (len(wrong), len(refused)) == (wrong_rewarded, right_refused), (wrong, refused)


@pytest.mark.parametrize(
    "response",
    [
        *(r"$-\boxed{5}$", r"$x \neq \boxed{5}$", r"$2\boxed{5}$", r"$\sqrt{\boxed{5}}$"),
        *(r"$\frac{\boxed{5}}{2}$", r"$\frac{1}{\boxed{5}}$", r"$3 \cdot \boxed{5}$"),
        *(r"$1/\boxed{5}$", r"$\boxed{5}^2$", r"$\boxed{5} \times 10^3$", r"\boxed{5}+1"),
        *(r"\boxed{5}/2", r"\boxed{5}.5", r"\boxed{5}\pi", r"10^{\boxed{5}}", r"$x > \boxed{5}$"),
        *(r"\boxed{5} thousand", r"$\boxed{5}$ million dollars", r"$\boxed{5}\text{ million}$"),
        r"It is certainly not the case that $x=\boxed{5}$.",
    ],
)
def test_a_box_inside_a_formula_is_no_answer(response):
    """`math_verify` rewarded what is in the box, such as -5, 25 and "not 5" for 5."""
    assert not verify(response, "5", rules="math_verify").correct


@pytest.mark.parametrize(
    "response",
    [
        *(r"- $\boxed{5}$", r"$x = \boxed{5}$", r"$10 - 5 = \boxed{5}^\circ$", r"1. \boxed{5}"),
        *(r"**\boxed{5}**", r"${\boxed{5}}$", r"So $a+b \geq \boxed{5}$.", r"$\boxed{5}\%$"),
        *(r"-> \boxed{5}", r"\boxed{5}!", r"Step 2 --\boxed{5}", r"\(\Rightarrow\boxed{5}\)"),
        *(r"$\boxed{5}$.", r"\boxed{5} is the answer", r"<answer>\boxed{5}</answer>", r"\fbox{5}"),
    ],
)
def test_a_box_is_an_answer_with_what_is_around_it(response):
    assert verify(response, "5", rules="math_verify").correct


@pytest.mark.parametrize("rules", ["strict", "math_verify"])
@pytest.mark.parametrize(
    "spellings",
    [
        r"6 hours|6\text{ hrs}|6\text{ hr.}",
        r"7 pounds|7\text{ lbs}|7\text{ lb}",
        r"7 mph|7\text{ miles per hour}|7\text{ miles/hour}",
        r"7 km/h|7\text{ km/hr}|7\text{ kilometers per hour}|7\text{ kph}",
        r"2\text{ ft/sec}|2\text{ feet per second}",
        r"8\text{ cm}^3|8\text{ cc}|8\text{ cubic centimeters}",
        r"9 years|9\text{ years old}|9\text{ yrs}",
        r"3 kg|3\text{ kgs}|3 kilograms",
    ],
)
def test_a_unit_in_another_spelling_is_the_same_unit(rules, spellings):
    """Units were told apart by their letters: "6 hours" for "6 hrs" was another unit, and wrong."""
    spellings = spellings.split("|")
    pairs = [(f"Answer: {one}", other) for one in spellings for other in spellings]
    verdicts = [verify(*pair, rules=rules) for pair in pairs]
    assert [v.status for v in verdicts] == ["correct"] * len(pairs)


@pytest.mark.parametrize(
    ("unit", "same", "other"),
    [
        *((" hours", "5 hours", "5 minutes"), (r"\text{ km}$", r"5 \text{ km}", r"5 \text{ m}")),
        *((" miles per hour.", "5 mph", "5 km/h"), (" square meters", "5 m^2", "5 m")),
        ("$ in total", "5 cm", "6 in"),
    ],
)
def test_a_unit_behind_a_box_is_the_answers(unit, same, other):
    """`\\boxed{5} hours` was right for 5 minutes: what is outside the box was not read."""
    verdicts = [
        verify(rf"$\boxed{{5}}{unit}", it, rules="math_verify") for it in (same, "5", other)
    ]
    assert [verdict.correct for verdict in verdicts] == [True, True, False]


UNITS = r"""
\text{ m}| km|\mathrm{~km}|\mu\mathrm{m}| inches|\text{ s}| ms| min| hours| hr| yr|\mathrm{~kg}
 lb| l| cc|\mathrm{~m} / \mathrm{s}|\mathrm{~km} / \mathrm{s}| m/s^2|\text{ km/h}| mph|\mathrm{~J}
\text{ kg/m^3}|\text{ g/cm}^3| eV|\text{ MeV}|\text{ N·m}|\mathrm{~N}| mW| MW|^\circ\mathrm{C}| K
^\circ| rad|\%| dollars| points
"""


@pytest.mark.parametrize("rules", ["strict", "math_verify"])
@pytest.mark.parametrize("number", ["5", r"4.65 \times 10^{-5}"])
def test_another_unit_is_refused_and_no_unit_is_not(rules, number):
    """414 of 2,975 such pairs were rewarded: a unit that was not known was none, or the library's.

    Such as 5 min for 5 hours, 5 lb for 5 kg, and any unit for `\\mathrm{~m} / \\mathrm{s}`.
    """
    units = [unit for line in UNITS.split("\n") for unit in line.split("|") if unit]
    same = [{" km", r"\mathrm{~km}"}, {" hours", " hr"}]
    pairs = [(one, other) for one in ("", *units) for other in units]
    verdicts = verify_many(
        [f"Answer: {number}{one}" for one, _ in pairs],
        [f"{number}{other}" for _, other in pairs],
        rules=rules,
    )
    for pair, verdict in zip(pairs, verdicts, strict=True):
        assert verdict.correct == (not pair[0] or len({*pair}) == 1 or {*pair} in same), pair


@pytest.mark.parametrize("answer", [r"6\text{ ms}", r"6\text{ lbs}", "6 km/h", r"6\text{ hrs}^2"])
def test_a_short_unit_is_not_cut_to_another(answer):
    verdicts = [verify(f"Answer: {answer}", rf"6\text{{ {u}}}", rules="strict") for u in ("m", "h")]
    assert [v.status for v in verdicts] == ["other_unit"] * 2


EXPLAINED = """
A common mistake is to forget the sign.|The incorrect value 41 comes from counting 0.|Sorry for the
long solution.|(The answer should be an integer.)|The answer is not 41.|41 is wrong: 0 is no digit.
|If one forgets the sign, the answer is -42, which is wrong.|No others work.|Check: 6*7 = 42.
|So the correct answer is 42.|It is incorrect to divide by 0.|He has to wait 5 minutes.
|The answer is 43 when x is odd, but here x is even, so 42.|Hold on to this fact.|I forgot nothing.
|I made an effort to simplify.|I mistakenly wrote 24 above, but the answer line is right.
|There is an error in the problem statement, but the intended answer is 42.|It is 42, not 43.
|No, 43 does not work either.|You might think the answer is 43, but that is wrong.
|It should be 43 if x were odd.|The answer would be 43 if x were odd.|Never mind the sign.
|The above calculation is correct.|The answer in the book is wrong.|Not 43.|We are not wrong.
"""
RETRACTED = """
Wait, that is wrong, it is 41.|The answer is not 42.|Actually the answer should be 41.|It isn't 42.
|Hmm, 41.|That's not right.|I made a mistake.|42 is incorrect.|The right answer is 41.|No, 41.
|The number 42 is nice. But the answer is 41.|Sorry, I meant 41.|It should be 41.|42 can't be right.
|The above is wrong.|The above answer is incorrect.|The previous answer is wrong.|thats not right
|The previous line is wrong.|My previous answer was wrong, it's 43.|My calculation is wrong.
|That computation is wrong.|We were wrong.|We are wrong.|Wrong, it's 43|thats wrong|Not 42.
|This contradicts the assumption, so it is wrong.|Not 42 but 43.|43, not 42.|It is 43, not 42.
|The correct option is 43.|43 is the correct answer.|I change my answer to 43.|I take that back.
|Ignore that; it's 43.|Never mind, 43.|The answer is option B.|The correct option is **B**.
"""


@pytest.mark.parametrize(
    "form", ["Answer: 42\n\n%s", r"The n that is not prime is $\boxed{42}$. %s"]
)
@pytest.mark.parametrize(("said", "status"), [(EXPLAINED, "correct"), (RETRACTED, "retracted")])
def test_what_is_said_of_something_else_takes_no_answer_back(form, said, status):
    """ "Answer: D. A is incorrect" was retracted: words counted, whatever they were said of.

    And "not" in the subject before a box made it no answer. Then only the answer itself, and not
    the work above it, could be called wrong.
    """
    for sentence in " ".join(said.split()).split("|"):
        for rules in ["math_verify", "strict"][: 1 + form.startswith("Answer")]:
            assert verify(form % sentence.strip(), "42", rules=rules).status == status, sentence


# Hardness


def _soup(generator: random.Random, alphabet: list[str], max_chars: int) -> str:
    text = generator.choice(["", "Answer: ", "x\nAnswer:", "**Answer:** $", r"\boxed{"])
    length = generator.randrange(max_chars)
    while len(text) < length:
        text += generator.choice(alphabet)
    return text


LATEX_WORDS = r"""
\frac \dfrac \sqrt \text{ \mathrm{ \boxed{ \textbf{ \left( \right) \( \) \[ \] $ $$ \$
{ } ( ) [ ] ** * _ ` = , . : ; - + / % ^ ~ ! 0 1 42 1,000 3.5 x cm km and or
\, \; \! {,} \circ ^\circ \% \quad _{1} ² ° 个 Answer: answer
"""
LATEX = [*LATEX_WORDS.split(), " ", "\n", "  ", "\u00a0", "\u200b", "\u2013", "\uff11", "a ", "= "]
UNICODE = [
    *map(chr, [0, 9, 10, 11, 13, 0x85, 0x2028, 0x661, 0xB2, 0x130, 0x17F, 0xFF11, 0xD800, 0xDFFF]),
    *["Answer", ":", "\\", "{", "}", "\U0001f389", "\U0010ffff", "1", "٤", "½", "Ⅳ"],
]


@pytest.mark.parametrize("alphabet", [LATEX, UNICODE], ids=["latex", "unicode"])
def test_no_soup_raises_or_is_graded_twice_differently(alphabet):
    generator = random.Random(0)
    for _ in range(700):
        response = _soup(generator, alphabet, 400)
        truth = generator.choice([_soup(generator, alphabet, 40), "42", ""])
        for rules in LOCAL_RULES:
            verdict = verify(response, truth, rules=rules)
            assert verdict == verify(response, truth, rules=rules)
            assert verdict.status in STATUSES
            assert verdict.correct == (verdict.status == "correct")
            assert not verdict.correct or (truth.strip() and verdict.prediction.strip())


@pytest.mark.parametrize("alphabet", [LATEX, UNICODE], ids=["latex", "unicode"])
def test_strict_form_is_a_fixed_point_of_itself(alphabet):
    generator = random.Random(1)
    for _ in range(2000):
        form = strict_form(_soup(generator, alphabet, 60))
        assert strict_form(form) == form


def test_a_strict_prediction_grades_itself_right():
    generator = random.Random(2)
    graded = 0
    for _ in range(500):
        form = strict_form(_soup(generator, LATEX, 30))
        if form and "\n" not in form:
            graded += 1
            verdict = verify(f"Answer: {form}", form, rules="strict")
            assert verdict == Verdict(True, form, "correct")
    assert graded > 300


PIECES = [r"\text{a", "{x=", "{*", "$a", "a b", "1'", ",", "()", "a(", "=1", r"\frac{"]


@pytest.mark.parametrize("rules", LOCAL_RULES)
def test_no_repetition_burns_cpu(rules):
    for unit in (*LATEX, *UNICODE, *PIECES):
        text, tries = ("Answer: " + unit * 300)[:300], []
        for _ in range(3):
            start = time.process_time()
            verify(text, text, rules=rules)
            tries.append(time.process_time() - start)
        assert min(tries) < 0.01, ascii(unit)


@pytest.mark.parametrize("rules", LOCAL_RULES)
def test_a_response_of_megabytes_costs_no_more_than_its_tail(rules):
    response = r"Answer: \boxed{" * 2_000_000 + "\nAnswer: \\boxed{7}"
    start = time.process_time()
    assert verify(response, "7", rules=rules).correct
    assert time.process_time() - start < 0.02


@pytest.mark.parametrize("text", ["\n", "!", "\n\n ", ". "])
def test_a_response_that_runs_empty_costs_no_time(text):
    """1,000 line ends cost 0.15 s of the main process: 20 minutes for 8,192 such responses."""
    start = time.process_time()
    for length in range(900, 1000):
        assert not verify((text * 1000)[:length], "5", rules="math_verify").correct
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("rules", LOCAL_RULES)
@pytest.mark.parametrize(
    ("response", "ground_truth", "status"),
    [
        (None, "7", "bad_input"),
        (7, "7", "bad_input"),
        (b"Answer: 7", "7", "bad_input"),
        (r"Answer: \boxed{7}", None, "bad_input"),
        (r"Answer: \boxed{7}", 7, "bad_input"),
        (r"Answer: \boxed{7}", "7" * (MAX_GROUND_TRUTH_CHARS + 1), "bad_input"),
        (r"Answer: \boxed{7}", "", "empty_ground_truth"),
        (r"Answer: \boxed{7}", " \n", "empty_ground_truth"),
        (r"Answer: \boxed{}", "", "empty_ground_truth"),
        ("", "", "empty_ground_truth"),
        ("", "7", "no_answer"),
    ],
)
def test_what_is_missing_is_never_rewarded(rules, response, ground_truth, status):
    verdict = verify(response, ground_truth, rules=rules)
    assert (verdict.correct, verdict.status) == (False, status)


def test_verify_many_grades_pairs_in_order():
    verdicts = verify_many(["Answer: 1", "Answer: 2", "3"], ["1", "1", "3"], rules="dapo")
    assert [verdict.status for verdict in verdicts] == ["correct", "wrong", "no_answer"]
    assert verify_many([], [], rules="strict") == []


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"'minerva'.*dapo, strict, .*verifier\.rules"):
        verify("Answer: 7", "7", rules="minerva")
    with pytest.raises(ValueError, match="2 responses but 1 ground truths"):
        verify_many(["a", "b"], ["a"], rules="dapo")
    with pytest.raises(ValueError, match="0 workers"):
        SymbolicVerifier(0)


# Symbolic equivalence

HANGS = "Answer: $(x+y+z+w)^{99}$"  # ten seconds of the library's time


@pytest.fixture(scope="module")
def symbolic():
    """The default pool."""
    default_verifier.cache_clear()
    with default_verifier() as verifier:
        yield verifier
    default_verifier.cache_clear()


@pytest.fixture(scope="module")
def lone():
    """A worker alone, which the tests that harm it share; each leaves one that works."""
    with SymbolicVerifier(num_workers=1) as verifier:
        yield verifier


def _alive(pid: int) -> bool:
    """True while a process runs; one that is dead but not yet collected does not.

    The first thread may be dead before the others, which still hold the process's files open.
    """
    process = pathlib.Path(f"/proc/{pid}")
    try:
        status = (process / "stat").read_text()
        threads = len(list((process / "task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z" or threads > 1


def _wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 20
    while _alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs after 20 seconds"
        time.sleep(0.05)


needs_proc = pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.mark.parametrize(
    ("response", "ground_truth", "status"),
    [
        (r"Answer: \frac{2}{4}", "0.5", "correct"),
        ("Answer: (x+1)^2", "x^2+2x+1", "correct"),
        ("**Answer:** $42$.", "42", "correct"),
        (r"So it is $\boxed{42}$.", "42", "correct"),
        ("So the answer is 42.", "42", "no_answer"),
        ("#### 42", "42", "no_answer"),
        (r"\boxed{41}. So the answer is 42.", "42", "correct"),
        (r"\boxed{42}. So the answer is 41.", "42", "wrong"),
        ("Answer: 43", "42", "wrong"),
        ("Answer: $42$ or $43$", "42", "wrong"),
        ("Answer:", "42", "empty_answer"),
        ("  ", "42", "no_answer"),
        ("I gave up", "42", "no_answer"),
        (r"Answer: \frac{2}{", "42", "unreadable_answer"),
        ("Answer: x^2", r"\frac{x}{", "unreadable_ground_truth"),
        ("Answer: 9^{9^{9^{9}}}", "42", "too_large"),
        ("Answer: 42", " ", "empty_ground_truth"),
        (None, "42", "bad_input"),
        ("Answer: \ud800", "42", "unreadable_answer"),
    ],
)
def test_math_verify_rules(symbolic, response, ground_truth, status):
    verdict = symbolic.verify(response, ground_truth)
    assert (verdict.correct, verdict.status) == (status == "correct", status)


def test_math_verify_agrees_with_the_golden_rows(symbolic, shared):
    r"""Those that do not agree, each given as an answer line unless it has a box:

    * a number or formula with words around it, as in "Jane started 3 hours ago";
    * chains that hold unequal numbers, such as `x = 5+5+1 = 7 =11` for 11;
    * rounding: 3.14159 for 3.1416, 16.67 for 16.\overline{6}, 2.3 for 2.\overline{3}; 75 for 0.75;
    * `1,22` as 1.22 (a decimal comma; here a list of two), `10, 4, -2` for `4, 10, -2` (compared
      as sets), unspaced `-5\lex\le1`, `x\approx11` for 11, a ground truth in words;
    * an answer that only its middle states, and a ground truth of more than 1000 characters.
    """
    rows = _rows(shared / "golden" / "math_equivalence.jsonl")
    responses = [
        row["pred"] if "boxed" in row["pred"] else f"Answer: {row['pred']}" for row in rows
    ]
    verdicts = symbolic.verify_many(responses, [row["gold"] for row in rows])
    graded = list(zip(rows, verdicts, strict=True))
    rewarded = [row["pred"] for row, verdict in graded if verdict.correct > row["expected"]]
    assert len(rows) == 188
    assert sum(verdict.correct == row["expected"] for row, verdict in graded) >= 161
    assert rewarded == ["10, 4, -2"]


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [
        (r"125\textnormal{ miles}", "$125$ miles"),
        (r"6\pi\mbox{ square units}", r"6\pi"),
        (r"\left| 3 - 5 \right| = 2", "2"),
        *((r"2^{100}\cdot5^{100}", "1e100"), ("x^{0.5}", r"\sqrt{x}"), ("0.1+0.2", "0.3")),
        ("m + n = 3 + 4 = 7", "7"),
        (r"A = \frac{1}{2}bh = \frac12 \cdot 6 \cdot 4 = 12", "12"),
        (r"\cos 60^\circ = \frac{1}{2}", "1/2"),
        *((r"\sum_{k=1}^{10} k = 55", "55"), (r"\sum_{k=1}^n k", "n(n+1)/2")),
        ("(x-1)^2 + (y-2)^2 = 9", "(y-2)^2+(x-1)^2 = 9"),  # was a tower of powers
        (r"(x, y) = (5, 8) \quad \text{and} \quad (8, 5)", "(5, 8), (8, 5)"),
        (r"x = 6 \text{ or } x = 8", "6, 8"),
        ("x = 3, y = 4", "(3, 4)"),
    ],
)
def test_math_verify_reads_units_chains_and_lists_in_a_box_and_on_a_line(
    symbolic, answer, ground_truth
):
    """Rules against wrong answers refused such right ones: of 187, 177 passed before, then 154."""
    responses = [f"Answer: {answer}", f"Answer: ${answer}$", rf"So it is $\boxed{{{answer}}}$."]
    verdicts = symbolic.verify_many(responses, [ground_truth] * 3)
    assert [verdict.status for verdict in verdicts] == ["correct"] * 3


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        *((r"\frac{1}{19!}", r"\frac{1}{20!}"), ("e^{-40}", "e^{-41}"), ("0.000001", "0.0000014")),
        *((r"1-\frac{1}{2^{99}}", r"1-\frac{1}{2^{100}}"), ("x+e^{-40}", "x+e^{-41}")),
        *((r"-1.6 \times 10^{-19}", r"1.6 \times 10^{-19}"), (r"10^{-30}\pi", r"10^{-31}\pi")),
        *((r"\sqrt{10^{60}+1}", "10^{30}"), (r"\frac{1}{2^{9998}}", r"\frac{1}{2^{9999}}")),
    ],
)
def test_small_and_large_numbers_are_compared_exactly(symbolic, answer, truth):
    """The library takes a difference below 1e-17 for none; six decimals were six digits."""
    assert symbolic.verify(f"Answer: {answer}", truth).status == "wrong"
    assert symbolic.verify(f"Answer: {answer}+0", answer).correct


@pytest.mark.parametrize(
    ("sentence", "status"),
    [
        ("The largest $n$ is %s.", "correct"),
        ("There are %s such numbers.", "correct"),
        ("Therefore, $n = %s$", "correct"),
        ("John has %s apples in total.", "correct"),
        ("$%s$ is the answer.", "correct"),
        ("I doubt that %s is the answer.", "wrong"),
        ("The largest $n$ is %s or 35.", "wrong"),
        ("The largest $n$ is not %s.", "wrong"),
        ("The largest of 50 is %s.", "wrong"),
        ("There are at most %s.", "wrong"),
        ("There are %s million ways.", "wrong"),
        ("I have %s ideas.", "wrong"),
        ("The largest $n$ is %s. No, 35.", "retracted"),
    ],
)
def test_math_verify_reads_the_one_value_that_a_sentence_states(symbolic, sentence, status):
    """Only "The answer is ..." was read: "Final Answer: The largest $n$ is 34." was wrong."""
    assert symbolic.verify(f"Final Answer: {sentence % 34}", "34").status == status
    assert not symbolic.verify(f"Final Answer: {sentence % 35}", "34").correct


def test_math_verify_survives_soup(symbolic):
    generator = random.Random(3)
    responses = [_soup(generator, generator.choice([LATEX, UNICODE]), 60) for _ in range(40)]
    verdicts = symbolic.verify_many(responses, ["42"] * len(responses))
    assert {verdict.status for verdict in verdicts} <= set(STATUSES)


def test_the_default_pool_serves_verify_from_any_thread(symbolic):
    verdicts = []
    thread = threading.Thread(
        target=lambda: verdicts.append(verify("Answer: $2^5+10$", "42", rules="math_verify"))
    )
    thread.start()
    thread.join()
    assert verdicts == [Verdict(True, "2^5+10", "correct")]
    assert verify_many(["Answer: 1"], ["2"], rules="math_verify")[0].status == "wrong"
    assert default_verifier() is symbolic


def test_an_answer_that_hangs_is_ended_and_the_others_go_on(lone):
    alarm = signal.getsignal(signal.SIGALRM)
    before = lone.worker_pids()
    verdicts = lone.verify_many(["Answer: 2^0", HANGS, "Answer: 2^1"], ["1", "x^2", "2"])
    assert [verdict.status for verdict in verdicts] == ["correct", "timeout", "correct"]
    assert not verdicts[1].correct
    assert lone.worker_pids() == before
    assert signal.getsignal(signal.SIGALRM) == alarm
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_limit_of_time_holds_where_its_signal_is_ignored():
    """Workers inherit what the run ignores; one with SIGPROF ignored graded on without a limit.

    The TPU's compiler leaves a program with SIGPROF ignored and its timer running, and Python knows
    nothing of it: a signal "put back" here would end the tests. So this runs in a process apart.
    """
    code = (
        "import signal; from dapo_jax.verifier.symbolic_rules import SymbolicVerifier\n"
        "signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        "with SymbolicVerifier(num_workers=1, cpu_seconds=0.2) as verifier:\n"
        f"    print(verifier.verify({HANGS!r}, 'x^2').status)"
    )
    assert ran("-c", code).stdout == "timeout\n"


def test_a_worker_that_is_killed_at_work_changes_no_verdict(lone):
    """A worker that was killed raised into the run, with "was not ready within 120 s" (3 of 3).

    Its answer was "crashed", and so another than without the kill. Now it is graded again.
    """
    (before,) = lone.worker_pids()
    killer = threading.Timer(0.3, os.killpg, (before, signal.SIGKILL))
    killer.start()
    verdicts = lone.verify_many([HANGS, "Answer: 2^1"], ["x^2", "2"])
    assert [verdict.status for verdict in verdicts] == ["timeout", "correct"]
    (after,) = lone.worker_pids()
    assert after != before


@pytest.mark.slow
def test_workers_that_are_killed_as_they_start_never_raise(lone):
    """Three in a row raised into the run: any error, or the kernel short of memory, may kill so."""
    killed = set()
    deadline = time.monotonic() + 60

    def kill_four():
        while len(killed) < 4 and time.monotonic() < deadline:
            (pid,) = lone.worker_pids()
            if pid not in killed:
                os.killpg(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.01)

    killer = threading.Thread(target=kill_four)
    killer.start()
    assert lone.verify("Answer: 2^1+x", "x+2").correct
    killer.join()
    assert len(killed) == 4


@pytest.mark.slow
@pytest.mark.parametrize("is_ready", [True, False])
def test_a_worker_that_is_stopped_is_replaced(monkeypatch, is_ready):
    """A worker that was stopped (SIGSTOP), not dead, held 20 answers for 120 seconds."""
    monkeypatch.setattr("dapo_jax.verifier.isolated.SILENCE_SECONDS", 3.0)
    with SymbolicVerifier(num_workers=1, cpu_seconds=0.4) as verifier:
        if is_ready:
            assert verifier.verify("Answer: 2^1+x", "x+2").correct
        (before,) = verifier.worker_pids()
        os.kill(before, signal.SIGSTOP)
        start = time.monotonic()
        answers = [f"Answer: x+2^{power}" for power in range(20)]
        verdicts = verifier.verify_many(answers, [f"{2**power}+x" for power in range(20)])
        assert [verdict.status for verdict in verdicts] == ["correct"] * 20
        # Were each answer to wait for itself, it took 80 s; a busy host's workers start slowly.
        assert 2 < time.monotonic() - start < 60
        assert verifier.worker_pids() != [before]


def test_a_pool_that_cannot_start_says_so_and_not_that_it_was_slow(monkeypatch):
    monkeypatch.setattr("dapo_jax.verifier.isolated._PROGRAM", "import sys; sys.exit(7)")
    with (
        SymbolicVerifier(num_workers=1) as verifier,
        pytest.raises(ChildProcessError, match=r"3 math_verify workers .*ended with status 7"),
    ):
        verifier.verify("Answer: 2^1", "2")


@needs_proc
def test_a_child_that_is_killed_again_and_again_is_a_crash(lone):
    """Only the process of the answer is killed, from outside: after three times it is "crashed"."""
    (worker,) = lone.worker_pids()
    children = pathlib.Path(f"/proc/{worker}/task/{worker}/children")
    over = threading.Event()

    def kill_children():
        while not over.is_set():
            for child in children.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)

    killer = threading.Thread(target=kill_children)
    killer.start()
    verdict = lone.verify(HANGS, "x^2")
    over.set()
    killer.join()
    assert verdict.status == "crashed"
    assert lone.worker_pids() == [worker]


def test_a_busy_host_changes_no_verdict(lone):
    """The limit was of the wall's time: an answer that had to wait for a core was wrong."""
    (worker,) = lone.worker_pids()
    os.killpg(worker, signal.SIGSTOP)
    resumed = threading.Timer(1.5, os.killpg, (worker, signal.SIGCONT))  # over ANSWER_CPU_SECONDS
    resumed.start()
    assert lone.verify("Answer: 2^1", "2").correct
    resumed.join()


def test_an_answer_that_wants_all_memory_gets_a_gigabyte():
    """A worker took 2.5 GB. An answer may add 1 GiB to what its worker has, and no more."""
    program = (
        "from dapo_jax.verifier.isolated import STATUSES, answered_in_child\n"
        "for mib in (1100, 10):\n"
        "    reply = answered_in_child(lambda: bytes(bytearray(mib << 20)[:9]), 5.0)\n"
        "    print(STATUSES[reply[0]], len(reply))\n"
    )
    assert ran("-c", program).stdout.split() == ["memory", "1", "done", "10"]


@pytest.fixture
def asked(monkeypatch):
    """The requests to workers, with their seconds of CPU time, noted on their way."""
    questions, ask = [], isolated.Worker.ask

    def noting(worker, request, cpu_seconds, **limits):
        questions.append((request, cpu_seconds))
        return ask(worker, request, cpu_seconds, **limits)

    monkeypatch.setattr(isolated.Worker, "ask", noting)
    return questions


def test_equal_pairs_are_graded_once(lone, asked):
    """16 equal bombs took 16 time limits, 80 s on one worker; now the first one's."""
    verdicts = lone.verify_many([HANGS] * 16, ["x^2"] * 16)
    assert [verdict.status for verdict in verdicts] == ["timeout"] * 16
    assert len(asked) == 1


def test_many_timeouts_make_the_next_ones_short(lone, asked, monkeypatch):
    """A step of 8,192 answers with 1 % bombs waited 4 to 8 minutes on 2 workers: 5 s each."""
    monkeypatch.setattr(lone, "_patience", 1.0)
    lone.verify_many([HANGS, HANGS + "+1", "Answer: 2^1"], ["x^2", "x^2", "2"])
    assert [seconds for _, seconds in asked] == [1.0, 0.1, 0.1]


def test_text_and_numbers_need_no_worker(lone, asked):
    """Each answer took a worker 5 to 50 ms, a plain number too."""
    answers = [
        *("42", "43", r"\frac{84}{2}", "42.0", "42%", "I give up after 42 tries", "9^{9^{9^9}}"),
    ]
    lone.verify_many([f"Answer: {answer}" for answer in answers], ["42"] * len(answers))
    assert asked == []


@needs_proc
def test_a_worker_that_is_killed_idle_costs_no_answer(lone):
    assert lone.verify("Answer: 2^0", "1").correct
    (pid,) = lone.worker_pids()
    os.kill(pid, signal.SIGKILL)
    _wait_for_the_end_of(pid)
    assert lone.verify("Answer: 2^0", "1").correct


@needs_proc
def test_workers_end_with_the_block_and_load_no_jax(symbolic):
    assert all(
        "jaxlib" not in pathlib.Path(f"/proc/{pid}/maps").read_text()
        for pid in symbolic.worker_pids()
    )
    with SymbolicVerifier(num_workers=2) as verifier:
        pids = verifier.worker_pids()
    assert not any(map(_alive, pids))
    with pytest.raises(RuntimeError, match="closed"):
        verifier.verify("Answer: 1", "1")


@needs_proc
def test_workers_end_with_the_process_however_it_ends():
    program = (
        "import os, signal, sys\n"
        "from dapo_jax.verifier.symbolic_rules import SymbolicVerifier\n"
        "verifier = SymbolicVerifier(1)\n"
        "verifier.verify('Answer: 2^0', '1')\n"
        "print(*verifier.worker_pids(), flush=True)\n"
    )
    ends = ("sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)")
    processes = [
        subprocess.Popen([sys.executable, "-c", program + end], cwd=ROOT, stdout=subprocess.PIPE)
        for end in ends
    ]
    for process in processes:
        (pid,) = map(int, process.communicate()[0].split())
        _wait_for_the_end_of(pid)
