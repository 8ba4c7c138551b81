"""The decoder language model, for any listed mechanism."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.scores import soft_cap
from brl_jax.fields import Count, Natural, Positive
from brl_jax.layers.core.protocol import token_positions
from brl_jax.models.config import StackConfig, check_config
from brl_jax.models.cross_attention import CrossConfig, CrossSizes, Encoded
from brl_jax.models.inputs import Inputs, check_ints, table_logits
from brl_jax.models.losses import cross_entropy
from brl_jax.models.networks import make_stack
from brl_jax.models.stack import Stack, check_goes_back
from brl_jax.models.stack_call import Recall, StackCache, check_batch
from brl_jax.sharding import constrain, gather_parameter


@dataclasses.dataclass(frozen=True)
class DecoderConfig(StackConfig):
    """Sizes and options of a decoder language model.

        config = DecoderConfig(num_layers=6, d_model=512, num_heads=8, vocab_size=50304)
        model = DecoderLM(config)

    Raises:
      ValueError: an option is out of range or contradicts another, or the mechanism has no causal form.
    """

    is_causal: ClassVar[bool] = True

    vocab_size: Count = 256
    """Number of tokens."""
    tied_embeddings: bool = True
    """Whether the logits reuse the embedding table; if not, they have a separate table."""
    embedding_scale: Positive | None = None
    """Factor on embedded tokens; None for the square root of the width."""
    final_soft_cap: Positive | None = None
    """Bounds the logits smoothly: cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118); None leaves them unbounded."""
    lora_rank: Natural = 0
    """Rank of the changes to the dense weights of attention and feed-forward layers, which alone are trained (LoRA,
    arXiv:2106.09685); 0: all parameters are. The other matrices are then stored in the computation's data type."""
    lora_alpha: Positive = 16.0
    """The changes are multiplied by lora_alpha / lora_rank."""

    def __post_init__(self):
        super().__post_init__()
        if self.mup_base_width is not None:
            # muP's rules assume a single table whose entries keep their size at every width, and no maps to a rank.
            for name, alone in (("tied_embeddings", True), ("embedding_scale", None), ("lora_rank", 0)):
                if getattr(self, name) != alone:
                    raise ValueError(f"{name} must be {alone} with mup_base_width, got {getattr(self, name)}")

    @property
    def cross_attention(self) -> CrossConfig | None:
        """The layers' cross-attention to an encoder; None without an encoder."""
        return None


class DecoderLM(nn.Module):
    """A language model: token embedding, a stack of blocks and logits, which reuse the embedding by default.

    Three calls, all through `apply`:
      logits, memory = model(tokens, memory=memory)      a training or evaluation batch of a stream
      nll, weight, memory = model.loss(tokens, targets, weights, memory=memory)
      logits, cache = model(tokens, cache=cache)         generation, any number of tokens at a time
    `memory` is what the mechanism carries from one batch of a stream to the next, without gradient; it comes from
    `init_memory`, and None starts without a past. `cache` comes from `init_cache`. If the configuration has
    `cross_attention`, as the decoder of an `EncoderDecoder` does, the calls also take `encoded`.
    """

    config: DecoderConfig

    def setup(self):
        c = self.config
        check_config(c, DecoderConfig)
        dimensions = c.dimensions
        self.inputs = Inputs(
            dimensions,
            c.vocab_size,
            embedding_scale=c.embedding_scale,
            added=c.positions,
        )
        nn.share_scope(self, self.inputs)
        if not c.tied_embeddings:
            axes = ("vocab", "embed")
            init = nn.with_logical_partitioning(nn.initializers.normal(c.d_model**-0.5), axes)
            table: Any = self.param("unembedding", init, (c.vocab_size, c.d_model), dimensions.weight_dtype)
            self.unembedding: Any = gather_parameter(table, axes)
        # A stream begins as its token's row of the table. Without the signs, that token's own logit would begin at the
        # square root of the width, far above all others.
        self.stack = make_stack(
            c.mechanisms, dimensions, c.remat, c.cross_attention, random_signs=c.tied_embeddings
        )
        self.dropout = nn.Dropout(c.dropout)

    def _unbound_stack(self) -> Stack:
        c = self.config
        return make_stack(c.mechanisms, c.dimensions, c.remat, c.cross_attention, parent=None)

    def init_cache(self, batch: int, length: int, source: CrossSizes | None = None) -> Any:
        """Returns an empty decoding cache for `batch` sequences of up to `length` tokens.

        Args:
          source: the sizes of an encoder's outputs; the cache then also keeps their keys and values.

        Raises:
          ValueError: batch or length is below 1.
        """
        if batch < 1 or length < 1:
            raise ValueError(f"batch and length of a cache must be at least 1, got {batch} and {length}")
        return self._unbound_stack().init_cache(batch, length, recalls=True, source=source)

    def init_memory(self, batch: int) -> Any:
        """Returns the memory at the start of `batch` streams, or None if the mechanisms carry nothing."""
        return self._unbound_stack().init_memory(batch)

    def check_keeps(self) -> None:
        """Raises ValueError if calls cannot keep only the first of their tokens in the cache; see `hidden`."""
        check_goes_back(self.config.mechanisms)

    def absorbable(self, length: int) -> int:
        """Returns how many of a sequence's first `length` tokens `absorb` may take when only the last output matters;
        0 for most mechanisms."""
        return self._unbound_stack().absorbable(length)

    def absorb(self, tokens: Int[Array, "B T"], cache: Any) -> Any:
        """Returns the cache after tokens whose outputs are not needed, more cheaply than a call; see `absorbable`."""
        self.inputs.check(tokens)
        return self.stack.absorb(self.inputs.embed(tokens), cache, Recall(tokens, self.inputs.embed))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        memory: Any = None,
        cache: Any = None,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        encoded: Encoded | None = None,
        kept: Any = None,
        deterministic: bool = True,
    ):
        """Returns the last hidden states (B, T, D), normalised, and the new memory or cache.

        Args:
          tokens: (B, T) ints in 0..vocab_size-1.
          memory: of the stream so far; see the class.
          cache: of the tokens so far; excludes memory.
          positions: (1, T) or (B, T) ints; by default they continue from the cache's tokens, or start at 0.
          segment_ids: (B, T) ints for rows that pack several sequences: equal within a sequence, different between
            neighbours. Only for mechanisms that pack, and not with a cache.
          encoded: an encoder's outputs; only with cross-attention, see `Stack`.
          kept: how many of the tokens, from the first, the decoding cache keeps, as for `Stack`.
          deterministic: False applies dropout, with the random stream "dropout".

        Raises:
          ValueError: an argument has the wrong shape or type, a token is outside the vocabulary, or the cache is too
            small. Traced values cannot be checked: a token outside the vocabulary then gives NaN, and tokens that do
            not fit into the cache are lost or overwrite others.
        """
        self.inputs.check(tokens)
        check_ints("positions", positions, ((1, tokens.shape[1]), tokens.shape))
        check_ints("segment_ids", segment_ids, (tokens.shape,))
        if memory is not None and cache is not None:
            raise ValueError(
                "memory and cache exclude each other: memory is for training, cache for generation"
            )
        for name, given in (("memory", memory), ("cache", cache)):
            if given is not None and not hasattr(given, "_fields"):
                raise ValueError(f"{name} must be made by init_{name}, got {type(given).__name__}")
            if given is not None:
                check_batch(name, given, self, tokens.shape[0])
        start = cache.length if isinstance(cache, StackCache) else 0
        places = token_positions(tokens.shape[1], start)
        x = self.dropout(self.inputs.place(tokens, places), deterministic=deterministic)
        return self.stack(
            x,
            cache=memory if cache is None else cache,
            positions=positions,
            segment_ids=segment_ids,
            encoded=encoded,
            recall=None if cache is None else Recall(tokens, self.inputs.embed),
            kept=kept,
            deterministic=deterministic,
        )

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns the logits (B, T, V) in float32."""
        c = self.config
        table = self.inputs.embedding if c.tied_embeddings else self.unembedding
        logits = table_logits(self.inputs.dimensions, hidden, table)
        logits = logits if c.final_soft_cap is None else soft_cap(logits, c.final_soft_cap)
        return constrain(logits, ("batch", "length", "vocab"))

    def __call__(self, tokens: Int[Array, "B T"], **kwargs: Any):
        """Returns the logits (B, T, V) in float32 and the new memory or cache; arguments as for `hidden`."""
        hidden, new = self.hidden(tokens, **kwargs)
        return self.logits(hidden), new

    def loss(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"] | None = None,
        *,
        z_loss: float = 0.0,
        **kwargs: Any,
    ):
        """Returns the sum of the targets' negative log-likelihoods in nats, the sum of weights, and the new memory.

        Targets, weights and z_loss are as for `cross_entropy`, the other arguments as for `hidden`.
        """
        hidden, new = self.hidden(tokens, **kwargs)
        total, weight = cross_entropy(
            hidden, self.logits, targets, weights, vocab_size=self.config.vocab_size, z_loss=z_loss
        )
        return total, weight, new
