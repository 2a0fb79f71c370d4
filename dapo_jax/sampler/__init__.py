"""The sampler: KV cache, decode loop, and the host's side of it."""
