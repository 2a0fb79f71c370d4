"""DAPO training in JAX; see README.md."""
