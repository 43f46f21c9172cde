"""The loop of a request: prefill, steps, sampling, saved states."""
