"""The operations of a prefill, and the predicted time in which a GPU reads a prompt or continues a stored state."""

import dataclasses
from collections.abc import Sequence

from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig, recurrent_of
from jshadow.ops.delta_rule import CHUNK
from jshadow.planner.gpu_specs import Gpu
from jshadow.policies.prefill_attention import SecondPass


def projection_operations(config: ModelConfig, tokens: int) -> int:
    """Return the operations of the projections of one layer before its attention or its recurrent state."""
    if config.mixer == "recurrent":
        r = recurrent_of(config)
        gates = r.value_heads * (r.value_dim + 2) if r.has_state else 0
        columns = 2 * config.key_columns + r.value_heads * r.value_dim + gates
    else:
        columns = config.query_columns * (1 + config.output_gate) + 2 * config.key_columns
    return 2 * tokens * config.model_dim * columns


def rest_operations(config: ModelConfig, tokens: int) -> int:
    """Return the operations of the output projection and the MLP of one layer."""
    recurrent = config.mixer == "recurrent"
    columns = recurrent_of(config).value_heads * recurrent_of(config).value_dim if recurrent else config.query_columns
    return 2 * tokens * (config.model_dim * columns + _mlp_weights(config))


def _mlp_weights(config: ModelConfig) -> int:
    """Return the number of weights of a layer's MLPs that a token is multiplied by, without those of a router."""
    products, experts, wide = 2 + config.gated, config.experts, config.model_dim
    if experts is None or not experts.latent_width or not config.has_mlp:
        return products * wide * config.active_width
    latent = experts.latent_width
    return products * (latent * experts.chosen * experts.width + wide * experts.shared_width) + 2 * wide * latent


def attention_operations(config: ModelConfig, window: int | None, first: int, tokens: int) -> int:
    """Return the operations of exact causal attention of one layer, for `tokens` queries from position `first` on.

    In a recurrent layer they are those of the chunks (Gated DeltaNet, arXiv 2412.06464, section 3.3): each token reads
    the state twice and is added to it, and its query and key meet the keys and updates of its chunk. A short
    convolution has one product for each of its taps.

    Args:
        config: the layer's config (`ModelConfig.at`).
        window: number of tokens that a query sees, including itself. None means all earlier tokens.
        first: position of the first query.
        tokens: number of queries.
    """
    if config.mixer == "recurrent":
        r = recurrent_of(config)
        if not r.has_state:
            return 2 * tokens * r.taps * r.value_heads * r.value_dim
        chunk = CHUNK * (2 * r.key_heads * r.key_dim + 2 * r.value_heads * r.value_dim)
        return 2 * tokens * (3 * r.value_heads * r.key_dim * r.value_dim + chunk)
    last = first + tokens
    if window is None:
        seen = (first + 1 + last) * tokens // 2
    else:
        growing = max(0, min(last, window) - first)  # queries that see all earlier tokens
        seen = (2 * first + 1 + growing) * growing // 2 + (tokens - growing) * window
    return 4 * config.query_columns * seen


def layer_operations(config: ModelConfig, window: int | None, tokens: int) -> int:
    """Return the operations of one layer on a prompt of `tokens` tokens, without those of the compression."""
    projections = projection_operations(config, tokens) + rest_operations(config, tokens)
    return projections + attention_operations(config, window, 0, tokens)


def request_operations(config: ModelConfig, window: int | None, prompt: int, tokens: int) -> int:
    """Return the operations of one layer on one request of a second pass.

    The scores are the products of the queries with the keys of the chunk and of the request.

    Args:
        window: number of tokens that a query sees. None means all earlier tokens.
        prompt: number of tokens of the prompt.
        tokens: number of tokens of the request, which contains the chunk.
    """
    scores = 0 if config.mixer == "recurrent" else 4 * config.query_columns * tokens * tokens
    block = projection_operations(config, tokens) + rest_operations(config, tokens)
    return block + attention_operations(config, window, prompt, tokens) + scores


def _second_pass_operations(config: ModelConfig, window: int | None, tokens: int, second: SecondPass) -> int:
    """Return the operations of one layer on all requests for a prompt of `tokens` tokens, without their words."""
    chunks, rest = divmod(tokens, second.chunk)
    whole = chunks * request_operations(config, window, tokens, second.chunk)
    return whole + (request_operations(config, window, tokens, rest) if rest else 0)


# Share of the data sheet's operations a second that matrix products and attention reach together on a long prompt. It
# is assumed, and not measured here. FlashAttention-3 (arXiv 2407.08608, figure 5) reports 0.6 to 0.75 of an H100's rate
# for causal attention in bfloat16 with heads of 128 columns and 16,384 tokens.
PREFILL_SHARE = 0.6
# Seconds from one small kernel to the next, from the compression of a layer of Llama-3.1-8B on an H200. See
# docs/benchmarks/gpu.md.
LAUNCH_SECONDS = 2e-6


@dataclasses.dataclass(frozen=True)
class PrefillTime:
    """The predicted time of the prefill of one prompt, and of the first token after its state was stored.

    Attributes:
        flops: operations of the projections, exact attention and MLPs of all layers, with those of a second pass.
        compress_flops: operations of the matrix products with which the policy compresses the prompt in all layers.
        compress_launches: about how many kernels the compression of all layers launches. Library calls count as the
            launches that take as long.
        flops_per_second: the assumed rate of both.
        seconds: time of `flops` at this rate.
        compress_seconds: time of `compress_flops` at this rate, and LAUNCH_SECONDS for each launch.
        restore_seconds: time to copy the device bytes of the stored state from host memory at the rate of the link.
        first_token_seconds: `restore_seconds` and the time of one decode step of one row.
        link_seconds: on several GPUs, time of the sums of the residual stream over links.
    """

    flops: int
    compress_flops: int
    compress_launches: int
    flops_per_second: float
    seconds: float
    compress_seconds: float
    restore_seconds: float
    first_token_seconds: float
    link_seconds: float = 0.0


def prefill_time(
    config: ModelConfig, specs: Sequence[CacheSpec], gpu: Gpu, tokens: int, device_bytes: int, step_seconds: float
) -> PrefillTime:
    """Return the predicted times for one prompt.

    Args:
        config: the model, or the share of it that one of several GPUs holds.
        specs: the cache of each layer.
        tokens: number of tokens in the prompt.
        device_bytes: device bytes of the state.
        step_seconds: time of a decode step of one row.
    """
    rate = PREFILL_SHARE * gpu.flops
    layers = [(config.at(index), spec.sliding_window) for index, spec in enumerate(specs)]
    flops = sum(layer_operations(*layer, tokens) for layer in layers)
    second = next((spec.policy.reads.second_pass for spec in specs if spec.policy.reads.second_pass), None)
    if second is not None:
        flops += sum(_second_pass_operations(*layer, tokens, second) for layer in layers)
    work = [spec.policy.compress_work(spec, tokens) for spec in specs]
    compress, launches = (sum(part) for part in zip(*work, strict=True))
    compress_seconds = compress / rate + launches * LAUNCH_SECONDS
    restore = device_bytes / gpu.pcie_bytes_per_second
    return PrefillTime(flops, compress, launches, rate, flops / rate, compress_seconds, restore, restore + step_seconds)
