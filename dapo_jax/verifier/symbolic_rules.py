r"""Reads and compares answers by the rules "math_verify"; the library has the last word only.

`decide` settles all that needs no algebra: equal texts, numbers, texts that are no formula, and
formulas that are too large. `grade_symbolic` asks the library about the rest, in a process with
limits (`isolated`): whole formulas only, and the numbers in a chain of "=" must equal its last
side.
"""

import collections
import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from dapo_jax.types import Verdict
from dapo_jax.verifier import isolated, math_rules
from dapo_jax.verifier.units import DOUBT, TEXT, TEXT_GROUP, differ, split_unit

SYMBOLIC_TAIL_CHARS = 1000
MAX_FORMULA_CHARS = 500
MAX_NESTING = 25
MAX_DIGITS = 60  # of one number in a formula
MAX_EXPONENT = 10_000
PRECISION = 1_000  # decimals; the library takes a smaller difference for none
MAX_RANGE = 1_000  # of factorials, binomials, sums and products; cells of matrices

# Where the answer is.

_BOX = re.compile(r"\\f?box(?:ed)?\{")
_BETWEEN_BOXES = re.compile(
    r"|(?=[^,]*,)(?:[\s$,;{}&]|\\[()\[\],;: ]|\\q?quad)*"
    rf"|(?=.*\b(?:and|or)\b)(?:(?!{DOUBT}|\b(?:answer|so|thus|hence)\b)[^.;:!\n]){{0,90}}"
)
# The box is a part of a formula.
_OF_MORE = re.compile(
    r"(?:\\neq? ?|≠ ?|\\(?:cdot|times|[lg]t) ?|\\(?:sqrt|[dt]?frac)\{|[}_^]\{|[\d/^]|(?<!-)-"
    r"|(?<![\w</])[\w)}]{1,3} ?[<>] ?"
    r"|(?:(?<=[^-\n])[-\u2212+]|\\pm|\\(?:ln|log|pi|theta|alpha)|\\sqrt ?\w)"
    r"(?: |\\[;,!:]|\\left[(\[])*\$?)$"
)
_GOES_ON = re.compile(
    r"\^(?!\{?\\circ)| ?\\(?:cdot|times|div|pm|pi|sqrt|[dt]?frac|ln|log)(?![a-z])|\.?\d"
    r"| ?\\(?:theta|alpha|sin|cos|left)(?![a-z])| ?\\mathrm\{[a-z]\}|,\d{3}|:\d| ?- ?\d"
    r"| ?\((?=[\w+-]+\))|[ $]*or \$?\d"
    r"| ?[+/] ?(?:[\d\\({]|\w\b)|[abceiknpqruwxyzR](?![a-z])"
    r"|[ $]*(?:thousand|[mbt]r?illion|dozen)\b"
)
# The unit behind a box; "in" is most often no inch.
_BEHIND = re.compile(
    rf"\}}?\$?((?:\\[,;: ]|[ ~])*(?:{TEXT}\{{[ ~]*(?!(?:is|as|for|where)\b)\w[^{{}}]*\}}|(?<= )"
    r"(?!(?:in|A) \w)(?:(?:square|cubic) )?[A-Za-z]+\b)(?:(?: per |/)[A-Za-z]+)?(?:\^\{?\d\}?)?|)"
)
_LEAD_IN = (
    r"(?:(?:so|thus|hence|therefore|then|and|finally|it follows that"
    r"|we (?:find|get|have|obtain|conclude)(?: that)?)\b[\s,:*]*)"
)
_THE_ANSWER = r"(?:(?:the|our|my)\s+)?(?:(?:final|correct)\s+)?(?:answer|result|solution)"
_PHRASE = re.compile(
    rf"(?i)(?:(?:^|[.!?:\n])[^\w.!?:\n]*{_LEAD_IN}{{0,2}}{_THE_ANSWER}"
    r"(?:\s+(?:is|equals|(?:should|must|would) be)\b\s*:?|(?=\s*(?:\$|\\[(\[])))|(?:^|\n)####)(?!"
    r"\s*(?:an?\b|[a-z]{2})|[^.,;\n]* (?:if|when) )\s*((?:(?:\\\[|\$\$)\s*)?[^\n]+?)(?=\.(?:\s|$)"
    r"|\n|$)"
)
# "The largest $n$ is 34", "There are 34 ways", "John has 34 apples": up to the end of the sentence.
_CLAIM = re.compile(
    rf"(?i)(?:(?!{DOUBT}|\bI\b)[^\d.;:=\n])*?(?:(?:there (?:are|is)|(?<!we )\b(?:has|have|needs?"
    r"|costs?|paid|earned|travels at))\s+(?P<number>[$\\-]*\d[\d,]*)\$?(?P<noun>(?: [a-z-]+)*?)"
    r"(?: in total)?|(?:\b(?:is|are|equals)\b(?!.*: ?\$):?|:(?= ?\$)) *(?P<value>.+?))(?=\.\s|\.?$)"
)


def find_answer(response: str) -> str | None:
    r"""Finds the answer; None where there is none.

    It is the last line "Answer: ..."; without one the last `\boxed{...}`, with those joined to it
    by "," or "and", or the value of a sentence "The answer is ..." after the box.
    """
    answer, tail = math_rules.last_answer(response), response[-SYMBOLIC_TAIL_CHARS:]
    if answer is not None or not (boxes := _boxes(tail)):
        return answer
    *_, phrase = [None, *_PHRASE.finditer(tail)]
    return phrase[1] if phrase and phrase.start() > boxes[-1][2] else _last_boxes(tail)


def _claimed(sentence: str) -> str:
    """Returns the value that a sentence states, or all of it."""
    sentence = re.sub(rf"(?i)^\s*{_LEAD_IN}+|\s+is\s+{_THE_ANSWER}\.?$", "", sentence)
    if not (claim := _CLAIM.match(TEXT_GROUP.sub(r"\1", sentence))):
        return sentence
    return claim["value"] or rf"{claim['number']}\text{{{claim['noun']}}}"


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Finds the outermost boxes: start, start of the inside, end of the inside."""
    boxes, end = [], 0
    for match in _BOX.finditer(text):
        closing = math_rules.closing_brace(text, match.end() - 1)
        if closing is not None and match.start() >= end:
            boxes.append((match.start(), match.end(), closing))
            end = closing
    return boxes


def _last_boxes(text: str) -> str | None:
    """Joins the last boxes, with the unit behind them; None where they are part of a formula."""
    if not (boxes := _boxes(text)):
        return None
    joined = [boxes.pop()]
    rest = text[joined[0][2] + 1 :]
    while boxes and _BETWEEN_BOXES.fullmatch(text[boxes[-1][2] + 1 : joined[0][0]]):
        joined.insert(0, boxes.pop())
    if _OF_MORE.search(text[max(0, joined[0][0] - 60) : joined[0][0]]) or _GOES_ON.match(rest):
        return None
    answer = ", ".join(text[start:end] for _, start, end in joined)
    unit = _BEHIND.match(rest)[1]
    known = TEXT_GROUP.search(unit) or split_unit(f"1{unit}", of_number=True)[0] == "1"
    return answer + unit * (known and not math_rules.read_answer(answer).unit)


# What needs no algebra.

# R and r are two letters.
_WORD = re.compile(r"(?i)\w+ [\w ]+|[a-z]?[a-z]{4,}|yes|no|odd|all|[a-e]")
_LETTERS = re.compile(r"[A-Za-z]{3,}|\b(?:or|no|to|if|is|in|at|of|by)\b", re.IGNORECASE)
_COMMAND = re.compile(r"\\(?:begin|end)\{\w+\}|\\(?:operatorname|mathbb)\{\w+\}|\\[A-Za-z]+")
_FUNCTIONS = re.compile(r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|exp|sqrt|gcd|lcm|max|min|mod")
_AND = re.compile(rf",?(?:{TEXT}\{{)?,? ?\b(?:and|or)\b ?\}}?,?")
_ORDER = re.compile(
    r"^\[|[<>≤≥≠≈~]|^[^|]*\|[^|]*$"
    r"|\\(?:[lg]eq?q?|leqslant|geqslant|neq?|approx|sim|equiv|in)(?![a-z])"
)
_CLIPPED = re.compile(r"\.\.|\^\{?\\circ|…|\\[a-z]?dots|\\overline|\\overset|\\[bp]?mod(?![a-z])")
_BASE = re.compile(r"(?<=[\d)])_(?:\{?(\w+)\}?)")
_DERIVATIVE = re.compile(r"\\frac\{(?:d|\\partial)(?![a-z]{2})[^{}]*\}\{(?:d|\\partial)[^{}]*\}")
# Where the order of a product counts: transposes, cross products, matrices side by side.
_IN_ORDER = re.compile(
    r"\^\{?(?:T|\\top|\*|\\dagger)|[a-zA-Z}] ?\\times ?(?:[a-zA-Z]|\\(?:vec|mathbf))"
    r"|(?<![A-Za-z\\])[A-Z]{2}"
)
_GREEK_CAPITAL = re.compile(r"\\(?:Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega)(?![a-z])")
_JOINED = re.compile(r"\b(?:and|or)\b")
_BESIDE = re.compile(r"(?<![\\\w}^_])\{[^{}]*\} ?\{")  # which the library adds
_DATE_OR_TIME = re.compile(r"\d:\d|\d-\d+-\d")
_COMMA = re.compile(r"[,;](?![^()\[\]{}]*[)\]}])")  # outside brackets
_UNKNOWN = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{1,2}(?![A-Za-z])")
_DEGREES = re.compile(r"(\d+)\^\{?\\circ\}?")
_DECIMAL = re.compile(
    r"(?<![\d.])(?!(?<=\d,)\d{3}\.)(\d*)\.(\d+)(?!\d|\.|\\?%|\\(?:overline|bar|dot))"
)
# The library adds numbers that stand side by side, and reads y' as y.
_SPELLED_OUT = (
    (re.compile(r"\\[dt]?binom ?(\d)"), r"\\binom{\1}"),
    (re.compile(r"(\\[dt]?binom\{[^{}]*\}) ?(\d)"), r"\1{\2}"),
    (re.compile(r"(?<![\d.^_])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}"), r"(\1+\\frac{\2}{\3})"),
    (
        re.compile(
            r"(\\(?:[dt]?binom|frac)(?:\{[^{}]*\}){2}) ?(?=\\[dt]?(?:binom|frac|sqrt)|[\d(])"
        ),
        r"\1\\cdot ",
    ),
    (re.compile(r"(?<![\d.^_])(\d+) ?(?=\(|\\frac|\\binom)"), r"\1\\cdot "),
    (re.compile(r"(?<![_^]\{\w)(?<![A-Za-z])\}(?=\()|(?<=\d)\)(?=[\d(]|\\frac)"), r"\g<0>\\cdot "),
    (re.compile(r"\\frac(\\[a-z]+) ?(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"([A-Za-z])('+)"), lambda it: f"{it[1]}_{{90{len(it[2])}}}"),
)
_LETTER = re.compile(r"\\[A-Za-z]+|[^A-Za-z]")
_CAPITAL = re.compile(r"\\[A-Za-z]+|(?P<capital>[A-Z])(?P<index>_(?:\w|\{\w+\}))?")
_REMAINDER = re.compile(r"(\d+) ?\\bmod ?([1-9]\d*)")
_OPENS_SET = re.compile(r"(?:\\left)?\\\{")
_OPENS_LIST = re.compile(r"(?:\\left)?[(\[](?!.*[)\]],)")
_DANGLES = re.compile(
    r"[-+*/^=,]$|^[*/^=,]|->|=/|\\(?:to|rightarrow|implies|mapsto)(?![a-z])|[#?@]|\d'|\d \d"
)


def decide(answer: str | None, truth: str) -> Verdict | tuple[str, str]:
    """Returns the verdict where no algebra is needed, else the two formulas to ask about."""
    answer = None if answer is None else _claimed(answer)
    mine = None if answer is None else math_rules.read_answer(answer)
    right = _read_truth(truth)
    verdict = math_rules.compare_answers(mine, right)
    if verdict.status != "wrong":
        return verdict
    if _WORD.fullmatch(right.form) and mine.form.casefold() == right.form.casefold():
        return verdict._replace(correct=True, status="correct")
    mine = mine._replace(form=_without_names(mine.form, right.form))
    right = right._replace(form=_without_names(right.form, mine.form))
    if differ(mine.unit, right.unit):
        return verdict._replace(status="other_unit")
    if differ(mine.name, right.name):
        return verdict._replace(status="other_name")
    *others, last = math_rules.EQUALS.split(mine.form)
    is_list = _COMMA.search(_AND.sub(",", mine.form))
    if others and not (is_list or math_rules.EQUALS.search(right.form) or too_large(mine.form)):
        named = math_rules.is_name(others[0])  # its formulas are not to be checked, the numbers are
        others = [x for x in others[named:] if not ("dots" in x or (named and _UNKNOWN.search(x)))]
        verdict = decide(last, truth)
        if not others or verdict[0] is False:
            return verdict
        last, truth = (last, last) if isinstance(verdict, Verdict) else verdict
        return "=".join([*others, last]), truth
    numbers = math_rules.exact_number(mine.form), math_rules.exact_number(right.form)
    if None not in numbers:
        if not _same_number(*numbers, mine.unit == "%", right.unit == "%", answer, truth):
            return verdict
        return verdict._replace(correct=True, status="correct")
    if _hopeless(mine.form, right.form):
        return verdict
    one, other = (
        _ZEROS.sub(lambda m: rf"({m[1]}\cdot10^{{{len(m[2])}}})", it.form) for it in (mine, right)
    )
    if too_large(one) or too_large(other):
        return verdict._replace(status="too_large")
    return (f"{mine.name}={one}" if "=" in other and mine.name else one), other


def _without_names(form: str, other: str) -> str:
    """Reads "x=1 or x=2" as a set; "x=1, y=2" as a tuple where the other answer is one."""
    items = [math_rules.EQUALS.split(item) for item in _COMMA.split(_AND.sub(",", form))]
    are_named = all(len(item) == 2 and math_rules.is_name(item[0]) for item in items)
    if "=" in other or len(items) < 2 or not are_named:
        return form
    names, values = zip(*items, strict=True)
    if len({name.partition("_")[0] for name in names}) == 1:
        return rf"\{{{','.join(values)}\}}"
    is_tuple = list(names) == sorted(names) and other.startswith("(") and "or" not in form
    return f"({','.join(values)})" if is_tuple else form


@functools.lru_cache(maxsize=4096)
def _read_truth(truth: str) -> math_rules.Answer:
    """Reads a ground truth; of a worked solution what is in its last box."""
    return math_rules.read_answer(_last_boxes(truth) or truth)


def _same_number(
    one: Fraction, other: Fraction, is_percent: bool, other_percent: bool, *texts: str
) -> bool:
    """Compares two different numbers: as percent, or one rounded to six decimals and digits."""
    if is_percent != other_percent:
        return one * (1 if is_percent else 100) == other * (1 if other_percent else 100)
    for value, text, exact in ((one, texts[0], other), (other, texts[1], one)):
        decimals = re.search(r"(\d*)\.(\d{6,30})", text)
        digits = (decimals[1] + decimals[2]).lstrip("0") if decimals else ""
        if len(digits) >= 6 and value == round(exact, len(decimals[2])):
            return True
    return False


def _hopeless(one: str, other: str) -> bool:
    """Returns True for an answer that is no formula, or one of another kind than the truth.

    The library reads a number even in "42 steps", drops a base and "...", turns a date into a
    difference, and multiplies matrices in any order.
    """
    return bool(
        _words(one) != _words(other)
        or _DERIVATIVE.findall(one) != _DERIVATIVE.findall(other)
        or (_IN_ORDER.search(f"{one} {other}") and _terms(one) != _terms(other))
        or _BASE.findall(one) != _BASE.findall(other)
        or bool(_CLIPPED.search(one)) != bool(_CLIPPED.search(other))
        or (_OPENS_SET.match(one) and _OPENS_LIST.match(other))
        or (_OPENS_LIST.match(one) and _OPENS_SET.match(other))
        or (math_rules.exact_number(other) is not None and _ORDER.search(one))
        or _DATE_OR_TIME.search(f"{one} {other}")
        or _DANGLES.search(one)
        or {*_GREEK_CAPITAL.findall(one)} != {*_GREEK_CAPITAL.findall(other)}
        or _BESIDE.search(f"{one} {other}")
        or _repeats(one, other)
        or (_ORDER.search(one) and {*_JOINED.findall(one)} != {*_JOINED.findall(other)})
    )


def _repeats(*forms: str) -> bool:
    """Returns whether the items of a list are those of a truth that repeats some, but as often."""
    one, other = (collections.Counter(_COMMA.split(_AND.sub(",", form))) for form in forms)
    return one.keys() == other.keys() and one != other and max(other.values()) > 1


def _terms(form: str) -> list[str]:
    """Lists the signed terms of a sum in one order, their factors as they stand."""
    return sorted(re.findall(r"[+-][^+-]*", re.sub(r"^(?![+-])", "+", re.sub(r"[ {}]", "", form))))


def _words(form: str) -> set[str]:
    """Lists the words of a text that are no commands, functions, "and" or "or" of a list."""
    text = _COMMAND.sub(" ", _AND.sub(", ", form))
    return {word.lower() for word in _LETTERS.findall(_FUNCTIONS.sub(" ", text))}


# What would take forever.

_POWER = re.compile(r"(\w|[)}\]])\s*(?:\^|\*\*)\s*[{(]*\s*-?(\d*)")
_TOWER = re.compile(r"\^[{( ]*-?\d+[) }]*\^|\*\*[( ]*\d+[) ]*\*\*|\^[{(][^{}^]{0,9}\d[) }]*\^|!!")
_BIG_OPERATOR = re.compile(r"\\(?:sum|prod|binom|int|iint|lim|bigcup)|\\choose|!")
_SERIES = re.compile(r"\\(?:sum|prod|i?int|lim)")  # with more digits than the library's, forever
_NUMBER = re.compile(r"\d+")
_ZEROS = re.compile(r"(\d*[1-9])(0{30,})(?!\d)")


def too_large(form: str) -> bool:
    """Returns True for a formula that algebra may never finish, judged by its text alone.

    Towers of powers, exponents over MAX_EXPONENT (over 100 on a bracket), factorials, binomials,
    sums and products beyond MAX_RANGE, large matrices, deep nesting, long numbers. What it lets
    through is bounded by the limits of its process.
    """
    form = _DEGREES.sub(r"\1", form)
    steps = ((character in "{([") - (character in "})]") for character in form)
    nesting = max(itertools.accumulate(steps), default=0)
    largest = max(map(int, _NUMBER.findall(form[: MAX_FORMULA_CHARS + 1])), default=0)
    operators = len(_BIG_OPERATOR.findall(form))
    return (
        len(form) > MAX_FORMULA_CHARS
        or nesting > MAX_NESTING
        or largest >= 10**MAX_DIGITS
        or bool(_TOWER.search(form))
        or form.count("&") + form.count(r"\\") > 100
        or any(int(n or 0) > (100 if b in ")}]" else MAX_EXPONENT) for b, n in _POWER.findall(form))
        or (operators > 0 and (largest > MAX_RANGE or operators > 3))
    )


# What the library decides, in processes with limits.


class SymbolicVerifier(isolated.Pool):
    """Grades by the rules "math_verify", the algebra in workers; raises as `isolated.Pool` does."""

    def __init__(self, num_workers: int, cpu_seconds: float = isolated.CPU_SECONDS) -> None:
        super().__init__(f"{__name__}:algebra", num_workers, cpu_seconds)

    def verify_many(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
        """Grades pairs, in order; raises ValueError where the lengths differ."""
        decided = [
            math_rules.refuse(response, truth) or decide(find_answer(response), truth)
            for response, truth in zip(responses, ground_truths, strict=True)
        ]
        asked = {it: json.dumps(it).encode() for it in decided if not isinstance(it, Verdict)}
        graded = {it: verdict_of(reply, it[0]) for it, reply in self.ask(asked).items()}
        return [graded.get(it, it) for it in decided]


def verdict_of(reply: isolated.Reply, answer: str) -> Verdict:
    """Reads a worker's verdict on an answer; one without an answer to it is wrong."""
    if reply.status == "done":
        return Verdict(*json.loads(reply.answer))
    return Verdict(False, answer, reply.status)


@functools.cache
def default_verifier() -> SymbolicVerifier:
    """Starts the pool that this process shares, one worker a core, at the first call."""
    return SymbolicVerifier(isolated.one_a_core())


def algebra() -> Callable[[bytes], Callable[[], bytes]]:
    """Warms up a worker: after it a formula costs 0.01 s, before it 0.4 s."""
    for answer, truth in _WARM_UP:
        grade_symbolic(answer, truth)

    def prepare(request: bytes) -> Callable[[], bytes]:
        answer, truth = json.loads(request)
        return lambda: json.dumps(grade_symbolic(answer, truth)).encode()

    return prepare


def grade_symbolic(answer: str, truth: str) -> Verdict:
    """Grades a formula by the library, which may take forever: only inside a worker."""
    import math_verify

    sides = math_rules.EQUALS.split(answer) if not math_rules.EQUALS.search(truth) else [answer]
    letters = {*_LETTER.sub("", f"{answer}={truth}")}
    cased = {it for it in letters if it.isupper() and it.lower() in letters}
    readings = [_read(side, cased) for side in sides]
    gold = _read(truth, cased)
    if not all(readings):
        return Verdict(False, answer, "unreadable_answer")
    if not gold:
        return Verdict(False, answer, "unreadable_ground_truth")
    equal = [(readings[-1], side) for side in readings[:-1]] + [(gold, readings[-1])]
    precision = 15 if _SERIES.search(f"{answer}={truth}") else PRECISION
    same = functools.partial(math_verify.verify, numeric_precision=precision, timeout_seconds=None)
    correct = all(itertools.starmap(same, equal))
    return Verdict(correct, answer, "correct" if correct else "wrong")


def _read(formula: str, cased: set[str]) -> list:
    """Returns what the library reads in the whole of the formula; empty where it cannot.

    cased: capitals that are other letters than their small ones, which the library takes for one.
    Decimals are read as fractions, and rational formulas as their value: both are compared exactly.
    """
    import math_verify
    from math_verify.parser import NormalizationConfig

    formula = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", _AND.sub(", ", formula))
    for pattern, new in _SPELLED_OUT:
        formula = pattern.sub(new, formula)
    formula = _CAPITAL.sub(lambda it: _subscripted(it, cased), formula)
    formula = _REMAINDER.sub(lambda digits: str(int(digits[1]) % int(digits[2])), formula)
    formula = _DECIMAL.sub(
        lambda number: rf"\frac{{{number[1]}{number[2]}}}{{1{'0' * len(number[2])}}}", formula
    )
    normal = NormalizationConfig(malformed_operators=True, nits=True)  # without its own units
    targets = [math_verify.LatexExtractionConfig(True, -1, normal)]
    readings = math_verify.parse(
        f"${formula}$",
        targets,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return [it.doit() if _is_value(it) else it for it in readings]


def _subscripted(found: re.Match, cased: set[str]) -> str:
    capital, index = found["capital"], (found["index"] or "").strip("_{}")
    return f"{capital}_{{91{index}}}" if capital in cased else found[0]


def _is_value(reading) -> bool:
    """Returns whether the library would compare it by its form: a rational number, a product."""
    if type(reading).__name__ == "Product":
        return True
    return getattr(reading, "is_number", False) and reading.doit().is_Rational


# Kinds of formulas that fill the tables of the library's parser.
_WARM_UP = (
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\frac{\pi}{4}", r"\pi/4"),
    ("(1,2)", "(2,1)"),
    ("[1,2)", "[1,3)"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    (r"(-\infty,3]\cup[4,\infty)", r"(-\infty,3)"),
    (r"x\leq5", r"x<5"),
    (r"1\pm\sqrt{2}", r"1\pm\sqrt{3}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    (r"\sin(x)+\log_{2}(3)\cdot e^{i\pi}", r"\cos{x}\times\ln3"),
    (r"5!+\binom{4}{2}", "126"),
    (r"x^{2}+y^{2}=1", "y=x"),
    (r"-\frac{a+b}{2c}", r"\frac{1}{2}a-b"),
    (r"|x-1|", "3*4/5"),
)
