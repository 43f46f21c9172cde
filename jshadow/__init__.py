"""Long-context LLM inference in JAX: ShadowKV and its sister methods, with a checked host offload.

Importing this package imports no other module: a public name is imported when it is first used. So the command line
can print its help without JAX.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jshadow import errors as errors
    from jshadow import policies as policies
    from jshadow.cache.state import KVState as KVState
    from jshadow.engine import decode as decode
    from jshadow.engine.decode import decode_step as decode_step
    from jshadow.engine.decode import decode_steps as decode_steps
    from jshadow.engine.decode import extend as extend
    from jshadow.engine.prefill.whole import PartialPrefill as PartialPrefill
    from jshadow.engine.prefill.whole import advance_prefill as advance_prefill
    from jshadow.engine.prefill.whole import begin_prefill as begin_prefill
    from jshadow.engine.prefill.whole import finish_prefill as finish_prefill
    from jshadow.engine.prefill.whole import prefill as prefill
    from jshadow.engine.prefill.whole import prefill_many as prefill_many
    from jshadow.engine.report import Report as Report
    from jshadow.engine.sampling import Sampler as Sampler
    from jshadow.engine.saved.fitted import load_fitted as load_fitted
    from jshadow.engine.saved.fitted import save_fitted as save_fitted
    from jshadow.engine.saved.state import load_state as load_state
    from jshadow.engine.saved.state import save_state as save_state
    from jshadow.engine.sparse_prefill import AShape as AShape
    from jshadow.engine.sparse_prefill import VerticalSlash as VerticalSlash
    from jshadow.engine.speculation import CompressedDraft as CompressedDraft
    from jshadow.engine.speculation import DraftModel as DraftModel
    from jshadow.engine.speculation import PromptLookup as PromptLookup
    from jshadow.engine.speculation import SelfDraft as SelfDraft
    from jshadow.generate import Generation as Generation
    from jshadow.generate import generate as generate
    from jshadow.generate import stream as stream
    from jshadow.library import Library as Library
    from jshadow.models.config import ModelConfig as ModelConfig
    from jshadow.models.transformer import abstract_weights as abstract_weights
    from jshadow.planner.machine import abstract_state as abstract_state
    from jshadow.planner.machine import footprint as footprint
    from jshadow.planner.machine import prefill_peak as prefill_peak
    from jshadow.policies import H2O as H2O
    from jshadow.policies import KIVI as KIVI
    from jshadow.policies import LESS as LESS
    from jshadow.policies import TOVA as TOVA
    from jshadow.policies import AdaKV as AdaKV
    from jshadow.policies import DenseFirst as DenseFirst
    from jshadow.policies import ExpectedAttention as ExpectedAttention
    from jshadow.policies import Full as Full
    from jshadow.policies import InfiniGen as InfiniGen
    from jshadow.policies import InfLLM as InfLLM
    from jshadow.policies import KeyDiff as KeyDiff
    from jshadow.policies import KVzip as KVzip
    from jshadow.policies import Loki as Loki
    from jshadow.policies import Offloaded as Offloaded
    from jshadow.policies import OmniKV as OmniKV
    from jshadow.policies import Policy as Policy
    from jshadow.policies import Pyramid as Pyramid
    from jshadow.policies import Quantized as Quantized
    from jshadow.policies import Quest as Quest
    from jshadow.policies import RocketKV as RocketKV
    from jshadow.policies import ShadowKV as ShadowKV
    from jshadow.policies import ShadowKVPlus as ShadowKVPlus
    from jshadow.policies import SnapKV as SnapKV
    from jshadow.policies import SpeCache as SpeCache
    from jshadow.policies import StreamingLLM as StreamingLLM
    from jshadow.weights.params import Params as Params
    from jshadow.weights.params import load as load
    from jshadow.weights.params import save as save

    __version__: str

# Public names by the module that defines them. A test compares them with the imports above.
FACE = {
    "cache.state": ("KVState",),
    "engine.decode": (
        "decode_step",
        "decode_steps",
        "extend",
    ),
    "engine.saved.fitted": (
        "load_fitted",
        "save_fitted",
    ),
    "engine.prefill.whole": (
        "PartialPrefill",
        "advance_prefill",
        "begin_prefill",
        "finish_prefill",
        "prefill",
        "prefill_many",
    ),
    "engine.report": ("Report",),
    "engine.sampling": ("Sampler",),
    "engine.saved.state": (
        "load_state",
        "save_state",
    ),
    "engine.sparse_prefill": (
        "AShape",
        "VerticalSlash",
    ),
    "engine.speculation": (
        "CompressedDraft",
        "DraftModel",
        "PromptLookup",
        "SelfDraft",
    ),
    "generate": (
        "Generation",
        "generate",
        "stream",
    ),
    "library": ("Library",),
    "models.config": ("ModelConfig",),
    "models.transformer": ("abstract_weights",),
    "planner.machine": (
        "abstract_state",
        "footprint",
        "prefill_peak",
    ),
    "policies": (
        "H2O",
        "KIVI",
        "LESS",
        "TOVA",
        "AdaKV",
        "DenseFirst",
        "ExpectedAttention",
        "Full",
        "InfiniGen",
        "InfLLM",
        "KeyDiff",
        "KVzip",
        "Loki",
        "Offloaded",
        "OmniKV",
        "Policy",
        "Pyramid",
        "Quantized",
        "Quest",
        "RocketKV",
        "ShadowKV",
        "ShadowKVPlus",
        "SnapKV",
        "SpeCache",
        "StreamingLLM",
    ),
    "weights.params": (
        "Params",
        "load",
        "save",
    ),
}
_PLACES = {name: module for module, names in FACE.items() for name in names}
_MODULES = (
    "cache",
    "engine",
    "errors",
    "evaluation",
    "library",
    "models",
    "ops",
    "planner",
    "policies",
    "serving",
    "weights",
)


class _Face(ModuleType):
    """The type of the package. It makes sure that `jshadow.generate` is always the function.

    When Python imports the module `jshadow.generate`, it sets the module as an attribute of the package. This type
    sets the function of the same name instead.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name == "generate" and isinstance(value, ModuleType):
            value = value.generate
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
__all__ = sorted([*_PLACES, "decode", "errors", "policies"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version(__name__)
    elif name in _PLACES:
        value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name == "decode":
        value = importlib.import_module(f"{__name__}.engine.decode")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, "__version__"})
