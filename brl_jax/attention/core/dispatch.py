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
import jax.numpy as jnp
from jax import lax

from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.by_platform import Form, by_platform, without_kept
from brl_jax.attention.core.checks import require

#: The backends that a caller can ask for by name. A function accepts those that it has, and None for its own choice.
Implementation = Literal["xla", "pallas", "pallas_interpret", "cudnn", "triton", "triton_interpret"]

_LOG = logging.getLogger("brl_jax")


class Backend(NamedTuple):
    """A function for calls that are lowered for one platform.

    Attributes:
      implementation: the name that asks for it; the same name followed by "_interpret" asks for its interpretation.
      run: `run(*operands, interpret=...)` returns the results; with a gradient, the results and what is kept for it.
      obstacle: `obstacle(*operands)` returns why `run` cannot take this call, or None if it can. It must not trace
        `run`.
      unsuited: whether XLA is the better choice for this call, so that only an explicit request takes `run`.
      gradient: as in `Form`, with `interpret=...`; None differentiates `run`, which then runs again.
    """

    implementation: str
    run: Callable[..., Any]
    obstacle: Callable[..., str | None]
    unsuited: bool = False
    gradient: Callable[..., Any] | None = None


def dispatch(
    name: str,
    implementation: Implementation | None,
    backends: Mapping[str, Sequence[Backend]],
    xla: Callable[..., Any] | Mapping[str, Form],
    *operands: Any,
    results: Any = None,
    kept: Any = (),
    plain: Callable[..., Any] | None = None,
    communicates: bool = False,
    cost: str = "linear",
) -> Any:
    """Runs one call of the function `name` on a backend of the platform it is lowered for, or through XLA.

    Args:
      name: the function's name, for messages.
      implementation: None takes, when the call is lowered, the first of the platform's backends that can take the call,
        and XLA if none can. If the reasons of all its backends stand against the call, a warning says so, once. "xla"
        takes XLA on every platform. A backend's name takes that backend, and refuses to be lowered for another
        platform; the name followed by "_interpret" interprets it on every platform.
      backends: from platform ("cuda", "tpu") to backends in order of preference.
      xla: `xla(*operands)`, or the forms of several platforms and of "default".
      operands: pytrees of arrays.
      results: what the function returns, as arrays or `jax.ShapeDtypeStruct`; None traces `plain` to find out.
      kept: likewise what the forms of `xla` and of backends with a gradient keep for it.
      plain: `plain(*operands)`, for derivatives other than the first in reverse mode. By default `xla`.
      communicates: whether the functions exchange values over a named axis, whose results are the same on all its
        devices. They are traced for all platforms, and keep the gradient that they have, of the first order.
      cost: that of `xla` in the number of tokens, for the warning.

    Raises:
      ValueError: for a name that this function does not have.
      NotImplementedError: if the backend that is asked for cannot take the call, or, at lowering time, if the call is
        lowered for a platform on which that backend does not run.
    """
    names = [None, "xla"]
    for backend in (backend for row in backends.values() for backend in row):
        names += [backend.implementation, f"{backend.implementation}_interpret"]
    check_implementation(implementation, *names)
    of_xla = {"default": without_kept(xla)} if callable(xla) else xla
    if plain is None:
        assert callable(xla)
        plain = xla

    def through_xla(platform: str) -> Form:
        return of_xla.get(platform, of_xla["default"])

    if implementation in (None, "xla"):
        rows = backends if implementation is None else {}
        choice = _Choice(name, rows, through_xla, kept, cost)
    else:
        choice = _named(name, implementation, backends, operands, kept)
    if communicates:
        # Its results vary over fewer mesh axes than its operands.
        forms = {platform: choice(platform, *operands).run for platform in ("cpu", *backends)}
        out = lax.platform_dependent(*operands, **forms, default=choice("default", *operands).run)
        return out[0]
    if results is None:
        results = jax.eval_shape(plain, *operands)
    return by_platform(choice, *operands, results=results, kept=kept, plain=plain)


class _Choice:
    """The form of a call on a platform: the first of its backends that can take the call, or XLA."""

    def __init__(
        self,
        name: str,
        backends: Mapping[str, Sequence[Backend]],
        xla: Callable[[str], Form],
        kept: Any,
        cost: str,
    ):
        self._name, self._backends, self._xla, self._kept, self._cost = name, backends, xla, kept, cost
        self._made: dict[str, Form] = {}

    def __call__(self, platform: str, *operands: Any) -> Form:
        if platform not in self._made:
            self._made[platform] = self._choose(platform, operands)
        return self._made[platform]

    def _choose(self, platform: str, operands: tuple[Any, ...]) -> Form:
        obstacles = []
        for backend in self._backends.get(platform, ()):
            if backend.unsuited:
                continue
            obstacle = backend.obstacle(*operands)
            if obstacle is None:
                return _form(backend, False, self._kept)
            obstacles.append(obstacle)
        if obstacles:
            why = "; ".join(dict.fromkeys(obstacles))
            _warn_once(
                f"{self._name} runs through XLA on the platform {platform!r}, at {self._cost} cost: {why}"
            )
        return self._xla(platform)


def _named(
    name: str,
    implementation: str,
    backends: Mapping[str, Sequence[Backend]],
    operands: tuple[Any, ...],
    kept: Any,
) -> Callable[..., Form]:
    """The form of the backend that is asked for, which must be able to take the call."""
    backend, native = next(
        (backend, platform)
        for platform, row in backends.items()
        for backend in row
        if implementation in (backend.implementation, f"{backend.implementation}_interpret")
    )
    obstacle = backend.obstacle(*operands)
    if obstacle is not None:
        raise NotImplementedError(f"{name} with implementation={implementation!r}: {obstacle}")
    interpreted = f"{backend.implementation}_interpret"
    form = _form(backend, implementation == interpreted, kept)

    def choose(platform: str, *operands: Any) -> Form:
        if implementation != interpreted and platform != native:
            lowered_for = "another" if platform == "default" else repr(platform)
            raise NotImplementedError(
                f"{name} with implementation={implementation!r} runs on the platform {native!r} alone, and this call "
                f"is lowered for {lowered_for}; ask for {interpreted!r} to interpret the kernel, for 'xla', or for "
                "None"
            )
        return form

    return choose


def _form(backend: Backend, interpret: bool, kept: Any) -> Form:
    run = functools.partial(backend.run, interpret=interpret)
    if backend.gradient is not None:
        return Form(run, functools.partial(backend.gradient, interpret=interpret))

    def with_kept(*operands: Any) -> tuple[Any, Any]:
        return run(*operands), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)

    return Form(with_kept)


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


@functools.cache
def _warn_once(message: str) -> None:
    _LOG.warning(message)
