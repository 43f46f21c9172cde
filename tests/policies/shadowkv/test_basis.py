"""The basis by subspace iteration against the best one, and bfloat16 keys that are multiplied as they are."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few import one_of
from jax.extend.core import jaxprs_in_params
from random_arrays import array, normal, wide

from jshadow.policies.shadowkv.key_codecs import LowRankCodec, Sizes, TransformCodec, lowrank
from jshadow.policies.shadowkv.key_codecs.lowrank import PromptKeys

WIDTH, COUNT = 288, 136  # more columns than a leaf
NUMBER = np.arange(1, WIDTH + 1)
SPECTRA = {
    "slow": 1 / NUMBER,
    "fast": 0.95**NUMBER,
    "steep": 1.0 / NUMBER**4,
    "flat": np.ones(WIDTH),
    "clusters": np.where(NUMBER <= 30, 10, np.where(NUMBER <= 100, 1, 0.1)),
    "a large mean": np.where(NUMBER == 1, 3e3, NUMBER**-1.2),
    "rank 30": np.where(NUMBER <= 30, 1 / NUMBER, 0),
    "rank 1": np.where(NUMBER == 1, 1e6, 0),
    "zero": np.zeros(WIDTH),
}


@pytest.fixture(scope="module", params=["float32", "six products"])
def iterated(request):
    """The iteration with products as on a CPU, or with the bfloat16 products of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "six products":
            patch.setattr(lowrank, "product", six_products)
        program = jax.jit(functools.partial(lowrank.iterated, count=COUNT))
        return program.lower(jax.ShapeDtypeStruct((1, WIDTH, WIDTH), jnp.float32)).compile()


def six_products(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute in bfloat16 parts what `basis.product` asks a GPU for. Smaller products are added first."""
    (a1, a2, a3), (b1, b2, b3) = (three_parts(x) for x in (a, b))
    pairs = [(a2, b2), (a1, b3), (a3, b1), (a1, b2), (a2, b1), (a1, b1)]
    return sum(jnp.einsum(equation, x, y, preferred_element_type=jnp.float32) for x, y in pairs)


def three_parts(x: jax.Array) -> list[jax.Array]:
    """Return three bfloat16 arrays with the sum x."""
    parts = []
    for _ in range(3):
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


@pytest.mark.parametrize("name", one_of(4, SPECTRA))
def test_subspace_iteration_loses_at_most_one_percent_more_than_the_optimum(name, iterated):
    """Or a millionth of all variance more, which is the rounding error of the Gram matrix. Columns are orthonormal."""
    spectrum = SPECTRA[name]
    turn = np.linalg.qr(wide(normal(WIDTH, WIDTH, seed=7)))[0]
    columns = wide(iterated(np.float32(turn * spectrum @ turn.T)[None]))[0]
    missed = turn - columns @ (columns.T @ turn)
    lost = (missed**2 * spectrum).sum()
    assert lost <= 1.01 * spectrum[COUNT:].sum() + 3e-6 * spectrum.sum()
    variances = ((columns.T @ turn) ** 2 * spectrum).sum(axis=1)
    assert (np.diff(variances) <= 1e-6 * spectrum[0]).all(), "columns do not fall by variance"
    if name != "zero":
        np.testing.assert_allclose(columns.T @ columns, np.eye(COUNT), atol=5e-6)


@pytest.mark.slow
def test_steep_variances_of_a_wide_matrix_have_a_basis():
    """At the width of an 8B model, some of these left a matrix without a Cholesky factor, and then NaN for all keys."""
    width, count = 1024, 432
    number = np.arange(1, width + 1)
    turn = np.linalg.qr(wide(normal(width, width, seed=7)))[0]
    spectra = [1.0 / number**3, 1.0 / number**4, np.where(number == 1, 3e3, number**-1.2), 1.0 / number]
    grams, iterated = (
        np.stack([np.float32(turn * one @ turn.T) for one in spectra]),
        functools.partial(lowrank.iterated, count=count),
    )
    bases, alone = wide(jax.jit(iterated)(grams)), wide(jax.jit(iterated)(grams[3:]))[0]
    for spectrum, columns in zip(spectra, bases, strict=True):
        missed = turn - columns @ (columns.T @ turn)
        assert (missed**2 * spectrum).sum() <= 1.01 * spectrum[count:].sum() + 1e-5 * spectrum.sum()
        np.testing.assert_allclose(columns.T @ columns, np.eye(count), atol=5e-6)
    np.testing.assert_allclose(alone, bases[3], atol=1e-5)


def test_the_platform_and_the_width_choose_the_algorithm():
    """On a GPU, a wide matrix goes through products; narrow ones, and nearly all columns, through eigenvectors."""

    def calls(width: int, count: int, platform: str) -> bool:
        gram = jax.ShapeDtypeStruct((1, width, width), jnp.float32)
        traced = jax.jit(lambda gram: lowrank.leading_columns(gram, count)).trace(gram)
        return "syevd" in traced.lower(lowering_platforms=(platform,)).as_text()

    assert not calls(WIDTH, COUNT, "cuda")
    assert calls(WIDTH, COUNT, "cpu")
    assert calls(WIDTH, WIDTH, "cuda")
    assert calls(64, 16, "cuda")


def keys_of(seed: int) -> PromptKeys:
    """Keys in bfloat16 with a mean, in rows of different lengths. Padding is NaN, which must not be read."""
    shapes = (2, 61, 2, 16), (1, 1, 2, 16), (2, 2, 16)
    keys, mean, sizes = (np.asarray(normal(*shape, seed=seed + i)) for i, shape in enumerate(shapes))
    lengths = array([61, 22])
    keys = np.where((np.arange(61) < np.array([[61], [22]]))[..., None, None], keys + 3 * mean, np.float32(np.nan))
    return PromptKeys(array(keys, jnp.bfloat16), lengths, 16, array(np.abs(sizes) + np.float32(0.5)))


def of_keys(function, keys):
    """A function of keys, as one program."""
    arrays = {name: x for name, x in vars(keys).items() if isinstance(x, jax.Array)}
    fixed = {name: x for name, x in vars(keys).items() if name not in arrays}
    return jax.jit(lambda arrays: function(PromptKeys(**arrays, **fixed)))(arrays)


@pytest.mark.parametrize("centered", one_of(2, [True, False]))
def test_bfloat16_keys_have_the_products_of_float32_keys(centered):
    """The mean and the weights are applied to the Gram matrix and to the basis instead of the keys."""
    narrow = keys_of(5)
    if centered:
        narrow = dataclasses.replace(narrow, mean=of_keys(PromptKeys.mean_key, narrow))
    full = dataclasses.replace(narrow, k_pre=array(narrow.k_pre, np.float32))
    assert narrow.narrow
    assert not full.narrow
    columns = normal(2, 32, 9, seed=4)

    def products(keys):
        """The Gram matrix, and the coefficients of each block."""
        blocks = [keys.coefficients(columns)(jnp.int32(index))[0] for index in range(narrow.blocks)]
        return keys.gram(), *blocks

    (want, *ones), (got, *others) = (map(wide, of_keys(products, keys)) for keys in (full, narrow))
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    for one, two in zip(ones, others, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-4 * np.abs(one).max() + 1e-6)


def test_a_large_mean_costs_little():
    """The mean is 50 standard deviations. The products of bfloat16 keys with it are much larger than the variances."""
    tokens, width, rank = 4096, 64, 24
    turn = np.linalg.qr(wide(normal(width, width, seed=3)))[0]
    numbers = wide(normal(tokens, width, seed=1)) * 0.9 ** np.arange(width) @ turn.T
    mean = 50 * numbers.std() * (1 + np.arange(width) % 3) / 2
    narrow = PromptKeys(array((numbers + mean).reshape(1, tokens, 2, 32), jnp.bfloat16), array([tokens]), 512)
    narrow = dataclasses.replace(narrow, mean=of_keys(PromptKeys.mean_key, narrow))
    centered = wide(narrow.k_pre).reshape(tokens, width) - wide(narrow.mean).reshape(width)
    least = np.linalg.svd(centered, compute_uv=False)[rank:]
    columns = wide(of_keys(lambda keys: lowrank.eigenvectors(keys.gram(), rank), narrow))[0]
    assert np.linalg.norm(centered - centered @ columns @ columns.T) ** 2 <= 1.01 * (least**2).sum()


codecs = pytest.mark.parametrize("codec", [LowRankCodec(9), TransformCodec((6, 6, 4))], ids=["lowrank", "transform"])


def dots(jaxpr, runs=1):
    """Yield the matrix products of a jaxpr, each with how often it runs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation, runs
        for inner in jaxprs_in_params(equation.params):
            yield from dots(inner, runs * equation.params.get("length", 1))


def operations(function, *args) -> int:
    """Count the operations of the matrix products of a function."""

    def one(dot) -> int:
        (summed, _), _ = dot.params["dimension_numbers"]
        return 2 * dot.outvars[0].aval.size * math.prod(dot.invars[0].aval.shape[axis] for axis in summed)

    return sum(runs * one(dot) for dot, runs in dots(jax.make_jaxpr(function)(*args).jaxpr))


def test_the_operations_of_the_basis():
    """A GPU runs each product as six."""
    counted = operations(functools.partial(lowrank.iterated, count=COUNT), np.zeros((1, WIDTH, WIDTH), np.float32))
    library = (lowrank.ITERATIONS + 2) * lowrank.inverse_operations(lowrank.columns_of(WIDTH, COUNT))[1]
    assert lowrank.basis_operations(WIDTH, COUNT) == 6 * counted + library
    assert lowrank.basis_operations(64, 9) == 9 * 64**3


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float32])
@codecs
def test_the_operations_of_a_code(codec, kind):
    """Only the product of the mean and the basis is not counted. 2,050 tokens take two whole blocks."""
    keys = jax.ShapeDtypeStruct((1, 2050, 2, 16), kind)
    counted = operations(lambda keys: codec.encode(keys, array([2050]), 500, 4), keys)
    want = codec.encode_flops(Sizes(2, 16, jnp.dtype(kind).name), 2050) - lowrank.basis_operations(32, codec.rank)
    assert want == pytest.approx(counted, rel=1e-3)


@codecs
def test_bfloat16_keys_are_multiplied_in_bfloat16(codec):
    """No large product of the compression has float32 operands. The compiled programs are checked by `make aot`."""
    keys = keys_of(8)
    jaxpr = jax.make_jaxpr(lambda k: codec.encode(k, keys.lengths, 15, 4, keys.weights))(keys.k_pre)

    found = [[(x.aval.dtype.name, x.aval.size) for x in dot.invars] for dot, _ in dots(jaxpr.jaxpr)]
    block = keys.k_pre.size  # one block holds the whole prompt
    large = [operands for operands in found if any(size == block for _, size in operands)]
    assert large, found
    assert all(kind == "bfloat16" for operands in large for kind, _ in operands), large
