"""What an audit finds: one line a thing that was looked at. Host only."""

import dataclasses

SAME, WRONG, UNCHECKED, REFUSED = "ok", "WRONG", "not checked", "REFUSED"


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


def listed(names, *, limit: int = 6) -> str:
    """Names in a line, the first ones of many."""
    names = [*map(str, names)]
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
