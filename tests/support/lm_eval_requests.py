"""Requests of lm-evaluation-harness on a tiny model, and their scores computed in plain ways."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
from tiny_text import byte_tokenizer

from jshadow import Full, ShadowKV, StreamingLLM
from jshadow.engine import decode
from jshadow.models.config import ModelConfig
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 257, 2, 32, 48, 4, 2, 16, 1e-5, 256, eos_ids=(256,))
SHADOWKV = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)
POLICIES = {"full": Full(), "shadowkv": SHADOWKV, "streaming_llm": StreamingLLM(sinks=2, window=12)}
END = 256
WIDTH = 160  # of all texts that are scored plainly
TALE = "A fox and a crow sat by the river; neither of them had eaten, and it rained until the evening came. "


def requests(*pairs: Any) -> list[Any]:
    return [SimpleNamespace(args=pair) for pair in pairs]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def step_by_step(params: Params, policy: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Score a continuation with an unpadded prefill of one row, and one decode step for each token."""
    capacity = 256
    logits, state = decode.prefill(
        params, np.array([context]), np.array([len(context)]), policy, capacity=capacity, fetch="resident"
    )
    total, greedy = 0.0, True
    for token in continuation:
        row = np.asarray(logits)[0]
        total += log_softmax(row)[token]
        greedy &= int(row.argmax()) == token
        logits, state = decode.decode_step(params, np.array([token]), state)
    return total, greedy


def plainly(params: Params, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Score a continuation with the logits of one prefill of the whole text, which is padded to one width."""
    ids = context + continuation
    whole = np.zeros((1, WIDTH), np.int32)
    whole[0, : len(ids)] = ids
    logits, _ = decode.prefill(params, whole, np.array([len(ids)]), Full(), capacity=256, logits="all")
    rows = np.asarray(logits)[0, len(context) - 1 : len(ids) - 1]
    at = np.arange(len(continuation))
    return log_softmax(rows)[at, continuation].sum(), bool((rows.argmax(-1) == continuation).all())


@functools.cache
def greedy_ids(text: str) -> list[int]:
    """The 16 tokens that the tiny model with full attention says after a text."""
    params = tiny_model()
    ids = params.tokenizer.encode(text)
    logits, state = decode.prefill(params, np.array([ids]), np.array([len(ids)]), Full(), capacity=256)
    first = int(np.asarray(logits).argmax())
    return [first, *np.asarray(decode.decode_steps(params, np.array([first]), state, 15)[0])[0].tolist()]


@functools.cache
def tiny_model() -> Params:
    """A random model with a byte tokenizer."""
    return dataclasses.replace(init_params(CONFIG, seed=1), tokenizer=byte_tokenizer())
