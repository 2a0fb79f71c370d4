"""eps_high on SmolLM2-135M where many answers are right: sentences with three given words."""

import itertools

from experiments.eps_high_real.study import AREA, CLIPS, ENTROPY, EQUAL_STEPS, score
from experiments.eps_high_real.study import STUDY as SUMS
from experiments.study import CLIPPED, Claim, Study

HELD_OUT, PASS = score("mean@8", "words"), score("pass@8", "words")
PAIRS = tuple((above, below) for below, above in itertools.pairwise(CLIPS))

STUDY = Study(
    title="eps_high on SmolLM2-135M, sentences with given words",
    config="configs/smollm2_135m_words.py",
    settings=SUMS.settings,
    arms={clip: f"algo.eps_high={eps}" for clip, eps in CLIPS.items()},
    quantities=(AREA, EQUAL_STEPS, HELD_OUT, PASS, ENTROPY, *CLIPPED),
    drawn=SUMS.drawn,
    over_tokens=True,
    claims=[Claim(AREA, above, +1, below) for above, below in PAIRS],
    post_hoc=[
        Claim(AREA, "no_upper_clip", +1, "eps_0.2"),
        *(Claim(HELD_OUT, above, +1, below) for above, below in PAIRS),
    ],
    seeds=(0, 1, 2),
)
COMPARED = (*PAIRS, ("no_upper_clip", "eps_0.2"))
