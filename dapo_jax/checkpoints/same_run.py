"""Is it the same run? One comparison of two fingerprints, and a table of who asks.

What one of the two lacks is not compared: the config.json of a run is a fingerprint of a config
without digests. `dapo_jax.sweep` has no runs to ask, and compares configs alone.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from configs.base import MAY_CHANGE, OF_POLICY
from configs.compare import config_differences
from dapo_jax.process import hosts

WEIGHTS = ".safetensors"
SHOWN_DIFFERENCES = 5


@dataclasses.dataclass(frozen=True)
class Question:
    """Who asks: what counts for them, and what they are told where it differs.

    refusal: {where} names what is compared with, {what} lists what differs, key by key. parts: of a
    fingerprint, which count beside its config. among: the beginnings of the config's keys that
    count. but: those of keys that may differ: in the config without a word, elsewhere with one.
    before: the words for an old value.
    """

    refusal: str
    parts: tuple[str, ...] = ("data", "eval", "files", "modules", "origin")
    among: tuple[str, ...] = ("",)
    but: tuple[str, ...] = ()
    before: str = "was {}"


# A start that goes on with a run, or finds it finished.
RESUME = Question(
    "{where} is of another run: {what}. Give what it had to resume it, or another --workdir (and "
    "checkpoint.directory) to start a new run; a fork, --start=run:WORKDIR@STEP, may have other "
    "settings and edited code",
    but=MAY_CHANGE,
)
# A place in the prompt stream means something in the same stream alone.
FORK = Question(
    "{where} cannot be forked: {what}. A fork goes on with the run's model, tokenizer, LoRA shape, "
    "seed and training data; all else may be another",
    parts=("data", "files"),
    among=(*OF_POLICY, "seed"),
)
EVALUATE = Question(
    "{where} is of another policy: {what}. Give the run's own config, and the files that it was "
    "started with",
    parts=("files",),
    among=OF_POLICY,
)
# A question may be put in another way than the problems of training.
SAMPLE = dataclasses.replace(EVALUATE, but=("tokenizer.chat", "tokenizer.date"))
# Of processes that differ one would wait for ever.
TOGETHER = Question("{where} differs from process 0: {what}", before="{} on process 0")


def require(question: Question, theirs: Mapping, ours: Mapping, where: str, report=print) -> None:
    """Refuses a fingerprint that is of another run for who asks (ValueError).

    theirs: the checkpoint's, or the run's. report(text): says what may differ.
    """
    texts = list(differences(question, theirs, ours))
    if refused := [text for text in texts if not text.startswith(question.but)]:
        raise ValueError(question.refusal.format(where=where, what=listed(refused)))
    if texts:
        report(f"{listed(texts)}: numbers from here on are not comparable with those before")


def require_together(mine: Mapping) -> None:
    """Refuses processes whose fingerprints differ (ValueError); all call it."""
    first, *others = hosts.gather(mine)
    for process, theirs in enumerate(others, start=1):
        require(TOGETHER, first, theirs, f"process {process}")


def differences(question: Question, old: Mapping, new: Mapping) -> Iterator[str]:
    """Says, key by key, in what two fingerprints differ, as far as it counts for who asks."""
    a, b = old["recipe"], new["recipe"]
    # A seed makes random weights.
    among = question.among if b["model"]["path"] else (*question.among, "seed")
    yield from config_differences(a, b, among=among, but=question.but, before=question.before)
    was, ends = a.get("num_steps"), b["num_steps"]  # the last step of the learning rate
    if "num_steps" in question.but and b["learner"]["decay"] != "none" and was != ends:
        yield f"learner.decay ends at num_steps = {ends}, but did at {was}"
    for part in question.parts:
        if part in old and part in new:
            yield from PARTS[part](old[part], new[part])


def _stream(old: Mapping, new: Mapping) -> Iterator[str]:
    """Compares training sets in the stream's order: how a set is named, or read, does not count."""
    if len(old) != len(new):
        yield f"there are {len(new)} training sets (data.train, data.mixture), not {len(old)}"
    else:
        yield from _sets(dict(zip(new, old.values(), strict=True)), new)


def _sets(old: Mapping, new: Mapping) -> Iterator[str]:
    for key in sorted(old.keys() & new.keys()):
        a, b = old[key], new[key]
        if a["prompts"] != b["prompts"]:
            yield f"{key} has {b['prompts']} prompts, not {a['prompts']}"
        elif a["digest"] != b["digest"]:
            yield f"{key}: its prompts differ"
        elif a.get("ids", b["ids"]) != b["ids"]:  # checkpoints of before have none
            yield f"{key}: its prompts are the same, but not their tokens (transformers' version)"
        if a.get("share") != b.get("share"):
            yield f"{key}: its share of the prompts is {b['share']}, not {a['share']}"


def _files(old: Mapping, new: Mapping) -> Iterator[str]:
    for key in sorted(old.keys() & new.keys()):
        names = old[key].keys() | new[key].keys()
        if not any(name.endswith(WEIGHTS) for name in new[key]):  # who asks needs none of them
            names = {name for name in names if not name.endswith(WEIGHTS)}
        for name in sorted(names):
            if old[key].get(name) != new[key].get(name):
                yield f"{key}: {name} differs"


def _origin(old: str | None, new: str | None) -> Iterator[str]:
    if new not in (None, old):
        yield f"--start is {new!r}, but it began {'from ' + old if old else 'without one'}"


PARTS = {"data": _stream, "eval": _sets, "files": _files, "modules": _files, "origin": _origin}


def listed(texts: Sequence[str]) -> str:
    """Lists the first differences, and says how many more there are."""
    more = len(texts) - SHOWN_DIFFERENCES
    return "; ".join(texts[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
