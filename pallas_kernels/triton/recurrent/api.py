"""Recurrences over chunks on GPUs: the call that can be differentiated."""

from __future__ import annotations

import functools
import inspect
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

    def flags(self) -> dict[str, Any]:
        """What all kernels are told."""
        return {
            "DECAY": self.has("log_decay") and not self.by_feature,
            "SEGMENTS": self.has("segments"),
            "PRECISION": self.precision,
        }


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
    reason = plan.recurrence_unsupported(operands.query, operands.key, operands.value)
    if reason is not None:
        raise NotImplementedError(reason)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _recur(arrays: tuple[Array, ...], call: Call) -> tuple[Array, ...]:
    return _run_forward(call, False)(*arrays)


def _recur_forward(arrays, call: Call):
    found = _run_forward(call, True)(*arrays)
    count = len(_result_names(call))
    return found[:count], (arrays, found[count:])


def _recur_backward(call: Call, saved, gradients):
    arrays, kept = saved
    gradients = (gradients[0].astype(arrays[0].dtype), *gradients[1:])
    found = _run_backward(call)(*arrays, *kept, *gradients)
    return ((*found, None) if call.has("segments") else found,)


_recur.defvjp(_recur_forward, _recur_backward)


@functools.lru_cache(maxsize=64)
def _run_forward(call: Call, keep: bool) -> Callable[..., tuple[Array, ...]]:
    def run(*arrays):
        results, kept = forward(dict(zip(call.names, arrays)), call, keep)
        return *(results[name] for name in _result_names(call)), *kept.values()

    return bridge.fold_vmap(run)


@functools.lru_cache(maxsize=64)
def _run_backward(call: Call) -> Callable[..., tuple[Array, ...]]:
    names = call.names + kept_names(call) + tuple(f"d_{name}" for name in _result_names(call))

    def run(*arrays):
        found = backward(dict(zip(names, arrays)), call)
        return tuple(found[name] for name in call.names if name != "segments")

    return bridge.fold_vmap(run)


def kept_names(call: Call) -> tuple[str, ...]:
    """What the backward pass reads of the forward pass."""
    if not call.has("beta"):
        return ("states",)
    names = ("states", "corrected", "weights", "maps")
    if call.by_feature:
        return (*names, "queries", "reads", "writes", "factors")
    return (*names, "inverse", "starts", "ends", "factors") if call.scaled else (*names, "inverse")


def forward(arrays: Named, call: Call, keep: bool) -> tuple[Named, Named]:
    """The results by name, and what the backward pass reads by `kept_names`; without `keep` nothing."""
    run = _FORWARD[call.by_feature, call.has("beta")]
    return run(arrays, call, keep)


def backward(arrays: Named, call: Call) -> Named:
    """The gradients by operand. arrays: operands, what was kept, and the gradients of the results as d_total, ..."""
    run = _BACKWARD[call.by_feature, call.has("beta")]
    return run(arrays, call)


class _Shape(NamedTuple):
    """Sizes of a call."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    features: int
    values: int
    dtype: Any

    @classmethod
    def of(cls, arrays: Named) -> _Shape:
        query, value = arrays["query"], arrays["value"]
        (batch, length, heads, features), (kv_heads, values) = query.shape, value.shape[2:]
        return cls(batch, length, heads, kv_heads, features, values, query.dtype)

    def tokens(self, *rest: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.length, *rest), dtype)

    def state(self, *rest: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.kv_heads, *rest), dtype)

    @property
    def none(self) -> jax.ShapeDtypeStruct:
        """In the place of a result that is not written."""
        return jax.ShapeDtypeStruct((self.batch, 1), jnp.float32)

    def value_tile(self, launch: plan.Launch) -> int:
        return min(launch.values, padded(self.values))

    def value_tiles(self, launch: plan.Launch) -> int:
        return -(-self.values // self.value_tile(launch))

    def constants(self, call: Call, launch: plan.Launch, chunk: int, **more: Any) -> dict[str, Any]:
        sizes = {
            "T": self.length, "F": self.features, "FP": padded(self.features), "V": self.values,
            "VB": self.value_tile(launch), "CHUNK": chunk,
        }  # fmt: skip
        return sizes | call.flags() | more


def _take(arrays: Named, names: str) -> list[Array]:
    """Operands by name, with some other array in the place of one that the call lacks."""
    return [arrays.get(name, arrays["key_value"]) for name in names.split()]


def _start(kernel: Any, launch: plan.Launch, arrays: Any, results: Any, grid: Any, constants: Any) -> Any:
    return bridge.launch(
        kernel, arrays, results, grid, constants,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


# --- Sums of outer products ---


def _chunk_sums(
    arrays: Named, call: Call, sizes: plan.SumSizes | plan.FeatureSizes, x: str, y: str, weights: str, reads: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """What each chunk adds to the state, and with a decay by feature its factors."""
    from pallas_kernels.triton.recurrent import forward as kernels

    shape = _Shape.of(arrays)
    none = arrays["key_value"]
    weighs = call.has("key_sum")
    numbers = shape.features * (shape.values + weighs)
    heads = shape.heads if reads else shape.kv_heads
    chunks = -(-shape.length // sizes.chunk)
    constants = shape.constants(
        call, sizes.sums, sizes.chunk, HEADS=heads, G=heads // shape.kv_heads, BN=sizes.block, WEIGHS=weighs,
        READS=reads, BY_FEATURE=call.by_feature,
    )  # fmt: skip
    operands = (arrays[x], arrays[y], *(arrays.get(n, none) for n in ("log_decay", "segments", weights)))
    grid = (chunks, shape.kv_heads * shape.value_tiles(sizes.sums), shape.batch)
    results = (
        shape.state(chunks, numbers),
        shape.state(chunks, shape.features) if call.by_feature else shape.none,
    )
    return _start(kernels.recurrent_sums, sizes.sums, operands, results, grid, constants)


def _scan(arrays: Named, call: Call, sums: Array, first: tuple[str, str], before: Array | None) -> Any:
    """The states between the chunks, those at the end and, backward, the gradients of the chunks' decays."""
    from pallas_kernels.triton.recurrent import forward as kernels

    shape = _Shape.of(arrays)
    sizes = plan.sum_sizes(shape.features, shape.dtype)
    none = arrays["key_value"]
    weighs, gradient = call.has("key_sum"), before is not None and call.has("log_decay")
    numbers, chunks = sums.shape[3], sums.shape[2]
    parts = -(-numbers // sizes.scan)
    constants = {
        "T": shape.length, "K": shape.kv_heads, "SIZE": shape.features * shape.values, "E": numbers,
        "CHUNK": sizes.chunk, "BLOCK": sizes.scan, "STAGES": sizes.scan_stages, "DECAY": call.has("log_decay"),
        "SEGMENTS": call.has("segments"), "WEIGHS": weighs, "BACKWARD": before is not None,
    }  # fmt: skip
    operands = (
        sums, arrays.get("log_decay", none), arrays.get("segments", none), arrays[first[0]],
        arrays.get(first[1], none), none if before is None else before,
    )  # fmt: skip
    results = (
        shape.state(chunks, numbers, dtype=shape.dtype),
        shape.state(shape.features, shape.values),
        shape.state(shape.features) if weighs else shape.none,
        shape.state(chunks, parts) if gradient else shape.none,
    )
    launch = plan.Launch(0, 4, 1)
    grid = (parts, shape.kv_heads, shape.batch)
    return _start(kernels.recurrent_scan, launch, operands, results, grid, constants)


def _sum_forward(arrays: Named, call: Call, keep: bool) -> tuple[Named, Named]:
    from pallas_kernels.triton.recurrent import forward as kernels

    shape = _Shape.of(arrays)
    sizes = plan.sum_sizes(shape.features, shape.dtype)
    none, weighs = arrays["key_value"], call.has("key_sum")
    sums, _ = _chunk_sums(arrays, call, sizes, "key", "value", "", False)
    states, key_value, key, _ = _scan(arrays, call, sums, ("key_value", "key_sum"), None)
    constants = shape.constants(
        call, sizes.outputs, sizes.chunk, N=shape.heads, G=shape.heads // shape.kv_heads, BM=sizes.rows,
        BN=sizes.block, WEIGHS=weighs,
    )  # fmt: skip
    operands = (
        arrays["query"], arrays["key"], arrays["value"], arrays.get("log_decay", none),
        arrays.get("segments", none), states,
    )  # fmt: skip
    results = (
        shape.tokens(shape.heads, shape.values, dtype=call.out_dtype),
        shape.tokens(shape.heads) if weighs else shape.none,
    )
    grid = (-(-shape.length // sizes.rows), shape.heads * shape.value_tiles(sizes.outputs), shape.batch)
    total, weight = _start(kernels.recurrent_outputs, sizes.outputs, operands, results, grid, constants)
    found = {"total": total, "key_value": key_value}
    if weighs:
        found |= {"weight": weight, "key": key}
    return found, {"states": states} if keep else {}


def _sum_backward(arrays: Named, call: Call) -> Named:
    from pallas_kernels.triton.recurrent import backward as kernels

    shape = _Shape.of(arrays)
    sizes = plan.sum_sizes(shape.features, shape.dtype)
    none, weighs, decay = arrays["key_value"], call.has("key_sum"), call.has("log_decay")
    states = arrays["states"]
    sums, _ = _chunk_sums(arrays, call, sizes, "query", "d_total", "d_weight", True)
    d_states, d_key_value, d_key_sum, totals = _scan(arrays, call, sums, ("d_key_value", "d_key"), states)
    operands = [arrays["query"], arrays["key"], arrays["value"]]
    operands += [arrays.get(name, none) for name in ("log_decay", "segments")]
    gradients = [arrays["d_total"], arrays.get("d_weight", none)]

    def run(kernel, launch, states, rows, heads, results, **more):
        constants = shape.constants(
            call, launch, sizes.chunk, N=shape.heads, G=shape.heads // shape.kv_heads, BN=sizes.block,
            WEIGHS=weighs, **more,
        )  # fmt: skip
        grid = (-(-shape.length // rows), heads * shape.value_tiles(launch), shape.batch)
        return _start(kernel, launch, (*operands, states, *gradients), results, grid, constants)

    def parts(launch, heads):
        """The gradients of queries or keys and what flows to or from them, in parts where values have several tiles."""
        tiles = shape.value_tiles(launch)
        dtype = shape.dtype if tiles == 1 else jnp.float32
        wide = jax.ShapeDtypeStruct((shape.batch, tiles, shape.length, heads, shape.features), dtype)
        flow = jax.ShapeDtypeStruct(wide.shape[:-1], jnp.float32) if decay else shape.none
        return wide, flow

    def whole(parts):
        return parts[:, 0] if parts.shape[1] == 1 else parts.sum(1).astype(shape.dtype)

    launch = sizes.query_gradient
    d_query, query_flow = run(
        kernels.recurrent_query_gradient, launch, states, sizes.rows, shape.heads, parts(launch, shape.heads),
        BM=sizes.rows,
    )  # fmt: skip
    launch = sizes.key_gradient
    wide, flow = parts(launch, shape.kv_heads)
    d_key, d_value, key_flow, ends = run(
        kernels.recurrent_key_gradient, launch, d_states, sizes.block, shape.kv_heads,
        (wide, shape.tokens(shape.kv_heads, shape.values, dtype=shape.dtype), flow, flow),
    )  # fmt: skip
    found = {"query": whole(d_query), "key": whole(d_key), "value": d_value, "key_value": d_key_value}
    if weighs:
        found["key_sum"] = d_key_sum
    if decay:
        constants = {
            "T": shape.length, "N": shape.heads, "G": shape.heads // shape.kv_heads,
            "QUERY_TILES": query_flow.shape[1], "KEY_TILES": key_flow.shape[1], "PARTS": totals.shape[3],
            "PARTS_PADDED": padded(totals.shape[3]), "CHUNK": sizes.chunk, "SEGMENTS": call.has("segments"),
        }  # fmt: skip
        grid = (totals.shape[2], shape.kv_heads, shape.batch)
        (found["log_decay"],) = _start(
            kernels.recurrent_decay_gradient, plan.Launch(0, 4, 1),
            (arrays["log_decay"], arrays.get("segments", none), query_flow, key_flow, ends, totals),
            (shape.tokens(shape.kv_heads),), grid, constants,
        )  # fmt: skip
    return found


# --- Sums of outer products with a decay by feature ---


class _Features(NamedTuple):
    """The launches of a call with a decay by feature."""

    arrays: Named
    call: Call
    shape: _Shape
    sizes: plan.FeatureSizes

    @classmethod
    def of(cls, arrays: Named, call: Call) -> _Features:
        shape = _Shape.of(arrays)
        return cls(dict(arrays), call, shape, plan.feature_sizes(shape.features, shape.dtype))

    @property
    def chunks(self) -> int:
        return -(-self.shape.length // self.sizes.chunk)

    def scan(self, names: str, *, backward: bool) -> Any:
        """The states between the chunks, those at the end and, backward, the gradients of the chunks' decays."""
        from pallas_kernels.triton.recurrent import by_feature as kernels

        shape, width = self.shape, padded(self.shape.values)
        features = max(1, self.sizes.scan // width)
        constants = {
            "K": shape.kv_heads, "F": shape.features, "FB": features, "V": shape.values, "VP": width,
            "CHUNKS": self.chunks, "STAGES": self.sizes.scan_stages, "BACKWARD": backward,
        }  # fmt: skip
        results = (
            shape.state(self.chunks, shape.features, shape.values, dtype=shape.dtype),
            shape.state(shape.features, shape.values),
            shape.state(self.chunks, shape.features) if backward else shape.none,
        )
        grid = (-(-shape.features // features), shape.kv_heads, shape.batch)
        return _start(
            kernels.feature_scan, plan.Launch(0, 4, 1), _take(self.arrays, names), results, grid, constants
        )

    def by_block(self, kernel: Any, launch: plan.Launch, names: str, results: Any, *, features: int,
                 tiles: int, **more: Any) -> Any:  # fmt: skip
        """Starts a program for each block of tokens, head of the queries and tile."""
        shape, sizes = self.shape, self.sizes
        constants = {
            "T": shape.length, "N": shape.heads, "G": shape.heads // shape.kv_heads, "F": shape.features,
            "FB": min(features, padded(shape.features)), "V": shape.values, "VB": shape.value_tile(launch),
            "CHUNK": sizes.chunk, "BN": sizes.block, "SEGMENTS": self.call.has("segments"),
            "PRECISION": self.call.precision,
        }  # fmt: skip
        grid = (-(-shape.length // sizes.block), shape.heads * tiles, shape.batch)
        return _start(kernel, launch, _take(self.arrays, names), results, grid, constants | more)

    def each_head(self, size: int) -> jax.ShapeDtypeStruct:
        """The gradient of a key's or value's `size` numbers from each head of the queries."""
        shape = self.shape
        return shape.tokens(
            shape.heads, size, dtype=shape.dtype if shape.heads == shape.kv_heads else jnp.float32
        )

    def grouped(self, gradient: Array) -> Array:
        """The sum over each group of heads."""
        batch, length, _, size = gradient.shape
        return gradient.reshape(batch, length, self.shape.kv_heads, -1, size).sum(3)


def _feature_forward(arrays: Named, call: Call, keep: bool) -> tuple[Named, Named]:
    from pallas_kernels.triton.recurrent import by_feature as kernels

    run = _Features.of(arrays, call)
    shape = run.shape
    run.arrays["sums"], run.arrays["factors"] = _chunk_sums(
        arrays, call, run.sizes, "key", "value", "", False
    )
    run.arrays["states"], last, _ = run.scan("sums factors key_value none", backward=False)
    (total,) = run.by_block(
        kernels.feature_outputs, run.sizes.outputs, "query key value log_decay segments states",
        (shape.tokens(shape.heads, shape.values, dtype=call.out_dtype),),
        features=run.sizes.features, tiles=shape.value_tiles(run.sizes.outputs), LATER=False,
    )  # fmt: skip
    return {"total": total, "key_value": last}, {"states": run.arrays["states"]} if keep else {}


def _feature_backward(arrays: Named, call: Call) -> Named:
    from pallas_kernels.triton.recurrent import by_feature as kernels

    run = _Features.of(arrays, call)
    shape, sizes = run.shape, run.sizes
    found = {}
    run.arrays["sums"], run.arrays["factors"] = _chunk_sums(arrays, call, sizes, "query", "d_total", "", True)
    run.arrays["d_states"], found["key_value"], run.arrays["totals"] = run.scan(
        "sums factors d_key_value states", backward=True
    )
    (d_value,) = run.by_block(
        kernels.feature_outputs, sizes.value_gradient, "key query d_total log_decay segments d_states",
        (run.each_head(shape.values),), features=sizes.features, tiles=shape.value_tiles(sizes.value_gradient),
        LATER=True,
    )  # fmt: skip
    features = sizes.segmented_features if call.has("segments") else sizes.gradient_features
    tiles = -(-shape.features // min(features, padded(shape.features)))
    found["query"], d_key, d_log = run.by_block(
        kernels.feature_gradients, sizes.gradients,
        "query key value d_total log_decay segments states d_states totals",
        (
            shape.tokens(shape.heads, shape.features, dtype=shape.dtype),
            run.each_head(shape.features),
            shape.tokens(shape.heads, shape.features),
        ),
        features=features, tiles=tiles,
    )  # fmt: skip
    found |= {
        "value": run.grouped(d_value).astype(shape.dtype),
        "key": run.grouped(d_key).astype(shape.dtype),
    }
    return found | {"log_decay": run.grouped(d_log)}


# --- The delta rule ---


def _summed(tokens: int) -> np.ndarray:
    """Whose logarithms are summed for each token of a chunk: at each level, to its end and from its beginning."""
    i, j = np.arange(tokens)[:, None], np.arange(tokens)

    def to_middle(level: int) -> np.ndarray:
        """Tokens of a first block of 2^level decay after themselves, and those of a second block until themselves."""
        return (i >> level == j >> level) & np.where((i >> level) % 2 == 1, j <= i, j > i)

    levels = range((tokens - 1).bit_length())
    return np.stack([*map(to_middle, levels), j > i, j <= i]).astype(np.float16)


class _Delta(NamedTuple):
    """The launches of a call of the delta rule."""

    arrays: Named
    call: Call
    shape: _Shape
    sizes: plan.DeltaSizes

    @classmethod
    def of(cls, arrays: Named, call: Call) -> _Delta:
        shape = _Shape.of(arrays)
        choose = plan.feature_delta_sizes if call.by_feature else plan.delta_sizes
        sizes = choose(shape.features, shape.dtype)
        arrays = {"queries": arrays["query"], "reads": arrays["key"], "writes": arrays["key"]} | arrays
        if call.by_feature:
            arrays["sums"] = jnp.asarray(_summed(sizes.chunk))
        return cls(arrays, call, shape, sizes)

    @property
    def chunks(self) -> int:
        return -(-self.shape.length // self.sizes.chunk)

    def keys(self, size: int) -> jax.ShapeDtypeStruct:
        """`size` numbers for each token and head of the keys."""
        return self.shape.tokens(self.shape.kv_heads, size, dtype=self.shape.dtype)

    def queries(self, size: int) -> jax.ShapeDtypeStruct:
        """The same for heads of the queries."""
        return self.shape.tokens(self.shape.heads, size, dtype=self.shape.dtype)

    @property
    def state(self) -> jax.ShapeDtypeStruct:
        """One state."""
        return self.shape.state(self.shape.features, self.shape.values)

    @property
    def states(self) -> jax.ShapeDtypeStruct:
        """The states of all chunks."""
        shape = self.shape
        return shape.state(self.chunks, shape.features, shape.values, dtype=shape.dtype)

    def by_chunk(self, kernel: Any, launch: plan.Launch, names: str, results: Any, *, programs: int,
                 **more: Any) -> Any:  # fmt: skip
        """Starts some programs for each chunk."""
        return self._start(kernel, launch, names, results, (self.chunks, programs, self.shape.batch), more)

    def by_span(self, kernel: Any, launch: plan.Launch, names: str, results: Any, *, tiles: int | None = None,
                **more: Any) -> Any:  # fmt: skip
        """Starts a program for each tile of the values, head and span, which walks the span's chunks."""
        spans, chunks = self.spans
        tiles = self.shape.value_tiles(launch) if tiles is None else tiles
        grid = (tiles, self.shape.kv_heads * spans, self.shape.batch)
        more |= {"SPAN": chunks, "SPANS": spans}
        return self._start(kernel, launch, names, results, grid, more)

    @property
    def spans(self) -> tuple[int, int]:
        """How many spans the chunks of a row are cut into, so that their programs fill the GPU, and their chunks."""
        programs = self.shape.batch * self.shape.kv_heads * self.shape.value_tiles(self.sizes.states)
        most = self.sizes.spans if padded(self.shape.features) <= 128 else 1
        spans = min(most, 2 * MULTIPROCESSORS // programs, self.chunks // self.sizes.least_span)
        span = -(-self.chunks // max(1, spans))
        return -(-self.chunks // span), span

    def _start(self, kernel, launch, names, results, grid, more):
        """Tells a kernel those constants that it names."""
        shape = self.shape
        heads = {"N": shape.heads, "G": shape.heads // shape.kv_heads, "K": shape.kv_heads}
        levels = {"LEVELS": (self.sizes.chunk - 1).bit_length(), "STAGES": launch.num_stages}
        flags = levels | {"BY_FEATURE": self.call.by_feature, "SCALED": self.call.scaled}
        constants = shape.constants(self.call, launch, self.sizes.chunk, **heads, **flags, **more)
        named = inspect.signature(kernel).parameters
        constants = {name: x for name, x in constants.items() if name in named}
        return _start(kernel, launch, _take(self.arrays, names), results, grid, constants)


def _delta_forward(arrays: Named, call: Call, keep: bool) -> tuple[Named, Named]:
    from pallas_kernels.triton.recurrent import delta_forward as kernels

    delta = _Delta.of(arrays, call)
    arrays, shape, sizes = delta.arrays, delta.shape, delta.sizes
    keys, by_head = delta.keys(shape.features), shape.state(shape.length)
    results = {"weights": delta.queries(sizes.chunk), "inverse": delta.keys(sizes.chunk)}
    if call.by_feature:
        results |= {"queries": delta.queries(shape.features), "reads": keys, "writes": keys}
        results["factors"] = shape.state(delta.chunks, shape.features)
    elif call.scaled:
        results |= {"starts": by_head, "ends": by_head, "factors": shape.state(delta.chunks)}
    names = ("weights", "inverse", "queries", "reads", "writes", "starts", "ends", "factors")
    found = delta.by_chunk(
        kernels.delta_chunks, sizes.chunks, "query key beta log_decay segments sums",
        [results.get(name, shape.none) for name in names],
        programs=shape.heads, FB=min(sizes.features, padded(shape.features)),
    )  # fmt: skip
    arrays |= {name: x for name, x in zip(names, found) if name in results}
    if delta.spans[0] > 1:
        tiles = -(-shape.features // shape.value_tile(sizes.maps)) + shape.value_tiles(sizes.maps)
        (arrays["maps"],) = delta.by_span(
            kernels.delta_maps, sizes.maps,
            f"reads writes {'none' if call.by_feature else 'inverse'} value beta starts ends factors",
            (shape.state(delta.spans[0], shape.features, shape.features + shape.values),), tiles=tiles,
        )  # fmt: skip
    else:
        arrays["maps"] = arrays["key_value"]  # not read
    total, last, arrays["states"], arrays["corrected"] = delta.by_span(
        kernels.delta_outputs, sizes.states,
        "queries weights reads writes inverse value beta starts ends factors key_value maps",
        (
            shape.tokens(shape.heads, shape.values, dtype=call.out_dtype),
            delta.state,
            *((delta.states, delta.keys(shape.values)) if keep else 2 * (shape.none,)),
        ),
        KEEP=keep,
    )  # fmt: skip
    kept = {name: arrays[name] for name in kept_names(call)} if keep else {}
    return {"total": total, "key_value": last}, kept


def _delta_backward(arrays: Named, call: Call) -> Named:
    from pallas_kernels.triton.recurrent import delta_backward as kernels

    delta = _Delta.of(arrays, call)
    arrays, shape, sizes, kv_heads = delta.arrays, delta.shape, delta.sizes, delta.shape.kv_heads
    values, found = delta.keys(shape.values), {}
    names = "queries weights reads writes inverse beta starts ends factors d_total"
    if delta.spans[0] > 1:
        added = shape.state(delta.spans[0], shape.features, shape.values)
        (arrays["added"],) = delta.by_span(kernels.delta_gradient_maps, sizes.gradient_maps, names, (added,))
    arrays["d_states"], found["key_value"] = delta.by_span(
        kernels.delta_state_gradient, sizes.state_gradient, f"{names} d_key_value maps added",
        (delta.states, delta.state),
    )  # fmt: skip
    arrays["z"], found["value"], strength, arrays["d_p"], arrays["d_a"] = delta.by_chunk(
        kernels.delta_pair_gradients, sizes.pair_gradient,
        "weights writes inverse value beta log_decay segments ends corrected d_total d_states",
        (values, values, shape.tokens(kv_heads), delta.queries(sizes.chunk), delta.keys(sizes.chunk)),
        programs=kv_heads,
    )  # fmt: skip
    # Grouped heads take more registers.
    most = sizes.gradient_features if shape.heads == kv_heads else max(16, sizes.gradient_features // 2)
    tile = min(most, padded(shape.features))
    tiles = -(-shape.features // tile)
    parts = jax.ShapeDtypeStruct((shape.batch, tiles, shape.length, kv_heads), jnp.float32)
    by_feature = shape.tokens(kv_heads, shape.features)
    d_log = by_feature if call.by_feature else parts if call.has("log_decay") else shape.none
    found["query"], found["key"], strengths, logs = delta.by_chunk(
        kernels.delta_gradients, sizes.gradient,
        "query key beta log_decay segments sums states corrected d_total d_states z d_p d_a starts ends factors",
        (delta.queries(shape.features), delta.keys(shape.features), parts, d_log),
        programs=kv_heads * tiles, FB=tile,
    )  # fmt: skip
    found["log_decay"] = logs if call.by_feature else logs.sum(1)
    found["beta"] = strength + strengths.sum(1)
    return found


# By whether each feature has its own decay, and whether the delta rule corrects the values.
_FORWARD = {
    (False, False): _sum_forward,
    (True, False): _feature_forward,
    (False, True): _delta_forward,
    (True, True): _delta_forward,
}
_BACKWARD = {
    (False, False): _sum_backward,
    (True, False): _feature_backward,
    (False, True): _delta_backward,
    (True, True): _delta_backward,
}
