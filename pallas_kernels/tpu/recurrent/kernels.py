"""The kernels of the recurrence: one pass from the first chunk to the last, and one back, with the state in VMEM."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.tpu.recurrent.chunk import CHUNK, ROWS, Chunk, State, walk
from pallas_kernels.tpu.recurrent.plan import RecurrentCall
from pallas_kernels.varying import result_like

#: Arrays by name: query, key, value and decays are (batch, tokens, heads * size); numbers (batch, key heads, rows,
#: tokens); totals (batch, key heads, blocks, chunks, value_dim); segment (batch, 1, 1, tokens). The state is key_value
#: (batch, key heads, features, value_dim) and, if weights are summed, key (batch, key heads, rows, features).
Arrays = dict[str, Array]


def _input_names(call: RecurrentCall) -> list[str]:
    names = ["query", "key", "value", "decays"] if call.by_feature else ["query", "key", "value"]
    names += ["numbers"] if call.numbers else []
    names += ["totals"] if call.totals else []
    return names + (["segment"] if call.segments else [])


def _state_names(call: RecurrentCall) -> list[str]:
    return ["key_value", "key_sum"] if call.weighs else ["key_value"]


def _input_specs(call: RecurrentCall, *, backward: bool) -> dict[str, pl.BlockSpec]:
    specs = {
        "query": call.by_token(call.group * call.features, backward=backward),
        "key": call.by_token(call.features, backward=backward),
        "value": call.by_token(call.value_dim, backward=backward),
        "decays": call.by_token(call.features, backward=backward),
        "numbers": call.by_row(ROWS, backward=backward),
        "totals": call.by_block(call.chunks, call.value_dim, backward=backward),
        "segment": call.by_row(1, backward=backward, by_head=False),
    }
    return {name: specs[name] for name in _input_names(call)}


def _output_specs(call: RecurrentCall, *, backward: bool) -> list[pl.BlockSpec]:
    """Returns the specs of the values' and the weights' sums."""
    total = call.by_token(call.group * call.value_dim, backward=backward)
    return [total, call.by_row(call.group, backward=backward)] if call.weighs else [total]


def _state_shapes(call: RecurrentCall) -> list[tuple[int, int]]:
    return [(call.features, call.value_dim), (ROWS, call.features)][: len(_state_names(call))]


def _load(refs: dict[str, Any], call: RecurrentCall) -> list[list[Chunk]]:
    """Returns the chunks of each head in a grid step, in float32."""

    def head(h: int, number: int) -> Chunk:
        tokens = slice(number * CHUNK, (number + 1) * CHUNK)

        def part(name: str, place: int, size: int) -> Array:
            return refs[name][0, tokens, place * size : (place + 1) * size].astype(jnp.float32)

        found: dict[str, Array] = {}
        if call.numbers:
            rows = refs["numbers"][0, h, :, tokens]
            columns = rows.T
            for place, name in enumerate(call.numbers):
                at = slice(place, place + 1)
                found[name] = rows[at] if name == "log_decay" else columns[:, at]
        return Chunk(
            tuple(part("query", h * call.group + g, call.features) for g in range(call.group)),
            part("key", h, call.features),
            part("value", h, call.value_dim),
            found.get("start"),
            found.get("end"),
            part("decays", h, call.features) if call.by_feature else found.get("log_decay"),
            found.get("beta"),
            refs["totals"][0, h, 0, number : number + 1, :] if call.totals else None,
            refs["segment"][0, 0, :, tokens] if call.segments else None,
        )

    return [[head(h, number) for number in range(call.chunks)] for h in range(call.heads)]


def _get_states(refs: Any, call: RecurrentCall, *, block: bool = False) -> list[State]:
    """Returns the heads' states, from references to (1, heads, ...) or to (1, heads, 1, ...)."""
    at = (0,) if block else ()
    return [
        State(*(ref[(0, h, *at)] for ref in refs), *([None] * (2 - len(refs)))) for h in range(call.heads)
    ]


def _set_states(refs: Any, states: list[State], *, block: bool = False) -> None:
    at = (0,) if block else ()
    for h, state in enumerate(states):
        for ref, x in zip(refs, state):
            ref[(0, h, *at)] = x


def _forward_kernel(*refs, call: RecurrentCall):
    given = iter(refs)
    take = lambda count: [next(given) for _ in range(count)]  # noqa: E731
    count = len(_state_names(call))
    first, inputs, outputs = take(count), take(len(_input_names(call))), take(count)
    last, before, carried = take(count), take(count), take(count)

    @pl.when(pl.program_id(2) == 0)
    def _():
        for ref, x in zip(carried, first):
            ref[...] = x[...]

    states = _get_states(carried, call)
    _set_states(before, states, block=True)
    arrays = dict(zip(_input_names(call), inputs))
    found, states = walk(_load(arrays, call), states, arrays["key"].dtype)
    for h, chunks in enumerate(found):
        for number, made in enumerate(chunks):
            tokens = slice(number * CHUNK, (number + 1) * CHUNK)
            for g in range(call.group):
                place = h * call.group + g
                width = slice(place * call.value_dim, (place + 1) * call.value_dim)
                outputs[0][0, tokens, width] = made.total[g]
                if made.weight is not None:
                    outputs[1][0, h, g : g + 1, tokens] = made.weight[g][:1]
    _set_states(carried, states)
    for ref, x in zip(last, carried):
        ref[...] = x[...]


def recurrent_forward(state: Arrays, arrays: Arrays, call: RecurrentCall) -> tuple[list, Arrays, Arrays]:
    """Returns the sums of values and weights, the last state, and the states before all grid steps."""
    key, names, shapes = arrays["key"], _state_names(call), _state_shapes(call)
    batch, heads = state["key_value"].shape[:2]
    padded = key.shape[1]
    sums = [(batch, padded, heads * call.group * call.value_dim), (batch, heads, call.group, padded)]
    specs = [call.by_head(*shape) for shape in shapes]
    results = [*sums[: len(names)], *((batch, heads, *shape) for shape in shapes)]
    results += [(batch, heads, call.blocks, *shape) for shape in shapes]
    made = pl.pallas_call(
        functools.partial(_forward_kernel, call=call),
        grid=(batch, heads // call.heads, call.blocks),
        in_specs=[*specs, *_input_specs(call, backward=False).values()],
        out_specs=[
            *_output_specs(call, backward=False),
            *specs,
            *(call.by_block(*shape, backward=False) for shape in shapes),
        ],
        out_shape=[result_like(key, shape, jnp.float32) for shape in results],
        scratch_shapes=[pltpu.VMEM((1, call.heads, *shape), jnp.float32) for shape in shapes],
        compiler_params=_parameters(call),
        interpret=call.interpret,
        name="recurrent_forward",
    )(*(state[name] for name in names), *(arrays[name] for name in _input_names(call)))
    count = len(names)
    states = (dict(zip(names, made[i * count : (i + 1) * count])) for i in (1, 2))
    return made[:count], *states


def _backward_kernel(*refs, call: RecurrentCall):
    given = iter(refs)
    take = lambda count: [next(given) for _ in range(count)]  # noqa: E731
    names = _input_names(call)
    count, moving = len(_state_names(call)), [name for name in names if name != "segment"]
    before, grads, grads_last, inputs = take(count), take(count), take(count), take(len(names))
    outputs, first, carried = take(len(moving)), take(count), take(count)

    @pl.when(pl.program_id(2) == 0)
    def _():
        for ref, x in zip(carried, grads_last):
            ref[...] = x[...]

    arrays = dict(zip(names, inputs))
    heads = _load(arrays, call)
    segments = [[chunk.segment for chunk in chunks] for chunks in heads]

    def attend(heads, states):
        chunks = [[c._replace(segment=s) for c, s in zip(*pair)] for pair in zip(heads, segments)]
        return walk(chunks, states, arrays["key"].dtype)

    plain = [[chunk._replace(segment=None) for chunk in chunks] for chunks in heads]
    made, pull = jax.vjp(attend, plain, _get_states(before, call, block=True))
    top = jax.lax.broadcasted_iota(jnp.int32, (ROWS, CHUNK), 0) == 0
    changes: list[list[Any]] = [[] for _ in heads]
    for h, chunks in enumerate(made[0]):
        for number, chunk in enumerate(chunks):
            tokens = slice(number * CHUNK, (number + 1) * CHUNK)
            places = [h * call.group + g for g in range(call.group)]
            total = [grads[0][0, tokens, p * call.value_dim : (p + 1) * call.value_dim] for p in places]
            weight = None
            if chunk.weight is not None:
                weight = [jnp.where(top, grads[1][0, h, g : g + 1, tokens], 0.0) for g in range(call.group)]
            changes[h].append(chunk._replace(total=total, weight=weight))
    d_heads, d_states = pull((changes, _get_states(carried, call)))
    results = dict(zip(moving, outputs))
    for h, chunks in enumerate(d_heads):
        for number, chunk in enumerate(chunks):
            _store(results, h, number, chunk, call)
    _set_states(carried, d_states)
    for ref, x in zip(first, carried):
        ref[...] = x[...]


def _store(results: dict[str, Any], h: int, number: int, chunk: Chunk, call: RecurrentCall) -> None:
    """Writes the gradients of one chunk and head."""
    tokens = slice(number * CHUNK, (number + 1) * CHUNK)

    def put(name: str, place: int, x: Array) -> None:
        size = x.shape[1]
        results[name][0, tokens, place * size : (place + 1) * size] = x.astype(results[name].dtype)

    for g, x in enumerate(chunk.query):
        put("query", h * call.group + g, x)
    put("key", h, chunk.key)
    put("value", h, chunk.value)
    if call.by_feature and chunk.log_decay is not None:
        put("decays", h, chunk.log_decay)
    if call.numbers:
        lane = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, ROWS), 1)
        row = jax.lax.broadcasted_iota(jnp.int32, (ROWS, CHUNK), 0)
        columns, rows = jnp.zeros((CHUNK, ROWS), jnp.float32), jnp.zeros((ROWS, CHUNK), jnp.float32)
        for place, name in enumerate(call.numbers):
            if name == "log_decay":
                rows = jnp.where(row == place, getattr(chunk, name), rows)
            else:
                columns = jnp.where(lane == place, getattr(chunk, name), columns)
        results["numbers"][0, h, :, tokens] = rows + columns.T
    if call.totals:
        results["totals"][0, h, 0, number : number + 1, :] = chunk.total


def recurrent_backward(
    before: Arrays, grads: list[Float[Array, "..."]], grads_last: Arrays, arrays: Arrays, call: RecurrentCall
) -> tuple[Arrays, Arrays]:
    """Returns the gradients of the first state and of the arrays except the segments."""
    names, shapes = _state_names(call), _state_shapes(call)
    batch, heads = before["key_value"].shape[:2]
    specs = _input_specs(call, backward=True)
    moving = [name for name in specs if name != "segment"]
    states = [call.by_head(*shape) for shape in shapes]
    made = pl.pallas_call(
        functools.partial(_backward_kernel, call=call),
        grid=(batch, heads // call.heads, call.blocks),
        in_specs=[
            *(call.by_block(*shape, backward=True) for shape in shapes),
            *_output_specs(call, backward=True),
            *states,
            *specs.values(),
        ],
        out_specs=[*(specs[name] for name in moving), *states],
        out_shape=[result_like(grads[0], arrays[name].shape, arrays[name].dtype) for name in moving]
        + [result_like(grads[0], grads_last[name].shape, jnp.float32) for name in names],
        scratch_shapes=[pltpu.VMEM((1, call.heads, *shape), jnp.float32) for shape in shapes],
        compiler_params=_parameters(call),
        interpret=call.interpret,
        name="recurrent_backward",
    )(*(before[n] for n in names), *grads, *(grads_last[n] for n in names), *(arrays[n] for n in specs))
    return dict(zip(names, made[len(moving) :])), dict(zip(moving, made))


def _parameters(call: RecurrentCall) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=call.vmem_limit
    )
