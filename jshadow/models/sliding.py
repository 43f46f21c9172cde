"""Reading and writing the keys of `config.json` in which sliding layers and full ones differ."""

from collections.abc import Iterable, Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, check_positive
from jshadow.ops.rope import RopeConfig

FULL, SLIDING = "full_attention", "sliding_attention"


_MOST_LAYERS = 65536


def layer_count(hf: Mapping[str, Any]) -> int:
    """Return `num_hidden_layers` of a config.json, after checking it.

    The check is needed because callers allocate lists of that length.

    Raises:
        ConfigError: it is not an integer from 1 to MOST_LAYERS.
    """
    layers = hf["num_hidden_layers"]
    check_positive("config.json", num_hidden_layers=layers)
    if layers > _MOST_LAYERS:
        raise ConfigError(f"config.json num_hidden_layers must be at most {_MOST_LAYERS}, got {layers}")
    return int(layers)


def sliding_fields(hf: Mapping[str, Any], sliding: list[bool]) -> dict[str, Any]:
    """Return the fields `sliding_window` and `sliding_layers` of ModelConfig, or no fields if no layer has a window.

    Args:
        hf: the parsed config.json. If it has `layer_types`, these decide which layers have a sliding window.
        sliding: whether each layer has a sliding window, used if there are no `layer_types`.

    Raises:
        ConfigError: `layer_types` has an unknown type, or its length is not the number of layers.
    """
    window, kinds = hf.get("sliding_window"), hf.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise ConfigError(f"config.json layer_types must be a list, got {kinds!r}")
        unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
        if unknown or len(kinds) != hf["num_hidden_layers"]:
            raise ConfigError(
                f"config.json layer_types must be {hf['num_hidden_layers']} times {FULL!r} or {SLIDING!r}, "
                f"got {len(kinds)} and {unknown}"
            )
        sliding = [kind == SLIDING for kind in kinds]
    if window is not None:
        check_positive("config.json", sliding_window=window)
    layers = tuple(index for index, slides in enumerate(sliding) if slides)
    return {"sliding_window": window, "sliding_layers": layers} if layers else {}


def by_pattern(hf: Mapping[str, Any], usual: int) -> list[bool]:
    """Return whether each layer has a sliding window, by `sliding_window_pattern`.

    With a number n, every n-th layer sees all tokens. Letters L and G name the layers with and without a window in
    turn. A file without the key has the number `usual`.

    Raises:
        ConfigError: the pattern is neither.
    """
    pattern = hf.get("sliding_window_pattern", hf.get("_sliding_window_pattern"))
    pattern, layers = usual if pattern is None else pattern, range(layer_count(hf))
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return [pattern[layer % len(pattern)] == "L" for layer in layers]
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise ConfigError(f"config.json sliding_window_pattern must be an integer or letters L and G, got {pattern!r}")
    return [(layer + 1) % pattern != 0 for layer in layers]


def others(hf: Mapping[str, Any], layers: Iterable[int]) -> tuple[int, ...]:
    """Return the layers of a config.json that are not among `layers`."""
    return tuple(sorted({*range(layer_count(hf))} - {*layers}))


def layer_types(config: ModelConfig) -> list[str]:
    """Return the `layer_types` list of config.json for a config."""
    return [SLIDING if layer in config.sliding_layers else FULL for layer in range(config.num_layers)]


def all_layers(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `sliding_fields` for a family in which all layers have the window (Mistral, Phi-3).

    The key `layer_types` is ignored.
    """
    slides = hf.get("sliding_window") is not None
    return sliding_fields({**hf, "layer_types": None}, [slides] * layer_count(hf))


def last_layers(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `sliding_fields` for Qwen.

    With `use_sliding_window`, the layers from number `max_window_layers` on have a sliding window.
    """
    if not hf.get("use_sliding_window"):
        return {}
    return sliding_fields(hf, [layer >= hf["max_window_layers"] for layer in range(layer_count(hf))])


def rope_of_kind(
    hf: Mapping[str, Any], kind: str, theta: float, scaling: Mapping[str, Any] | None = None
) -> RopeConfig:
    """Read the RoPE of one kind of layer, FULL or SLIDING.

    Newer files have one `rope_parameters` object for each kind. Older ones have the keys whose values are `theta` and
    `scaling`, which replace those of the object.
    """
    newer = (hf.get("rope_parameters") or {}).get(kind) or {}
    merged = {"rope_type": "default", "rope_theta": theta, **newer, **(scaling or {})}
    return RopeConfig.from_hf({**hf, "rope_scaling": merged, "rope_parameters": None})


def ropes_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Undo `rope_of_kind` for both kinds of layers."""

    def parameters(rope: RopeConfig) -> dict[str, Any]:
        keys = rope.to_hf()
        return {"rope_type": "default", **(keys["rope_scaling"] or {}), "rope_theta": keys["rope_theta"]}

    full, near = parameters(config.rope), parameters(config.sliding_rope or config.rope)
    return {"rope_parameters": {FULL: full, SLIDING: near}}
