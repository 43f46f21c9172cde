"""The mixture-of-experts MLP (arXiv 1701.06538): a router chooses a few experts for each token, and only these run."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.models.config import Experts, ModelConfig, experts_of
from jshadow.models.layers import MLP, Linear, Norm, activated, projection
from jshadow.ops.projections import Tiles, Weights, grouped_product, product

_MOST_TILE = 64  # rows that one product of an expert takes on a CPU
_LEAST_HEIGHT, _MOST_HEIGHT = 16, 128  # rows of a tile on a GPU


class ExpertMLP(nn.Module):
    """The weighted sum of the chosen experts' MLPs, and of a shared MLP if the model has one."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, stream: Array | None = None, valid: Array | None = None) -> Array:
        """Apply the MLP to x [..., D]. The result has the same shape and dtype.

        `stream` has the same numbers before the norm, which experts with norms of their own take. None: x. `valid` says
        which rows are real, bool [...]. No expert runs for the others. None: all of them.
        """
        c, experts = self.config, experts_of(self.config)
        norm = functools.partial(Norm, c.norm, c.norm_eps)
        rows = (stream if stream is not None and experts.own_norms else x).reshape(-1, x.shape[-1])
        ids, shares = _Router(c, name="router")(rows)
        if valid is not None:
            ids = jnp.where(valid.reshape(-1, 1), ids, experts.count)  # the number of no expert
        rows = norm(name="experts_norm")(rows) if experts.own_norms else rows
        if experts.latent_width:
            rows = Linear(experts.latent_width, c.mlp_bias, name="latent_in")(rows)
        out = _Experts(c, name="experts")(rows, ids, shares).astype(x.dtype)
        if experts.latent_width:
            out = Linear(c.model_dim, c.mlp_bias, name="latent_out")(out)
        out = out.reshape(x.shape)
        if experts.shared_width:
            shared = MLP(c, experts.shared_width, name="shared")(x)
            if experts.shared_gate:
                shared = shared * jax.nn.sigmoid(Linear(1, name="shared_gate")(x))
            if experts.own_norms:
                out, shared = norm(name="experts_post_norm")(out), norm(name="shared_post_norm")(shared)
            out = out + shared
        return out


class _Router(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Return the chosen experts of rows x [N, D], int32 [N, k], and their shares, float32 [N, k]."""
        e = experts_of(self.config)
        if e.own_norms:
            scale = self.param("scale", nn.initializers.ones, (x.shape[-1],)).astype(jnp.float32)
            x = Norm("bare", self.config.norm_eps)(x.astype(jnp.float32)) * scale * x.shape[-1] ** -0.5
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], e.count))
        scores = x.astype(jnp.float32) @ kernel.astype(jnp.float32)
        if e.biases:
            scores = scores + self.param("bias", nn.initializers.zeros, (e.count,)).astype(jnp.float32)
        if e.router == "softmax_of_chosen":
            best, ids = lax.top_k(scores, e.chosen)
            return ids, jax.nn.softmax(best, axis=-1) * e.scale
        shares = jax.nn.sigmoid(scores) if e.router == "sigmoid" else jax.nn.softmax(scores, axis=-1)
        wanted = shares
        if e.corrected:
            wanted = wanted + self.param("correction", nn.initializers.zeros, (e.count,)).astype(jnp.float32)
        if e.groups > 1:
            wanted = _best_groups(wanted, e)
        _, ids = lax.top_k(wanted, e.chosen)
        shares = jnp.take_along_axis(shares, ids, axis=-1)
        if e.normalized:
            shares = shares / (shares.sum(axis=-1, keepdims=True) + e.least_sum)
        if e.own_norms:
            shares = shares * self.param("expert_scale", nn.initializers.ones, (e.count,)).astype(jnp.float32)[ids]
        return ids, shares * e.scale


def _best_groups(wanted: Array, e: Experts) -> Array:
    """Set the scores [N, E] of all experts but those of the best groups to -inf (DeepSeek-V3, arXiv 2412.19437).

    The score of a group is the sum of its two best experts.
    """
    grouped = wanted.reshape(-1, e.groups, e.count // e.groups)
    _, best = lax.top_k(lax.top_k(grouped, 2)[0].sum(axis=-1), e.chosen_groups)
    kept = jax.nn.one_hot(best, e.groups, dtype=jnp.bool_).any(axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(wanted.shape)


class _Tiles(NamedTuple):
    """Pairs of a row and one of its experts, sorted by expert, in tiles of one expert each.

    Attributes:
        number: how many tiles there are, int32.
        expert: the expert of each tile, int32 [M].
        first, end: the pairs of each tile, int32 [M].
        order: the pairs in the order of their experts, int32 [P].
    """

    number: Array
    expert: Array
    first: Array
    end: Array
    order: Array


def expert_tiles(ids: Array, experts: int, size: int) -> _Tiles:
    """Return the tiles of at most `size` pairs. `ids` has the expert of each pair, int32 [P].

    A pair whose number is that of no expert is in no tile.
    """
    order = jnp.argsort(ids, stable=True)
    counts = jnp.bincount(ids, length=experts)
    ends = jnp.cumsum(counts)
    tiles = jnp.cumsum(-(-counts // size))  # of all experts up to each one
    most = ids.size if size == 1 else ids.size // size + min(experts, ids.size)
    number = jnp.arange(most)
    expert = jnp.minimum(jnp.searchsorted(tiles, number, side="right", method="compare_all"), experts - 1)
    before = jnp.where(expert > 0, tiles[expert - 1], 0)
    first = ends[expert] - counts[expert] + (number - before) * size
    return _Tiles(tiles[-1], expert, first, jnp.minimum(first + size, ends[expert]), order)


class _Experts(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, ids: Array, shares: Array) -> Array:
        """Return the sum of the chosen experts' outputs, float32 [N, D], for rows x [N, D]."""
        c, e = self.config, experts_of(self.config)
        gate = _Stack(e.count, e.width, e.biases, name="gate")(x.shape[-1]) if c.gated else None
        up = _Stack(e.count, e.width, e.biases, name="up")(x.shape[-1])
        down = _Stack(e.count, x.shape[-1], e.biases, name="down")(e.width)
        stacks = _Stacks(gate, up, down)
        if not up.stack.alone:  # the compiler cannot split the kernel of the grouped products
            return _looped(c, stacks, x, ids, shares)
        grouped, looped = (functools.partial(way, c) for way in (_grouped, _looped))
        return lax.platform_dependent(stacks, x, ids, shares, cuda=grouped, default=looped)


def _looped(c: ModelConfig, stacks: "_Stacks", x: Array, ids: Array, shares: Array) -> Array:
    """Compute one tile after another. So a step reads the weights of the chosen experts alone."""
    gate, up, down = stacks
    count = len(up.stack.kernel)
    size = min(_MOST_TILE, 1 << max(0, (ids.size // count).bit_length()))
    tiles, chosen = expert_tiles(ids.reshape(-1), count, size), ids.shape[-1]
    shares = shares.reshape(-1)

    def add(tile: Array, out: Array) -> Array:
        expert = tiles.expert[tile]
        places = tiles.first[tile] + jnp.arange(size)
        pairs = tiles.order[jnp.minimum(places, ids.size - 1)]
        rows = jnp.where(places < tiles.end[tile], pairs // chosen, len(x))  # a row that is left out
        taken = x[jnp.minimum(rows, len(x) - 1)]
        inner = activated(c, gate(taken, expert) if gate else None, up(taken, expert))
        made = down(inner, expert).astype(jnp.float32) * shares[pairs][:, None]
        return out.at[rows].add(made, mode="drop")

    return lax.fori_loop(0, tiles.number, add, jnp.zeros(x.shape, jnp.float32))


def _grouped(
    c: ModelConfig, stacks: "_Stacks", x: Array, ids: Array, shares: Array, implementation: str = "auto"
) -> Array:
    """Compute all tiles at once, by a grouped product for each projection.

    The tiles of one row are its experts, without sorting.
    """
    gate, up, down = stacks
    count, chosen, pairs = len(up.stack.kernel), ids.shape[-1], ids.reshape(-1)
    if len(x) == 1:
        order = first = jnp.arange(chosen, dtype=jnp.int32)
        height, tiles = 1, Tiles(jnp.minimum(pairs, count - 1), first, first + (pairs < count))
    else:
        height = min(_MOST_HEIGHT, max(_LEAST_HEIGHT, 1 << max(0, (ids.size // count - 1).bit_length())))
        made = expert_tiles(pairs, count, height)
        order, tiles = made.order, Tiles(made.expert, made.first, made.end)

    owners = jnp.minimum(pairs[order], count - 1)
    options = (owners, tiles, height, implementation)
    taken = x[order // chosen]
    inner = activated(c, gate.grouped(taken, *options) if gate else None, up.grouped(taken, *options))
    out = down.grouped(inner, *options)[jnp.argsort(order)].reshape(*ids.shape, -1)
    out = jnp.where((ids < count)[..., None], out.astype(jnp.float32), 0)  # rows in no tile have any value
    return (out * shares[..., None]).sum(axis=1)


class _Stack(nn.Module):
    """The kernels of one projection of all experts, [E, D, F], plain or quantized.

    With `use_bias`, each expert has a bias [F].
    """

    count: int
    features: int
    use_bias: bool

    @nn.compact
    def __call__(self, inputs: int) -> "_Product":
        """Return the product with the kernel of an expert."""
        shape = (self.count, inputs, self.features)
        bias = self.param("bias", nn.initializers.zeros, (self.count, self.features)) if self.use_bias else None
        return _Product(projection(self, shape, nn.initializers.lecun_normal(batch_axis=0)), bias)


class _Product(NamedTuple):
    stack: Weights  # the kernels of all experts
    bias: Array | None  # [E, F]

    def __call__(self, x: Array, expert: Array) -> Array:
        """Multiply rows x by the kernel of one expert."""

        def one(stack: Array) -> Array:
            return lax.dynamic_index_in_dim(stack, expert, keepdims=False)

        out = product(x, self.stack.each(one))
        return out if self.bias is None else out + one(self.bias).astype(x.dtype)

    def grouped(self, x: Array, owners: Array, tiles: Tiles, height: int, implementation: str) -> Array:
        """Multiply rows x, sorted by expert, by the kernels of their experts, `owners`, int32 [P]."""
        out = grouped_product(x, self.stack, tiles, height, implementation)
        return out if self.bias is None else out + self.bias[owners].astype(x.dtype)


class _Stacks(NamedTuple):
    gate: _Product | None
    up: _Product
    down: _Product
