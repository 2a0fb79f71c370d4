"""Counts what devices exchange in a compiled program, from XLA's text."""

import functools
import math
import re

import numpy as np

BODY = re.compile(r"^(ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
INNER = re.compile(r'\b(?:calls|body|to_apply)=%?([\w.-]+)(?:.*"known_trip_count":\{"n":"(\d+)")?')
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
COLLECTIVE = re.compile(rf" = (.*) ({KINDS})(-start)?\(")
ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)[a-z\d]*)\[([\d,]*)\]")


def exchanged(text: str) -> tuple[int, int]:
    """Counts a run's collectives and the bytes that a device sends in them, about: (count, bytes).

    Bytes are those of whole arrays, twice where all get a sum; of a scattered sum that is not
    asynchronous, the text has only the part. A loop of unknown length has one turn.
    """
    bodies = {name: (entry, body) for entry, name, body in BODY.findall(text)}

    @functools.cache
    def count(name: str) -> np.ndarray:
        _, body = bodies[name]
        sent = [_bytes(*found) for found in COLLECTIVE.findall(body)]
        inner = (int(trips or 1) * count(called) for called, trips in INNER.findall(body))
        return np.array([len(sent), sum(sent)]) + sum(inner)

    return tuple(count(next(name for name, (entry, _) in bodies.items() if entry)).tolist())


def _bytes(arrays: str, kind: str, starts: str) -> int:
    sizes = [
        int(bits or 8) * math.prod(int(n) for n in shape.split(",") if n) // 8
        for bits, shape in ARRAY.findall(arrays)
    ]
    half = len(sizes) // 2 if starts and kind != "all-reduce" else 0  # operands, then results
    return max(sum(sizes[:half]), sum(sizes[half:])) * (1 + (kind == "all-reduce"))
