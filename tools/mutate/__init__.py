"""Seeded mutations of the library, and the tests that notice them. `make mutate` runs it."""
