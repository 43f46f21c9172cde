"""How many tokens are proposed in a cycle: as many as pay, by the share of proposed tokens that was accepted lately."""

import dataclasses

import numpy as np

FORGET = 0.8  # weight of the older cycles in the share of accepted tokens, for each new one
TRY_AGAIN = 32  # after so many cycles without a proposal, a few tokens are proposed to see whether they are accepted
PRIOR = (4.0, 1.0)  # accepted and refused tokens before the first cycle


@dataclasses.dataclass
class Pace:
    """Chooses the number of proposed tokens of each cycle.

    A number is one of `widths`, so that few programs are compiled.

    Attributes:
        most: the most tokens that may be proposed.
        cost: a cycle with w proposed tokens is taken to cost 1 + cost * w plain steps.
        accepted, refused: proposed tokens that were accepted, and first tokens that were not, with lower weights for
            older cycles.
        idle: number of cycles since the last proposal in which tokens could have been proposed.
    """

    most: int
    cost: float
    accepted: float = PRIOR[0]
    refused: float = PRIOR[1]
    idle: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers to choose from: 0, a quarter of the largest, and the largest."""
        return tuple(sorted({0, max(1, self.most // 4), self.most}))

    def choose(self, ready: np.ndarray) -> int:
        """Return the number of tokens to propose.

        Args:
            ready: how many tokens can be proposed for each active row, int [n].
        """
        if not ready.any():
            return 0
        self.idle += 1
        if self.idle > TRY_AGAIN:
            self.idle = 0
            return self.widths[1]
        share = self.accepted / (self.accepted + self.refused)
        gains = []
        for width in self.widths:
            tokens = 1 + sum(share**place * (ready >= place).mean() for place in range(1, width + 1))
            gains.append(tokens / (1 + self.cost * width))
        best = self.widths[int(np.argmax(gains))]
        self.idle = 0 if best else self.idle
        return best

    def heard(self, proposed: np.ndarray, accepted: np.ndarray) -> None:
        """Take in the numbers of proposed and of accepted tokens of each row in a cycle, int [B]."""
        if proposed.any():
            self.accepted = FORGET * self.accepted + int(accepted.sum())
            self.refused = FORGET * self.refused + int((accepted < proposed).sum())
