"""The choice of a backend: a table from platform to functions, consulted when a call is lowered.

Nothing here asks which platform this process has: a program that is compiled ahead of time on a CPU host for a TPU gets
the TPU's functions. Which generation of GPU kernels are for is the backends' own question
(`pallas_kernels.triton.core.bridge.target_capability`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.checks import require
from brl_jax.attention.core.derivatives import differentiable

#: The backends that a caller can ask for by name. A function accepts those that it has, and None for its own choice.
Implementation = Literal["xla", "pallas", "pallas_interpret", "cudnn", "triton", "triton_interpret"]

_LOG = logging.getLogger("brl_jax")


class Backend(NamedTuple):
    """The function that serves calls lowered for one platform.

    Attributes:
      implementation: the name that asks for it; the same name followed by "_interpret" asks for its interpretation.
      run: `run(*operands, interpret=...)`.
      obstacle: returns why `run` cannot serve this call, None if it can. It must not trace `run`.
      unsuited: whether XLA serves this call better, so that only an explicit request takes `run`.
    """

    implementation: str
    run: Callable[..., Any]
    obstacle: Callable[[], str | None]
    unsuited: bool = False


def dispatch(
    name: str,
    implementation: Implementation | None,
    backends: Mapping[str, Sequence[Backend]],
    xla: Callable[..., Any],
    *operands: Any,
    plain: Callable[..., Any] | None = None,
    communicates: bool = False,
    cost: str = "linear",
) -> Any:
    """Runs one call of the function `name` on the backend of the platform it is lowered for, or through XLA.

    Args:
      name: the function's name, for messages.
      implementation: None takes, when the call is lowered, the first of the platform's backends that serves the call,
        and XLA where none does. A call that no backend of its platform could serve logs a warning, once. "xla" takes
        XLA on every platform. A backend's name takes that backend, and refuses to be lowered for another platform; the
        name followed by "_interpret" interprets it on every platform.
      backends: the table from platform, as `jax.lax.platform_dependent` names them, to backends in order of preference.
      xla: `xla(*operands)`.
      operands: pytrees of arrays.
      plain: the function from which derivatives of gradients and forward-mode derivatives are taken (see
        `differentiable`); None if `xla` can be differentiated in every way.
      communicates: whether the functions exchange values over a named axis. They then keep the gradient that they
        have, of the first order: `differentiable` could not map them by `jax.vmap` over that axis.
      cost: that of `xla` in the number of tokens, for the warning.

    Raises:
      ValueError: for a name that this function does not have.
      NotImplementedError: if the backend that is asked for cannot serve the call, or, at lowering time, if the call is
        lowered for a platform on which that backend does not run.
    """
    names = [None, "xla"]
    for backend in (backend for row in backends.values() for backend in row):
        names += [backend.implementation, f"{backend.implementation}_interpret"]
    check_implementation(implementation, *names)

    def serve(fast: Callable[..., Any]) -> Callable[..., Any]:
        return fast if communicates else differentiable(fast, plain or xla)

    with_xla = xla if plain is None else serve(xla)
    if implementation == "xla":
        return with_xla(*operands)

    rows = {}
    for platform, candidates in backends.items():
        obstacles = []
        for backend in candidates:
            interpreted = f"{backend.implementation}_interpret"
            if implementation in (backend.implementation, interpreted):
                obstacle = backend.obstacle()
                if obstacle is not None:
                    raise NotImplementedError(f"{name} with implementation={implementation!r}: {obstacle}")
                if implementation == interpreted:
                    return serve(functools.partial(backend.run, interpret=True))(*operands)
                message = (
                    f"{name} with implementation={implementation!r} runs on the platform {platform!r} alone, and this "
                    f"call is lowered for {{platform}}; ask for {interpreted!r} to interpret the kernel, for 'xla', or "
                    "for None"
                )
                operands = _mark(operands, _native, platform, message)
                return serve(functools.partial(backend.run, interpret=False))(*operands)
            if implementation is not None or backend.unsuited or platform in rows:
                continue
            obstacle = backend.obstacle()
            if obstacle is None:
                rows[platform] = functools.partial(backend.run, interpret=False)
            else:
                obstacles.append(obstacle)
        if obstacles and platform not in rows:
            why = "; ".join(dict.fromkeys(obstacles))
            message = f"{name} runs through XLA on the platform {platform!r}, at {cost} cost: {why}"
            operands = _mark(operands, _fallback, platform, message)
    if not rows:
        return with_xla(*operands)
    return serve(lambda *operands: lax.platform_dependent(*operands, **rows, default=xla))(*operands)


def check_implementation(implementation: Any, *names: str | None) -> None:
    """Raises ValueError unless the implementation is one of the names."""
    *others, last = map(repr, names)
    require(
        implementation in names,
        f"implementation must be {', '.join(others)} or {last}, got {implementation!r}",
    )


def bias_obstacle(bias: Any) -> str | None:
    """Why kernels that add no bias cannot serve a call with this one; None if there is none."""
    if bias is None:
        return None
    return f"bias must be None, got {type(bias).__name__ if isinstance(bias, PositionBias) else 'an array'}"


def _identity(name: str) -> Primitive:
    """An identity, so that its lowering rules can look at the platform that a call is lowered for."""
    primitive = Primitive(name)

    @functools.partial(jax.jit, static_argnames=("platform", "message"))
    def lower(x: Any, *, platform: str, message: str) -> Any:
        return primitive.bind(x, platform=platform, message=message)

    primitive.def_impl(lower)
    primitive.def_abstract_eval(lambda x, **_: x)
    ad.deflinear2(primitive, lambda cotangent, x, **_: [cotangent])
    batching.defvectorized(primitive)
    return primitive


_native = _identity("runs_natively")
_fallback = _identity("falls_back_to_xla")


def _mark(operands: tuple[Any, ...], primitive: Primitive, platform: str, message: str) -> tuple[Any, ...]:
    """The operands, the first array of which passes through the primitive."""
    leaves, structure = jax.tree.flatten(operands)
    leaves[0] = primitive.bind(leaves[0], platform=platform, message=message)
    return jax.tree.unflatten(structure, leaves)


def _lower_native(context: mlir.LoweringRuleContext, x: Any, *, platform: str, message: str) -> list[Any]:
    others = [p for p in _platforms(context) if p != platform]
    if others:
        raise NotImplementedError(message.format(platform=" and ".join(map(repr, others))))
    return [x]


def _lower_fallback(context: mlir.LoweringRuleContext, x: Any, *, platform: str, message: str) -> list[Any]:
    if platform in _platforms(context):
        _warn_once(message)
    return [x]


def _platforms(context: mlir.LoweringRuleContext) -> tuple[str, ...]:
    """The platforms that the rule's operation is lowered for."""
    return tuple(context.platforms or context.module_context.platforms)


mlir.register_lowering(_native, _lower_native)
mlir.register_lowering(_fallback, _lower_fallback)


@functools.cache
def _warn_once(message: str) -> None:
    _LOG.warning(message)
