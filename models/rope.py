"""Rotary angles for texts longer than those a model was first trained on: Llama 3's and YaRN.

The learner and the sampler take their angles from models.transformer.rotation, which scales the
frequencies as a model's config.json says. The fields are named as its keys.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Slows the slow rotations by `factor` (Llama 3.1, arXiv 2407.21783; config.json's "llama3").

    Raises ValueError, with the field, for numbers with which nothing can be computed.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: str = "llama3"

    def __post_init__(self):
        _check_numbers(self)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor must be less than high_freq_factor")

    @property
    def amplitude(self) -> float:
        """Gives what cosines and sines are multiplied by."""
        return 1.0

    def frequencies(self, frequency_H, *, theta: float):
        """Scales frequency_H: fully below low_freq_factor turns in a text, not above high's.

        The published code of Llama 3.1 (meta-llama/llama-models, apply_scaling).
        """
        del theta
        low, high = self.low_freq_factor, self.high_freq_factor
        turns_H = self.original_max_position_embeddings * frequency_H / (2 * math.pi)
        kept_H = jnp.clip((turns_H - low) / (high - low), 0, 1)
        return frequency_H * (kept_H + (1 - kept_H) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Slows the slow rotations and sharpens attention (YaRN, arXiv 2309.00071; "yarn").

    It is the same at all lengths. Raises ValueError, with the field, for numbers with which nothing
    can be computed.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    rope_type: str = "yarn"

    def __post_init__(self):
        _check_numbers(self)
        if self.beta_slow >= self.beta_fast:
            raise ValueError("beta_slow must be less than beta_fast")

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
        slowed_H = jnp.clip((jnp.arange(half) - first) / (last - first or 1e-3), 0, 1)
        return frequency_H * (slowed_H / self.factor + 1 - slowed_H)


RopeScaling = Llama3Scaling | YarnScaling
SCALINGS = {"llama3": Llama3Scaling, "yarn": YarnScaling}


def scaling_of(entries: Mapping[str, Any]) -> RopeScaling:
    """Makes the scaling that config.json's keys name; `rope_type` is one of SCALINGS.

    Raises ValueError for keys that are missing or unknown, and for wrong numbers.
    """
    kind = SCALINGS[entries["rope_type"]]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(entries.keys() - fields.keys())
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not computed")
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if needed - entries.keys():
        missing = ", ".join(sorted(needed - entries.keys()))
        raise ValueError(f"{entries['rope_type']} needs {missing}")
    return kind(**entries)


def _check_numbers(scaling: RopeScaling) -> None:
    for name, value in dataclasses.asdict(scaling).items():
        if name == "rope_type" or value is None:
            continue
        whole = name == "original_max_position_embeddings"
        kinds, rule = (int, "a positive integer") if whole else (int | float, "a positive number")
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= 1e9:
            raise ValueError(f"{name} must be {rule} of at most 1e9")
    if scaling.factor < 1:
        raise ValueError("factor must be at least 1")
