"""What a run of tokens does to the state of a recurrence, from the functions that compute the recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.core.products import multiply_precisely
from brl_jax.attention.recurrent.decay import check_log_decay, clip_log_decay


class Summary(NamedTuple):
    """A and B of a run of tokens: the state after them is A S + B, if S is the state before them.

        summary = state_functions("deltanet").summarize(key, value, beta=beta)
        state = summary.apply(state)

    Attributes:
      transition: A. For each head a matrix (B, K, F, F), a factor of each feature (B, K, F, 1) or a single factor
        (B, K, 1, 1); None for the identity.
      added: B, the state after the tokens if it is zero before them.
    """

    transition: Float[Array, "B K #F #F"] | None
    added: Any

    def apply(self, state: Any) -> Any:
        """Returns the state after the tokens, from the state before them."""
        return jax.tree.map(lambda x, added: self._act(x) + added, state, self.added)

    def then(self, later: Summary) -> Summary:
        """Returns the summary of these tokens and of those that follow them. Associative."""
        transition = later.transition if self.transition is None else later._act(self.transition)
        return Summary(transition, later.apply(self.added))

    def _act(self, x: Float[Array, "B K F V"]) -> Float[Array, "B K F V"]:
        a = self.transition
        if a is None:
            return x
        return a * x if a.shape[-1] == 1 else multiply_precisely(a, x)


def summarize_sums(
    init: Callable[..., Any], extend: Callable[..., Any], key: Array, value: Array, log_decay: Any
) -> Summary:
    """The summary of a state that sums key_t value_t^T and may decay.

    Args:
      init: (B, K, H, value_dim=V) -> the state before the first token.
      extend: (query, key, value, state) -> the outputs and the state after the tokens.
    """
    batch, _, heads, size = key.shape
    _, added = extend(
        query=key, key=key, value=value, state=init(batch, heads, size, value_dim=value.shape[3])
    )
    if log_decay is None:
        return Summary(None, added)
    logs = clip_log_decay(check_log_decay(log_decay, key.shape, size).astype(jnp.float32))
    total = jnp.exp(jnp.sum(logs, axis=1))
    return Summary(total.reshape(batch, heads, -1, 1), added)


def summarize_delta(
    init: Callable[..., Any], extend: Callable[..., Any], key: Array, value: Array
) -> Summary:
    """The summary of a delta rule; the arguments are as for `summarize_sums`.

    The rule treats the columns of values and state separately. Columns that begin as the identity and get values of
    zero end as A, and those that begin as zero end as B.
    """
    batch, _, heads, size = key.shape
    state = init(batch, heads, size, value_dim=value.shape[3] + size)
    identity = jnp.eye(size, dtype=state.key_value.dtype)
    state = state._replace(key_value=state.key_value.at[..., value.shape[3] :].set(identity[None, None]))
    values = jnp.concatenate([value, jnp.zeros(key.shape, value.dtype)], axis=3)
    _, after = extend(query=key, key=key, value=values, state=state)
    added, transition = jnp.split(after.key_value, [value.shape[3]], axis=3)
    return Summary(transition, after._replace(key_value=added))
