"""One layer of a prefill, read by the units of the engine, and the compiled program of one of its pieces."""

import functools

import jax
import jax.numpy as jnp

from jshadow.engine.prefill.job import LayerWork, prompt_read, run_unit, units_of
from jshadow.engine.prefill.layer import Given, LayerPlan, begin_attention, read_piece
from jshadow.models.config import ModelConfig
from jshadow.weights.params import init_params


def read_layer(plan: LayerPlan, given: Given, x: jax.Array, lengths: tuple[int, ...]):
    """The hidden states after a layer, and its PromptKV."""
    work = LayerWork(x, jnp.array(lengths, jnp.int32))
    for unit in units_of(plan, len(lengths), x.shape[1] // plan.size)[:-1]:
        work = run_unit(plan, unit, given, work)
    return work.x, prompt_read(plan, work)


def memory_of_a_piece(config: ModelConfig, tokens: int, plan: LayerPlan):
    """memory_analysis of the compiled program of a later piece: float32, one row."""
    weights = jax.eval_shape(lambda: init_params(config).weights["layer_0"])
    x = jax.ShapeDtypeStruct((1, tokens, config.model_dim), jnp.float32)
    given = Given(weights, jax.ShapeDtypeStruct((config.head_dim // 2,), jnp.float32), None)
    prompt = jax.eval_shape(lambda: plan.empty_prompt(jnp.zeros(1, jnp.int32), tokens, jnp.float32))
    aux = q = None
    if plan.attention is not None:
        if plan.attention.ahead:
            q = jax.ShapeDtypeStruct((1, tokens, config.q_heads, config.head_dim), jnp.float32)
        aux = jax.eval_shape(functools.partial(begin_attention.__wrapped__, plan=plan), given, x, prompt, q)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return read_piece.lower(given, x, prompt, q, aux, index, plan=plan).compile().memory_analysis()
