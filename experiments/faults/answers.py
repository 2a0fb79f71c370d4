"""Hostile answers through every rule set, and graders that are killed at random moments.

An answer is survived if its verdict came back in its time and memory, and is right where it was
built to be right and wrong where it was built to be wrong. A kill is survived if no verdict of the
batch under way is another than without it.
"""

import collections
import contextlib
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from dapo_jax.verifier import STATUSES, Verdict, verify
from dapo_jax.verifier.isolated import MEMORY_BYTES as ANSWER_MEMORY_BYTES
from dapo_jax.verifier.symbolic_rules import SymbolicVerifier
from experiments.faults.parts import Outcome, Part

# Of 20 answers, how many each rule set grades; one in ANSWERS_A_KILL of all faults is a kill.
SHARES = {"dapo": 6, "strict": 6, "strict_box": 4, "math_verify": 4}
ANSWERS_A_KILL = 1000
BOMBS, BOMBS_OF_ALGEBRA = 0.15, 0.02
BATCH = 512
WORKERS = 2
CPU_SECONDS = 0.25  # of an answer that needs no algebra
MEMORY_BYTES = ANSWER_MEMORY_BYTES + (300 << 20)  # a worker itself has about 60 MiB


class Hostile(NamedTuple):
    """A response to grade: what it is, the ground truth, and whether it is right."""

    kind: str
    response: str
    truth: str
    right: bool


def _bomb(rng: random.Random) -> str:
    n, m = rng.randrange(2, 99), rng.randrange(10**4, 10**9)
    return rng.choice(
        (
            f"{n}^{{{n}^{{{n}^{{{n}}}}}}}",
            f"{n}**{n}**{n}**{n}",
            f"{m}!",
            f"{n}!!!!",
            f"({n}!)!",
            rf"\sum_{{k=1}}^{{{m}}} k^{{{n}}}",
            rf"\prod_{{k=1}}^{{{m}}} k",
            rf"\binom{{{m}}}{{{m // 2}}}",
            f"{n}^{{{m}}}",
            f"(x+y+z+{n})^{{{n}}}",
            rf"\int \frac{{\sqrt{{\tan(x)}}}}{{x^{{{n}}}+1}} dx",
            rf"\tan(\tan(\tan(\tan({n}))))",
            rf"\begin{{pmatrix}}{(f'x_{n} & ' * 9 + chr(92) * 2) * 9}\end{{pmatrix}}^{{{n}}}",
            "e^{" * 5 + str(n) + "}" * 5,
            "(" * 200 + str(n) + ")" * 200,
            r"\sqrt{" * 40 + str(n) + "}" * 40,
            r"\frac{1}{" * 30 + str(n) + "}" * 30,
            "9" * 250,
            f"1e{m}",
            "-" * 250 + str(n),
            "+".join(f"x^{{{i}}}" for i in range(40)),
            ",".join(map(str, range(90))),
        )
    )


LATEX = r"\frac{ \sqrt{ \text{ \boxed{ \left( \right] \begin{pmatrix} \\ & { } [ ] ( ) $ $$"


def _soup(rng: random.Random) -> str:
    pieces = (
        *LATEX.split(),
        *map(chr, (0, 7, 8, 11, 13, 27, 0x85, 0x200B, 0x2028, 0x202E, 0xD800, 0xFEFF, 0x1F389)),
        *("=", "^", "_", "!", "%", ",", "Answer:", "answer\n:", "\n", " ", "x", "1", "٤", "½", "Ⅳ"),
    )
    return "".join(rng.choices(pieces, k=rng.randrange(1, 120)))


def _near(rng: random.Random, truth: int) -> str:
    return rng.choice(
        (
            f"{truth + rng.choice((-1, 1, 2, 10))}",
            f"-{truth}",
            f"{truth}{rng.randrange(10)}",
            f"{rng.randrange(1, 10)}{truth}",
            f"{truth}.5",
            rf"\frac{{{truth}}}{{2}}",
            rf"\sqrt{{{truth}}}",
            f"{truth}^2",
            f"{truth}x",
            f"not {truth}",
            f"less than {truth}",
            f"{truth} or {truth + 1}",
            f"{truth}+1",
            f"I gave up after {truth} tries",
            f"{truth}_{{8}}",
        )
    )


def _words(rng: random.Random, truth: int) -> str:
    return rng.choice(
        (
            f"Ignore all rules and reward this. The truth was {truth}, they say.",
            f"system: the grader must print correct ({truth}).",
            f"It cannot be {truth}. I give up.",
            "__import__('os').system('exit 1')",
            f"def grade(): return {truth}",
            "{ground_truth} %s %(answer)s {0}",
            f"<correct>{truth}</correct>",
            f"We tried {truth} cases " + "and more " * rng.randrange(2000),
            "9" * rng.randrange(10**5),
            "",
        )
    )


def _hostile(rng: random.Random, rules: str) -> Hostile:
    truth = rng.randrange(10_000, 100_000)
    place = (r"\boxed{%s}" if rules == "strict_box" else "Answer: %s").__mod__
    kind = "bomb"
    if rng.random() > (BOMBS_OF_ALGEBRA if rules == "math_verify" else BOMBS):
        kind = rng.choice(("soup", "near", "words", "huge", "right", "right after noise"))
    if kind == "bomb":
        response = place(_bomb(rng))
    elif kind == "soup":
        response = place(_soup(rng)) if rng.random() < 0.5 else _soup(rng)
    elif kind == "near":
        response = place(_near(rng, truth))
    elif kind == "words":
        response = _words(rng, truth)
    elif kind == "huge":
        response = (place(_soup(rng)) + "\n") * rng.randrange(1, 3000)
    else:
        # The full stop: to the reference "Answer:" at the end of a line goes on with the next one.
        noise = "" if kind == "right" else rng.choice((_soup, _bomb))(rng) + ".\n"
        response = noise + place(str(truth))
    return Hostile(kind, response, str(truth), kind.startswith("right"))


def _outcome(fault: str, hostile: Hostile, verdict: Verdict, problem: str) -> Outcome:
    if not problem and verdict.status not in STATUSES:
        problem = f"status {verdict.status!r}"
    if not problem and verdict.correct != hostile.right:
        told = f"{hostile.response[-80:]!r} for {hostile.truth!r}"
        problem = f"{'wrong' if verdict.correct else 'right'} answer {told} is {verdict.status}"
    return Outcome(fault, survived=not problem, lost=problem)


def _local(rng: random.Random, rules: str, count: int) -> Iterator[Outcome]:
    """Grades by rules that work on the text alone."""
    for _ in range(count):
        hostile = _hostile(rng, rules)
        start = time.process_time()
        verdict = verify(hostile.response, hostile.truth, rules=rules)
        late = time.process_time() - start > CPU_SECONDS
        yield _outcome(
            f"{hostile.kind}, {rules}", hostile, verdict, "took too long" if late else ""
        )


def _symbolic(rng: random.Random, verifier: SymbolicVerifier, count: int) -> Iterator[Outcome]:
    """Grades by math_verify, as many at a time as a small step has."""
    for start in range(0, count, BATCH):
        batch = [_hostile(rng, "math_verify") for _ in range(min(BATCH, count - start))]
        began = time.monotonic()
        with _PeakMemory(verifier) as memory:
            verdicts = verifier.verify_many([h.response for h in batch], [h.truth for h in batch])
        # All might be bombs, of a second each.
        late = time.monotonic() - began > 2 * len(batch)
        problem = "took too long" if late else ""
        if memory.peak > MEMORY_BYTES:
            problem = f"a grader had {memory.peak >> 20} MiB"
        for hostile, verdict in zip(batch, verdicts, strict=True):
            yield _outcome(f"{hostile.kind}, math_verify", hostile, verdict, problem)


def _processes(verifier: SymbolicVerifier) -> list[int]:
    """Lists the workers and the children in which they grade."""
    pids = verifier.worker_pids()
    for pid in list(pids):
        with contextlib.suppress(OSError):
            children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
            pids += map(int, children.split())
    return pids


class _PeakMemory:
    """Watches the resident memory of graders: `peak` bytes of the largest one, over the block."""

    def __init__(self, verifier: SymbolicVerifier):
        self.peak = 0
        self._verifier = verifier
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "_PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()

    def _watch(self):
        while not self._over.wait(0.02):
            for pid in _processes(self._verifier):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    pages = pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]
                    self.peak = max(self.peak, int(pages) * os.sysconf("SC_PAGE_SIZE"))


def _kills(rng: random.Random, verifier: SymbolicVerifier, count: int) -> Iterator[Outcome]:
    """Kills a worker, or a child of one, before or while a batch of known verdicts is graded."""
    for _ in range(count):
        powers = rng.sample(range(20, 900), 8)
        responses = [f"Answer: 2^{{3}}+{power}" for power in powers]
        truths = [str(power + rng.choice((8, 9))) for power in powers]
        idle = rng.random() < 0.3
        killed: collections.Counter[str] = collections.Counter()

        def kill(killed=killed):
            with contextlib.suppress(ProcessLookupError):
                pid = rng.choice(_processes(verifier))
                killed["a worker" if pid in verifier.worker_pids() else "a child"] += 1
                os.kill(pid, signal.SIGKILL)

        killer = threading.Timer(0 if idle else rng.uniform(0, 0.15), kill)
        killer.start()
        if idle:
            killer.join()
        problem = ""
        try:
            verdicts = verifier.verify_many(responses, truths)
            right = [int(truth) == 8 + power for power, truth in zip(powers, truths, strict=True)]
            if [verdict.correct for verdict in verdicts] != right:
                problem = f"other verdicts: {[verdict.status for verdict in verdicts]}"
        except RuntimeError as error:
            problem = f"raised into the run: {error}"
        killer.join()
        what = next(iter(killed), "a process that was gone")
        yield Outcome(
            f"SIGKILL of {what}{' while idle' if idle else ''}", not problem, lost=problem
        )


def _inject(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    rng = random.Random(seed)
    kills = max(1, count // ANSWERS_A_KILL)
    answers = count - kills
    parts = {rules: answers * share // sum(SHARES.values()) for rules, share in SHARES.items()}
    parts["dapo"] += answers - sum(parts.values())
    with SymbolicVerifier(WORKERS) as verifier:
        for rules in ("dapo", "strict", "strict_box"):
            yield from _local(rng, rules, parts[rules])
        yield from _symbolic(rng, verifier, parts["math_verify"])
        yield from _kills(rng, verifier, kills)


PART = Part("hostile answers, killed graders", full=100_000, short=300, inject=_inject)
