r"""Grades a response against a ground truth: the reference's rules, stricter ones, symbolic ones.

Nothing here raises on any response or ground truth, and nothing that is missing, empty or not text
is ever rewarded. `Verdict.status` says why, so that every kind of failure can be counted.

Rules
* `dapo`: what the published DAPO runs were trained with, false verdicts included (`dapo_form`).
* `strict`: the same contract ("Answer: $Answer" on a line of its own) read exactly (`strict_form`).
* `strict_box`: the last `\boxed{...}` of the last 100 characters, compared character by character.
* `math_verify`: symbolic equivalence by the library of that name, in worker processes
  that are killed when they hang (`SymbolicVerifier`).

Two deliberate differences from the reference: a response without an answer has the prediction
`None` (the reference's string "[INVALID]", which it rewards where the ground truth is that very
string), and an empty prediction never equals an empty ground truth (its box mode rewards that).
"""

import atexit
import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import multiprocessing
import multiprocessing.connection
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from dapo_jax.types import Verdict

RULES = ("dapo", "strict", "strict_box", "math_verify")
STATUSES = (
    "correct",
    "wrong",
    "no_answer",  # the response has no answer where the rules look for one
    "empty_answer",  # it has one, with nothing in it
    "empty_ground_truth",
    "bad_input",  # not a string, or a ground truth longer than MAX_GROUND_TRUTH_CHARS
    "unreadable_answer",  # math_verify only, as are all below
    "unreadable_ground_truth",
    "timeout",
    "crashed",
)

TAIL_CHARS = 300
BOX_TAIL_CHARS = 100
SYMBOLIC_TAIL_CHARS = 1000
MAX_GROUND_TRUTH_CHARS = 1000
SYMBOLIC_WORKERS = 2
SYMBOLIC_TIMEOUT_SECONDS = 5.0
WORKER_START_SECONDS = 120.0
WORKER_MEMORY_BYTES = 4 << 30


def verify(response: str, ground_truth: str, *, rules: str) -> Verdict:
    """Grade one response (Eq. 7's equivalence) by one of RULES.

    response: the decoded response without special tokens; only its tail is read, so its length
    costs nothing. Raises ValueError for unknown rules, and for no response or ground truth;
    `math_verify` raises what SymbolicVerifier raises when its workers cannot be started.
    """
    return verify_many([response], [ground_truth], rules=rules)[0]


def verify_many(
    responses: Sequence[str], ground_truths: Sequence[str], *, rules: str
) -> list[Verdict]:
    """`verify` for pairs, in order; under `math_verify` they share the default worker pool.

    Raises ValueError where the two lengths differ, and as `verify` does.
    """
    if rules not in RULES:
        raise ValueError(
            f"verifier.rules is {rules!r}; it must be one of {', '.join(RULES)} "
            "(config key `verifier.rules`)"
        )
    if rules == "math_verify":
        return _default_symbolic_verifier().verify_many(responses, ground_truths)
    grade = {"dapo": _grade_dapo, "strict": _grade_strict, "strict_box": _grade_box}[rules]
    return [
        _refuse(response, truth) or grade(response, truth)
        for response, truth in _pairs(responses, ground_truths)
    ]


def _pairs(responses: Sequence[str], ground_truths: Sequence[str]) -> list[tuple[str, str]]:
    if len(responses) != len(ground_truths):
        raise ValueError(f"{len(responses)} responses but {len(ground_truths)} ground truths")
    return list(zip(responses, ground_truths, strict=True))


def _refuse(response: object, truth: object) -> Verdict | None:
    """The verdict on a pair that no rules can grade; None for a pair of usable strings."""
    if not isinstance(response, str) or not isinstance(truth, str):
        return Verdict(False, None, "bad_input")
    return Verdict(False, None, "bad_input") if len(truth) > MAX_GROUND_TRUTH_CHARS else None


def _compare(prediction: str | None, truth: str) -> Verdict:
    """Equality of two normal forms, where nothing missing or empty equals anything."""
    if not truth.strip():
        return Verdict(False, prediction, "empty_ground_truth")
    if prediction is None:
        return Verdict(False, None, "no_answer")
    if not prediction.strip():
        return Verdict(False, prediction, "empty_answer")
    correct = prediction == truth
    return Verdict(correct, prediction, "correct" if correct else "wrong")


# Rules "dapo" and "strict_box".

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# In this order: each replacement sees the text that the ones before it left.
_MINERVA_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_MINERVA_REMOVED = (  # in this order too, separated by single spaces
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples "
    "\\text{s} \\text{.} \\text{\ns} \\text{}^2 \\text{}^3 \\text{\n} \\text{} "
    '\\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)
_MINERVA_UNWRAPPED = (  # an opening, and the reading of what is inside up to the closing brace
    (re.compile(r"\\text\{([^}\n]*)\}"), r"\1"),
    (re.compile(r"\\textbf\{([^}\n]*)\}"), r"\1"),
    (re.compile(r"\\overline\{([^}\n]*)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def dapo_form(answer: str) -> str:
    r"""The reference's normal form of an answer: Minerva's (Lewkowycz et al. 2022, appendix D.1).

    The part after the last "=", without articles, spaces, a list of units, quotes and LaTeX
    wrappers, only the inside of the first "$...$", `\frac12` and `\sqrt2` with braces, a string of
    digits without commas. Words are removed wherever they occur ("banana " loses its "a "): so does
    the reference, and `strict_form` lists what comes of it.
    """
    text = answer.rsplit("=", 1)[-1]
    for old, new in _MINERVA_REPLACED:
        text = text.replace(old, new)
    for word in _MINERVA_REMOVED.split(" "):
        text = text.replace(word, "")
    text = "\n".join(_inside_dollars(line) for line in text.split("\n"))
    for pattern, inside in _MINERVA_UNWRAPPED:
        text = pattern.sub(inside, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


def _inside_dollars(line: str) -> str:
    parts = line.split("$", 2)
    return parts[1] if len(parts) == 3 else line


def _grade_dapo(response: str, truth: str) -> Verdict:
    answers = _ANSWER.findall(response[-TAIL_CHARS:])
    return _compare(dapo_form(answers[-1]) if answers else None, dapo_form(truth))


def _grade_box(response: str, truth: str) -> Verdict:
    return _compare(_last_box(response[-BOX_TAIL_CHARS:]), truth)


def _last_box(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    opening = start + len(r"\boxed")
    closing = _closing_brace(text, opening)
    return None if closing is None else text[opening + 1 : closing]


def _closing_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return None


# Rules "strict".

_ANSWER_LINE = re.compile(
    r"[\W_]{0,20}(?:(?:the|my)\s{1,4})?(?:final\s{1,4})?answer[\s*_]{0,8}[:\uff1a](.*)",
    re.IGNORECASE,
)
_PLAIN_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u200b\u2060\ufeff"),  # zero width
        **dict.fromkeys("\u2010\u2011\u2013\u2212", "-"),
        **dict.fromkeys('`"\u201c\u201d$', " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        "\uff0c": ",",
        "\uff0e": ".",
        "\uff05": "%",
    }
)
_STRICT_REPLACED = (
    (re.compile(r"\\!"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:[()\[\],;: ]|q?quad(?![a-zA-Z])|displaystyle(?![a-zA-Z]))|\*\*"), " "),
    (re.compile(r"\s+"), " "),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac ?([0-9])"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\{[^{}]*\}) ?([0-9])"), r"\1{\2}"),
    (re.compile(r"\\sqrt ?([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<!\w) | (?!\w)"), ""),  # a space says something only between two words
)
_STYLE = re.compile(r"\\(?:boxed|fbox|textbf|mathbf|bm|textit|mathit|emph)\{")
_WRAPPER = re.compile(r"(?:\\(?:text|textrm|mathrm|mbox))?\{")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_SUBSCRIPT_OR_ARGUMENT = re.compile(r"_(?:\{\w+\}|\w)|(?<=[a-zA-Z])\([^()]*\)")
_LITERAL = re.compile(
    r"[+-]?(?:(?:[0-9]{1,3}([ ,'])[0-9]{3}(?:\1[0-9]{3})*|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_FRACTION = re.compile(r"([+-]?)([0-9]*)\\frac\{([^{}]*)\}\{([^{}]*)\}")
_UNIT_WORDS = (
    "units? points? ways? integers? digits? students? edges? meals? multiples? solutions? pairs? "
    "dollars? cents? pounds? degrees? people children tickets? "
    "seconds? minutes? hours? days? weeks? months? years? "
    "mm cm km km/h mph inch(?:es)? ft feet met(?:er|re)s? kilomet(?:er|re)s? miles? "
    "gm kg grams? kilograms? lit(?:er|re)s? 个 個 元 度 种 種 人"
)
_UNIT = re.compile(
    r" ?(?:%|°|\^\\circ|\^\{\\circ\}"
    r"|(?:\\(?:text|textrm|mathrm|mbox)\{(?![^{}]*\b(?:or|not)\b)[^{}0-9]*\}"
    rf"|(?:square |cubic |children )?(?:{'|'.join(_UNIT_WORDS.split())}))"
    r"(?:\^[23]|\^\{[23]\}|[²³])?)$"
)
_MAX_PASSES = 100  # two or three do, except for strings made to nest


def strict_form(answer: str) -> str:
    r"""The normal form of an answer under the rules "strict"; a fixed point of itself.

    Integers, decimals and fractions become the exact rational ("42", "-1/2"); anything else the
    string without what says nothing: markup, math delimiters, wrappers, spacing, a name before "=".

    Right answers that the reference calls wrong:
      `42.`  `**42**`  `**Answer:** 42`  `**Answer: 42**`  `Answer**: 42`  `*42*`  `` `42` ``
      `\(42\)`  `\[42\]`  `$$42$$`  `$\displaystyle 42$`  `\boxed{42}.`  `\fbox{42}`  `{42}`
      `42%`  `42 seconds`  `42 km/h`  `42°`  `42 个`  `+42`  `42.0`  `1,000.50`  `1\,000`  `1'000`
      `m+n = 42.`  `\tfrac{1}{2}`, `\frac{1}2` and `0.5` for `\frac{1}{2}`  `\frac{-1}{2}`
      `–7` (en dash)  full-width digits and colon  a number on the line after `\[` or `$$`
    Wrong answers that it calls right:
      `41=42` (two numbers)  `4 2`  `12,34` for 1234  `35` for `3,5`  `42\text{0}` for 420
      `$42$ or $43$` (it reads the first)  `square 42`, `a 42`, `ways42` (words cut out anywhere)
      `5\dots`, `\overline{5}` for 5, and `... my Answer: 42` inside a sentence.
    What stays wrong: a sum or product not carried out, also before "=" (`40+2=42`); words for
    numbers; powers of ten; two answers, also as a list with "and". Units and "%" are dropped, not
    converted.
    """
    text = answer
    for _ in range(_MAX_PASSES):
        simpler = _simplify(text)
        if simpler == text:
            break
        text = simpler
    return text


def _simplify(text: str) -> str:
    text = _without_styles(text.translate(_PLAIN_CHARACTERS))
    for pattern, new in _STRICT_REPLACED:
        text = pattern.sub(new, text)
    text = text.lstrip("*_: ").rstrip("*_,;:。、 ")
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1]
    while (wrapper := _WRAPPER.match(text)) and _closing_brace(text, wrapper.end() - 1) == (
        len(text) - 1
    ):
        text = text[wrapper.end() : -1]
    return _exact(_last_side(text))


def _without_styles(text: str) -> str:
    r"""Spaces for `\boxed{`, `\textbf{` and the like, and for the braces that close them."""
    styles = {match.end() - 1: match.start() for match in _STYLE.finditer(text)}
    if not styles:
        return text
    characters = list(text)
    openings = []
    for index, character in enumerate(text):
        if character == "{":
            openings.append(index)
        elif character == "}" and openings:
            opening = openings.pop()
            if opening in styles:
                start = styles[opening]
                characters[start : opening + 1] = " " * (opening + 1 - start)
                characters[index] = " "
    return "".join(characters)


def _last_side(text: str) -> str:
    """What follows the last "=", if all before it are names (x, m+n, f(2), a_1) or that number."""
    *others, last = _EQUALS.split(text)
    value = _number(last)
    for side in dict.fromkeys(others):  # each once: repetition costs no time
        name = _SUBSCRIPT_OR_ARGUMENT.sub("", side)
        is_name = not any(character.isdigit() or character == "," for character in name)
        if not is_name and (value is None or _number(side) != value):
            return text
    return last


def _exact(text: str) -> str:
    value = _number(text)
    return text if value is None else str(value)


def _number(text: str) -> Fraction | None:
    """The exact value of a decimal, a fraction or a mixed number, with or without a unit."""
    text = _UNIT.sub("", text)
    if match := _FRACTION.fullmatch(text):
        sign, whole, top, bottom = match.groups()
    else:
        sign, whole = "", ""
        top, slash, bottom = text.partition("/")
        bottom = bottom if slash else "1"
    whole_value, top_value, bottom_value = map(_literal, (whole or "0", top, bottom))
    if whole_value is None or top_value is None or not bottom_value:
        return None
    value = whole_value + top_value / bottom_value
    return -value if sign == "-" else value


def _literal(text: str) -> Fraction | None:
    if len(text) > MAX_GROUND_TRUTH_CHARS or not _LITERAL.fullmatch(text):
        return None
    return Fraction(re.sub("[ ,']", "", text))


def _last_answer(response: str) -> str | None:
    """What the last line "Answer: ..." says, there or on the first line after it that says any."""
    lines = response[-TAIL_CHARS - 1 :].splitlines()
    if len(response) > TAIL_CHARS:
        lines = lines[1:]  # its beginning was cut off
    for index in reversed(range(len(lines))):
        if match := _ANSWER_LINE.match(lines[index]):
            candidates = [match[1], *lines[index + 1 :]]
            return next((line for line in candidates if line.strip() and strict_form(line)), "")
    return None


def _grade_strict(response: str, truth: str) -> Verdict:
    answer = _last_answer(response)
    return _compare(None if answer is None else strict_form(answer), strict_form(truth))


# Rules "math_verify".

# A fresh interpreter: forking is unsafe beside JAX's threads, and multiprocessing's own "spawn"
# would import the main module, and JAX with it, again in every worker.
_WORKER_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dapo_jax.tasks.math_rules import _serve
_serve(int(sys.argv[2]), float(sys.argv[3]))
"""
_MATH_MARKUP = re.compile(r"\$|\\\(|\\\[|\\boxed")


class SymbolicVerifier:
    """Rules "math_verify": symbolic equivalence, in processes that cannot hang or harm this one.

    It reads the last "Answer:" line as "strict" does; without one, the library looks for an answer
    (boxed, a formula, a number) in the last SYMBOLIC_TAIL_CHARS of the response. The library is
    lenient by design: `41=42` is 42, `3+2` is 5, `0.5` is 50%.

    A worker that takes longer than `timeout_seconds` for one pair, or dies, is replaced; the answer
    is wrong, with the status "timeout" or "crashed". Workers start at once and live until `close`,
    the end of the `with` block or of the process, and exit on their own when this process is gone.
    Safe to share by threads.

    Raises ImportError without math-verify, ValueError for a number of workers or a time that is not
    positive, and RuntimeError where a worker dies or hangs before it is ready.
    """

    def __init__(self, num_workers: int, timeout_seconds: float) -> None:
        if num_workers < 1 or timeout_seconds <= 0:
            raise ValueError(
                f"{num_workers} workers with {timeout_seconds} seconds: both must be positive"
            )
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError('the rules "math_verify" need the package math-verify')
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._workers = [_Worker(timeout_seconds) for _ in range(num_workers)]
        atexit.register(self.close)

    def __enter__(self) -> "SymbolicVerifier":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers; safe to repeat."""
        atexit.unregister(self.close)
        with self._lock:
            for worker in self._workers:
                worker.kill()
            self._workers = []

    def worker_pids(self) -> list[int]:
        """Process ids of the present workers; a replaced worker's is gone from the list."""
        return [worker.process.pid for worker in self._workers]

    def verify(self, response: str, ground_truth: str) -> Verdict:
        """`verify_many` for one pair."""
        return self.verify_many([response], [ground_truth])[0]

    def verify_many(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
        """Verdicts in the order of the pairs; as many at a time as there are workers.

        Raises ValueError where the lengths differ, RuntimeError after `close`.
        """
        pairs = _pairs(responses, ground_truths)
        verdicts: dict[int, Verdict] = {}
        jobs: deque[_Job] = deque()
        for index, (response, truth) in enumerate(pairs):
            if refused := _refuse(response, truth):
                verdicts[index] = refused
                continue
            answer = _last_answer(response)
            answers = _spellings(answer) if answer else [response[-SYMBOLIC_TAIL_CHARS:]]
            if answer == "" or not response.strip() or not truth.strip():
                verdicts[index] = _compare(answer, truth)
            else:
                jobs.append(_Job(index, answers, _spellings(truth)))
        with self._lock:
            self._run(jobs, verdicts)
        return [verdicts[index] for index in range(len(pairs))]

    def _run(self, jobs: "deque[_Job]", verdicts: dict[int, Verdict]) -> None:
        if not self._workers:
            raise RuntimeError("this SymbolicVerifier is closed")
        try:
            while jobs or any(worker.job for worker in self._workers):
                for worker in list(self._workers):
                    if jobs and worker.ready and not worker.job:
                        self._ask(worker, jobs)
                self._collect(verdicts)
        finally:  # after an exception: no answer to this call may reach the next one
            for worker in [worker for worker in self._workers if worker.job]:
                self._replace(worker)

    def _ask(self, worker: "_Worker", jobs: "deque[_Job]") -> None:
        try:
            worker.connection.send((jobs[0].answers, jobs[0].truths))
        except OSError:
            self._replace(worker)  # it died idle, which is no answer's fault
            return
        worker.job = jobs.popleft()
        worker.deadline = time.monotonic() + self._timeout_seconds

    def _collect(self, verdicts: dict[int, Verdict]) -> None:
        """Wait until a busy or starting worker speaks or the first deadline passes."""
        waited = [worker for worker in self._workers if worker.job or not worker.ready]
        patience = min((worker.deadline for worker in waited), default=0.0) - time.monotonic()
        readable = multiprocessing.connection.wait(
            [worker.connection for worker in waited], max(0.0, patience)
        )
        for worker in waited:
            if worker.connection in readable:
                verdict = worker.receive()
            elif time.monotonic() < worker.deadline:
                continue
            else:
                verdict = Verdict(False, None, "timeout")
            if not worker.ready and verdict is not None:
                raise RuntimeError(
                    f"a math_verify worker was not ready within {WORKER_START_SECONDS:.0f} s "
                    f"(exit code {worker.process.poll()}); what it said is on the error output"
                )
            if worker.job and verdict is not None:
                verdicts[worker.job.index] = verdict
            worker.job, worker.ready = None, True
            if verdict is not None and verdict.status in ("timeout", "crashed"):
                self._replace(worker)

    def _replace(self, worker: "_Worker") -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(self._timeout_seconds)


class _Job(NamedTuple):
    index: int
    answers: list[str]
    truths: list[str]


class _Worker:
    """One interpreter that grades one pair at a time over a pipe.

    `ready` once its imports are done; `deadline` (time.monotonic) is for them, then for `job`.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.connection, far_end = multiprocessing.Pipe()
        arguments = [
            json.dumps([str(path) for path in sys.path]),
            str(far_end.fileno()),
            str(timeout_seconds),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", _WORKER_PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[far_end.fileno()],
        )
        far_end.close()
        self.job: _Job | None = None
        self.ready = False
        self.deadline = time.monotonic() + WORKER_START_SECONDS

    def receive(self) -> Verdict | None:
        """Its verdict, "crashed" if it is gone, or None: it is ready."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return Verdict(False, None, "crashed")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


@functools.cache
def _default_symbolic_verifier() -> SymbolicVerifier:
    return SymbolicVerifier(SYMBOLIC_WORKERS, SYMBOLIC_TIMEOUT_SECONDS)


def _serve(pipe: int, timeout_seconds: float) -> None:
    """A worker's life: grade what comes through the pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, hard_limit))
    logging.disable(logging.CRITICAL)
    importlib.import_module("math_verify")
    connection = multiprocessing.connection.Connection(pipe)
    connection.send(None)
    while True:
        try:
            answers, truths = connection.recv()
        except (EOFError, OSError):
            return
        # The parent kills a late worker; an orphan is ended by this alarm's default action.
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout_seconds + 1)
        try:
            verdict = _grade_symbolic(answers, truths)
        except Exception:
            return  # the closed pipe says "crashed", and a fresh worker takes over
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(verdict)


def _spellings(text: str) -> list[str]:
    """The text as the library wants it: without math markup, as a formula first."""
    return [text] if _MATH_MARKUP.search(text) else [f"${text}$", text]


def _grade_symbolic(answers: list[str], truths: list[str]) -> Verdict:
    """The library's verdict; runs inside a worker, because it may take forever."""
    import math_verify

    answer, truth = _read_symbolic(answers), _read_symbolic(truths)
    if not answer:
        return Verdict(False, None, "unreadable_answer")
    prediction = next((part for part in answer if isinstance(part, str)), answers[-1])
    prediction = prediction[:TAIL_CHARS]
    if not truth:
        return Verdict(False, prediction, "unreadable_ground_truth")
    correct = math_verify.verify(truth, answer, timeout_seconds=None)
    return Verdict(correct, prediction, "correct" if correct else "wrong")


def _read_symbolic(spellings: list[str]) -> list:
    """What the library reads in the first of the spellings that it can read."""
    import math_verify

    targets = [
        math_verify.LatexExtractionConfig(boxed_match_priority=0),
        math_verify.ExprExtractionConfig(),
    ]
    for text in spellings:
        if readings := math_verify.parse(text, targets, parsing_timeout=None):
            return readings
    return []
