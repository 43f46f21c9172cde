"""generate and stream: from a prompt to text in one call."""

from collections.abc import Iterator
from typing import Unpack, overload

from jshadow.engine.generation import Generation as Generation
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.options import GenerateKeywords, GenerateOptions
from jshadow.engine.types import Batch, OnePrompt, Prompt
from jshadow.errors import PromptError
from jshadow.policies import Policy
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
    params: Params, prompt: Prompt, policy: Policy | None = None, **options: Unpack[GenerateKeywords]
) -> Generation | list[Generation]:
    """Answer a prompt, or a batch of prompts of any lengths.

    Args:
        params: the model, from `load`.
        prompt: text, a chat, token ids, or a list of any of these. Text is encoded with the tokenizer's special tokens
            and without the chat template. A chat is a list of messages, and is encoded with the chat template.
        policy: how keys and values are kept. None means ShadowKV().
        max_new_tokens: maximum number of tokens to generate. The default is 128. With 0, the prompt is only read into
            `out.state`.
        sampler: how tokens are drawn. None, the default, means greedy.
        seed: seed of the sampler, an integer of 64 bits. The default is 0.
        fetch: "auto" (the default), "resident", "device_put" or "zero_copy". With a state: "auto", or its own mode.
        capacity: maximum number of tokens that a row can ever hold, prompt included. None means the number that this
            call needs, rounded up.
        state: a state to continue. It is consumed. Each prompt is appended to one of its rows. A chat is then the next
            turn. If the state lacks the tokens with which the chat template ends an answer, they are added first.
        stop: strings or token ids that end a generation, in addition to the model's own end tokens. A string may be a
            special token. While the newest text may be the beginning of a stop string, a fork of the state is kept, so
            that `out.state` can end where `out.text` ends. The fork takes as many bytes as the half of the state that
            steps change. With `Full()`, this half is the whole cache.
        prefill: the sparse attention of the prompt: `VerticalSlash()` or `AShape()`. None means exact
            attention, or the policy's own. It must be None with a state, because the state's prompt was already read.
        verify: whether each step is also computed with all rows on the device. An error is raised at the first
            selection, fetched row or logit that differs. This is slow, and needs the device memory that offloading
            saves.
        fitted: arrays that the policy learned, from `policy.fit` or `load_fitted`. It must be None with a state, which
            holds its own.
        speculate: a drafter, such as `PromptLookup()`. It proposes tokens, and the model checks several of them at
            once. No token changes. The policy must be able to give tokens back (`KVState.rewind`).
        plain: whether the texts of special tokens in a text, such as "<|im_end|>", are plain text. If not, they are
            special tokens, and a chat that was rendered can be given as text. In the messages of a chat they are always
            plain text.

    Returns:
        A Generation for one prompt, or a list of them for a list of prompts.

    Raises:
        PromptError, CapacityError, ConfigError, StateMismatch: an argument is wrong. Raised before anything runs.
        HostMemoryError: the host has too little memory for the offloaded rows.
        NumericalError: the model's logits are NaN. The message names the step and the row.
        VerificationError: `verify` found a difference. The message names the step, the layer and the head.
    """
    loop = GenerationLoop(params, prompt, GenerateOptions(policy, **options))
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
        PromptError: the prompt is a batch, or the checkpoint has no tokenizer.

    The other errors are those of `generate`. An error about an argument is raised by the call itself.
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
