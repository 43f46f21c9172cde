"""The MLP with experts beside NumPy, what a step reads of them, and how their weights are stored."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import family_config
from few import one_of, quick
from quantized_cases import meant
from seeded import write_checkpoint

import jshadow
from jshadow.engine.prefill import layer as prefill_layer
from jshadow.errors import CheckpointError, ConfigError
from jshadow.models.config import Experts
from jshadow.models.experts import ExpertMLP, _grouped, _looped, _Product, _Stacks, expert_tiles
from jshadow.models.quantization import quantize_kernel, quantized
from jshadow.ops.projections import Weights
from jshadow.planner.bytes import Workload
from jshadow.planner.gpu import capacity_plan
from jshadow.planner.gpu_specs import GPUS
from jshadow.policies import Full
from jshadow.weights.params import init_params, load, save

SIZES = dict(count=6, chosen=3, width=20, layers=(0, 1, 2))
CASES = {
    "softmax": Experts(**SIZES, normalized=False),
    "sigmoid in groups": Experts(
        **SIZES, router="sigmoid", corrected=True, groups=3, chosen_groups=2, scale=1.5, shared_width=28
    ),
    "softmax of the chosen": Experts(**SIZES, router="softmax_of_chosen"),
    "biases": Experts(**SIZES, router="softmax_of_chosen", biases=True),
    "no gate": Experts(**SIZES, router="sigmoid", corrected=True, shared_width=28, latent_width=32),
}
ALPHA, LIMIT = 1.3, 0.8  # of the clamped SwiGLU, which the case with biases has


QUICK = [(name, rows) for name in list(CASES)[:3] for rows in (1, 150)] + [("biases", 150), ("no gate", 150)]


def config_of(experts):
    clamped = dict(activation="swiglu_clamped", swiglu_alpha=ALPHA, swiglu_limit=LIMIT) if experts.biases else {}
    if experts.latent_width:
        return dataclasses.replace(family_config("nemotron_h_latent"), mlp_bias=False, experts=experts)
    return dataclasses.replace(family_config("qwen3_moe"), experts=experts, **clamped)


def shares_of(experts, weights, x):
    """The share of each expert for rows x, float64 [N, E], 0 where it is not chosen."""
    z = x @ weights["router"]["kernel"] + weights["router"].get("bias", 0)
    if experts.router == "softmax_of_chosen":
        shares = wanted = np.exp(z - z.max(1, keepdims=True))
    elif experts.router == "sigmoid":
        shares = 1 / (1 + np.exp(-z))
        wanted = shares + weights["router"]["correction"]
    else:
        shares = wanted = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    out = np.zeros_like(z)
    for row in range(len(x)):
        size = experts.count // experts.groups
        groups = [range(first, first + size) for first in range(0, experts.count, size)]
        best = sorted(groups, key=lambda group: -sum(sorted(wanted[row, group])[-2:]))[: experts.chosen_groups]
        allowed = [expert for group in best for expert in group]
        chosen = sorted(allowed, key=lambda expert: -wanted[row, expert])[: experts.chosen]
        out[row, chosen] = shares[row, chosen]
    normalized = experts.normalized or experts.router == "softmax_of_chosen"
    return experts.scale * (out / out.sum(1, keepdims=True) if normalized else out)


def mlp(weights, x):
    if "gate" not in weights:
        return np.maximum(x @ weights["up"]["kernel"], 0) ** 2 @ weights["down"]["kernel"]
    if "bias" in weights["gate"]:
        gate, up = (x @ weights[name]["kernel"] + weights[name]["bias"] for name in ("gate", "up"))
        gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
        inner = (up + 1) * gate / (1 + np.exp(-ALPHA * gate))
        return inner @ weights["down"]["kernel"] + weights["down"]["bias"]
    gate = x @ weights["gate"]["kernel"]
    return (gate / (1 + np.exp(-gate)) * (x @ weights["up"]["kernel"])) @ weights["down"]["kernel"]


def expected(experts, weights, x):
    shares = shares_of(experts, weights, x)
    shared = mlp(weights["shared"], x) if experts.shared_width else 0
    taken = x @ weights["latent_in"]["kernel"] if experts.latent_width else x
    out = np.zeros_like(taken)
    for expert in range(experts.count):
        own = {name: {key: leaf[expert] for key, leaf in part.items()} for name, part in weights["experts"].items()}
        out += shares[:, expert, None] * mlp(own, taken)
    return shared + (out @ weights["latent_out"]["kernel"] if experts.latent_width else out)


@functools.partial(jax.jit, static_argnums=0)
def applied(config, weights, x):
    return ExpertMLP(config).apply({"params": weights}, x)


def run(config, weights, x):
    """The output for rows x [N, D]."""
    return np.asarray(applied(config, weights, np.asarray(x[None], np.float32)))[0]


def layer_of(experts, seed=0):
    return init_params(config_of(experts), seed).weights["layer_1"]["mlp"]


@pytest.mark.parametrize(("name", "rows"), quick(QUICK, [(name, rows) for name in CASES for rows in (1, 150)]))
def test_the_chosen_experts_are_added_as_in_numpy(name, rows):
    """With 150 rows an expert has several tiles, and the last one of each has rows of no token."""
    experts = CASES[name]
    weights, x = layer_of(experts), np.random.default_rng(rows).standard_normal((rows, 48))
    got = run(config_of(experts), weights, x)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    np.testing.assert_allclose(got, expected(experts, wide, x), atol=2e-5)


def test_all_rows_may_choose_the_same_experts():
    """Then one expert has all tiles, and others have none."""
    experts = CASES["softmax"]
    weights = layer_of(experts)
    x = np.tile(np.random.default_rng(3).standard_normal((1, 48)), (150, 1))
    got = run(config_of(experts), weights, x)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    np.testing.assert_allclose(got, expected(experts, wide, x), atol=2e-5)


def test_padding_runs_through_no_expert():
    """NaN in the rows of padding would come out of any expert. The router may see it."""
    experts, real = CASES["softmax"], (3, 0, 5)
    weights, x = layer_of(experts), np.random.default_rng(8).standard_normal((3, 5, 48)).astype(np.float32)
    valid = np.arange(5) < np.array(real)[:, None]
    ids = np.where(valid.reshape(-1, 1), np.arange(45).reshape(15, 3) % 6, 6).astype(np.int32)

    @jax.jit
    def made(x, valid, ids):
        out = ExpertMLP(config_of(experts)).apply({"params": weights}, x, valid=valid)
        return out, expert_tiles(ids.reshape(-1), 6, 1).number

    got, tiles = made(np.where(valid[..., None], x, np.nan), valid, ids)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    np.testing.assert_allclose(np.asarray(got)[valid], expected(experts, wide, x[valid]), atol=2e-5)
    np.testing.assert_array_equal(np.asarray(got)[~valid], 0)
    assert tiles == 3 * sum(real)


def test_a_prefill_says_which_tokens_are_real(monkeypatch):
    told = []
    monkeypatch.setattr(prefill_layer, "apply_block", lambda *given: told.append(given[5]) or given[3:5])
    for experts in (CASES["softmax"], None):
        plan = SimpleNamespace(config=SimpleNamespace(experts=experts), size=4)
        run = prefill_layer._LayerRun(plan, {}, np.array([7, 3]), np.ones(4))
        run.block(np.int32(4), np.zeros((2, 8, 48), np.float32), None)
    np.testing.assert_array_equal(told[0], [[True, True, True, False], [False] * 4])
    assert told[1] is None


def users_of(jaxpr, shape):
    """The names of the operations that take an array of a shape, also inside loops and of all platforms."""
    names = set()
    for equation in jaxpr.eqns:
        values = [one for value in equation.params.values() for one in (value if type(value) is tuple else (value,))]
        inner = [value for value in values if hasattr(value, "jaxpr")]
        if inner:
            names |= set().union(*(users_of(one.jaxpr, shape) for one in inner))
        elif any(getattr(operand.aval, "shape", None) == shape for operand in equation.invars):
            names.add(equation.primitive.name)
    return names


def test_a_step_reads_the_chosen_experts_alone():
    """On a CPU by a slice. Which elements the kernel of a GPU loads is a test of tests/kernels."""
    experts = CASES["softmax"]
    layer = ExpertMLP(config_of(experts))
    traced = jax.make_jaxpr(lambda weights, x: layer.apply({"params": weights}, x))(
        layer_of(experts), jnp.ones((1, 1, 48))
    )
    for shape in ((6, 48, 20), (6, 20, 48)):
        assert users_of(traced.jaxpr, shape) == {"dynamic_slice", "masked_load"}


GROUPED = [("biases", 1, "int4"), ("biases", 40, None), ("no gate", 1, None), ("no gate", 40, "int8")]
GROUPED += [("biases", 40, "fp8"), ("no gate", 40, "int4")]


@pytest.mark.parametrize(("name", "rows", "kind"), quick(GROUPED[:3], GROUPED))
def test_grouped_products_are_those_of_the_loop(name, rows, kind):
    """As on a GPU, by the interpreter. One row needs no sorting. The last row is padding."""
    config = config_of(CASES[name])
    weights, rng = layer_of(CASES[name])["experts"], np.random.default_rng(rows)
    records = {name: {"kernel": np.asarray(part["kernel"])} for name, part in weights.items()}
    if kind is not None:
        records = {name: quantize_kernel(kind, part["kernel"]) for name, part in records.items()}
    products = {
        name: _Product(Weights.of(records[name]), jnp.asarray(part["bias"]) if "bias" in part else None)
        for name, part in weights.items()
    }
    stacks = _Stacks(products.get("gate"), products["up"], products["down"])
    ids = np.argsort(rng.random((rows, 6)))[:, :3].astype(np.int32)
    ids[1:][-1:] = 6
    width = weights["up"]["kernel"].shape[1]
    given = (stacks, rng.standard_normal((rows, width), np.float32), ids, rng.random((rows, 3), np.float32))
    looped = jax.jit(functools.partial(_looped, config))(*given)
    grouped = jax.jit(functools.partial(_grouped, config, implementation="interpret"))(*given)
    np.testing.assert_allclose(grouped, looped, atol=2e-5)


def test_a_plan_counts_what_a_step_reads():
    """One row of 3 of 6 experts reads half of their weights, and does half of their operations."""
    config = config_of(CASES["softmax"])
    gpu, sizes = GPUS["h100"], {"dtype": "float32", "fetch": "resident"}
    one, two = (capacity_plan(config, Full(), gpu, Workload(64, 8, rows, **sizes)).chosen.step for rows in (1, 2))
    stacks = 3 * 3 * 6 * 48 * 20
    rest = sum(leaf.size for leaf in jax.tree.leaves(init_params(config).weights)) - stacks - config.vocab_size * 48
    assert one.hbm_bytes["weights"] == 4 * (rest + stacks // 2)
    assert two.hbm_bytes["weights"] == 4 * (rest + stacks * 3 // 4)
    held = capacity_plan(config, Full(), gpu, Workload(64, 8, 1, **sizes)).weights_bytes
    assert held == 4 * (rest + stacks + config.vocab_size * 48)


@pytest.mark.parametrize(
    ("kind", "name"), one_of(3, [("int8", "biases"), ("fp8", "sigmoid in groups"), ("int4", "no gate")])
)
def test_quantized_experts(kind, name):
    """The products are those of the dequantized weights. Biases stay as they are."""
    config = config_of(CASES[name])
    weights, x = layer_of(CASES[name]), np.random.default_rng(5).standard_normal((4, 48))
    assert quantized("layer_0/mlp/experts/up/kernel")
    assert quantized("layer_0/mlp/shared/up/kernel")
    assert not quantized("layer_0/mlp/router/kernel")
    small, wide = ({**weights, "experts": {}} for _ in range(2))
    for name, part in weights["experts"].items():
        record = quantize_kernel(kind, np.asarray(part["kernel"]))
        small["experts"][name], wide["experts"][name] = part | record, part | {"kernel": meant(record)}
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), wide)
    got = run(config, small, x)
    np.testing.assert_allclose(got, expected(config.experts, wide, x), atol=2e-5)


@pytest.mark.parametrize("form", ["huggingface", "orbax"])
def test_experts_are_stored_and_read_again(tmp_path, form):
    params = init_params(config_of(CASES["softmax"]))
    save(params, tmp_path / form, format=form)
    again = load(tmp_path / form, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, params.weights, again.weights)


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss"])
def test_an_orbax_checkpoint_of_experts_becomes_files_and_back(tmp_path, name):
    theirs = write_checkpoint(name, tmp_path / "theirs")
    jshadow.weights.convert.convert(theirs, tmp_path / "orbax", "float32", format="orbax")
    jshadow.weights.convert.convert(tmp_path / "orbax", tmp_path / "again", "float32")
    first, last = (load(tmp_path / name, dtype="float32").weights for name in ("theirs", "again"))
    jax.tree.map(np.testing.assert_array_equal, first, last)


def test_the_bias_of_a_choice_is_not_rounded(tmp_path):
    params = load(write_checkpoint("glm4_moe", tmp_path / "m"), dtype="bfloat16")
    router = params.weights["layer_1"]["mlp"]["router"]
    assert (router["correction"].dtype, router["kernel"].dtype) == (jnp.float32, jnp.bfloat16)


def test_an_expert_that_is_missing_is_named(tmp_path):
    folder = write_checkpoint("qwen3_moe", tmp_path / "m")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_local_experts": 6', '"num_local_experts": 7'))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.6\.down_proj\.weight: missing"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"count": 0}, "count must be an integer of at least 1, got 0"),
        ({"chosen": 7}, "chosen must be at most count=6, got 7"),
        ({"groups": 4}, "groups must divide count=6 into groups of at least 2, got 4"),
        ({"groups": 3, "chosen_groups": 1}, "chosen_groups must be at most groups=3 and have at least chosen=3"),
        ({"router": "hash"}, "router must be one of"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, told):
    with pytest.raises(ConfigError, match=told):
        Experts(**SIZES | changes)


def test_a_layer_that_does_not_exist_has_no_experts():
    with pytest.raises(ConfigError, match=r"experts.layers must lie in \[0, 3\), got 5"):
        config_of(Experts(**SIZES | {"layers": (5,)}))
