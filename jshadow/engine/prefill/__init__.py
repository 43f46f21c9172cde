"""Prefill: a prompt is read layer by layer."""
