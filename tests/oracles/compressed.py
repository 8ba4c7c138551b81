"""Compression from equations 8-12, and BRL's network, block by block, with each history sliced when needed."""

import math

import numpy as np

from tests.oracles import attention
from tests.oracles.local import local_mask
from tests.oracles.parts import feed_forward, layers, norm, project, relu, rotary, sigma, softmax_attention


def compress(q, k1, k2, v, gamma, scale, score, bias=None, mask=None):
    """One batch entry and head at a time; analytic, so complex steps give derivatives."""
    batch, m, heads, _ = q.shape
    s = k1.shape[1]
    bias = np.zeros((1, 1, 1, 1)) if bias is None else bias
    bias = np.broadcast_to(bias, (batch, heads, m, s))
    mask = np.broadcast_to(True if mask is None else mask, (batch, heads, m, s))
    operands = [a for a in (q, k1, k2, v, gamma, bias) if a is not None]
    out = np.zeros((*q.shape[:3], v.shape[3]), np.result_type(*operands))
    for b in range(batch):
        for n in range(heads):
            w = sigma(q[b, :, n] @ k1[b, :, n].T * scale + bias[b, n], mask[b, n], score)
            if k2 is not None:
                w = w - gamma[n] * sigma(q[b, :, n] @ k2[b, :, n].T * scale + bias[b, n], mask[b, n], score)
            out[b, :, n] = w @ v[b, :, n]
    return out


def brl_network(params, mechanism, d, x):
    """Algorithm 1 (or equations 4-12), block by block, with each history sliced when needed."""
    m = mechanism
    n = x.shape[0]
    block = m.block_size if d.is_causal else n  # all cases set it
    history = m.block_size if m.history_size is None else m.history_size
    mask = local_mask(n, d, m.local)
    table = params["carrier_0"]["tokens"]
    per_layer = layers(params)
    inputs = [np.zeros((0, x.shape[1]), x.dtype) for _ in per_layer]
    outputs = np.zeros((0, x.shape[1]), x.dtype)
    for start in range(0, n, block):
        end = min(n, start + block)
        h, ct = x[start:end], table
        for index, p in enumerate(per_layer):
            u = norm(h, p["mixer_norm"], d.norm) if m.residual == "pre" else h
            inputs[index] = np.concatenate([inputs[index], u])
            if not d.is_causal:
                source = norm(x, params["carrier_0"]["history_norm"], d.norm) if m.memory == "output" else u
            elif m.memory == "output":
                source = np.real(outputs[max(0, start - history) : start])  # no gradient through the queue
            else:
                source = inputs[index][max(0, start - history) : start]
            gen = softmax_attention(inputs[index], p["mixer"]["local"], mask[:end, :end], d)[start:]
            ct, prop = brl_regulariser(p["mixer"], m, d, u, ct, source, history, end - start)
            mixed = gen + prop
            if m.residual == "post":
                h = h + norm(mixed, p["mixer_norm"], d.norm)
                h = h + norm(feed_forward(h, p["feed_forward"]), p["feed_forward_norm"], d.norm)
            else:
                h = h + mixed
                h = h + feed_forward(norm(h, p["feed_forward_norm"], d.norm), p["feed_forward"])
        outputs = np.concatenate([outputs, norm(h, params["final_norm"], d.norm)])
    return outputs


def brl_regulariser(p, m, d, u, ct, source, history, length):
    c = p["compressed"]
    count, heads = ct.shape[0], d.num_heads
    equations = m.formulation == "equations"
    read = ct
    if source.shape[0]:
        # The distance from a token before the block to the block's start; in an encoder, to evenly spread positions.
        if d.is_causal:
            query_places, key_places = np.full(count, 0), np.arange(-source.shape[0], 0)
        else:
            query_places, key_places = (
                np.array([(2 * j + 1) * length // (2 * count) for j in range(count)]),
                np.arange(length),
            )
        q = project(ct, c["compress_query"])
        k1, v, *contrast = np.moveaxis(project(source, c["compress_source"]), 1, 0)
        k2 = contrast[0] if contrast else None
        if m.compress_positions == "rope":
            q, k1 = rotary(q, query_places), rotary(k1, key_places)
            k2 = None if k2 is None else rotary(k2, key_places)
        scale = (
            1 / (count * math.sqrt(q.shape[-1])) if m.compress_scale == "m1" else 1 / math.sqrt(q.shape[-1])
        )
        if m.compress_scale == "learned":
            q = q * c["compress_scale"][None, :, None]
        outs = []
        for a in range(heads):
            bias = position_bias(m, d, c.get("compress_bias"), a, query_places, key_places, history)
            every = np.ones((count, source.shape[0]), bool)
            s = sigma(q[:, a] @ k1[:, a].T * scale + bias, every, m.score)
            if m.gamma != 0.0:
                gamma = m.gamma
                if gamma is None:
                    g = c["gamma"][:, a]
                    gamma = np.exp(g[0] * g[1]) - np.exp(g[0] * g[2])
                s = s - gamma * sigma(q[:, a] @ k2[:, a].T * scale + bias, every, m.score)
            outs.append(norm(s @ v[:, a], {"scale": c["compress_norm"]["scale"][a]}, d.norm))
        read = np.concatenate(outs, -1)
    evolved = (1 - m.beta) * norm(read, c["read_norm"], d.norm)
    if m.beta:
        evolved = evolved + m.beta * (ct @ c["carry"]["kernel"])
    if equations:
        evolved = relu(evolved)
    zq = project(u, p["propagate_query"])
    if m.phi == "spiky":
        zq = np.exp(np.where(np.real(zq) < 10, zq, 10.0))
    zk, zv = project(evolved, c["propagate_key"]), project(evolved, c["propagate_value"])
    places = np.full(count, -1)
    if not d.is_causal:
        places = np.array([(2 * j + 1) * length // (2 * count) for j in range(count)])
    outs = []
    for a in range(heads):
        bias = position_bias(m, d, p.get("propagate_bias"), a, np.arange(length), places, history)
        s = sigma(
            zq[:, a] @ zk[:, a].T / math.sqrt(zq.shape[-1]) + bias, np.ones((length, count), bool), m.score
        )
        outs.append(p["lambda"][a] * (s @ zv[:, a]))
    prop = np.concatenate(outs, -1)
    if equations:
        return evolved, prop
    ct = ct + evolved
    ct = ct + feed_forward(norm(ct, c["ffn_norm"], d.norm), c["ffn"])
    return ct, relu(norm(prop, p["propagate_norm"], d.norm))


def position_bias(m, d, table, head, query_places, key_places, history):
    distance = query_places[:, None] - key_places
    if m.bias == "none":
        return 0.0
    if m.bias == "alibi":
        return attention.alibi(2.0 ** (-8 * np.arange(1, d.num_heads + 1) / d.num_heads), distance)[0][head]
    return attention.t5(table, distance, history, not d.is_causal)[0][head]


NETWORKS = {"brl": brl_network}
