"""generate and stream: from a prompt to text in one call."""

from collections.abc import Iterator, Sequence
from typing import Unpack, overload

from jshadow.cache.state import KVState
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.options import GenerateKeywords, GenerateOptions
from jshadow.engine.result import Generation as Generation
from jshadow.engine.sampling import Sampler
from jshadow.engine.types import Batch, Fitted, OnePrompt, Prompt
from jshadow.errors import PromptError
from jshadow.policies import Policy
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.weights.params import Params


@overload
def generate(
    params: Params, prompt: OnePrompt, policy: Policy | None = None, **options: Unpack[GenerateKeywords]
) -> Generation: ...
@overload
def generate(
    params: Params, prompt: Batch, policy: Policy | None = None, **options: Unpack[GenerateKeywords]
) -> list[Generation]: ...
def generate(
    params: Params,
    prompt: Prompt,
    policy: Policy | None = None,
    *,
    max_new_tokens: int = 128,
    sampler: Sampler | None = None,
    seed: int = 0,
    fetch: str = "auto",
    capacity: int | None = None,
    state: KVState | None = None,
    stop: str | int | Sequence[str | int] | None = None,
    prefill: PrefillAttention | None = None,
    verify: bool = False,
    fitted: Fitted | None = None,
) -> Generation | list[Generation]:
    """Answer a prompt, or a batch of prompts of any lengths.

    Args:
        params: from `load`.
        prompt: text (encoded with the tokenizer's special tokens, no chat template), a chat (list of messages, through
            the template), token ids, or a list of any of these.
        policy: how keys and values are kept. None means ShadowKV().
        max_new_tokens: the most tokens to generate. 0 only reads the prompt into `out.state`.
        sampler: how tokens are drawn. None means greedy.
        seed: seed of the sampler, an integer of 64 bits.
        fetch: "auto", "resident", "device_put" or "zero_copy". With a state: "auto", or the mode of the state.
        capacity: tokens that a row may ever hold. None means the need of this call, rounded up.
        state: a state to continue. The prompts are appended to it, and it is consumed. A chat is then the next turn.
            If the state lacks the template's end of the last answer, that is added first.
        stop: strings or token ids that end a generation, beside the model's own end tokens. A string may be a special
            token. While generated text may be the beginning of a stop string, a fork of the state is kept, so that
            `out.state` can end where `out.text` ends. It takes the bytes of the part that steps change, which with
            `Full()` is the whole cache.
        prefill: how the prompt's queries attend to each other: `VerticalSlash()`, `AShape()` or `BlockSparse()`;
            None means exact attention. Must be None with a state, because its prompt was read before.
        verify: run the resident path beside the offloaded path, and raise an error at the first selection, fetched row
            or logit that differs. This is slow, and needs the device memory that offloading saves.
        fitted: arrays that the policy learned (`policy.fit`, `load_fitted`). Must be None with a state, which has them.

    Returns:
        A Generation for one prompt, or a list of them for a list of prompts.

    Raises:
        PromptError, CapacityError, ConfigError, StateMismatch, HostMemoryError: before anything runs.
        NumericalError: the model's logits are NaN; names the step and the row.
        VerificationError: with `verify`; names step, layer and head.
    """
    options = GenerateOptions(
        policy=policy,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        seed=seed,
        fetch=fetch,
        capacity=capacity,
        state=state,
        stop=stop,
        prefill=prefill,
        verify=verify,
        fitted=fitted,
    )
    loop = GenerationLoop(params, prompt, options)
    for _ in loop:
        pass
    generations = loop.results()
    return generations[0] if loop.bare else generations


def stream(
    params: Params, prompt: OnePrompt, policy: Policy | None = None, **options: Unpack[GenerateKeywords]
) -> Iterator[str]:
    """Yield the text of `generate` piece by piece, for one prompt. The arguments are those of `generate`.

    Closing the iterator frees its KV state.

    Raises:
        PromptError: the prompt is a batch, or the checkpoint has no tokenizer. Raised before the first piece, like the
            errors that `generate` raises before anything runs.
    """
    loop = GenerationLoop(params, prompt, GenerateOptions(policy, **options, returns_state=False))
    if not loop.bare:
        raise PromptError(f"prompt must be one prompt to be streamed, got a list of {len(loop.prompts)}")
    if params.tokenizer is None:
        raise PromptError("prompt cannot be streamed as text, because the checkpoint has no tokenizer; use generate")
    return _pieces(loop)


def _pieces(loop: GenerationLoop) -> Iterator[str]:
    try:
        for _, text, _ in loop:
            if text:
                yield text
    finally:
        loop.close()
