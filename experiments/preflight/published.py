"""Prices the reference's run of Qwen2.5-32B on 128 H800, beside its own clock.

    python -m experiments.preflight.published

By `estimate`, as if our programs did its work: batches of 1,536 prompts one after the other, a copy
of the sampler's weights on four GPUs. Exchanges are left out. record_run.csv has the clock. Nothing
is fitted in the table. Behind it one efficiency for sampling and one for updates are fitted to the
steps to FITTED, and predict the others.
"""

import pathlib

import numpy as np

from configs import qwen2_5_32b
from dapo_jax.preflight.chips import chip_of
from dapo_jax.preflight.compile import without_weights
from experiments.preflight.estimate import (
    COURSE,
    DECODE,
    LONGEST,
    POINTS,
    UPDATE,
    course_at,
    mesh_of,
    step_seconds,
)

RECORD = pathlib.Path(__file__).parent / "record_run.csv"
GPUS, BATCH = "h800:128", 1_536
SETTINGS = {  # of 80 GB
    "mesh.model": 4,
    "rollout.cache_mib": 40_960,
    "rollout.slot_tokens": 2_048,
}
SHOWN, HOURS, FITTED = (10, 100, 200, 330), 300, 150  # steps


def batches_at(step_N: np.ndarray, prompts: int) -> np.ndarray:
    """Returns how many batches a step takes until it has so many informative groups."""
    share_N = np.array([course_at(step / COURSE[-1, 0])[1] for step in step_N])
    return np.ceil(prompts / share_N / BATCH)


def priced(step_N: np.ndarray) -> np.ndarray:
    """Returns the seconds [3, N] of steps at published rates: decoding, prefills, updates."""
    config = without_weights(qwen2_5_32b.get_config())
    config.update_from_flattened_dict(SETTINGS)
    prompts, steps = config.rollout.num_prompts, []
    for point in POINTS:
        tokens, _, right = course_at(point)
        of_step = {"mean": tokens * LONGEST, "informative": prompts / BATCH, "all_right": right}
        steps.append(step_seconds(config, chip_of(GPUS), mesh_of(config, GPUS), **of_step)[:3])
    done_N = step_N / COURSE[-1, 0]
    seconds_3N = np.array([np.interp(done_N, POINTS, part) for part in np.transpose(steps)])
    seconds_3N[:2] *= batches_at(step_N, prompts)
    return seconds_3N


def prediction(ours_N, clock_N, is_fitted_N) -> tuple[float, float, float]:
    """Fits an efficiency to some steps: (it, mean error of the others, error of their sum)."""
    efficiency = ours_N[is_fitted_N].sum() / clock_N[is_fitted_N].sum()
    ours_N, clock_N = ours_N[~is_fitted_N] / efficiency, clock_N[~is_fitted_N]
    return efficiency, np.abs(ours_N / clock_N - 1).mean(), ours_N.sum() / clock_N.sum() - 1


def main() -> None:
    step_N, sampling_N, update_N, _ = np.loadtxt(RECORD, delimiter=",", skiprows=3).T
    decoding_N, prefills_N, updates_N = priced(step_N)
    ends_22N = np.array(  # fast, slow
        [
            [decoding_N / d + prefills_N / u, updates_N / u]
            for d, u in zip(DECODE, UPDATE, strict=True)
        ][::-1]
    )
    shown_N, clock_2N = np.searchsorted(step_N, SHOWN), np.array([sampling_N, update_N])
    print(f"{'seconds, ours; the record':26}" + "".join(f"{f'step {n}':>22}" for n in SHOWN))
    for i, name in enumerate(("sampling", "updates")):
        cells = (
            f"{ends_22N[0, i, n]:,.0f} to {ends_22N[1, i, n]:,.0f}; {clock_2N[i, n]:,.0f}"
            for n in shown_N
        )
        print(f"{name:26}" + "".join(f"{cell:>22}" for cell in cells))
    of_hours_N = step_N <= HOURS
    fast, slow, clock = (
        seconds_2N.sum(axis=0)[of_hours_N].mean() * HOURS / 3_600
        for seconds_2N in (*ends_22N, clock_2N)
    )
    print(
        f"hours of {HOURS} steps: {fast:.0f} to {slow:.0f}; the record's {clock:.0f}, "
        f"{clock / slow:.2f} to {clock / fast:.2f} times ours"
    )
    published_N = decoding_N + prefills_N, updates_N
    for name, ours_N, clock_N in zip(("sampling", "updates"), published_N, clock_2N, strict=True):
        efficiency, error, whole = prediction(ours_N, clock_N, step_N <= FITTED)
        print(
            f"{name}: {efficiency:.1%} of published rates in steps to {FITTED}; so the later steps "
            f"are predicted {error:.0%} off, their sum {whole:+.0%}"
        )


if __name__ == "__main__":
    main()
