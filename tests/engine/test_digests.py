"""The digests of weights and tokenizers, by which a saved state knows its model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    FETCH_MODES,
    LENGTHS,
    POLICY_CASES,
    POLICY_FETCHES,
    TINY,
    model,
)
from tiny_text import byte_tokenizer

from jshadow.weights.params import Params, init_params

policies = pytest.mark.parametrize("name", POLICY_CASES)
policies_fetched = pytest.mark.parametrize(("name", "fetch"), POLICY_FETCHES)
fetches = pytest.mark.parametrize("fetch", FETCH_MODES)
BATCH = len(LENGTHS)
ACTIVE = np.array([[True, True], [False, True], [True, False]])


def test_the_digest_of_params_is_of_every_bit_name_and_dtype():
    params = init_params(TINY)
    assert params.digest == init_params(TINY).digest == model().digest
    assert params.digest is params.digest  # computed once
    flipped = jax.tree.map(lambda leaf: leaf, params.weights)
    kernel = np.array(flipped["layer_1"]["mlp"]["up"]["kernel"])
    kernel.view(np.uint32)[3, 5] ^= 1
    flipped["layer_1"]["mlp"]["up"]["kernel"] = jnp.asarray(kernel)
    renamed = {name.replace("layer_2", "layer_9"): leaf for name, leaf in params.weights.items()}
    bits = jax.tree.map(lambda leaf: np.asarray(leaf).view(np.int32), params.weights)
    embedding = params.weights["embed"]["embedding"]
    turned = params.weights | {"embed": {"embedding": embedding.reshape(embedding.shape[::-1])}}
    digests = {Params(weights, TINY).digest for weights in (params.weights, flipped, renamed, bits, turned)}
    assert len(digests) == 5


def test_the_digest_of_a_tokenizer_is_of_what_it_does():
    def digest(tokenizer) -> str | None:
        return Params(model().weights, TINY, tokenizer).tokenizer_digest

    first, used, other, extended = (byte_tokenizer() for _ in range(4))
    used.pad_token = used.eos_token
    padded = digest(used)
    used(["one", "and two"], padding="max_length", truncation=True, max_length=4)
    assert digest(used) == padded  # what a call leaves in the backend is no part of it
    other.chat_template += " "
    extended.add_tokens(["new"])
    assert digest(first) == digest(byte_tokenizer())
    assert len({digest(first), digest(other), digest(extended), digest(None)}) == 4
    assert digest(None) is None


class WithoutBackend:
    """What a tokenizer in plain Python has in common with the fast ones."""

    def __init__(self, vocab: dict[str, int]) -> None:
        self.vocab, self.special_tokens_map, self.chat_template = vocab, {"eos_token": "b"}, None

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_a_tokenizer_without_backend_has_a_digest():
    digests = [
        Params({}, TINY, WithoutBackend(vocab)).tokenizer_digest
        for vocab in ({"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1, "b": 0})
    ]
    assert digests[0] == digests[1] != digests[2]
