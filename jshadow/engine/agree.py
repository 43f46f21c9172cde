"""What all processes must have in common before their first collective, compared without a collective.

The values go through the key-value store of JAX's coordination service. All processes must call these functions in the
same order. With one process, they do nothing.
"""

import collections
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jshadow.engine.saved.record import plain, policy_record
from jshadow.errors import DistributedError
from jshadow.policies import Policy
from jshadow.weights.digest import canonical, raw_bytes, sha256
from jshadow.weights.params import Params

_AGREE_SECONDS = 600.0  # a process may still be reading its weights
_COMPILE_SECONDS = 3600.0
_POLL_MILLISECONDS = 1000  # between two looks at the clock, and at Ctrl-C
_SHOWN = 12  # characters of a value in an error
_rounds: collections.Counter[str] = collections.Counter()  # of exchanges, by name: a key is written once
seen: set[Any] = set()  # programs that all processes have compiled


def exchange(name: str, value: str, seconds: float) -> list[str]:
    """Return the values of all processes, by their numbers. No process returns before all have called it.

    All processes must give the same name. DistributedError names those that did not come within `seconds`.
    """
    from jax._src import distributed

    own = distributed.global_state
    if own.client is None or own.num_processes == 1:
        return [value]
    place, end = f"jshadow/{name}/{_rounds[name]}", time.monotonic() + seconds
    _rounds[name] += 1
    own.client.key_value_set(f"{place}/{own.process_id}", value)
    values = [
        value if number == own.process_id else _wait_for(own.client, f"{place}/{number}", end)
        for number in range(own.num_processes)
    ]
    late = [number for number, found in enumerate(values) if found is None]
    if late:
        raise DistributedError(
            f"{name} must be reached by all {own.num_processes} processes within {seconds:g} s, process "
            f"{numbers(late)} did not come. This is process {own.process_id}"
        )
    return [found for found in values if found is not None]


def _wait_for(client: Any, key: str, end: float) -> str | None:
    """Return the value of a key of the store, or None if it is not there at the time `end` of `time.monotonic`."""
    while True:
        left = max(1, min(_POLL_MILLISECONDS, int(1000 * (end - time.monotonic()))))
        try:
            return str(client.blocking_key_value_get(key, left))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if time.monotonic() >= end:
            return None


def agree(facts: Mapping[str, str], seconds: float = _AGREE_SECONDS) -> None:
    """Compare the facts of all processes. Call it after loading the weights, and before the first collective.

    The facts are texts by the name of the field, such as those of `run_facts`. A field that only some processes have is
    compared among them. If one differs, each process raises a DistributedError with the field and the processes.
    """
    texts = exchange("agree", json.dumps(dict(facts)), seconds)
    differences = []
    everyone = [json.loads(text) for text in texts]
    for field in sorted(set().union(*everyone)):
        holders = collections.defaultdict(list)
        for number, theirs in enumerate(everyone):
            if field in theirs:
                holders[theirs[field]].append(number)
        if len(holders) > 1:
            parts = [f"process {numbers(who)} has {value[:_SHOWN]!r}" for value, who in holders.items()]
            differences.append(f"{field} must be the same in all processes: {', '.join(parts)}")
    if differences:
        raise DistributedError("; ".join(differences))


def processes_here() -> int:
    """Return how many processes of the run are on this host, by its name. They share its memory."""
    return exchange("host", platform.node(), _AGREE_SECONDS).count(platform.node())


def run_facts(params: Params, policy: Policy | None, /, **settings: Any) -> dict[str, str]:
    """Return the facts of a run: SHA-256s of its config, tokenizer, weights and policy, and of other settings.

    Every byte of the weights that lies on a device of this process is hashed. The settings are plain values of JSON by
    name, such as the token ids of the prompts, the seed and the shape of the mesh. Raises CheckpointError if JSON
    cannot express a setting of the policy.
    """
    facts = {
        "jax": jax.__version__,
        "config": sha256(canonical(plain(params.config))),
        "tokenizer": params.tokenizer_digest or "none",
        "policy": "none" if policy is None else sha256(canonical(policy_record(policy))),
    }
    for name, value in settings.items():
        text = canonical(value)
        facts[name] = text.decode() if len(text) <= _SHOWN else sha256(text)
    return facts | weight_facts(params.weights)


def weight_facts(weights: Any) -> dict[str, str]:
    """Return SHA-256s of the weights that this process holds, a tree of arrays.

    Weights that it holds as a whole are one fact. The others are a second fact, whose name has the digest of their
    places in it. So processes compare the same slices, and only these.
    """
    whole, part, places = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    divided = False
    for path, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]:
        name = canonical([jax.tree_util.keystr(path), leaf.dtype.name, leaf.shape])
        slices = {str(shard.index): shard for shard in leaf.addressable_shards}
        covered = sum(shard.data.size for shard in slices.values()) == leaf.size
        hasher = whole if covered else part
        hasher.update(name)
        for place in sorted(slices, key=lambda one: [axis.start or 0 for axis in slices[one].index]):
            hasher.update(raw_bytes(np.asarray(slices[place].data, order="C")))
            if not covered:
                divided = True
                places.update(name + place.encode())
    facts = {"weights": whole.hexdigest()}
    return facts | {f"weights {places.hexdigest()[:_SHOWN]}": part.hexdigest()} if divided else facts


def compiled_everywhere(name: str, seconds: float = _COMPILE_SECONDS) -> None:
    """Wait until all processes have compiled a program. Call it between the compilation and the first run.

    Without it, a process that compiles 30 seconds longer than another fails: gloo waits no longer in a collective.
    """
    names = exchange("compiled", name, seconds)
    for number, theirs in enumerate(names):
        if theirs != name:
            raise DistributedError(
                f"program must be the same in all processes: process {number} has {theirs!r}, this one has {name!r}"
            )


def run_together(program: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Run a jitted function. The first time for new shapes, all processes compile it before any runs it.

    A program whose arguments all lie on devices of this process has no collectives, and waits for nothing.
    """
    from jax._src import distributed

    if distributed.global_state.client is not None and _spans_processes((args, named)):
        key = (program, _signature((args, named)))
        if key not in seen:
            program.lower(*args, **named).compile()  # type: ignore[attr-defined]  # jit keeps what it has compiled
            compiled_everywhere(getattr(program, "__name__", "program"))
            seen.add(key)
    return program(*args, **named)


def _spans_processes(arguments: Any) -> bool:
    leaves = jax.tree.leaves(arguments)
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves)


def _signature(arguments: Any) -> Any:
    """Return what a jitted function's program depends on: for arrays the types and places, for others the values."""
    leaves, tree = jax.tree.flatten(arguments)

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf.aval, leaf.sharding, getattr(leaf, "committed", None)
        if isinstance(leaf, np.ndarray | np.generic):
            return leaf.dtype.name, leaf.shape
        return leaf if hasattr(leaf, "__hash__") and leaf.__hash__ else id(leaf)

    return tree, tuple(map(of, leaves))


def numbers(values: list[int]) -> str:
    """Return process numbers in words: "1", "1 and 2", "1, 2 and 5"."""
    *most, last = list(map(str, values)) or ["none"]
    return f"{', '.join(most)} and {last}" if most else last
