"""The order in which a prefill dispatches its work, so that host rows are copied while the next layer computes."""

from unittest import mock

import numpy as np
from cases import CAPACITY, LENGTHS, PROMPT, TINY, model

from jshadow.engine import decode
from jshadow.engine.prefill import partial as partial_prefill
from jshadow.policies import ShadowKV


def test_a_layer_is_dispatched_before_the_rows_of_the_last_one_are_awaited():
    """The rows of a layer are awaited after the next layer was dispatched, and before its own rows are copied."""
    order = []

    def noted(name: str, function):
        def call(*args, **keywords):
            order.append(name)
            return function(*args, **keywords)

        return call

    settle = noted("await", partial_prefill.host_memory.settle)
    with (
        mock.patch.object(partial_prefill, "run_unit", noted("layer", partial_prefill.run_unit)),
        mock.patch.object(partial_prefill, "compress_all", noted("compress", partial_prefill.compress_all)),
        mock.patch.object(partial_prefill.host_memory, "settle", settle),
    ):
        decode.prefill(model(), PROMPT, np.asarray(LENGTHS), ShadowKV(), capacity=CAPACITY, fetch="device_put")
    assert order == ["layer", "await", "compress"] * TINY.num_layers + ["await"]
