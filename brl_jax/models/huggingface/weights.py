"""Maps the tensors of a decoder of transformers to our parameters, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import traverse_util
from jaxtyping import Int

from brl_jax.layers.recurrent.gated_deltanet import GatedDeltaNetConfig
from brl_jax.models.decoder import DecoderConfig
from brl_jax.models.huggingface.architectures import Architecture, LinearTensors
from brl_jax.models.stack import layer_places

Path = tuple[str, ...]
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class _Entry(NamedTuple):
    """A tensor of transformers.

    Attributes:
      paths: the parameters that it holds.
      repeat: its layer's index in the stacked parameters; None if they are not stacked.
      to_ours, to_theirs: convert its value to the parameters' values, and back.
      pieces: names and rows of the tensors in which files hold it; it is one tensor if there are none. Some files cut
        it after other rows.
    """

    name: str
    paths: tuple[Path, ...]
    repeat: int | None
    shape: tuple[int, ...]
    to_ours: Callable[[np.ndarray], Sequence[np.ndarray]]
    to_theirs: Callable[..., np.ndarray]
    pieces: tuple[tuple[str, int], ...] = ()


class _Layer(NamedTuple):
    """A layer: its prefix in their names, the path of its block in our parameters, and its index in the stack."""

    prefix: str
    block: Path
    repeat: int


def _pairs(head_dim: int, rotated: int) -> Int[np.ndarray, " H"]:
    """Returns, for each of our features, its index in a head of transformers, which rotates the first `rotated`
    features. It rotates feature i with i + rotated / 2; we rotate neighbours."""
    turned = np.arange(rotated).reshape(2, rotated // 2).T.ravel()
    return np.concatenate([turned, np.arange(rotated, head_dim)])


def _plain(name: str, path: Path, repeat: int | None, shape: tuple[int, ...]) -> _Entry:
    return _Entry(name, (path,), repeat, shape, lambda a: (a,), lambda a: a)


def _linear(
    name: str, path: Path, repeat: int, inputs: int, outputs: int, bias: bool = False
) -> Iterator[_Entry]:
    weight = (*path, "kernel")
    yield _Entry(f"{name}.weight", (weight,), repeat, (outputs, inputs), lambda a: (a.T,), lambda a: a.T)
    if bias:
        yield _plain(f"{name}.bias", (*path, "bias"), repeat, (outputs,))


def _scale(name: str, path: Path, repeat: int | None, offset: float, places: Int[np.ndarray, "*H"]) -> _Entry:
    """A norm's weights. Ours are theirs at these places, plus the offset."""
    back = np.argsort(places, axis=None)
    return _Entry(
        f"{name}.weight",
        ((*path, "scale"),),
        repeat,
        (places.size,),
        lambda a: (a[places] + offset,),
        lambda a: (a - offset).ravel()[back],
    )


def _heads_out(name: str, path: Path, repeat: int, heads: int, head: int, width: int) -> _Entry:
    """The output projection of merged heads."""
    return _Entry(
        f"{name}.weight",
        ((*path, "kernel"),),
        repeat,
        (width, heads * head),
        lambda a: (a.T.reshape(heads, head, width),),
        lambda a: a.reshape(heads * head, width).T,
    )


def _softmax(
    config: DecoderConfig, architecture: Architecture, mechanism: Any, at: _Layer
) -> Iterator[_Entry]:
    """Yields the tensors of a softmax attention layer."""
    d, name, path = config.dimensions, f"{at.prefix}.self_attn", (*at.block, "mixer")
    head, width = d.head_dim, d.d_model
    bias = d.use_bias if mechanism.qkv_bias is None else mechanism.qkv_bias
    plain, rotated = (
        np.arange(head),
        _pairs(head, head if mechanism.rotary_dim is None else mechanism.rotary_dim),
    )

    def heads(theirs: str, number: int, **parts: Int[np.ndarray, " H"]) -> Iterator[_Entry]:
        """Yields the projections in `parts`, which are consecutive in each of their heads; ours are at these places."""
        paths = {part: np.asarray(places) for part, places in parts.items()}

        def split(a: np.ndarray) -> list[np.ndarray]:
            a = a.reshape(number, len(paths), head, *a.shape[1:])
            return [a[:, i, places] for i, places in enumerate(paths.values())]

        def join(*ours: np.ndarray) -> np.ndarray:
            parts = [a[:, np.argsort(places)] for a, places in zip(ours, paths.values())]
            return np.stack(parts, 1).reshape(number * len(parts) * head, *ours[0].shape[2:])

        rows = number * len(paths) * head
        yield _Entry(
            f"{name}.{theirs}.weight",
            tuple((*path, part, "kernel") for part in paths),
            at.repeat,
            (rows, width),
            lambda a: [part.transpose(2, 0, 1) for part in split(a)],
            lambda *ours: join(*(a.transpose(1, 2, 0) for a in ours)),
        )
        if bias:
            own = tuple((*path, part, "bias") for part in paths)
            yield _Entry(f"{name}.{theirs}.bias", own, at.repeat, (rows,), split, join)

    gate = {"gate": plain} if mechanism.output_gate else {}
    yield from heads("q_proj", d.num_heads, query=rotated, **gate)
    yield from heads("k_proj", d.num_kv_heads, key=rotated)
    yield from heads("v_proj", d.num_kv_heads, value=plain)
    yield _heads_out(f"{name}.o_proj", (*path, "out"), at.repeat, d.num_heads, head, width)
    if d.use_bias:
        yield _plain(f"{name}.o_proj.bias", (*path, "out", "bias"), at.repeat, (width,))
    if mechanism.qk_norm:
        for part, number in (("query", d.num_heads), ("key", d.num_kv_heads)):
            merged = np.arange(number)[:, None] * head + rotated
            places = merged if mechanism.qk_norm == "merged" else rotated
            own = (*path, f"{part}_norm")
            yield _scale(f"{name}.{part[0]}_norm", own, at.repeat, architecture.norm_offset, places)


def _gated_deltanet(
    config: DecoderConfig, mechanism: GatedDeltaNetConfig, tensors: LinearTensors, at: _Layer
) -> Iterator[_Entry]:
    """Yields the tensors of a linear attention layer."""
    d, name, path = config.dimensions, f"{at.prefix}.linear_attn", (*at.block, "mixer")
    keys, values, key_dim, value_dim = mechanism.sizes(d)
    width, size = d.d_model, mechanism.conv_size
    per_key, per_value = (keys, key_dim), (values, value_dim)
    sizes: dict[str, tuple[int, ...]] = {
        "query": per_key,
        "key": per_key,
        "value": per_value,
        "gate": per_value,
    }
    sizes |= {"beta": (values,), "step": (values,)}

    def split(parts: Sequence[str], groups: int, a: np.ndarray) -> list[np.ndarray]:
        """Splits the rows of a (outputs, inputs), each group of which holds a share of every part."""
        lengths = [math.prod(sizes[part]) // groups for part in parts]
        pieces = np.split(a.reshape(groups, -1, a.shape[1]), np.cumsum(lengths)[:-1], axis=1)
        return [
            piece.reshape(-1, a.shape[1]).T.reshape(-1, *sizes[part]) for part, piece in zip(parts, pieces)
        ]

    def join(groups: int, *ours: np.ndarray) -> np.ndarray:
        return np.concatenate([a.reshape(len(a), groups, -1) for a in ours], 2).reshape(len(ours[0]), -1).T

    for theirs, parts in tensors.projections.items():
        groups = keys if tensors.by_key_head else 1
        yield _Entry(
            f"{name}.{theirs}.weight",
            tuple((*path, part, "kernel") for part in parts),
            at.repeat,
            (sum(math.prod(sizes[part]) for part in parts), width),
            functools.partial(split, parts, groups),
            functools.partial(join, groups),
        )
    convolved = ("query", "key", "value")
    rows = [math.prod(sizes[part]) for part in convolved]
    pieces = [(f"{name}.{theirs}.weight", number) for theirs, number in zip(tensors.convolutions, rows)]
    yield _Entry(
        f"{name}.conv1d.weight",
        tuple((*path, f"{part}_conv", "kernel") for part in convolved),
        at.repeat,
        (sum(rows), 1, size),
        lambda a: split(convolved, 1, a[:, 0]),
        lambda *ours: join(1, *ours)[:, None],
        tuple(pieces) if len(tensors.convolutions) > 1 else (),
    )
    yield _plain(f"{name}.A_log", (*path, "rate"), at.repeat, (values,))
    yield _plain(f"{name}.dt_bias", (*path, "step_bias"), at.repeat, (values,))
    yield _scale(f"{name}.{tensors.norm}", (*path, "head_norm"), at.repeat, 0.0, np.arange(value_dim))
    yield _heads_out(f"{name}.{tensors.out}", (*path, "out"), at.repeat, values, value_dim, width)


def _entries(config: DecoderConfig, architecture: Architecture) -> Iterator[_Entry]:
    d = config.dimensions
    width, hidden, offset = d.d_model, d.d_ff, architecture.norm_offset
    everywhere = np.arange(width)
    yield _plain(_TABLE, ("embedding",), None, (config.vocab_size, width))
    if not config.tied_embeddings:
        yield _plain(_HEAD, ("unembedding",), None, (config.vocab_size, width))
    yield _scale("model.norm", ("stack", "final_norm"), None, offset, everywhere)
    for number, (mechanism, place) in enumerate(zip(config.mechanisms, layer_places(config.mechanisms))):
        repeat = place.repeat
        at = _Layer(f"model.layers.{number}", ("stack", place.group, place.block), repeat)
        if isinstance(mechanism, GatedDeltaNetConfig):
            assert architecture.linear is not None  # else it would not have such layers
            yield from _gated_deltanet(config, mechanism, architecture.linear, at)
        else:
            yield from _softmax(config, architecture, mechanism, at)
        layer, ffn = at.prefix, (*at.block, "feed_forward")
        for theirs, ours in (("gate_proj", "gate"), ("up_proj", "up")):
            yield from _linear(f"{layer}.mlp.{theirs}", (*ffn, ours), repeat, width, hidden, d.ffn_bias)
        yield from _linear(f"{layer}.mlp.down_proj", (*ffn, "down"), repeat, hidden, width, d.ffn_bias)
        norms = dict(zip(architecture.norms, ("mixer_norm", "feed_forward_norm")))
        if mechanism.residual == "post":
            norms = {
                "post_attention_layernorm": "mixer_norm",
                "post_feedforward_layernorm": "feed_forward_norm",
            }
        if d.output_norms:
            norms = {
                "input_layernorm": "mixer_norm",
                "post_attention_layernorm": "mixer_output_norm",
                "pre_feedforward_layernorm": "feed_forward_norm",
                "post_feedforward_layernorm": "feed_forward_output_norm",
            }
        for theirs, ours in norms.items():
            yield _scale(f"{layer}.{theirs}", (*at.block, ours), repeat, offset, everywhere)


def _stored(name: str, architecture: Architecture, names: Container[str]) -> str:
    """Returns the name under which a file holds a tensor."""
    others = (name.replace(ours, theirs, 1) for ours, theirs in architecture.aliases if ours in name)
    return name if name in names else next((other for other in others if other in names), name)


def has_own_head(
    config: DecoderConfig, architecture: Architecture, names: Any, read: Callable[[str], np.ndarray]
) -> bool:
    """Returns whether a file has a separate output table although config.json ties the tables. transformers then uses
    both tables. Some files store the same table twice."""
    table = _stored(_TABLE, architecture, names)
    if not config.tied_embeddings or not {_HEAD, table} <= set(names):
        return False
    return not np.array_equal(read(_HEAD), read(table))


def check_tensors(
    config: DecoderConfig,
    architecture: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> Callable[[str], np.ndarray]:
    """Checks the names and the shapes of a folder's tensors, and returns `read` for the names that the architecture
    gives them.

    Raises:
      ValueError: a tensor is missing, unexpected, or has the wrong shape; the message names it.
    """
    left = {
        name
        for name in shapes
        if not name.endswith("rotary_emb.inv_freq") and not name.startswith(architecture.unread)
    }
    if config.tied_embeddings:
        left.discard(_HEAD)  # see `has_own_head`
    stored = {}
    for entry in _entries(config, architecture):
        pieces = [name for name, _ in entry.pieces] or [_stored(entry.name, architecture, left)]
        stored[entry.name] = pieces
        for name in pieces:
            if name not in left:
                raise ValueError(f"the weights lack {name}, which config.json requires")
            left.discard(name)
        shape = shapes[pieces[0]]
        if entry.pieces and len({shapes[name][1:] for name in pieces}) == 1:
            shape = (sum(sum(shapes[name][:1]) for name in pieces), *shape[1:])
        if shape != entry.shape:
            raise ValueError(f"{entry.name} must have the shape {entry.shape}, got {shape}")
    if left:
        raise ValueError(
            f"the weights hold {len(left)} tensors that config.json does not describe, such as {min(left)}"
        )

    def read_whole(name: str) -> np.ndarray:
        tensors = [read(piece) for piece in stored[name]]
        return np.concatenate(tensors) if tensors[1:] else tensors[0]

    return read_whole


def parts(
    config: DecoderConfig, architecture: Architecture, read: Callable[[str], np.ndarray]
) -> Iterator[tuple[Path, int | None, np.ndarray]]:
    """Yields our parameters in float32, one tensor that `read` returns at a time: the path of a parameter, the place in
    its stack of layers (None if it is not stacked), and what belongs there."""
    for entry in _entries(config, architecture):
        tensor = read(entry.name).astype(np.float32)
        for path, ours in zip(entry.paths, entry.to_ours(tensor), strict=True):
            yield path, entry.repeat, np.ascontiguousarray(ours)


def to_parameters(
    config: DecoderConfig, architecture: Architecture, read: Callable[[str], np.ndarray]
) -> dict[str, Any]:
    """Returns our parameters in float32, from the tensors that `read` returns for their names."""
    leaves: dict[Path, Any] = {}
    for path, repeat, part in parts(config, architecture, read):
        if repeat is None:
            leaves[path] = part
        else:
            leaves.setdefault(path, []).append(part)
    whole = {path: np.stack(leaf) if isinstance(leaf, list) else leaf for path, leaf in leaves.items()}
    return traverse_util.unflatten_dict(whole)


def to_tensors(
    config: DecoderConfig, architecture: Architecture, params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns the tensors of transformers in float32, from our parameters.

    Raises:
      ValueError: the parameters do not fit the configuration.
    """
    tensors: dict[str, np.ndarray] = {}
    for entry in _entries(config, architecture):
        ours = [_leaf(params, path, entry.repeat) for path in entry.paths]
        try:
            theirs = np.ascontiguousarray(entry.to_theirs(*ours))
        except ValueError:  # shapes that do not fit together
            theirs = None
        if theirs is None or theirs.shape != entry.shape:
            names = ", ".join("/".join(path) for path in entry.paths)
            raise ValueError(f"params: the shape of {names} does not match the configuration")
        if entry.pieces:
            ends = np.cumsum([rows for _, rows in entry.pieces])[:-1]
            tensors |= {name: part for (name, _), part in zip(entry.pieces, np.split(theirs, ends))}
        else:
            tensors[entry.name] = theirs
    return tensors


def _leaf(params: Mapping[str, Any], path: Path, repeat: int | None) -> np.ndarray:
    """Returns one parameter of one layer in float32."""
    leaf: Any = params
    for part in path:
        if not isinstance(leaf, Mapping) or part not in leaf:
            raise ValueError(f"params lack {'/'.join(path)}, which the configuration requires")
        leaf = leaf[part]
    leaf = np.asarray(leaf, np.float32)
    return leaf if repeat is None else leaf[repeat]
