"""The loop as a user runs it: learning signal, resume, the generation cap, what is written."""

import json
import re
import shutil
import types
from unittest import mock

import jax
import numpy as np
import pytest
from runs import responses, rows_without_timings, saved_steps
from shared_programs import STEPS, programs_compiled_once, small_config  # noqa: F401  a fixture

from dapo_jax import train
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.convert import convert
from dapo_jax.evaluation import majority_is_correct, summarize
from dapo_jax.logs.files import read_rows
from dapo_jax.logs.metrics import METRICS
from dapo_jax.process import hosts
from dapo_jax.setup import components, dry_run, policy
from dapo_jax.setup import start as starts
from dapo_jax.setup.start import Parent, is_finished
from dapo_jax.tasks.math_problems import MathTask
from dapo_jax.tasks.tokenizer import load_tokenizer
from dapo_jax.types import Batch, Group, Response, Status, Verdict
from models.hf import load_params
from sharding.mesh import make_mesh

FIRST = {"seconds/load", "seconds/compile"}  # of a start's first row
# Of every row; where nothing is evaluated, or partial over, that is missing.
OPTIONAL = (*FIRST, "seconds/evaluate", "partial_rollouts/", "staleness/", "clip_fraction/tis")
OPTIONAL += ("routes/", "seconds_in_rollout/environment")
EXPECTED_KEYS = {metric.key for metric in METRICS if not metric.key.startswith(OPTIONAL)}
UNEVALUATED, BEST = {"eval.every_steps": 0}, {"checkpoint.best": "arithmetic"}
RARELY_SAVED = {"checkpoint.every_steps": 4}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run: inside a step `place` and `fetch` alone take arrays to and fro."""

    def guarded(run, how):
        def call(*arguments):
            with jax.transfer_guard(how):
                return run(*arguments)

        return call

    workdir = tmp_path_factory.mktemp("runs") / "finished"
    workdir.mkdir()
    with pytest.raises(ValueError, match="--profile=3: give one of the steps 0 to 2"):
        train.train(small_config(), workdir, profile=STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "rl_step", guarded(train.rl_step, "disallow"))
        for name in ("place", "fetch"):
            patch.setattr(hosts, name, guarded(getattr(hosts, name), "allow"))
        train.train(small_config(**BEST, **RARELY_SAVED), workdir, profile=1)
    return workdir


def test_scores_of_a_changed_set_are_not_compared():
    def scored(before, steps, **settings):
        config = small_config(**BEST)
        config.eval.sets.arithmetic.update(settings)
        data = components.load_data(config, components.tokenizer(config), training=True)
        best = starts.best_key(config, data.eval_sets)
        run = types.SimpleNamespace(config=config, best=best)
        row = {"eval/arithmetic/mean@4": steps / 8, "eval/other/mean@4": 0.9}
        scores = train.with_scores(before, {steps: row}, run)
        return scores, list(*map(dict.values, scores.values()))

    first, _ = scored({}, 2)
    for settings, scores in (({}, [0.25, 0.5]), ({"levels": (4,)}, [0.5]), ({"top_p": 0.5}, [0.5])):
        assert scored(first, 4, **settings)[1] == scores


def test_a_run_writes_what_it_promises(finished):
    rows = read_rows(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(STEPS)]
    for row in rows:
        assert set(row) >= EXPECTED_KEYS
        assert set(row) & FIRST == (FIRST if row["step"] == 0 else set())
        assert (row["updates"], row["updates_skipped"]) == (2, 0)
        assert row["ratio_gap"] == 0 and row["grad_norm"] > 0
        assert row["engine/requests"] == 8 * (row["groups/sampled"] + row["groups/cancelled"])
        assert row["groups/informative"] == 4  # a step ends with the last one that it needs
        assert 0 < row["engine/occupancy"] <= 1
        assert row["seconds/total"] > row["seconds/rollout"] + row["seconds/update"] > 0
        assert 0 <= row["engine/unused_tokens_fraction"] < 1  # 0: all that was sampled was needed
        # Of the policy that the step sampled; the last policy's is in a file alone.
        assert ("eval/arithmetic/mean@4" in row) == (row["step"] in (0, 2))
    assert any(row["engine/unused_tokens_fraction"] > 0 for row in rows)
    assert np.sum([row["groups/sampled"] for row in rows]) == rows[-1]["prompts_seen"]
    assert np.sum([row["engine/drawn_tokens"] for row in rows]) == rows[-1]["sampled_tokens_total"]
    assert 0 < rows[-1]["accuracy/mean"] < 1
    files = {n: json.loads((finished / "eval" / f"{n}.json").read_text()) for n in (0, 2, 3)}
    known = {f"{n}": it["sets"]["arithmetic"]["mean@4"] for n, it in files.items()}
    for n in (0, 2):
        assert rows[n]["eval/arithmetic/mean@4"] == known[f"{n}"]
    progress = json.loads((finished / "checkpoints" / "3" / "progress" / "metadata").read_text())
    ((named, found),) = progress["scores"].items()
    assert named.startswith("arithmetic ") and found == known
    # Due every fourth step and at the end; the second is the best of those that had been evaluated.
    assert saved_steps(finished / "checkpoints") == [2, 3]
    assert len([*(finished / "profile").rglob("*.xplane.pb")]) == 1
    assert (finished / "curves.png").stat().st_size
    sampled = [json.loads(line) for line in responses(finished, 2).splitlines()]
    assert len(sampled) == 8 * rows[2]["groups/sampled"]
    assert sum(response["trained"] for response in sampled) == 8 * 4
    assert {response["correct"] for response in sampled} == {True, False}


def test_stopped_and_resumed_equals_uninterrupted_bitwise(finished, tmp_path):
    """Killed behind the checkpoint of step 2, while its row is written: the checkpoint has it."""
    train.train(small_config(num_steps=2), tmp_path)
    file = tmp_path / "metrics.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{second[:30]}")
    train.train(small_config(), tmp_path)
    assert rows_without_timings(tmp_path) == rows_without_timings(finished)
    for step in range(STEPS):
        assert responses(tmp_path, step) == responses(finished, step)
    file.unlink()  # of the finished run
    train.train(small_config(), tmp_path)
    assert [row["step"] for row in read_rows(file)] == [2]


def test_a_run_that_ends_earlier_than_planned_is_evaluated_at_its_end(finished, tmp_path):
    """Stopped after 3 steps of 4, and given again with 3, it showed the evaluation before."""
    stopped = shutil.copytree(finished, tmp_path / "stopped")
    file, config = stopped / "eval" / "3.json", stopped / "config.json"
    expected = file.read_text()
    file.unlink()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_steps": 4}))
    train.train(small_config(**BEST, **RARELY_SAVED), stopped)
    assert file.read_text() == expected
    assert rows_without_timings(stopped) == rows_without_timings(finished)


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_dry_run_checks_and_tells_the_next_step_and_writes_nothing(finished, tmp_path, capsys):
    def lines(workdir, **settings):
        dry_run.dry_run(small_config(**settings), workdir, None)
        return capsys.readouterr().out

    unread = {"algo.policy_loss": "cispo", "algo.dual_clip": 2.0, "learner.lora_alpha": 8.0}
    new = lines(tmp_path / "new", **unread)
    assert "algo.dual_clip = 2.0 has no effect without algo.policy_loss = clip" in new
    assert new.count("has no effect") == 2 and "without learner.lora_rank" in new
    assert "200 rows" in new
    assert re.search(r"first prompt of data\.train, whose answer is '-?\d+':\n  \| Solve the", new)
    assert f"dry run: 0 of 3 steps are done in {tmp_path / 'new'}. Nothing was written" in new
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--workdir=.*/file is a file"):
        lines(tmp_path / "file")
    before = times(finished)
    assert "dry run: 3 of 7 steps are done" in lines(finished, num_steps=7)
    with pytest.raises(ValueError, match=r"num_steps = 2, but the run in .* has finished 3 steps"):
        lines(finished, num_steps=2)
    with pytest.raises(ValueError, match=r"learner\.decay ends at num_steps = 7, but did at 3"):
        lines(finished, num_steps=7, **{"learner.decay": "linear"})
    assert times(finished) == before
    broken = shutil.copytree(finished, tmp_path / "broken")
    (broken / "checkpoints" / "3" / "manifest" / "metadata").write_bytes(b"{")
    told = lines(broken, num_steps=7)
    assert re.search("checkpoints/3/manifest/metadata cannot be read .*: a start would try", told)
    base, weightless = tmp_path / "base", shutil.ignore_patterns("*.safetensors")
    shutil.copytree(small_config().model.path, base, ignore=weightless)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        lines(tmp_path / "new", **{"model.path": str(base)})


def test_a_finished_run_says_so_before_anything_is_loaded(finished, tmp_path, capsys, monkeypatch):
    before = times(finished)
    monkeypatch.setattr(train.start, "open_run", None)  # nothing is opened
    train.train(small_config(), finished)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"finished: 3 of 3 steps in {finished}; raise num_steps to go on")
    assert last == f"curves: {finished / 'curves.png'}"
    assert times(finished) == before
    killed = shutil.copytree(finished, tmp_path / "killed")  # after its last row
    (killed / "curves.png").unlink()
    train.train(small_config(), killed)
    assert (killed / "curves.png").is_file()
    for workdir in (finished, tmp_path):
        assert not is_finished(small_config(num_steps=4), workdir, None)
    with pytest.raises(ValueError, match=r"--start=run:.*@1, but .* began without a --start"):
        train.train(small_config(), finished, Parent(tmp_path, 1))


@pytest.mark.slow
def test_generation_cap_stops_cleanly_or_trains_on_with_an_alarm(tmp_path, capsys):
    """The reference crashes here. Impossible problems: no group is ever informative.

    The alarm comes once, with the second step, which a resumed run takes.
    """
    cap = {"rollout.generation_prompts": 4, "rollout.max_generation_batches": 2}
    cap |= UNEVALUATED | {"verifier.rules": "strict_box"}  # the tiny policy never writes a box
    cap["rollout.on_generation_cap"] = "stop"
    with pytest.raises(SystemExit, match=r"2 generation batches.*0 informative.*0\.0%"):
        train.train(small_config(num_steps=1, **cap), tmp_path)
    assert read_rows(tmp_path / "metrics.jsonl") == []
    cap["rollout.on_generation_cap"] = "train"
    for steps in (1, 1, 2):  # also where the run is finished already: it ended with status 0
        with pytest.raises(SystemExit, match="error: nothing was trained: no step had an update"):
            train.train(small_config(num_steps=steps, **cap), tmp_path)
        lines = [s for s in capsys.readouterr().out.splitlines() if s.startswith("alarm")]
        assert len(lines) == steps - 1
    rows = read_rows(tmp_path / "metrics.jsonl")
    found = [(row["alarm/no_answers"], row["alarms"], row["updates"]) for row in rows]
    assert found == [(1, 0, 0), (2, 1, 0)]
    assert rows[0]["groups/informative"] == 0 and rows[0]["prompts_seen"] == 8
    assert lines[0].startswith("alarm at step 1 (2 steps in a row): 100% of the responses have no")
    assert "rules = 'strict_box'" in lines[0] and "generation" not in lines[0]


def test_a_run_whose_updates_are_left_out_stops_evaluated_and_saved(tmp_path, monkeypatch):
    """Every gradient is NaN. No step follows in whose session the evaluation could ride."""
    nan = train.losses.ADVANTAGES | {"group_std": lambda reward_PG, length_PG: reward_PG * np.nan}
    monkeypatch.setitem(train.losses.CUSTOM, "advantage_scale", nan)
    config = small_config(**{"eval.every_steps": 2})
    with pytest.raises(SystemExit, match="step 1: 4 updates in a row were left out") as stopped:
        train.train(config, tmp_path)
    for text in ("the loss or a metric of it was not finite", "learner.learning_rate = 5e-05"):
        assert text in str(stopped.value)
        assert text in (tmp_path / "log.txt").read_text()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["updates_skipped_in_a_row"] for row in rows] == [2, 4]
    assert {path.name for path in (tmp_path / "eval").glob("*.json")} == {"0.json", "2.json"}
    programs = components.programs(config, components.tokenizer(config).vocab_size)
    state, _ = Checkpoints(tmp_path / "checkpoints", keep=3).restore(2, programs.state)
    same = jax.tree.map(np.array_equal, state.params, programs.start_params())
    assert all(jax.tree.leaves(same))


def test_a_state_that_is_not_finite_ends_the_run_unsaved(tmp_path, monkeypatch):
    """An infinite second moment divides all steps by infinity: loss and gradient stay finite."""
    take = train.update

    def overflowing(*args):
        state, updates = take(*args)
        clip, (adam, *rest) = state.opt_state
        adam = adam._replace(nu=jax.tree.map(lambda nu: nu + np.inf, adam.nu))
        return state.replace(opt_state=(clip, (adam, *rest))), updates

    monkeypatch.setattr(train, "update", overflowing)
    with pytest.raises(ValueError, match=r"step 0: the new state: opt_state\.1\.0\.nu\.embed_VD"):
        train.train(small_config(**UNEVALUATED), tmp_path)
    assert Checkpoints(tmp_path / "checkpoints", keep=3).latest_step() is None


def test_a_run_exports_to_hugging_face(finished, tmp_path):
    """The newest checkpoint's weights, with the tokenizer beside them; or the best one's."""
    scores = {n: json.loads((finished / "eval" / f"{n}.json").read_text()) for n in (2, 3)}
    best = max(scores, key=lambda n: scores[n]["sets"]["arithmetic"]["mean@4"])
    assert policy.load_policy(small_config(**BEST), finished, step="best")[1] == best
    convert(f"run:{finished}", f"hf:{tmp_path}", dtype="float32")
    with pytest.raises(FileNotFoundError, match="no checkpoint 7"):
        convert(f"run:{finished}", f"hf:{tmp_path / 'other'}", dtype="float32", step=7)
    tokenizer = load_tokenizer(tmp_path, stop_tokens=None, chat="none")
    for name in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / name).read_text())
        assert content["eos_token_id"] == tokenizer.stop_ids[0]
    programs = components.programs(small_config(), tokenizer.vocab_size)
    state, _ = Checkpoints(finished / "checkpoints", keep=3).restore(STEPS, programs.state)
    exported = load_params(tmp_path, programs.sizes, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, exported, state.params)


def test_an_export_of_a_spread_start_is_the_policy_that_was_sampled(tmp_path):
    """In float32 it had the start's random bits, and was another policy, without a word."""
    start = small_config().model.path
    config = small_config(num_steps=1, **{"model.compute_dtype": "bfloat16"}, **UNEVALUATED)
    planned = starts.plan_training(config, tmp_path, None)
    saved = Checkpoints(tmp_path / "checkpoints", keep=1)
    saved.fingerprint = fingerprint.of_run(planned.config, planned.data)
    saved.save(1, planned.programs.start_state(), Progress().to_json())
    (tmp_path / "config.json").write_text(planned.config.to_json_best_effort())
    assert "in bfloat16" in convert(f"run:{tmp_path}", f"hf:{tmp_path / 'out'}")
    params, theirs = (
        load_params(path, planned.programs.sizes, dtype="bfloat16")
        for path in (tmp_path / "out", start)
    )
    jax.tree.map(np.testing.assert_array_equal, params, theirs)


def test_scores_by_hand():
    """mean@4, maj@4 and pass@k of two problems, one with a majority for the wrong answer."""

    def group(*predictions):
        verdicts = [Verdict(p == "7", p, "") for p in predictions]
        return Group(
            0, None, tuple(Response(np.zeros(3), None, Status.STOPPED, "", v) for v in verdicts)
        )

    scores = summarize([group("7", "7", None, "3"), group("5", "5", "7", None)])
    expected = {"mean@4": 3 / 8, "maj@4": 1 / 2, "pass@4": 1, "no_answer_fraction": 2 / 8}
    expected["pass@2"] = ((1 - 1 / 6) + (1 - 3 / 6)) / 2
    assert {key: scores[key] for key in expected} == pytest.approx(expected)


def test_spellings_of_one_answer_vote_together_and_nobody_votes_for_none():
    right = [Verdict(True, text, "") for text in ("1/2", r"\frac{2}{4}", "0.50", "2^{-1}", "50\\%")]
    assert majority_is_correct([*[Verdict(False, "7", "")] * 2, *right])
    roots = [Verdict(False, text, "") for text in (r"\sqrt{12}", r"2\sqrt{3}", r"2\cdot3^{1/2}")]
    same = MathTask(rules="symbolic").same
    assert not majority_is_correct([*right[:2], *roots], same)
    assert majority_is_correct([*right[:2], *roots])
    for empty in (None, "", " "):
        silent = [Verdict(False, empty, "")] * 3
        assert majority_is_correct([*silent, right[0]])
        assert not majority_is_correct(silent)


def test_the_learners_old_logprobs_are_those_before_the_first_update(monkeypatch):
    batches = [Batch(**dict.fromkeys(Batch.row_fields(), name), num_micro=1) for name in "ab"]
    monkeypatch.setattr(train.learner, "minibatches", lambda *_: iter(batches))
    seen = []

    def update(state, start_weights, batch, rate):
        seen.append((batch.tokens_BT, batch.old_logp_BT))
        return types.SimpleNamespace(params="a later policy"), {}

    run = mock.MagicMock(update=update)
    run.programs.mesh = make_mesh(data=-1, model=1)
    run.recompute_old_logp = lambda params, start_weights, batch: f"{batch.tokens_BT} by {params}"
    train.update(run, types.SimpleNamespace(params="the first"), None, None, 0.1)
    assert seen == [("a", "a by the first"), ("b", "b by the first")]


def test_minibatches_cover_the_kept_groups_once(monkeypatch):
    """Mini-batches have at most eight responses, in groups of two."""
    monkeypatch.setattr(train.learner, "minibatch", lambda groups, advantage_PG, *_: groups)
    settings = types.SimpleNamespace(update_responses=8)
    for kept, chunks in ((10, ["abcd", "efg", "hij"]), (0, [])):
        rollouts = types.SimpleNamespace(kept=np.arange(kept), sampled="abcdefghijk")
        found = train.learner.minibatches(rollouts, np.zeros((11, 2)), settings, None)
        assert ["".join(groups) for groups in found] == chunks
