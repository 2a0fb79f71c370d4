"""Statistics of a few seeds: spreads, intervals with p-values, Holm's correction.

Two arms that share a seed share prompts and sampling noise until their policies differ, so that the
difference on one seed spreads less than either arm. SciPy's own tests return NaN where all seeds
are equal.
"""

import dataclasses
import math

import numpy as np
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95
LAST_ROWS = 10


@dataclasses.dataclass(frozen=True)
class Interval:
    """A difference of means with its confidence interval; NaN bounds where there are too few.

    p: of the two-sided test that the difference is zero; NaN where none is made.
    """

    difference: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan

    @property
    def excludes_zero(self) -> bool:
        """True where all of the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


def last_mean(values) -> float:
    """Returns the mean of a run's last LAST_ROWS rows, or of its last third where that is fewer.

    values: [rows], NaN where missing. NaN where none of them is there.
    """
    return nan_mean(values[-max(1, min(LAST_ROWS, len(values) // 3)) :])


def nan_mean(values) -> float:
    """Returns the mean of the values that are not NaN; NaN where there are none."""
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else math.nan


def paired_share_interval(a_P, b_P) -> Interval:
    """Returns Student's interval of the mean of a - b, shares from 0 to 1 of the same problems.

    v = (m var(a - b) + w) / (m + 1) replaces the variance: m counts the problems that differ, and
    one more problem has w = mean(|a - b|) - mean(a - b)^2, as if at least two of P had differed.
    Without it equal results would have no spread. a_P, b_P: [problems].
    """
    d_P = np.asarray(a_P, np.float64) - np.asarray(b_P, np.float64)
    P, m = len(d_P), np.count_nonzero(d_P)
    if P < 2:
        return Interval(nan_mean(d_P))
    one_more = max(np.abs(d_P).mean(), 2 / P) - d_P.mean() ** 2
    v = (m * d_P.var(ddof=1) + one_more) / (m + 1)
    return _student(d_P.mean(), math.sqrt(v / P), P - 1)


def paired_interval(a_S, b_S) -> Interval:
    """Returns Student's interval of the mean of a - b on shared seeds.

    d = mean(a - b), d -+ t(n - 1) sd(a - b) / sqrt(n). a_S, b_S: [seeds], in the same order.
    """
    d_S = np.asarray(a_S, np.float64) - np.asarray(b_S, np.float64)
    if len(d_S) < 2:
        return Interval(nan_mean(d_S))
    return _student(d_S.mean(), d_S.std(ddof=1) / math.sqrt(len(d_S)), len(d_S) - 1)


def pooled_interval(value_AS, a: int, b: int) -> Interval:
    """Returns the interval of mean(a) - mean(b) with the scatter of all arms on all seeds.

    value = arm + seed + e, d -+ t(f) sqrt(2 v / S) with v = sum(e^2) / f and f = (A - 1) (S - 1),
    the residual of a two-way analysis of variance. It assumes that all arms scatter alike.
    value_AS: [arms, seeds] without NaN; a, b: rows of it.
    """
    value_AS = np.asarray(value_AS, np.float64)
    A, S = value_AS.shape
    mean_A, freedom = value_AS.mean(axis=1), (A - 1) * (S - 1)
    if freedom < 1:
        return Interval(float(mean_A[a] - mean_A[b]))
    e_AS = value_AS - mean_A[:, None] - value_AS.mean(axis=0) + value_AS.mean()
    error = math.sqrt((e_AS**2).sum() / freedom * 2 / S)
    return _student(mean_A[a] - mean_A[b], error, freedom)


def holm(p_N) -> np.ndarray:
    """Returns p-values corrected for the number of tests (Holm 1979), float64 [N]; NaN stays.

    The k-th smallest of N (k from 0) becomes (N - k) p, at most 1 and no less than the one before.
    By chance alone one family of tests in twenty has a value below 0.05.
    """
    p_N = np.asarray(p_N, np.float64)
    order = np.argsort(p_N)
    held_N = np.empty_like(p_N)
    held_N[order] = np.maximum.accumulate(p_N[order] * np.arange(len(p_N), 0, -1))
    return np.minimum(held_N, 1.0)


def _student(difference: float, error: float, freedom: float) -> Interval:
    """Student's interval of a difference with this standard error, and its p-value."""
    difference, error = float(difference), float(error)
    half_width = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(stdtr(freedom, -abs(difference) / error)) if error else float(not difference)
    return Interval(difference, difference - half_width, difference + half_width, p)
