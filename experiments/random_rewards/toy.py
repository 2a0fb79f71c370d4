"""The same question of a table: one softmax over a few tokens, plain gradient steps, coins.

    python -m experiments.random_rewards.toy

prints, for each start at unequal or equal shares, each clip range and learning rate, the change of
the entropy after 30 steps of 8 updates against that without clips, with its standard error over the
runs, and the share of samples clipped high: what the clips do where no network, optimizer or drift
of the text is in between.
"""

import numpy as np

GROUPS, GROUP_SIZE, UPDATES, STEPS, RUNS = 64, 8, 8, 30, 400
UNEQUAL = [0.4, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01]
STARTS = {
    "eight unequal shares": UNEQUAL,
    "eight equal shares": [1 / 8] * 8,
    "four equal shares, as the words of a line": [1 / 4] * 4,
    "shares of .50, .35 and .15, as the words of a plan": [0.5, 0.35, 0.15],
}
RANGES = {
    "0.2, 0.2": (0.2, 0.2),
    "0.2, 0.28": (0.2, 0.28),
    "0.2, 0.4": (0.2, 0.4),
    "0.2, none": (0.2, np.inf),
    "0.1, 0.28": (0.1, 0.28),
    "none": (1.0, np.inf),
}
# Which of the tokens, by their shares, an upper clip of 0.2 holds.
HELD = {
    "nobody": (),
    "0.40": (0,),
    "0.25, 0.15": (1, 2),
    "0.08 and less": range(3, 8),
    "all": range(8),
}
RATES = (0.5, 1.0, 2.0, 4.0, 8.0)


def softmax(logits_RV: np.ndarray) -> np.ndarray:
    """The probabilities of each run's tokens."""
    exp_RV = np.exp(logits_RV - logits_RV.max(axis=1, keepdims=True))
    return exp_RV / exp_RV.sum(axis=1, keepdims=True)


def entropy(p_RV: np.ndarray) -> np.ndarray:
    """Nats, of each run."""
    return -np.sum(p_RV * np.log(np.maximum(p_RV, 1e-300)), axis=1)


def advantages(rng: np.random.Generator) -> np.ndarray:
    """Normalised coins (Eq. 9), [runs, samples]; 0 in a group of equal ones."""
    coin_RPG = rng.integers(0, 2, size=(RUNS, GROUPS, GROUP_SIZE)).astype(float)
    centred_RPG = coin_RPG - coin_RPG.mean(axis=2, keepdims=True)
    spread_RP1 = coin_RPG.std(axis=2, ddof=1, keepdims=True)
    return (centred_RPG / np.where(spread_RP1 > 0, spread_RP1, 1.0)).reshape(RUNS, -1)


def run(start: list[float], low: float, high, rate: float) -> tuple[np.ndarray, float]:
    """(entropy of each run at the end, the share of samples clipped high).

    Eq. 8's gradient in the logits, A r (onehot - p), where neither bound is passed. The same seed
    for every range. high: of all tokens, or of each.
    """
    high_V = np.broadcast_to(high, len(start))
    rng = np.random.default_rng(0)
    logits_RV = np.tile(np.log(start), (RUNS, 1))
    index_R1 = np.arange(RUNS)[:, None]
    clipped = []
    for _ in range(STEPS):
        old_RV = softmax(logits_RV)
        uniform_RN = rng.random((RUNS, GROUPS * GROUP_SIZE))
        cumulative_RV = old_RV.cumsum(axis=1)
        token_RN = (uniform_RN[:, :, None] > cumulative_RV[:, None, :-1]).sum(axis=2)
        advantage_RN = advantages(rng)
        for part in np.split(np.arange(GROUPS * GROUP_SIZE), UPDATES):
            token, advantage = token_RN[:, part], advantage_RN[:, part]
            p_RV = softmax(logits_RV)
            ratio = p_RV[index_R1, token] / old_RV[index_R1, token]
            too_high = (advantage > 0) & (ratio > 1 + high_V[token])
            too_low = (advantage < 0) & (ratio < 1 - low)
            weight = np.where(too_high | too_low, 0.0, advantage * ratio) / len(part)
            step_RV = -weight.sum(axis=1, keepdims=True) * p_RV
            np.add.at(step_RV, (np.broadcast_to(index_R1, token.shape), token), weight)
            logits_RV = logits_RV + rate * step_RV
            clipped.append(too_high.mean())
    return entropy(softmax(logits_RV)), float(np.mean(clipped))


def main():
    heads = [f"rate {rate}" for rate in RATES]
    for shares, start in STARTS.items():
        print(f"\n{shares}, {entropy(np.array([start]))[0]:.2f} nats\n")
        print(f"| eps_low, eps_high | {' | '.join(heads)} |\n|---|{'---|' * len(RATES)}")
        free = {rate: run(start, *RANGES["none"], rate)[0] for rate in RATES}
        for name, bounds in RANGES.items():
            cells = []
            for rate in RATES:
                nats_R, clipped = run(start, *bounds, rate)
                change_R = nats_R - free[rate]
                error = change_R.std(ddof=1) / RUNS**0.5
                change = f"{change_R.mean():+.3f} ± {error:.3f}"
                nats = f"{nats_R.mean():.2f}" if name == "none" else change
                cells.append(f"{nats} ({clipped:.1%})")
            print(f"| {name} | {' | '.join(cells)} |")
    print("\neight unequal shares, an upper clip of 0.2 for some tokens only\n")
    print(f"| held | {' | '.join(heads)} |\n|---|{'---|' * len(RATES)}")
    for name, tokens in HELD.items():
        high_V = np.where(np.isin(np.arange(len(UNEQUAL)), list(tokens)), 0.2, np.inf)
        nats = [run(UNEQUAL, 0.2, high_V, rate)[0].mean() for rate in RATES]
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in nats)} |")


if __name__ == "__main__":
    main()
