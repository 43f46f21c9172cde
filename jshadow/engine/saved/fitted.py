"""Saving and loading the learned arrays of a policy. A file belongs to one model and one policy.

The arrays of a policy are stored in one safetensors file. A tensor is named by its place in the nested dict
("psi.scale"). The metadata holds the policy, the model's config, and the SHA-256 of the weights, of every array and of
the header, as in a saved state (`state.py`). A file is written completely or not at all.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshadow.engine.saved.file import described, open_described, read_checked, write_hashed
from jshadow.engine.saved.record import compare, plain, policy_record, read_json_text
from jshadow.engine.types import Fitted
from jshadow.errors import ConfigError, StateMismatch
from jshadow.policies import POLICIES, Policy
from jshadow.policies.base import innermost
from jshadow.policies.capabilities import Learns, capability, with_fitted
from jshadow.policies.checks import check_fitted
from jshadow.weights.convert.files import staged_file
from jshadow.weights.convert.safetensors_file import TensorFile, not_finite, raise_all
from jshadow.weights.digest import canonical, host_array
from jshadow.weights.params import Params

FORMAT, VERSION = "jshadow fitted arrays", 1
_KIND = "a file of fitted arrays (safetensors)"
_FIELDS = ("policy", "config", "weights", "dtype", "about")  # the fields of the metadata that are JSON texts


def save_fitted(
    path: str | os.PathLike[str],
    fitted: Fitted,
    policy: Policy,
    params: Params,
    *,
    about: Mapping[str, object] | None = None,
) -> None:
    """Write the learned arrays that `policy.fit(params, tokens)` returned to one file.

    Args:
        path: file to create or to replace. It is written completely or not at all.
        fitted: nested dict of float32 arrays, with the shapes of `policy.fitted_shapes`.
        policy: the policy that learned them.
        params: the model that they were learned on.
        about: other plain values to store in the file, such as the number of training steps. `load_fitted` does not
            check them.

    Raises:
        ConfigError: the arrays do not fit the policy and the model, or the policy learns nothing.
        CheckpointError: the file cannot be written, an array has NaN or Inf, or JSON cannot express a setting.
    """
    policy = with_fitted(policy)
    if fitted is None:
        raise ConfigError(f"fitted must be the result of fit, got None; {policy.name} may learn nothing")
    check_fitted(policy, params.config, fitted)
    arrays = {name: host_array(leaf) for name, leaf in _named(fitted).items()}
    bad = [f"{name}: {problem}" for name, value in arrays.items() if (problem := not_finite(value))]
    raise_all(str(path), bad)
    record = _identity(params) | {"policy": policy_record(innermost(policy)), "about": _plain_values(about or {})}
    texts = {name: canonical(record[name]).decode() for name in _FIELDS} | {"format": FORMAT, "version": str(VERSION)}
    layout = {name: (value.dtype.name, value.shape) for name, value in arrays.items()}
    with staged_file(Path(path).expanduser()) as fresh:
        write_hashed(fresh, layout, texts, arrays.__getitem__)


def load_fitted(path: str | os.PathLike[str], params: Params, policy: Policy) -> Fitted:
    """Load the learned arrays that `policy.fit` returned, to be passed as `fitted=` to prefill and generate.

    Args:
        path: file that `save_fitted` wrote.
        params: the model that they were learned on, with the same config, weights and dtype.
        policy: the policy that learned them. Settings that do not affect a shape, such as a budget, may differ.

    Raises:
        StateMismatch: the file belongs to another model, dtype or policy. The message lists every difference.
        ConfigError: the policy uses no learned arrays with these settings.
        CheckpointError: the file is missing, truncated, damaged, of another kind, or of another format version.
    """
    file, record, digests = _open_fitted(Path(path).expanduser())
    ours = _identity(params)
    lines = [line for name in ours for line in compare(name, record[name], ours[name], "params")]
    lines += compare("policy.name", record["policy"]["name"], innermost(policy).name, "policy")
    if lines:
        told = "\n  ".join([f"got {len(lines)} difference(s):", *lines])
        raise StateMismatch(f"{file.path} must hold arrays of these params and policy, {told}")
    learner = capability(policy, Learns)
    if learner is None or not learner.reads_fitted:
        raise ConfigError(f"policy must use learned arrays, with {file.path}, got {policy}")
    tree = learner.fitted_shapes(params.config)
    shapes = _named(tree)
    got = {name: (file.tags[name], shape) for name, shape in file.shapes.items()}
    lines = compare("arrays", got, {name: ("F32", shape) for name, shape in shapes.items()}, "policy")
    if lines:
        settings = record["policy"]["settings"]
        raise StateMismatch(
            f"{file.path} must hold arrays of these settings, learned with {settings}:\n  " + "\n  ".join(lines)
        )
    arrays = {name: read_checked(file, name, digests) for name in shapes}
    raise_all(str(file.path), [f"{name}: {problem}" for name, x in arrays.items() if (problem := not_finite(x))])
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=_is_shape), map(jnp.asarray, arrays.values()))


def read_fitted_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the metadata of a file that `save_fitted` wrote, without reading the arrays, which are not checked.

    Return "policy" ({"name", "settings"}), "config", "weights" (a digest), "dtype" and "about". Raises CheckpointError
    as `load_fitted` does.
    """
    return _open_fitted(Path(path).expanduser())[1]


def _open_fitted(path: Path) -> tuple[TensorFile, dict[str, Any], dict[str, str]]:
    """Open a file of learned arrays and check its header."""
    file, texts, digests = open_described(path, _KIND, {FORMAT: [VERSION]})
    with described(path, _KIND):
        record = {name: read_json_text(texts, name) for name in _FIELDS}
        policy = record["policy"]
        known = isinstance(policy, dict) and isinstance(policy.get("name"), str) and policy["name"] in POLICIES
        if not known or not isinstance(policy.get("settings"), dict):
            raise ValueError(f"policy must have settings and a name of {sorted(POLICIES)}, got {policy!r:.80}")
        return file, record, digests


def _identity(params: Params) -> dict[str, Any]:
    """Return what identifies a model in a file: its config, the digest of its weights, and its dtype."""
    return {"config": plain(params.config), "weights": params.digest, "dtype": str(params.dtype)}


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a nested dict by dotted names, such as "psi.scale"."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_shape)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def _plain_values(about: Mapping[str, object]) -> dict[str, Any]:
    """Return the values as JSON values. NumPy scalars become Python numbers."""
    return {str(name): plain(value.item() if isinstance(value, np.generic) else value) for name, value in about.items()}
