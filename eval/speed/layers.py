"""One transformer layer of each listed mechanism: forward, with its backward pass, and decoding.

A layer is a stack of one block as in the models (norms, mechanism, feed-forward network), with the mechanism's default
configuration. A mechanism without a causal form is measured in both directions, and does not decode.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.layers import MECHANISMS, Mechanism
from brl_jax.models.stack import Stack
from eval.speed.measure import Candidate, Case, check_equal, check_finite, compile_program
from eval.speed.options import SpeedOptions
from train.cli.summary import num_parameters

# The last tokens of the sequence are decoded one by one in one program, as `generate` does it.
_STEPS = 16


def cases(options: SpeedOptions, length: int) -> list[Case]:
    """One layer of each named mechanism at one length, on the same inputs."""
    chosen = {name: kind() for name, kind in MECHANISMS.items() if options.wants(name) and kind().group == 1}
    return [
        Case(name, 1 if config.linear_cost else 2, functools.partial(_make, name, options, length))
        for name, config in chosen.items()
    ]


def default_config(name: str, length: int) -> Mechanism:
    """A mechanism's default configuration, with its `max_length` raised to `length` if necessary."""
    config = MECHANISMS[name]()
    longest: int | None = getattr(config, "max_length", None)
    if longest is not None and longest < length:
        config = dataclasses.replace(config, max_length=length)  # type: ignore[call-arg]
    return config


def _make(name: str, options: SpeedOptions, length: int) -> Candidate:
    mechanism = default_config(name, length)
    dimensions = options.dimensions(is_causal=mechanism.causal)
    mechanism.check(dimensions)
    stack = Stack((mechanism,), dimensions)
    rng = np.random.default_rng(length)
    shape = (options.batch, length, dimensions.d_model)
    x, d_y = (jnp.asarray(rng.standard_normal(shape), dimensions.dtype) for _ in range(2))
    rest = nn.unbox(jax.jit(stack.init)(jax.random.key(0), x[:, :1]))
    params = rest.pop("params")

    def forward(params, rest, x):
        return stack.apply({"params": params, **rest}, x)[0]

    def forward_backward(params, rest, x, d_y):
        y, pull = jax.vjp(lambda params, x: forward(params, rest, x), params, x)
        return y, *pull(d_y)

    programs = {
        "forward": compile_program(forward, params, rest, x),
        "forward_backward": compile_program(forward_backward, params, rest, x, d_y),
    }
    y = programs["forward"].run()
    check_finite("output", y, x.shape)
    for name, gradient in zip(("parameters", "input"), programs["forward_backward"].run()[1:]):
        for leaf in jax.tree.leaves(gradient):
            check_finite(f"gradient of the {name}", leaf, leaf.shape)

    facts = {"causal": mechanism.causal, "parameters": num_parameters(params)}
    if mechanism.decodes:
        steps = min(_STEPS, length)
        before = x[:, : length - steps]

        def prefill(params, rest, before):
            cache = stack.init_cache(options.batch, length)
            if before.shape[1] == 0:
                return cache
            return stack.apply({"params": params, **rest}, before, cache=cache)[1]

        def decode(params, rest, tokens, cache):
            def step(cache, token):
                y, cache = stack.apply({"params": params, **rest}, token[:, None], cache=cache)
                return cache, y[:, 0]

            return jax.lax.scan(step, cache, jnp.moveaxis(tokens, 1, 0))

        cache = compile_program(prefill, params, rest, before).run()
        programs["step"] = compile_program(decode, params, rest, x[:, -steps:], cache, steps=steps)
        facts["state_bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        check_equal("decoding", jnp.moveaxis(programs["step"].run()[1], 0, 1), y[:, -steps:], options.dtype)
    return Candidate(programs, facts)
