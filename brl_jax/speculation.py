"""Speculative decoding: a small model drafts tokens, and one call of the large model reads them all.

Of the drafted tokens the large model accepts the first ones, by a rule that leaves its tokens, or their distribution,
unchanged (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

A refused token must leave no trace, and no cache is ever turned back. A round begins with caches that lack the last
tokens, which the round before accepted. One call reads these tokens and the drafted ones, returns the outputs of all,
and keeps only the accepted tokens in the cache (`kept`). So every mechanism needs just what it has anyway: outputs of
several tokens at a time, and a `count` of those that enter its cache. Rows accept different numbers of tokens, so each
has a cache with a single row.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import is_int, require
from brl_jax.sampling import likely


class Draft(NamedTuple):
    """A small model that drafts tokens for a large one, as an argument of `generate`.

    Attributes:
      model: a `DecoderLM` with the large model's vocabulary.
      variables: its variables, {"params": ...}.
      tokens: how many tokens it drafts for each call of the large model, at least 1.
    """

    model: nn.Module
    variables: Any
    tokens: int = 4


class Rows(NamedTuple):
    """What a round changes; the first axis of every array is the rows.

    Attributes:
      caches: of the large model and the draft, which lack the pending tokens.
      pending: (B, k + 1), the last accepted tokens.
      num_pending: (B,), how many tokens are pending, at least 1.
      tokens: (B, steps), the columns so far.
      columns: (B,), how many there are.
      ended: (B,).
    """

    caches: tuple[Any, Any]
    pending: Int[Array, "B k1"]
    num_pending: Int[Array, " B"]
    tokens: Int[Array, "B steps"]
    columns: Int[Array, " B"]
    ended: Any


def check_draft(model: Any, draft: Draft) -> None:
    """Raises ValueError unless `generate` can use the draft with this model."""
    require(
        is_int(draft.tokens) and draft.tokens >= 1,
        f"draft.tokens must be an integer of at least 1, got {draft.tokens!r}",
    )
    for name, each in (("model", model), ("draft.model", draft.model)):
        require(
            hasattr(each, "check_keeps"),
            f"{name} must be a DecoderLM to use a draft, got {type(each).__name__}",
        )
        each.check_keeps()
    sizes = [each.config.vocab_size for each in (model, draft.model)]
    require(sizes[0] == sizes[1], f"draft.model must have the model's {sizes[0]} tokens, got {sizes[1]}")


def speculate(
    model: Any,
    draft: Draft,
    variables: Any,
    prefix: Int[Array, "B P"],
    settings: Any,
    piece: int,
    **choice: Any,
) -> tuple[Int[Array, "B steps"], Int[Array, ""]]:
    """The columns after the prefix, and in how many rounds they were made; a round calls the large model once.

    Args:
      prefix: tokens of all rows, at least one.
      settings: `brl_jax.decoding._Settings`.
      piece: tokens that are read at a time.
      choice: greedy, top_k and top_p.
    """
    batch, length = prefix.shape
    steps = settings.forced.shape[1]
    models = ((model, variables), (draft.model, draft.variables))
    caches = []
    for each, own in models:
        cache = jax.tree.map(lambda x: jnp.repeat(x[None], batch, axis=0), each.init_cache(1, length + steps))
        for start in range(0, length - 1, piece):
            cache = _read(each, own, prefix[:, start : min(start + piece, length - 1)], cache)
        caches.append(cache)
    rows = Rows(
        caches=tuple(caches),
        pending=jnp.pad(prefix[:, -1:], ((0, 0), (0, draft.tokens))),
        num_pending=jnp.ones((batch,), jnp.int32),
        tokens=jnp.zeros((batch, steps), jnp.int32),
        columns=jnp.zeros((batch,), jnp.int32),
        ended=jnp.zeros((batch,), bool),
    )
    rows, rounds = _all_rounds(
        (model, draft.model), (variables, draft.variables), rows, settings, drafted=draft.tokens, **choice
    )
    return rows.tokens, rounds


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _read(model, variables, tokens, caches):
    """The rows' caches after tokens (B, T)."""
    return jax.vmap(lambda row, cache: model.apply(variables, row[None], cache=cache, method="hidden")[1])(
        tokens, caches
    )


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("drafted", "greedy", "top_k", "top_p"),
    donate_argnames="rows",
)
def _all_rounds(models, variables, rows: Rows, settings, *, drafted, greedy, top_k, top_p):
    def one_row(row, forced, num_forced, key):
        return _one_round(
            models, variables, row, forced, num_forced, key, settings, drafted, greedy, top_k, top_p
        )

    def one_round(state):
        rows, rounds = state
        keys = jax.random.split(settings.keys[rounds], rows.num_pending.shape[0])
        return jax.vmap(one_row)(rows, settings.forced, settings.num_forced, keys), rounds + 1

    # A round ends a row or adds a column, so there are enough keys.
    return jax.lax.while_loop(lambda state: ~state[0].ended.all(), one_round, (rows, jnp.int32(0)))


def _one_round(
    models, variables, row: Rows, forced, num_forced, key, settings, drafted: int, greedy: bool, top_k, top_p
) -> Rows:
    """Drafts `drafted` tokens of one row; the large model accepts the first ones and adds one more.

    A token of the prompt takes the place of a drafted one and is always accepted.
    """
    (large, small), (large_variables, small_variables) = models, variables
    large_cache, small_cache = row.caches
    numbers = jnp.arange(drafted + 1, dtype=jnp.int32)
    given = jnp.take(forced, row.columns + numbers, mode="clip")
    is_given = row.columns + numbers < num_forced
    keys = jax.random.split(key, drafted + 2)

    def scores(logits: Float[Array, "*L V"]) -> Float[Array, "*L V"]:
        """The logarithms of the probabilities; for a greedy choice anything in their order."""
        if greedy:
            return logits
        return jax.nn.log_softmax(likely(logits / settings.temperature, top_k=top_k, top_p=top_p))

    def draw(key: Any, scores: Float[Array, " V"]) -> Int[Array, ""]:
        return (jnp.argmax(scores) if greedy else jax.random.categorical(key, scores)).astype(jnp.int32)

    def choose(number: Any, logits: Float[Array, " V"]) -> tuple[Int[Array, ""], Float[Array, " V"]]:
        own = scores(logits)
        return jnp.where(is_given[number], given[number], draw(keys[number], own)), own

    def draft_one(state: Any, number: Any) -> Any:
        logits, cache = state
        token, own = choose(number, logits)
        logits, cache = small.apply(small_variables, token[None, None], cache=cache)
        return (logits[0, 0], cache), (token, own)

    logits, small_cache = _after_pending(small, small_variables, row.pending, row.num_pending, small_cache, 1)
    (logits, _), of_draft = jax.lax.scan(draft_one, (logits[0], small_cache), numbers[: drafted - 1])
    tokens, of_draft = jax.tree.map(
        lambda x, last: jnp.concatenate([x, last[None]]), of_draft, choose(drafted - 1, logits)
    )

    places = jnp.arange(2 * drafted + 1, dtype=jnp.int32)
    reads = jnp.where(
        places < row.num_pending,
        jnp.pad(row.pending, (0, drafted)),
        jnp.take(tokens, places - row.num_pending, mode="clip"),
    )
    logits, large_cache = _after_pending(
        large, large_variables, reads, row.num_pending, large_cache, drafted + 1
    )
    of_model = scores(logits)
    if greedy:
        accepts, rest = tokens == jnp.argmax(of_model[:drafted], axis=-1), of_model
    else:
        accepts, rest = _accept(keys[drafted], tokens, of_draft, of_model)
    number = jnp.cumprod(accepts | is_given[:drafted], dtype=jnp.int32).sum(dtype=jnp.int32)
    last = jnp.where(is_given[number], given[number], draw(keys[drafted + 1], rest[number]))
    new = jnp.where(numbers < number, jnp.pad(tokens, (0, 1)), last)
    count = number + 1

    limit = num_forced + settings.max_new_tokens
    stops = ~is_given & (new[:, None] == settings.stop_tokens[None]).any(axis=1)
    # Through the first stop token.
    until = jnp.where(stops.any(), jnp.argmax(stops) + 1, drafted + 2).astype(jnp.int32)
    added = jnp.where(row.ended, 0, jnp.minimum(jnp.minimum(count, until), limit - row.columns))
    columns = row.columns + added
    return Rows(
        caches=(large_cache, small_cache),
        pending=new,
        num_pending=count,
        tokens=row.tokens.at[jnp.where(numbers < added, row.columns + numbers, len(row.tokens))].set(
            new, mode="drop"
        ),
        columns=columns,
        ended=row.ended | (until <= added) | (columns >= limit),
    )


def _after_pending(
    model, variables, tokens: Int[Array, " T"], count, cache, number: int
) -> tuple[Float[Array, "L V"], Any]:
    """The logits of `number` tokens from the last pending one on, and the cache after the `count` pending tokens."""
    hidden, cache = model.apply(variables, tokens[None], cache=cache, kept=count, method="hidden")
    hidden = jax.lax.dynamic_slice_in_dim(hidden, count - 1, number, axis=1)
    return model.apply(variables, hidden, method="logits")[0], cache


def _accept(
    key: Any, tokens: Int[Array, " k"], of_draft: Float[Array, "k V"], of_model: Float[Array, "k1 V"]
) -> tuple[Any, Float[Array, "k1 V"]]:
    """Which tokens are accepted if all before them are, and the scores of the token after the last accepted one.

    A token is accepted with probability min(1, p / q), where the model gives it p and the draft q. Otherwise another
    is drawn from max(p - q, 0), so that its distribution is the model's (arXiv:2211.17192, appendix A.1).
    """
    q, p = jnp.exp(of_draft), jnp.exp(of_model)
    drawn = (jnp.arange(len(tokens)), tokens)
    accepts = jax.random.uniform(key, tokens.shape) * q[drawn] < p[drawn]
    rest = jnp.maximum(p[:-1] - q, 0)
    # Nothing is left if rounding refused a token although p equals q.
    rest = jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p[:-1])
    return accepts, jnp.concatenate([jnp.log(rest), of_model[-1:]])
