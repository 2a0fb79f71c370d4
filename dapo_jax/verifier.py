"""The verifier's public face: `verify` grades one response by one of RULES (dapo_jax/tasks)."""

from dapo_jax.tasks.math_problems import RULES, verify, verify_many
from dapo_jax.tasks.math_rules import STATUSES
from dapo_jax.types import Verdict

__all__ = ["RULES", "STATUSES", "Verdict", "verify", "verify_many"]
