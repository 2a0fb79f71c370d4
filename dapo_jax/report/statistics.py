"""Statistics of a few seeds: spreads, intervals with p-values, Holm's correction.

Two arms that share a seed share prompts and sampling noise until their policies differ, so that the
difference on one seed spreads less than either arm. SciPy's own tests return NaN where all seeds
are equal.
"""

import dataclasses
import math
from collections.abc import Sequence

import pandas as pd
from scipy.special import stdtr, stdtrit

ALPHA = 0.05  # an interval of 95 % excludes zero where p is below
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


def last_mean(values: pd.Series) -> float:
    """Returns the mean of a run's last LAST_ROWS rows, or of its last third where that is fewer.

    values: [rows], NaN where missing. NaN where none of them is there.
    """
    return values.tail(max(1, min(LAST_ROWS, len(values) // 3))).mean()


def paired_share_interval(d_P: pd.Series) -> Interval:
    """Returns Student's interval of a mean difference of shares from 0 to 1 on the same problems.

    v = (m var(d) + w) / (m + 1) replaces the variance: m counts the problems that differ, and one
    more problem has w = mean(|d|) - mean(d)^2, as if at least two of P had differed. Without it
    equal results would have no spread. d_P: [problems].
    """
    P, m = len(d_P), (d_P != 0).sum()
    if P < 2:
        return Interval(d_P.mean())
    one_more = max(d_P.abs().mean(), 2 / P) - d_P.mean() ** 2
    v = (m * d_P.var() + one_more) / (m + 1)
    return _student(d_P.mean(), math.sqrt(v / P), P - 1)


def paired_interval(d_S: pd.Series) -> Interval:
    """Returns Student's interval of a mean difference: mean(d) -+ t(n - 1) sd(d) / sqrt(n).

    d_S: [seeds], the differences of two arms; NaN on the seeds that count for none of the n.
    """
    if (n := d_S.count()) < 2:
        return Interval(d_S.mean())
    return _student(d_S.mean(), d_S.sem(), n - 1)


def pooled_interval(value_SA: pd.DataFrame, a: str, b: str) -> Interval:
    """Returns the interval of mean(a) - mean(b) with the scatter of all arms on all seeds.

    value = arm + seed + e, d -+ t(f) sqrt(2 v / S) with v = sum(e^2) / f and f = (A - 1) (S - 1),
    the residual of a two-way analysis of variance. It assumes that all arms scatter alike.
    value_SA: [seeds, arms] without NaN; a, b: columns of it.
    """
    (S, A), mean_A = value_SA.shape, value_SA.mean()
    difference, freedom = mean_A[a] - mean_A[b], (A - 1) * (S - 1)
    if freedom < 1:
        return Interval(difference)
    e_SA = (value_SA - mean_A).sub(value_SA.mean(axis="columns") - mean_A.mean(), axis="rows")
    return _student(difference, math.sqrt((e_SA**2).to_numpy().sum() / freedom * 2 / S), freedom)


def holm(p_N: Sequence[float]) -> pd.Series:
    """Returns p-values corrected for the number of tests (Holm 1979), float64 [N]; NaN stays.

    The k-th smallest of N (k from 0) becomes (N - k) p, at most 1 and no less than the one before.
    By chance alone one family of tests in twenty has a value below 0.05.
    """
    p_N = pd.Series(p_N, dtype=float).sort_values()
    return (p_N * [*range(len(p_N), 0, -1)]).cummax().clip(upper=1.0).sort_index()


def _student(difference: float, error: float, freedom: float) -> Interval:
    """Student's interval of a difference with this standard error, and its p-value."""
    difference, error = float(difference), float(error)
    half_width = float(stdtrit(freedom, 1 - ALPHA / 2)) * error
    p = 2 * float(stdtr(freedom, -abs(difference) / error)) if error else float(not difference)
    return Interval(difference, difference - half_width, difference + half_width, p)
