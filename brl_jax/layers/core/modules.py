"""Building blocks of the layers: projections with logical axis names, norms, rotary positions, gated feed-forward."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from brl_jax.attention.core.implied_weights import implied_weights
from brl_jax.attention.core.rotary import RopeScaling, rotate
from brl_jax.layers.core.protocol import Dimensions, NormKind
from brl_jax.sharding import constrain, gather_parameter

GateActivation = Literal["silu", "sigmoid"]


#: The names of the parameters that `Dimensions.lora_rank` adds to dense weights.
LORA = ("lora_down", "lora_up")


class _Dense(nn.DenseGeneral):
    """A linear map whose output is sharded by the logical names of its kernel's last dimensions.

    With a rank it adds lora_scale * (x A) B, where B starts at zero (LoRA, arXiv:2106.09685, equation 3).
    """

    input_axes: tuple[str | None, ...] = ()
    output_axes: tuple[str | None, ...] = ()
    lora_rank: int = 0
    lora_scale: float = 1.0

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        y = super().__call__(inputs)
        if self.lora_rank:
            y = y + self._low_rank(inputs.astype(self.dtype), y.shape[y.ndim - len(self.output_axes) :])
        if jax.sharding.get_abstract_mesh().empty:
            return y
        # The axes between batch and outputs: tokens in (B, T, D), blocks and their tokens in (B, C, M, D).
        between = {1: ("length",), 2: ("blocks", None)}.get(y.ndim - len(self.output_axes) - 1, ())
        return constrain(y, ("batch", *between, *self.output_axes))

    def _low_rank(self, x: Any, outputs: tuple[int, ...]) -> Any:
        contract, rank = len(self.input_axes), self.lora_rank
        inputs = x.shape[-contract:]
        normal = nn.initializers.normal(math.prod(inputs) ** -0.5)
        sides = (
            (normal, (*inputs, rank), (*self.input_axes, "projected")),
            (nn.initializers.zeros_init(), (rank, *outputs), ("projected", *self.output_axes)),
        )
        down, up = (self._factor(name, init, shape, axes) for name, (init, shape, axes) in zip(LORA, sides))
        narrow = jnp.tensordot(x, down, contract) * jnp.asarray(self.lora_scale, self.dtype)
        return jnp.tensordot(narrow, up, 1)

    def _factor(self, name: str, init: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
        value: Any = self.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)
        return gather_parameter(value, axes).astype(self.dtype)


def _gathering_product(axes: tuple[str | None, ...], x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """`jax.lax.dot_general` that first gathers the kernel, whose dimensions have the logical names `axes`."""
    return jax.lax.dot_general(x, gather_parameter(kernel, axes), *args, **kwargs)


def dense(
    dimensions: Dimensions,
    features: int | tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    name: str,
    contract: int = 1,
    scale: float = 1.0,
    use_bias: bool | None = None,
) -> nn.Module:
    """Returns a linear map whose kernel carries the logical axis names `axes`, one for each dimension.

    It contracts the last `contract` axes of the input. `scale` is the variance factor of the initial weights (0 for
    zeros), and `use_bias` overrides the network's. With `dimensions.lora_rank` the map has a low-rank change too, in
    the parameters `LORA`.
    """
    outputs = len(axes) - contract
    # DenseGeneral passes the flattened (in, out) shape to the initialiser, so fan-in counts every contracted axis.
    kernel_init: Any = nn.initializers.variance_scaling(scale or 1.0, "fan_in", "truncated_normal")
    if scale == 0:
        kernel_init = nn.initializers.zeros_init()
    sharded = not jax.sharding.get_abstract_mesh().empty
    product = functools.partial(_gathering_product, axes) if sharded else None
    return _Dense(
        features,
        axis=tuple(range(-contract, 0)),
        use_bias=dimensions.use_bias if use_bias is None else use_bias,
        kernel_init=nn.with_logical_partitioning(kernel_init, axes),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), axes[-outputs:]),
        dtype=dimensions.dtype,
        param_dtype=dimensions.weight_dtype,
        input_axes=axes[:contract],
        output_axes=axes[-outputs:],
        lora_rank=dimensions.lora_rank,
        lora_scale=dimensions.lora_alpha / max(dimensions.lora_rank, 1),
        dot_general=product,
        name=name,
    )


def to_heads(
    dimensions: Dimensions,
    x: Float[Array, "B T D"],
    name: str,
    axis: Literal["heads", "kv_heads"] = "heads",
    *,
    number: int | None = None,
    size: int | None = None,
    **kwargs: Any,
) -> Float[Array, "B T N H"]:
    """Returns a linear map of tokens to heads, by default the network's query heads, or with axis="kv_heads" its
    key/value heads. Call it inside a compact module, which gets the parameter `name`."""
    number = number or (dimensions.num_heads if axis == "heads" else dimensions.num_kv_heads)
    shape = (number, size or dimensions.head_dim)
    return dense(dimensions, shape, ("embed", axis, "head_dim"), name=name, **kwargs)(x)


def low_rank_heads(
    dimensions: Dimensions,
    x: Float[Array, "B T D"],
    name: str,
    axis: Literal["heads", "kv_heads"],
    rank: int | None,
    *,
    inner: Callable[[Array], Array] = lambda x: x,
    use_bias: bool = False,
) -> Float[Array, "B T N H"]:
    """`to_heads` through two maps with `inner` between them: the first has `rank` outputs (None: the width of a head),
    and the second may have a bias. Their parameters end in "_down" and "_up"."""
    d = dimensions
    down = dense(d, rank or d.head_dim, ("embed", "projected"), name=f"{name}_down", use_bias=False)
    number = d.num_heads if axis == "heads" else d.num_kv_heads
    axes = ("projected", axis, "head_dim")
    return dense(d, (number, d.head_dim), axes, name=f"{name}_up", use_bias=use_bias)(inner(down(x)))


def parameter(
    module: nn.Module,
    name: str,
    init: Any,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: Any = None,
) -> Any:
    """Creates a parameter of `module` with logical axis names, by default of the network's type for parameters, and
    returns it ready for use (`gather_parameter`)."""
    dtype = module.dimensions.param_dtype if dtype is None else dtype  # type: ignore[attr-defined]
    value: Any = module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)
    return gather_parameter(value, axes)


def norm(
    dimensions: Dimensions, *, name: str, axis: str = "embed", scale: float = 1.0, random_signs: bool = False
) -> nn.Module:
    """Returns a LayerNorm or RMSNorm over the last axis, with float32 statistics. Its weights start at `scale`, half of
    them at -`scale` with random_signs."""

    def signed(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return scale * jax.random.rademacher(key, shape, dtype)

    init: Any = signed if random_signs else nn.initializers.constant(scale)
    shared: dict[str, Any] = {
        "epsilon": dimensions.norm_epsilon,
        "dtype": dimensions.dtype,
        "param_dtype": dimensions.param_dtype,
        "scale_init": nn.with_logical_partitioning(init, (axis,)),
        "name": name,
    }
    if dimensions.norm == "rms":
        return nn.RMSNorm(**shared)
    bias_init = nn.with_logical_partitioning(nn.initializers.zeros_init(), (axis,))
    return nn.LayerNorm(use_bias=dimensions.use_bias, bias_init=bias_init, **shared)


def head_norm(
    dimensions: Dimensions, kind: NormKind, *, name: str, merged: bool = False, heads: str = "heads"
) -> nn.Module:
    """Returns a norm over each head of (..., N, H), or over all of them together if `merged`, with a scale for each
    head and channel. `heads` is the logical name of the axis of heads."""
    shared: dict[str, Any] = {
        "epsilon": dimensions.norm_epsilon,
        "dtype": dimensions.dtype,
        "param_dtype": dimensions.param_dtype,
        "scale_init": nn.with_logical_partitioning(nn.initializers.ones_init(), (heads, "head_dim")),
        "reduction_axes": (-2, -1) if merged else -1,
        "feature_axes": (-2, -1),
        "name": name,
    }
    return nn.RMSNorm(**shared) if kind == "rms" else nn.LayerNorm(use_bias=False, **shared)


class GatedNorm(nn.Module):
    """RMSNorm of each head of x (..., N, H), times `activation` of a gate of the same shape, in float32.

    All heads share one scale (H,). Gated recurrent layers use it before their output projection (Yang et al. 2024,
    arXiv:2412.06464, figure 1).
    """

    dimensions: Dimensions
    activation: GateActivation = "silu"

    @nn.compact
    def __call__(self, x: Float[Array, "*B N H"], gate: Float[Array, "*B N H"]) -> Float[Array, "*B N H"]:
        d = self.dimensions
        scale = parameter(self, "scale", nn.initializers.ones_init(), x.shape[-1:], ("head_dim",))
        x, gate = x.astype(jnp.float32), gate.astype(jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + d.norm_epsilon)
        opened = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.sigmoid(gate)
        scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)
        return (normed * scale * opened).astype(d.dtype)


def gated_output(
    dimensions: Dimensions, x: Float[Array, "B T D"], attended: Float[Array, "B T N V"]
) -> Float[Array, "B T D"]:
    """Returns the output projection of `GatedNorm` with a gate from the tokens. Call it inside a compact module, which
    gets the parameters `gate`, `head_norm` and `out`."""
    heads, size = attended.shape[2:]
    gate = to_heads(dimensions, x, "gate", number=heads, size=size)
    return merge_heads(dimensions, GatedNorm(dimensions, name="head_norm")(attended, gate))


#: What stands between the two maps of an ungated feed-forward network.
UNGATED: Mapping[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}
_GATES: Mapping[str, Callable[[Array], Array]] = {
    "glu_relu": jax.nn.relu,
    "swiglu": jax.nn.silu,
    "geglu": jax.nn.gelu,
    "geglu_erf": UNGATED["gelu"],
}


class FeedForward(nn.Module):
    """The network after the mixer, chosen by `dimensions.ffn`:

    "glu_relu"  W2 (ReLU(W1 x) * W3 x), the gated network of BRL-Attention (eq. 5);
    "swiglu"    W2 (swish(W1 x) * W3 x) (Shazeer 2020, arXiv:2002.05202, eq. 6), TransNormer's GLU;
    "geglu"     W2 (GELU(W1 x) * W3 x), from the same paper, with GELU's tanh approximation, as in Gemma;
    "geglu_erf" the same with the exact GELU;
    "relu"      W2 ReLU(W3 x) (Vaswani et al. 2017, eq. 2);
    "gelu"      W2 GELU(W3 x) with the exact GELU, as in RoBERTa and nanoGPT.
    """

    dimensions: Dimensions

    @nn.compact
    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        d = self.dimensions
        width = x.shape[-1]
        hidden = dense(d, d.d_ff, ("embed", "mlp"), name="up", use_bias=d.ffn_bias)(x)
        if d.ffn in UNGATED:
            hidden = UNGATED[d.ffn](hidden)
        else:
            gate = dense(d, d.d_ff, ("embed", "mlp"), name="gate", use_bias=d.ffn_bias)
            hidden = _GATES[d.ffn](gate(x)) * hidden
        down = dense(d, width, ("mlp", "embed"), name="down", scale=d.residual_scale, use_bias=d.ffn_bias)
        return down(hidden)


def project_qkv(
    dimensions: Dimensions,
    x: Float[Array, "B T D"],
    positions: Int[Array, "#B T"] | None,
    *,
    qk_norm: bool | Literal["merged"] = False,
    root_scores: bool = True,
    qkv_bias: bool | None = None,
    rope_scaling: RopeScaling | None = None,
    rotary_dim: int | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Returns a layer's query (B, T, N, H), key and value (B, T, K, H), rotated by their positions (None: not rotated).

    Call it inside a compact module, which gets the parameters `query`, `key`, `value`, `query_norm` and `key_norm`.

    Args:
      qk_norm: whether to normalise queries and keys first: each head, with one scale for all heads (True), or all heads
        together, with a scale for each ("merged").
      root_scores: whether scores will be products over sqrt(head_dim). muP makes them smaller in wider heads, and this
        function applies its factor to the queries.
      qkv_bias: whether the three projections have biases; None follows the network's other projections.
      rope_scaling: changes the rotary frequencies.
      rotary_dim: how many features of a head, from the first, are rotated; None for all, 0 for none.
    """
    d = dimensions if qkv_bias is None else dataclasses.replace(dimensions, use_bias=qkv_bias)
    query = dense(d, (d.num_heads, d.head_dim), ("embed", "heads", "head_dim"), name="query")(x)
    key = dense(d, (d.num_kv_heads, d.head_dim), ("embed", "kv_heads", "head_dim"), name="key")(x)
    value = dense(d, (d.num_kv_heads, d.head_dim), ("embed", "kv_heads", "head_dim"), name="value")(x)
    if qk_norm == "merged":
        query = head_norm(d, d.norm, name="query_norm", merged=True)(query)
        key = head_norm(d, d.norm, name="key_norm", merged=True, heads="kv_heads")(key)
    elif qk_norm:
        query = norm(d, name="query_norm", axis="head_dim")(query)
        key = norm(d, name="key_norm", axis="head_dim")(key)
    if d.rope_theta is not None and positions is not None and rotary_dim != 0:
        place = (positions, d.rope_theta, rope_scaling, rotary_dim)
        query, key = rotate(query, *place), rotate(key, *place)
    if root_scores:
        query = scale_scores(query, d.head_score_factor)
    return query, key, value


def project_unrotated(
    dimensions: Dimensions, x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """`project_qkv` for mechanisms that do not rotate queries and keys and do not divide scores by a root."""
    return project_qkv(dimensions, x, None, root_scores=False)


def rotary_options(dimensions: Dimensions, positions: Int[Array, "#B T"]) -> dict[str, Any]:
    """Returns the attention functions' arguments for rotating features, if the network has rotary positions."""
    if dimensions.rope_theta is None:
        return {}
    return {"positions": positions, "rope_theta": dimensions.rope_theta}


def rotated(
    dimensions: Dimensions, x: Float[Array, "B T N H"], positions: Int[Array, "#B T"]
) -> Float[Array, "B T N H"]:
    """Returns x rotated by its positions, if the network has rotary positions."""
    return x if dimensions.rope_theta is None else rotate(x, positions, dimensions.rope_theta)


def scale_scores(query: Array, factor: float) -> Array:
    """Returns queries whose scores are multiplied by `factor`; the queries themselves if it is 1."""
    return query if factor == 1.0 else query * jnp.asarray(factor, query.dtype)


def sampled(module: nn.Module, draw: Callable[[PRNGKeyArray], Array], seed: int, stream: str | None) -> Array:
    """Returns draw(key) with the call's key of the random stream `stream`, or with the seed's key if it has none.

    The seed's result is a constant of the program instead of work in each run. A separate thread draws it, outside any
    mesh: the active mesh may describe a topology whose devices do not exist here, so nothing can run on it.
    """
    if stream is not None and module.has_rng(stream):
        return draw(module.make_rng(stream))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: draw(jax.random.key(seed))).result()


def merge_heads(dimensions: Dimensions, attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
    """Applies a layer's output projection; call it inside a compact module, which gets the parameter `out`."""
    d = dimensions
    axes = ("heads", "head_dim", "embed")
    return dense(d, d.d_model, axes, name="out", contract=2, scale=d.residual_scale)(attended)


def maps_wanted(module: nn.Module) -> bool:
    """Whether the caller requested the collection "maps"; False while initialising, which creates every collection."""
    return module.is_mutable_collection("maps") and not module.is_initializing()


def sow_weights(
    module: nn.Module,
    attend: Callable[[Float[Array, "B S K H"]], Float[Array, "B T N H"]],
    value: Float[Array, "B S K H"],
) -> None:
    """Sows the attention matrix (B, N, T, S) of `attend`, a function of the values, into "maps" as "weights".

    Does nothing unless `maps_wanted`, because the matrix is quadratic in the length.
    """
    if maps_wanted(module):
        module.sow("maps", "weights", implied_weights(attend, value))
