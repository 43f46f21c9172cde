"""Functions that several parts of `jshadow bench` use: an option, a check, and the description of the machine."""

import argparse
import platform

from jshadow.errors import ConfigError


def add_count(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    """Add an option --`name` that takes an integer. `text` is its help, without the default."""
    parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")


def check_repeats(repeats: int) -> None:
    """Raise ConfigError for less than one repeat."""
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")


def machine() -> dict[str, str]:
    """Return the device, platform, processor and versions, as the JSON output has them."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
