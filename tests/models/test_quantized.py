"""Quantized weights (int8, fp8, int4): codes, factors, the error of a model, and that other features work with them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import assert_same, tiny_directory
from family_cases import family_config
from few import quick
from flax import traverse_util
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from quantized_cases import meant

import jshadow
from jshadow.cli.main import main
from jshadow.cli.plan import config_of
from jshadow.engine.decode import decode_step, extend, prefill
from jshadow.errors import ConfigError
from jshadow.evaluation.laws import law
from jshadow.models import quantization
from jshadow.models.layers import Linear
from jshadow.models.partition import sharding_of
from jshadow.models.quantization import kind_of_kernel, quantize_kernel, quantized
from jshadow.ops import projections
from jshadow.ops.attention import output_products
from jshadow.ops.projections import KINDS, Weights, dequantized, group_of, record_of, weights_of
from jshadow.planner.mesh import device_weights
from jshadow.policies import Full
from jshadow.weights.convert import convert
from jshadow.weights.convert.huggingface import flat_abstract
from jshadow.weights.params import check_records, init_params, load, save


@pytest.fixture(autouse=True)
def small_kernels_in_int4(monkeypatch):
    """The models of tests are small."""
    monkeypatch.setattr(quantization, "_SMALL", 0)


def random_kernel(shape, order="C", dtype="float32"):
    rng = np.random.default_rng(shape[0])
    return np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, shape[1]), dtype, order=order)


KERNELS = [((1, 1), "C", "float32"), ((32, 48), "F", "float32"), ((17, 5), "C", "float32"), ((300, 3), "F", "bfloat16")]


@pytest.mark.parametrize(("shape", "order", "dtype"), KERNELS)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_error_of_a_number_is_half_a_step(kind, shape, order, dtype, monkeypatch):
    """Blocks of a large kernel are one result."""
    kernel = random_kernel(shape, order, dtype)
    made = quantize_kernel(kind, kernel)
    codes, factors = made["kernel"], made["kernel_scale"]
    assert {key: (one.shape, one.dtype) for key, one in made.items()} == record_of(kind, shape)
    wide, most = kernel.astype(np.float64), {"int8": 127, "fp8": 448}[kind]
    np.testing.assert_allclose(factors, np.abs(wide).max(axis=0) / most, rtol=1e-6)
    np.testing.assert_allclose(np.abs(codes.astype(np.float64)).max(axis=0), most)
    # Four bits of a number of fp8 are significant, and its smallest step is 2**-9.
    step = factors if kind == "int8" else np.maximum(np.abs(wide) / 8, 2.0**-9 * factors)
    assert (np.abs(meant(made) - wide) <= step * (0.5 + 1e-4)).all()
    monkeypatch.setattr(quantization, "BLOCK", 200)
    jax.tree.map(np.testing.assert_array_equal, quantize_kernel(kind, kernel), made)


@pytest.mark.parametrize(("shape", "group"), [((96, 48), 32), ((300, 3), 4), ((112, 7), 16)])
def test_int4_takes_the_best_of_some_shares_of_a_range(shape, group, monkeypatch):
    """Beside a search in NumPy, group by group. The factors are rounded to bfloat16."""
    kernel = random_kernel(shape)
    made = quantize_kernel("int4", kernel)
    assert group_of(shape[0]) == group
    assert {key: (one.shape, one.dtype) for key, one in made.items()} == record_of("int4", shape)
    got = meant(made)
    for start in range(0, shape[0], group):
        for column in range(shape[1]):
            w = kernel[start : start + group, column].astype(np.float64)
            errors = []
            for share in (1, 0.92, 0.84, 0.76, 0.68, 0.6):
                step = np.ptp(w) * share / 15
                code = np.clip(np.rint((w - (w.min() + w.max()) / 2) / step + 7.5), 0, 15)
                errors.append(((np.polyval(np.polyfit(code, w, 1), code) - w) ** 2).sum())
            error = ((got[start : start + group, column] - w) ** 2).sum()
            rounded = 3 * 2.0**-9 * np.abs(w).max()  # of a number by that of its factor and zero
            assert np.sqrt(error) <= np.sqrt(min(errors)) + np.sqrt(group) * rounded
    monkeypatch.setattr(quantization, "BLOCK", 200)
    np.testing.assert_allclose(meant(quantize_kernel("int4", kernel)), got, rtol=1e-5)


def test_each_number_of_int4_has_the_nearest_code():
    record = quantize_kernel("int4", random_kernel((64, 5)))
    values = meant(record).reshape(2, 32, 5)
    wide = random_kernel((64, 5)).astype(np.float64).reshape(2, 32, 5)
    scale, zero = (record[key].astype(np.float64)[:, None, None] for key in ("kernel_scale", "kernel_zero"))
    every = np.arange(16)[:, None] * scale + zero
    nearest = np.abs(every - wide[:, :, None]).min(axis=2)
    np.testing.assert_allclose(np.abs(values - wide), nearest, rtol=1e-3, atol=1e-12)


def test_numbers_that_codes_hold_exactly_come_back():
    """Such as those of a file in four bits with the same groups."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (128, 6))
    codes[::32], codes[1::32] = 0, 15
    kernel = np.float32(codes * np.array([0.5, 2**-5, 2, 2**-20, 3, 40]) + [0, 3, -7, 2**-18, 12, -15])
    np.testing.assert_allclose(meant(quantize_kernel("int4", kernel)), kernel, rtol=1e-6)
    exact = np.float32([[448, -2], [0.875, 2.0**-9], [-26, 0], [2.0**-9, 1.75]])
    exact[0, 1] = -448
    record = quantize_kernel("fp8", exact)
    np.testing.assert_array_equal(record["kernel_scale"], 1)
    np.testing.assert_array_equal(record["kernel"].astype(np.float32), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_zeros_stays_zero(kind):
    kernel = np.float32([[0, 1, 0], [0, -2, 0], [0, 3, 0], [0, 4, 0]])
    made = quantize_kernel(kind, kernel)
    assert not meant(made)[:, [0, 2]].any()
    assert np.isfinite(made["kernel_scale"]).all()
    stack = quantize_kernel(kind, np.stack([kernel, 2 * kernel]))
    jax.tree.map(lambda one, both: np.testing.assert_array_equal(one, both[0]), made, stack)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes(kind):
    """A code of int4 has half a byte."""
    kernel = np.ones((4096, 64), np.float32)
    size = sum(one.nbytes for one in quantize_kernel(kind, kernel).values())
    assert size == {"int8": 4096 * 64 + 256, "fp8": 4096 * 64 + 256, "int4": 2048 * 64 + 4 * 128 * 64}[kind]


@pytest.mark.parametrize("kind", quick(["int4"], KINDS))
def test_a_product_is_that_of_the_numbers_meant(kind, monkeypatch):
    """Blocks of columns are one product. The numbers of a stack are those of its kernels."""
    rng = np.random.default_rng(1)
    record = quantize_kernel(kind, rng.standard_normal((96, 50), np.float32))
    weights, x = Weights.of(record), rng.standard_normal((2, 3, 96), np.float32)
    stack = weights.each(lambda part: np.stack([part, part]))
    monkeypatch.setattr(projections, "_BLOCK", 96 * 16)

    @jax.jit
    def made(x, record, stack):
        product = Linear(50).apply({"params": record}, x)
        return product, dequantized(Weights.of(record), jnp.float32), dequantized(stack, jnp.float32)

    got, one, two = made(x, record, stack)
    np.testing.assert_allclose(one, meant(record), rtol=1e-6)
    np.testing.assert_allclose(two[1], meant(record), rtol=1e-6)
    np.testing.assert_allclose(got, x @ meant(record), atol=1e-4)


def test_norms_of_projected_values_are_those_of_the_numbers_meant():
    """KVzip reads the output projection by itself."""
    record = quantize_kernel("int4", np.random.default_rng(3).standard_normal((32, 12), np.float32))
    got = jax.jit(output_products, static_argnums=(1, 2))(record, 2, 8)
    w = meant(record).reshape(2, 2, 8, 12)
    np.testing.assert_allclose(got, np.einsum("hgdm,hgem->hgde", w, w), atol=1e-4)


@pytest.mark.parametrize("kind", quick(["int4"], ["fp8", "int4"]))
def test_few_rows_have_the_same_product_by_the_kernel(kind):
    """By the interpreter."""
    rng = np.random.default_rng(2)
    record = quantize_kernel(kind, rng.standard_normal((64, 20), np.float32))
    weights, x = Weights.of(record), rng.standard_normal((3, 1, 64), np.float32)
    sums = jax.jit(lambda x, weights: projections._few_sums(x, weights, interpret=True))(x, weights)
    scale = record["kernel_scale"] if kind == "fp8" else 1
    np.testing.assert_allclose(sums * scale, x @ meant(record), atol=1e-4)


@pytest.mark.parametrize("kind", quick(["int8"], KINDS))
def test_outputs_beyond_float16_before_their_factor(kind):
    """Sums of codes overflow float16 long before the outputs do."""
    record = quantize_kernel(kind, np.full((1024, 4), 0.01, np.float32))
    given = {dtype: np.ones((1, 1024), dtype) for dtype in ("float16", "bfloat16", "float32")}
    apply = jax.jit(lambda given: {key: Linear(4).apply({"params": record}, x) for key, x in given.items()})
    for dtype, out in apply(given).items():
        assert out.dtype == dtype
        np.testing.assert_allclose(np.asarray(out, np.float32), 10.24, rtol=1e-2)


def plain_of(params):
    """The same model with the numbers that the codes mean, which define the results."""
    flat = traverse_util.flatten_dict(params.weights, sep="/")
    plain = {path: leaf for path, leaf in flat.items() if not path.endswith(("kernel_scale", "kernel_zero"))}
    for path in [path for path in flat if quantized(path)]:
        own = path.removesuffix("kernel")
        record = {name: flat[own + name] for name in projections.NAMES if own + name in flat}
        plain[path] = jax.device_put(meant(record).astype(np.float32))
    return dataclasses.replace(params, weights=traverse_util.unflatten_dict(plain, sep="/"))


QUICK = [("int8", "llama"), ("int4", "llama")]
SLOW = [("int8", "phi3"), ("fp8", "qwen3_moe"), ("int4", "qwen3_moe"), ("int8", "qwen3_5"), ("int4", "nemotron_h")]
# Each kind and each sort of model also takes a step and a turn.
IN_TURNS = [*QUICK, ("fp8", "qwen3_moe"), ("int4", "qwen3_moe"), ("int8", "qwen3_5")]
# Projections of a hybrid model. Nemotron has 5 in each of 4 recurrent layers, 4 in 2 that attend, and 2 in 3 MLPs.
PROJECTIONS = {"qwen3_5": 3 * 8, "nemotron_h": 4 * 5 + 2 * 4 + 3 * 2}


@pytest.mark.parametrize(("kind", "name"), quick(QUICK, QUICK + SLOW))
def test_a_quantized_model(tmp_path, kind, name):
    """The projections are codes, from both formats. Logits of prompt, steps and turns are close to the plain ones."""
    plain = init_params(family_config(name), seed=1)
    save(plain, tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "orbax", "float32", format="orbax")
    params = load(tmp_path / "m", "float32", quantize=kind)
    assert_same(load(tmp_path / "orbax", "float32", quantize=kind), params)
    assert params.digest != plain.digest
    kinds = {path: leaf.dtype for path, leaf in traverse_util.flatten_dict(params.weights, sep="/").items()}
    codes = [path for path, dtype in kinds.items() if dtype in KINDS.values() and not path.endswith("_zero")]
    is_hybrid = plain.config.recurrent is not None
    assert len(codes) == PROJECTIONS.get(name, 7 * plain.config.num_layers)
    assert all(path.endswith("kernel") and path.split("/")[1] in ("attention", "recurrent", "mlp") for path in codes)
    for path in codes:  # keys and values of attention stay in int8
        keeps = kind == "int4" and path.endswith(("attention/k/kernel", "attention/v/kernel"))
        assert kinds[path] == KINDS["int8" if keeps else kind], path
    rest = [path for path in kinds if path not in codes and not path.endswith(("kernel_scale", "kernel_zero"))]
    assert {kinds[path] for path in rest} == {np.dtype("float32")}
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights))
    assert held == device_weights(params.config, None, 4, kind).bytes
    tokens, lengths = np.arange(40)[None] % 90 + 3, np.array([40])
    outs = []
    for held in (plain, params, plain_of(params)):
        logits, state = prefill(held, tokens, lengths, Full(), capacity=64)
        outs.append([logits])
        if (kind, name) in IN_TURNS:
            step, state = decode_step(held, np.array([5]), state)
            outs[-1] += [step, extend(held, tokens[:, :5], np.array([5]), state)[0]]
    outs = [np.concatenate(one) for one in outs]
    np.testing.assert_allclose(outs[1], outs[2], atol=2e-4)
    near = {"int8": 0.1, "fp8": 0.25, "int4": 0.6}[kind] * (1.5 if is_hybrid else 1)
    assert 0 < np.sqrt(((outs[1] - outs[0]) ** 2).mean()) < near * outs[0].std()


def test_a_plan_counts_the_bytes_of_codes(capsys):
    """A step of one row reads 8 of 128 experts. Llama-3.1-8B has 32 layers of 218,103,808 projected numbers."""
    projected = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    whole = device_weights(config_of("llama-3.1-8b"), None)
    for kind, bits in (("int8", 8), ("fp8", 8), ("int4", 5)):
        weights = device_weights(config_of("llama-3.1-8b"), None, 2, kind)
        factors = 4 * 32 * (2 * 1024 if kind == "int4" else 3 * 4096 + 2 * 1024 + 2 * 14336)
        kept = 32 * 2 * 4096 * 1024 * 3 // 8 if kind == "int4" else 0  # keys and values in int8
        assert weights.bytes - factors - kept == whole.bytes - projected * (16 - bits) // 8
    asked = ["plan", "qwen3-30b-a3b", "--context", "4096", "--gpu", "h100"]
    asked += ["--policy", "full", "--batch", "1", "--json"]
    told = []
    for more in ([], ["--quantize", "int4"]):
        assert main([*asked, *more]) == 0
        told.append(json.loads(capsys.readouterr().out)["plans"][0]["chosen"]["step"]["hbm_bytes"]["weights"])
    stacks = 48 * 8 * 3 * 2048 * 768
    attention = 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    small = 48 * 2048 * 128 * 2 * 4  # keys and values stay in int8, with a factor for each output
    assert told[0] - told[1] == (stacks + attention - small) * 11 // 8 + small - 4 * 48 * 2 * 4 * 128
    assert main(["plan", "llama-3.1-8b", "--lengths", "64", "--quantize", "int4"]) == 2
    assert "--quantize must come with --context" in capsys.readouterr().err
    assert main(["plan", "llama-3.1-8b", "--context", "64", "--quantize", "int2"]) == 2
    assert "quantize must be one of" in capsys.readouterr().err


def test_states_know_their_weights(tmp_path):
    """A saved state of the plain model does not load into the int8 model."""
    plain = law.model()
    save(plain, tmp_path / "m")
    params = load(tmp_path / "m", "float32", quantize="int8")
    jshadow.save_state(tmp_path / "s", law.prefilled(Full())[1], plain)
    assert jshadow.load_state(tmp_path / "s", plain).capacity == law.CAPACITY
    with pytest.raises(jshadow.errors.StateMismatch, match="weights"):
        jshadow.load_state(tmp_path / "s", params)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused(tmp_path, capsys, kind):
    directory, _ = tiny_directory(tmp_path / "m")
    with pytest.raises(ConfigError, match=f"must hold plain weights, got {kind}"):
        save(load(directory, quantize=kind), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for word in ("int3", 8, True, ""):
        with pytest.raises(ConfigError, match="quantize must be one of"):
            load(directory, quantize=word)
    assert main(["generate", str(tmp_path), "--prompt", "x", "--quantize", "int3"]) == 2
    assert "quantize must be one of" in capsys.readouterr().err


def test_an_odd_number_of_inputs_is_refused():
    with pytest.raises(ConfigError, match="packs two inputs into a byte, so their number must be even, got 17"):
        quantize_kernel("int4", np.ones((17, 4), np.float32))


def changed(kind, name, new):
    record = quantize_kernel(kind, np.ones((64, 4), np.float32))
    return {key: new(one) if key == name else one for key, one in record.items() if key != name or new is not None}


WRONG = [
    ("int8", "kernel_scale", None, "kernel_scale of int8 weights must be float32 [4], got none"),
    ("fp8", "kernel_scale", lambda x: x[:3], "kernel_scale of fp8 weights must be float32 [4], got float32 [3]"),
    (
        "fp8",
        "kernel",
        lambda x: x[1:],
        "kernel of fp8 weights must be float8_e4m3fn [64, 4], got float8_e4m3fn [63, 4]",
    ),
    ("int4", "kernel_zero", None, "kernel_zero of int4 weights must be bfloat16 [2, 4], got none"),
    ("int4", "kernel_scale", None, "kernel_scale of int4 weights must be bfloat16 [2, 4], got none"),
    (
        "int4",
        "kernel_scale",
        lambda x: x[0],
        "kernel_scale of int4 weights must be bfloat16 [2, 4], got bfloat16 [4]",
    ),
    ("int4", "kernel_zero", np.float32, "kernel_zero of int4 weights must be bfloat16 [2, 4], got float32 [2, 4]"),
    ("int4", "kernel", lambda x: x[1:], "kernel of int4 weights must be uint8 [32, 4], got uint8 [31, 4]"),
    ("int8", "kernel", np.float32, "kernel_scale of plain weights must be absent, got float32 [4]"),
    ("int4", "kernel", np.int8, "kernel of int8 weights must be int8 [64, 4], got int8 [32, 4]"),
    ("int8", "kernel", np.int32, "kernel of plain weights must be floating [64, 4], got int32 [64, 4]"),
]


@pytest.mark.parametrize(("kind", "name", "new", "told"), WRONG)
def test_params_with_a_wrong_record_are_refused(kind, name, new, told):
    with pytest.raises(ConfigError) as caught:
        weights_of(changed(kind, name, new), (64, 4), "q")
    assert str(caught.value) == f"params: q/{told}"
    with pytest.raises(ConfigError):
        Linear(4).apply({"params": changed(kind, name, new)}, np.ones((1, 64), np.float32))


def test_groups_of_another_size_are_taken():
    """Such as those of a quantized checkpoint."""
    named = {"kernel": np.full((32, 4), 0x21, np.uint8), "kernel_scale": np.ones((1, 4), jnp.bfloat16)}
    weights = weights_of(named | {"kernel_zero": np.full((1, 4), -3, jnp.bfloat16)}, (64, 4), "q")
    got = jax.jit(dequantized, static_argnums=1)(weights, np.dtype(np.float32))
    np.testing.assert_array_equal(got, np.repeat([[-2.0], [-1.0]], 32, axis=0) + np.zeros((1, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_factors_are_split_as_the_kernel_is(kind):
    """Columns with their factors, and inputs with those of their groups."""
    mesh = AbstractMesh((1, 2), ("data", "tp"))
    for path, shape in flat_abstract(family_config("qwen3_moe")).items():
        if quantized(path):
            inner = any(part in path for part in ("/o/", "/down/"))
            for name, (size, _) in record_of(kind, (*shape[:-2], 64, 6)).items():
                spec = sharding_of(mesh, path.removesuffix("kernel") + name, size).spec
                by_groups = kind == "int4" or name == "kernel"
                axis = len(size) - (2 if inner else 1)
                assert spec == (P(*[None] * axis, "tp") if by_groups or not inner else P()), (path, name)


def test_groups_that_a_mesh_does_not_divide_are_refused():
    config = dataclasses.replace(family_config("llama"), head_dim=24)
    told = "mesh axis tp must divide the 3 groups of layer_0/attention/o/kernel_scale, got tp=2"
    with pytest.raises(ConfigError, match=told):
        check_records("int4", config, AbstractMesh((1, 2), ("data", "tp")))
    check_records("fp8", config, AbstractMesh((1, 2), ("data", "tp")))


def test_small_kernels_stay_in_int8(monkeypatch):
    """A stack of experts counts as one kernel. int8 and fp8 hold for kernels of all sizes."""
    monkeypatch.undo()
    mlp, value = "layer_0/mlp/up/kernel", "layer_0/attention/v/kernel"
    small, large, stack = (1024, 2047), (1024, 2048), (32, 256, 256)
    got = [kind_of_kernel(mlp, shape, "int4") for shape in (small, large, stack)]
    assert got == ["int8", "int4", "int4"]
    assert kind_of_kernel(value, (4096, 4096), "int4") == "int8"
    assert kind_of_kernel("embed/embedding", (4096, 4096), "int4") is None
    assert [kind_of_kernel(mlp, small, kind) for kind in ("fp8", "int8", None)] == ["fp8", "int8", None]


def test_which_weights_are_projections():
    config = dataclasses.replace(family_config("llama"), attention_bias=True)
    paths = [path for path in flat_abstract(config) if quantized(path)]
    assert len(paths) == 7 * config.num_layers
    assert not any("bias" in path or "norm" in path or "embed" in path or "head" in path for path in paths)
