"""eps_high on SmolLM2-135M where many answers are right: sentences with three given words."""

import itertools

from dapo_jax.report.compare import accuracy_over
from experiments.eps_high_real.study import CLIPS, ENTROPY, EQUAL_STEPS, score
from experiments.eps_high_real.study import STUDY as SUMS
from experiments.study import CLIPPED, Claim, Study

AREA = accuracy_over(32_000)

STUDY = Study(
    title="eps_high on SmolLM2-135M, sentences with given words",
    config="configs/smollm2_135m_words.py",
    settings=SUMS.settings,
    arms={clip: f"algo.eps_high={eps}" for clip, eps in CLIPS.items()},
    quantities=(
        AREA,
        EQUAL_STEPS,
        score("mean@8", "words"),
        score("pass@8", "words"),
        ENTROPY,
        *CLIPPED,
    ),
    drawn=SUMS.drawn,
    over_tokens=True,
    claims=[Claim(AREA, above, +1, below) for below, above in itertools.pairwise(CLIPS)],
    seeds=(0, 1, 2),
)
COMPARED = tuple((above, below) for below, above in itertools.pairwise(CLIPS))
