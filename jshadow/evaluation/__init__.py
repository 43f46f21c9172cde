"""Whether a compressed cache still answers: tasks with known answers, their scores, and the runner of `jshadow eval`."""
