"""What the tests of saved states run in a process with four devices, and in two processes of two."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from mesh_cases import CONFIG, LENGTHS, MESHES, POLICIES, PROMPT, model, start

from jshadow import load_state, save_state
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.saved.state import bare, cache_fills, places
from jshadow.models.config import ModelConfig

TOKENS = [row[:length].tolist() for row, length in zip(PROMPT, LENGTHS, strict=True)]
STEP = np.array([3, 90], np.int32)


def difference(mine: KVState, theirs: KVState, *, stepped: bool = False) -> str:
    """The first difference between the parts of two states on the devices of this process, or "none".

    `mine` was loaded, so its cache of selected chunks is empty. After steps it may hold less, which costs hits.
    """
    if jax.tree.structure(mine) != jax.tree.structure(theirs):  # with the static fields
        return "structure"
    fills, others = cache_fills(mine), places(theirs)
    free = {*fills, "counters.hits", "counters.fetched"} if stepped and fills else set(fills)
    for name, leaf in places(mine).items():
        facts = [(one.sharding, one.shape, one.dtype, one.weak_type) for one in (bare(leaf), bare(others[name]))]
        if facts[0] != facts[1]:
            return f"{name}: {facts}"
        shards = (bare(leaf).addressable_shards, bare(others[name]).addressable_shards)
        for a, b in zip(*shards, strict=True):
            if name not in free and np.asarray(a.data).tobytes() != np.asarray(b.data).tobytes():
                return f"{name} at {a.index}"
            if name in fills and not stepped and (np.asarray(a.data) != fills[name]).any():
                return f"{name} is not empty"
    return "none"


def difference_to_one(mine: KVState, single: KVState) -> str:
    """The first difference between a state of a mesh and one of one device, or "none". Caches are left out."""
    others, free = places(single), cache_fills(mine)
    for name, leaf in places(mine).items():
        one, other = np.asarray(bare(leaf)), np.asarray(bare(others[name]))
        if name not in free and one[tuple(map(slice, other.shape))].tobytes() != other.tobytes():
            return name
    return "none"


def one_case(
    folder: str, name: str, mesh: str, fetch: str, stepped: bool, config: ModelConfig = CONFIG
) -> dict[str, Any]:
    """Save a state of a mesh, load it everywhere, and go on with it."""
    params, path = model(mesh, config=config), Path(folder) / "state"
    state = start(params, POLICIES[name], fetch)[1]
    if stepped:
        state = decode.decode_step(params, STEP, state)[1]
    tokens = [row + [int(new)] * stepped for row, new in zip(TOKENS, STEP, strict=True)]
    save_state(path, state, params, tokens=tokens)
    loaded = load_state(path, params)
    found = {
        "one device": difference_to_one(state, load_state(path, model(config=config))),
        "itself": difference(loaded, state),
        "others": on_all(path, tokens, config),
    }
    logits, _ = decode.decode_step(params, STEP, state)
    compiled = decode._step._cache_size()
    again, _ = decode.decode_step(params, STEP, loaded)
    found["compiled"] = decode._step._cache_size() - compiled
    return found | {"logits": np.asarray(logits).tobytes() == np.asarray(again).tobytes()}


def on_all(path: Path, tokens: list[list[int]], config: ModelConfig) -> list[str]:
    """The meshes on which the state of a file is not the same, by the file that is written there."""
    bad, last = [], [*MESHES][-1]
    for mesh, left in [*((mesh, "split") for mesh in ("", *MESHES)), (last, "everywhere")]:
        params, again = model(mesh, left, config=config), path.with_name("again")
        save_state(again, load_state(path, params), params, tokens=tokens)
        if again.read_bytes() != path.read_bytes():
            bad.append(f"{mesh} {left}")
    return bad


def as_one_file(path: str, mesh: str, target: str) -> None:
    """Load a state on a mesh, and save it."""
    save_state(target, load_state(path, model(mesh)), model(mesh), tokens=TOKENS)
