"""Compares TensorBoard's scalars with the rows and evaluations that they were made of."""

import pathlib
import struct
from collections.abc import Iterator, Mapping

from dapo_jax.audit.findings import SAME, WRONG, Finding, listed
from dapo_jax.audit.written import Written
from dapo_jax.run import chain
from dapo_jax.run.files import read_json
from dapo_jax.run.record import result_row


def check(run: Written) -> Iterator[Finding]:
    """Checks that TensorBoard shows each number of the rows, and none that is not of the run."""
    try:
        shown = scalars(run.workdir / "tensorboard")
    except ValueError as error:
        yield Finding(WRONG, str(error))
        return
    wrong = set()
    for row in run.rows:
        here = shown.pop(row["step"], {})
        if not here and row is run.rows[-1] and run.end is None:
            continue  # a kill between the row and its event: the next start writes it
        wanted = as_shown(
            {key: it for key, it in chain.numbers(row).items() if key != "step" and it is not None}
        )
        extra = {key: value for key, value in here.items() if key not in wanted}
        same = all(here.get(key) == value for key, value in wanted.items())
        if not same or not _of_evaluation(run, row["step"], extra):
            wrong.add(row["step"])
    wrong |= {step for step, here in shown.items() if not _of_evaluation(run, step, here)}
    if wrong:
        steps = listed(sorted(wrong))
        yield Finding(WRONG, f"tensorboard: other numbers than the rows' at step {steps}")
    else:
        yield Finding(SAME, f"tensorboard: the numbers of {len(run.rows)} rows")


def _of_evaluation(run: Written, step: int, found: dict) -> bool:
    """Whether the numbers are those of eval/<step>.json, which have no row."""
    if not found:
        return True
    file = run.workdir / "eval" / f"{step}.json"
    try:
        scores = as_shown(result_row(read_json(file)["sets"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(scores.get(key) == it for key, it in found.items())


def as_shown(numbers: Mapping) -> dict[str, float]:
    """Returns numbers as TensorBoard has them: other names for some, and rounded to float32."""
    from tensorboardX import summary

    values = [value for key, it in numbers.items() for value in summary.scalar(key, it).value]
    return {value.tag: value.simple_value for value in values}


def scalars(folder: pathlib.Path) -> dict[int, dict[str, float]]:
    """Reads step -> tag -> number as TensorBoard shows them: a start hides what it does again.

    Raises ValueError, with the file, for bytes that are no whole records.
    """
    from tensorboardX.proto import event_pb2  # a second, which other commands need not wait

    shown: dict[int, dict[str, float]] = {}
    for path in sorted(folder.glob("events.*"), key=lambda path: path.suffix):
        for data in records(path):
            event = event_pb2.Event()
            try:
                event.ParseFromString(data)
            except Exception as error:  # protobuf's own DecodeError
                raise ValueError(f"{path.name}: no event ({error})") from None
            if event.HasField("session_log"):
                shown = {step: here for step, here in shown.items() if step < event.step}
            for value in event.summary.value:
                if value.WhichOneof("value") != "simple_value":  # texts, the recipe's row
                    continue
                shown.setdefault(event.step, {})[value.tag] = value.simple_value
    return shown


def records(path: pathlib.Path) -> Iterator[bytes]:
    """Reads the records of a file; each has its length, and a checksum of that and of itself."""
    from tensorboardX.record_writer import masked_crc32c

    data, at = path.read_bytes(), 0
    while at < len(data):
        head = data[at : at + 12]
        size = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else 0
        body, sums = data[at + 12 : at + 12 + size], data[at + 12 + size : at + 16 + size]
        good = len(head) == 12 and len(sums) == 4
        good = good and struct.unpack("<I", head[8:])[0] == masked_crc32c(head[:8])
        if not good or struct.unpack("<I", sums)[0] != masked_crc32c(body):
            raise ValueError(f"tensorboard/{path.name}: damaged at byte {at}")
        yield body
        at += 16 + size
