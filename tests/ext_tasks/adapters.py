"""Published environments behind a few lines of one's own, to copy.

    PYTHONPATH=tests/ext_tasks python -m dapo_jax.train --config=configs/tiny.py --workdir=DIR \
        --config.data.train.environment=adapters:Taxi

test_published_environments.py plays them.
"""

from experiments.tasks.textarena import seeded


class Gem:
    """A game of gem-llm: the module random draws, the info has the board."""

    def reset(self, game: str, seed: int) -> str:
        import gem

        self.seed, self.turns = seed, 0
        with seeded(seed):
            self.game = gem.make(game)
            text, info = self.game.reset(seed=seed)
        return text + info.get("suffix", "")

    def step(self, text: str):
        self.turns += 1
        with seeded(self.seed, self.turns):
            text, *outcome, info = self.game.step(text)
        return text + info["suffix"], *outcome, info


class Taxi:
    """Gymnasium's taxi, its state as text."""

    MOVES = ("south", "north", "east", "west", "pick", "drop")
    seeds, closed = [], 0

    def __init__(self):
        import gymnasium

        self.taxi = gymnasium.make("Taxi-v4")

    def reset(self, seed: int):
        self.seeds.append(seed)
        state, info = self.taxi.reset(seed=seed)
        return str(self.taxi.unwrapped.decode(state)), info

    def step(self, text):
        state, *outcome = self.taxi.step(self.MOVES.index(text) if text in self.MOVES else 0)
        return str(self.taxi.unwrapped.decode(state)), *outcome

    def close(self):
        self.taxi.close()
        Taxi.closed += 1


class Remote:
    """OpenEnv's client behind a tool, as TRL's guide has it."""

    url = "http://127.0.0.1:8000"

    def __init__(self):
        from openenv.core import GenericEnvClient

        self.client, self.reward = GenericEnvClient(base_url=self.url).sync(), 0.0

    def reset(self, seed: int, **columns) -> str:
        return self.client.reset(seed=seed).observation["text"]

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: the guess
        """
        return self._said(self.client.step({"number": number}))

    def _said(self, result) -> str:
        self.reward += result.reward
        return result.observation["text"]

    def close(self):
        return self.client.close()


class RemoteAsync(Remote):
    """The same with the client that is async, whose connection belongs to one event loop."""

    def __init__(self):
        super().__init__()
        self.client = self.client.async_client

    async def reset(self, seed: int, **columns) -> str:
        return (await self.client.reset(seed=seed)).observation["text"]

    async def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: the guess
        """
        return self._said(await self.client.step({"number": number}))
