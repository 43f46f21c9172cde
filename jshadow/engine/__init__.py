"""Running requests: prefill, decode steps, sampling, reports and saved states."""
