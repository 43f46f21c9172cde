"""How prompts and turns are cut into pieces of tokens, and the device bytes that the largest piece takes."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jshadow.cache.accounting import state_nbytes, total
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState, Reads
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.ops.attention import KEY_BLOCK, QUERIES, QUERY_BLOCK, SINK_COLUMNS, capability_here, cudnn_attends
from jshadow.ops.buckets import round_up, step_of
from jshadow.policies.base import LayerCache
from jshadow.policies.capabilities import PlansAhead, Speculates, SplitsTurns, capability
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
    return 2 * config.model_dim + 3 * config.most_query_columns + 3 * config.most_key_columns + 2 * config.active_width


def tile_numbers(config: ModelConfig) -> int:
    """Return the numbers of a tile of attention in pieces: the scores, their softmax weights and the running sums."""
    return 3 * config.q_heads * QUERY_BLOCK * KEY_BLOCK


def second_pass_bytes(config: ModelConfig, second: SecondPass, batch: int, tokens: int, item: int) -> int:
    """Return an upper bound on the device bytes that a second pass over a prompt takes beside the prefill.

    They are the hidden states of all requests, the scores, and the temporaries of one request of one layer.

    Args:
        second: the settings of the second pass.
        tokens: number of tokens to which the prompts are padded.
        item: bytes of a number of the model's dtype.
    """
    size, chunks = second.most_tokens(tokens), -(-tokens // second.chunk)
    keys = second.sinks + min(second.chunk, tokens) + size
    hidden = batch * chunks * size * config.model_dim * item
    scores = 2 * batch * max(kind.kv_heads for kind in config.kinds) * tokens * 4
    row = (2 * (tokens + size) + keys) * config.most_key_columns  # a copy of the keys and values
    shares = 3 * config.q_heads * keys * QUERIES + 2 * size * keys  # with the mask
    return hidden + scores + 4 * (batch * size * token_numbers(config) + row + shares + tile_numbers(config))


def attends_whole(config: ModelConfig, window: int | None, dtype: Any, capability: tuple[int, int] | None) -> bool:
    """Return whether exact attention of a layer is computed in one call over the whole prompt.

    Args:
        config: the model. Its attention sinks need more columns, and a layer without a window.
        window: number of tokens that a query of the layer sees. None means all of them.
        dtype: dtype of queries, keys and values.
        capability: compute capability of the NVIDIA GPU, or None for another device.
    """
    if capability is None or (config.sinks and window is not None):
        return False
    return cudnn_attends(config.head_dim + (SINK_COLUMNS if config.sinks else 0), dtype, capability)


def whole_or_pieces(config: ModelConfig, window: int | None, dtype: Any, backend: str | None) -> set[bool]:
    """Return the possible values of `attends_whole` on a backend. They differ between GPUs for wide heads.

    Args:
        window: number of tokens that a query of the layer sees. None means all of them.
        dtype: dtype of queries, keys and values.
        backend: "gpu" for any NVIDIA GPU of the planner, another name for another device, or None for this machine.
    """
    if backend is None:
        return {attends_whole(config, window, dtype, capability_here())}
    known: list[Any] = [(8, 0), (9, 0)] if backend == "gpu" else [None]
    return {attends_whole(config, window, dtype, capability) for capability in known}


EXTEND_CHUNK = 2048  # tokens of all rows that pass through a layer at once
# Temporaries of a block of queries that select their own units. On a CPU, those of larger blocks leave its cache.
BLOCK_BYTES = 16 << 20


def turn_piece(source: Reads | KVState, count: int) -> int:
    """Return how many of the `count` tokens that are appended to a state the hooks of all layers take at once.

    This is the minimum of `HookInputs.piece` over the layers, or 1 for a policy that guesses the next token.
    """
    if capability(source.policy, Speculates) is not None:
        return 1
    return min(count, *(spec.policy.reads.piece for spec in source.specs))


def turn_tokens(source: Reads | KVState, count: int, extend_chunk: int = EXTEND_CHUNK) -> int:
    """Return how many of the `count` tokens of a turn pass through a layer at once, in each row.

    A layer that fetches for another layer, or for the next step, needs the tokens one step after the other. With such a
    layer, or with a policy that guesses the next token, the result is `turn_piece`. Otherwise it is a multiple of the
    `HookInputs.piece` of every layer. It depends on `count` only in steps, so turns of similar lengths share a
    compiled program, and so do all turns that are longer than a piece.

    Args:
        source: the state.
        count: number of tokens of the longest row.
        extend_chunk: the most tokens of all rows together. It may be exceeded by the smallest possible piece.
    """
    least = turn_piece(source, count)
    policies = [spec.policy for spec in source.specs]
    if count == least or not takes_blocks(source):
        return least
    unit = math.lcm(*(policy.reads.piece for policy in policies))
    most = max(unit, extend_chunk // source.specs[0].batch // unit * unit)
    return min(most, round_up(round_up(count, step_of(count, 4)), unit))


def takes_blocks(source: Reads | KVState) -> bool:
    """Return whether every layer can take many tokens of a turn before the next layer starts."""
    if capability(source.policy, Speculates) is not None:
        return False
    return not any(isinstance(spec.policy, PlansAhead) for spec in source.specs)


def split_of(spec: CacheSpec) -> SplitsTurns | None:
    """Return the layer's cache if its long turns are stored at once (`SplitsTurns`), or else None.

    A subclass with its own `append` or `attend` inherits hooks that do not fit these, so it takes blocks, unless it has
    its own `selected_piece` too.
    """
    policy: LayerCache = spec.policy
    if not isinstance(policy, SplitsTurns) or not policy.splits_turns or policy.reads.piece == 1:
        return None
    owner = next(base for base in type(policy).__mro__ if "selected_piece" in vars(base))
    same = all(getattr(type(policy), hook) is getattr(owner, hook) for hook in ("append", "attend"))
    return policy if same else None


def block_tokens(spec: CacheSpec, count: int) -> int:
    """Return how many of the `count` tokens of a piece the hooks of a layer take at once, in each row.

    It is `HookInputs.piece`, or `count` with `HookInputs.whole_turns`. If the whole piece is stored before its
    queries select (`SplitsTurns`), it is the largest multiple of `HookInputs.piece` with temporaries of at most
    BLOCK_BYTES, at least one. It is then made smaller if as many blocks remain.
    """
    reads, split = spec.policy.reads, split_of(spec)
    if reads.whole_turns:
        return count
    if split is None:
        return min(reads.piece, count)
    most = max(1, BLOCK_BYTES // max(1, split.query_temporaries(spec)) // reads.piece) * reads.piece
    return min(count, round_up(-(-count // -(-count // most)), reads.piece))


def extend_peak(config: ModelConfig, state: KVState, tokens: int, extend_chunk: int = EXTEND_CHUNK) -> dict[str, int]:
    """Return an upper bound on the device bytes at the peak of a turn, by part. "piece" and "hooks" are temporaries.

    It is that of `extend` with the logits of the last tokens only. Layers run one after the other, so only the largest
    layer counts.

    Args:
        config: the model.
        state: the state that the turn is added to, or an abstract one (`jshadow.abstract_state`).
        tokens: number of tokens of the turn's longest row.
        extend_chunk: number of tokens of all rows that go through a layer at once.

    Returns:
        {"weights", "piece", "hooks", "logits", "state"}. The peak is their sum.
    """
    batch, size = state.specs[0].batch, turn_tokens(state, tokens, extend_chunk)
    item, columns = jnp.dtype(state.specs[0].dtype).itemsize, config.most_key_columns
    # As in a prefill: the residual and the normalized input, queries, keys and values before and after RoPE, the
    # attention's output and the two halves of the MLP. The hooks cut queries, keys, values and output into blocks.
    token = 2 * config.model_dim + 6 * config.most_query_columns + 6 * columns + 2 * config.active_width
    hooks = 0
    for spec, layer in zip(state.specs, state.layers, strict=True):
        split, block = split_of(spec), block_tokens(spec, size)
        # A float32 tile of scores, its weights and mask, and the running sums.
        tile = 4 * 4 * batch * config.q_heads * min(size, QUERY_BLOCK) * (KEY_BLOCK + spec.head_dim)
        if split is not None and size > spec.policy.reads.piece:
            work = max(tile, block * split.query_temporaries(spec))
        else:
            work = min(size, spec.policy.reads.piece) * spec.policy.step_temporaries(spec)
            work = max(work, tile) if block > spec.policy.reads.piece else work
        # The loop over the blocks may hold a copy of what it changes.
        changed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((layer.live, layer.host.tail)))
        hooks = max(hooks, work + changed)
    return {
        "weights": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_weights(config))) * item,
        "piece": 4 * batch * size * token,
        "hooks": hooks,
        "logits": 2 * 4 * batch * config.vocab_size,
        "state": total(state_nbytes(state).values()).device,
    }
