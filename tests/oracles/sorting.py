"""Networks of the mechanisms that rank or hash tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.sorting.informer import sampled_fractions
from brl_jax.attention.sorting.reformer import reformer_rotations
from tests.oracles.parts import head_inputs, merge, project, relu, residual_network, rotary, softmax


def informer_mix(u, p, m, d):
    # The library draws the random fractions.
    n = len(u)
    sees = [t + 1 if d.is_causal else n for t in range(n)]
    logarithms = [max(1, int(np.ceil(np.log(s)))) for s in sees]
    budgets = [min(s, m.factor * log) for s, log in zip(sees, logarithms)]
    key = jax.random.key(m.seed)
    draws = np.stack([np.asarray(sampled_fractions(key, jnp.arange(n), s)) for s in range(max(budgets))], 1)
    heads = []
    for q, k, v in head_inputs(u, p, d):
        scores, measures, attending, out = q @ k.T, [], 0, []
        for t in range(n):
            sampled = np.real(
                scores[t, np.floor(draws[t, : budgets[t]].astype(np.float64) * sees[t]).astype(int)]
            )
            measures.append(sampled.max() - sampled.mean())
        for t in range(n):
            others = measures[:t] if d.is_causal else measures[:t] + measures[t + 1 :]
            attends = sum(x >= measures[t] for x in others) < budgets[t]
            attends = attends and not (d.is_causal and attending >= 2 * budgets[t] * logarithms[t])
            attending += attends
            row = scores[None, t, : sees[t]] / np.sqrt(d.head_dim)
            seen = v[: sees[t]]
            if attends:
                out.append((softmax(row) @ seen)[0])
            else:
                out.append(seen.sum(0) if d.is_causal else seen.mean(0))
        heads.append(np.stack(out))
    return merge(heads, p)


def native_sparse_mix(u, p, m, d):
    """Token by token, one branch after the other."""
    n, group, scale = len(u), d.num_heads // d.num_kv_heads, 1 / np.sqrt(d.head_dim)
    length, stride, size = m.compressed_size, m.stride, m.selected_size
    turned = [rotary(project(u, p[name]), np.arange(n)) for name in ("query", "key", "window_key")]
    q, k, k_window = turned
    v, v_window = project(u, p["value"]), project(u, p["window_value"])
    gates = 1 / (1 + np.exp(-project(u, p["gates"])))
    starts = range(0, n - length + 1, stride)

    def compressed(name):
        """(C, K, h): one hidden layer with tanh GELU over each block's tokens."""
        x, blocks = project(u, p[f"compressed_{name}"]), []
        for start in starts:
            block = np.moveaxis(x[start : start + length], 0, 2) + p[f"compress_{name}_places"]
            hidden = np.tensordot(block, p[f"compress_{name}_hidden"]["kernel"], axes=2)
            cubic = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
            blocks.append(hidden * (1 + np.tanh(cubic)) / 2 @ p[f"compress_{name}_out"]["kernel"])
        return np.reshape(blocks, (len(blocks), *x.shape[1:])) if blocks else np.zeros((0, *x.shape[1:]))

    key_blocks = rotary(compressed("key"), np.array(starts))
    value_blocks = compressed("value")

    def read(query, keys, values):
        if not len(keys):
            return np.zeros(values.shape[1]), np.zeros(len(keys))
        w = softmax(scale * (keys @ query)[None], np.ones((1, len(keys)), bool))
        return (w @ values)[0], w[0]

    out = []
    for t in range(n):
        ended = sum(start + length <= t + 1 for start in starts)
        for b in range(d.num_kv_heads):
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
            best = sorted(rank, key=lambda j: -rank[j])[: max(m.num_selected - 3, 0)]
            blocks = {*[own, own - 1, 0][: m.num_selected], *best} - {-1}
            chosen = [i for j in sorted(blocks) for i in range(j * size, min((j + 1) * size, t + 1))]
            near = slice(max(0, t - m.window + 1), t + 1)
            for a, (first, _) in zip(heads, far):
                second, _ = read(q[t, a], k[chosen, b], v[chosen, b])
                third, _ = read(q[t, a], k_window[near, b], v_window[near, b])
                out.append(gates[t, a, 0] * first + gates[t, a, 1] * second + gates[t, a, 2] * third)
    return np.tensordot(np.reshape(out, q.shape), p["out"]["kernel"], axes=2)


def reformer_mix(u, p, m, d):
    """Token by token, round by round: the softmax over everything seen in any round."""
    # The library draws the random directions.
    sizes = {"num_rounds": m.num_rounds, "num_buckets": m.num_buckets}
    rotations = np.asarray(reformer_rotations(jax.random.key(m.seed), d.head_dim, **sizes), np.float64)
    n, size, group = len(u), m.chunk_size, d.num_heads // d.num_kv_heads
    queries, values = rotary(project(u, p["query"]), np.arange(n)), project(u, p["value"])
    heads = []
    for a in range(d.num_heads):
        q, v = queries[:, a], values[:, a // group]
        seen = np.zeros((n, n), bool)
        for rotation in rotations:
            sides = np.real(q) @ rotation
            bucket = np.argmax(np.concatenate([sides, -sides], 1), 1)
            if d.is_causal:
                chunk = np.array([np.sum(bucket[:t] == bucket[t]) for t in range(n)]) // size
            else:
                chunk = np.argsort(sorted(range(n), key=lambda t, b=bucket: (b[t], t))) // size
            apart = chunk[:, None] - chunk
            seen |= (bucket[:, None] == bucket) & ((apart == 0) | (apart == 1))
        seen &= np.tri(n, k=-1, dtype=bool) if d.is_causal else ~np.eye(n, dtype=bool)
        seen |= np.diag(~seen.any(1))
        scores = q @ (q / np.sqrt((q * q).sum(1, keepdims=True))).T / np.sqrt(d.head_dim)
        heads.append(softmax(scores, seen) @ v)
    return merge(heads, p)


def sinkhorn_mix(u, p, m, d):
    """Block by block: the block's tokens and the mixed ones share one softmax."""
    n, w = len(u), m.block_size
    count, group = -(-n // w), d.num_heads // d.num_kv_heads
    starts = range(0, n, w)
    sums = np.stack([u[: s + 1].sum(0) if d.is_causal else u[s : s + w].sum(0) for s in starts])
    logits = relu(project(relu(project(sums, p["sort_hidden"])), p["sort_blocks"]))[:, :count]
    heads = []
    for a, (q, k, v) in enumerate(head_inputs(u, p, d)):
        s = np.exp(logits[:, :, a // group] / m.temperature)
        if d.is_causal:
            s = s * np.tri(count, k=-1)
        for _ in range(m.iterations):
            rows = s.sum(1, keepdims=True)
            s = s / np.where(rows == 0, 1, rows)
            # Divided by the column so far, or by the whole column.
            columns = np.stack([s[: i + 1].sum(0) if d.is_causal else s.sum(0) for i in range(count)])
            s = s / np.where(columns == 0, 1, columns)
        out = []
        for t in range(n):
            i = t // w
            own = range(i * w, t + 1 if d.is_causal else min(n, i * w + w))
            mixed = range(min(w, n)) if i or not d.is_causal else ()
            keys, values = (
                np.array(
                    [sum(s[i, j] * x[j * w + c] for j in range(count) if j * w + c < n) for c in mixed]
                    + [x[t] for t in own]
                )
                for x in (k, v)
            )
            scores = (keys @ q[t])[None] / np.sqrt(d.head_dim)
            out.append((softmax(scores) @ values)[0])
        heads.append(np.stack(out))
    return merge(heads, p)


def sliceformer_mix(u, p, m, d):
    v = project(u, p["value"])
    out = np.empty_like(v)
    for a, c in np.ndindex(v.shape[1:]):
        falls = m.order == "descending" or (m.order == "interleaved" and c % 2 == 1)
        ranked = sorted(v[:, a, c], key=lambda z, falls=falls: -np.real(z) if falls else np.real(z))
        if m.order == "max_exchange":
            ranked = list(v[:, a, c])
            largest = int(np.argmax(np.real(v[:, a, c])))
            ranked[0], ranked[largest] = ranked[largest], ranked[0]
        out[:, a, c] = ranked
    return np.tensordot(out, p["out"]["kernel"], axes=2)


NETWORKS = {
    "informer": residual_network(informer_mix),
    "native_sparse": residual_network(native_sparse_mix),
    "reformer": residual_network(reformer_mix),
    "sinkhorn": residual_network(sinkhorn_mix),
    "sliceformer": residual_network(sliceformer_mix),
}
