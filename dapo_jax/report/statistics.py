"""What a few seeds say of a difference: spreads, intervals with p-values, seeds needed.

Pure functions on arrays. Two arms that share a seed share prompts and sampling noise until their
policies differ, so that the difference on one seed spreads less than either arm.
"""

import dataclasses
import math

import numpy as np
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95
LAST_ROWS = 10
ROUNDING = 1e-9  # of the values: what is less than that is no difference
MOST_SEEDS = 100_000  # what `seeds_for_unpaired` answers at most


@dataclasses.dataclass(frozen=True)
class Interval:
    """A difference of means with its confidence interval; NaN bounds where there are too few.

    p: of the two-sided test that the difference is zero; NaN where none is made.
    """

    difference: float
    low: float
    high: float
    p: float = math.nan

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        """Whether all of the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


def last_mean(values, *, rows: int = LAST_ROWS) -> float:
    """Returns the mean of a run's last `rows` rows, or of its last third where that is fewer.

    values: [rows], NaN where missing. NaN where none of them is there.
    """
    values = np.asarray(values, np.float64)
    return nan_mean(values[-max(1, min(rows, len(values) // 3)) :])


def nan_mean(values) -> float:
    """Returns the mean of the values that are not NaN; NaN where there are none."""
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else math.nan


def spread(values) -> float:
    """Returns the standard deviation of a sample (n - 1); NaN for fewer than two values."""
    values = np.asarray(values, np.float64)
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def paired_spread(a_S, b_S) -> float:
    """Returns the standard deviation of a - b; 0 where nothing but rounding differs."""
    a_S, b_S = np.asarray(a_S, np.float64), np.asarray(b_S, np.float64)
    sd = spread(a_S - b_S)
    return 0.0 if sd < ROUNDING * max(np.abs(a_S).max(), np.abs(b_S).max()) else sd


def share_interval(share_P, *, samples: int) -> Interval:
    """Returns the interval of a mean of shares from 0 to 1, which keeps inside of them.

    Wilson's (1927) of p = mean(share) in n' samples, with t(P - 1) for his quantile. n' is as many
    as independent ones that would spread as the problems do, p (1 - p) / (v / P), and `samples`,
    those there were, at most. v = (m var(share) + p (1 - p)) / (m + 1): of P shares only those m
    that are not all 0 (not all 1, where these are fewer) say how problems spread, and one more is
    taken to be all or nothing. Without it 1 or 2 solved problems of 30 leave too small a spread by
    chance. P where all are 0 or all 1. Its `difference` is p.
    """
    share_P = np.asarray(share_P, np.float64)
    P, p = len(share_P), float(share_P.mean())
    if P < 2:
        return Interval(p, 0.0, 1.0)
    spreads, n = p * (1 - p), float(P)
    if spreads > 0:
        m = min(np.count_nonzero(share_P), np.count_nonzero(share_P < 1))
        error = (m * spread(share_P) ** 2 + spreads) / (m + 1) / P
        n = spreads / max(error, spreads / samples)
    t = quantile(P - 1)
    middle = (p + t**2 / (2 * n)) / (1 + t**2 / n)
    half = t / (1 + t**2 / n) * math.sqrt(spreads / n + t**2 / (4 * n**2))
    return Interval(p, max(0.0, middle - half), min(1.0, middle + half))


def paired_share_interval(a_P, b_P) -> Interval:
    """Returns Student's interval of the mean of a - b, shares from 0 to 1 of the same problems.

    v of `share_interval` stands for var(a - b): m counts the problems that differ, and the one more
    is all or nothing, with the variance mean(|a - b|) - mean(a - b)^2, as if no less than two of P
    had differed in all: without it equal results leave no spread. a_P, b_P: [problems].
    """
    d_P = np.asarray(a_P, np.float64) - np.asarray(b_P, np.float64)
    P, m = len(d_P), np.count_nonzero(d_P)
    if P < 2:
        return Interval(nan_mean(d_P), math.nan, math.nan)
    one_more = max(np.abs(d_P).mean(), 2 / P) - d_P.mean() ** 2
    v = (m * spread(d_P) ** 2 + one_more) / (m + 1)
    return _around(d_P.mean(), math.sqrt(v / P), P - 1)


def paired_interval(a_S, b_S) -> Interval:
    """Returns the Student interval of the mean of a - b, whose values share seeds.

    d = mean(a - b), d -+ t(n - 1) sd(a - b) / sqrt(n). a_S, b_S: [seeds], in the same order.
    """
    difference_S = np.asarray(a_S, np.float64) - np.asarray(b_S, np.float64)
    n = len(difference_S)
    if n < 2:
        return Interval(nan_mean(difference_S), math.nan, math.nan)
    return _around(difference_S.mean(), paired_spread(a_S, b_S) / math.sqrt(n), n - 1)


def pooled_interval(value_AS, a: int, b: int) -> Interval:
    """Returns the interval of mean(a) - mean(b) with the scatter of all arms on all seeds.

    value = arm + seed + e, d -+ t(f) sqrt(2 v / S) with v = sum(e^2) / f and f = (A - 1) (S - 1),
    the residual of a two-way analysis of variance. All arms are taken to scatter alike. value_AS:
    [arms, seeds] without NaN; a, b: rows of it.
    """
    value_AS = np.asarray(value_AS, np.float64)
    A, S = value_AS.shape
    mean_A, freedom = value_AS.mean(axis=1), (A - 1) * (S - 1)
    if freedom < 1:
        return Interval(float(mean_A[a] - mean_A[b]), math.nan, math.nan)
    e_AS = value_AS - mean_A[:, None] - value_AS.mean(axis=0) + value_AS.mean()
    sd = math.sqrt((e_AS**2).sum() / freedom)
    sd = 0.0 if sd < ROUNDING * np.abs(value_AS).max() else sd
    return _around(mean_A[a] - mean_A[b], sd * math.sqrt(2 / S), freedom)


def holm(p_N) -> np.ndarray:
    """Returns p-values corrected for the number of tests (Holm 1979), float64 [N]; NaN stays.

    The k-th smallest of N (k from 0) becomes (N - k) p, at most 1 and no less than the one before:
    below 0.05 by chance alone one family of tests in twenty has any.
    """
    p_N = np.asarray(p_N, np.float64)
    order = np.argsort(p_N)
    held_N = np.empty_like(p_N)
    held_N[order] = np.maximum.accumulate(p_N[order] * np.arange(len(p_N), 0, -1))
    return np.minimum(held_N, 1.0)


def welch_interval(a_S, b_S) -> Interval:
    """Returns the interval of mean(a) - mean(b) of independent samples (Welch 1947).

    d -+ t(f) sqrt(u + v) with u = var(a) / n, v = var(b) / m and
    f = (u + v)^2 / (u^2 / (n - 1) + v^2 / (m - 1)). a_S, b_S: [seeds], of any lengths.
    """
    a_S, b_S = np.asarray(a_S, np.float64), np.asarray(b_S, np.float64)
    difference, n, m = nan_mean(a_S) - nan_mean(b_S), len(a_S), len(b_S)
    if min(n, m) < 2:
        return Interval(difference, math.nan, math.nan)
    u, v = spread(a_S) ** 2 / n, spread(b_S) ** 2 / m
    freedom = (u + v) ** 2 / (u**2 / (n - 1) + v**2 / (m - 1)) if u + v > 0 else n + m - 2
    return _around(difference, math.sqrt(u + v), freedom)


def seeds_for_unpaired(a_S, b_S, half_width: float) -> int | None:
    """Returns how many seeds an arm make the Welch interval's half width at most `half_width`.

    The least n with t(f) sqrt((var(a) + var(b)) / n) <= half_width and
    f = (n - 1) (var(a) + var(b))^2 / (var(a)^2 + var(b)^2). None where the samples cannot tell.
    """
    var_a, var_b = spread(a_S) ** 2, spread(b_S) ** 2
    total, squares = var_a + var_b, var_a**2 + var_b**2
    share = total**2 / squares if squares > 0 else 2.0
    return _least(lambda n: quantile((n - 1) * share) * math.sqrt(total / n), half_width)


def quantile(freedom: float) -> float:
    """Returns Student's t beyond which, on both sides, 1 - CONFIDENCE of the mass lies."""
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _around(difference: float, error: float, freedom: float) -> Interval:
    difference, half_width = float(difference), quantile(freedom) * error
    p = 2 * float(stdtr(freedom, -abs(difference) / error)) if error else float(not difference)
    return Interval(difference, difference - half_width, difference + half_width, p)


def _least(width_of, half_width: float) -> int | None:
    """The least n >= 2 whose width, which falls with n, is at most the half width asked for."""
    if not half_width > 0 or not math.isfinite(width_of(2)):
        return None
    low, high = 1, 2  # width_of(low) is too wide
    while width_of(high) > half_width:
        low, high = high, 2 * high
        if low >= MOST_SEEDS:
            return MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if width_of(middle) > half_width else (low, middle)
    return high
