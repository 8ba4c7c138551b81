"""The mechanisms that rank or hash tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.sorting.informer import sampled_fractions
from brl_jax.attention.sorting.reformer import reformer_rotations
from tests.oracles.parts import each_head, inputs, merge, project, relu, residual_network, rotary, softmax


def informer(query, key, value, *, rng, factor=5, scale=None, is_causal=False):
    """The queries whose sampled scores have the largest maximum minus mean attend (arXiv:2012.07436, algorithm 1).

    A causal query is ranked among the queries up to its own."""
    n, scale = len(query), 1 / np.sqrt(query.shape[2]) if scale is None else scale
    sees = [t + 1 if is_causal else n for t in range(n)]
    logarithms = [max(1, int(np.ceil(np.log(s)))) for s in sees]
    budgets = [min(s, factor * log) for s, log in zip(sees, logarithms)]
    # The library draws the random fractions.
    draws = np.stack([np.asarray(sampled_fractions(rng, jnp.arange(n), s)) for s in range(max(budgets))], 1)

    @each_head
    def attend(q, k, v):
        scores, measures, attending, out = q @ k.T, [], 0, []
        for t in range(n):
            sampled = np.real(
                scores[t, np.floor(draws[t, : budgets[t]].astype(np.float64) * sees[t]).astype(int)]
            )
            measures.append(sampled.max() - sampled.mean())
        for t in range(n):
            others = measures[:t] if is_causal else measures[:t] + measures[t + 1 :]
            attends = sum(x >= measures[t] for x in others) < budgets[t]
            attends = attends and not (is_causal and attending >= 2 * budgets[t] * logarithms[t])
            attending += attends
            seen = v[: sees[t]]
            if attends:
                out.append((softmax(scale * scores[None, t, : sees[t]]) @ seen)[0])
            else:
                out.append(seen.sum(0) if is_causal else seen.mean(0))
        return np.stack(out)

    return attend(query, key, value)


def informer_mix(u, p, m, d):
    return merge(
        informer(*inputs(u, p), rng=jax.random.key(m.seed), factor=m.factor, is_causal=d.is_causal), p
    )


def native_sparse(
    q, k, v, key_blocks, value_blocks, gates, *, sizes, window, window_key=None, window_value=None
):
    """Token by token, one branch after the other (arXiv:2502.11089)."""
    n, kv_heads, group, scale = len(q), k.shape[1], q.shape[1] // k.shape[1], 1 / np.sqrt(q.shape[2])
    length, stride, size = sizes.compressed, sizes.stride, sizes.selected
    k_window, v_window = (k, v) if window_key is None else (window_key, window_value)
    starts = range(0, n - length + 1, stride)

    def read(query, keys, values):
        if not len(keys):
            return np.zeros(values.shape[1]), np.zeros(len(keys))
        w = softmax(scale * (keys @ query)[None])
        return (w @ values)[0], w[0]

    out = []
    for t in range(n):
        ended = sum(start + length <= t + 1 for start in starts)
        for b in range(kv_heads):
            heads = range(b * group, (b + 1) * group)
            far = [read(q[t, a], key_blocks[:ended, b], value_blocks[:ended, b]) for a in heads]
            # The weight of a block of tokens: for each of its strides, add the blocks that cover the stride.
            weight = sum(np.real(w) for _, w in far)
            own = t // size
            rank = {}
            for j in range(1, own - 1):
                pieces = range(j * size // stride, (j + 1) * size // stride)
                rank[j] = sum(
                    weight[i]
                    for x in pieces
                    for i in range(x - length // stride + 1, x + 1)
                    if 0 <= i < ended
                )
            best = sorted(rank, key=lambda j: -rank[j])[: max(sizes.blocks - 3, 0)]
            blocks = {*[own, own - 1, 0][: sizes.blocks], *best} - {-1}
            chosen = [i for j in sorted(blocks) for i in range(j * size, min((j + 1) * size, t + 1))]
            near = slice(max(0, t - window + 1), t + 1)
            for a, (first, _) in zip(heads, far):
                second, _ = read(q[t, a], k[chosen, b], v[chosen, b])
                third, _ = read(q[t, a], k_window[near, b], v_window[near, b])
                out.append(gates[t, a, 0] * first + gates[t, a, 1] * second + gates[t, a, 2] * third)
    return np.reshape(out, (*q.shape[:2], v.shape[2]))


def native_sparse_mix(u, p, m, d):
    n, length = len(u), m.compressed_size
    starts = range(0, n - length + 1, m.stride)

    def compressed(name):
        """(C, K, h): one hidden layer with tanh GELU over each block's tokens."""
        x, blocks = project(u, p[f"compressed_{name}"]), []
        for start in starts:
            block = np.moveaxis(x[start : start + length], 0, 2) + p[f"compress_{name}_places"]
            hidden = np.tensordot(block, p[f"compress_{name}_hidden"]["kernel"], axes=2)
            cubic = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
            blocks.append(hidden * (1 + np.tanh(cubic)) / 2 @ p[f"compress_{name}_out"]["kernel"])
        return np.reshape(blocks, (len(blocks), *x.shape[1:])) if blocks else np.zeros((0, *x.shape[1:]))

    window_key = rotary(project(u, p["window_key"]), np.arange(n))
    out = native_sparse(
        *inputs(u, p),
        rotary(compressed("key"), np.array(starts)),
        compressed("value"),
        1 / (1 + np.exp(-project(u, p["gates"]))),
        sizes=m.sizes,
        window=m.window,
        window_key=window_key,
        window_value=project(u, p["window_value"]),
    )
    return merge(out, p)


def reformer(query, value, rotations, *, chunk_size, scale=None, is_causal=False):
    """Token by token, round by round: the softmax over everything seen in any round (arXiv:2001.04451)."""
    n, scale = len(query), 1 / np.sqrt(query.shape[2]) if scale is None else scale

    @each_head
    def attend(q, v):
        seen = np.zeros((n, n), bool)
        for rotation in rotations:
            sides = np.real(q) @ rotation
            bucket = np.argmax(np.concatenate([sides, -sides], 1), 1)
            if is_causal:
                chunk = np.array([np.sum(bucket[:t] == bucket[t]) for t in range(n)]) // chunk_size
            else:
                chunk = np.argsort(sorted(range(n), key=lambda t, b=bucket: (b[t], t))) // chunk_size
            apart = chunk[:, None] - chunk
            seen |= (bucket[:, None] == bucket) & ((apart == 0) | (apart == 1))
        seen &= np.tri(n, k=-1, dtype=bool) if is_causal else ~np.eye(n, dtype=bool)
        seen |= np.diag(~seen.any(1))
        scores = q @ (q / np.sqrt((q * q).sum(1, keepdims=True))).T * scale
        return softmax(scores, seen) @ v

    return attend(query, value)


def reformer_mix(u, p, m, d):
    # The library draws the random directions.
    sizes = {"num_rounds": m.num_rounds, "num_buckets": m.num_buckets}
    rotations = np.asarray(reformer_rotations(jax.random.key(m.seed), d.head_dim, **sizes), np.float64)
    query, value = rotary(project(u, p["query"]), np.arange(len(u))), project(u, p["value"])
    return merge(reformer(query, value, rotations, chunk_size=m.chunk_size, is_causal=d.is_causal), p)


def sinkhorn(query, key, value, logits, *, block_size, iterations, temperature, scale=None, is_causal=False):
    """Block by block: the block's tokens and the mixed ones share one softmax (arXiv:2002.11296, section 3)."""
    n, w, count = len(query), block_size, len(logits)
    scale = 1 / np.sqrt(query.shape[2]) if scale is None else scale

    @each_head
    def attend(q, k, v, logits):
        s = np.exp(logits / temperature)
        if is_causal:
            s = s * np.tri(count, k=-1)
        for _ in range(iterations):
            rows = s.sum(1, keepdims=True)
            s = s / np.where(rows == 0, 1, rows)
            # Divided by the column so far, or by the whole column.
            columns = np.stack([s[: i + 1].sum(0) if is_causal else s.sum(0) for i in range(count)])
            s = s / np.where(columns == 0, 1, columns)
        out = []
        for t in range(n):
            i = t // w
            own = range(i * w, t + 1 if is_causal else min(n, i * w + w))
            mixed = range(min(w, n)) if i or not is_causal else ()
            keys, values = (
                np.array(
                    [sum(s[i, j] * x[j * w + c] for j in range(count) if j * w + c < n) for c in mixed]
                    + [x[t] for t in own]
                )
                for x in (k, v)
            )
            out.append((softmax(scale * (keys @ q[t])[None]) @ values)[0])
        return np.stack(out)

    return attend(query, key, value, logits)


def sinkhorn_mix(u, p, m, d):
    n, w = len(u), m.block_size
    sums = np.stack([u[: s + 1].sum(0) if d.is_causal else u[s : s + w].sum(0) for s in range(0, n, w)])
    logits = relu(project(relu(project(sums, p["sort_hidden"])), p["sort_blocks"]))[:, : len(sums)]
    options = {"block_size": w, "iterations": m.iterations, "temperature": m.temperature}
    out = sinkhorn(*inputs(u, p), logits.swapaxes(1, 2), is_causal=d.is_causal, **options)
    return merge(out, p)


def sliceformer(value, *, order="ascending"):
    """Sorts each channel along the sequence (arXiv:2310.17683)."""
    out = np.empty_like(value)
    for a, c in np.ndindex(value.shape[1:]):
        falls = order == "descending" or (order == "interleaved" and c % 2 == 1)
        ranked = sorted(value[:, a, c], key=lambda z, falls=falls: -np.real(z) if falls else np.real(z))
        if order == "max_exchange":
            ranked = list(value[:, a, c])
            largest = int(np.argmax(np.real(value[:, a, c])))
            ranked[0], ranked[largest] = ranked[largest], ranked[0]
        out[:, a, c] = ranked
    return out


def sliceformer_mix(u, p, m, d):
    return merge(sliceformer(project(u, p["value"]), order=m.order), p)


NETWORKS = {
    "informer": residual_network(informer_mix),
    "native_sparse": residual_network(native_sparse_mix),
    "reformer": residual_network(reformer_mix),
    "sinkhorn": residual_network(sinkhorn_mix),
    "sliceformer": residual_network(sliceformer_mix),
}
