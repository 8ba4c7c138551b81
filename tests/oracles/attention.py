"""Softmax attention, forward and gradient by hand, biases by position, and the pairs that patterns see."""

import numpy as np


def softmax_attention(query, key, value, visible, *given, log_sums=False, **options):
    """out (B, T, N, H) and the weights (B, N, T, S) or the log-sum-exp (B, T, N), from query (B, T, N, H), key and
    value (B, S, K, H).

    visible broadcasts to (B, N, T, S), bias too; sinks (N,) are logits without a value. Rows that see nothing give 0.
    """
    weights, sums = _weights(query, key, visible, *given, **options)
    value = np.repeat(np.asarray(value, np.float64), query.shape[2] // key.shape[2], axis=2)
    return _sums(weights, value), sums if log_sums else weights


def _weights(query, key, visible, bias=None, scale=None, sinks=None, cap=None, see=lambda products: products):
    """The weights (B, N, T, S) and the log-sum-exp (B, T, N). see(products) replaces products of queries and keys."""
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    scale = 1 / np.sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * see(_pairs(query, np.repeat(key, query.shape[2] // key.shape[2], axis=2)))
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    scores = np.where(visible, scores, -np.inf)
    sinks = np.asarray([-np.inf] if sinks is None else sinks, np.float64)[:, None, None]
    top = np.maximum(scores.max(-1, keepdims=True), sinks)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks - top)
    with np.errstate(divide="ignore"):
        log_sums = np.moveaxis((np.log(total) + top)[..., 0], 1, 2)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0), log_sums


def _pairs(x, y):
    """The products of all pairs of rows, (B, N, T, S), of x (B, T, N, H) and y (B, S, N, H)."""
    return np.moveaxis(x, 2, 1) @ np.moveaxis(y, 1, 3)


def _sums(weights, x):
    """The sums of x (B, S, N, H) with weights (B, N, T, S), (B, T, N, H)."""
    return np.moveaxis(weights @ np.moveaxis(x, 2, 1), 1, 2)


def softmax_attention_gradients(
    query, key, value, visible, d_out, bias=None, scale=None, sinks=None, cap=None, d_log_sums=None, **options
):
    """Gradients of query, key, value, the (B, N, T, S) scores after the bias, and sinks if there are any."""
    kv_heads, scale = key.shape[2], 1 / np.sqrt(query.shape[-1]) if scale is None else scale
    group = query.shape[2] // kv_heads
    weights, _ = _weights(query, key, visible, bias, scale, sinks, cap, **options)
    query, key, value, d_out = (np.asarray(x, np.float64) for x in (query, key, value, d_out))
    wide_key, wide_value = np.repeat(key, group, axis=2), np.repeat(value, group, axis=2)
    d_weights = _pairs(d_out, wide_value)
    mean = (weights * d_weights).sum(-1)
    if d_log_sums is not None:
        mean = mean - np.moveaxis(np.asarray(d_log_sums, np.float64), 2, 1)
    d_scores = weights * (d_weights - mean[..., None])
    slope = scale
    if cap is not None:
        slope = scale / np.cosh(scale * _pairs(query, wide_key) / cap) ** 2
    d_query = _sums(slope * d_scores, wide_key)
    d_key = _sums((slope * d_scores).swapaxes(2, 3), query)
    d_value = _sums(weights.swapaxes(2, 3), d_out)
    fold = lambda x: x.reshape(*x.shape[:2], kv_heads, group, x.shape[3]).sum(3)  # noqa: E731
    if sinks is None:
        return d_query, fold(d_key), fold(d_value), d_scores
    # The keys' weights sum to 1 minus the sink's weight; the sink's value is 0. A row without keys has no gradient.
    return d_query, fold(d_key), fold(d_value), d_scores, -((1 - weights.sum(-1)) * mean).sum((0, 2))


def alibi(slopes, distance):
    """The bias (N, T, S) for distances (T, S), the query's position minus the key's, and its gradient as a function of
    the gradients (B, N, T, S) of all elements."""
    far = np.abs(distance).astype(np.float64)
    return -np.asarray(slopes)[:, None, None] * far, lambda d: -(d * far).sum((0, 2, 3))


def t5(table, distance, max_distance, bidirectional):
    """As `alibi`, for a table (buckets, N)."""
    table = np.asarray(table, np.result_type(np.asarray(table).dtype, np.float64))
    count = len(table) // 2 if bidirectional else len(table)
    first = np.where(distance < 0, count, 0) if bidirectional else 0
    far = np.abs(distance) if bidirectional else np.maximum(distance, 0)
    share = np.log(np.maximum(far, 1) / (count // 2)) / np.log(max_distance / (count // 2))
    log_bucket = np.minimum(count // 2 + np.floor(share * (count - count // 2)), count - 1)
    bucket = (first + np.where(far < count // 2, far, log_bucket)).astype(int)

    def pull(d):
        total = np.zeros(table.shape)
        np.add.at(total, bucket, np.moveaxis(d.sum(0), 0, -1))
        return total

    return np.moveaxis(table[bucket], -1, 0), pull


def pairs(num_queries, num_keys, sees, query_start=0, key_start=0, is_causal=False):
    """(T, S) bool, pair by pair: sees(i, j) for absolute positions, and j <= i if causal."""
    return np.array(
        [
            [bool(sees(i, j)) and (j <= i or not is_causal) for j in range(key_start, key_start + num_keys)]
            for i in range(query_start, query_start + num_queries)
        ]
    ).reshape(num_queries, num_keys)


def everything(i, j):
    return True


def sliding(left, right):
    return lambda i, j: j in range(i - left, i + right + 1)


def dilated(left, right, dilation):
    return lambda i, j: j in {i + dilation * d for d in range(-left, right + 1)}


def block_diagonal(block):
    return lambda i, j: j in range(i - i % block, i - i % block + block)


def bucketed(size, before, after):
    return lambda i, j: j in range(i - i % size - before * size, i - i % size + (after + 1) * size)


def surrounded(size, reach):
    return lambda i, j: j in range(i - i % size - reach, i - i % size + size + reach)


def strided(stride):
    return lambda i, j: abs(i - j) <= stride or (i - j) % stride == 0


def fixed(stride, summary):
    return lambda i, j: block_diagonal(stride)(i, j) or j % stride in range(stride - summary, stride)


def global_window(left, right, num_global, segment=None):
    def sees(i, j):
        if j < num_global:
            return True
        if i < num_global:
            return segment is None or (j - num_global) // segment == i
        return sliding(left, right)(i, j)

    return sees


def axial(width):
    return lambda i, j: i // width == j // width or i % width == j % width


def neighbourhood(width, rows, columns):
    return lambda i, j: abs(i // width - j // width) <= rows and abs(i % width - j % width) <= columns


def big_bird(block, window_blocks, global_blocks, random_lists):
    def sees(i, j):
        a, b = i // block, j // block
        return min(a, b) < global_blocks or abs(a - b) <= window_blocks // 2 or b in random_lists[a]

    return sees


def block_mask(block, mask):
    return lambda i, j: mask[i // block][j // block]


def relative_error(got, expected):
    """The norm of the difference over the norm of the expected value (or over 0.01 if that is near 0)."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return np.linalg.norm((got - expected).ravel()) / max(np.linalg.norm(expected.ravel()), 1e-2)
