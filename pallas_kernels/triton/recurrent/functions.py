"""What the kernels of all recurrences share; the compiler inlines it.

Tokens are counted from the first of a tile, which begins at token `first` of row `b`. That place is computed in int64
once, so that long rows can be addressed, and the tile's own offsets in int32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(b, first, head, LENGTH: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Where token `first` of a head begins in an array (B, LENGTH, HEADS, SIZE)."""
    return ((b.to(tl.int64) * LENGTH + first) * HEADS + head) * SIZE


@triton.jit
def tokens_by_features(
    x, b, first, rows, head, columns, LENGTH: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr
):
    """A tile of an array (B, LENGTH, HEADS, SIZE), one token a row."""
    there = (first + rows < LENGTH)[:, None] & (columns < SIZE)[None, :]
    at = rows[:, None] * (HEADS * SIZE) + columns[None, :]
    return tl.load(x + place(b, first, head, LENGTH, HEADS, SIZE) + at, mask=there, other=0.0)


@triton.jit
def features_by_tokens(
    x, b, first, rows, head, columns, LENGTH: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr
):
    """The same with one token a column."""
    there = (columns < SIZE)[:, None] & (first + rows < LENGTH)[None, :]
    at = columns[:, None] + rows[None, :] * (HEADS * SIZE)
    return tl.load(x + place(b, first, head, LENGTH, HEADS, SIZE) + at, mask=there, other=0.0)


@triton.jit
def store_tokens(
    x, tile, b, first, rows, head, columns, LENGTH: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr
):
    """Writes a tile with one token a row."""
    there = (first + rows < LENGTH)[:, None] & (columns < SIZE)[None, :]
    at = rows[:, None] * (HEADS * SIZE) + columns[None, :]
    tl.store(x + place(b, first, head, LENGTH, HEADS, SIZE) + at, tile.to(x.dtype.element_ty), mask=there)


@triton.jit
def token_numbers(x, b, first, rows, head, LENGTH: tl.constexpr, HEADS: tl.constexpr):
    """One number a token of an array (B, LENGTH, HEADS), in float32."""
    at = place(b, first, head, LENGTH, HEADS, 1)
    return tl.load(x + at + rows * HEADS, mask=first + rows < LENGTH, other=0.0).to(tl.float32)


@triton.jit
def store_numbers(x, numbers, b, first, rows, head, LENGTH: tl.constexpr, HEADS: tl.constexpr):
    """Writes one number a token."""
    at = place(b, first, head, LENGTH, HEADS, 1)
    tl.store(x + at + rows * HEADS, numbers, mask=first + rows < LENGTH)


@triton.jit
def operand(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Numbers as an operand of a product. A GPU cuts float32 off to TF32's 10 bits; rounded here, errors of both signs
    cancel out over the products to come. A GPU's NaN, 0x7fffffff, would become 0."""
    if PRECISION == "tf32" and dtype == tl.float32:
        rounded = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)
    else:
        return x.to(dtype)


@triton.jit
def finite_logs(logs):
    """The logarithms of decays, finite, because exp(-200) is 0 in float32 and 0 times -inf is not. NaN stays."""
    return tl.maximum(logs, -200.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log_decays(log, b, first, rows, head, LENGTH: tl.constexpr, HEADS: tl.constexpr):
    """The finite logarithms of the tokens' decays."""
    return finite_logs(token_numbers(log, b, first, rows, head, LENGTH, HEADS))


@triton.jit
def logs_after(log, b, first, rows, head, LENGTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """For each token of a block, the sum of the logarithms of the later tokens of that block.

    The sum is over those tokens alone: a difference of sums from the block's first token would lose a weak decay behind
    a strong one.
    """
    at = place(b, first, head, LENGTH, HEADS, 1)
    there = (rows + 1 < BLOCK) & (first + rows + 1 < LENGTH)
    later = tl.load(log + at + (rows + 1) * HEADS, mask=there, other=0.0).to(tl.float32)
    return tl.cumsum(finite_logs(later), 0, reverse=True)


@triton.jit
def logs_between(logs, rows, columns):
    """Sums the logarithms from each column's token (not included) to each row's token (included).

    logs: of the rows' tokens.
    """
    return tl.cumsum(tl.where(rows[:, None] > columns[None, :], logs[:, None], 0.0), 0)


@triton.jit
def logs_between_transposed(logs, rows, columns):
    """The same with the earlier tokens in the rows. logs: of the columns' tokens."""
    return tl.cumsum(tl.where(columns[None, :] > rows[:, None], logs[None, :], 0.0), 1)


@triton.jit
def log_halves(logs, PRECISION: tl.constexpr):
    """Logarithms as two float16 numbers, whose sum is within 2^-22 of them; in float32 arithmetic, as they are."""
    if PRECISION == "ieee":
        return logs, logs
    else:
        high = logs.to(tl.float16)
        return high, (logs - high.to(tl.float32)).to(tl.float16)


@triton.jit
def summed_halves(which, high, low, PRECISION: tl.constexpr):
    """Sums the logarithms (tokens, features) of the tokens that each row of `which` has, in float32."""
    if PRECISION == "ieee":
        return tl.dot(which.to(tl.float32), high, input_precision=PRECISION)
    else:
        return tl.dot(which.to(tl.float16), high, tl.dot(which.to(tl.float16), low))


@triton.jit
def summed_tokens(which, logs, PRECISION: tl.constexpr):
    """The same for logarithms that are read once."""
    high, low = log_halves(logs, PRECISION)
    return summed_halves(which, high, low, PRECISION)


@triton.jit
def summed_features(logs, which, PRECISION: tl.constexpr):
    """The same for logarithms (features, tokens) and the columns of `which`."""
    high, low = log_halves(logs, PRECISION)
    if PRECISION == "ieee":
        return tl.dot(high, which.to(tl.float32), input_precision=PRECISION)
    else:
        return tl.dot(high, which.to(tl.float16), tl.dot(low, which.to(tl.float16)))


@triton.jit
def segment_numbers(segments, b, first, rows, LENGTH: tl.constexpr):
    """The numbers of the tokens' segments, -1 for padding."""
    return tl.load(segments + b.to(tl.int64) * LENGTH + first + rows, mask=first + rows < LENGTH, other=-1)


@triton.jit
def segment_before(segments, b, chunk, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """The segment of the state before a chunk that has tokens: padding comes last in a row."""
    at = b.to(tl.int64) * LENGTH + chunk * CHUNK - 1
    return tl.load(segments + at, mask=chunk > 0, other=0)


@triton.jit
def segment_after(segments, b, chunk, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """The segment of the state after a chunk that has tokens, and -1 after one that has none."""
    return tl.max(segment_numbers(segments, b, chunk * CHUNK, tl.arange(0, CHUNK), LENGTH), 0)


@triton.jit
def chunk_factor(
    log, segments, b, chunk, head, LENGTH: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """By which the state shrinks over a chunk; 0 where another segment begins in it."""
    factor = 1.0
    if DECAY:
        rows = tl.arange(0, CHUNK)
        factor = tl.exp(tl.sum(log_decays(log, b, chunk * CHUNK, rows, head, LENGTH, HEADS), 0))
    if SEGMENTS:
        after = segment_after(segments, b, chunk, LENGTH, CHUNK)
        kept = (after < 0) | (after == segment_before(segments, b, chunk, LENGTH, CHUNK))
        factor = tl.where(kept, factor, 0.0)
    return factor


@triton.jit
def chunk_factors(
    factors, b, chunk, head, f, LENGTH: tl.constexpr, HEADS: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The same by feature, from an array (B, HEADS, chunks, F)."""
    at = (b.to(tl.int64) * HEADS + head) * ((LENGTH + CHUNK - 1) // CHUNK) + chunk
    return tl.load(factors + at * F + f, mask=f < F, other=0.0)
