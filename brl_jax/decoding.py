"""Text generation with any decoder: prefill, then one token at a time from the model's cache."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import require

# Prompts are read in pieces of this many tokens, so that a long one needs no more memory than that.
_PREFILL = 2048


def generate(
    model: nn.Module,
    variables: Any,
    prompts: Int[Array, "B P"] | np.ndarray,
    *,
    max_new_tokens: int,
    lengths: Int[Array, "B"] | np.ndarray | None = None,
    rng: Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, "B L"]:
    """Continues prompts by sampling from a decoder.

    The prompt is read in large pieces as far as all prompts reach; where they differ in length, the longer ones are
    read on token by token while the shorter ones already generate. All rows stand at one position, so that any
    mechanism's cache serves.

    Args:
      model: a decoder, such as `DecoderLM`, with `init_cache(batch, length)`, `logits, cache = model(tokens,
        cache=cache)` and `absorbable(length)`.
      variables: its variables.
      prompts: (B, P) ints, filled up on the right where shorter than P.
      max_new_tokens: tokens to add to each prompt, at least 1.
      lengths: (B,) ints from 1 to P, the prompts' lengths; by default P.
      rng: random key; needed unless temperature is 0.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: sample among the k likeliest tokens only.
      top_p: sample among the fewest tokens that together have at least this probability (0 to 1).

    Returns:
      (B, P + max_new_tokens) int32: each row's prompt and what follows it, then zeros.

    Raises:
      ValueError: on an empty prompt, a token outside the vocabulary, or sampling settings out of range.
    """
    prompts = np.asarray(prompts)
    require(
        prompts.ndim == 2 and prompts.size > 0 and np.issubdtype(prompts.dtype, np.integer),
        f"prompts must be integers of shape (batch, length), not empty, got {prompts.dtype} {prompts.shape}",
    )
    batch, width = prompts.shape
    lengths = np.full((batch,), width) if lengths is None else np.asarray(lengths)
    require(
        lengths.shape == (batch,) and bool((lengths >= 1).all() and (lengths <= width).all()),
        f"lengths must be {batch} numbers from 1 to {width}, got {lengths.tolist()}",
    )
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    inside = np.arange(width)[None] < lengths[:, None]
    if vocabulary is not None:
        wrong = prompts[inside & ((prompts < 0) | (prompts >= vocabulary))]
        require(
            wrong.size == 0, f"prompts must hold tokens from 0 to {vocabulary - 1}, got {wrong[:5].tolist()}"
        )
    require(max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {max_new_tokens}")
    require(temperature >= 0, f"temperature must not be negative, got {temperature}")
    require(top_k is None or top_k >= 1, f"top_k must be at least 1, got {top_k}")
    require(top_p is None or 0 < top_p <= 1, f"top_p must be above 0 and at most 1, got {top_p}")
    require(temperature == 0 or rng is not None, "rng is needed to sample; give a key or temperature=0")
    rng = jax.random.key(0) if rng is None else rng

    common = int(lengths.min())
    total = width + max_new_tokens
    prompts = jnp.asarray(prompts, jnp.int32)
    cache = model.init_cache(batch, total)
    absorbed = model.absorbable(common)
    for start in range(0, absorbed, _PREFILL):
        cache = _absorb(model, variables, prompts[:, start : min(start + _PREFILL, absorbed)], cache)
    for start in range(absorbed, common, _PREFILL):
        logits, cache = _prefill(model, variables, prompts[:, start : min(start + _PREFILL, common)], cache)
    new = _continue(
        model,
        variables,
        cache,
        logits,
        prompts[:, common:],
        jnp.asarray(lengths - common, jnp.int32),
        rng,
        jnp.float32(temperature),
        steps=total - common,
        greedy=temperature == 0,
        top_k=top_k,
        top_p=top_p,
    )
    tokens = jnp.concatenate([prompts[:, :common], new], axis=1)
    ends = jnp.asarray(lengths + max_new_tokens)[:, None]
    return jnp.where(jnp.arange(total)[None] < ends, tokens, 0)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _absorb(model, variables, tokens, cache):
    return model.apply(variables, tokens, cache, method="absorb")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _prefill(model, variables, tokens, cache):
    hidden, cache = model.apply(variables, tokens, cache=cache, method="hidden")
    return model.apply(variables, hidden[:, -1:], method="logits")[:, 0], cache


# The cache is not donated: no output has its shape, and XLA would warn of that.
@functools.partial(jax.jit, static_argnums=0, static_argnames=("steps", "greedy", "top_k", "top_p"))
def _continue(
    model, variables, cache, logits, forced, num_forced, rng, temperature, *, steps, greedy, top_k, top_p
):
    """`steps` tokens (B, steps): a row's first num_forced ones are given, the others sampled."""
    batch = logits.shape[0]
    forced = jnp.pad(forced, ((0, 0), (0, steps - forced.shape[1])))

    def step(state, xs):
        cache, logits = state
        index, given, key = xs
        if greedy:
            sampled = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            sampled = sample(key, logits / temperature, top_k=top_k, top_p=top_p)
        token = jnp.where(index < num_forced, given, sampled)
        logits, cache = model.apply(variables, token[:, None], cache=cache)
        return (cache, logits[:, 0]), token

    xs = (jnp.arange(steps), forced.T, jax.random.split(rng, steps))
    _, tokens = jax.lax.scan(step, (cache, logits), xs)
    return tokens.T.reshape(batch, steps)


def sample(
    key: Array, logits: Float[Array, "B V"], *, top_k: int | None = None, top_p: float | None = None
) -> Int[Array, "B"]:
    """Draws a token a row from softmax(logits), cut to the top_k likeliest, then to the top_p share of those."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        # The last kept token is the one with which the sum reaches top_p.
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
