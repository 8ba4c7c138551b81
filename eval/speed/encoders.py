"""Encoders that only infer: four layers and their forward pass, in the setting of BRL-Attention's figure 6.

Full attention, Performer, Linformer, local and BRL attention at the widths that the paper compares, bidirectional. The
same network in PyTorch, with `scaled_dot_product_attention` and the parameters of this package's full attention, must
give the same outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.layers import (
    BRLConfig,
    Dimensions,
    FullConfig,
    LinformerConfig,
    LocalConfig,
    Mechanism,
    PerformerConfig,
)
from brl_jax.models.stack import Stack
from eval.speed.functions import TORCH, has_torch, torch_device, wait_for_torch
from eval.speed.measure import Candidate, Case, Program, check_equal, check_finite, compile_program
from eval.speed.options import SpeedOptions
from train.cli.summary import num_parameters

NUM_LAYERS = 4
NAMES = ("full", "performer", "linformer", "local", "brl")


def mechanisms(length: int) -> dict[str, tuple[str, Mechanism]]:
    """For each row the name of its mechanism, and its configuration."""
    rows: dict[str, tuple[str, Mechanism]] = {
        "full": ("full", FullConfig()),
        "performer": ("performer", PerformerConfig()),
    }
    for k in (64, 128, 256):
        rows[f"linformer k {k}"] = ("linformer", LinformerConfig(num_projected=k, max_length=length))
    for w in (256, 512):
        rows[f"local w {w}"] = ("local", LocalConfig(window=w))
    for w in (256, 512):
        for m in (64, 128):
            rows[f"brl w {w} m {m}"] = ("brl", BRLConfig(window=w, num_compressed=m))
    return rows


def cases(options: SpeedOptions, length: int) -> list[Case]:
    """The encoders of the named mechanisms at one length, on the same inputs."""
    made = [
        Case(row, 1 if mechanism.linear_cost else 2, functools.partial(_make, mechanism, options, length))
        for row, (name, mechanism) in mechanisms(length).items()
        if options.wants(name)
    ]
    if has_torch(options):
        made.append(Case(TORCH, 2, functools.partial(_make_torch, options, length)))
    return made


def _network(mechanism: Mechanism, options: SpeedOptions, length: int) -> tuple[Stack, Any, jax.Array]:
    """A stack, its parameters and an input."""
    dimensions = options.dimensions(is_causal=False)
    mechanism.check(dimensions)
    stack = Stack((mechanism,) * NUM_LAYERS, dimensions)
    draws = np.random.default_rng(length).standard_normal((options.batch, length, dimensions.d_model))
    x = jnp.asarray(draws, dimensions.dtype)
    return stack, nn.unbox(jax.jit(stack.init)(jax.random.key(0), x[:, :1])), x


def _make(mechanism: Mechanism, options: SpeedOptions, length: int) -> Candidate:
    stack, variables, x = _network(mechanism, options, length)
    program = compile_program(lambda variables, x: stack.apply(variables, x)[0], variables, x)
    check_finite("output", program.run(), x.shape)
    facts = {"causal": True, "parameters": num_parameters(variables["params"])}
    return Candidate({"forward": program}, facts)


def _make_torch(options: SpeedOptions, length: int) -> Candidate:
    """The same network as the row "full", on PyTorch's threads; checked if full attention is quick enough."""
    import torch

    stack, variables, x = _network(FullConfig(), options, length)
    forward = torch_encoder(variables["params"], stack.dimensions, x)
    if length <= 4096:
        expected = jax.jit(lambda variables, x: stack.apply(variables, x)[0])(variables, x)
        with torch.inference_mode():
            got = jnp.asarray(forward().float().cpu().numpy())
        check_equal("PyTorch's encoder", got, expected, options.dtype)

    def start() -> Any:
        with torch.inference_mode():
            return forward()

    return Candidate({"forward": Program(start, None, wait=wait_for_torch)})


def torch_encoder(params: Any, dimensions: Dimensions, x: jax.Array) -> Callable[[], Any]:
    """A stack of full attention written for PyTorch: its output (B, T, D) on `x`, with these parameters."""
    import torch
    import torch.nn.functional as F

    d = dimensions
    assert (d.ffn, d.norm, d.use_bias, d.is_causal) == ("glu_relu", "layer", False, False)
    assert d.rope_theta is not None

    def load(array: Any) -> Any:
        dtype = getattr(torch, jnp.dtype(d.dtype).name)
        return torch.from_numpy(np.array(array.astype(jnp.float32))).to(torch_device(), dtype)

    block = jax.tree.map(load, params["layers_0"]["block_0"])
    final, start, length = load(params["final_norm"]["scale"]), load(x), x.shape[1]
    frequency = d.rope_theta ** (-torch.arange(0, d.head_dim, 2, dtype=torch.float64) / d.head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * frequency
    cos, sin = angle.cos().to(start), angle.sin().to(start)  # its type and device

    def norm(x: Any, scale: Any) -> Any:
        return F.layer_norm(x, (d.d_model,), scale, eps=1e-5)

    def rotate(x: Any) -> Any:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    def layer(x: Any, i: int) -> Any:
        mixer, network = block["mixer"], block["feed_forward"]
        y = norm(x, block["mixer_norm"]["scale"][i])
        heads = [
            (y @ mixer[name]["kernel"][i].flatten(1)).unflatten(-1, (d.num_heads, d.head_dim))
            for name in ("query", "key", "value")
        ]
        query, key, value = (h.transpose(1, 2) for h in (rotate(heads[0]), rotate(heads[1]), heads[2]))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + mixed @ mixer["out"]["kernel"][i].flatten(0, 1)
        y = norm(x, block["feed_forward_norm"]["scale"][i])
        hidden = F.relu(y @ network["gate"]["kernel"][i]) * (y @ network["up"]["kernel"][i])
        return x + hidden @ network["down"]["kernel"][i]

    def forward() -> Any:
        y = start
        for i in range(NUM_LAYERS):
            y = layer(y, i)
        return norm(y, final)

    return forward
