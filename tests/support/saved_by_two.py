"""What two joined processes do with saved states. Each prints a JSON object twice, and waits for a line in between.

Arguments: a directory that both share, and the options of joining.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from full_disk import file_size_limit
from mesh_cases import CAPACITY, LENGTHS, POLICIES, PROMPT, model, text_of
from saved_cases import TOKENS, difference

from jshadow import load_state, save_state
from jshadow.cli.fields import add_options
from jshadow.cli.processes import ProcessOptions, joined, mesh_of, parse_mesh
from jshadow.engine import decode
from jshadow.engine.agree import exchange
from jshadow.weights.params import spread

BY_TWO = {"shadowkv": "data=2,tp=2", "quest": "tp=4"}  # the second mesh splits the weights over both processes


def report(found):
    """The standard output of process 1 is not seen."""
    os.write(2, (json.dumps(found) + "\n").encode())


def listing(folder):
    """Return the names and sizes of all files below a folder."""
    return sorted((str(path), path.stat().st_size) for path in folder.rglob("*"))


def main():
    """Join, save, load, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    add_options(parser, ProcessOptions)
    given = vars(parser.parse_args())
    folder, args = given.pop("folder"), ProcessOptions(**given)

    with joined(args) as processes:
        found, models = {}, {}
        for name, sizes in BY_TWO.items():
            params = models[name] = spread(model(), mesh_of(parse_mesh(sizes)))
            sizes = {"capacity": CAPACITY, "fetch": "device_put"}
            state = decode.prefill(params, PROMPT, LENGTHS, POLICIES[name], **sizes)[1]
            for _ in range(2):  # the second replaces the first
                save_state(folder / name, state, params, tokens=TOKENS)
            found[name] = difference(load_state(folder / name, params), state)
        before = listing(folder)
        exchange("listed", "", 60)
        with file_size_limit(2000) if processes.index == 1 else contextlib.nullcontext():
            found["old"] = text_of(lambda: save_state(folder / "quest", state, params))
            found["new"] = text_of(lambda: save_state(folder / "new", state, params))
        found["left"] = listing(folder) == before
        report(found)
        sys.stdin.readline()
        loaded = {name: load_state(folder / f"{name}.alone", models[name]) for name in BY_TWO}
        alone = {name: difference(loaded[name], load_state(folder / name, models[name])) for name in BY_TWO}
        report(alone | {"damaged": text_of(lambda: load_state(folder / "hurt" / "quest", params))})


main()
