"""The findings of an audit, a line for each thing that was checked. Host only."""

import dataclasses
from collections.abc import Iterator

SAME, WRONG, UNCHECKED, REFUSED = "ok", "WRONG", "not checked", "REFUSED"

# What reading raises where other values, or kinds of values, are there than those written.
NOT_AS_WRITTEN = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(ArithmeticError, RecursionError, NotImplementedError),
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of an audit.

    kind: SAME; WRONG: something else is there than what the run wrote; UNCHECKED: nothing says what
    it has to be; REFUSED: it was to be checked, and could not be. what: the line.
    """

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind:<12} {self.what}"


def guarded(what: str, check: Iterator[Finding]) -> Iterator[Finding]:
    """Yields a check's findings; what it cannot read is wrong, and the other checks go on."""
    try:
        yield from check
    except NOT_AS_WRITTEN as error:
        yield Finding(WRONG, f"{what}: not what a run writes ({said(error)})")


def said(error: BaseException) -> str:
    """An error's kind and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def listed(names, *, limit: int = 6) -> str:
    """Names in a line, the first ones of many."""
    names = [*map(str, names)]
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
