"""Batches whose rows have sampling settings of their own."""
