"""Whether a compressed cache still answers: tasks with known answers, their scores, the runner of `jshadow eval`."""
