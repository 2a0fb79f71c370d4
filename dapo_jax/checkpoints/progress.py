"""The state of a run between two steps, beside the training state."""

import base64
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.types import PartialGroup, Response, Verdict


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a run between two steps, beside the training state; saved with a checkpoint.

    cursor: of the next unseen prompt. row: that of the last step; None before the first. partial:
    the unfinished groups that the next step continues. scores: mean@k of the set that
    checkpoint.best names, with a digest of it, by its finished steps.
    """

    cursor: int = 0
    sampled_tokens_total: int = 0
    row: dict | None = None
    partial: Sequence[PartialGroup] = ()
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
        return {
            "cursor": self.cursor,
            "sampled_tokens_total": self.sampled_tokens_total,
            "row": self.row,
            "partial": [_group_json(group) for group in self.partial],
            "scores": dict(self.scores),
        }

    @classmethod
    def from_json(cls, described: Mapping) -> "Progress":
        """Undoes `to_json`; what older checkpoints have beside it is left out."""
        partial = [_group(it) for it in described.get("partial", ())]
        known = {it.name for it in dataclasses.fields(cls)} & described.keys()
        return cls(**{name: described[name] for name in known} | {"partial": partial})


def _group_json(group: PartialGroup) -> dict:
    responses = [
        {
            "tokens": _text(response.tokens_T, "<i4"),
            "behavior_logp": _text(response.behavior_logp_T, "<f4"),
            "stopped": bool(response.stopped),
            "unfinished": bool(unfinished),
            "ends": list(response.ends),
            **_routes_json(response.route_TLA),
            **_episode_json(response),
        }
        for response, unfinished in zip(group.responses, group.unfinished_G, strict=True)
    ]
    return {"cursor": group.cursor, "responses": responses}


def _group(described: Mapping) -> PartialGroup:
    responses = [
        Response(
            _array(it["tokens"], "<i4"),
            _array(it["behavior_logp"], "<f4"),
            stopped=it["stopped"],
            ends=tuple(it["ends"]),
            route_TLA=_routes(**it),
            **_episode(**it),
        )
        for it in described["responses"]
    ]
    unfinished_G = tuple(it["unfinished"] for it in described["responses"])
    return PartialGroup(described["cursor"], tuple(responses), unfinished_G)


def _routes_json(route_TLA: np.ndarray | None) -> dict:
    if route_TLA is None:
        return {}
    return {"routes": _text(route_TLA, "u1"), "routes_shape": list(route_TLA.shape)}


def _routes(routes: str = "", routes_shape: Sequence[int] = (), **_) -> np.ndarray | None:
    return _array(routes, "u1").reshape(routes_shape) if routes_shape else None


def _episode_json(response: Response) -> dict:
    found = {} if response.given_T is None else {"given": _text(response.given_T, "u1")}
    if response.turns is not None:  # it has ended
        verdict = response.verdict and response.verdict._asdict()
        found |= {"turns": list(response.turns), "verdict": verdict, "measures": response.measures}
    return found


def _episode(given="", turns=None, verdict=None, measures=None, **_) -> dict:
    """Undoes `_episode_json`."""
    found = {"given_T": _array(given, "u1").astype(bool)} if given else {}
    return found | {"turns": turns, "verdict": verdict and Verdict(**verdict), "measures": measures}


def _text(array: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype)).decode()


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).astype(np.dtype(dtype).newbyteorder("="))
