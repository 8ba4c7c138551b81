"""Recurrences over chunks on GPUs: the call that can be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.core.sizes import MULTIPROCESSORS, padded
from pallas_kernels.triton.recurrent import plan
from pallas_kernels.varying import vary_alike


class Operands(NamedTuple):
    """The arrays of a recurrence.

    Attributes:
      query, key: features; K divides N.
      key_value, key_sum: the state before the first token, float32. Without key_sum the weights are not summed.
      log_decay: the logarithm, at most 0, of the factor by which the state (or each row of it, one a feature) shrinks
        before each token, 0 for padding; None without decay.
      beta: the strength of the delta rule; None adds outer products without correcting them.
      segments: numbers that never fall along a row; the state has number 0. A token sees the tokens with its number.
        Padding has a number below 0, comes last in a row and holds zeros.
    """

    query: Float[Array, "B T N F"]
    key: Float[Array, "B T K F"]
    value: Float[Array, "B T K V"]
    key_value: Float[Array, "B K F V"]
    key_sum: Float[Array, "B K F"] | None = None
    log_decay: Float[Array, "B T K"] | Float[Array, "B T K F"] | None = None
    beta: Float[Array, "B T K"] | None = None
    segments: Int[Array, "B T"] | None = None


class Sums(NamedTuple):
    """What `recurrence` returns.

    Attributes:
      total: the weighted sums of the values. weight: the sums of the weights, or None.
      key_value, key: the state after the last token.
    """

    total: Float[Array, "B T N V"]
    weight: Float[Array, "B T N"] | None
    key_value: Float[Array, "B K F V"]
    key: Float[Array, "B K F"] | None


class Call(NamedTuple):
    """What is static about a call: the operands that it has by name, and types.

    by_feature: whether each feature of the keys has its own decay.
    """

    names: tuple[str, ...]
    precision: str
    out_dtype: str
    by_feature: bool

    def has(self, name: str) -> bool:
        """Whether an operand is there."""
        return name in self.names

    @property
    def scaled(self) -> bool:
        """Whether the delta rule's tokens have factors for what they read of the state and write to it.

        By feature those are in the arrays that are read and written.
        """
        return not self.by_feature and (self.has("log_decay") or self.has("segments"))


#: Of the operands of a call by name, of what `forward` kept, and of the gradients of its results.
Named = dict[str, Array]


def recurrence(operands: Operands, *, out_dtype: Any = jnp.float32) -> Sums:
    """Causal linear attention, or the delta rule, chunk by chunk.

    With D the decay between two tokens and a, e that from a chunk's beginning and to its end, M = tril(Q K^T * D)::

        total  = a (Q S) + M U
        weight = a (Q z) + M 1
        S      = factor S + (e K)^T U
        z      = factor z + (e K)^T 1

    U is V; with beta it is (I + A)^-1 diag(beta) (V - a K S), A the strictly lower part of diag(beta) (K K^T * D)
    (arXiv:2406.06484, section 3.2; with decay arXiv:2412.06464, section 3.3; by feature arXiv:2510.26692). Three or
    four launches forward. Every run gives the same bits.

    Args:
      operands: query, key and value of one dtype, float32, bfloat16 or float16. Products take this dtype and are
        summed in float32. float16 is computed in TF32, so that states do not overflow.
      out_dtype: of total.

    Returns:
      `Sums` in float32, with total in out_dtype.

    Raises:
      NotImplementedError: where `recurrence_unsupported` names a reason.
    """
    bridge.refuse(plan.recurrence_unsupported(operands.query, operands.key, operands.value))
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    precision = "ieee" if operands.query.dtype == jnp.float32 else "tf32"
    wide = jnp.float32 if operands.query.dtype == jnp.float16 else operands.query.dtype
    dtypes = dict.fromkeys(("query", "key", "value"), wide) | {"segments": jnp.int32}
    arrays = vary_alike(*(x.astype(dtypes.get(name, jnp.float32)) for name, x in given.items()))
    by_feature = operands.log_decay is not None and operands.log_decay.ndim == 4
    call = Call(tuple(given), precision, jnp.dtype(out_dtype).name, by_feature)
    found = dict(zip(_result_names(call), _recur(tuple(arrays), call)))
    return Sums(found["total"], found.get("weight"), found["key_value"], found.get("key"))


def _result_names(call: Call) -> tuple[str, ...]:
    return ("total", "key_value", *(("weight", "key") if call.has("key_sum") else ()))


def _kept_names(call: Call) -> tuple[str, ...]:
    """What the backward pass reads of the forward pass."""
    if not call.has("beta"):
        return ("states",)
    names = ("states", "corrected", "weights", "maps")
    if call.by_feature:
        return (*names, "queries", "reads", "writes", "factors")
    return (*names, "inverse", "starts", "ends", "factors") if call.scaled else (*names, "inverse")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _recur(arrays: tuple[Array, ...], call: Call) -> tuple[Array, ...]:
    return _run_forward((call, False), *arrays)


def _recur_forward(arrays, call: Call):
    found = _run_forward((call, True), *arrays)
    count = len(_result_names(call))
    return found[:count], (arrays, found[count:])


def _recur_backward(call: Call, saved, gradients):
    arrays, kept = saved
    gradients = (gradients[0].astype(arrays[0].dtype), *gradients[1:])
    found = _run_backward(call, *arrays, *kept, *gradients)
    return ((*found, None) if call.has("segments") else found,)


_recur.defvjp(_recur_forward, _recur_backward)


@bridge.fold_vmap
def _run_forward(static: tuple[Call, bool], *arrays: Array) -> tuple[Array, ...]:
    call, keep = static
    run = _delta_forward if call.has("beta") else _feature_forward if call.by_feature else _sum_forward
    found = run(dict(zip(call.names, arrays)), call, keep)
    return tuple(found[name] for name in _result_names(call) + (_kept_names(call) if keep else ()))


@bridge.fold_vmap
def _run_backward(call: Call, *arrays: Array) -> tuple[Array, ...]:
    names = call.names + _kept_names(call) + tuple(f"d_{name}" for name in _result_names(call))
    run = _delta_backward if call.has("beta") else _feature_backward if call.by_feature else _sum_backward
    found = run(dict(zip(names, arrays)), call)
    return tuple(found[name] for name in call.names if name != "segments")


class _Run:
    """The arrays of a call by name, its sizes, and its launches."""

    def __init__(self, arrays: Named, call: Call, choose: Callable[[int, Any], Any]):
        query, value = arrays["query"], arrays["value"]
        self.arrays, self.call, self.dtype = dict(arrays), call, query.dtype
        (self.batch, self.length, self.heads, self.features), (self.kv_heads, self.values) = (
            query.shape,
            value.shape[2:],
        )
        self.sizes = choose(self.features, self.dtype)
        self.chunks = -(-self.length // self.sizes.chunk)
        #: In the place of a result that is not written.
        self.none = jax.ShapeDtypeStruct((self.batch, 1), jnp.float32)

    def tokens(self, *rest: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.length, *rest), dtype)

    def keys(self, size: int) -> jax.ShapeDtypeStruct:
        """`size` numbers for each token and head of the keys."""
        return self.tokens(self.kv_heads, size, dtype=self.dtype)

    def queries(self, size: int) -> jax.ShapeDtypeStruct:
        """The same for heads of the queries."""
        return self.tokens(self.heads, size, dtype=self.dtype)

    def state(self, *rest: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.kv_heads, *rest), dtype)

    def states(self) -> jax.ShapeDtypeStruct:
        """The states of all chunks."""
        return self.state(self.chunks, self.features, self.values, dtype=self.dtype)

    def value_tile(self, launch: plan.Launch) -> int:
        return min(launch.values, padded(self.values))

    def value_tiles(self, launch: plan.Launch) -> int:
        return -(-self.values // self.value_tile(launch))

    def start(
        self, kernel: Any, launch: plan.Launch, names: str, results: Any, grid: tuple[int, int], **more: Any
    ) -> Any:
        """Starts a grid of programs for each row; an operand that the call lacks is replaced by another array."""
        call, sizes = self.call, self.sizes
        constants = {
            "T": self.length, "N": self.heads, "G": self.heads // self.kv_heads, "K": self.kv_heads,
            "F": self.features, "FP": padded(self.features), "V": self.values, "VP": padded(self.values),
            "VB": self.value_tile(launch), "CHUNK": sizes.chunk, "CHUNKS": self.chunks,
            "LEVELS": (sizes.chunk - 1).bit_length(), "STAGES": launch.num_stages, "PRECISION": call.precision,
            "DECAY": call.has("log_decay") and not call.by_feature, "SEGMENTS": call.has("segments"),
            "WEIGHS": call.has("key_sum"), "BY_FEATURE": call.by_feature, "SCALED": call.scaled,
        } | more  # fmt: skip
        operands = [self.arrays.get(name, self.arrays["key_value"]) for name in names.split()]
        return bridge.launch(kernel, operands, results, (*grid, self.batch), constants, launch)


# --- Sums of outer products ---


def _chunk_sums(run: _Run, names: str, reads: bool) -> tuple[Array, Array]:
    """What each chunk adds to the state, and with a decay by feature its factors."""
    from pallas_kernels.triton.recurrent import forward as kernels

    launch, heads = run.sizes.sums, run.heads if reads else run.kv_heads
    numbers = run.features * (run.values + run.call.has("key_sum"))
    factors = run.state(run.chunks, run.features) if run.call.by_feature else run.none
    return run.start(
        kernels.recurrent_sums, launch, names, (run.state(run.chunks, numbers), factors),
        (run.chunks, run.kv_heads * run.value_tiles(launch)),
        HEADS=heads, G=heads // run.kv_heads, BN=run.sizes.block, READS=reads,
    )  # fmt: skip


def _scan(run: _Run, names: str, *, backward: bool) -> Any:
    """The states between the chunks, those at the end and, backward, the gradients of the chunks' decays."""
    from pallas_kernels.triton.recurrent import forward as kernels

    sizes, weighs = run.sizes, run.call.has("key_sum")
    numbers = run.arrays["sums"].shape[3]
    parts = -(-numbers // sizes.scan)
    results = (
        run.state(run.chunks, numbers, dtype=run.dtype),
        run.state(run.features, run.values),
        run.state(run.features) if weighs else run.none,
        run.state(run.chunks, parts) if backward and run.call.has("log_decay") else run.none,
    )
    return run.start(
        kernels.recurrent_scan, plan.Launch(0, 4, 1), names, results, (parts, run.kv_heads),
        SIZE=run.features * run.values, E=numbers, BLOCK=sizes.scan, STAGES=sizes.scan_stages, BACKWARD=backward,
    )  # fmt: skip


def _sum_forward(arrays: Named, call: Call, keep: bool) -> Named:
    from pallas_kernels.triton.recurrent import forward as kernels

    run = _Run(arrays, call, plan.sum_sizes)
    sizes = run.sizes
    run.arrays["sums"], _ = _chunk_sums(run, "key value log_decay segments none", False)
    run.arrays["states"], key_value, key, _ = _scan(
        run, "sums log_decay segments key_value key_sum none", backward=False
    )
    total, weight = run.start(
        kernels.recurrent_outputs, sizes.outputs, "query key value log_decay segments states",
        (
            run.tokens(run.heads, run.values, dtype=call.out_dtype),
            run.tokens(run.heads) if call.has("key_sum") else run.none,
        ),
        (-(-run.length // sizes.rows), run.heads * run.value_tiles(sizes.outputs)), BM=sizes.rows, BN=sizes.block,
    )  # fmt: skip
    return {
        "total": total,
        "weight": weight,
        "key_value": key_value,
        "key": key,
        "states": run.arrays["states"],
    }


def _sum_backward(arrays: Named, call: Call) -> Named:
    from pallas_kernels.triton.recurrent import backward as kernels

    run = _Run(arrays, call, plan.sum_sizes)
    sizes, found, decay = run.sizes, {}, call.has("log_decay")
    run.arrays["sums"], _ = _chunk_sums(run, "query d_total log_decay segments d_weight", True)
    run.arrays["d_states"], found["key_value"], found["key_sum"], run.arrays["totals"] = _scan(
        run, "sums log_decay segments d_key_value d_key states", backward=True
    )

    def parts(launch, heads):
        """The gradients of queries or keys and what flows to or from them, in parts where values have several tiles."""
        tiles = run.value_tiles(launch)
        dtype = run.dtype if tiles == 1 else jnp.float32
        wide = jax.ShapeDtypeStruct((run.batch, tiles, run.length, heads, run.features), dtype)
        flow = jax.ShapeDtypeStruct(wide.shape[:-1], jnp.float32) if decay else run.none
        return wide, flow

    def whole(parts):
        return parts[:, 0] if parts.shape[1] == 1 else parts.sum(1).astype(run.dtype)

    launch = sizes.query_gradient
    d_query, run.arrays["query_flow"] = run.start(
        kernels.recurrent_query_gradient, launch, "query key value log_decay segments states d_total d_weight",
        parts(launch, run.heads), (-(-run.length // sizes.rows), run.heads * run.value_tiles(launch)),
        BM=sizes.rows, BN=sizes.block,
    )  # fmt: skip
    launch = sizes.key_gradient
    wide, flow = parts(launch, run.kv_heads)
    d_key, found["value"], run.arrays["key_flow"], run.arrays["ends"] = run.start(
        kernels.recurrent_key_gradient, launch, "query key value log_decay segments d_states d_total d_weight",
        (wide, run.keys(run.values), flow, flow),
        (-(-run.length // sizes.block), run.kv_heads * run.value_tiles(launch)), BN=sizes.block,
    )  # fmt: skip
    found |= {"query": whole(d_query), "key": whole(d_key)}
    if decay:
        count = run.arrays["totals"].shape[3]
        (found["log_decay"],) = run.start(
            kernels.recurrent_decay_gradient, plan.Launch(0, 4, 1),
            "log_decay segments query_flow key_flow ends totals",
            (run.tokens(run.kv_heads),), (run.chunks, run.kv_heads),
            QUERY_TILES=run.arrays["query_flow"].shape[1], KEY_TILES=run.arrays["key_flow"].shape[1],
            PARTS=count, PARTS_PADDED=padded(count),
        )  # fmt: skip
    return found


# --- Sums of outer products with a decay by feature ---


def _feature_scan(run: _Run, names: str, *, backward: bool) -> Any:
    """As `_scan`."""
    from pallas_kernels.triton.recurrent import by_feature as kernels

    features = max(1, run.sizes.scan // padded(run.values))
    results = (
        run.states(),
        run.state(run.features, run.values),
        run.state(run.chunks, run.features) if backward else run.none,
    )
    return run.start(
        kernels.feature_scan, plan.Launch(0, 4, 1), names, results, (-(-run.features // features), run.kv_heads),
        FB=features, STAGES=run.sizes.scan_stages, BACKWARD=backward,
    )  # fmt: skip


def _by_block(run: _Run, kernel: Any, launch: plan.Launch, names: str, results: Any, *, features: int,
              tiles: int, **more: Any) -> Any:  # fmt: skip
    """Starts a program for each block of tokens, head of the queries and tile."""
    more |= {"FB": min(features, padded(run.features)), "BN": run.sizes.block}
    grid = (-(-run.length // run.sizes.block), run.heads * tiles)
    return run.start(kernel, launch, names, results, grid, **more)


def _feature_forward(arrays: Named, call: Call, keep: bool) -> Named:
    from pallas_kernels.triton.recurrent import by_feature as kernels

    run = _Run(arrays, call, plan.feature_sizes)
    run.arrays["sums"], run.arrays["factors"] = _chunk_sums(run, "key value log_decay segments none", False)
    run.arrays["states"], last, _ = _feature_scan(run, "sums factors key_value none", backward=False)
    (total,) = _by_block(
        run, kernels.feature_outputs, run.sizes.outputs, "query key value log_decay segments states",
        (run.tokens(run.heads, run.values, dtype=call.out_dtype),),
        features=run.sizes.features, tiles=run.value_tiles(run.sizes.outputs), LATER=False,
    )  # fmt: skip
    return {"total": total, "key_value": last, "states": run.arrays["states"]}


def _feature_backward(arrays: Named, call: Call) -> Named:
    from pallas_kernels.triton.recurrent import by_feature as kernels

    run = _Run(arrays, call, plan.feature_sizes)
    sizes, found = run.sizes, {}

    def each_head(size: int) -> jax.ShapeDtypeStruct:
        """The gradient of a key's or value's `size` numbers from each head of the queries."""
        return run.tokens(run.heads, size, dtype=run.dtype if run.heads == run.kv_heads else jnp.float32)

    def grouped(gradient: Array) -> Array:
        """The sum over each group of heads."""
        return gradient.reshape(run.batch, run.length, run.kv_heads, -1, gradient.shape[3]).sum(3)

    run.arrays["sums"], run.arrays["factors"] = _chunk_sums(
        run, "query d_total log_decay segments none", True
    )
    run.arrays["d_states"], found["key_value"], run.arrays["totals"] = _feature_scan(
        run, "sums factors d_key_value states", backward=True
    )
    (d_value,) = _by_block(
        run, kernels.feature_outputs, sizes.value_gradient, "key query d_total log_decay segments d_states",
        (each_head(run.values),), features=sizes.features, tiles=run.value_tiles(sizes.value_gradient), LATER=True,
    )  # fmt: skip
    features = sizes.segmented_features if call.has("segments") else sizes.gradient_features
    tiles = -(-run.features // min(features, padded(run.features)))
    found["query"], d_key, d_log = _by_block(
        run, kernels.feature_gradients, sizes.gradients,
        "query key value d_total log_decay segments states d_states totals",
        (run.queries(run.features), each_head(run.features), run.tokens(run.heads, run.features)),
        features=features, tiles=tiles,
    )  # fmt: skip
    of_keys = {"value": grouped(d_value).astype(run.dtype), "key": grouped(d_key).astype(run.dtype)}
    return found | of_keys | {"log_decay": grouped(d_log)}


# --- The delta rule ---


def _summed(tokens: int) -> np.ndarray:
    """Whose logarithms are summed for each token of a chunk: at each level, to its end and from its beginning."""
    i, j = np.arange(tokens)[:, None], np.arange(tokens)

    def to_middle(level: int) -> np.ndarray:
        """Tokens of a first block of 2^level decay after themselves, and those of a second block until themselves."""
        return (i >> level == j >> level) & np.where((i >> level) % 2 == 1, j <= i, j > i)

    levels = range((tokens - 1).bit_length())
    return np.stack([*map(to_middle, levels), j > i, j <= i]).astype(np.float16)


def _delta(arrays: Named, call: Call) -> _Run:
    arrays = {"queries": arrays["query"], "reads": arrays["key"], "writes": arrays["key"]} | arrays
    run = _Run(arrays, call, plan.feature_delta_sizes if call.by_feature else plan.delta_sizes)
    if call.by_feature:
        run.arrays["sums"] = jnp.asarray(_summed(run.sizes.chunk))
    return run


def _spans(run: _Run) -> tuple[int, int]:
    """How many spans the chunks of a row are cut into, so that their programs fill the GPU, and their chunks.

    The backward pass reads the forward pass's maps, so it takes as many, although its batch may differ: `vmap` of a
    gradient has one for each cotangent.
    """
    if "maps" in run.arrays:
        spans = run.arrays["maps"].shape[2]
    else:
        programs = run.batch * run.kv_heads * run.value_tiles(run.sizes.states)
        most = run.sizes.spans if padded(run.features) <= 128 else 1
        spans = min(most, 2 * MULTIPROCESSORS // programs, run.chunks // run.sizes.least_span)
    span = -(-run.chunks // max(1, spans))
    return -(-run.chunks // span), span


def _by_span(run: _Run, kernel: Any, launch: plan.Launch, names: str, results: Any, *, tiles: int | None = None,
             **more: Any) -> Any:  # fmt: skip
    """Starts a program for each tile of the values, head and span, which walks the span's chunks."""
    spans, chunks = _spans(run)
    tiles = run.value_tiles(launch) if tiles is None else tiles
    return run.start(
        kernel, launch, names, results, (tiles, run.kv_heads * spans), SPAN=chunks, SPANS=spans, **more
    )


def _delta_forward(arrays: Named, call: Call, keep: bool) -> Named:
    from pallas_kernels.triton.recurrent import delta_forward as kernels

    run = _delta(arrays, call)
    sizes, keys, by_head = run.sizes, run.keys(run.features), run.state(run.length)
    results = {"weights": run.queries(sizes.chunk), "inverse": run.keys(sizes.chunk)}
    if call.by_feature:
        results |= {"queries": run.queries(run.features), "reads": keys, "writes": keys}
        results["factors"] = run.state(run.chunks, run.features)
    elif call.scaled:
        results |= {"starts": by_head, "ends": by_head, "factors": run.state(run.chunks)}
    names = ("weights", "inverse", "queries", "reads", "writes", "starts", "ends", "factors")
    found = run.start(
        kernels.delta_chunks, sizes.chunks, "query key beta log_decay segments sums",
        [results.get(name, run.none) for name in names], (run.chunks, run.heads),
        FB=min(sizes.features, padded(run.features)),
    )  # fmt: skip
    run.arrays |= {name: x for name, x in zip(names, found) if name in results}
    spans, _ = _spans(run)
    if spans > 1:
        (run.arrays["maps"],) = _by_span(
            run, kernels.delta_maps, sizes.maps,
            f"reads writes {'none' if call.by_feature else 'inverse'} value beta starts ends factors",
            (run.state(spans, run.features, run.features + run.values),),
            tiles=-(-run.features // run.value_tile(sizes.maps)) + run.value_tiles(sizes.maps),
        )  # fmt: skip
    else:
        run.arrays["maps"] = run.arrays["key_value"][:, :, None]  # one span, not read
    total, last, run.arrays["states"], run.arrays["corrected"] = _by_span(
        run, kernels.delta_outputs, sizes.states,
        "queries weights reads writes inverse value beta starts ends factors key_value maps",
        (
            run.tokens(run.heads, run.values, dtype=call.out_dtype),
            run.state(run.features, run.values),
            *((run.states(), run.keys(run.values)) if keep else 2 * (run.none,)),
        ),
        KEEP=keep,
    )  # fmt: skip
    return run.arrays | {"total": total, "key_value": last}


def _delta_backward(arrays: Named, call: Call) -> Named:
    from pallas_kernels.triton.recurrent import delta_backward as kernels

    run = _delta(arrays, call)
    sizes, kv_heads, values, found = run.sizes, run.kv_heads, run.keys(run.values), {}
    state, (spans, _) = (run.features, run.values), _spans(run)
    names = "queries weights reads writes inverse beta starts ends factors d_total"
    if spans > 1:
        (run.arrays["added"],) = _by_span(
            run, kernels.delta_gradient_maps, sizes.gradient_maps, names, (run.state(spans, *state),)
        )
    run.arrays["d_states"], found["key_value"] = _by_span(
        run, kernels.delta_state_gradient, sizes.state_gradient, f"{names} d_key_value maps added",
        (run.states(), run.state(*state)),
    )  # fmt: skip
    run.arrays["z"], found["value"], strength, run.arrays["d_p"], run.arrays["d_a"] = run.start(
        kernels.delta_pair_gradients, sizes.pair_gradient,
        "weights writes inverse value beta log_decay segments ends corrected d_total d_states",
        (values, values, run.tokens(kv_heads), run.queries(sizes.chunk), run.keys(sizes.chunk)),
        (run.chunks, kv_heads),
    )  # fmt: skip
    # Grouped heads take more registers.
    most = sizes.gradient_features if run.heads == kv_heads else max(16, sizes.gradient_features // 2)
    tile = min(most, padded(run.features))
    tiles = -(-run.features // tile)
    parts = jax.ShapeDtypeStruct((run.batch, tiles, run.length, kv_heads), jnp.float32)
    by_feature = run.tokens(kv_heads, run.features)
    d_log = by_feature if call.by_feature else parts if call.has("log_decay") else run.none
    found["query"], found["key"], strengths, logs = run.start(
        kernels.delta_gradients, sizes.gradient,
        "query key beta log_decay segments sums states corrected d_total d_states z d_p d_a starts ends factors",
        (run.queries(run.features), run.keys(run.features), parts, d_log), (run.chunks, kv_heads * tiles), FB=tile,
    )  # fmt: skip
    found["log_decay"] = logs if call.by_feature else logs.sum(1)
    found["beta"] = strength + strengths.sum(1)
    return found
