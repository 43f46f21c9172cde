"""Long-context LLM inference in JAX."""
