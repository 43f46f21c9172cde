"""How a turn is cut into pieces of tokens, and the device bytes that its largest piece takes."""

import math

import jax
import jax.numpy as jnp

from jshadow.cache.accounting import state_nbytes
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState, Reads
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.ops.attention import KEY_BLOCK, QUERY_BLOCK
from jshadow.ops.buckets import round_up, step_of
from jshadow.policies.base import LayerCache
from jshadow.policies.capabilities import PlansAhead, Speculates, SplitsTurns, capability

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
    item, columns = jnp.dtype(state.specs[0].dtype).itemsize, config.key_columns
    # As in a prefill: the residual and the normalized input, queries, keys and values before and after RoPE, the
    # attention's output and the two halves of the MLP. The hooks cut queries, keys, values and output into blocks.
    token = 2 * config.model_dim + 6 * config.q_heads * config.head_dim + 6 * columns + 2 * config.ffn_dim
    hooks = 0
    for spec, layer in zip(state.specs, state.layers, strict=True):
        split, block = split_of(spec), block_tokens(spec, size)
        # A float32 tile of scores, its weights and mask, and the running sums.
        tile = 4 * 4 * batch * config.q_heads * min(size, QUERY_BLOCK) * (KEY_BLOCK + config.head_dim)
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
        "state": sum(device for device, _ in state_nbytes(state).values()),
    }
