"""An evaluation rides in the next rollout's session: the same bits, for it and for training."""

import gc
import gzip
import json
import shutil
import weakref

import pytest
from runs import SCHEDULE, contents, digests, responses, rows_without_timings
from shared_programs import STEPS, programs_compiled_once, small_config  # noqa: F401  a fixture

from configs import base
from dapo_jax import train
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.evaluation import Evaluation
from dapo_jax.logs.record import write_responses
from dapo_jax.setup import components, start


def two_sets():
    """Makes a config whose sets are sampled in two ways, and training in a third."""
    config = small_config()
    config.eval.sets.arithmetic.top_p = 0.7
    config.eval.sets.cool = base.dataset(
        kind="arithmetic", levels=(2, 3), count=6, seed=4, k=2, temperature=0.6, top_p=0.9
    )
    config.checkpoint.every_steps = 1
    config.checkpoint.keep = 9
    return config


@pytest.fixture(scope="module")
def riding(tmp_path_factory):
    """A run whose evaluations after 0 and 2 steps rode; the one after the last step is alone.

    A session is gone when the updates begin: its pages and weights are their memory, and no cycle
    may keep them until a collection.
    """
    workdir = tmp_path_factory.mktemp("runs") / "riding"
    workdir.mkdir()
    sessions, alive, update = [], [], train.update

    class Kept(start.Session):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            sessions.append(weakref.ref(self))

    def counted(*args):
        alive.append(sum(session() is not None for session in sessions))
        return update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "Session", Kept)
        patch.setattr(train, "update", counted)
        gc.collect()
        gc.disable()
        try:
            train.train(two_sets(), workdir)
        finally:
            gc.enable()
    assert len(sessions) == STEPS + 1  # the last evaluation's is alone
    assert alive == [0] * STEPS
    assert not any(session() for session in sessions)
    return workdir


def test_an_evaluation_that_rode_gives_what_it_gives_alone(riding, tmp_path):
    """Scores and responses bit for bit, from programs that know the sets' samplings only."""
    config = two_sets()
    tokenizer = components.tokenizer(config)
    programs = components.programs(config, tokenizer.vocab_size)
    sets = components.load_data(config, tokenizer, training=False).eval_sets
    checkpoints = Checkpoints(riding / "checkpoints", keep=9)
    params = checkpoints.restore(2, programs.state)[0].params

    def keep(name, groups):
        write_responses(tmp_path, f"2.{name}", groups)

    streams = components.eval_streams(config, tokenizer, sets)
    session = start.Session(programs.engine, programs.reshard(params, None), *streams)
    with Evaluation(session) as evaluation:
        results = evaluation.finish(report=print, keep=keep)
    theirs = json.loads((riding / "eval" / "2.json").read_text())
    assert theirs["sets"] == results
    assert results["arithmetic"] != results["cool"]
    for name in sets:
        file = f"eval/2.{name}.jsonl.gz"
        assert (tmp_path / file).read_bytes() == (riding / file).read_bytes()
    with gzip.open(riding / "eval" / "2.cool.jsonl.gz", "rt") as file:
        names = [(row["cursor"], row["sample"]) for row in map(json.loads, file)]
    assert names == [(cursor, sample) for cursor in range(6) for sample in range(2)]


@pytest.mark.slow
def test_training_is_the_same_without_evaluations(riding, tmp_path):
    """Responses, rewards and weights bit for bit."""
    config = two_sets()
    config.eval.every_steps = 0
    train.train(config, tmp_path)
    for step in range(STEPS):
        assert responses(tmp_path, step) == responses(riding, step)
        assert digests(tmp_path, step + 1) == digests(riding, step + 1)
    ours, theirs = (
        [
            {k: v for k, v in row.items() if not k.startswith((*SCHEDULE, "eval/"))}
            for row in rows_without_timings(workdir)
        ]
        for workdir in (tmp_path, riding)
    )
    assert ours == theirs
    assert not (tmp_path / "eval").exists()


@pytest.mark.slow
def test_a_run_killed_while_an_evaluation_rides_resumes_bitwise(riding, tmp_path):
    """The checkpoint before it is there, and its evaluation is sampled with the step again."""
    run = tmp_path / "run"
    shutil.copytree(riding, run)
    shutil.rmtree(run / "checkpoints" / "3")
    (run / "eval" / "2.json").write_text("of the run that was killed")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    train.train(two_sets(), run)
    assert rows_without_timings(run) == rows_without_timings(riding)
    assert contents(run / "eval") == contents(riding / "eval")
    assert digests(run, 3) == digests(riding, 3)
