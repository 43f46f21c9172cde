"""Long-context LLM inference in JAX: ShadowKV and its sister methods, with a checked host offload."""

from jshadow import errors as errors
from jshadow import policies as policies
from jshadow.decode import decode_step as decode_step
from jshadow.decode import decode_steps as decode_steps
from jshadow.decode import extend as extend
from jshadow.fitted import load_fitted as load_fitted
from jshadow.fitted import save_fitted as save_fitted
from jshadow.generate import Generation as Generation
from jshadow.generate import generate as generate
from jshadow.generate import stream as stream
from jshadow.params import Params as Params
from jshadow.params import load as load
from jshadow.params import save as save
from jshadow.policies import Full as Full
from jshadow.policies import ShadowKV as ShadowKV
from jshadow.policies import StreamingLLM as StreamingLLM
from jshadow.prefill import prefill as prefill
from jshadow.prefill import prefill_many as prefill_many
from jshadow.report import Report as Report
from jshadow.sampling import Sampler as Sampler
from jshadow.saved import load_state as load_state
from jshadow.saved import save_state as save_state
from jshadow.sparse_prefill import AShape as AShape
from jshadow.sparse_prefill import BlockSparse as BlockSparse
from jshadow.sparse_prefill import VerticalSlash as VerticalSlash
from jshadow.state import KVState as KVState
