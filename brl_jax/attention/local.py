"""Local attention: exact softmax attention over a sparse pattern, at linear cost and without an n x n array.

The queries are cut into blocks; each meets the stretch of keys that its pattern can reach (`local_blocks`),
and a mask computed from positions cuts what it does not see. On a CPU a loop takes one block at a time, so
that its scores stay in cache; elsewhere all blocks go at once. The backward pass is written by hand: it saves
the output and the logarithm of each softmax sum, and computes each block's scores anew (as FlashAttention
does, Dao et al. 2022, arXiv 2205.14135, section 3.1 and appendix B).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.arguments import (
    check_bias,
    check_dtypes,
    check_lengths,
    check_scale,
    check_segments,
    is_int,
    zero_padding,
)
from brl_jax.attention.bias import PositionBias
from brl_jax.attention.checks import check_qkv, require
from brl_jax.attention.local_blocks import Call, Part
from brl_jax.attention.patterns import Pattern, SlidingWindow

# What a masked score becomes, and the log-sum-exp of a row that sees nothing.
_MASKED = -0.7 * float(np.finfo(np.float32).max)
# The scores of one step of the CPU loop, in bytes: about what stays in the second-level caches.
_CACHE_BYTES = 2**21


@dataclasses.dataclass(frozen=True)
class _Spec:
    """The static side of one call."""

    pattern: Pattern
    is_causal: bool
    scale: float
    query_offset: int
    key_offset: int | None


class _Inputs(NamedTuple):
    """The arrays of one call besides query, key and value; absent ones are None."""

    key_lengths: Array | None  # (B,)
    query_lengths: Array | None  # (B,)
    query_segments: Array | None  # (B, T)
    key_segments: Array | None  # (B, S)
    key_offset: Array | None  # (), where the spec's is None


def local_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    local_window_size: int | tuple[int, int] | None = None,
    pattern: Pattern | None = None,
    is_causal: bool = False,
    bias: PositionBias | Float[Array, " ..."] | None = None,
    scale: float | None = None,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    query_offset: int = 0,
    key_offset: int | Int[Array, ""] = 0,
    implementation: Literal["xla", "cudnn", "pallas"] | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention in which each query sees only the keys of a local pattern; O(n w) time and memory.

    out_i = sum_j p_ij v_j with p_i = softmax over the visible j of (scale q_i . k_j + bias_ij):
    000 (BRL-Attention) eq. 1. A window that reaches over the whole sequence is full attention. A query that
    sees no key gives 0.

    Windows count keys on both sides besides the query's own, as in `jax.nn.dot_product_attention`:
    local_window_size=(2, 1) lets query 4 see keys 2, 3, 4, 5 (x) and not the others (.)::

        key       0 1 2 3 4 5 6 7
        query 4   . . x x x x . .       with is_causal: . . x x x . . .

    The papers' "window w" is `SlidingWindow.of_width(w, is_causal)`.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, S, K, H) of the same dtype; K divides N, and heads n * (N / K) .. share a key head.
      local_window_size: an int for both sides, or (left, right); exactly one of this and `pattern` is given.
      pattern: which keys a query sees (`brl_jax.attention.patterns`).
      is_causal: cuts every key after the query, also from windows that reach to the right.
      bias: added to the scaled scores: a `PositionBias`, called on absolute positions of one block at a time,
        or an array that broadcasts to (B, N, T, S). Both get gradients.
      scale: of the scores; 1 / sqrt(H) by default.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; rows and keys from there on are padding. Whatever
        padding holds, even NaN, does not reach the result; padded rows give 0.
      segment_ids: (B, T) ints where T = S, or a pair (B, T), (B, S): a query sees keys of equal id only.
      query_offset: query i stands at key index i + query_offset (keys: a window cache, then the new ones).
      key_offset: absolute position of key 0, an int or a traced int scalar. Only patterns with absolute
        boundaries and position biases look at it. When traced, such a pattern visits every block within its
        reach (all keys, where it has no bound).
      implementation: None picks by platform when lowering; "xla" works everywhere; "cudnn" needs a GPU, a
        sliding window with nothing to its right and half precision; "pallas" is not there yet.

    Returns:
      (B, T, N, H) in query's dtype. The softmax is computed in float32.

    Raises:
      ValueError: shapes, dtypes, windows, patterns or implementations that don't fit, naming the argument.
      NotImplementedError: implementation="pallas".
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    pattern = _check_pattern(local_window_size, pattern, is_causal)
    _check_offset("query_offset", query_offset)
    scale = check_scale(scale, query.shape[3])
    bias = check_bias(bias, query, key)
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    key_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0])
    query_segments, key_segments = check_segments(segment_ids, query.shape, key.shape)
    static_key_offset, traced_key_offset = _split_key_offset(key_offset)

    match implementation:
        case None | "xla":
            pass
        case "pallas":
            raise NotImplementedError(
                "implementation='pallas': there is no TPU kernel for local attention yet; use None or 'xla'"
            )
        case "cudnn":
            return _cudnn(
                query, key, value, pattern, is_causal, bias, scale, query_lengths, key_lengths,
                segment_ids is not None, query_offset,
            )  # fmt: skip
        case _:
            raise ValueError(
                f"implementation must be None, 'xla', 'cudnn' or 'pallas', got {implementation!r}"
            )

    spec = _Spec(pattern, bool(is_causal), scale, int(query_offset), static_key_offset)
    inputs = _Inputs(key_lengths, query_lengths, query_segments, key_segments, traced_key_offset)
    return _attend_jit(spec, query, key, value, bias, inputs)


def _check_pattern(window: Any, pattern: Any, is_causal: bool) -> Pattern:
    require(
        (window is None) != (pattern is None),
        "exactly one of local_window_size and pattern must be given, got "
        + ("neither" if window is None else "both"),
    )
    if window is not None:
        sides = (window, window) if is_int(window) else window
        require(
            isinstance(sides, (tuple, list)) and len(sides) == 2 and all(is_int(s) and s >= 0 for s in sides),
            f"local_window_size must be an int of at least 0 or a pair of them (left, right), got {window!r}",
        )
        return SlidingWindow(int(sides[0]), int(sides[1]))
    require(
        isinstance(pattern, Pattern),
        f"pattern must be a Pattern such as SlidingWindow(left, right), got {pattern!r}",
    )
    require(
        pattern.causal_ok or not is_causal,
        f"is_causal must be False with {type(pattern).__name__}: its global tokens see the whole sequence "
        "and are seen by all of it, so that information would travel backwards through them",
    )
    return pattern


def _check_offset(name: str, offset: Any) -> None:
    require(is_int(offset), f"{name} must be a static int, got {offset!r}")


def _split_key_offset(key_offset: Any) -> tuple[int | None, Array | None]:
    if is_int(key_offset):
        return int(key_offset), None
    require(
        hasattr(key_offset, "dtype")
        and key_offset.shape == ()
        and jnp.issubdtype(key_offset.dtype, jnp.integer),
        f"key_offset must be an int or an int scalar array, got {key_offset!r}",
    )
    return None, jnp.asarray(key_offset).astype(jnp.int32)


def _cudnn(
    query, key, value, pattern, is_causal, bias, scale, query_lengths, key_lengths, has_segments, query_offset
):
    missing = [
        reason
        for reason, fails in {
            f"a sliding window (got {type(pattern).__name__})": not isinstance(pattern, SlidingWindow),
            "keys up to the query only (is_causal=True or a right side of 0)": not (
                is_causal or (isinstance(pattern, SlidingWindow) and pattern.right == 0)
            ),
            f"bfloat16 or float16 (got {query.dtype})": query.dtype == jnp.float32,
            "no segment_ids": has_segments,
            f"query_offset=0 (got {query_offset})": query_offset != 0,
            f"as many queries as keys (got {query.shape[1]} and {key.shape[1]})": query.shape[1]
            != key.shape[1],
            "a bias given as an array, or none": bias is not None and not isinstance(bias, jax.Array),
        }.items()
        if fails
    ]
    require(not missing, "implementation='cudnn' serves local attention only with " + "; with ".join(missing))
    return jax.nn.dot_product_attention(
        query, key, value, bias, scale=scale, is_causal=True, query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths, local_window_size=(pattern.left, 0), implementation="cudnn",
    )  # fmt: skip


# The computation. Inside, heads are split in (K, G): query (B, K, G, T, H), key and value (B, K, S, H).


def _split_heads(x: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K G T H"]:
    b, t, n, h = x.shape
    return x.reshape(b, t, kv_heads, n // kv_heads, h).transpose(0, 2, 3, 1, 4)


def _merge_heads(x: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    b, k, g, t, h = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, h)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: _Spec, query: Array, key: Array, value: Array, bias: Any, inputs: _Inputs) -> Array:
    return _forward(spec, query, key, value, bias, inputs)[0]


def _attend_forward(spec, query, key, value, bias, inputs):
    out, lse = _forward(spec, query, key, value, bias, inputs)
    return out, (query, key, value, bias, inputs, out, lse)


def _attend_backward(spec, saved, d_out):
    query, key, value, bias, inputs, out, lse = saved
    d_query, d_key, d_value, d_bias = _backward(spec, query, key, value, bias, inputs, out, lse, d_out)
    return d_query, d_key, d_value, d_bias, _Inputs(None, None, None, None, None)


_attend.defvjp(_attend_forward, _attend_backward)
_attend_jit = jax.jit(_attend, static_argnums=0)


def _query_block_loop(width: int) -> int:
    """Queries of a block on a CPU: a tile of scores must be large enough for XLA to share it among cores."""
    return 256 if width >= 128 else 128


def _query_block_batched(width: int) -> int:
    """Queries of a block where all go at once: the multiple of 128 nearest to the window, up to 512."""
    return min(512, max(128, (width + 64) // 128 * 128))


def _parts(spec: _Spec, query: Array, key: Array, loop: bool) -> list[Part]:
    call = Call(
        query.shape[1],
        key.shape[1],
        spec.query_offset,
        spec.key_offset,
        spec.is_causal,
        _query_block_loop if loop else _query_block_batched,
    )
    return spec.pattern.parts(call)


class _Block(NamedTuple):
    """One block of queries with the stretch of keys that it meets; b and k may be parts of B and K."""

    query_index: Array  # (t,)
    key_index: Array  # (s,)
    query: Array  # (b, k, G, t, H)
    key: Array  # (b, k, s, H)
    value: Array  # (b, k, s, H)
    bias: Array | None  # (b or 1, k or 1, G or 1, t or 1, s or 1)
    key_lengths: Array | None  # (b,)
    query_segments: Array | None  # (b, t)
    key_segments: Array | None  # (b, s)


def _positions(spec: _Spec, block: _Block, key_offset: Array | None) -> tuple[Array, Array]:
    offset = spec.key_offset if key_offset is None else key_offset
    return block.query_index + (spec.query_offset + offset), block.key_index + offset


def _scores(
    spec: _Spec, part: Part, num_keys: int, key_offset: Array | None, bias: Any, block: _Block
) -> Array:
    """Scaled, biased and masked scores (b, k, G, t, s) in float32."""
    scores = jnp.einsum("bkgtd,bksd->bkgts", block.query, block.key, preferred_element_type=jnp.float32)
    scores = scores * spec.scale
    positions = _positions(spec, block, key_offset)
    if block.bias is not None:
        scores = scores + block.bias.astype(jnp.float32)
    elif bias is not None:
        scores = scores + _call_bias(bias, positions, scores.shape)
    mask = ((block.key_index >= 0) & (block.key_index < num_keys))[None, :]
    if spec.is_causal:
        mask = mask & (block.query_index[:, None] + spec.query_offset >= block.key_index[None, :])
    if part.rule is not None:
        mask = mask & part.rule(positions[0][:, None], positions[1][None, :])
    mask = mask[None, None, None]
    if block.key_lengths is not None:
        inside = block.key_index[None, :] < block.key_lengths[:, None]
        mask = mask & inside[:, None, None, None, :]
    if block.query_segments is not None and block.key_segments is not None:
        same = block.query_segments[:, :, None] == block.key_segments[:, None, :]
        mask = mask & same[:, None, None]
    return jnp.where(mask, scores, _MASKED)


def _call_bias(bias: PositionBias, positions: tuple[Array, Array], shape: tuple[int, ...]) -> Array:
    _, k, g, t, s = shape
    values = bias(*positions)
    require(
        values.shape == (k * g, t, s),
        f"bias called on {t} query and {s} key positions must give shape {(k * g, t, s)}, got {values.shape}",
    )
    return values.astype(jnp.float32).reshape(1, k, g, t, s)


def _softmax_block(scores: Array, value: Array, dtype: Any) -> tuple[Array, Array]:
    """The block's output (b, k, G, t, H) and log-sum-exp (b, k, G, t); 0 and _MASKED if nothing is seen."""
    top = lax.max(jnp.max(scores, -1), jnp.float32(_MASKED))
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, -1)
    sees = top > _MASKED / 2
    out = jnp.einsum(
        "bkgts,bksd->bkgtd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    total = jnp.where(sees, total, 1.0)
    out = jnp.where(sees[..., None], out * (1.0 / total)[..., None], 0.0)
    return out.astype(dtype), jnp.where(sees, top + jnp.log(total), _MASKED)


def _gradient_block(scores, block: _Block, query_t, d_out, d_out_t, lse, delta, scale: float):
    """Gradients of one block: of its scores (unscaled), query (b, k, G, t, H), key and value (b, k, H, s).

    query_t and d_out_t are (b, k, H, G, t): with them each product below reads both factors in the order in
    which the CPU's matrix product is fastest (it takes twice the time on a transposed left factor).
    """
    dtype = block.key.dtype
    weights = jnp.exp(scores - lse[..., None])
    d_weights = jnp.einsum("bkgtd,bksd->bkgts", d_out, block.value, preferred_element_type=jnp.float32)
    d_scores = weights * (d_weights - delta[..., None])
    scaled = (d_scores * scale).astype(dtype)
    d_query = jnp.einsum("bkgts,bksd->bkgtd", scaled, block.key, preferred_element_type=jnp.float32)
    d_key = jnp.einsum("bkdgt,bkgts->bkds", query_t, scaled, preferred_element_type=jnp.float32)
    d_value = jnp.einsum(
        "bkdgt,bkgts->bkds", d_out_t, weights.astype(dtype), preferred_element_type=jnp.float32
    )
    return d_scores, d_query.astype(dtype), d_key, d_value


class _Arranged(NamedTuple):
    """A call's arrays in the order of one part."""

    query: Array  # (B, K, G, T', H)
    key: Array  # (B, K, S', H)
    value: Array  # (B, K, S', H)
    bias: Array | None  # (B or 1, K or 1, G or 1, T' or 1, S' or 1)
    query_segments: Array | None  # (B, T')
    key_segments: Array | None  # (B, S')


def _arrange(part: Part, query: Array, key: Array, value: Array, bias: Any, inputs: _Inputs) -> _Arranged:
    if isinstance(bias, jax.Array):
        heads = (key.shape[1], query.shape[2]) if bias.shape[1] > 1 else (1, 1)
        bias = bias.reshape(bias.shape[0], *heads, *bias.shape[2:])
        if bias.shape[3] > 1:
            bias = part.queries.arrange(bias, 3)
        if bias.shape[4] > 1:
            bias = part.keys.arrange(bias, 4)
    else:
        bias = None
    segments = inputs.query_segments, inputs.key_segments
    return _Arranged(
        part.queries.arrange(query, 3),
        part.keys.arrange(key, 2),
        part.keys.arrange(value, 2),
        bias,
        None if segments[0] is None else part.queries.arrange(segments[0], 1),
        None if segments[1] is None else part.keys.arrange(segments[1], 1),
    )


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The steps of the CPU's loop: `batch` sequences x `heads` key heads x one block of queries at a time."""

    part: Part
    batch: int
    heads: int
    batch_steps: int
    head_steps: int

    @classmethod
    def of(cls, part: Part, query: Array, all_heads: bool) -> _Loop:
        b, k, g = query.shape[:3]
        one = 4 * g * part.block * part.length
        fits = lambda n, limit: max(d for d in range(1, n + 1) if n % d == 0 and d <= max(1, limit))  # noqa: E731
        heads = k if all_heads else fits(k, _CACHE_BYTES // one)
        batch = fits(b, _CACHE_BYTES // (one * k)) if heads == k else 1
        return cls(part, batch, heads, b // batch, k // heads)

    @property
    def steps(self) -> Array:
        return jnp.arange(self.batch_steps * self.head_steps * self.part.num_blocks, dtype=jnp.int32)

    def place(self, step) -> tuple[Any, Any, Any]:
        """First sequence, first key head and block of queries of a step."""
        i = step % self.part.num_blocks
        rest = step // self.part.num_blocks
        return rest // self.head_steps * self.batch, rest % self.head_steps * self.heads, i

    def cut(self, x: Array, b, k) -> Array:
        """The step's sequences and heads of x (B or 1, K or 1, ...)."""
        for axis, start, length in ((0, b, self.batch), (1, k, self.heads)):
            if x.shape[axis] > 1:
                x = lax.dynamic_slice_in_dim(x, start, length, axis)
        return x

    def rows(self, x: Array, step, axis: int) -> Array:
        """The step's queries of x (B, K, ..., T', ...)."""
        b, k, i = self.place(step)
        x = self.cut(x, b, k)
        return (
            x
            if x.shape[axis] == 1
            else lax.dynamic_slice_in_dim(x, i * self.part.block, self.part.block, axis)
        )

    def block(self, arranged: _Arranged, inputs: _Inputs, num_keys: int, step) -> _Block:
        b, k, i = self.place(step)
        part = self.part
        bias, segments = None, (None, None)
        if arranged.bias is not None:
            bias = self.rows(arranged.bias, step, 3)
            bias = bias if bias.shape[4] == 1 else part.take(bias, i, 4)
        if arranged.query_segments is not None:
            rows = lax.dynamic_slice_in_dim(arranged.query_segments, b, self.batch, 0)
            cols = lax.dynamic_slice_in_dim(arranged.key_segments, b, self.batch, 0)
            segments = lax.dynamic_slice_in_dim(rows, i * part.block, part.block, 1), part.take(cols, i, 1)
        lengths = inputs.key_lengths
        return _Block(
            part.query_index(i),
            part.key_index(i, num_keys),
            self.rows(arranged.query, step, 3),
            part.take(self.cut(arranged.key, b, k), i, 2),
            part.take(self.cut(arranged.value, b, k), i, 2),
            bias,
            None if lengths is None else lax.dynamic_slice_in_dim(lengths, b, self.batch, 0),
            *segments,
        )

    def join(self, x: Array) -> Array:
        """Results of all steps (steps, b, k, G, t, ...) as (B, K, G, T', ...)."""
        tail = x.shape[5:]
        x = x.reshape(self.batch_steps, self.head_steps, self.part.num_blocks, *x.shape[1:])
        x = jnp.moveaxis(x, 2, 5)  # (bs, ks, b, k, G, blocks, t)
        x = jnp.moveaxis(x, 1, 2)  # (bs, b, ks, k, G, blocks, t)
        s = x.shape
        return x.reshape(s[0] * s[1], s[2] * s[3], s[4], s[5] * s[6], *tail)


def _blocks_at_once(part: Part, arranged: _Arranged, inputs: _Inputs, num_keys: int) -> tuple[_Block, _Block]:
    """All blocks along a new axis of each array, and which axis that is (for vmap)."""
    numbers = jnp.arange(part.num_blocks, dtype=jnp.int32)
    bias = None
    if arranged.bias is not None:
        bias = arranged.bias
        bias = (
            part.split_queries(bias, 3)
            if bias.shape[3] > 1
            else jnp.repeat(bias[:, :, :, None], part.num_blocks, 3)
        )
        if bias.shape[5] > 1:
            bias = jax.vmap(lambda x, i: part.take(x, i, 4), in_axes=(3, 0), out_axes=3)(bias, numbers)
    segments = arranged.query_segments, arranged.key_segments
    blocks = _Block(
        jax.vmap(part.query_index)(numbers),
        jax.vmap(lambda i: part.key_index(i, num_keys))(numbers),
        part.split_queries(arranged.query, 3),
        part.take_all(arranged.key, 2),
        part.take_all(arranged.value, 2),
        bias,
        inputs.key_lengths,
        None if segments[0] is None else part.split_queries(segments[0], 1),
        None if segments[1] is None else part.take_all(segments[1], 1),
    )
    has = lambda x, axis: None if x is None else axis  # noqa: E731
    axes = _Block(0, 0, 3, 2, 2, has(bias, 3), None, has(segments[0], 1), has(segments[1], 1))
    return blocks, axes


def _forward(
    spec: _Spec, query: Array, key: Array, value: Array, bias: Any, inputs: _Inputs
) -> tuple[Array, Array]:
    """out (B, T, N, H) and log-sum-exp (B, K, G, T), which is -_MASKED for rows that see nothing."""
    num_queries, num_keys, kv_heads = query.shape[1], key.shape[1], key.shape[2]

    def on_part(part: Part, loop: bool, q, k, v, dtype, bias, inputs) -> tuple[Array, Array]:
        arranged = _arrange(part, q, k, v, bias, inputs)
        own_bias = None if arranged.bias is not None else bias

        def one(block: _Block) -> tuple[Array, Array]:
            scores = _scores(spec, part, num_keys, inputs.key_offset, own_bias, block)
            return _softmax_block(scores, block.value, dtype)

        if loop:
            walk = _Loop.of(part, q, all_heads=own_bias is not None)
            out, lse = lax.map(lambda step: one(walk.block(arranged, inputs, num_keys, step)), walk.steps)
            out, lse = walk.join(out), walk.join(lse)
        else:
            blocks, axes = _blocks_at_once(part, arranged, inputs, num_keys)
            out, lse = jax.vmap(one, in_axes=(axes,), out_axes=3)(blocks)
            out = out.reshape(*q.shape[:3], part.queries.size, q.shape[4])
            lse = lse.reshape(*q.shape[:3], part.queries.size)
        return part.queries.restore(out, 3, num_queries), part.queries.restore(lse, 3, num_queries, _MASKED)

    def run(loop: bool, query, key, value, bias, inputs):
        q = _split_heads(zero_padding(query, inputs.query_lengths), kv_heads)
        k, v = (zero_padding(x, inputs.key_lengths).transpose(0, 2, 1, 3) for x in (key, value))
        parts = _parts(spec, query, key, loop)
        dtype = query.dtype if len(parts) == 1 else jnp.float32
        results = [on_part(part, loop, q, k, v, dtype, bias, inputs) for part in parts]
        out, lse = _combine(results)
        if inputs.query_lengths is not None:
            inside = jnp.arange(num_queries, dtype=jnp.int32) < inputs.query_lengths[:, None]
            inside = inside[:, None, None]
            out = jnp.where(inside[..., None], out, jnp.zeros((), out.dtype))
            lse = jnp.where(inside, lse, _MASKED)
        # A row that sees nothing gets weights exp(score - huge) = 0 in the backward pass.
        lse = jnp.where(lse == _MASKED, -_MASKED, lse)
        return _merge_heads(out.astype(query.dtype)), lse

    return lax.platform_dependent(
        query,
        key,
        value,
        bias,
        inputs,
        cpu=functools.partial(run, True),
        default=functools.partial(run, False),
    )


def _combine(results: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Softmax over the union of parts, from each part's output and log-sum-exp."""
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results)
    top = functools.reduce(jnp.maximum, lses)
    weights = [jnp.where(lse == _MASKED, 0.0, jnp.exp(lse - top)) for lse in lses]
    total = sum(weights[1:], start=weights[0])
    sees = top > _MASKED / 2
    total = jnp.where(sees, total, 1.0)
    weighted = [(w / total)[..., None] * out for w, out in zip(weights, outs)]
    return sum(weighted[1:], start=weighted[0]), jnp.where(sees, top + jnp.log(total), _MASKED)


def _backward(spec: _Spec, query, key, value, bias, inputs: _Inputs, out, lse, d_out):
    """Gradients of query, key, value and bias."""
    num_queries, num_keys, kv_heads = query.shape[1], key.shape[1], key.shape[2]

    def on_part(part: Part, loop: bool, q, k, v, do, lse, delta, bias, inputs):
        arranged = _arrange(part, q, k, v, bias, inputs)
        own_bias = None if arranged.bias is not None else bias
        rows = part.queries
        do_a = rows.arrange(do, 3)
        lse_a, delta_a = rows.arrange(lse, 3, -_MASKED), rows.arrange(delta, 3)
        transposed = lambda x: rows.arrange(x.transpose(0, 1, 4, 2, 3), 4)  # noqa: E731 (B, K, H, G, T')
        q_t, do_t = transposed(q), transposed(do)

        def one(block: _Block, q_t, do, do_t, lse, delta):
            """Gradients of one block; d_bias: of the position bias's arrays, or of the block's own bias."""
            scores = _scores(spec, part, num_keys, inputs.key_offset, own_bias, block)
            d_scores, dq, dk, dv = _gradient_block(scores, block, q_t, do, do_t, lse, delta, spec.scale)
            d_bias = None
            if block.bias is not None:
                axes = [a for a in range(5) if block.bias.shape[a] == 1]
                d_bias = d_scores.sum(axes, keepdims=True)
            elif own_bias is not None:
                positions = _positions(spec, block, inputs.key_offset)
                floats, rebuild = _split_floats(own_bias)
                call = lambda floats: _call_bias(rebuild(floats), positions, d_scores.shape)  # noqa: E731
                _, pull = jax.vjp(call, floats)
                d_bias = jax.tree.map(
                    lambda x: x.astype(jnp.float32), pull(d_scores.sum(0, keepdims=True))[0]
                )
            return dq, dk, dv, d_bias

        if loop:
            walk = _Loop.of(part, q, all_heads=own_bias is not None)
            dq, dk, dv, d_bias = _loop_gradients(
                walk, one, arranged, inputs, num_keys, (q_t, do_a, do_t, lse_a, delta_a), own_bias
            )
        else:
            dq, dk, dv, d_bias = _gradients_at_once(
                part, one, arranged, inputs, num_keys, (q_t, do_a, do_t, lse_a, delta_a)
            )
        if arranged.bias is not None:
            if arranged.bias.shape[4] > 1:
                d_bias = part.keys.restore(d_bias, 4, num_keys)
            if arranged.bias.shape[3] > 1:
                d_bias = rows.restore(d_bias, 3, num_queries)
            d_bias = d_bias.reshape(bias.shape)
        dk, dv = (part.keys.restore(x, 3, num_keys) for x in (dk, dv))
        return rows.restore(dq, 3, num_queries), dk, dv, d_bias

    def run(loop: bool, query, key, value, bias, inputs, out, lse, d_out):
        q, o, do = (
            _split_heads(zero_padding(x, inputs.query_lengths), kv_heads) for x in (query, out, d_out)
        )
        k, v = (zero_padding(x, inputs.key_lengths).transpose(0, 2, 1, 3) for x in (key, value))
        delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)
        parts = [
            on_part(part, loop, q, k, v, do, lse, delta, bias, inputs)
            for part in _parts(spec, query, key, loop)
        ]
        dq, dk, dv, d_bias = (
            parts[0]
            if len(parts) == 1
            else jax.tree.map(lambda *x: sum(y.astype(jnp.float32) for y in x), *parts)
        )
        dk, dv = (x.transpose(0, 3, 1, 2).astype(key.dtype) for x in (dk, dv))
        return _merge_heads(dq).astype(query.dtype), dk, dv, d_bias

    d_query, d_key, d_value, d_bias = lax.platform_dependent(
        query, key, value, bias, inputs, out, lse, d_out,
        cpu=functools.partial(run, True), default=functools.partial(run, False),
    )  # fmt: skip
    if isinstance(bias, jax.Array):
        d_bias = d_bias.astype(bias.dtype)
    elif bias is not None:
        d_bias = _join_floats(bias, d_bias)
    return d_query, d_key, d_value, d_bias


def _loop_gradients(
    walk: _Loop, one, arranged: _Arranged, inputs: _Inputs, num_keys: int, rows: tuple, own_bias
):
    """Gradients in the arranged order, step after step; keys' and bias's are summed in the loop's carry."""
    part = walk.part
    q_t, do, do_t, lse, delta = rows
    b_all, k_all, _, h = q_t.shape[:2] + q_t.shape[2:3] * 2
    d_keys = jnp.zeros((b_all, k_all, h, part.keys.size), jnp.float32)
    if arranged.bias is not None:
        d_bias = jnp.zeros(arranged.bias.shape, jnp.float32)
    elif own_bias is not None:
        d_bias = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), _split_floats(own_bias)[0])
    else:
        d_bias = None

    def add_keys(total, step, piece):
        b, k, i = walk.place(step)
        mine = lax.dynamic_slice(total, (b, k, 0, 0), (walk.batch, walk.heads, *total.shape[2:]))
        return lax.dynamic_update_slice(total, part.add(mine, i, piece), (b, k, 0, 0))

    def add_bias(total, step, piece):
        if arranged.bias is None:
            return jax.tree.map(jnp.add, total, piece)
        b, k, i = walk.place(step)
        mine = walk.rows(total, step, 3)
        mine = mine + piece if mine.shape[4] == 1 else part.add(mine, i, piece)
        places = (b, k, 0, i * part.block, 0)
        start = [p if size > 1 else 0 for p, size in zip(places, total.shape)]
        return lax.dynamic_update_slice(total, mine, start)

    def body(carry, step):
        dk, dv, d_bias = carry
        dq, dk_piece, dv_piece, d_bias_piece = one(
            walk.block(arranged, inputs, num_keys, step),
            walk.rows(q_t, step, 4), walk.rows(do, step, 3), walk.rows(do_t, step, 4),
            walk.rows(lse, step, 3), walk.rows(delta, step, 3),
        )  # fmt: skip
        d_bias = d_bias if d_bias is None else add_bias(d_bias, step, d_bias_piece)
        return (add_keys(dk, step, dk_piece), add_keys(dv, step, dv_piece), d_bias), dq

    (dk, dv, d_bias), dq = lax.scan(body, (d_keys, d_keys, d_bias), walk.steps)
    return walk.join(dq), dk, dv, d_bias


def _gradients_at_once(part: Part, one, arranged: _Arranged, inputs: _Inputs, num_keys: int, rows: tuple):
    """Gradients in the arranged order, all blocks in one go."""
    q_t, do, do_t, lse, delta = rows
    blocks, axes = _blocks_at_once(part, arranged, inputs, num_keys)
    cut = part.split_queries
    dq, dk, dv, d_bias = jax.vmap(one, in_axes=(axes, 4, 3, 4, 3, 3), out_axes=(3, 3, 3, 0))(
        blocks, cut(q_t, 4), cut(do, 3), cut(do_t, 4), cut(lse, 3), cut(delta, 3)
    )
    dq = dq.reshape(arranged.query.shape)
    if arranged.bias is not None:
        shape = arranged.bias.shape
        if shape[4] > 1:
            numbers = jnp.arange(part.num_blocks, dtype=jnp.int32)
            empty = jnp.zeros((*d_bias.shape[1:5], shape[4]), jnp.float32)
            d_bias = jax.vmap(lambda i, piece: part.add(empty, i, piece))(numbers, d_bias)
        d_bias = jnp.moveaxis(d_bias, 0, 3).reshape(shape) if shape[3] > 1 else d_bias.sum(0)
    else:
        d_bias = jax.tree.map(lambda x: x.sum(0), d_bias)
    return dq, part.add_all(dk), part.add_all(dv), d_bias


def _split_floats(bias: PositionBias):
    """The floating-point leaves of a bias, and how to put such leaves back."""
    leaves, structure = jax.tree.flatten(bias)
    is_float = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]

    def rebuild(floats: list) -> PositionBias:
        floats = iter(floats)
        return structure.unflatten([next(floats) if f else x for x, f in zip(leaves, is_float)])

    return [x for x, f in zip(leaves, is_float) if f], rebuild


def _join_floats(bias: PositionBias, gradients: list) -> PositionBias:
    """A cotangent for the whole bias: float0 zeros for the leaves that are not floating point."""
    leaves, structure = jax.tree.flatten(bias)
    given = iter(gradients)
    out = []
    for x in leaves:
        if jnp.issubdtype(jnp.result_type(x), jnp.floating):
            out.append(next(given).astype(jnp.result_type(x)))
        else:
            out.append(np.zeros(np.shape(x), jax.dtypes.float0))
    return structure.unflatten(out)
