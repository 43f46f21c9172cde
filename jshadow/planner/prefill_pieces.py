"""How a prefill is cut into pieces of tokens and groups of rows, and where its attention takes the whole prompt."""

from typing import Any

from jshadow.models.config import ModelConfig
from jshadow.ops.most_attention import QUERIES
from jshadow.ops.prefix_attention import KEY_BLOCK, QUERY_BLOCK
from jshadow.ops.whole_attention import capability_here, cudnn_attends
from jshadow.policies.prefill_attention import SecondPass


def pieces_of(tokens: int, prefill_chunk: int, multiple: int = 1) -> tuple[int, int]:
    """Return the number of equal pieces that a prompt of `tokens` tokens is cut into, and the tokens of each piece.

    The tokens of a piece are a multiple of `multiple`, and at most prefill_chunk unless `multiple` is larger. The last
    piece may reach past the end of the prompt.
    """
    units = -(-tokens // multiple)
    count = -(-units // max(prefill_chunk // multiple, 1))
    return count, -(-units // count) * multiple


def most_rows(size: int, prefill_chunk: int) -> int:
    """Return the maximum number of rows that go through a layer at once if attention takes the whole prompt.

    A piece of all these rows has at most prefill_chunk tokens, or it has one row.

    Args:
        size: number of tokens that a piece has in each row.
        prefill_chunk: number of tokens that go through a layer at once.
    """
    return max(1, prefill_chunk // size)


def rows_at_once(batch: int, size: int, prefill_chunk: int) -> int:
    """Return the largest divisor of `batch` that is at most `most_rows`. So many rows go through a layer at once."""
    most = most_rows(size, prefill_chunk)
    return max(rows for rows in range(1, batch + 1) if batch % rows == 0 and rows <= most)


def token_numbers(config: ModelConfig) -> int:
    """Return the numbers that a block holds for each token that is processed at once.

    They are the residual and the normalized input, the queries before and after RoPE and the attention's output, the
    keys before and after RoPE and the values, and the two halves of the MLP.
    """
    return 2 * config.model_dim + 3 * config.q_heads * config.head_dim + 3 * config.key_columns + 2 * config.ffn_dim


def tile_numbers(config: ModelConfig) -> int:
    """Return the numbers of a tile of attention in pieces: the scores, their softmax weights and the running sums."""
    return 3 * config.q_heads * QUERY_BLOCK * KEY_BLOCK


def second_pass_bytes(config: ModelConfig, second: SecondPass, batch: int, tokens: int, item: int) -> int:
    """Return an upper bound on the device bytes that a second pass over a prompt takes beside the prefill.

    They are the hidden states of all requests, the scores, and the temporaries of one request of one layer.

    Args:
        config: the model.
        second: the settings of the second pass.
        batch: number of rows.
        tokens: number of tokens to which the prompts are padded.
        item: bytes of a number of the model's dtype.
    """
    size, chunks = second.most_tokens(tokens), -(-tokens // second.chunk)
    keys = second.sinks + min(second.chunk, tokens) + size
    hidden = batch * chunks * size * config.model_dim * item
    scores = 2 * batch * config.kv_heads * tokens * 4
    row = 2 * (tokens + size) * config.key_columns + keys * config.key_columns  # a copy of the keys and values
    shares = 3 * config.q_heads * keys * QUERIES + 2 * size * keys  # with the mask
    return hidden + scores + 4 * (batch * size * token_numbers(config) + row + shares + tile_numbers(config))


def attends_whole(config: ModelConfig, dtype: Any, capability: tuple[int, int] | None) -> bool:
    """Return whether exact attention of a layer is computed in one call over the whole prompt.

    Args:
        config: the model.
        dtype: dtype of queries, keys and values.
        capability: compute capability of the NVIDIA GPU, or None for another device.
    """
    return capability is not None and cudnn_attends(config.head_dim, dtype, capability)


def whole_or_pieces(config: ModelConfig, dtype: Any, backend: str | None) -> set[bool]:
    """Return the possible values of `attends_whole` on a backend. They differ between GPUs for wide heads.

    Args:
        config: the model.
        dtype: dtype of queries, keys and values.
        backend: "gpu" for any NVIDIA GPU of the planner, another name for another device, or None for this machine.
    """
    if backend is None:
        return {attends_whole(config, dtype, capability_here())}
    known: list[Any] = [(8, 0), (9, 0)] if backend == "gpu" else [None]
    return {attends_whole(config, dtype, capability) for capability in known}
