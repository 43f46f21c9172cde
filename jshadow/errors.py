"""Typed errors. Every message names the field, the limit and the value that was given."""

from collections.abc import Sequence
from typing import Any


class JshadowError(Exception):
    """The base class of all errors that jshadow raises on purpose."""


class ConfigError(JshadowError, ValueError):
    """A model, policy, sampler or call setting is out of range or not supported."""


class PromptError(JshadowError, ValueError):
    """A prompt is empty, has a token id out of range, or needs a tokenizer that the checkpoint lacks."""


class CapacityError(JshadowError, ValueError):
    """The tokens do not fit into the state, its window or the model's context."""


class QueueFull(CapacityError):
    """As many requests wait as may. A later try may be taken."""


class CheckpointError(JshadowError, ValueError):
    """A checkpoint or a file of jshadow is missing, damaged, of an unsafe kind, or does not fit its configuration."""


class DocumentError(CheckpointError):
    """The file of a stored document that a request needs cannot be read, or is damaged."""


class StateMismatch(JshadowError, ValueError):
    """A KV state does not fit the policy, batch or model that it is used with, or it was consumed before."""


class HostMemoryError(JshadowError, MemoryError):
    """The host has too little memory for the offloaded part of a KV state."""


class VerificationError(JshadowError, RuntimeError):
    """With offloaded rows, a selection, a fetched row or a result differs from that with all rows on the device."""


class NumericalError(JshadowError, ArithmeticError):
    """The model computed logits that are NaN, so no token can be drawn from them."""


class Infeasible(JshadowError, ValueError):
    """No setting of a policy fits into the number of bytes that was asked for."""


class DistributedError(JshadowError, RuntimeError):
    """Of several processes, one is missing, came twice, has other inputs than the others, or ended too early."""


class ServingError(JshadowError, RuntimeError):
    """The serving engine is closed, or its loop failed, so that a request gets no answer."""


class OutOfMemory(ServingError):
    """The device or the host had too little memory for one request. The engine goes on."""


class RequestCancelled(ServingError):
    """The request was cancelled before its answer was complete."""


def check_integer(name: str, value: object, *, least: int | None = None) -> None:
    """Raise ConfigError unless a value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} must be an integer{bound}, got {value!r:.80}")


def check_one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ConfigError unless a value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {choices}, got {value!r}")
