"""Typed errors. Every message names the field, the limit, and what came."""


class JshadowError(Exception):
    """Base of every error that jshadow raises on purpose."""


class ConfigError(JshadowError, ValueError):
    """A model, policy, sampler or call setting is out of range or not supported."""


class PromptError(JshadowError, ValueError):
    """A prompt is empty, holds an impossible token id, or needs a tokenizer that is not there."""


class CapacityError(JshadowError, ValueError):
    """More tokens were asked for than the state, its window or the model's context can hold."""


class CheckpointError(JshadowError, ValueError):
    """A checkpoint is missing, damaged, of an unsafe kind, or does not fit its configuration."""


class StateMismatch(JshadowError, ValueError):
    """A KV state was used with another policy, batch or model, or after it was consumed."""


class HostMemoryError(JshadowError, MemoryError):
    """The host has too little memory for the offloaded part of a KV state."""


class VerificationError(JshadowError, RuntimeError):
    """The offloaded path gave another selection, row or result than the resident one."""


class NumericalError(JshadowError, ArithmeticError):
    """The model computed logits that are NaN, so no token can be drawn from them."""


class Infeasible(JshadowError, ValueError):
    """No setting of a policy fits under the bytes that were asked for."""
