"""The layers of a checkpoint that see only a window: read from `config.json`, and written to it."""

from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, check_positive

FULL, SLIDING = "full_attention", "sliding_attention"


MOST_LAYERS = 65536


def layer_count(hf: Mapping[str, Any]) -> int:
    """`num_hidden_layers`, checked before any list of that length is made. Raises ConfigError above MOST_LAYERS."""
    layers = hf["num_hidden_layers"]
    check_positive("config.json", num_hidden_layers=layers)
    if layers > MOST_LAYERS:
        raise ConfigError(f"config.json num_hidden_layers must be at most {MOST_LAYERS}, got {layers}")
    return int(layers)


def sliding_fields(hf: Mapping[str, Any], sliding: list[bool]) -> dict[str, Any]:
    """Fields of ModelConfig.

    Args:
        hf: config.json; its `layer_types`, where it has them, win.
        sliding: which layers slide where it has none.

    Raises:
        ConfigError: a type of layer that is neither, or not one for each layer.
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


def layer_types(config: ModelConfig) -> list[str]:
    """The `layer_types` of a config."""
    return [SLIDING if layer in config.sliding_layers else FULL for layer in range(config.num_layers)]


def all_layers(hf: Mapping[str, Any]) -> dict[str, Any]:
    """For a family whose layers all slide where it has a window (Mistral, Phi-3). `layer_types` is not read."""
    slides = hf.get("sliding_window") is not None
    return sliding_fields({**hf, "layer_types": None}, [slides] * layer_count(hf))


def last_layers(hf: Mapping[str, Any]) -> dict[str, Any]:
    """For a family whose layers slide from `max_window_layers` on if `use_sliding_window` is set (Qwen)."""
    if not hf.get("use_sliding_window"):
        return {}
    first = hf.get("max_window_layers", 28)
    return sliding_fields(hf, [layer >= first for layer in range(layer_count(hf))])
