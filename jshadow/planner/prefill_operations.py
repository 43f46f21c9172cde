"""The floating-point operations of a prefill. A multiplication and an addition are two operations.

They count for each token of the padded prompt. Norms, rotations and softmax are left out: they are less than 1 %.
"""

from jshadow.models.config import ModelConfig
from jshadow.policies.prefill_attention import SecondPass


def projection_operations(config: ModelConfig, tokens: int) -> int:
    """Return the operations of the query, key and value projections of one layer."""
    columns = (config.q_heads + 2 * config.kv_heads) * config.head_dim
    return 2 * tokens * config.model_dim * columns


def rest_operations(config: ModelConfig, tokens: int) -> int:
    """Return the operations of the output projection and the MLP of one layer."""
    return 2 * tokens * config.model_dim * (config.q_heads * config.head_dim + 3 * config.ffn_dim)


def attention_operations(config: ModelConfig, window: int | None, first: int, tokens: int) -> int:
    """Return the operations of exact causal attention of one layer, for `tokens` queries from position `first` on.

    Args:
        config: the model.
        window: number of tokens that a query sees, including itself. None means all earlier tokens.
        first: position of the first query.
        tokens: number of queries.
    """
    last = first + tokens
    if window is None:
        seen = (first + 1 + last) * tokens // 2
    else:
        growing = max(0, min(last, window) - first)  # queries that see all earlier tokens
        seen = (2 * first + 1 + growing) * growing // 2 + (tokens - growing) * window
    return 4 * config.q_heads * config.head_dim * seen


def layer_operations(config: ModelConfig, window: int | None, tokens: int) -> int:
    """Return the operations of one layer on a prompt of `tokens` tokens, without those of the compression."""
    projections = projection_operations(config, tokens) + rest_operations(config, tokens)
    return projections + attention_operations(config, window, 0, tokens)


def request_operations(config: ModelConfig, window: int | None, prompt: int, tokens: int) -> int:
    """Return the operations of one layer on one request of a second pass.

    The scores are the products of the queries with the keys of the chunk and of the request.

    Args:
        config: the model.
        window: number of tokens that a query sees. None means all earlier tokens.
        prompt: number of tokens of the prompt.
        tokens: number of tokens of the request, which contains the chunk.
    """
    scores = 4 * config.q_heads * config.head_dim * tokens * tokens
    block = projection_operations(config, tokens) + rest_operations(config, tokens)
    return block + attention_operations(config, window, prompt, tokens) + scores


def second_pass_operations(config: ModelConfig, window: int | None, tokens: int, second: SecondPass) -> int:
    """Return the operations of one layer on all requests for a prompt of `tokens` tokens, without their words."""
    chunks, rest = divmod(tokens, second.chunk)
    whole = chunks * request_operations(config, window, tokens, second.chunk)
    return whole + (request_operations(config, window, tokens, rest) if rest else 0)
