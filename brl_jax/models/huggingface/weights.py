"""The tensors of a decoder of transformers beside the parameters of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from brl_jax.models.decoder import DecoderConfig
from brl_jax.models.huggingface.architectures import Architecture
from brl_jax.models.stack import group_layers

Path = tuple[str, ...]


class _Entry(NamedTuple):
    """A tensor: its name, the path of our parameter, the repeat of its layer in that parameter (None: it is not
    stacked), and its value in our layout and in theirs."""

    name: str
    path: Path
    repeat: int | None
    shape: tuple[int, ...]
    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]


def _pairs(head_dim: int) -> Int[np.ndarray, " H"]:
    """Where our feature is in a head of transformers: it rotates feature i with i + H/2, we rotate neighbours."""
    return np.arange(head_dim).reshape(2, head_dim // 2).T.ravel()


def _entries(config: DecoderConfig, architecture: Architecture) -> Iterator[_Entry]:
    d = config.dimensions
    width, hidden, head = d.d_model, d.d_ff, d.head_dim
    pairs = _pairs(head)
    back = np.argsort(pairs)
    offset = architecture.norm_offset

    def plain(name: str, path: Path, repeat: int | None, shape: tuple[int, ...]) -> _Entry:
        return _Entry(name, path, repeat, shape, lambda a: a, lambda a: a)

    def linear(name: str, path: Path, repeat: int, inputs: int, outputs: int, bias: bool) -> Iterator[_Entry]:
        yield _Entry(
            f"{name}.weight", (*path, "kernel"), repeat, (outputs, inputs), lambda a: a.T, lambda a: a.T
        )
        if bias:
            yield plain(f"{name}.bias", (*path, "bias"), repeat, (outputs,))

    def heads(name: str, path: Path, repeat: int, number: int, rotated: bool, bias: bool) -> Iterator[_Entry]:
        forth, home = (pairs, back) if rotated else (np.arange(head), np.arange(head))
        yield _Entry(
            f"{name}.weight",
            (*path, "kernel"),
            repeat,
            (number * head, width),
            lambda a: a.reshape(number, head, width)[:, forth].transpose(2, 0, 1),
            lambda a: a.transpose(1, 2, 0)[:, home].reshape(number * head, width),
        )
        if bias:
            yield _Entry(
                f"{name}.bias",
                (*path, "bias"),
                repeat,
                (number * head,),
                lambda a: a.reshape(number, head)[:, forth],
                lambda a: a[:, home].reshape(number * head),
            )

    def scale(name: str, path: Path, repeat: int | None, of_head: bool = False) -> _Entry:
        forth, home = (pairs, back) if of_head else (slice(None), slice(None))
        return _Entry(
            f"{name}.weight",
            (*path, "scale"),
            repeat,
            (head if of_head else width,),
            lambda a: a[forth] + offset,
            lambda a: (a - offset)[home],
        )

    yield plain("model.embed_tokens.weight", ("embedding",), None, (config.vocab_size, width))
    if not config.tied_embeddings:
        yield plain("lm_head.weight", ("unembedding",), None, (config.vocab_size, width))
    yield scale("model.norm", ("stack", "final_norm"), None)
    number = 0
    for group, (period, repeats) in enumerate(group_layers(config.mechanisms)):
        for repeat in range(repeats):
            for i, mechanism in enumerate(period):
                layer, block = f"model.layers.{number}", ("stack", f"layers_{group}", f"block_{i}")
                number += 1
                attention, mixer = f"{layer}.self_attn", (*block, "mixer")
                has_bias = getattr(mechanism, "qkv_bias", None)
                bias = d.use_bias if has_bias is None else has_bias
                yield from heads(f"{attention}.q_proj", (*mixer, "query"), repeat, d.num_heads, True, bias)
                yield from heads(f"{attention}.k_proj", (*mixer, "key"), repeat, d.num_kv_heads, True, bias)
                yield from heads(
                    f"{attention}.v_proj", (*mixer, "value"), repeat, d.num_kv_heads, False, bias
                )
                yield _Entry(
                    f"{attention}.o_proj.weight",
                    (*mixer, "out", "kernel"),
                    repeat,
                    (width, d.num_heads * head),
                    lambda a: a.T.reshape(d.num_heads, head, width),
                    lambda a: a.reshape(d.num_heads * head, width).T,
                )
                if d.use_bias:
                    yield plain(f"{attention}.o_proj.bias", (*mixer, "out", "bias"), repeat, (width,))
                if architecture.qk_norm:
                    yield scale(f"{attention}.q_norm", (*mixer, "query_norm"), repeat, of_head=True)
                    yield scale(f"{attention}.k_norm", (*mixer, "key_norm"), repeat, of_head=True)
                ffn = (*block, "feed_forward")
                for theirs, ours in (("gate_proj", "gate"), ("up_proj", "up")):
                    yield from linear(
                        f"{layer}.mlp.{theirs}", (*ffn, ours), repeat, width, hidden, d.ffn_bias
                    )
                yield from linear(f"{layer}.mlp.down_proj", (*ffn, "down"), repeat, hidden, width, d.ffn_bias)
                norms = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "feed_forward_norm"}
                if d.output_norms:
                    norms = {
                        "input_layernorm": "mixer_norm",
                        "post_attention_layernorm": "mixer_output_norm",
                        "pre_feedforward_layernorm": "feed_forward_norm",
                        "post_feedforward_layernorm": "feed_forward_output_norm",
                    }
                for theirs, ours in norms.items():
                    yield scale(f"{layer}.{theirs}", (*block, ours), repeat)


def to_parameters(
    config: DecoderConfig, architecture: Architecture, names: Any, read: Callable[[str], np.ndarray]
) -> dict[str, Any]:
    """Our parameters, float32, from the tensors that `read` gives for their names.

    Raises:
      ValueError: tensors that are missing, too many, or of another shape; the error names them.
    """
    left = {name for name in names if not name.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings:
        left.discard("lm_head.weight")  # some files hold the table twice
    leaves: dict[Path, Any] = {}
    for entry in _entries(config, architecture):
        if entry.name not in left:
            raise ValueError(f"the weights lack {entry.name}, which config.json asks for")
        left.discard(entry.name)
        tensor = read(entry.name)
        if tensor.shape != entry.shape:
            raise ValueError(f"{entry.name} must have the shape {entry.shape}, got {tensor.shape}")
        ours = np.ascontiguousarray(entry.to_ours(tensor.astype(np.float32)))
        if entry.repeat is None:
            leaves[entry.path] = ours
        else:
            leaves.setdefault(entry.path, []).append(ours)
    if left:
        raise ValueError(
            f"the weights hold {len(left)} tensors that config.json has no place for, such as {min(left)}"
        )
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = np.stack(leaf) if isinstance(leaf, list) else leaf
    return tree


def to_tensors(
    config: DecoderConfig, architecture: Architecture, params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The tensors of transformers, float32, from our parameters.

    Raises:
      ValueError: parameters of another network than the configuration's.
    """
    tensors = {}
    for entry in _entries(config, architecture):
        leaf: Any = params
        for part in entry.path:
            if not isinstance(leaf, Mapping) or part not in leaf:
                raise ValueError(f"params lack {'/'.join(entry.path)}, which the configuration asks for")
            leaf = leaf[part]
        leaf = np.asarray(leaf, np.float32)
        theirs = np.ascontiguousarray(entry.to_theirs(leaf if entry.repeat is None else leaf[entry.repeat]))
        if theirs.shape != entry.shape:
            raise ValueError(f"params: {'/'.join(entry.path)} has another shape than the configuration's")
        tensors[entry.name] = theirs
    return tensors
