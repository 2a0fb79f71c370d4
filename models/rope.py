"""Rotary angles for texts longer than those a model was first trained on.

Linear (position interpolation), Llama 3's and YaRN.

The learner and the sampler take their angles from models.transformer.rotation, which scales the
frequencies as a model's config.json says: NumPy's float64, so that no compiler computes them in its
own way. The fields are named as its keys.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Slows the slow rotations by `factor` (Llama 3.1, arXiv 2407.21783; "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: str = "llama3"
    amplitude: ClassVar[float] = 1.0  # of cosines and sines

    def frequencies(self, frequency_H, *, theta: float):
        """Scales frequency_H: fully below low_freq_factor turns in a text, not above high's.

        The published code of Llama 3.1 (meta-llama/llama-models, apply_scaling).
        """
        low, high = self.low_freq_factor, self.high_freq_factor
        turns_H = self.original_max_position_embeddings * frequency_H / (2 * math.pi)
        kept_H = np.clip((turns_H - low) / (high - low), 0, 1)
        return frequency_H * (kept_H + (1 - kept_H) / self.factor)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Slows all rotations by `factor` (Chen et al. 2023, arXiv 2306.15595; "linear")."""

    factor: float
    rope_type: str = "linear"
    amplitude: ClassVar[float] = 1.0

    def frequencies(self, frequency_H, *, theta: float):
        """Divides frequency_H by the factor (section 2.3: positions over it)."""
        return frequency_H / self.factor


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Slows the slow rotations and sharpens attention (YaRN, arXiv 2309.00071; "yarn").

    It is the same at all lengths.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    rope_type: str = "yarn"

    @property
    def amplitude(self) -> float:
        """Gives what cosines and sines are multiplied by (section 3.4: 0.1 ln(factor) + 1)."""
        return self.attention_factor or 0.1 * math.log(self.factor) + 1

    @property
    def positions(self) -> int:
        """Gives how long a text may be."""
        return int(self.factor * self.original_max_position_embeddings)

    def frequencies(self, frequency_H, *, theta: float):
        """Scales frequency_H: fully where it turns beta_slow times in a text, not at beta_fast.

        Between the two the published code (jquesnelle/yarn) goes from one to the other evenly over
        whole dimensions, not over turns as section 3.2 has it.
        """
        half = len(frequency_H)

        def dimension(turns: float) -> float:
            text = self.original_max_position_embeddings
            return half * math.log(text / (2 * math.pi * turns)) / math.log(theta)

        first = max(math.floor(dimension(self.beta_fast)), 0)
        last = min(math.ceil(dimension(self.beta_slow)), 2 * half - 1)
        slowed_H = np.clip((np.arange(half) - first) / (last - first or 1e-3), 0, 1)
        return frequency_H * (slowed_H / self.factor + 1 - slowed_H)


RopeScaling = Llama3Scaling | YarnScaling | LinearScaling
SCALINGS = {"llama3": Llama3Scaling, "yarn": YarnScaling, "linear": LinearScaling}


def scaling_of(entries: Mapping[str, Any]) -> RopeScaling:
    """Makes the scaling that config.json's keys name; `rope_type` is one of SCALINGS.

    Raises ValueError for keys that are missing or unknown, and for wrong numbers.
    """
    kind = SCALINGS[entries["rope_type"]]
    known = [it.name for it in dataclasses.fields(kind)]
    if unknown := ", ".join(map(repr, entries.keys() - known)):
        raise ValueError(
            f"{unknown} is no key of it, and readers differ on it: take it out, as transformers "
            f"does, or write what is meant by the keys {', '.join(known)}"
        )
    for name, value in entries.items():
        if name != "rope_type" and not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"{name} must be a positive number")
    try:
        return kind(**entries)
    except TypeError as error:  # it names the key that is missing
        raise ValueError(str(error)) from error
