"""Other libraries' functions, and our own window by a named backend, for comparison on an NVIDIA GPU.

`--references` names the ones to run. If one cannot run here, its row has a word instead of a number.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from eval.speed.measure import Candidate, NoNumber, Program
from eval.speed.options import SpeedOptions
from eval.speed.references import BETA, LOG_DECAY


class Reference(NamedTuple):
    """A function of another library.

    Attributes:
      like: the case of `eval.speed.functions.CASES` with the same results.
      function: (options, length) -> f(query, key, value) -> out, of PyTorch arrays on the GPU.
      modules: what it imports; PyTorch comes first.
      heads_first: whether its arrays are (B, N, n, H), and not (B, n, N, H).
    """

    like: str
    function: Callable[[SpeedOptions, int], Callable]
    modules: tuple[str, ...]
    heads_first: bool


def flex_window(options: SpeedOptions, length: int, device: str = "cuda", compiled: bool = True) -> Callable:
    """PyTorch's FlexAttention with a sliding window, compiled as its documentation asks."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(batch: Any, head: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (i - j < options.window)

    mask = create_block_mask(sees, None, None, length, length, device=device)
    attend: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return functools.partial(attend, block_mask=mask)


def _fla(options: SpeedOptions, length: int, *, module: str, name: str, how: Callable) -> Callable:
    """A function of flash-linear-attention, whose results are (out, state)."""
    function = getattr(importlib.import_module(module), name)
    return lambda query, key, value: how(functools.partial(function, scale=1.0), options, query, key, value)[
        0
    ]


def _linear(function: Callable, options: SpeedOptions, query: Any, key: Any, value: Any) -> Any:
    import torch

    query, key = (torch.nn.functional.elu(x) + 1 for x in (query, key))
    return function(query, key, value, normalize=True)


def _unit(key: Any) -> Any:
    import torch

    return torch.nn.functional.normalize(key.float(), dim=-1).to(key.dtype)


def _gates(key: Any) -> tuple[Any, Any]:
    """The strength and the log-decay of each token, as in our own cases."""
    import torch

    shape = key.shape[:3]
    return key.new_full(shape, BETA), torch.full(shape, LOG_DECAY, device=key.device)


def _delta(function: Callable, options: SpeedOptions, query: Any, key: Any, value: Any) -> Any:
    return function(query, _unit(key), value, beta=_gates(key)[0])


def _gated_delta(function: Callable, options: SpeedOptions, query: Any, key: Any, value: Any) -> Any:
    beta, log_decay = _gates(key)
    return function(query, _unit(key), value, g=log_decay, beta=beta)


def _of_fla(like: str, module: str, name: str, how: Callable) -> Reference:
    function = functools.partial(_fla, module=module, name=name, how=how)
    return Reference(like, function, ("torch", module), False)


#: flex is FlexAttention, fla is flash-linear-attention.
REFERENCES = {
    "flex_window": Reference("local", flex_window, ("torch", "torch.nn.attention.flex_attention"), True),
    "fla_linear": _of_fla("linear", "fla.ops.linear_attn", "chunk_linear_attn", _linear),
    "fla_deltanet": _of_fla("deltanet", "fla.ops.delta_rule", "chunk_delta_rule", _delta),
    "fla_gated_deltanet": _of_fla(
        "gated_deltanet", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _gated_delta
    ),
}
#: Our own causal window by a backend's name; by default cuDNN comes before Triton.
WINDOWS = {"cudnn_window": "cudnn", "triton_window": "triton"}
NAMES = (*WINDOWS, *REFERENCES)


def candidate(name: str, arrays: tuple[np.ndarray, ...], options: SpeedOptions) -> Candidate:
    """The reference's programs; NoNumber if a library or a GPU is missing."""
    reference = REFERENCES[name]
    for module in reference.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise NoNumber(f"not installed: {error}") from error
    import torch

    if not torch.cuda.is_available():
        raise NoNumber("no GPU: PyTorch finds no NVIDIA GPU")
    function = reference.function(options, arrays[0].shape[1])
    return programs(function, arrays, options.dtype, "cuda", heads_first=reference.heads_first)


def programs(
    function: Callable, arrays: tuple[np.ndarray, ...], dtype: str, device: str, *, heads_first: bool
) -> Candidate:
    """A function of PyTorch arrays, forward and with its backward pass.

    Arrays and results are (B, n, N, H). With `heads_first` the function's own are (B, N, n, H).
    """
    import torch

    def load(x: np.ndarray) -> Any:
        x = np.ascontiguousarray(x.transpose(0, 2, 1, 3) if heads_first else x)
        return torch.from_numpy(x).to(device, getattr(torch, dtype))

    query, key, value, d_out = map(load, arrays)
    learned = [x.clone().requires_grad_() for x in (query, key, value)]

    def turned(*results: Any) -> list[Any]:
        return [x.transpose(1, 2) if heads_first else x for x in results]

    def forward() -> Any:
        with torch.no_grad():
            return turned(function(query, key, value))[0]

    def both() -> Any:
        out = function(*learned)
        return turned(out, *torch.autograd.grad(out, learned, d_out))

    made = {"forward": forward, "forward_backward": both}
    return Candidate({name: Program(start, None, wait=wait_for_torch) for name, start in made.items()})


def wait_for_torch(result: Any) -> Any:
    """Waits for PyTorch's GPU, whose calls return before they are computed."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return result
