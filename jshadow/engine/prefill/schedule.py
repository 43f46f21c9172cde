"""The units of all layers of a prefill, and their operations."""

import dataclasses
import functools
import itertools

from jshadow.engine.prefill.layer_run import LayerPlan
from jshadow.engine.prefill.units import Unit, units_of
from jshadow.planner import prefill_time


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The units of all layers of a prefill.

    Attributes:
        plans: the static arguments of each layer.
        compressions: operations of the compression of each layer.
        batch: number of rows.
        pieces: number of pieces that have real tokens.
        requests: number of requests of the second pass, and number of tokens of each. (0, 0): there is none.
    """

    plans: tuple[LayerPlan, ...]
    compressions: tuple[int, ...]
    batch: int
    pieces: int
    requests: tuple[int, int] = (0, 0)

    @functools.cached_property
    def units(self) -> list[tuple[Unit, ...]]:
        """The units of each layer."""
        return [units_of(plan, self.batch, self.pieces, self.requests[0]) for plan in self.plans]

    @functools.cached_property
    def done(self) -> list[list[float]]:
        """For each layer, the share of all operations that is done before each unit, and after the last one."""
        costs = [[self._operations(layer, unit) for unit in units] for layer, units in enumerate(self.units)]
        total, before, shares = sum(map(sum, costs)), 0.0, []
        for layer in costs:
            shares.append([done / total for done in itertools.accumulate(layer, initial=before)])
            before += sum(layer)
        return shares

    def _operations(self, layer: int, unit: Unit) -> float:
        plan = self.plans[layer]
        config, size, first = plan.config, plan.size, unit.piece * plan.size
        rows = (plan.rows or self.batch) if plan.whole else self.batch
        project = prefill_time.projection_operations(config, size)
        rest = prefill_time.rest_operations(config, size)

        def attention(first: int, tokens: int) -> int:
            return prefill_time.attention_operations(config, plan.kind.window, first, tokens)

        if unit.work == "compress":
            return self.compressions[layer]
        if unit.work == "begin":
            return 0
        if unit.work == "attend":
            return rows * attention(0, self.pieces * size)
        if unit.work == "repeat":
            tokens, end = self.requests[1], self.pieces * size
            return self.batch * prefill_time.request_operations(config, plan.kind.window, end, tokens)
        if unit.work == "piece":
            return rows * (project + attention(first, size) + rest)
        return rows * (rest if unit.work == "finish" else project)
