"""What one process with four devices finds of saved states. It prints a JSON object.

Arguments: a directory for files, and one in which two processes saved states in parts.
"""

import json
import sys
from pathlib import Path

import numpy as np
from mesh_states import STEP, TOKENS, canonical_difference, difference, model, model_on, prefilled

from jshadow import load_state, save_state
from jshadow.engine import decode

MESHES = ("tp=2", "tp=4", "sp=4", "data=2", "tp=2,sp=2")
CASES = {
    "full": ("sp=4",),
    "quest": ("data=2",),
    "shadowkv": ("tp=2", "tp=2,sp=2"),
    "packed": ("tp=4",),
    "shadowkv_plus": ("tp=2,sp=2",),
}


def on_all(path, folder, tokens):
    """The meshes on which the state of a file is not the same, by the file that is written there."""
    data, bad = path.read_bytes(), []
    for sizes, left in [*((one, "split") for one in ("", *MESHES)), ("tp=2,sp=2", "everywhere")]:
        params = model_on(sizes, left)
        save_state(folder / "again", load_state(path, params), params, tokens=tokens)
        if (folder / "again").read_bytes() != data:
            bad.append(f"{sizes} {left}")
    return bad


def one_case(folder, name, sizes, fetch="device_put", *, stepped=False):
    """Save a state of a mesh, load it everywhere, and take a step."""
    params, path = model_on(sizes), folder / "state"
    state = prefilled(params, name, fetch)
    if stepped:
        state = decode.decode_step(params, STEP, state)[1]
    tokens = [row + [int(new)] * stepped for row, new in zip(TOKENS, STEP, strict=True)]
    save_state(path, state, params, tokens=tokens)
    loaded = load_state(path, params)
    found = {
        "one device": canonical_difference(state, load_state(path, model())),
        "itself": difference(loaded, state),
        "others": on_all(path, folder, tokens),
    }
    logits, _ = decode.decode_step(params, STEP, state)
    compiled = decode._step._cache_size()
    again, _ = decode.decode_step(params, STEP, loaded)
    found["compiled"] = decode._step._cache_size() - compiled
    found["logits"] = np.asarray(logits).tobytes() == np.asarray(again).tobytes()
    return found


def main():
    """Run all cases."""
    folder, pair = Path(sys.argv[1]), Path(sys.argv[2])
    found = {f"{name} {sizes}": one_case(folder, name, sizes) for name, every in CASES.items() for sizes in every}
    found["quest sp=4 stepped"] = one_case(folder, "quest", "sp=4", stepped=True)
    found["shadowkv tp=4 zero_copy"] = one_case(folder, "shadowkv", "tp=4", "zero_copy")
    for name in ("shadowkv", "quest"):
        save_state(folder / name, load_state(pair / name, model_on("tp=4")), model_on("tp=4"), tokens=TOKENS)
        found[f"{name} of two"] = (folder / name).read_bytes() == (pair / f"{name}.alone").read_bytes()
    print(json.dumps(found))


main()
