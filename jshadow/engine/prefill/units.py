"""The units of a prefill: the calls of compiled programs that read one layer, in order.

A paused prefill stops between two units. B rows, R of them that are read at once, S prompt tokens, D model width.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.engine.mesh.agree import run_together
from jshadow.engine.prefill import layer as prefill_layer
from jshadow.engine.prefill.layer import Begun, Given
from jshadow.engine.prefill.layer_run import LayerPlan
from jshadow.engine.prefill.second_pass import SecondWork, read_request

Work = Literal["begin", "piece", "project", "attend", "finish", "repeat", "compress"]


class Unit(NamedTuple):
    """One call of a program.

    Attributes:
        work: the program. "piece" is the block on one piece of the prompt. A sparse attention has "begin" before it,
            and if it needs all keys first, "project" for each piece before that. Attention in one call over the whole
            prompt has "project" for each piece, "attend", and "finish" for each piece. A second pass has "repeat" for
            each chunk. The last unit of a layer is "compress".
        piece: number of the piece, or of the chunk.
        row: first of the rows.
    """

    work: Work
    piece: int = 0
    row: int = 0


class LayerWork(NamedTuple):
    """The arrays of the layer that is being read.

    Attributes:
        x: hidden states [B, S, D].
        begun: the keys and values so far, or the lengths int32 [B] before the first unit.
        q: queries after RoPE [R, S, h_q, d] from "project", or None.
        carry: the pytree of the sparse attention, or the output of attention in one call [R, S, h_q, d], or None.
        second: the arrays of the second pass, or None.
    """

    x: Array
    begun: Begun
    q: Array | None = None
    carry: Any = None
    second: SecondWork | None = None


def units_of(plan: LayerPlan, batch: int, pieces: int, chunks: int = 0) -> tuple[Unit, ...]:
    """Return the units of a layer.

    Args:
        plan: the static arguments of the layer.
        batch: number of rows.
        pieces: number of pieces that have real tokens.
        chunks: number of chunks of the second pass.
    """

    def each(work: Work, row: int = 0) -> Iterator[Unit]:
        return (Unit(work, piece, row) for piece in range(pieces))

    def reading() -> Iterator[Unit]:
        if plan.whole is not None:
            assert plan.attention is None, "exact attention is replaced"
            assert not plan.needs_all, "attention in one call gives no log-sum-exps"
            for row in range(0, batch, plan.rows or batch):
                yield from each("project", row)
                yield Unit("attend", row=row)
                yield from each("finish", row)
            return
        if plan.attention is not None:
            if plan.attention.ahead:
                yield from each("project")
            yield Unit("begin")
        yield from each("piece")

    return (*reading(), *(Unit("repeat", chunk) for chunk in range(chunks)), Unit("compress"))


def run_unit(plan: LayerPlan, unit: Unit, given: Given, layer: LayerWork) -> LayerWork:
    """Run any unit but "compress", and return the arrays after it. The arrays that it changes are donated."""
    x, begun, q, carry, second = layer
    piece, row = np.int32(unit.piece), np.int32(unit.row)
    if unit.work == "project":
        begun, q = run_together(prefill_layer.project_piece, given, x, begun, q, piece, row, plan=plan)
        carry = None  # the output of the rows before is no longer needed
    elif unit.work == "begin":
        carry = run_together(prefill_layer.begin_attention, given, x, begun, q, plan=plan)
    elif unit.work == "piece":
        x, begun, carry = run_together(prefill_layer.read_piece, given, x, begun, q, carry, piece, plan=plan)
    else:
        assert isinstance(begun, PromptKV), unit
        if unit.work == "attend":
            assert q is not None
            carry = run_together(prefill_layer.attend_whole, given, begun, q, row, plan=plan)
        elif unit.work == "repeat":
            assert second is not None
            second, begun = run_together(read_request, given, second, begun, piece, plan=plan)
        else:
            assert unit.work == "finish", unit
            x = run_together(prefill_layer.finish_piece, given, x, begun.lengths, carry, piece, row, plan=plan)
    return LayerWork(x, begun, q, carry, second)


def prompt_read(plan: LayerPlan, layer: LayerWork) -> PromptKV:
    """Return the layer's keys and values after all units that read it."""
    assert isinstance(layer.begun, PromptKV), "no piece was read"
    return layer.begun.replace(extra=None if plan.attention is None else layer.carry)
