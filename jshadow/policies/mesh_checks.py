"""What prevents a layer's cache from running on a mesh. Nothing is traced."""

from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.policies.capabilities import Learns


def check_split(spec: CacheSpec, *, gpu: bool) -> None:
    """Raise ConfigError if a layer's cache cannot run on its mesh.

    Args:
        spec: the spec of the layer on one device.
        gpu: whether the devices are NVIDIA GPUs, on which "zero_copy" needs a kernel.
    """
    shards, policy = spec.shards, spec.policy
    if shards is None:
        return
    name = policy.name or type(policy).__name__
    learned = isinstance(policy, Learns) and policy.reads_fitted
    if learned or not policy.splits_heads:
        why = "reads learned arrays" if learned else "is not split over devices"
        raise ConfigError(f"mesh must be None for {name}, which {why}, got {shape(spec)}")
    if spec.fetch == "zero_copy" and gpu and (refusal := no_kernel(spec)):
        raise ConfigError(
            f"fetch must be 'device_put' or 'resident' for {name} on this mesh, as no kernel serves {refusal} "
            f"(left='everywhere' has one), got 'zero_copy' with {shape(spec)}"
        )


def no_kernel(spec: CacheSpec) -> str:
    """Return "" if the mesh does not prevent a GPU kernel from fetching a layer's rows, or else why it does."""
    if spec.shards is None or not spec.policy.splits_left(spec):
        return ""
    return "a device that has a part of the left rows"


def shape(spec: CacheSpec) -> str:
    """Return the sizes of a mesh as text: "data=1, tp=2"."""
    assert spec.shards is not None
    return ", ".join(f"{axis}={size}" for axis, size in spec.shards.mesh.shape.items())
