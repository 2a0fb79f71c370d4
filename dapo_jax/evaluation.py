"""An evaluation in a session: sets of problems are sampled, graded and summarized.

The scores are mean@k, pass@k and maj@k.
"""

import collections
import itertools
import json
import math
from collections.abc import Callable, Sequence

import numpy as np
from ml_collections import ConfigDict

from configs.base import eval_settings
from dapo_jax import hub
from dapo_jax.grading import Grading
from dapo_jax.logs.metrics import TASK, mean_measures
from dapo_jax.sampler.session import Session
from dapo_jax.tasks.rows import by_text
from dapo_jax.types import Group, Verdict


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimates, unbiased, how likely k samples hold a correct one (arXiv 2107.03374, Eq. 1)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_is_correct(verdicts: Sequence[Verdict], same=by_text) -> bool:
    """Returns whether the most frequent answer is right (maj@k); the earliest wins a tie.

    Right predictions are one answer, wrong ones where `same` says so (`tasks.readers.read_rows`).
    Responses without a prediction, or with an empty one, have no vote.
    """
    voting = [v for v in verdicts if (v.prediction or "").strip()]
    wrong = dict.fromkeys(v.prediction for v in voting if not v.correct)
    pairs = list(itertools.combinations(wrong, 2))
    answer = {text: text for text in wrong}
    for (one, other), equal in zip(pairs, same(pairs), strict=True):
        if equal:
            answer[other] = answer[one]
    votes = collections.Counter(None if v.correct else answer[v.prediction] for v in voting)
    return bool(votes) and votes.most_common(1)[0][0] is None


def share_interval(share_P, *, samples: int) -> tuple[float, float]:
    """Returns the 95 % interval of a mean of shares from 0 to 1, inside that range.

    Wilson's interval (1927) of p = mean(share) with t(P - 1) as its quantile and the effective
    number of samples n' = p (1 - p) / (v / P), at most `samples`; n' = P where all shares are 0 or
    all are 1. v = (m var(share) + p (1 - p)) / (m + 1): m counts the shares above 0 (below 1, where
    these are fewer), and one more problem is taken to be all right or all wrong. Without it 1 or 2
    solved problems of 30 leave too small a spread by chance.
    """
    from scipy.special import stdtrit  # half a second, which no start needs

    share_P = np.asarray(share_P, np.float64)
    P, p = len(share_P), float(share_P.mean())
    if P < 2:
        return 0.0, 1.0
    spreads, n = p * (1 - p), float(P)
    if spreads > 0:
        m = min(np.count_nonzero(share_P), np.count_nonzero(share_P < 1))
        error = (m * float(share_P.var(ddof=1)) + spreads) / (m + 1) / P
        n = spreads / max(error, spreads / samples)
    t = float(stdtrit(P - 1, 0.975))
    middle = (p + t**2 / (2 * n)) / (1 + t**2 / n)
    half = t / (1 + t**2 / n) * math.sqrt(spreads / n + t**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def summarize(groups: Sequence[Group], same=by_text) -> dict[str, float]:
    """Summarizes one set from its groups of k responses: scores are means over problems.

    same: as of `majority_is_correct`; None: there are no answers, and no maj@k.

    "interval/low" and "interval/high" bound mean@k over other problems of the kind (95 %; a problem
    is a cluster of responses, arXiv 2411.00640, section 2.2).
    """
    correct_PK = np.stack([group.correct_G for group in groups])
    length_PK = np.stack([group.length_G for group in groups])
    k = correct_PK.shape[1]
    responses = [response for group in groups for response in group.responses]
    powers = [2**i for i in range(1, k.bit_length()) if 2**i < k] + [k]
    low, high = share_interval(correct_PK.mean(axis=1), samples=correct_PK.size)
    majority_P = [majority_is_correct(group.grades[1], same) for group in groups if same]
    passed = {n: [pass_at_k(k, int(c), n) for c in correct_PK.sum(axis=1)] for n in powers}
    return {
        f"mean@{k}": float(correct_PK.mean()),
        **({f"maj@{k}": float(np.mean(majority_P))} if same else {}),
        **{f"pass@{n}": float(np.mean(passed_P)) for n, passed_P in passed.items()},
        "interval/low": low,
        "interval/high": high,
        "problems": len(groups),
        "response_tokens/mean": float(length_PK.mean()),
        "truncated_fraction": float(1 - np.mean([group.stopped_G for group in groups])),
        "no_answer_fraction": float(np.mean([r.verdict.has_no_answer for r in responses])),
        **{f"{TASK}{name}": mean for name, mean in mean_measures(responses).items()},
    }


class Evaluation(Grading):
    """Evaluates a session's sets beside other groups that it may sample.

    All requests are submitted at once: where this is done first, the tails of training's groups and
    theirs overlap. Use it as a context manager. is_due: False: nothing is evaluated.
    """

    def __init__(self, session: Session, *, is_due: bool = True):
        streams = {i: stream for i, stream in enumerate(session.streams) if stream.dataset}
        self._session, self._streams = session, streams if is_due else {}
        self._groups: list[Group] = []
        # Not through `self`: in a cycle the session, with its pages and the weights, would outlive
        # its last use until Python looks for cycles.
        super().__init__(lambda group: streams[group.stream].dataset.grade(group))
        for i, stream in self._streams.items():
            for cursor, prompt in enumerate(stream.dataset.prompts):
                session.submit(cursor, prompt, group_size=stream.dataset.k, stream=i)

    def take(self, finished: Sequence[Group]) -> None:
        """Takes finished groups of the sets; they are graded behind the decoding."""
        self._groups += self.exchange(finished)

    def finish(
        self,
        *,
        report: Callable[[str], None],
        keep: Callable[[str, Sequence[Group]], None],
    ) -> dict[str, dict[str, float]]:
        """Samples what is unfinished of the sets, and returns each set's scores.

        keep: is given each set's name and groups of responses.
        """
        while left := sum(i in self._streams for i, _ in self._session.unfinished):
            report(f"evaluate: {left} groups to go")
            self.take(self._session.step())
        self.take([])
        results = {}
        for i, stream in self._streams.items():
            groups = [group for group in self._groups if group.stream == i]
            groups.sort(key=lambda group: group.cursor)
            results[stream.name] = summarize(groups, stream.dataset.same)
            keep(stream.name, groups)
        return results


def settings_of(config: ConfigDict, *, of_model: bool = False) -> dict[str, dict]:
    """Returns all that an evaluation's numbers depend on beside the policy, by set; JSON-able.

    of_model: with the names of the model and its tokenizer, whose results may lie beside another's.
    """
    common = {
        "seed": config.seed,
        "max_prompt_tokens": config.rollout.max_prompt_tokens,
        "max_response_tokens": config.rollout.max_response_tokens,
        "compute_dtype": config.model.compute_dtype,
        **hub.record(),
    }
    if of_model:
        common["model"] = config.model.path
        common |= {f"tokenizer.{key}": value for key, value in config.tokenizer.to_dict().items()}
    filled = {name: settings | common for name, settings in eval_settings(config).items()}
    return json.loads(json.dumps(filled))  # tuples become lists, as they are read back
