"""The finished groups of an interrupted evaluation: what is taken of their file, and what is not.

tests/test_riding.py has one that is interrupted and goes on.
"""

import base64
import dataclasses
import json
import zlib

import numpy as np
import pytest
from test_train import small_config

from dapo_jax import evaluate
from dapo_jax.run import build
from dapo_jax.run.begun import Begun
from dapo_jax.types import Group, Prompt, Response
from models.rope import YarnScaling

PROMPTS = [Prompt(np.int32([1, 2])), Prompt(np.int32([3]))]


def begun_in(workdir, *, how="a"):
    return Begun(workdir, "0.sums", how=how, prompts=PROMPTS, k=1, say=print)


def group_of(cursor, tokens):
    tokens_T = np.int32(tokens)
    response = Response(tokens_T, np.zeros(len(tokens_T), np.float32), stopped=True)
    return Group(cursor, PROMPTS[cursor], (response,))


@pytest.mark.parametrize(
    "change",
    [
        *({"prompt": None}, {"stopped": None}, {"stopped": []}, {"stopped": 3}, {"tokens": None}),
        *({"tokens": 3}, {"tokens": [3]}, {"tokens": ["abc"]}, {"tokens": ["eJw"]}),
        *({"tokens": [base64.b64encode(zlib.compress(b"abc")).decode()]}, {"cursor": True}),
    ],
    ids=str,
)
def test_a_damaged_line_of_an_interrupted_evaluation_is_left_out(tmp_path, change):
    """A command that ended with a traceback at it would have done so each time; None: no such key.

    What is whole before and after it is taken.
    """
    before = begun_in(tmp_path)
    before.add(group_of(1, [7, 8]))
    path = tmp_path / "eval" / "0.sums.begun.jsonl"
    whole = json.loads(path.read_text())
    changed = {key: value for key, value in (whole | change).items() if value is not None}
    path.write_text(f"{json.dumps(changed)}\n[3]\n\n")
    before.add(group_of(0, [9]))
    assert list(begun_in(tmp_path).responses) == [0]
    assert [json.loads(line)["cursor"] for line in path.read_text().splitlines()] == [0]


def test_two_evaluations_of_different_policies_in_one_file_are_told_apart(tmp_path):
    """The weights in a directory were replaced while their evaluation went on."""
    old = begun_in(tmp_path, how="old")
    old.add(group_of(0, [1]))
    new = begun_in(tmp_path, how="new")
    old.add(group_of(1, [2]))
    new.add(group_of(0, [3]))
    taken = begun_in(tmp_path, how="new").responses
    assert {cursor: it.tokens_T.tolist() for cursor, (it,) in taken.items()} == {0: [3]}


def test_an_evaluation_goes_on_where_its_finished_groups_cannot_be_kept(tmp_path, capsys):
    begun = begun_in(tmp_path)
    path = tmp_path / "eval" / "0.sums.begun.jsonl"
    path.unlink()
    path.mkdir()
    begun.add(group_of(0, [1]))
    begun.add(group_of(1, [2]))
    begun.remove()
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{path}: Is a directory; the evaluation goes on")


def test_what_samples_an_evaluation_is_told_by_all_that_its_tokens_depend_on():
    """A model's directory may be changed in place, with its weights as they were."""
    config = small_config()
    tokenizer = build.tokenizer(config)
    sizes, sampling = build.model_sizes(config), build.sampling(config, tokenizer)
    how = evaluate.sampled_by("weights", sizes, sampling)
    assert how == evaluate.sampled_by("weights", sizes, dataclasses.replace(sampling))
    scaled = dataclasses.replace(
        sizes, rope_scaling=YarnScaling(factor=4.0, original_max_position_embeddings=64)
    )
    others = [
        evaluate.sampled_by("others", sizes, sampling),
        evaluate.sampled_by("weights", scaled, sampling),
        evaluate.sampled_by("weights", sizes, dataclasses.replace(sampling, stop_ids=(5, 6))),
        evaluate.sampled_by("weights", sizes, dataclasses.replace(sampling, temperature=0.5)),
    ]
    assert len({how, *others}) == 5
