"""Does a compressed cache still answer? Tasks with known answers, their scores, and the runner behind `jshadow eval`."""
