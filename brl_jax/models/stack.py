"""A stack of transformer blocks, one mechanism per layer; runs of equal layers are one scanned module."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.layers.core.modules import norm
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.models.block import Block, BlockCache, constrain_stream
from brl_jax.models.cross_attention import CrossCache, CrossCall, CrossConfig, CrossSizes, Encoded
from brl_jax.models.reversible import Branches, Operands, reversible_layers
from brl_jax.models.stack_call import (
    DecodingCache,
    Recall,
    ScannedCache,
    StackCache,
    StackCall,
    StackMemory,
    check_room,
)
from brl_jax.sharding import constrain

Remat = Literal["none", "full", "dots"]


def group_layers(mechanisms: Sequence[Mechanism]) -> list[tuple[tuple[Mechanism, ...], int]]:
    """Cuts the layers into (period, repeats): a single period if all layers repeat it, otherwise runs of equal layers.

    [A, A, A] -> [((A,), 3)];  [A, B, A, B] -> [((A, B), 2)];  [A, A, B] -> [((A,), 2), ((B,), 1)].
    """
    total = len(mechanisms)
    for period in range(1, total // 2 + 1):
        if total % period == 0 and tuple(mechanisms) == tuple(mechanisms[:period]) * (total // period):
            return [(tuple(mechanisms[:period]), total // period)]
    groups: list[tuple[tuple[Mechanism, ...], int]] = []
    for mechanism in mechanisms:
        if groups and groups[-1][0] == (mechanism,):
            groups[-1] = ((mechanism,), groups[-1][1] + 1)
        else:
            groups.append(((mechanism,), 1))
    return groups


class LayerPlace(NamedTuple):
    """Where a stack's parameters have a layer: the names of its group and block, and its index in the arrays."""

    group: str
    block: str
    repeat: int


def layer_places(mechanisms: Sequence[Mechanism]) -> list[LayerPlace]:
    """Returns the place of each layer."""
    return [
        LayerPlace(f"layers_{i}", f"block_{j}", repeat)
        for i, (period, repeats) in enumerate(group_layers(mechanisms))
        for repeat in range(repeats)
        for j in range(len(period))
    ]


class Period(nn.Module):
    """The layers of one repetition; `nn.scan` runs over the repetitions."""

    mechanisms: tuple[Mechanism, ...]
    carriers: tuple[str, ...]
    dimensions: Dimensions
    cross_attention: CrossConfig | None = None

    @nn.compact
    def __call__(self, state, caches, call, deterministic, cross):
        x, carries = state
        caches = list(caches)
        for i, (mechanism, key) in enumerate(zip(self.mechanisms, self.carriers)):
            block = Block(mechanism, self.dimensions, self.cross_attention, name=f"block_{i}")
            if self.dimensions.reversible:
                x1, x2 = x
                mixed, _, caches[i] = block.mix(x2, None, caches[i], call, deterministic)
                x1 = constrain_stream(x1 + mixed)
                x = (x1, constrain_stream(x2 + block.transform(x1, deterministic)))
                continue
            x, carry, caches[i] = block(x, carries.get(key), caches[i], call, deterministic, cross)
            if key in carries:
                carries = {**carries, key: carry}
        return (x, carries), tuple(caches)


class _Parts(NamedTuple):
    """Unbound modules, arranged as their caches are; the layers come with their number of repeats."""

    carriers: dict[str, Any]
    layers: list[tuple[tuple[Any, ...], int]]


#: Primitives whose results no layer keeps for its backward pass. XLA computes them again in the operation that reads
#: them, which takes less time than writing their results to memory and reading them back.
_RECOMPUTED = frozenset((
    "add", "sub", "mul", "div", "neg", "max", "min", "square", "integer_pow", "rsqrt", "sign", "abs",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n", "convert_element_type",
    "broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice", "split", "pad", "concatenate", "stack",
    "unstack", "iota", "copy", "bitcast_convert_type", "logistic", "tanh", "one_minus_square", "erf", "erfc",
    "polynomial", "exp", "expm1", "log", "log1p",
))  # fmt: skip


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether a layer keeps a primitive's results. For a function such as ReLU or GELU, the primitives in it decide."""
    if primitive.name in ("custom_jvp_call", "jit"):
        function = params["call_jaxpr" if primitive.name == "custom_jvp_call" else "jaxpr"]
        return any(_is_kept(each.primitive, **each.params) for each in function.eqns)
    return primitive.name not in _RECOMPUTED


_POLICIES: dict[Remat, Any] = {
    "none": _is_kept,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": None,
}


class Stack(nn.Module):
    """Blocks over `mechanisms`, one for each layer, and a final norm.

        stack = Stack(config.mechanisms, config.make_dimensions(is_causal=True))
        y, cache = stack.apply(variables, x, cache=cache)

    x and y are (B, T, D). The cache is None, or comes from `init_cache` (generation) or `init_memory` (training on
    streams; None if no layer has a memory). With `cross_attention` every block also attends to an encoder's outputs,
    which come as `encoded`; if the decoding cache was made for them, it keeps their keys and values, and only the first
    call needs them. With `random_signs` half of the final norm's weights start at -1. `encode` returns an encoder's
    outputs in the form that a decoder reads.
    """

    mechanisms: tuple[Mechanism, ...]
    dimensions: Dimensions
    remat: Remat = "none"
    cross_attention: CrossConfig | None = None
    random_signs: bool = False

    def setup(self):
        are_mechanisms = isinstance(self.mechanisms, tuple) and all(
            map(isinstance, self.mechanisms, itertools.repeat(Mechanism))
        )
        if not (are_mechanisms and isinstance(self.dimensions, Dimensions)):
            raise ValueError(
                "mechanisms and dimensions must be a network's, such as config.mechanisms and "
                f"config.make_dimensions(is_causal=True), got {self.mechanisms} and {type(self.dimensions).__name__}"
            )
        keys = carrier_keys(self.mechanisms)
        carriers = {key: m.carrier(self.dimensions, name=key) for m, key in keys.items()}
        self.carriers = {key: carrier for key, carrier in carriers.items() if carrier is not None}
        segments = {m.segment for m in keys if m.segment is not None}
        if len(segments) > 1:
            raise ValueError(
                f"mechanisms of one network must have the same block_size, got {sorted(segments)}"
            )
        self.segment = segments.pop() if segments and self.dimensions.is_causal else None
        groups = group_layers(self.mechanisms)
        self.layers = [
            self._scanned(repeats)(
                period,
                tuple(keys[m] for m in period),
                self.dimensions,
                self.cross_attention,
                name=f"layers_{i}",
            )
            for i, (period, repeats) in enumerate(groups)
        ]
        self.final_norm = norm(self.dimensions, name="final_norm", random_signs=self.random_signs)

    def _scanned(self, repeats: int):
        return nn.scan(
            nn.remat(Period, prevent_cse=False, static_argnums=(4,), policy=_POLICIES[self.remat]),
            variable_axes={"params": 0, "maps": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True, "projection": True, "sample": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=repeats,
            metadata_params={nn.PARTITION_NAME: "layers"},
            check_constancy_invariants=False,  # the check would trace the layers once more
        )

    def init_cache(
        self, batch: int, length: int, *, recalls: bool = False, source: CrossSizes | None = None
    ) -> Any:
        """Returns an empty decoding cache for sequences of up to `length` tokens.

        Args:
          recalls: whether every call will come with a `Recall`, so that the cache may keep tokens instead of their
            embeddings. The ordinary stack ignores it.
          source: with cross-attention, the sizes of the encoder's outputs, whose keys and values the cache then keeps.
            Without it every call needs `encoded`.
        """
        parts = self._parts()

        def one(module: Any) -> Any:
            cache = module.init_cache(batch, length)
            if source is None:
                return cache
            return BlockCache(cache, CrossCache.empty(batch, source, self.dimensions))

        cache = StackCache(
            length=jnp.zeros((), jnp.int32),
            room=jnp.asarray(length, jnp.int32),
            carriers={key: module.init_cache(batch, length) for key, module in parts.carriers.items()},
            layers=tuple(
                tuple(tuple(one(module) for module in modules) for _ in range(repeats))
                for modules, repeats in parts.layers
            ),
        )
        # Caches are donated, which requires distinct arrays.
        return jax.tree.map(jnp.copy, cache)

    def init_memory(self, batch: int) -> Any:
        """Returns what training on streams carries from batch to batch, or None if it carries nothing."""
        memory = self._each(lambda module: module.init_memory(batch))
        return memory if jax.tree.leaves(memory) else None

    def absorbable(self, length: int) -> int:
        """Returns how many of a sequence's first `length` tokens `absorb` may take when only the last output
        matters."""
        return 0

    def absorb(self, x: Float[Array, "B T D"], cache: Any, recall: Recall | None = None) -> Any:
        """Returns the cache after tokens whose outputs are not needed, more cheaply than a call; see `absorbable`."""
        raise NotImplementedError

    def _parts(self) -> _Parts:
        d = self.dimensions
        carriers = {key: m.carrier(d, parent=None) for m, key in carrier_keys(self.mechanisms).items()}
        return _Parts(
            carriers={key: module for key, module in carriers.items() if module is not None},
            layers=[
                (tuple(m.layer(d, parent=None) for m in period), repeats)
                for period, repeats in group_layers(self.mechanisms)
            ],
        )

    def _resume(self, memory: StackMemory | None, batch: int, length: int) -> ScannedCache:
        """Returns a decoding cache that continues from a training memory, or from nothing if it is None."""
        cache = self.init_cache(batch, length).stacked()
        if memory is None:
            return cache
        resumed = self._each(lambda module, *own: module.resume(*own), cache, memory)
        return cache._replace(carriers=resumed.carriers, layers=resumed.layers)

    def _each(self, call: Callable[..., Any], *caches: ScannedCache | StackMemory) -> StackMemory:
        """Returns what `call` makes of each carrier and layer, given its parts of the caches."""
        parts = self._parts()
        return StackMemory(
            carriers={
                key: call(module, *(cache.carriers[key] for cache in caches))
                for key, module in parts.carriers.items()
            },
            layers=tuple(
                tuple(
                    jax.vmap(functools.partial(call, module), axis_size=repeats)(
                        *(cache.layers[i][j] for cache in caches)
                    )
                    for j, module in enumerate(modules)
                )
                for i, (modules, repeats) in enumerate(parts.layers)
            ),
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        cache: Any = None,
        positions: Int[Array, "#B T"] | None = None,
        lengths: Int[Array, "B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        encoded: Encoded | None = None,
        recall: Recall | None = None,
        kept: Any = None,
        deterministic: bool = True,
    ):
        """Returns the normalised outputs (B, T, D) and the new cache or memory, of the type given.

        Args:
          x: (B, T, D).
          cache: a decoding cache, a training memory, or None.
          positions: (1, T) or (B, T) ints; by default they continue from the cache's tokens, or start at 0.
          lengths: (B,) ints, how many tokens at the start of each row are valid; for encoders.
          segment_ids: (B, T) ints for rows that pack several sequences: equal within a sequence, different between
            neighbours. Sequences do not see each other. Not with a decoding cache, which holds one sequence per row.
          encoded: an encoder's outputs, required in every call with `cross_attention` unless the decoding cache keeps
            their keys and values.
          recall: the tokens of x and their embedding, for a cache made with `recalls=True`.
          kept: how many of the new tokens, from the first, the decoding cache keeps (traced); None for all. The outputs
            cover all tokens, so that a caller can look at tokens that it may refuse. See `brl_jax.speculation`.
          deterministic: False applies dropout, with the random stream "dropout".

        Raises:
          ValueError: kept comes without a decoding cache, or with a mechanism that cuts a sequence into segments;
            positions or segment_ids come with a sequence that has to be cut into segments; segment_ids come
            with a decoding cache; `encoded` is missing or unexpected; or the cache is too small for the tokens. A
            traced number of tokens cannot be checked: those that do not fit are lost or overwrite others.
        """
        reads = self.cross_attention is not None
        if (encoded is not None) != reads and not (reads and _keeps_cross(cache)):
            raise ValueError(
                f"encoded must {'' if reads else 'not '}be given with cross_attention={self.cross_attention}"
            )
        if segment_ids is not None and not (cache is None or isinstance(cache, StackMemory)):
            raise ValueError(
                "segment_ids must be None with a decoding cache, which has one sequence in each row"
            )
        call = StackCall(positions, lengths, segment_ids, encoded, recall, kept=kept)
        if kept is not None:
            check_goes_back(self.mechanisms)
            if not isinstance(cache, StackCache):
                raise ValueError("kept needs a decoding cache, from init_cache")
            return self._run(x, cache, call, deterministic)
        if not isinstance(cache, StackCache):
            return self._in_segments(x, cache, call, deterministic)
        check_room(x.shape[1], cache.length, cache.room)
        # The loop over the layers draws the random keys, and a single step runs without it.
        is_random = not deterministic or self.has_rng("projection")
        if x.shape[1] == 1 and not is_random and not self._is_observed():
            return self._run(x, cache, call, deterministic)
        y, new = self._in_segments(x, cache.stacked(), call, deterministic)
        return y, new.separate([repeats for _, repeats in group_layers(self.mechanisms)])

    def _in_segments(self, x, cache, call: StackCall, deterministic):
        """Returns the outputs and the new cache or memory, for tokens of any number of segments."""
        length, segment = x.shape[1], self.segment
        is_memory = cache is None or isinstance(cache, StackMemory)
        if segment is None or length == 1 or (length <= segment and is_memory):
            return self._run(x, cache, call, deterministic)
        if call.positions is not None or call.segment_ids is not None:
            few = f"at most block_size={segment} tokens" if is_memory else "one token with a decoding cache"
            raise ValueError(f"positions and segment_ids need sequences of {few} here, got {length}")
        if not is_memory:
            return self._unaligned_segments(x, cache, call, deterministic)
        y, new = self._aligned_segments(x, cache, call, deterministic)
        if cache is None:
            return y, None
        return y, self._each(lambda module, own: module.memory_from_cache(own), new)

    def encode(
        self, x: Float[Array, "B T D"], *, lengths: Int[Array, "B"] | None = None, deterministic: bool = True
    ) -> Encoded:
        """Returns an encoder's outputs in the form that a decoder's cross-attention reads, including the tokens into
        which its mechanism compressed the sequence, if any; arguments as for the call."""
        y, carries, _ = self._through_layers(x, None, StackCall(lengths=lengths), deterministic)
        summaries = [carrier.summary(carries[key]) for key, carrier in self.carriers.items()]
        return Encoded(y, lengths, next((each for each in summaries if each is not None), None))

    def _through_layers(self, x, cache, call: StackCall, deterministic):
        """Returns the outputs, the carries after the last layer and the layers' caches, for tokens of one segment."""
        caches = {} if cache is None else cache.carriers
        carries = {key: carrier(x, caches.get(key)) for key, carrier in self.carriers.items()}
        reversible = self.dimensions.reversible
        saves = reversible and cache is None and not self._is_observed()
        state: Any = ((x, x) if reversible else x, carries)
        start = cache.length if isinstance(cache, DecodingCache) else None
        cross = None if self.cross_attention is None else CrossCall(call.encoded, start)
        layers = []
        for i, group in enumerate(self.layers):
            if saves:
                state = (self._reversed(group, state[0], call, deterministic), carries)
                continue
            group_cache = (None,) * len(group.mechanisms) if cache is None else cache.layers[i]
            run = functools.partial(self._unrolled, group) if isinstance(cache, StackCache) else group
            state, group_cache = run(state, group_cache, call.of_layers, deterministic, cross)
            layers.append(group_cache)
        outputs = (state[0][0] + state[0][1]) / 2 if reversible else state[0]
        return self.final_norm(outputs), state[1], tuple(layers)

    def _run(self, x, cache, call: StackCall, deterministic):
        """Runs all layers over tokens of one segment."""
        caches = {} if cache is None else cache.carriers
        y, _, layers = self._through_layers(x, cache, call, deterministic)
        if cache is None:
            return y, None
        count = call.count if call.kept is None else call.kept
        carriers = {key: carrier.close(y, caches.get(key), count) for key, carrier in self.carriers.items()}
        new = cache._replace(carriers=carriers, layers=layers)
        if isinstance(new, DecodingCache):
            new = new._replace(length=new.length + (x.shape[1] if count is None else count))
        return y, new

    def _unrolled(self, group: Period, state, caches, call, deterministic, cross):
        """Runs `group(...)` without a loop over the repeats, for caches that are separate arrays.

        A loop would slice each layer's cache out of one array and copy it into another, which for a single token takes
        far longer than the layer.
        """
        params = nn.unbox(group.variables["params"])
        period = Period(group.mechanisms, group.carriers, self.dimensions, self.cross_attention, parent=None)
        new = []
        for i, cache in enumerate(caches):
            own = {"params": jax.tree.map(operator.itemgetter(i), params)}
            state, cache = period.apply(own, state, cache, call, deterministic, cross)
            new.append(cache)
        return state, tuple(new)

    def _is_observed(self) -> bool:
        """Whether the layers are being initialised, or the values that they sow are collected."""
        return self.is_initializing() or any(map(self.is_mutable_collection, ("maps", "intermediates")))

    def _reversed(self, group: Period, streams: Any, call: StackCall, deterministic: bool) -> Any:
        """Returns the streams after a group of layers, without keeping their activations for the gradient."""
        params = nn.unbox(group.variables["params"])
        repeats = jax.tree.leaves(params)[0].shape[0]
        names = ("dropout", "projection", "sample")
        keys = {name: self.make_rng(name) for name in names if self.has_rng(name)}
        layers = range(len(group.mechanisms))
        operands = Operands(
            params=tuple(params[f"block_{i}"] for i in layers),
            keys=tuple(
                {
                    name: jax.random.split(jax.random.fold_in(key, i), (repeats, 2))
                    for name, key in keys.items()
                }
                for i in layers
            ),
            call=call.of_layers,
        )
        periods = tuple(
            _branches(Block(mechanism, self.dimensions, parent=None), deterministic)
            for mechanism in group.mechanisms
        )
        return reversible_layers(periods, operands, streams)

    def _over_segments(self, step: Any, length: int | None = None) -> Any:
        return nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True, "sample": True},
            length=length,
            # The check traces the network once more and is only needed where parameters are made.
            check_constancy_invariants=self.is_initializing(),
        )

    def _aligned_segments(self, x, memory, call, deterministic):
        """Runs segment after segment, starting at a segment's first token, for training: gradients flow through the
        caches."""
        batch, length, width = x.shape
        segment = self.segment
        whole = length // segment
        cache = self._resume(memory, batch, length)

        def step(stack, cache, piece):
            y, cache = stack._run(piece, cache, call, deterministic)
            return cache, y

        scan = self._over_segments(step)
        pieces = jnp.moveaxis(x[:, : whole * segment].reshape(batch, whole, segment, width), 1, 0)
        # Each device of a mesh takes its share of every segment.
        pieces = constrain(pieces, (None, "batch", "length", "embed"))
        cache, y = scan(self, cache, pieces)
        y = jnp.moveaxis(y, 0, 1).reshape(batch, whole * segment, width)
        if whole * segment < length:
            tail, cache = self._run(x[:, whole * segment :], cache, call, deterministic)
            y = jnp.concatenate([y, tail], axis=1)
        return y, cache

    def _unaligned_segments(self, x, cache, call, deterministic):
        """The same from any position within a segment: pieces of one size, whose first tokens are valid."""
        length = x.shape[1]
        segment = self.segment
        size = min(length, segment)
        pieces = (length + segment - 2) // segment + 1
        room = ((0, 0), (0, size), (0, 0))
        x = jnp.pad(x, room)

        def step(stack, state, _):
            cache, y, done = state
            left_in_segment = segment - cache.length % segment
            count = jnp.minimum(left_in_segment, length - done)
            piece = jax.lax.dynamic_slice_in_dim(x, done, size, axis=1)
            out, cache = stack._run(piece, cache, call._replace(count=count), deterministic)
            # The next piece overwrites the outputs beyond count; after the last one they are cut off.
            y = jax.lax.dynamic_update_slice_in_dim(y, out, done, axis=1)
            return (cache, y, done + count), None

        scan = self._over_segments(step, length=pieces)
        start = (cache, jnp.zeros_like(x), jnp.zeros((), jnp.int32))
        (cache, y, _), _ = scan(self, start, None)
        return y[:, :length], cache


def check_goes_back(mechanisms: Sequence[Mechanism]) -> None:
    """Raises ValueError if a network of these layers cannot keep only the first of several tokens in its cache."""
    for mechanism in mechanisms:
        if mechanism.segment is not None:
            raise ValueError(
                f"mechanism {mechanism.name} cannot go back: it reads a sequence in segments of "
                f"{mechanism.segment} tokens, and the outputs for a segment need the cache after the one before"
            )


def _keeps_cross(cache: Any) -> bool:
    """Whether a decoding cache keeps the keys and values of an encoder's outputs."""
    return isinstance(cache, StackCache) and isinstance(cache.layers[0][0][0], BlockCache)


def _branches(block: Block, deterministic: bool) -> Branches:
    """Returns the functions of a block with two residual streams; each has its own random keys."""

    def apply(layer: Operands, branch: int, method: str, *args: Any) -> Any:
        keys = {name: key[branch] for name, key in layer.keys.items()}
        return block.apply({"params": layer.params}, *args, deterministic, method=method, rngs=keys)

    return Branches(
        mix=lambda layer, x: apply(layer, 0, "mix", x, None, None, layer.call)[0],
        transform=lambda layer, x: apply(layer, 1, "transform", x),
    )


def carrier_keys(mechanisms: Sequence[Mechanism]) -> dict[Mechanism, str]:
    """Returns the name of each distinct mechanism's carrier."""
    return {mechanism: f"carrier_{i}" for i, mechanism in enumerate(dict.fromkeys(mechanisms))}
