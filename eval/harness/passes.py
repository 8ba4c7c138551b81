"""A function together with its backward pass, as one function to compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def both_passes(function: Callable, positions: Sequence[int] | None = None) -> Callable:
    """f(cotangent, *arguments) -> (the result, then the gradients of the arguments at these positions, or of all)."""

    def both(cotangent: Any, *arguments: Any) -> tuple:
        learned = range(len(arguments)) if positions is None else positions

        def of_some(*some: Any) -> Any:
            return function(*(dict(enumerate(arguments)) | dict(zip(learned, some))).values())

        out, pull = jax.vjp(of_some, *(arguments[n] for n in learned))
        return out, *pull(jax.tree.map(lambda d, x: d.astype(x.dtype), cotangent, out))

    return both
