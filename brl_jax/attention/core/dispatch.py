"""The choice of a backend: a table from platform to functions, consulted when a call is lowered.

Nothing here asks which platform this process has: a program that is compiled ahead of time on a CPU host for a TPU gets
the TPU's functions. Which generation of GPU kernels are for is the backends' own question
(`pallas_kernels.triton.core.bridge.target_capability`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

import pallas_kernels as kernels
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
      unsupported: `unsupported(*operands)` returns why `run` cannot take this call, or None if it can, without tracing
        `run`.
      unsuited: whether XLA is the better choice for this call, so that only an explicit request takes `run`.
      gradient: as in `Form`, with `interpret=...`; None differentiates `run`, which then runs again.
    """

    implementation: str
    run: Callable[..., Any]
    unsupported: Callable[..., str | None]
    unsuited: bool = False
    gradient: Callable[..., Any] | None = None


def triton_backend(
    run: Callable[..., Any],
    unsupported: Callable[..., str | None],
    unsuited: bool = False,
    gradient: Callable[..., Any] | None = None,
) -> Backend:
    """The backend of a Triton kernel.

    TRITON_INTERPRET=1 switches a whole process to Triton's interpreter. In such a process only a request by name takes
    the kernel, because the user is probably debugging another one.

    Args:
      run: `run(*operands)` launches the kernel, compiled or interpreted as the process has chosen.
      unsupported, unsuited: as in `Backend`.
      gradient: as in `Backend`, without `interpret`.
    """

    def checked(*operands: Any, interpret: bool) -> Any:
        kernels.triton.check_interpretation(interpret)
        return run(*operands)

    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    checked_gradient = None if gradient is None else lambda *given, interpret: gradient(*given)
    return Backend("triton", checked, unsupported, unsuited or interprets, checked_gradient)


def dispatch(
    name: str,
    implementation: Implementation | None,
    backends: Mapping[str, Sequence[Backend]],
    xla: Callable[..., Any],
    *operands: Any,
    forms: Mapping[str, Form] | None = None,
    results: Any = None,
    kept: Any = (),
    axis_name: str | None = None,
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
      xla: `xla(*operands)` by JAX's operations, differentiable any number of times.
      operands: pytrees of arrays.
      forms: how XLA computes the same on some platforms and on all others ("default"); None for `xla` on all.
      results: what the function returns, as arrays or `jax.ShapeDtypeStruct`; None traces `xla` to find out.
      kept: what `forms` and backends with a gradient keep for it, given in the same way.
      axis_name: as in `by_platform`.
      cost: how the cost of `xla` grows with the tokens, for the warning.

    Raises:
      ValueError: for a name that this function does not have.
      NotImplementedError: if the backend that is asked for cannot take the call, or, at lowering time, if the call is
        lowered for a platform on which that backend does not run.
    """
    names: list[str | None] = [None, "xla"]
    suited = cudnn = False
    for row in backends.values():
        for backend in row:
            names += [backend.implementation, f"{backend.implementation}_interpret"]
            if implementation is None and not backend.unsuited:
                suited, cudnn = True, cudnn or backend.implementation == "cudnn"
    if implementation not in names:
        check_implementation(implementation, *names)
    rows = backends if implementation is None else {}
    if forms is None:
        if implementation in (None, "xla") and not suited:
            return xla(*operands)
        forms = {"default": without_kept(xla)}

    if implementation in (None, "xla"):
        choice: Callable[..., Form] = _Choice(name, rows, forms, cost)
    else:
        choice = _named(name, implementation, backends, operands)
    if results is None:
        results = jax.eval_shape(xla, *operands)
    if cudnn:  # takes nothing wider
        cudnn = any(x.dtype.itemsize == 2 for x in jax.tree.leaves(operands))
    return by_platform(
        choice,
        *operands,
        results=results,
        kept=kept,
        plain=xla,
        axis_name=axis_name,
        needs_devices=cudnn or str(implementation).endswith("_interpret"),
    )


class _Choice:
    """The form of a call on a platform: the first of its backends that can take the call, or XLA."""

    def __init__(
        self,
        name: str,
        backends: Mapping[str, Sequence[Backend]],
        forms: Mapping[str, Form],
        cost: str,
    ):
        self._name, self._backends, self._forms, self._cost = name, backends, forms, cost
        self._made: dict[str, Form] = {}

    def described_by(self) -> Any:
        return self._name, self._backends, self._forms, self._cost

    def __call__(self, platform: str, *operands: Any) -> Form:
        if platform not in self._made:
            self._made[platform] = self._choose(platform, operands)
        return self._made[platform]

    def _choose(self, platform: str, operands: tuple[Any, ...]) -> Form:
        reasons = []
        for backend in self._backends.get(platform, ()):
            if backend.unsuited:
                continue
            reason = backend.unsupported(*operands)
            if reason is None:
                return _form(backend, False)
            reasons.append(reason)
        if reasons:
            why = "; ".join(dict.fromkeys(reasons))
            _warn_once(
                f"{self._name} runs through XLA on the platform {platform!r}, at {self._cost} cost: {why}"
            )
        return self._forms.get(platform, self._forms["default"])


def _named(
    name: str,
    implementation: str,
    backends: Mapping[str, Sequence[Backend]],
    operands: tuple[Any, ...],
) -> Callable[..., Form]:
    """The form of the backend that is asked for, which must be able to take the call."""
    backend, native = next(
        (backend, platform)
        for platform, row in backends.items()
        for backend in row
        if implementation in (backend.implementation, f"{backend.implementation}_interpret")
    )
    reason = backend.unsupported(*operands)
    if reason is not None:
        raise NotImplementedError(f"{name} with implementation={implementation!r}: {reason}")
    interpreted = f"{backend.implementation}_interpret"
    form = _form(backend, implementation == interpreted)

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


def _form(backend: Backend, interpret: bool) -> Form:
    run = functools.partial(backend.run, interpret=interpret)
    if backend.gradient is None:
        return without_kept(run)
    return Form(run, functools.partial(backend.gradient, interpret=interpret))


def check_implementation(implementation: Any, *names: str | None) -> None:
    """Raises ValueError unless the implementation is one of the names."""
    *others, last = map(repr, names)
    require(
        implementation in names,
        f"implementation must be {', '.join(others)} or {last}, got {implementation!r}",
    )


def bias_unsupported(bias: Any) -> str | None:
    """Why kernels that add no bias cannot compute a call with this one; None without a bias."""
    if bias is None:
        return None
    return f"bias must be None, got {type(bias).__name__ if isinstance(bias, PositionBias) else 'an array'}"


@functools.cache
def _warn_once(message: str) -> None:
    _LOG.warning(message)
