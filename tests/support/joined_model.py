"""One model over the devices of two processes. Process 0 prints a JSON object: differences to one device."""

import argparse
import json

import jax
import numpy as np
from mesh_cases import CAPACITY, LENGTHS, POLICIES, PROMPT, TURN, model

from jshadow.cli.fields import add_options
from jshadow.cli.processes import ProcessOptions, mesh_of, parse_mesh
from jshadow.engine import decode
from jshadow.engine import processes as engine
from jshadow.weights.params import spread

STEPS = 4


def results(params, name, fetch):
    """Logits of a prompt, some steps, a turn and a taken row."""
    out, state = decode.prefill(params, PROMPT, LENGTHS, POLICIES[name], capacity=CAPACITY, fetch=fetch, room=40)
    outs = [np.asarray(out)]
    for _ in range(STEPS):
        out, state = decode.decode_step(params, outs[-1].argmax(-1).astype(np.int32), state)
        outs.append(np.asarray(out))
    out, state = decode.extend(params, TURN, [9, 5], state)
    outs.append(np.asarray(out))
    out, _ = decode.decode_step(params, TURN[:1, 0], state.take([1]))
    return [*outs, np.asarray(out)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", help="POLICY:MESH:FETCH")
    add_options(parser, ProcessOptions)
    given = vars(parser.parse_args())
    cases, args = given.pop("cases"), ProcessOptions(**given)
    with engine.join(
        engine.ProcessOptions(args.coordinator, args.processes, args.process, args.join_timeout)
    ) as processes:
        told = {}
        for case in cases:
            name, mesh, fetch = case.split(":")
            params = spread(model(), mesh_of(parse_mesh(mesh)))
            got = results(params, name, fetch)
            with jax.default_device(jax.local_devices()[0]):
                want = results(model(), name, "resident")
            told[case] = [float(np.abs(one - other).max()) for one, other in zip(want, got, strict=True)]
        if processes.first:
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
