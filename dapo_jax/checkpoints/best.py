"""A run's best policy, by mean@k of the set that checkpoint.best names; the first of equals."""

import pathlib
from collections.abc import Iterable, Mapping

from dapo_jax.logs.files import read_json

BEST = "best"  # in the place of a step, of --step and --start


def best_of(scores: Mapping[str, float], steps: Iterable[int]) -> int | None:
    """Returns which of these finished steps has the best score; None where none has any."""
    scored = (step for step in sorted(steps) if str(step) in scores)
    return max(scored, key=lambda step: scores[str(step)], default=None)


def best_step(workdir: pathlib.Path, name: str, steps: Iterable[int]) -> int:
    """Returns which of a run's checkpoints `steps` is the best by its eval/<finished steps>.json.

    name: of the set. Results with other settings than the last do not count. ValueError for none.
    """
    files = [it for it in (workdir / "eval").glob("*.json") if it.stem.isdecimal()]
    found = [it for it in map(read_json, files) if name in it["sets"]]
    last = max(found, key=lambda it: it["step"])["settings"][name] if found else {}
    same = [it for it in found if it["settings"][name] == last]
    scores = {str(it["step"]): it["sets"][name][f"mean@{last['k']}"] for it in same}
    if (best := best_of(scores, steps)) is None:
        what = (
            f"none of its checkpoints {sorted(steps)} was evaluated on checkpoint.best = {name!r}"
        )
        raise ValueError(f"{workdir}: {what}; give the number of one")
    return best
