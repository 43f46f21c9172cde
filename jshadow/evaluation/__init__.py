"""Whether a model answers as well with a compressed cache: tasks, scores, the runner of `jshadow eval`."""
