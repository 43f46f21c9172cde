"""Measures how well a model answers with a compressed cache: tasks, scores, and the runner of `jshadow eval`."""
