"""TLinFormer's network."""

import math

import numpy as np

from tests.oracles.parts import feed_forward, layers, norm, project, rotary, softmax


def tlinformer_network(params, mechanism, d, x):
    """The loop of TLinFormer (arXiv:2508.20407, section 3), which reads the whole history again for every window."""
    n, w, inner = x.shape[0], mechanism.window, mechanism.hidden + 2
    all_layers = layers(params)

    def project_all(p, rows, places):
        u = norm(rows, p["mixer_norm"], d.norm)
        q, k, v = (project(u, p["mixer"][name]) for name in ("query", "key", "value"))
        return rotary(q, places), rotary(k, places), v

    def attend(q, k, v, mask):
        group = d.num_heads // d.num_kv_heads
        heads = [
            softmax(q[:, a] @ k[:, a // group].T / math.sqrt(d.head_dim), mask) @ v[:, a // group]
            for a in range(d.num_heads)
        ]
        return np.stack(heads, 1)

    def finish(p, rows, attended):
        rows = rows + np.tensordot(attended, p["mixer"]["out"]["kernel"], axes=2)
        return rows + feed_forward(norm(rows, p["feed_forward_norm"], d.norm), p["feed_forward"])

    def everything(a, b):
        return np.ones((a, b), bool)

    outputs = []
    for start in range(0, n, w):
        places, past = np.arange(start, min(start + w, n)), np.arange(start)
        count = min(mechanism.context, start)
        tail = past[start - count :]
        own, history = x[places], x[past]
        causal = places[:, None] >= places[None]
        for first in range(0, len(all_layers), inner):
            p = all_layers[first]
            old_q, old_k, old_v = project_all(p, history, past)
            q, k, v = project_all(p, own, places)
            own = finish(p, own, attend(q, k, v, causal) + attend(q, old_k, old_v, everything(len(q), start)))
            read = attend(old_q[start - count :], old_k, old_v, everything(count, start))
            context = finish(p, history[start - count :], read)
            for p in all_layers[first + 1 : first + inner]:
                context_q, context_k, context_v = project_all(p, context, tail)
                q, k, v = project_all(p, own, places)
                seen = attend(q, context_k, context_v, everything(len(q), count))
                own = finish(p, own, attend(q, k, v, causal) + seen)
                before = context
                context = finish(p, before, attend(context_q, context_k, context_v, everything(count, count)))
            history = finish(p, history, attend(old_q, context_k, context_v, everything(start, count)))
        outputs.append(own)
    return norm(np.concatenate(outputs), params["final_norm"], d.norm)


NETWORKS = {"tlinformer": tlinformer_network}
