"""What two joined processes check of each other. Each prints one JSON object, then sums until it is killed."""

import argparse
import json
import os
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mesh_cases import text_of

from jshadow.cli.fields import add_options
from jshadow.cli.processes import ProcessOptions, joined, mesh_of, parse_mesh
from jshadow.engine import agree as agreement
from jshadow.engine import processes as engine


def digests(mesh):
    """The names of the facts of weights that lie whole, or in parts, and the error where one process has others."""

    def placed(value, spec):
        return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])

    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    whole = {"a": placed(value, PartitionSpec("tp")), "b": jnp.asarray(value)}
    parted = whole | {"c": placed(value, PartitionSpec("data"))}
    facts = agreement.weight_facts(parted)
    agreement.agree(facts)
    other = value + jax.process_index()
    alone = agreement.weight_facts({"a": jax.device_put(value, jax.local_devices()[0]), "b": jnp.asarray(value)})
    return {
        "same": facts["weights"] == alone["weights"],
        "names": sorted(facts),
        "other": text_of(lambda: agreement.agree(agreement.weight_facts({"b": jnp.asarray(other)}))),
    }


def order_of_first_run(total, x):
    """What happens, in its order, when a program runs together for the first time, and for the second time."""
    events = []
    exchanged = agreement.exchange

    def noted(name, *rest):
        events.append(f"{name} {program._cache_size()}")
        return exchanged(name, *rest)

    program = jax.jit(total)
    with mock.patch.object(agreement, "exchange", noted):
        for _ in range(2):
            events.append(float(agreement.run_together(program, x)))
    return events


def main():
    """Join, check, print, and sum."""
    parser = argparse.ArgumentParser()
    add_options(parser, ProcessOptions)
    args = ProcessOptions(**vars(parser.parse_args()))
    with joined(args) as processes:
        mesh = mesh_of(parse_mesh("tp=2,data=2"))
        x = jax.make_array_from_callback(
            (4,),
            NamedSharding(mesh, PartitionSpec(("data", "tp"))),
            lambda index: np.arange(4, dtype=np.float32)[index],
        )

        def total(part):
            return jax.lax.psum(part.sum(), ("data", "tp"))

        total = jax.shard_map(total, mesh=mesh, in_specs=PartitionSpec(("data", "tp")), out_specs=PartitionSpec())
        facts = {"seed": str(processes.index), "prompt": "same", f"own {processes.index}": "alone"}
        found = {
            "index": processes.index,
            "axes": dict(mesh.shape),
            "hosts of tp": [[device.process_index for device in row] for row in mesh.devices],
            "first run": order_of_first_run(total, x),
            "too large": text_of(lambda: mesh_of(parse_mesh("tp=8"))),
            "seed": text_of(lambda: agreement.agree(facts)),
            "program": text_of(lambda: agreement.compiled_everywhere(f"step {processes.index}")),
            "late": text_of(lambda: agreement.exchange(f"only {processes.index}", "", 0.2)),
            "again": text_of(lambda: engine.join(engine.ProcessOptions("127.0.0.1:1", 2, 0))),
            "weights": digests(mesh),
            "here": agreement.processes_here(),
        }
        print("only process 0 prints this", flush=True)
        os.write(2, (json.dumps(found) + "\n").encode())
        program = jax.jit(total)
        sys.stdin.readline()  # both sum from here on
        while True:
            program(x).block_until_ready()


main()
