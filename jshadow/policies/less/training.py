"""Train the kernels of LESS layer by layer, on the tokens that H2O evicts of a text (arXiv 2402.09398, section 3.3).

The training simulates decoding. H2O's hooks decode the text token by token from an empty cache, with the layer's exact
queries, keys and values. This gives, for every query, the tokens that are held and those that were evicted. LESS's
output for given kernels follows from it for many queries at once: the part of the evicted tokens is a causal sum.

The simulation differs from a decode step after a prompt in two ways. `compress` ranks a prompt's tokens by exact
attention and evicts many at once; here the masses come from the sparse attention, as in the paper's simulation. And
each layer gets the inputs of the full model, not those of a model with sparse earlier layers, so the layers are
independent. `errors_of` measures the errors on a text without training, which `jshadow fit` reports.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from jshadow.cache.prompt_walk import check_text, prompts_of
from jshadow.cache.records import LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError, PromptError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, causal_attention, group_queries, lse_with, masked_scores, softmax_with
from jshadow.policies.base import full_layers
from jshadow.policies.checks import check_range
from jshadow.policies.h2o import H2O
from jshadow.policies.less.kernels import KernelSizes, combine, key_features, query_features

_QUERIES = 128  # queries in a training step, all from one row of the text
_TILE = 128  # queries whose scores are in memory at once
_LARGEST = 60.0  # largest absolute value of `_shift_of`, the logarithm of a factor on psi
_ROUND = 50  # training steps in one call of the compiled program
_SCALE = 1e-4  # initial value of psi's scale s, small compared with the normalizer of the sparse part


class Examples(NamedTuple):
    """The training examples of one layer. g query heads share a KV head.

    Attributes:
        q: queries after RoPE, float32 [B, h_kv, g, S, d].
        k: keys after RoPE, float32 [B, h_kv, S, d].
        v: values, float32 [B, h_kv, S, d].
        gone: the step at whose end each token was evicted, int32 [B, h_kv, S]; S if it never was.
        sparse: H2O's output for each query, float32 [B, h_kv, g, S, d].
        lse: log-sum-exp of H2O's scores, float32 [B, h_kv, g, S].
        full: full attention's output, float32 [B, h_kv, g, S, d].
    """

    q: Array
    k: Array
    v: Array
    gone: Array
    sparse: Array
    lse: Array
    full: Array


_OF_QUERIES = ("q", "sparse", "lse", "full")  # the fields in which axis 3 is the query


class Training(NamedTuple):
    """The arguments `steps`, `rate` and `seed` of `LESS.fit`."""

    steps: int
    rate: float
    seed: int


def train_all(
    policy: H2O,
    sizes: KernelSizes,
    params: Any,
    tokens: Any,
    training: Training,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    """Train the kernels of all layers on `policy`'s evictions. Arguments, result and errors are as in `LESS.fit`."""
    steps, rate, seed = training
    check_range(policy.name, "fit's steps", steps, 1)
    if not 0 < rate < 1:
        raise ConfigError(f"less.fit's rate must lie in (0, 1), got {rate!r}")
    config: ModelConfig = params.config
    # The schedule counts steps from 0, so that the rate would reach 0 one step after the last.
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    layers: list[Any] = [None] * config.num_layers
    total = steps * len(full_layers(config))
    done = 0
    for layer, first, examples in examples_of(policy, params, tokens):
        key, shift = jax.random.fold_in(jax.random.key(seed), layer), _shift_of(examples, first)
        kernels = begin(sizes, jax.random.fold_in(key, 0), examples)
        carry = (kernels, optimizer.init(kernels))
        for start in range(0, steps, _ROUND):
            count = min(_ROUND, steps - start)
            carry = train_round(carry, Draws(examples, shift, key), jnp.int32(start), optimizer, count, first)
            done += count
            if progress is not None:
                jax.block_until_ready(carry)
                progress(done, total)
        kernels = carry[0]
        psi = kernels["psi"] | {"scale": kernels["psi"]["scale"] * jnp.exp(shift)[:, None]}
        layers[layer] = kernels | {"psi": psi}
    blank = jax.tree.map(jnp.zeros, sizes.shapes(config.kv_heads, config.head_dim), is_leaf=_is_shape)
    return jax.tree.map(lambda *parts: jnp.stack(parts), *[blank if one is None else one for one in layers])


def _is_shape(node: Any) -> bool:
    """Return whether a node of the tree of shapes is a shape. It is for `jax.tree.map`."""
    return isinstance(node, tuple)


def examples_of(policy: H2O, params: Any, tokens: Any) -> Iterator[tuple[int, int, Examples]]:
    """Yield (index, first, examples) for each layer that attends to all tokens.

    `first` is the position of the first query after an eviction.
    """
    config = params.config
    text = check_text(config, tokens)
    batch, count = text.shape
    policy = policy.resolve(config, count)
    assert policy.heavy is not None
    assert policy.recent is not None
    first = policy.heavy + policy.recent + 1
    if first >= count:
        raise PromptError(
            f"tokens must be more than {first} for heavy + recent = {first - 1}, got {count}: nothing is evicted "
            "before the last query"
        )
    base = H2O(policy.heavy, policy.recent, policy.normalize)
    for layer, prompt in enumerate(prompts_of(params, text)):
        kind = config.attention_kind(layer)
        if prompt is None or not kind.sees_all:
            continue
        spec = CacheSpec(
            layer=None,
            num_layers=config.num_layers,
            batch=batch,
            capacity=count,
            window=count,
            q_heads=config.q_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            model_dim=config.model_dim,
            dtype=prompt.k_post.dtype.name,
            scale=config.attention_scale,
            rope=kind.rope,
            sliding_window=None,
            fetch="resident",
            policy=base,
        )
        yield layer, first, make_examples(prompt, spec=spec)


@functools.partial(jax.jit, static_argnames=("spec",))
def make_examples(prompt: PromptKV, *, spec: CacheSpec) -> Examples:
    """Compute the examples of one layer from its exact queries, keys and values. `spec.policy` is H2O."""
    assert prompt.q_post is not None
    full, _ = causal_attention(prompt.q_post, prompt.k_post, prompt.v, spec.scale, sinks=prompt.sinks)
    queries = group_queries(prompt.q_post, spec.kv_heads)
    k, v = (x.transpose(0, 2, 1, 3) for x in (prompt.k_post, prompt.v))
    gone, tokens = _evictions(prompt, spec), prompt.k_post.shape[1]
    size = min(_TILE, tokens)

    def tile(start: Array) -> tuple[Array, Array]:
        at = start + jnp.arange(size)
        held = (jnp.arange(tokens) <= at[:, None]) & (gone[:, :, None] >= at[:, None])
        scores = masked_scores(lax.dynamic_slice_in_dim(queries, start, size, axis=3), Piece(k, v, held), spec.scale)
        probs = softmax_with(scores, prompt.sinks)
        out = jnp.einsum("bhgtn,bhnd->bhgtd", probs, v.astype(jnp.float32))
        return out, lse_with(scores, prompt.sinks)

    # The last tile overlaps the previous one. Both have the same numbers there.
    starts = jnp.minimum(jnp.arange(0, tokens, size), tokens - size)
    outs, lses = lax.map(tile, starts)

    def joined(parts: Array) -> Array:
        whole = jnp.zeros((*parts.shape[1:4], tokens, *parts.shape[5:]))
        for index in range(parts.shape[0]):
            whole = lax.dynamic_update_slice_in_dim(whole, parts[index], starts[index], axis=3)
        return whole

    q, k, v, exact = (x.astype(jnp.float32) for x in (queries, k, v, group_queries(full, spec.kv_heads)))
    return Examples(q, k, v, gone, joined(outs), joined(lses), exact)


def _evictions(prompt: PromptKV, spec: CacheSpec) -> Array:
    """Decode a text with H2O. Return the step at whose end each token is evicted, int32 [B, h_kv, S]; S if never."""
    assert prompt.q_post is not None
    policy: H2O = spec.policy
    tokens, batch, none = prompt.k_post.shape[1], spec.batch, jnp.zeros(0)

    def one(state: LayerState, rows: tuple[Array, ...]) -> tuple[LayerState, Array]:
        at, q, k, v = rows[0], *(x[:, None] for x in rows[1:])
        position = jnp.broadcast_to(at, (batch, 1))
        real, sinks = jnp.ones((batch, 1), bool), prompt.sinks
        step = StepKV(q, q, k, k, v, position, real, position[:, 0], none, none, none, sinks=sinks)
        state, _ = policy.append(spec, state, step)
        before = state.live.positions
        _, state = policy.attend(spec, state, step, None)
        return state, jnp.where(state.live.positions < 0, before, -1).max(axis=2)

    rows = (x.swapaxes(0, 1) for x in (prompt.q_post, prompt.k_post, prompt.v))
    at = jnp.arange(tokens, dtype=jnp.int32)
    _, evicted = lax.scan(one, policy.init(spec), (at, *rows))  # [S, B, h_kv]
    evicted = jnp.where(evicted < 0, tokens, evicted).transpose(1, 2, 0)
    row, head, _ = jnp.ogrid[:batch, : spec.kv_heads, :1]
    never = jnp.full((batch, spec.kv_heads, tokens), tokens, jnp.int32)
    return never.at[row, head, evicted].set(at, mode="drop")


def _shift_of(examples: Examples, first: int) -> Array:
    """Return the mean log-sum-exp of H2O's scores in each KV head, float32 [h_kv], within [-LARGEST, LARGEST].

    Models differ in the size of their scores. Training subtracts this shift from the log-sum-exps, so that in every
    model the kernels begin equally small compared with the sparse part. After training, psi is multiplied by exp(shift)
    to undo it. The shift is clipped because that factor, and sums of it, must be finite in float32. Heads with larger
    scores learn less, or nothing.
    """
    return jnp.clip(examples.lse[..., first:].mean(axis=(0, 2, 3)), -_LARGEST, _LARGEST)


def begin(sizes: KernelSizes, key: Array, examples: Examples) -> dict[str, Any]:
    """Return the initial weights: random layers that keep the size of their inputs, and a small scale of psi."""
    heads, dim = examples.k.shape[1], examples.k.shape[3]
    shapes = sizes.shapes(heads, dim)
    rows = {"phi": examples.q.transpose(1, 0, 2, 3, 4).reshape(heads, -1), "psi": examples.k.swapaxes(0, 1)}
    kernels: dict[str, Any] = {}
    for index, (name, x) in enumerate(rows.items()):
        a, b = jax.random.split(jax.random.fold_in(key, index))
        size = jnp.sqrt(jnp.square(x.reshape(heads, -1)).mean(axis=1)) + 1e-6
        first = jax.random.normal(a, shapes[name]["first"]) / size[:, None, None] / dim**0.5
        second = jax.random.normal(b, shapes[name]["second"]) / sizes.hidden**0.5
        kernels[name] = {"first": first, "second": second}
    side = shapes["psi"]
    kernels["psi"] |= {"scale": jnp.full(side["scale"], _SCALE), "interaction": jnp.zeros(side["interaction"])}
    return kernels


def answers(kernels: dict[str, Any], q: Array, at: Array, part: Examples, shift: Array) -> Array:
    """Compute the output of LESS for some queries after RoPE at positions `at`, float32 [B, h_kv, g, T, d].

    `part` has the examples in which the fields of OF_QUERIES are cut to these queries. `shift` is that of `_shift_of`.
    """
    batch, heads, group, count, dim = q.shape
    phi = query_features(kernels, q.reshape(batch, heads, group * count, dim))
    weights = jnp.einsum("bhnr,bhsr->bhns", phi, key_features(kernels, part.k))
    inside = part.gone[:, :, None] < jnp.tile(at, group)[:, None]
    weights = jnp.where(inside, weights, 0)
    top = jnp.einsum("bhns,bhsd->bhnd", weights, part.v).reshape(q.shape)
    return combine(part.sparse, part.lse - shift[:, None, None], top, weights.sum(axis=-1).reshape(q.shape[:-1]))


class Draws(NamedTuple):
    """The constant inputs of a layer's training: its examples, their `_shift_of`, and a random key."""

    examples: Examples
    shift: Array
    key: Array


@functools.partial(jax.jit, static_argnames=("optimizer", "count", "first"), donate_argnames=("carry",))
def train_round(
    carry: tuple[Any, Any], draws: Draws, start: Array, optimizer: optax.GradientTransformation, count: int, first: int
) -> tuple[Any, Any]:
    """Run `count` training steps, beginning with step `start`. Each draws queries from one row of the text.

    `carry` is the kernels and the optimizer's state, and `first` is the first query that may be drawn.
    """
    examples, shift, key = draws
    batch, tokens = examples.k.shape[0], examples.k.shape[2]
    span = tokens - first

    def loss(kernels: Any, part: Examples, at: Array) -> Array:
        away = answers(kernels, part.q, at, part, shift) - part.full
        return jnp.square(away).sum() / jnp.square(part.full).sum()

    def one(carry: tuple[Any, Any], index: Array) -> tuple[tuple[Any, Any], None]:
        kernels, moments = carry
        a, b = jax.random.split(jax.random.fold_in(key, index + 1))
        row = jax.random.randint(a, (), 0, batch)
        at = first + jax.random.choice(b, span, (min(_QUERIES, span),), replace=False)
        text = Examples(*(lax.dynamic_slice_in_dim(x, row, 1, axis=0) for x in examples))
        drawn = text._replace(**{name: jnp.take(getattr(text, name), at, axis=3) for name in _OF_QUERIES})
        slope = jax.grad(loss)(kernels, drawn, at)
        change, moments = optimizer.update(slope, moments, kernels)
        return (optax.apply_updates(kernels, change), moments), None

    return lax.scan(one, carry, start + jnp.arange(count))[0]


def errors_of(policy: H2O, params: Any, tokens: Any, fitted: Any) -> np.ndarray:
    """Measure the relative squared error of each layer's attention output on a text.

    The error is the sum of squared differences from full attention, divided by the sum of squares of full attention.
    All queries after the first eviction are counted.

    Args:
        policy: H2O or LESS. Settings that are None are resolved for a capacity of the text's length.
        tokens: token ids, int32 [S] or [B, S], without padding. There must be more than heavy + recent + 1 of them.
        fitted: the arrays that `LESS.fit` returned.

    Returns:
        float64 [L, 2]: the error of H2O, and that of LESS. NaN for layers with the model's own window.

    Raises:
        PromptError: as in `LESS.fit`.
    """
    out = np.full((params.config.num_layers, 2), np.nan)
    for layer, first, examples in examples_of(policy, params, tokens):
        kernels = jax.tree.map(lambda leaf, layer=layer: leaf[layer], fitted)
        out[layer] = [float(x) for x in layer_errors(kernels, examples, first=first)]
    return out


@functools.partial(jax.jit, static_argnames=("first",))
def layer_errors(kernels: Any, examples: Examples, *, first: int) -> tuple[Array, Array]:
    """Return the relative squared errors of H2O and of LESS in one layer, for the queries from position `first` on."""
    tokens, none = examples.k.shape[2], jnp.zeros(examples.k.shape[1])
    size = min(_TILE, tokens - first)

    def tile(start: Array) -> Array:
        at = start + jnp.arange(size)
        cut = {name: lax.dynamic_slice_in_dim(getattr(examples, name), start, size, axis=3) for name in _OF_QUERIES}
        part = examples._replace(**cut)
        answered = answers(kernels, part.q, at, part, none)
        parts = (part.sparse - part.full, answered - part.full, part.full)
        return jnp.stack([jnp.square(x).sum(axis=(0, 1, 2, 4)) for x in parts])

    starts = jnp.minimum(jnp.arange(first, tokens, size), tokens - size)
    sums = lax.map(tile, starts)  # [tiles, 3, size]
    at = starts[:, None] + jnp.arange(size)
    begun = first + size * jnp.arange(len(starts))
    whole = jnp.where((at >= begun[:, None])[:, None], sums, 0).sum(axis=(0, 2))
    return whole[0] / whole[2], whole[1] / whole[2]
