"""Environments that others have published, played from their wheels as a user names them.

`make test-all` puts the packages of published.txt beside the environment; PUBLISHED names another
folder of them. What a game rewards is compared with the package alone, for the same turns.
"""

import importlib
import json
import logging
import os
import pathlib
import random
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from byte_tokenizers import load, written
from processes import wait_for
from small_config import set_of
from test_environments import call

from dapo_jax.tasks.datasets import load_dataset
from dapo_jax.tasks.environments import Episode
from experiments.tasks.textarena import Games, seeded
from tests.ext_tasks.adapters import Gem, Remote, RemoteAsync, Taxi

PUBLISHED = pathlib.Path(os.environ.get("PUBLISHED", pathlib.Path(sys.prefix) / "published"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PUBLISHED / "textarena").is_dir(),
        reason=f"{PUBLISHED} has no published environments: make test-all puts them there",
    ),
]
EPISODES = 4  # of a row, at once
LOADED = 1  # more of each row, while the data is read, and one in all to see who judges


@pytest.fixture(scope="module", autouse=True)
def published():
    """Imports come from the folder last, and nothing of it is left to other tests."""
    root = logging.getLogger()  # which gem-llm sets up when it is imported
    kept = [(it, it[:]) for it in (sys.path, sys.path_hooks, sys.meta_path, root.handlers)]
    level = root.level
    sys.path.append(str(PUBLISHED))
    yield
    for changed, before in kept:  # beartype, which OpenEnv brings, hooks all imports
        changed[:] = before
    root.setLevel(level)
    sys.path_importer_cache.clear()
    for name, module in list(sys.modules.items()):
        if str(PUBLISHED) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def play(tmp_path):
    """Plays some episodes of each row at once, all with the same turns.

    Returns each row's (what its environment said, its reward): its episodes have to agree.
    """
    tokenizer, file = load(written(tmp_path), chat="template"), tmp_path / "rows.jsonl"

    def episode_of(factory, example, turns):
        said = [example.opening]
        with Episode(factory, example, tokenizer.tool_calls) as episode:
            for turn in turns:
                if not (messages := episode.answer(turn)):
                    break
                said += [message["content"] for message in messages]
            return said, episode.verdict().score

    def played(environment, turns, *rows, episodes=EPISODES):
        numbered = ({"prompt": f"Play game {i}.", **row} for i, row in enumerate(rows))
        file.write_text("".join(json.dumps(row) + "\n" for row in numbered))
        how, limit = set_of(path=str(file), environment=environment), {"max_prompt_tokens": 9999}
        data = load_dataset("data.train", how, tokenizer, **limit, environment_seconds=20.0)
        examples = [prompt.example for prompt in data.prompts for _ in range(episodes)]
        with ThreadPoolExecutor(len(examples)) as threads:
            found = threads.map(lambda it: episode_of(data.environment, it, turns), examples)
            found = list(found)
        assert all(found[i] == found[i - i % episodes] for i in range(len(rows) * episodes))
        return found[::episodes]

    return played


@pytest.mark.parametrize(
    ("game", "turns"),
    [
        ("GuessTheNumber-v0", [f"[{n}]" for n in (3, 9, 14, 1, 2, 4, 5, 6, 7, 8)]),
        ("TowerOfHanoi-v0", [f"[{a} {b}]" for a, b in ["AC", "AB", "CB", "AC", "BA", "BC", "AC"]]),
        ("Mastermind-v0", [f"[{n} 2 3 4]" for n in (1, 5, 6)] + ["no move", "nor this"]),
        ("2048-v0-mega-easy", ["[Left]", "[Up]", "[Right]", "[Down]"] * 40),  # draws at each move
    ],
)
def test_games_of_textarena_reward_as_the_package_does(play, game, turns):
    """They leave nothing behind of the module random, which they draw from; an open one is lost."""
    import textarena

    train, test = ({it.extra["seed"] for it in Games(split=it).load()} for it in ("train", "test"))
    assert train and not train & test
    rows, before = [{"game": game, "seed": seed} for seed in (1, 2)], random.getstate()
    assert play("experiments.tasks.textarena:Game", turns[:1], rows[0])[0][1] == -1
    found = play("experiments.tasks.textarena:Game", turns, *rows)
    assert random.getstate() == before
    for (said, reward), row in zip(found, rows, strict=True):
        alone, texts, ends = textarena.make(f"{game}-raw"), [], False
        with seeded(row["seed"]):
            alone.reset(num_players=1, seed=row["seed"])
        for i, turn in enumerate(turns, start=1):
            _, heard = alone.get_observation()
            texts.append("\n".join(text for who, text, _ in heard if who < 0))
            with seeded(row["seed"], i):
                ends, _ = alone.step(turn)
            if ends:
                break
        assert ends and said == ["\n\n" + texts[0], *texts[1:]]
        assert reward == 2 * alone.close()[0][0] - 1


BOXED = {
    "game:Game2048-v0-easy": ["right", "down", "right", "down", "left", "none"],
    "game:Minesweeper-v0-easy": ["reveal 2 2", "flag 0 0", "reveal 0 1", "reveal 1 1", "none"],
    "game:Mastermind-v0-easy": ["1 2", "3 4", "5 6", "2 1", "none"],
}


@pytest.mark.parametrize("game", BOXED)
def test_games_of_gem_reward_as_the_package_does(play, game):
    turns = [f"\\boxed{{{move}}}" for move in BOXED[game]]
    rows = [{"game": game, "seed": seed} for seed in (1, 2)]
    found = play("tests.ext_tasks.adapters:Gem", turns, *rows)
    for (said, reward), row in zip(found, rows, strict=True):
        alone = Gem()
        texts, rewards, ends = [alone.reset(**row)], [], []
        for turn in turns:
            text, gained, *ends, _ = alone.step(turn)
            rewards.append(gained)
            if any(ends):
                break
            texts.append(text)
        assert any(ends) and said == texts and reward == pytest.approx(sum(rewards))


def test_the_taxi_of_gymnasium_drives_by_the_rows_seed(play, monkeypatch):
    """Until gymnasium's own wrapper truncates it."""
    monkeypatch.setattr(Taxi, "closed", 0)
    monkeypatch.setattr(Taxi, "seeds", [])
    moves = ["east", "pick", "north", "drop", "west", "south"] * 40
    found = play("tests.ext_tasks.adapters:Taxi", moves, {}, {})
    assert Taxi.closed == len(Taxi.seeds) == 2 * (EPISODES + LOADED) + 1
    seeds = sorted(set(Taxi.seeds), key=Taxi.seeds.count)
    assert len(seeds) == 2
    for seed in seeds:
        alone, rewards, ends = Taxi(), [], []
        start, _ = alone.reset(seed)
        while not any(ends):
            _, gained, *ends, _ = alone.step(moves[len(rewards)])
            rewards.append(gained)
        assert (sum(rewards), 200) in [(r, len(said)) for said, r in found if said[0] == start]


GSM8K = "gsm8k.multi_turn_env:GSM8kMultiTurnEnv"


@pytest.mark.parametrize(
    ("name", "more", "turns"),
    [
        ("gsm8k.env:GSM8kEnv", {}, ["It is\n#### 42"]),
        ("gsm8k.env:GSM8kEnv", {}, ["It is 42."]),
        (GSM8K, {"max_turns": 3}, ["?", "#### 7", "#### 42"]),
        (GSM8K, {"extra_info": {}}, ["#### 1"] * 5),
        ("aime.env:AIMEEnv", {}, [r"Answer: \boxed{42}"]),
    ],
)
def test_classes_of_skyrl_gym_reward_as_they_do_alone(play, monkeypatch, name, more, turns):
    module, _, kind = name.partition(":")
    kind = getattr(importlib.import_module(f"skyrl_gym.envs.{module}"), kind)
    closed, truth = [], {"ground_truth": "42"}
    monkeypatch.setattr(kind, "close", lambda self: closed.append(self))
    prompt = [{"role": "user", "content": "What is 6 times 7?"}]
    row = {"prompt": prompt, "reward_spec": truth, "reward_model": truth, **more}
    ((said, reward),) = play(f"skyrl_gym.envs.{name}", turns, row)
    assert len(closed) == EPISODES + LOADED
    alone = kind(env_config={}, extras=row)
    assert alone.init(prompt)[0] == prompt
    steps = [alone.step(turn) for turn in turns]
    assert reward == pytest.approx(sum(step["reward"] for step in steps)) and steps[-1]["done"]
    texts = ["".join(it["content"] for it in step["observations"]) for step in steps[:-1]]
    assert said == ["", *texts]


@pytest.fixture(scope="module")
def server(published):
    """OpenEnv's own server of a small game on this machine: a session for each connection."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Number(Action):
        number: int

    class Said(Observation):
        text: str

    class Higher(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        begun = closed = 0
        state = State()

        def reset(self, seed=None, episode_id=None, **more):
            Higher.begun += 1
            self.number, self.calls = random.Random(seed).randrange(100), 0
            return Said(text=f"Game {seed}: find the number below 100.")

        def step(self, action, timeout_s=None, **more):
            self.calls += 1
            right = action.number == self.number
            hint = "right" if right else "higher" if action.number < self.number else "lower"
            reward = 0.5 ** (self.calls - 1) * right
            return Said(text=f"Guess {self.calls}: {hint}", reward=reward, done=right)

        def close(self):
            Higher.closed += 1

    app = create_fastapi_app(Higher, Number, Said, max_concurrent_envs=64)
    bound = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    Remote.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    yield Higher
    running.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", [Remote, RemoteAsync])
def test_a_connection_to_openenvs_server_lives_as_long_as_its_episode(play, server, kind):
    """Guesses are counted by the session: another connection would begin at 1 again."""
    server.begun = server.closed = 0
    numbers = [random.Random(seed).randrange(100) for seed in (1, 2)]
    low, high, *right = (call("guess", number=number) for number in (-1, 100, *numbers))
    turns = [low + high, *right, "done"]
    found = play(f"tests.ext_tasks.adapters:{kind.__name__}", turns, {"seed": 1}, {"seed": 2})
    for (said, reward), seed in zip(found, (1, 2), strict=True):
        assert said[0] == f"Game {seed}: find the number below 100."
        assert said[1:3] == ["Guess 1: higher", "Guess 2: lower"]
        assert said[2 + seed] == f"Guess {2 + seed}: right" and reward == 0.5 ** (1 + seed)
    wait_for(lambda: server.closed == server.begun == 2 * (EPISODES + LOADED) + 1, seconds=9)
