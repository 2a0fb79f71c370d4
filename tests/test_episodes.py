"""Episodes: tokens between turns, the engine that is given them, environments and their ends."""

import dataclasses
import json
import re
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from byte_tokenizers import CHATML, CONTROL, WHOLE, Letters, bpe, load, written
from engines import (
    EXPERTS,
    FEW,
    ROOMY,
    SAMPLING,
    SMALL,
    Scripted,
    build,
    chosen,
    interrupted,
    same_bits,
    sample_prompts,
    teacher_forced,
)
from processes import ROOT, ran
from quick import random_params
from runs import rows_without_timings
from shared_programs import programs_compiled_once, small_config  # noqa: F401  a fixture
from test_environments import QWEN3, call, play
from transformers import AutoTokenizer

from dapo_jax import train
from dapo_jax.episodes import End, Environments
from dapo_jax.logs.files import read_zipped_rows
from dapo_jax.sampler import session as session_module
from dapo_jax.sampler.session import LONG_ANSWER, Session
from dapo_jax.tasks import calls
from dapo_jax.tasks.environments import EnvironmentFailed, Episode, Factory
from dapo_jax.types import Example, Prompt, Response, Status
from experiments.tasks.guess import Guess, Guesses, Silent
from tests.ext_tasks.slow import Slow

EXAMPLE = Example(({"role": "user", "content": "Go"},), "7", "rows", 3, {"secret": 7})

# The tokens between two turns.

GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('roles alternate') }}{% endif %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "special", "role"),
    [
        (CHATML, CONTROL, "tool"),
        (QWEN3, CONTROL, "tool"),
        (GEMMA, ("<bos>", "<turn>", "<end>"), "user"),
        (MISTRAL, ("<s>", "[INST]", "[/INST]", "</s>"), "user"),
    ],
)
def test_prompt_turn_and_what_is_between_are_the_whole_conversation(
    template, special, role, tmp_path
):
    """The newline behind the end that is sampled too: it is nobody's token but the template's."""
    folder = written(tmp_path, template, bpe(special=special), eos_token=special[-1])
    tokenizer, library = load(folder, chat="template"), AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "Higher or lower?"}]
    turn = tokenizer.encode("50")
    end = library.convert_tokens_to_ids(special[-1])
    answers = [{"role": "tool", "content": "higher"}]
    ours = [*tokenizer.encode_chat(asked), *turn, end, *tokenizer.between(answers, end)]
    whole = [*asked, {"role": "assistant", "content": "50"}, {"role": role, "content": "higher"}]
    assert ours == library.apply_chat_template(whole, **WHOLE)
    other = tokenizer.between(answers, 0)  # a turn that ended otherwise gets the template's end too
    assert other == [end, *tokenizer.between(answers, end)]
    notes = " ".join(tokenizer.check_turns(with_tools=False))
    assert ("rewrites earlier turns" in notes) == (template is QWEN3)


# The engine.


SPARE = dataclasses.replace(ROOMY, slots=20, pages=90, max_response_tokens=40, turns=True)
SCARCE = dataclasses.replace(SPARE, slots=9, pages=14)
LONG = dataclasses.replace(SAMPLING, max_response_tokens=40)


def played(engine, params, environments):
    how = {"prompts": FEW, "group_size": 5, "environments": environments}
    return sample_prompts(engine, params, LONG, **how)[0]


KINDS = [(SMALL, LONG_ANSWER), (SMALL, 2), pytest.param((EXPERTS, 2), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS, ids=["fed", "computed", "experts"])
def reference(request):
    """With answers fed in the block, and those over two tokens computed together."""
    config, longest = request.param
    params = random_params(config)[1]
    engine, *rest = build(config, SPARE, params)
    restore = Session._restore
    with mock.patch.object(session_module, "LONG_ANSWER", longest):
        with mock.patch.object(Session, "_restore", autospec=True, side_effect=restore) as restored:
            expected = played(engine, *rest, Scripted())
        assert restored.called == (longest == 2)
        yield config, params, expected


@pytest.mark.parametrize(("cache", "shards"), [(SCARCE, 1), (SPARE, 2), (SCARCE, 2)])
def test_an_episodes_bits_depend_on_no_schedule(cache, shards, reference):
    """Slow answers, few pages that preempt, and shards between which samples move."""
    config, params, expected = reference
    rng = np.random.default_rng(0)
    slow = Scripted(lambda: rng.exponential(0.02))
    found = played(*build(config, cache, params, shards=shards), slow)
    assert found.keys() == expected.keys() and len(expected) == 20
    same_bits(found, expected)


class OneOpen(Scripted):
    """One episode is open at a time; the first turns of the others wait for its end."""

    def __init__(self):
        super().__init__()
        self.open, self.held, self.rounds = None, [], 0

    def ask(self, where, prompt, response, room):
        super().ask(where, prompt, response, room)
        if self.open in (None, where):
            self.open = where
        else:
            self.held.append(self.ready.pop())

    def answers(self, *, wait):
        self.rounds += 1
        assert self.rounds < 999  # 60 are enough
        found, self.ready = [it for _, it in self.ready], []
        if any(isinstance(answer, End) for _, answer in found):
            self.open = None
        if self.open is None and self.held:
            self.ready.append(self.held.pop(0))
            self.open = self.ready[0][1][0]
        return found


def test_few_open_environments_and_few_pages_end(reference):
    """The pages of turns that waited made the one that went on begin anew, for ever."""
    config, params, expected = reference
    found = played(*build(config, SCARCE, params), OneOpen())
    same_bits(found, expected)


@pytest.mark.parametrize(
    ("cache", "sessions"), [(SPARE, [(1,), (2, 1), (4, 1)]), (SCARCE, [(3, 1, 6), (7, 1)])]
)
def test_an_episode_goes_on_in_other_sessions_as_if_it_had_never_stopped(
    cache, sessions, reference
):
    """Turns without an answer yet too, whose environment is asked again; by what is saved.

    sessions: the blocks of each but the last.
    """
    config, params, expected = reference
    engine = build(config, cache, params)
    waited = 0
    for blocks in sessions:
        how = {"sampling": LONG, "environments": Scripted}
        responses, partial = interrupted(*engine, blocks=blocks, **how)
        left = [response.status for group in partial for response in group.responses]
        waited += left.count(Status.WAITING)
        assert responses.keys() == expected.keys()
        same_bits(responses, expected)
    assert waited


def test_given_tokens_stand_where_the_environment_put_them_and_are_seen(reference):
    """Each log-probability is that of the whole text, as one forward pass has it."""
    config, params, responses = reference
    assert any(response.given_T is not None for response in responses.values())
    logits = teacher_forced((random_params(config)[0], params), responses)
    for (cursor, sample), response in responses.items():
        given, sampled_T = np.flatnonzero(~response.sampled_T), response.sampled_T
        assert np.all(response.behavior_logp_T[given] == 0)
        for i in given[np.diff(given, prepend=-2) > 1]:
            assert response.tokens_T[i - 1] in SAMPLING.stop_ids  # a turn ended
            assert response.tokens_T[i : i + 2].tolist() == [3, 50 + cursor % 7]
        assert len(response.tokens_T) <= 40
        logp_T = chosen(logits[cursor, sample] / LONG.temperature, response.tokens_T)
        assert np.abs(response.behavior_logp_T - logp_T)[sampled_T].max() <= 1e-5


# Contracts.


class Tools:
    """A class of TRL's contract: tools beside what begins and rewards an episode."""

    def reset(self, secret: int, **columns) -> str:
        self.secret, self.found = secret, []
        return f" for {secret} steps"

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: the first
            b: the second
        """
        self.found.append(a * b)
        return a * b

    async def sleep(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: how long
        """
        time.sleep(seconds)
        return "slept"

    def leave(self, code: int) -> str:
        """Ends the program.

        Args:
            code: its status
        """
        sys.exit(code)

    def get_reward(self) -> float:
        return float(42 in self.found)

    def close(self):
        """Is no tool, whatever it says of itself."""


class Done(Tools):
    """It says itself when it is done; a method of rewards goes before an attribute."""

    reward = -5.0

    def is_done(self) -> bool:
        return bool(self.found)


def test_a_class_of_trls_contract_is_played():
    factory = Factory("tools:Tools", Tools, seconds=0.3)
    names = [schema["function"]["name"] for schema in factory.schemas]
    assert names == ["leave", "multiply", "sleep"]
    parameters = factory.schemas[1]["function"]["parameters"]
    assert parameters["properties"]["a"] == {"type": "integer", "description": "the first"}
    assert factory.introduced(EXAMPLE).text == "Go for 7 steps"
    episode = Episode(factory, EXAMPLE)
    (answer,) = episode.answer(call("multiply", a=6, b=7))
    assert answer == {"role": "tool", "name": "multiply", "content": "42"}
    for text, said in (
        (call("multiply", a=6), "missing a required argument: 'b'"),
        (call("divide", a=6), "there is no tool 'divide', only leave, multiply, sleep"),
        ("<tool_call>{6}</tool_call>", "the call is no JSON"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "the call is no JSON"),
        (call("leave", code=3), "SystemExit: 3"),
        (call("multiply", a="\ud83d", b=2), "??"),
        (call("sleep", seconds=1), "no answer within 0.3 s"),
    ):
        assert said in episode.answer(text)[0]["content"]
    assert episode.answer(call("sleep", seconds=0.0))[0]["content"] == "slept"
    assert episode.answer("I am done.") == []
    verdict = episode.verdict()
    assert (verdict.correct, verdict.score) == (True, 1.0)
    assert episode.measures == {"calls": 9.0, "failed_calls": 6.0, "timeouts": 1.0}
    ends = Episode(Factory("tools:Done", Done, 1.0), EXAMPLE)
    assert ends.answer(call("multiply", a=6, b=7)) == [] and ends.verdict().score == 1.0


def test_the_guides_environment_of_30_lines_works_as_it_is_written():
    guide = (ROOT / "dapo_jax" / "tasks" / "README.md").read_text()
    part = guide[guide.index("## Episodes") : guide.index("## The verifier's rules")]
    (code,) = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    exec(code, module := {"__name__": "shop"})
    factory = Factory("shop:Shop", module["Shop"], 1.0)
    assert [schema["function"]["name"] for schema in factory.schemas] == ["pay", "price"]
    example = dataclasses.replace(EXAMPLE, extra={"things": ["pear", "plum"]})
    assert factory.introduced(example).text == "Go You want pear, plum."
    episode = Episode(factory, example)
    assert episode.answer(call("price", thing="fig"))[0]["content"] == "Error: 'fig'"
    assert episode.answer(call("price", thing="pear"))[0]["content"] == "4"
    assert episode.answer(call("pay", amount=6))[0]["content"] == "thank you"
    assert episode.answer("Done") == [] and episode.verdict().correct


def test_the_game_of_experiments_is_won_by_halving():
    examples, _ = Guesses(count=20, split="test").load()
    for example in examples:
        episode, answer = Episode(Factory("x:Guess", Guess, 1.0), example), "begin"
        low, high = map(int, re.findall(r"\d+", example.text))
        while answer:
            middle = (low + high) // 2
            answer = episode.answer(f"It is {middle}.")
            low, high = (middle + 1, high) if "higher" in str(answer) else (low, middle - 1)
        assert episode.verdict().correct
    silent = Episode(Factory("x:Silent", Silent, 1.0), examples[0])
    assert silent.answer("1") == [{"role": "user", "content": "My number is not 1."}]


def test_the_forms_of_calls_are_read():
    one = {"name": "f", "arguments": {"x": 1}}
    assert calls.either(call("f", x=1)) == [one]
    assert calls.tagged(f"<tool_call>{json.dumps([one, one])}</tool_call>") == [one] * 2
    llama = '{"name": "f", "parameters": {"x": 1}}'
    assert calls.bare(f"<|python_tag|>{llama}") == calls.either(llama) == [one]
    assert calls.either("f(x=1)") == calls.either('{"name": "Alice"}') == []
    (wrong,) = calls.either('<tool_call>{"name": "f", "arguments": 1}')
    assert wrong == "the arguments of f have to be an object"
    thought = f"<think>{call('f', x=1)}"
    assert calls.said(f"{thought}</think>so") == "so" and calls.said(thought) == ""
    assert calls.said(call("f", x=1), "<think>\n") == ""


# Qwen3.5's calls are no JSON; the other's are.
XML = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
    },
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
JSON = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
JSON["transform"] = {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
GIVEN = "<parameter=a>\n6\n</parameter>\n<parameter=b>\n7\n</parameter>\n"
CALL = f"So:\n<tool_call>\n<function=multiply>\n{GIVEN}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("calls", "turn", "said"),
    [
        (XML, CALL * 2, ["42", "42"]),
        (XML, "<tool_call>multiply", ["Error: the call is no JSON"]),
        (JSON, '<tool_call>{"name": "multiply"</tool_call>', ["Error: the call is no JSON"]),
        (JSON, "<tool_call>3</tool_call>", ['Error: a call has to be {"name"']),
    ],
)
def test_a_models_own_form_of_calls_is_read_by_its_response_template(calls, turn, said, tmp_path):
    """A turn in which it finds no call is read as the others are; the library raises there."""
    fields = {"tool_calls": calls, "content": {"close": "<|im_end|>", "content": "text"}}
    template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    folder = written(tmp_path, response_template=template)
    given = {"k": Factory("x", Tools, 1.0)}
    running = Environments(given, load(folder, chat="template"), max_turns=2)
    begun = Response(np.zeros(1, np.int32), np.zeros(1, np.float32), Status.WAITING)
    prompt = Prompt(np.zeros(1, np.int32), EXAMPLE, "k")
    answers = running._replayed((0, 0), prompt, begun).answer(turn)
    assert all(it["content"].startswith(text) for it, text in zip(answers, said, strict=True))


class Multiply:
    """SkyRL-Gym's contract: init, and step with observations, reward and done."""

    def __init__(self, env_config, extras):
        self.truth, self.turns = extras["secret"], 0
        self.most = env_config.get("most") or 2
        assert self.most == (env_config.most or 2)

    def init(self, prompt):
        return [*prompt, *({"role": "user", "content": text} for text in "?!")], {}

    def step(self, action):
        self.turns += 1
        right = action == str(self.truth)
        done = right or self.turns == self.most
        silent = done or action == "print()"
        observations = [] if silent else [{"role": "user", "content": "Try again"}]
        return {"observations": observations, "reward": float(right), "done": done, "metadata": {}}


class Replacing(Multiply):
    """Writes a prompt of its own."""

    def init(self, prompt):
        return [{"role": "system", "content": "Think."}], {}


class Gym:
    """Gymnasium's contract: an observation and its info, and step's tuple of five."""

    def reset(self):
        return "?", {}

    def step(self, action):
        return "more", 0.5, action == "stop", False, {}


def test_stepped_contracts_are_played():
    episode = Episode(Factory("x:Multiply", Multiply, 1.0), EXAMPLE)
    assert episode.opening == "?\n\n!"
    assert episode.answer("6") == [{"role": "user", "content": "Try again"}]
    assert episode.answer("7") == [] and episode.verdict().score == 1.0
    longer = dataclasses.replace(EXAMPLE, extra={"secret": 7, "env_config": {"most": 3}})
    episode = Episode(Factory("x:Multiply", Multiply, 1.0), longer)
    assert episode.answer("print()") == [{"role": "user", "content": ""}]
    assert episode.answer("6") and not episode.answer("6") and not episode.verdict().correct
    with pytest.raises(EnvironmentFailed, match="init replaces the prompt"):
        Episode(Factory("x:Replacing", Replacing, 1.0), EXAMPLE)
    episode = Episode(Factory("x:Gym", Gym, 1.0), EXAMPLE)
    assert episode.opening == "?"
    assert episode.answer("on") == [{"role": "user", "content": "more"}]
    assert episode.answer("stop") == [] and episode.verdict().score == 1.0


class Broken:
    """Fails in `step` so many times, or answers otherwise when it is asked again."""

    failures, says, closed = 0, iter(()), 0

    def close(self):
        Broken.closed += 1

    def reset(self):
        pass

    def step(self, text):
        if text == "b" and Broken.failures > 0:
            Broken.failures -= 1
            raise OSError("the server is gone")
        return next(Broken.says, "same")

    reward = 1.0


BROKEN = SimpleNamespace(prompts=[Prompt(np.array([1]), EXAMPLE, "data.train")])


def broken(*, failures=0, says=(), max_turns=3):
    """Environments of Broken alone, which fails so many times, and says this before "same"."""
    Broken.failures, Broken.says, Broken.closed = failures, iter(says), 0
    factories = {"data.train": Factory("x:Broken", Broken, 1.0)}
    return Environments(factories, Letters(), max_turns=max_turns)


def plays(running, texts, **how):
    """Plays turns, a letter each; returns the last answer."""
    return play(BROKEN, Letters(), *texts, running=running, **how)[0]


@pytest.mark.parametrize(
    ("failures", "says", "message"),
    [
        (3, (), r"rows, row 3: x:Broken.step failed: OSError: the server is gone; turn 1: 'a'"),
        (1, ("first", "other", "third"), "answers .*third.* to a turn to which .*first.* before"),
    ],
)
def test_what_fails_outside_a_tool_is_no_wrong_answer(failures, says, message):
    """Made anew, it gets the turns again; three times, or another answer, end the run by name."""
    assert plays(broken(failures=2), "abc").verdict.score == 1.0
    with pytest.raises(EnvironmentFailed, match=message):
        plays(broken(failures=failures, says=says), "abc")


@pytest.mark.parametrize(
    ("before", "says", "error"),
    [
        (b"same", (), None),
        (b"same", ("other",) * 3, "answers .*other.* which it answered 'same'"),
        (b"Error: no answer within 3 s", ("late",), None),
    ],
)
def test_an_episode_that_goes_on_elsewhere_is_played_again(before, says, error):
    """With its own answers, or the run ends by the name of the environment.

    A tool that took too long once answers the next time: no checkpoint could have gone on.
    """
    tokens, running = [*b"a", 0, *before, *b"b", 9], broken(says=says, max_turns=2)
    given = np.isin(np.arange(len(tokens)), range(2, 2 + len(before)))
    response = Response(np.array(tokens), np.zeros(len(tokens)), Status.WAITING, given_T=given)
    running.ask((0, 0, 0), BROKEN.prompts[0], response, 100)
    with pytest.raises(EnvironmentFailed, match=error) if error else nullcontext():
        ((_, answer),) = running.answers(wait=True)
        assert [turn["content"] for turn in answer.turns][::2] == ["a", "b\t"]
        assert answer.measures["turns"] == 2 and Broken.closed == 1


def test_a_thread_that_would_die_gives_an_answer(monkeypatch):
    """A tool's result that calls exit() where it is written as text: the run waited for ever."""
    monkeypatch.setattr(Letters, "between", lambda *_: sys.exit(3))
    with pytest.raises(EnvironmentFailed, match="rows, row 3: 3"):
        plays(broken(), "ab")
    monkeypatch.setattr(Letters, "decode", lambda *_: 1 / 0)
    with pytest.raises(EnvironmentFailed, match="rows, row 3: division by zero"):
        plays(broken(), "a")


def test_turns_are_limited_and_a_cut_one_is_rewarded_alone():
    answer = plays(broken(max_turns=2, says=["again"]), "ab")
    assert answer.measures["turns"] == 2
    assert answer.measures["environment_tokens"] == len("again")  # and four are sampled
    said = [tuple(turn.values()) for turn in answer.turns]
    assert said == [("assistant", "a"), ("environment", "again"), ("assistant", "b")]
    cut = plays(broken(), "a", room=len("same"))
    assert (answer.status, cut.status) == (Status.STOPPED, Status.CUT)


# Runs.


def run(workdir, num_steps, **more):
    keys = {
        "num_steps": num_steps,
        "data.train.environment": "tests.ext_tasks.slow:Slow",
        "eval.sets.arithmetic.environment": "tests.ext_tasks.retry:Retry",
        **{"eval.every_steps": 1, "checkpoint.every_steps": 1},
    }
    train.train(small_config(**keys | more), workdir)
    return rows_without_timings(workdir)


def test_episodes_go_on_in_the_next_step_and_resume_bitwise(tmp_path, monkeypatch):
    """Whatever the times that environments take: all rows are the same, the engine's too.

    A session is closed, so that keys and values are computed again, where a run may resume alone.
    """
    monkeypatch.setattr(Slow, "seconds", (0.0, 0.01))
    # The evaluation fills all slots before training has one.
    goes_on = {"rollout.partial_rollout_steps": 2, "eval.sets.arithmetic.count": 12}
    goes_on["checkpoint.every_steps"] = 2
    close = Session.close
    with mock.patch.object(Session, "close", autospec=True, side_effect=close) as closed:
        rows = run(tmp_path / "whole", 3, **goes_on)
    assert closed.call_count == 2
    run(tmp_path / "stopped", 2, **goes_on)
    saved = tmp_path / "stopped" / "checkpoints" / "2" / "progress" / "metadata"
    assert "given" in saved.read_text()
    assert run(tmp_path / "stopped", 3, **goes_on) == rows
    assert rows[0]["ratio_gap"] == rows[0]["staleness/max_steps"] == 0
    assert rows[-1]["staleness/mean_steps"] >= rows[-1]["staleness/tokens_fraction"] > 0
    assert all(it["partial_rollouts/groups"] and not it["groups/cancelled"] for it in rows)
    assert max(row["task/turns"] for row in rows) > 1
    assert max(row["task/environment_tokens"] for row in rows) > 0
    for row in read_zipped_rows(tmp_path / "whole" / "rollouts" / "0.jsonl.gz"):
        who, said = zip(*(turn.values() for turn in row["turns"]), strict=True)
        turns = int(row["measures"]["turns"])
        assert who == (*["assistant", "environment"] * (turns - 1), "assistant")
        assert set(said[1::2]) <= {"No. Again:"} and row["response"].startswith(said[0])


@pytest.mark.slow
def test_sample_prints_an_episode_turn_by_turn(tmp_path):
    run(tmp_path, 1, **{"eval.every_steps": 0})
    ask = ("-m", "dapo_jax.sample", f"--workdir={tmp_path}", "--max_tokens=200")
    assert " tokens in" in ran(*ask, "--prompt=7*8=", "--template=dapo").stderr
    printed = ran(
        *(*ask, "--environment=retry:Retry", '--columns={"answer": "none"}', "--prompt=60-23+37"),
        PYTHONPATH=f"{ROOT / 'tests' / 'ext_tasks'}",
    ).stdout
    said = re.findall(r"^\[(\w+)\] (.*)", printed, re.MULTILINE)
    turns = int(re.search(r", turns (\d), ", said[-1][1])[1])
    between = ["assistant", "environment"] * (turns - 1)
    assert turns > 1 and [who for who, _ in said] == [*between, "assistant", "end"]
    assert said[1][1] == "No. Again:" and said[-1][1].startswith("wrong, reward -1; ")
