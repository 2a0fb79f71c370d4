"""Text of unknown origin, a model's above all, as a terminal may show it."""

from collections.abc import Mapping, Sequence


def printable(text: str) -> str:
    """Shows text on one line: nothing in it can move the cursor or change colours.

    A line break becomes a return sign, every other unprintable character (control, bidirectional,
    surrogate) its Python escape.
    """
    text = text.replace("\n", "⏎")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, *, limit: int) -> str:
    """The text without its middle where it has more than `limit` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def printable_lines(text: str) -> str:
    """Shows text as `printable` does, but for its line breaks and tabs."""
    return "".join(char if char in "\n\t" else printable(char) for char in text)


def conversation(turns: Sequence[Mapping[str, str]]) -> str:
    """Says who said what."""
    return "\n".join(f"[{turn['role']}] {turn['content'].strip()}" for turn in turns)
