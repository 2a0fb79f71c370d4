"""The paper's own curves beside ours, read from a file that somebody digitised from its figures.

The file is a JSON object: figure -> curve -> [[x, y], ...], x being gradient updates, of which the
paper takes 16 a rollout step (arXiv 2503.14476, section 4.1: 512 prompts in mini-batches of 32).
"""

import pathlib

from dapo_jax.run.files import read_json

UPDATES_PER_STEP = 16
PERCENT = "_percent"  # ends the name of a figure in percent

# The metric's key, or "eval" -> (figure, curve, name) of what the paper shows of it.
CURVES = {
    "eval": [
        ("fig1_aime24_percent", "dapo_avg@32", "DAPO, AIME 2024 avg@32 (Fig. 1)"),
        ("fig2a_aime_avg@32", "with_clip_higher", "with clip-higher (Fig. 2a)"),
        ("fig2a_aime_avg@32", "without_clip_higher", "without clip-higher (Fig. 2a)"),
    ],
    "response_tokens/mean": [
        ("fig7a_mean_resp_len", "dapo", "DAPO (Fig. 7a)"),
        ("fig4b_mean_resp_len", "with_token_level", "with token-level loss (Fig. 4b)"),
        ("fig4b_mean_resp_len", "without_token_level", "without (Fig. 4b)"),
    ],
    "reward/mean": [("fig7b_reward_score", "dapo", "DAPO (Fig. 7b)")],
    "entropy": [
        ("fig7c_entropy", "dapo", "DAPO (Fig. 7c)"),
        ("fig2b_entropy", "with_clip_higher", "with clip-higher (Fig. 2b)"),
        ("fig2b_entropy", "without_clip_higher", "without clip-higher (Fig. 2b)"),
    ],
    "mean_prob": [("fig7d_mean_prob", "dapo", "DAPO (Fig. 7d)")],
}


def read(path: str | pathlib.Path) -> dict[str, list[dict]]:
    """Reads the curves that have a panel here: key -> [{"name", "x" (rollout steps), "y"}, ...].

    Raises FileNotFoundError, and ValueError, with the file, where none of CURVES is in it.
    """
    content = read_json(path)
    found: dict[str, list[dict]] = {}
    for key, wanted in CURVES.items():
        for figure, curve, name in wanted:
            points = (content.get(figure) or {}).get(curve) or []
            scale = 100.0 if figure.endswith(PERCENT) else 1.0
            if points:
                x = [round(max(0.0, point[0]) / UPDATES_PER_STEP, 2) for point in points]
                y = [round(point[1] / scale, 5) for point in points]
                found.setdefault(key, []).append({"name": name, "x": x, "y": y})
    if not found:
        names = ", ".join(dict.fromkeys(figure for some in CURVES.values() for figure, *_ in some))
        raise ValueError(f"{path} has none of the paper's curves ({names}): --paper")
    return found
