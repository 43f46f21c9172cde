"""A second pass over a prompt, whose attention tells which tokens are needed to repeat the prompt.

Source: KVzip (Kim et al. 2025, arXiv 2505.23416, section 3). The model is asked to repeat the prompt, chunk by chunk,
and is then given the chunk. The queries of the given tokens attend to the prompt. The largest attention that a token
receives while its own chunk is repeated is its score. A policy asks for a second pass with `HookInputs.second_pass`,
and reads the scores in `PromptKV.second_pass`. The prefill computes them (`engine/prefill/layer.py`).
"""

import dataclasses

# NVIDIA's kvpress asks in these words. The last word of BETWEEN is the template's end of a user's message, which is a
# line break for a model without a chat template.
FIRST = "\n\nRepeat the previous context exactly."
OTHER = "\n\nRepeat the part of the previous context exactly, starting with"
BETWEEN = "\n"


@dataclasses.dataclass(frozen=True)
class SecondPass:
    """The settings of a second pass.

    Attributes:
        chunk: number of prompt tokens that are repeated at once.
        sinks: number of first tokens of the prompt that share the attention, beside the chunk and the tokens of the
            second pass. They are not scored there, except in the first chunk, which contains them.
        normalized: divide the attention by the norm of the query token's hidden state, and multiply it by the norm of
            the key token's value after the output projection (KVzip+ of kvpress).
        overlap: number of tokens before a chunk that are repeated in the request for the chunk.
    """

    chunk: int = 2048
    sinks: int = 4
    normalized: bool = False
    overlap: int = 8

    def most_tokens(self, tokens: int) -> int:
        """Return an upper bound on the tokens that are processed at once for a prompt of `tokens` tokens.

        A token has at least one byte of text.
        """
        return max(len(FIRST), len(OTHER)) + len(BETWEEN) + self.overlap + min(self.chunk, tokens)
