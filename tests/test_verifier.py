"""The rules that grade responses: parity with the reference, what "strict" mends, and hardness."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import threading
import time

import pytest
from processes import ROOT, ran, wait_for

from dapo_jax.verifier import RULES, Verdict, isolated, verify, verify_many
from dapo_jax.verifier.math_rules import MAX_GROUND_TRUTH_CHARS, strict_form
from dapo_jax.verifier.symbolic_rules import SymbolicVerifier

EMPTY = "empty_ground_truth"
LOCAL_RULES = [rules for rules in RULES if rules != "math_verify"]


def _rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("rules", "correct", "prediction", "deviation"),
    [
        # The reference's name for "no answer" is not an answer.
        ("dapo", "acc", "pred", ("[INVALID]", "[INVALID]", Verdict(False, None, "no_answer"))),
        # Nothing in the box is not the answer "".
        ("strict_box", "strict_acc", "strict_pred", ("", "", Verdict(False, "", EMPTY))),
    ],
)
def test_rules_equal_the_reference_on_every_golden_row(
    shared, rules, correct, prediction, deviation
):
    rows, differing = _rows(shared / "golden" / "dapo_verifier.jsonl"), []
    assert len(rows) == 312
    for row in rows:
        verdict, found = verify(row["solution"], row["ground_truth"], rules=rules), row[prediction]
        none = rules == "dapo" and found == "[INVALID]"
        if (verdict.correct, verdict.prediction) != (row[correct], None if none else found):
            differing.append((row["ground_truth"], found, verdict))
    assert differing == [deviation]


# A response, the truth, and the verdict, by rules.
PLACES = {
    "strict_box": ((r"\boxed{7}" + "y" * 91, "correct"), (r"\boxed{7}" + "y" * 92, "no_answer")),
    "strict": (
        ("Answer:\n\\[\n7\n\\]", "correct"),
        ("### Final Answer: 7\u2028Thanks.", "correct"),
        ("I found that my Answer: 7", "no_answer"),
        ("z" * 292 + "Answer: 7", "no_answer"),  # the cut line is no line
        ("Answer: 7\nanswer: ", "empty_answer"),
        ("Answer: k=", "empty_answer"),
        ("Answer: 7\nWait.\nAnswer: 6", "wrong"),
    ),
    "math_verify": (
        (r"Answer: \frac{14}{2}", "correct"),
        (r"So it is $\boxed{7}$.", "correct"),
        ("So the answer is 7.", "no_answer"),
        (r"\boxed{6}. So the answer is 7.", "correct"),
        (r"\boxed{7}. So the answer is 6.", "wrong"),
        ("Answer:", "empty_answer"),
        (r"Answer: \frac{2}{", "unreadable_answer"),
        ("Answer: 9^{9^{9^{9}}}", "too_large"),
        ("Answer: \ud800", "unreadable_answer"),
        (None, "bad_input"),
    ),
}
# By value, not by spelling.
STRICT = (
    *(("“42”", "42", True), ("\uff14\uff12", "42", True), ("$42 dollars", "42", True)),
    *((r"1\,000", "1000", True), ("1'000", "1000", True), ("1 000 000", "1000000", True)),
    *(("\u20137", "-7", True), (r"3\frac{1}{2}", "7/2", True), (".5", "1/2", True)),
    *(("9" * 289, "9" * 289, True), (r"\left( \frac12 , 3 \right)", r"(\frac{1}{2},3)", True)),
    *(("f(x) = x^2", "x^2", True), (r"10^{-3} \mathrm{~m}", "1e-3", True)),
    *(("4.65 \u00d7 10⁵", "4.65E+05", True), ("4.65*10^5", "465,000", True)),
    *(("41=42", "42", False), ("4 2", "42", False), ("12,34", "1234", False)),
    *((r"42\text{0}", "420", False), (r"\boxed{4}\boxed{2}", "42", False), ("4²", "42", False)),
    *(("٤٢", "42", False), ("42m", "42", False), ("~42", "42", False), ("1/0", "1", False)),
)
# The library takes a difference below 1e-17 for none.
NEARLY = (
    *((r"\frac{1}{19!}", r"\frac{1}{20!}"), ("e^{-40}", "e^{-41}"), ("0.000001", "0.0000014")),
    *((r"1-\frac{1}{2^{99}}", r"1-\frac{1}{2^{100}}"), ("x+e^{-40}", "x+e^{-41}")),
    *((r"-1.6 \times 10^{-19}", r"1.6 \times 10^{-19}"), (r"10^{-30}\pi", r"10^{-31}\pi")),
    *((r"\sqrt{10^{60}+1}", "10^{30}"), (r"\frac{1}{2^{9998}}", r"\frac{1}{2^{9999}}")),
)
# A box is an answer unless it is a part of a formula.
IN_A_FORMULA = r"""
$-\boxed{5}$|$x \neq \boxed{5}$|$2\boxed{5}$|$\sqrt{\boxed{5}}$|$\frac{\boxed{5}}{2}$|\boxed{5}+1
$\frac{1}{\boxed{5}}$|$3 \cdot \boxed{5}$|$1/\boxed{5}$|$\boxed{5}^2$|$\boxed{5} \times 10^3$
\boxed{5}/2|\boxed{5}.5|\boxed{5}\pi|10^{\boxed{5}}|$x > \boxed{5}$|\boxed{5} thousand
$\boxed{5}$ million dollars|$\boxed{5}\text{ million}$
"""
BESIDE_WORDS = r"""
- $\boxed{5}$|$x = \boxed{5}$|$10 - 5 = \boxed{5}^\circ$|1. \boxed{5}|**\boxed{5}**|${\boxed{5}}$
So $a+b \geq \boxed{5}$.|$\boxed{5}\%$|-> \boxed{5}|\boxed{5}!|Step 2 --\boxed{5}|$\boxed{5}$.
\(\Rightarrow\boxed{5}\)|\boxed{5} is the answer|<answer>\boxed{5}</answer>|\fbox{5}
"""
# Behind a box, what is the same, and what is another.
BOXED_UNITS = (
    *((" hours", "5 hours", "5 minutes"), (" miles per hour.", "5 mph", "5 km/h")),
    *((" square meters", "5 m^2", "5 m"), ("$ in total", "5 cm", "6 in")),
)
SEVEN = r"Answer: \boxed{7}"
MISSING = (
    *((None, "7", "bad_input"), (SEVEN, None, "bad_input"), ("", "7", "no_answer")),
    *((SEVEN, "7" * (MAX_GROUND_TRUTH_CHARS + 1), "bad_input"), (SEVEN, " \n", EMPTY)),
    (r"Answer: \boxed{}", "", EMPTY),
)
VERDICTS = [
    *((rules, it, "7", status) for rules, rows in PLACES.items() for it, status in rows),
    *(("strict", f"Answer: {a}", b, "correct" if same else "wrong") for a, b, same in STRICT),
    *(("math_verify", f"Answer: {a}", b, "wrong") for a, b in NEARLY),
    *(("math_verify", f"Answer: {a}+0", a, "correct") for a, _ in NEARLY),
    ("math_verify", "Answer: (x+1)^2", "x^2+2x+1", "correct"),
    ("math_verify", "Answer: x^2", r"\frac{x}{", "unreadable_ground_truth"),
    *(("math_verify", it, "5", "not") for it in re.split(r"[|\n]", IN_A_FORMULA.strip())),
    *(("math_verify", it, "5", "correct") for it in re.split(r"[|\n]", BESIDE_WORDS.strip())),
    *(
        ("math_verify", rf"$\boxed{{5}}{unit}", truth, status)
        for unit, same, other in BOXED_UNITS
        for truth, status in ((same, "correct"), (other, "not"))
    ),
    *((rules, *row) for rules in LOCAL_RULES for row in MISSING),
]


@pytest.mark.parametrize(("rules", "response", "truth", "status"), VERDICTS)
def test_each_rule_has_its_place_for_the_answer_and_compares_values(rules, response, truth, status):
    verdict = verify(response, truth, rules=rules)
    assert verdict.correct == (status == "correct")
    assert status in ("not", verdict.status)


@pytest.mark.parametrize(
    ("rules", "every", "wrong_rewarded", "right_refused"),
    [
        ("dapo", 1, 195, 283),  # the reference's own
        ("strict", 1, 8, 200),
        ("strict_box", 1, 43, 417),
        ("math_verify", 8, 5, 1),
        # The 14: they have neither a line "Answer:" nor a box.
        pytest.param("math_verify", 1, 28, 14, marks=pytest.mark.slow),
    ],
)
def test_wrong_answers_are_not_rewarded(rules, every, wrong_rewarded, right_refused):
    """The rewarded wrong ones of `strict` and `math_verify` are all those that words take back.

    They say "Wait", "No, 43", "is not", "or maybe" beside the answer. The 43 of `strict_box` have
    such words, another box or a formula around theirs. Algebra takes its time: an eighth is fast.
    """
    rows = _rows(ROOT / "tests" / "answers.jsonl")
    assert len(rows) == 501 + 1446 and sum(row["right"] for row in rows) == 501
    rows = rows[::every]
    # A bare answer stands where the rules look for it.
    form = r"So $\boxed{%s}$." if rules == "strict_box" else "So\nAnswer: %s"
    responses = [row.get("response", form % row.get("answer", "")) for row in rows]
    verdicts = verify_many(responses, [row["truth"] for row in rows], rules=rules)
    wrong = [row for row, v in zip(rows, verdicts, strict=True) if v.correct > row["right"]]
    refused = [row for row, v in zip(rows, verdicts, strict=True) if v.correct < row["right"]]
    assert (len(wrong), len(refused)) == (wrong_rewarded, right_refused), (wrong, refused)


UNITS = r"""
\text{ m}| km|\mathrm{~km}|\mu\mathrm{m}| inches|\text{ s}| ms| min| hours| hr| yr|\mathrm{~kg}
 lb| l| cc|\mathrm{~m} / \mathrm{s}|\mathrm{~km} / \mathrm{s}| m/s^2|\text{ km/h}| mph|\mathrm{~J}
\text{ kg/m^3}|\text{ g/cm}^3| eV|\text{ MeV}|\text{ N·m}|\mathrm{~N}| mW| MW|^\circ\mathrm{C}| K
^\circ| rad|\%| dollars| points
"""


@pytest.mark.parametrize("rules", ["strict", "math_verify"])
@pytest.mark.parametrize("number", ["5", r"4.65 \times 10^{-5}"])
def test_another_unit_is_refused_and_no_unit_is_not(rules, number):
    units = [unit for line in UNITS.split("\n") for unit in line.split("|") if unit]
    same = [{" km", r"\mathrm{~km}"}, {" hours", " hr"}]
    pairs = [(one, other) for one in ("", *units) for other in units]
    answers = [f"Answer: {number}{one}" for one, _ in pairs]
    verdicts = verify_many(answers, [f"{number}{other}" for _, other in pairs], rules=rules)
    part_of_one = number != "5"  # which is no percent without its sign
    for pair, verdict in zip(pairs, verdicts, strict=True):
        agree = (not pair[0] and not (part_of_one and pair[1] == r"\%")) or pair[0] == pair[1]
        assert verdict.correct == (agree or {*pair} in same), pair


SAME_UNITS = r"""
6 hours|6\text{ hrs}|6\text{ hr.};7 pounds|7\text{ lbs}|7\text{ lb};3 kg|3\text{ kgs}|3 kilograms
;7 mph|7\text{ miles per hour}|7\text{ miles/hour};2\text{ ft/sec}|2\text{ feet per second}
;7 km/h|7\text{ km/hr}|7\text{ kilometers per hour}|7\text{ kph}
;9 years|9\text{ years old}|9\text{ yrs};8\text{ cm}^3|8\text{ cc}|8\text{ cubic centimeters}
"""


def test_spellings_of_a_unit_are_the_same():
    for spellings in SAME_UNITS.replace("\n", "").split(";"):
        first, *others = spellings.split("|")
        for other in others:
            assert verify(f"Answer: {other}", first, rules="strict").correct, other


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
def test_strict_form_is_a_fixed_point_that_grades_itself_right(alphabet):
    generator = random.Random(1)
    for _ in range(2000):
        form = strict_form(_soup(generator, alphabet, 60))
        assert strict_form(form) == form
        if form and len(form.splitlines()) == 1:
            assert verify(f"Answer: {form}", form, rules="strict").correct


PIECES = [r"\text{a", "{x=", "{*", "$a", "a b", "1'", ",", "()", "a(", "=1", r"\frac{"]


@pytest.mark.parametrize("rules", LOCAL_RULES)
def test_no_repetition_burns_cpu_and_megabytes_cost_no_more_than_their_tail(rules):
    for unit in (*LATEX, *UNICODE, *PIECES):
        text, tries = ("Answer: " + unit * 300)[:300], []
        for _ in range(3):
            start = time.process_time()
            verify(text, text, rules=rules)
            tries.append(time.process_time() - start)
        assert min(tries) < 0.01, ascii(unit)
    response = r"Answer: \boxed{" * 2_000_000 + "\nAnswer: \\boxed{7}"
    start = time.process_time()
    assert verify(response, "7", rules=rules).correct
    assert time.process_time() - start < 0.02


def test_line_ends_burn_no_cpu():
    start = time.process_time()
    for length in range(900, 1000):
        assert not verify("\n" * length, "5", rules="math_verify").correct
    assert time.process_time() - start < 1.0


HANGS = "Answer: $(x+y+z+w)^{99}$"  # ten seconds of the library's time


@pytest.fixture(scope="module")
def lone():
    """A worker alone, which the tests that harm it share; each leaves one that works."""
    with SymbolicVerifier(num_workers=1) as verifier:
        yield verifier


def pids_of(pool):
    """Lists the processes of the present workers."""
    return [worker.process.pid for worker in pool._workers]


def _has_ended(pid: int) -> bool:
    """Tells whether no thread of a process runs; one that is dead may not be collected yet."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        files = pathlib.Path(f"/proc/{pid}/task").glob("*/stat")
        return all(re.search(r"\) [ZX] ", file.read_text()) for file in files)
    return True


needs_proc = pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="needs /proc")


def test_math_verify_agrees_with_the_golden_rows(shared):
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
    verdicts = verify_many(responses, [row["gold"] for row in rows], rules="math_verify")
    graded = list(zip(rows, verdicts, strict=True))
    rewarded = [row["pred"] for row, verdict in graded if verdict.correct > row["expected"]]
    assert len(rows) == 188
    assert sum(verdict.correct == row["expected"] for row, verdict in graded) >= 161
    assert rewarded == ["10, 4, -2"]


def test_an_answer_that_hangs_is_ended_once_and_the_others_go_on(lone, monkeypatch):
    asked, ask, before = [], isolated.Worker.ask, pids_of(lone)

    def noting(worker, request, cpu_seconds):
        asked.append(request)
        return ask(worker, request, cpu_seconds)

    monkeypatch.setattr(isolated.Worker, "ask", noting)
    answers = ["Answer: 2^0", *[HANGS] * 16, "Answer: 2^1"]
    verdicts = lone.verify_many(answers, ["1", *["x^2"] * 16, "2"])
    assert [it.status for it in verdicts] == ["correct", *["timeout"] * 16, "correct"]
    assert pids_of(lone) == before and len(asked) == 3
    numbers = ("42", "43", r"\frac{84}{2}", "42.0", "42%", "9^{9^{9^9}}", "I give up after 42")
    lone.verify_many([f"Answer: {number}" for number in numbers], ["42"] * len(numbers))
    assert len(asked) == 3


def test_a_worker_that_is_killed_at_work_changes_no_verdict(lone):
    (before,) = pids_of(lone)
    killer = threading.Timer(0.3, os.killpg, (before, signal.SIGKILL))
    killer.start()
    verdicts = lone.verify_many([HANGS, "Answer: 2^1"], ["x^2", "2"])
    assert [verdict.status for verdict in verdicts] == ["timeout", "correct"]
    (after,) = pids_of(lone)
    assert after != before


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_replaced(monkeypatch):
    monkeypatch.setattr(isolated, "SILENCE_SECONDS", 3.0)
    with SymbolicVerifier(num_workers=1, cpu_seconds=0.4) as verifier:
        assert verifier.verify_many(["Answer: 2^1+x"], ["x+2"])[0].correct
        (before,) = pids_of(verifier)
        os.kill(before, signal.SIGSTOP)
        start = time.monotonic()
        answers = [f"Answer: x+2^{power}" for power in range(20)]
        verdicts = verifier.verify_many(answers, [f"{2**power}+x" for power in range(20)])
        assert [verdict.status for verdict in verdicts] == ["correct"] * 20
        # Were each answer to wait for itself, it took 80 s; a busy host's workers start slowly.
        assert time.monotonic() - start < 60 and pids_of(verifier) != [before]


def test_a_pool_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(isolated, "_PROGRAM", "import sys; sys.exit(7)")
    monkeypatch.setattr(isolated, "STARTS", 2)
    message = r"2 workers of .* in a row were never"
    with SymbolicVerifier(1) as verifier, pytest.raises(ChildProcessError, match=message):
        verifier.verify_many(["Answer: 2^1"], ["2"])


def test_a_busy_host_changes_no_verdict(lone):
    """The limit is of CPU time: an answer may wait for a core."""
    (worker,) = pids_of(lone)
    os.killpg(worker, signal.SIGSTOP)
    resumed = threading.Timer(1.5, os.killpg, (worker, signal.SIGCONT))
    resumed.start()
    assert lone.verify_many(["Answer: 2^1"], ["2"])[0].correct
    resumed.join()


def test_an_answer_that_wants_all_memory_gets_a_gigabyte():
    program = (
        "from dapo_jax.verifier.isolated import answered_in_child\n"
        "for mib in (1100, 10):\n"
        "    reply = answered_in_child(lambda: bytes(bytearray(mib << 20)[:9]), 5.0)\n"
        "    print(reply.status, len(reply.answer))\n"
    )
    assert ran("-c", program).stdout.split() == ["memory", "0", "done", "9"]


@needs_proc
def test_workers_load_no_jax_and_end_with_the_block():
    with SymbolicVerifier(num_workers=1) as verifier:
        assert verifier.verify_many(["Answer: 2^1"], ["2"])[0].correct
        (pid,) = pids_of(verifier)
        assert "jaxlib" not in pathlib.Path(f"/proc/{pid}/maps").read_text()
    wait_for(lambda: _has_ended(pid), seconds=20)
    with pytest.raises(RuntimeError, match="shutdown"):
        verifier.verify_many(["Answer: 2^1"], ["2"])


@needs_proc
def test_workers_keep_time_where_its_signal_is_ignored_and_end_with_a_killed_process():
    """Workers inherit what the run ignores; the TPU's compiler leaves it with SIGPROF ignored."""
    program = (
        "import os, signal\n"
        "from dapo_jax.verifier.symbolic_rules import SymbolicVerifier\n"
        "signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"  # which `ran` reads to its end
        "verifier = SymbolicVerifier(num_workers=1, cpu_seconds=0.2)\n"
        f"(verdict,) = verifier.verify_many([{HANGS!r}], ['x^2'])\n"
        "print(verdict.status, verifier._workers[0].process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status, pid = ran("-c", program, status=-signal.SIGKILL).stdout.split()
    assert status == "timeout"
    wait_for(lambda: _has_ended(int(pid)), seconds=20)
