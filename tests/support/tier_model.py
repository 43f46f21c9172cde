"""A plain model of the memory tiers: a list of rows, and no bookkeeping of bytes."""

from jshadow.library.tiers import DEVICE, HOST


class TierModel:
    """`rows` are [key, size, tier], the least recently used first."""

    def __init__(self, device, host):
        self.limits = {DEVICE: device, HOST: host}
        self.rows = []

    def taken(self, tier):
        total = 0
        for _, size, where in self.rows:
            if tier == DEVICE:
                total += size.device * (where == DEVICE)
            else:
                total += size.host if where == DEVICE else size.device + size.host
        return total

    def over(self, tier):
        return self.limits[tier] is not None and self.taken(tier) > self.limits[tier]

    def tier_of(self, key):
        return next((tier for name, _, tier in self.rows if name == key), None)

    def put(self, key, size):
        """Put a state. Return its tier, or None, and the keys that leave."""
        others, self.rows = [row for row in self.rows if row[0] != key], []
        for where in (DEVICE, HOST):
            self.rows = [[key, size, where]]
            if not self.over(DEVICE) and not self.over(HOST):
                break
        else:
            self.rows = []
        tier = self.tier_of(key)
        gone = self._made_to_fit(others) if self.rows else []
        self.rows = others + self.rows
        return tier, gone

    def _made_to_fit(self, others):
        """Move the oldest of `others` down until all limits hold. Return the keys that left."""
        new, gone = self.rows, []
        while True:
            self.rows = others + new
            if self.over(DEVICE):
                row = next(row for row in others if row[2] == DEVICE and row[1].device)
                row[2] = HOST
                if self.limits[HOST] is None or row[1].total <= self.limits[HOST]:
                    continue
            elif self.over(HOST):
                row = next(row for row in others if (row[1].host if row[2] == DEVICE else row[1].total))
            else:
                self.rows = new
                return gone
            others.remove(row)
            gone.append(row[0])

    def use(self, key):
        """Make a state the most recently used."""
        self.rows.sort(key=lambda row: row[0] == key)

    def drop(self, key):
        self.rows = [row for row in self.rows if row[0] != key]
