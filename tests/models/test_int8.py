"""Weight-only int8: the error of a number and of a model, its bytes, and that all other features work with it."""

import dataclasses

import jax
import numpy as np
import pytest
from checkpoint_files import assert_same, tiny_directory
from family_cases import family_config
from few import one_of, slow
from flax import traverse_util

import jshadow
from jshadow.cli.main import main
from jshadow.engine.decode import decode_step, extend, prefill
from jshadow.errors import ConfigError
from jshadow.evaluation.laws import law
from jshadow.models.layers import Linear, quantize_int8, quantized
from jshadow.policies import Full
from jshadow.weights.convert import convert
from jshadow.weights.convert.huggingface import flat_abstract
from jshadow.weights.params import init_params, load, save


@pytest.mark.parametrize("shape", [(1, 1), (32, 48), (17, 5), (300, 3)])
@pytest.mark.parametrize(("order", "dtype"), [("C", "float32"), ("F", "float32"), ("F", "bfloat16")])
def test_the_error_of_a_number_is_half_a_step(shape, order, dtype, monkeypatch):
    """Blocks of a large kernel are one result."""
    rng = np.random.default_rng(shape[0])
    kernel = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, shape[1]), dtype, order=order)
    rounded, factors = quantize_int8(kernel)
    assert (rounded.dtype, factors.dtype, rounded.shape, factors.shape) == (np.int8, np.float32, shape, shape[1:])
    wide = kernel.astype(np.float64)
    assert (np.abs(rounded * factors.astype(np.float64) - wide) <= factors * (0.5 + 1e-4)).all()
    np.testing.assert_allclose(np.abs(rounded).max(axis=0), 127)
    np.testing.assert_allclose(factors, np.abs(wide).max(axis=0) / 127, rtol=1e-6)
    monkeypatch.setattr("jshadow.models.layers.BLOCK", 200)
    jax.tree.map(np.testing.assert_array_equal, quantize_int8(kernel), (rounded, factors))


def test_a_column_of_zeros_stays_zero():
    rounded, factors = quantize_int8(np.float32([[0, 1, 0], [0, -2, 0], [0, 3, 0], [0, 4, 0]]))
    assert not rounded[:, [0, 2]].any()
    assert np.isfinite(factors).all()


def dequantized(params):
    """The same model with dequantized kernels, which defines the results of int8."""
    flat = traverse_util.flatten_dict(params.weights, sep="/")
    plain = {path: leaf for path, leaf in flat.items() if not path.endswith("_scale")}
    scales = {path: np.asarray(flat[f"{path}_scale"]) for path in plain if f"{path}_scale" in flat}
    plain |= {path: np.asarray(plain[path]) * scale[..., None, :] for path, scale in scales.items()}
    return dataclasses.replace(params, weights=traverse_util.unflatten_dict(plain, sep="/"))


@pytest.mark.parametrize("name", [*one_of(6, ["llama", "qwen2", "phi3", "glm4", "gemma3", "smollm3"]), slow("gpt_oss")])
def test_a_model_in_int8(tmp_path, name):
    """The projections are int8, from both formats. Logits of prompt, steps and turns are close to the plain ones."""
    plain = init_params(family_config(name), seed=1)
    save(plain, tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "orbax", "float32", format="orbax")
    params = load(tmp_path / "m", "float32", quantize="int8")
    assert_same(load(tmp_path / "orbax", "float32", quantize="int8"), params)
    assert params.digest != plain.digest
    kinds = {path: leaf.dtype for path, leaf in traverse_util.flatten_dict(params.weights, sep="/").items()}
    int8 = [path for path, dtype in kinds.items() if dtype == np.int8]
    assert len(int8) == 7 * plain.config.num_layers
    assert all(path.endswith("kernel") and ("attention" in path or "mlp" in path) for path in int8)
    assert all(dtype == np.float32 for path, dtype in kinds.items() if path not in int8)
    tokens, lengths = np.arange(40)[None] % 90 + 3, np.array([40])
    outs = []
    for held in (plain, params, dequantized(params)):
        logits, state = prefill(held, tokens, lengths, Full(), capacity=64)
        step, state = decode_step(held, np.array([5]), state)
        turn, _ = extend(held, tokens[:, :5], np.array([5]), state)
        outs.append(np.concatenate([logits, step, turn]))
    np.testing.assert_allclose(outs[1], outs[2], atol=2e-4)
    assert 0 < np.sqrt(((outs[1] - outs[0]) ** 2).mean()) < 0.1 * outs[0].std()


def test_states_know_their_weights(tmp_path):
    """A saved state of the plain model does not load into the int8 model."""
    plain = law.model()
    save(plain, tmp_path / "m")
    params = load(tmp_path / "m", "float32", quantize="int8")
    jshadow.save_state(tmp_path / "s", law.prefilled(Full())[1], plain)
    assert jshadow.load_state(tmp_path / "s", plain).capacity == law.CAPACITY
    with pytest.raises(jshadow.errors.StateMismatch, match="weights"):
        jshadow.load_state(tmp_path / "s", params)


def test_outputs_beyond_float16_before_their_factor():
    """Sums of int8 products overflow float16 long before the outputs do."""
    kernel, factors = quantize_int8(np.full((1024, 4), 0.01, np.float32))
    weights = {"params": {"kernel": kernel, "kernel_scale": factors}}
    given = {dtype: np.ones((1, 1024), dtype) for dtype in ("float16", "bfloat16", "float32")}
    apply = jax.jit(lambda given: {key: Linear(4).apply(weights, x) for key, x in given.items()})
    for dtype, out in apply(given).items():
        assert out.dtype == dtype
        np.testing.assert_allclose(np.asarray(out, np.float32), 10.24, rtol=1e-2)


def test_what_is_refused(tmp_path, capsys):
    directory, _ = tiny_directory(tmp_path / "m")
    with pytest.raises(ConfigError, match="must hold plain weights, got int8"):
        save(load(directory, quantize="int8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for word in ("int4", 8, True, ""):
        with pytest.raises(ConfigError, match="quantize must be one of"):
            load(directory, quantize=word)
    assert main(["generate", str(tmp_path), "--prompt", "x", "--quantize", "int3"]) == 2
    assert "quantize must be one of" in capsys.readouterr().err


def test_which_weights_are_projections():
    config = dataclasses.replace(family_config("llama"), attention_bias=True)
    paths = [path for path in flat_abstract(config) if quantized(path)]
    assert len(paths) == 7 * config.num_layers
    assert not any("bias" in path or "norm" in path or "embed" in path or "head" in path for path in paths)
