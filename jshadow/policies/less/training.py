"""How LESS learns its kernels: layer by layer, from what H2O evicts of a text (arXiv 2402.09398, section 3.3).

What is simulated: H2O's own hooks decode the text, token by token from an empty cache, on the exact queries, keys and
values of the layer. That says for every query which tokens are held and which are in the state, and so what LESS would
answer with given kernels: the low-rank part is a causal sum over the evicted tokens, many queries at once.

How that differs from a step after a prompt: `compress` ranks a prompt's tokens by exact attention and evicts all at
once, here the masses are those of the sparse attention itself (as in the paper's simulation). And each layer sees the
inputs of the full model, not those of a model whose earlier layers are sparse, so layers are independent of each other.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jshadow.cache.prompt_walk import check_text, prompts_of
from jshadow.cache.records import LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError, PromptError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, causal_attention, group_queries, masked_scores
from jshadow.policies.checks import check_range
from jshadow.policies.h2o import H2O
from jshadow.policies.less.kernels import KernelSizes, combine, key_features, query_features

QUERIES = 128  # of a training step, all of one text
TILE = 128  # queries whose scores exist at once
LARGEST = 60.0  # logarithm of the factor that the key side may take
ROUND = 50  # training steps of one compiled program
SCALE = 1e-4  # at which the diagonal of the key side begins, beside the normaliser of the sparse part


class Examples(NamedTuple):
    """What one layer is to learn from, queries in the order of their KV heads [B, h_kv, g, S, ...].

    Attributes:
        q: queries after RoPE, float32 [..., d].
        k, v: keys after RoPE and values, float32 [B, h_kv, S, d].
        gone: the step at whose end a token was evicted, int32 [B, h_kv, S]; S where it never was.
        sparse, lse: H2O's output [..., d] and its log-sum-exp [...], float32.
        full: full attention's output, float32 [..., d].
    """

    q: Array
    k: Array
    v: Array
    gone: Array
    sparse: Array
    lse: Array
    full: Array


OF_QUERIES = ("q", "sparse", "lse", "full")  # the fields with an axis of queries


class Training(NamedTuple):
    """How long, how fast and from which seed to train: as the arguments of `LESS.fit`."""

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
    """The arrays of every layer. Arguments and errors as in `LESS.fit`."""
    steps, rate, seed = training
    check_range(policy.name, "fit's steps", steps, 1)
    if not 0 < rate < 1:
        raise ConfigError(f"less.fit's rate must lie in (0, 1), got {rate!r}")
    config: ModelConfig = params.config
    # A schedule is given the steps before, so that 0 is reached one step behind the last.
    optimiser = optax.adam(optax.cosine_decay_schedule(rate, steps))
    layers: list[Any] = [None] * config.num_layers
    total = steps * sum(kind.window is None for kind in config.attention_kinds)
    done = 0
    for layer, first, examples in examples_of(policy, params, tokens):
        key, shift = jax.random.fold_in(jax.random.key(seed), layer), shift_of(examples, first)
        kernels = begin(sizes, jax.random.fold_in(key, 0), examples)
        carry = (kernels, optimiser.init(kernels))
        for start in range(0, steps, ROUND):
            count = min(ROUND, steps - start)
            carry = train_round(carry, Draws(examples, shift, key), jnp.int32(start), optimiser, count, first)
            done += count
            if progress is not None:
                jax.block_until_ready(carry)
                progress(done, total)
        kernels = carry[0]
        psi = kernels["psi"] | {"scale": kernels["psi"]["scale"] * jnp.exp(shift)[:, None]}
        layers[layer] = kernels | {"psi": psi}
    blank = jax.tree.map(jnp.zeros, sizes.shapes(config.kv_heads, config.head_dim), is_leaf=is_shape)
    return jax.tree.map(lambda *parts: jnp.stack(parts), *[blank if one is None else one for one in layers])


def is_shape(node: Any) -> bool:
    """A shape is a leaf."""
    return isinstance(node, tuple)


def examples_of(policy: H2O, params: Any, tokens: Any) -> Iterator[tuple[int, int, Examples]]:
    """Layer, the first query that counts, and the examples, for each layer that sees everything."""
    config = params.config
    text = check_text(config, tokens)
    batch, count = text.shape
    policy = policy.resolve(config, count)
    assert policy.heavy is not None
    assert policy.recent is not None
    first = policy.heavy + policy.recent + 1
    if first >= count:
        raise PromptError(
            f"tokens must be more than {first} for heavy + recent = {first - 1}: of {count} nothing is evicted that a "
            "query behind could miss"
        )
    base = H2O(policy.heavy, policy.recent, policy.normalise)
    for layer, prompt in enumerate(prompts_of(params, text)):
        kind = config.attention_kind(layer)
        if kind.window is not None:
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
    """What H2O held at each query of a layer, what it made of it, and what full attention did."""
    assert prompt.q_post is not None
    full, _ = causal_attention(prompt.q_post, prompt.k_post, prompt.v, spec.scale)
    queries = group_queries(prompt.q_post, spec.kv_heads)
    k, v = (x.transpose(0, 2, 1, 3) for x in (prompt.k_post, prompt.v))
    gone, tokens = evictions(prompt, spec), prompt.k_post.shape[1]
    size = min(TILE, tokens)

    def tile(start: Array) -> tuple[Array, Array]:
        at = start + jnp.arange(size)
        held = (jnp.arange(tokens) <= at[:, None]) & (gone[:, :, None] >= at[:, None])
        scores = masked_scores(lax.dynamic_slice_in_dim(queries, start, size, axis=3), Piece(k, v, held), spec.scale)
        probs = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bhgtn,bhnd->bhgtd", probs, v.astype(jnp.float32))
        return out, jax.nn.logsumexp(scores, axis=-1)

    # The last tile overlaps the one before; what both have is the same.
    starts = jnp.minimum(jnp.arange(0, tokens, size), tokens - size)
    outs, lses = lax.map(tile, starts)

    def joined(parts: Array) -> Array:
        whole = jnp.zeros((*parts.shape[1:4], tokens, *parts.shape[5:]))
        for index in range(parts.shape[0]):
            whole = lax.dynamic_update_slice_in_dim(whole, parts[index], starts[index], axis=3)
        return whole

    q, k, v, exact = (x.astype(jnp.float32) for x in (queries, k, v, group_queries(full, spec.kv_heads)))
    return Examples(q, k, v, gone, joined(outs), joined(lses), exact)


def evictions(prompt: PromptKV, spec: CacheSpec) -> Array:
    """The step at whose end H2O evicts each token of a text that it decodes, int32 [B, h_kv, S]; S: it stays."""
    assert prompt.q_post is not None
    policy: H2O = spec.policy
    tokens, batch = prompt.k_post.shape[1], spec.batch

    def one(state: LayerState, rows: tuple[Array, ...]) -> tuple[LayerState, Array]:
        at, q, k, v = rows[0], *(x[:, None] for x in rows[1:])
        position = jnp.broadcast_to(at, (batch, 1))
        step = StepKV(q, q, k, k, v, position, jnp.ones((batch, 1), bool), position[:, 0], jnp.zeros(0))
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


def shift_of(examples: Examples, first: int) -> Array:
    """The mean log-sum-exp of each KV head's sparse part, float32 [h_kv].

    Models differ in the size of their scores. Kernels are trained for scores less that much, which a factor on the key
    side takes back, so that they begin equally small beside the sparse part in every model. That factor and sums of it
    must be float32 numbers: heads of larger scores learn less, or nothing.
    """
    return jnp.clip(examples.lse[..., first:].mean(axis=(0, 2, 3)), -LARGEST, LARGEST)


def begin(sizes: KernelSizes, key: Array, examples: Examples) -> dict[str, Any]:
    """First weights: random layers that keep the size of what they are given, and a small key side."""
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
    kernels["psi"] |= {"scale": jnp.full(side["scale"], SCALE), "interaction": jnp.zeros(side["interaction"])}
    return kernels


def answers(kernels: dict[str, Any], q: Array, at: Array, part: Examples, shift: Array) -> Array:
    """What LESS gives for queries q [B, h_kv, g, T, d] at positions [T], sparse and lse of `part` being theirs."""
    batch, heads, group, count, dim = q.shape
    phi = query_features(kernels, q.reshape(batch, heads, group * count, dim))
    weights = jnp.einsum("bhnr,bhsr->bhns", phi, key_features(kernels, part.k))
    inside = part.gone[:, :, None] < jnp.tile(at, group)[:, None]
    weights = jnp.where(inside, weights, 0)
    top = jnp.einsum("bhns,bhsd->bhnd", weights, part.v).reshape(q.shape)
    return combine(part.sparse, part.lse - shift[:, None, None], top, weights.sum(axis=-1).reshape(q.shape[:-1]))


class Draws(NamedTuple):
    """What the steps of a training draw from: the examples of a layer, `shift_of` them, and a random key."""

    examples: Examples
    shift: Array
    key: Array


@functools.partial(jax.jit, static_argnames=("optimiser", "count", "first"), donate_argnames=("carry",))
def train_round(
    carry: tuple[Any, Any], draws: Draws, start: Array, optimiser: optax.GradientTransformation, count: int, first: int
) -> tuple[Any, Any]:
    """`count` steps of the optimiser from step `start` on, each on queries drawn from one text."""
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
        at = first + jax.random.choice(b, span, (min(QUERIES, span),), replace=False)
        own = Examples(*(lax.dynamic_slice_in_dim(x, row, 1, axis=0) for x in examples))
        drawn = own._replace(**{name: jnp.take(getattr(own, name), at, axis=3) for name in OF_QUERIES})
        slope = jax.grad(loss)(kernels, drawn, at)
        change, moments = optimiser.update(slope, moments, kernels)
        return (optax.apply_updates(kernels, change), moments), None

    return lax.scan(one, carry, start + jnp.arange(count))[0]
