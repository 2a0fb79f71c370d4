"""The state of a run between two steps, beside the training state."""

import base64
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dapo_jax.types import Group, Response, Status, Verdict


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a run between two steps, beside the training state; saved with a checkpoint.

    cursor: of the next unseen prompt. row: that of the last step; None before the first. partial:
    the groups carried over to the next step, complete or not. scores: mean@k of the set that
    checkpoint.best names, with a digest of it, by its finished steps.
    """

    cursor: int = 0
    sampled_tokens_total: int = 0
    row: dict | None = None
    partial: Sequence[Group] = ()
    scores: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def of_fork(self) -> "Progress":
        """Returns that with which a fork begins: without episodes, which another config changes."""
        responses = [response for group in self.partial for response in group.responses]
        if all(it.given_T is None and it.turns is None for it in responses):
            return self
        cursor = min(self.cursor, *(group.cursor for group in self.partial))
        return dataclasses.replace(self, cursor=cursor, partial=())

    def to_json(self) -> dict:
        """Describes it for a checkpoint, bit by bit."""
        return vars(self) | {"partial": [_group_json(group) for group in self.partial]}

    @classmethod
    def from_json(cls, described: Mapping) -> "Progress":
        """Undoes `to_json`; what older checkpoints have beside it is left out."""
        partial = [_group(it) for it in described.get("partial", ())]
        known = {it.name for it in dataclasses.fields(cls)} & described.keys()
        return cls(**{name: described[name] for name in known} | {"partial": partial})


def best_of(scores: Mapping, steps: Iterable[int]) -> int | None:
    """Returns which of these steps has the best score in `Progress.scores`, the first of equals."""
    of_set = dict(*scores.values())
    scored = (step for step in sorted(steps) if str(step) in of_set)
    return max(scored, key=lambda step: of_set[str(step)], default=None)


# A status, as the checkpoint's (unfinished, stopped).
STATUSES = {
    (True, False): Status.RUNNING,
    (True, True): Status.WAITING,
    (False, True): Status.STOPPED,
    (False, False): Status.CUT,
}


def _group_json(group: Group) -> dict:
    return {"cursor": group.cursor, "responses": [*map(_response_json, group.responses)]}


def _group(described: Mapping) -> Group:
    return Group(described["cursor"], None, tuple(map(_response, described["responses"])))


def _response_json(response: Response) -> dict:
    unfinished, stopped = next(key for key, it in STATUSES.items() if it is response.status)
    described = {
        "tokens": _text(response.tokens_T, "<i4"),
        "behavior_logp": _text(response.behavior_logp_T, "<f4"),
        "stopped": stopped,
        "unfinished": unfinished,
        "ends": list(response.ends),
    }
    if (route_TLA := response.route_TLA) is not None:
        described |= {"routes": _text(route_TLA, "u1"), "routes_shape": list(route_TLA.shape)}
    if response.given_T is not None:
        described["given"] = _text(response.given_T, "u1")
    if response.turns is not None:  # an episode that has ended
        verdict = response.verdict and response.verdict._asdict()
        described.update(turns=list(response.turns), verdict=verdict, measures=response.measures)
    return described


def _response(it: Mapping) -> Response:
    """Undoes `_response_json`."""
    routes, given, verdict = it.get("routes"), it.get("given"), it.get("verdict")
    return Response(
        _array(it["tokens"], "<i4"),
        _array(it["behavior_logp"], "<f4"),
        STATUSES[it["unfinished"], it["stopped"]],
        verdict=verdict and Verdict(**verdict),
        ends=tuple(it["ends"]),
        given_T=None if given is None else _array(given, "u1").astype(bool),
        route_TLA=None if routes is None else _array(routes, "u1").reshape(it["routes_shape"]),
        measures=it.get("measures"),
        turns=it.get("turns"),
    )


def _text(array: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype)).decode()


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).astype(np.dtype(dtype).newbyteorder("="))
