"""Several training sets: the order of their prompts, whose grader grades, what is refused."""

import collections
import json
from types import SimpleNamespace

import numpy as np

from dapo_jax.cli.config_flags import read_config
from dapo_jax.setup import checks, components
from dapo_jax.tasks.datasets import Mixture
from dapo_jax.types import Group, Response, Status

SHARES = {"a": 30, "b": 20, "c": 10}  # of 60 prompts
A, B, C = ([f"{name}{i}" for i in range(n)] for name, n in (("a", 50), ("b", 50), ("c", 7)))


def stream_of(*sets, seed, weights=(1.0,)):
    of = {items[0]: SimpleNamespace(prompts=items) for items in sets}
    return Mixture(of, dict(zip(of, weights, strict=True))).stream(seed)


def taken(*sets, count, **how):
    stream = stream_of(*sets, **how)
    return [stream[cursor] for cursor in range(count)]


def test_every_stretch_has_each_sets_share_and_each_set_epochs_of_its_own():
    items = taken(A, B, C, seed=3, weights=(3, 2, 1), count=600)
    assert collections.Counter(item[0] for item in items) == {"a": 300, "b": 200, "c": 100}
    for first in range(0, 600, 60):
        stretch = collections.Counter(item[0] for item in items[first : first + 60])
        assert all(abs(stretch[name] - share) <= 1 for name, share in SHARES.items())
    alone = [item for item in items if item[0] == "a"]
    assert alone == taken(A, seed=3, count=300)
    small = [item for item in items if item[0] == "c"]
    assert all(sorted(small[e : e + 7]) == C for e in range(0, 98, 7))
    order_a, order_b = ([int(x[1:]) for x in items if x[0] == name][:50] for name in "ab")
    assert order_a != order_b  # two sets of one length


def test_a_mixture_depends_on_seed_cursor_and_the_ratio_of_weights_alone():
    stream = stream_of(A, C, seed=3, weights=(0.2, 0.1))
    cursors = [999, 0, 3, 10**12, 3]
    first = [stream[cursor] for cursor in cursors]
    again, other = (stream_of(A, C, seed=seed, weights=(4, 2)) for seed in (3, 4))
    assert [again[cursor] for cursor in cursors] == first
    assert [other[cursor] for cursor in range(99)] != [again[cursor] for cursor in range(99)]


def test_sets_by_flags_alone_are_graded_each_by_its_own_task(tmp_path):
    file = tmp_path / "more.jsonl"
    rows = [{"question": f"{n}+1", "answer": f"So #### {n + 1}"} for n in range(60)]
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = (f"path={file}", "kind=gsm8k", "weight=3", "rules=strict")
    flags = [f"--config.data.mixture.more.{setting}" for setting in settings]
    config = read_config(["--config=tests/small_config.py", *flags])
    checks.check(config)
    tokenizer = components.tokenizer(config)
    data = components.load_data(config, tokenizer, training=True)
    lines = data.report_lines()
    assert lines[-1] == "training prompts: 25.0% data.train, 75.0% data.mixture.more"
    assert any(line.startswith("more.jsonl: 60 rows") for line in lines)
    stream = data.train.stream(config.seed)
    prompts = [stream[cursor] for cursor in range(40)]
    assert sum(prompt.key == "data.mixture.more" for prompt in prompts) == 30
    for prompt in prompts[:8]:
        text = f"Answer: {prompt.example.answer}.0"  # right by `strict`, wrong by `dapo`
        tokens = np.array(tokenizer.encode(text), np.int32)
        response = Response(tokens, np.zeros(len(tokens), np.float32), Status.STOPPED)
        (verdict,) = data.train.grade(Group(0, prompt, (response,))).grades[1]
        strict = prompt.key == "data.mixture.more"
        name = "accuracy@mixture.more" if strict else "accuracy@train"
        assert verdict.correct == strict and verdict.measures == {name: float(strict)}
