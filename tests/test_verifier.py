"""The rules that grade responses: parity with the reference, where the answer is, and hardness.

Which answers are equal is in test_answers.py.
"""

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
from processes import ran, wait_for

from dapo_jax.verifier import Verdict, isolated, verify
from dapo_jax.verifier.grammar import spelling
from dapo_jax.verifier.math_rules import MAX_GROUND_TRUTH_CHARS
from dapo_jax.verifier.symbolic_rules import SymbolicVerifier

EMPTY = "empty_ground_truth"
LOCAL_RULES = ["dapo", "strict", "strict_box"]


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
        ("Answer: 7 \\text{ or } 8", "wrong"),
        ("Answer: 7\nWait.\nAnswer: 6", "wrong"),
    ),
    "symbolic": (
        (r"Answer: \frac{14}{2}", "correct"),
        (r"So it is $\boxed{7}$.", "correct"),
        ("So the answer is 7.", "no_answer"),
        (r"\boxed{6}. So the answer is 7.", "correct"),
        (r"\boxed{7}. So the answer is 6.", "wrong"),
        ("Answer:", "empty_answer"),
        (r"Answer: \frac{2}{", "wrong"),
        ("Answer: seven", "unreadable_answer"),
        ("Answer: 9^{9^{9^{9}}}", "too_large"),
        ("Answer: \ud800", "wrong"),
        (None, "bad_input"),
    ),
    "math_verify": (
        (r"So it is $\boxed{7}$.", "correct"),
        (r"So it is $\frac{15}{2}$", "wrong"),
        ("I do not know", "no_answer"),
        (None, "bad_input"),
    ),
}
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
    *(("symbolic", it, "5", "not") for it in re.split(r"[|\n]", IN_A_FORMULA.strip())),
    *(("symbolic", it, "5", "correct") for it in re.split(r"[|\n]", BESIDE_WORDS.strip())),
    *(
        ("symbolic", rf"$\boxed{{5}}{unit}", truth, status)
        for unit, same, other in BOXED_UNITS
        for truth, status in ((same, "correct"), (other, "not"))
    ),
    *((rules, *row) for rules in LOCAL_RULES for row in MISSING),
]


@pytest.mark.parametrize(("rules", "response", "truth", "status"), VERDICTS)
def test_each_rule_has_its_place_for_the_answer(rules, response, truth, status):
    verdict = verify(response, truth, rules=rules)
    assert verdict.correct == (status == "correct")
    assert status in ("not", verdict.status)


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
def test_any_line_grades_itself_right(alphabet):
    generator = random.Random(1)
    for _ in range(2000):
        text = _soup(generator, alphabet, 60)
        if spelling(text) and len(f"{text}|".splitlines()) == 1 and "nswer" not in text:
            assert verify(f"Answer: {text}", text, rules="strict").correct, text


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
        assert not verify("\n" * length, "5", rules="symbolic").correct
    assert time.process_time() - start < 1.0


HANGS = r"Answer: \int_0^1 \frac{\sqrt{\tan x}}{x^9+1} dx"


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
    numbers = ("42", "43", r"\frac{84}{2}", "42.0", "42%", "I give up after 42")
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
    monkeypatch.setattr(isolated, "TRIES", 2)
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
