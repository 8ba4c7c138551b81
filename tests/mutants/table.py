"""One-line faults that the tests must notice, and the tests that must notice them.

`old` is code that stands in the file exactly once; comments and docstrings are left out of it, so that rewording them
moves no mutant. `tests` are arguments of pytest, as narrow as they can be.
"""

from __future__ import annotations

from typing import NamedTuple

LAWS = "tests/laws/test_laws.py"
LOCAL = "tests/attention/local"
TPU = "tests/pallas_kernels/tpu"


class Mutant(NamedTuple):
    """One fault.

    Attributes:
      name: what is wrong with the mutant; the area of the library, a slash, and the fault.
      path: the file, from the root of the repository.
      old: what stands there, exactly once.
      new: what stands there instead.
      tests: arguments of pytest: files, and `-k` with an expression.
      equivalent: why the mutant computes the same as the original, where it does; such a mutant is not run.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""


MUTANTS = (
    # Attention: what the families share.
    Mutant(
        "core/rotary turns the other way",
        "brl_jax/attention/core/rotary.py",
        "even * cos - odd * sin, even * sin + odd * cos",
        "even * cos + odd * sin, odd * cos - even * sin",
        (LAWS, "-k", "law_3 and bilinear_mlr"),
    ),
    Mutant(
        "core/rotary positions above 1024 repeat",
        "brl_jax/attention/core/rotary.py",
        "angle += (positions // low)",
        "angle += 0 * (positions // low)",
        ("tests/attention/core/test_rotary.py",),
    ),
    Mutant(
        "core/ALiBi is symmetric in the wrong sign",
        "brl_jax/attention/core/biases.py",
        "return -self.slopes[:, None, None]",
        "return self.slopes[:, None, None]",
        (LAWS, "-k", "law_3 and brl-output-equations"),
    ),
    Mutant(
        "core/T5 buckets: the last exact distance counts as far",
        "brl_jax/attention/core/biases.py",
        "jnp.where(distance < exact, distance,",
        "jnp.where(distance < exact - 1, distance,",
        ("tests/attention", "-k", "bias or bucket"),
    ),
    Mutant(
        "core/T5 buckets: the boundary between exact and far distances",
        "brl_jax/attention/core/biases.py",
        "jnp.where(distance < exact, distance,",
        "jnp.where(distance <= exact, distance,",
        ("tests/attention", "-k", "bias or bucket"),
        equivalent="at distance == exact the logarithm is 0, and both branches give the bucket `exact`",
    ),
    Mutant(
        "core/Laplace scores have another mean",
        "pallas_kernels/scores.py",
        "_LAPLACE_MEAN = math.sqrt(0.5)",
        "_LAPLACE_MEAN = 0.5",
        (LAWS, "-k", "law_3 and brl-layer-laplace"),
    ),
    Mutant(
        "core/padding begins one token late",
        "brl_jax/attention/core/arguments.py",
        "dtype=jnp.int32)[None, :] < lengths[:, None]",
        "dtype=jnp.int32)[None, :] <= lengths[:, None]",
        (LAWS, "-k", "law_4_padding and (linformer or mlr or linear)"),
    ),
    Mutant(
        "core/query blocks do not know where they begin",
        "brl_jax/attention/core/query_blocks.py",
        "jnp.arange(blocks, dtype=jnp.int32) * block",
        "jnp.zeros(blocks, dtype=jnp.int32) * block",
        ("tests/attention/dense/test_hopfield.py", "-k", "blocks_of_queries"),
    ),
    # Attention: local.
    Mutant(
        "local/a window is one key short",
        "brl_jax/attention/local/patterns.py",
        "(ahead >= -self.left) & (ahead <= self.right)\n\n    def parts",
        "(ahead > -self.left) & (ahead <= self.right)\n\n    def parts",
        (f"{LOCAL}/test_patterns.py", f"{LOCAL}/test_local.py", "-k", "visible or window_size_is_exact"),
    ),
    Mutant(
        "local/dilated windows ignore the phase",
        "brl_jax/attention/local/patterns.py",
        "return inside & (remainder(key_positions, self.dilation)",
        "return inside | (remainder(key_positions, self.dilation)",
        (f"{LOCAL}/test_patterns.py",),
    ),
    Mutant(
        "local/causality is off by one in the block's mask",
        "brl_jax/attention/local/blocks.py",
        "+ call.query_offset >= block.key_index[None, :]",
        "+ call.query_offset + 1 >= block.key_index[None, :]",
        (LAWS, "-k", "law_1 and local-bucketed"),
    ),
    Mutant(
        "local/segments are not kept apart in the block's mask",
        "brl_jax/attention/local/blocks.py",
        "mask = mask & same[:, None, None]",
        "mask = mask | same[:, None, None]",
        (LAWS, "-k", "law_4_packing and local-sliding"),
    ),
    Mutant(
        "local/the gradient of the queries has no scale",
        "brl_jax/attention/local/blocks.py",
        "scaled = (d_logits * scale).astype(dtype)",
        "scaled = d_logits.astype(dtype)",
        (f"{LOCAL}/test_local.py", "-k", "pattern_equals_oracle"),
    ),
    Mutant(
        "local/the soft cap has no derivative",
        "brl_jax/attention/local/blocks.py",
        "d_scores if slope is None else d_scores * slope",
        "d_scores",
        (f"{LOCAL}/test_sinks.py",),
    ),
    Mutant(
        "local/the backward pass forgets the sinks",
        "brl_jax/attention/local/xla.py",
        "share, lse = add_sinks(lse, _by_head(x.sinks, lse))",
        "share, _ = add_sinks(lse, _by_head(x.sinks, lse))",
        (f"{LOCAL}/test_sinks.py",),
    ),
    Mutant(
        "local/the TPU's rests of a capped softmax are those of its products",
        "pallas_kernels/tpu/block/backward.py",
        "pair.changes(unit, capped=False)[1]",
        "pair.changes(unit)[1]",
        (f"{LOCAL}/test_sinks.py", "-k", "tpu"),
    ),
    Mutant(
        "local/the CPU's tiles lose the keys of the second tile",
        "brl_jax/attention/local/xla_cpu.py",
        "in_second = c > r + (t.gap - t.tile)",
        "in_second = c > r + (t.gap - t.tile) + 1",
        (f"{LOCAL}/test_xla_cpu.py",),
    ),
    Mutant(
        "local/the CPU's tiles: gradient of the queries has no scale",
        "brl_jax/attention/local/xla_cpu.py",
        "dq_tile * call.scale)",
        "dq_tile)",
        (f"{LOCAL}/test_xla_cpu.py",),
    ),
    Mutant(
        "local/random blocks are drawn among those seen anyway",
        "brl_jax/attention/local/patterns.py",
        "others = others[abs(others - b) > side]",
        "others = others[abs(others - b) >= side]",
        (f"{LOCAL}/test_patterns.py",),
    ),
    Mutant(
        "local/a window's cache forgets which slots are empty",
        "brl_jax/layers/core/caches.py",
        "jnp.arange(reach + length) >= reach - start",
        "jnp.arange(reach + length) >= 0",
        (LAWS, "-k", "law_2 and local-sliding"),
    ),
    # Attention: compressed tokens.
    Mutant(
        "compressed/the contrast is added",
        "brl_jax/attention/compressed/compress.py",
        "return weights - gamma[None, :, None, None] * contrast",
        "return weights + gamma[None, :, None, None] * contrast",
        ("tests/attention/compressed/test_compress.py", "-k", "compress_oracle"),
    ),
    Mutant(
        "compressed/blocks read one token less of their history",
        "brl_jax/attention/compressed/compress_blocks.py",
        ">= history_size - lengths.reshape(batch * blocks, 1)",
        "> history_size - lengths.reshape(batch * blocks, 1)",
        ("tests/attention/compressed/test_compress.py", "-k", "compress_blocks"),
    ),
    Mutant(
        "compressed/pieces of a long history do not shrink what came before",
        "brl_jax/attention/core/softmax.py",
        "weighted = [share[..., None] * part.weighted for",
        "weighted = [part.weighted for",
        ("tests/attention/compressed/test_compress.py",),
    ),
    Mutant(
        "compressed/propagation ignores the strength of a head",
        "brl_jax/attention/compressed/propagate.py",
        "hide_infinite_bias(bias, None), score) * strength[None, :, None, None]",
        "hide_infinite_bias(bias, None), score) * strength[0]",
        ("tests/attention/compressed/test_compress.py", "-k", "propagate_oracle"),
    ),
    # Attention: recurrent.
    Mutant(
        "recurrent/linear attention enters a chunk twice",
        "brl_jax/attention/recurrent/linear.py",
        "key_value = state.key_value + jnp.einsum",
        "key_value = 2 * state.key_value + jnp.einsum",
        (LAWS, "-k", "law_3 and linear"),
    ),
    Mutant(
        "recurrent/the delta rule writes without its strength",
        "brl_jax/attention/recurrent/delta.py",
        "jnp.tril(overlap, k=-1), beta * (v",
        "jnp.tril(overlap, k=-1), (v",
        (LAWS, "-k", "law_3 and deltanet"),
    ),
    Mutant(
        "recurrent/the delta rule's overlap contains the diagonal",
        "brl_jax/attention/recurrent/delta.py",
        "jnp.tril(overlap, k=-1), beta * (v",
        "jnp.tril(overlap), beta * (v",
        (LAWS, "-k", "law_3 and deltanet"),
        equivalent="solve_unit_lower reads what is below the diagonal, and its gradient is 0 elsewhere",
    ),
    Mutant(
        "recurrent/Performer forgets the maximum when the state fades",
        "brl_jax/attention/recurrent/performer.py",
        "fade = zero_unless(keeps_state, jnp.exp(before - maximum))",
        "fade = zero_unless(keeps_state, jnp.ones_like(maximum))",
        (LAWS, "-k", "law_3 and performer"),
    ),
    Mutant(
        "recurrent/cosFormer's positions turn too fast",
        "brl_jax/attention/recurrent/cosformer.py",
        "(math.pi / (2 * max_length))",
        "(math.pi / max_length)",
        (LAWS, "-k", "law_3 and cosformer"),
    ),
    Mutant(
        "recurrent/GAU divides by all keys instead of the visible ones",
        "brl_jax/attention/recurrent/gau.py",
        "jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1)",
        "jnp.full_like(jnp.sum(seen, axis=-1, keepdims=True), key.shape[1])",
        (LAWS, "-k", "law_3 and gau"),
    ),
    Mutant(
        "recurrent/BSBR's chunks see themselves",
        "brl_jax/attention/recurrent/bsbr.py",
        "earlier, other = number[None] < number[:, None]",
        "earlier, other = number[None] <= number[:, None]",
        (LAWS, "-k", "(law_1 or law_3) and bsbr"),
    ),
    Mutant(
        "recurrent/a sequence sees the state of the one before it",
        "brl_jax/attention/recurrent/chunk_scan.py",
        "pairs, segments == segment[:, None], newest == segment",
        "pairs, segments >= -1, newest == segment",
        ("tests/attention/recurrent", "-k", "segments_are_apart"),
    ),
    # Attention: structured, dense, low rank.
    Mutant(
        "structured/MLR's scale is that of one level",
        "brl_jax/attention/structured/mlr.py",
        "scale = tuple(1 / rank for rank in ranks)",
        "scale = tuple(1 / ranks[0] for rank in ranks)",
        ("tests/attention/structured/test_mlr.py", "-k", "equals_oracle"),
    ),
    Mutant(
        "structured/MLR's step reads the future",
        "brl_jax/attention/structured/mlr_generation.py",
        "seen = (self.columns <= positions)",
        "seen = (self.columns <= positions + 1)",
        ("tests/attention/structured/test_mlr_generation.py",),
    ),
    Mutant(
        "structured/the global part and the window share a scale",
        "brl_jax/attention/structured/global_window.py",
        "scale=scales[1], pattern=pattern",
        "scale=scales[0], pattern=pattern",
        ("tests/attention/structured/test_bilinear.py", "-k", "global_window"),
    ),
    Mutant(
        "structured/bilinear layer norm does not centre",
        "brl_jax/attention/structured/bilinear.py",
        "wide = wide - wide.mean(-1, keepdims=True)",
        "wide = wide + 0",
        ("tests/attention/structured/test_bilinear.py", "-k", "layer_norms"),
    ),
    Mutant(
        "dense/diagonal blocks see their future",
        "brl_jax/attention/dense/diag.py",
        "jnp.tri(rows, keys, dtype=bool)",
        "jnp.tri(rows, keys, 1, dtype=bool)",
        (LAWS, "-k", "law_1 and diag"),
    ),
    Mutant(
        "dense/Hopfield takes one step too few",
        "brl_jax/attention/dense/hopfield.py",
        "for _ in range(steps - 1):",
        "for _ in range(steps - 2):",
        ("tests/attention/dense/test_hopfield.py",),
    ),
    Mutant(
        "low_rank/Linformer projects the padding",
        "brl_jax/attention/low_rank/linformer.py",
        "zero_padding(value, key_lengths))",
        "value)",
        ("tests/attention/low_rank/test_linformer.py", "-k", "padding"),
    ),
    Mutant(
        "low_rank/Nystromformer counts the padding in its segments",
        "brl_jax/attention/low_rank/nystromformer.py",
        "& inside[..., None]",
        "& (inside | True)[..., None]",
        (LAWS, "-k", "law_4_padding and nystromformer"),
    ),
    Mutant(
        "low_rank/the pseudo-inverse starts from the matrix, not transposed",
        "brl_jax/attention/low_rank/pseudo_inverse.py",
        "jnp.swapaxes(matrix, -1, -2) / bound",
        "matrix / bound",
        ("tests/attention/low_rank/test_reference.py", "-k", "nystrom"),
    ),
    Mutant(
        "low_rank/the Long-Short Transformer sees the projection of its own chunk",
        "brl_jax/attention/low_rank/long_short.py",
        "// chunk[0] < own[:, None]",
        "// chunk[0] <= own[:, None]",
        (LAWS, "-k", "law_1 and long_short"),
    ),
    Mutant(
        "low_rank/the Long-Short Transformer keeps a chunk that is not complete",
        "brl_jax/attention/low_rank/long_short_generation.py",
        "(number[:, None] + 1) * size <= start + count",
        "number[:, None] * size <= start + count",
        (LAWS, "-k", "law_2 and long_short"),
        equivalent="a chunk that is not complete is written again when it is, before any query sees it",
    ),
    Mutant(
        "local/other keys of the joint softmax take no part in its gradient",
        "brl_jax/attention/local/xla.py",
        "return gradients, share * d_out,",
        "return gradients, 0 * d_out,",
        (LAWS, "-k", "law_3 and long_short"),
    ),
    Mutant(
        "low_rank/Skyformer samples the padding",
        "brl_jax/attention/low_rank/skyformer.py",
        "samples[None] * counts[:, None].astype(jnp.float32)",
        "samples[None] * jnp.full_like(counts, length)[:, None].astype(jnp.float32)",
        (LAWS, "-k", "law_4_padding and skyformer"),
    ),
    Mutant(
        "dense/kernelized attention lacks the keys' half of the distance",
        "brl_jax/attention/dense/kernelized.py",
        "_half_squares(key).transpose(0, 2, 1)[:, :, None, None]",
        "0.0",
        (LAWS, "-k", "law_3 and kernelized"),
    ),
    # Kernels.
    Mutant(
        "kernels/window: one key too many on the left",
        "pallas_kernels/tpu/window/plan.py",
        "mask = offset >= -self.left - distance * self.tile",
        "mask = offset >= -self.left - 1 - distance * self.tile",
        (f"{TPU}/window/test_window_attention.py", "-k", "matches_reference_in_float32"),
    ),
    Mutant(
        "kernels/window: gradients of the keys have no scale",
        "pallas_kernels/tpu/window/backward.py",
        "arithmetic.dot(changes, queries, NN) * scale,",
        "arithmetic.dot(changes, queries, NN),",
        (f"{TPU}/window/test_window_attention.py", "-k", "matches_reference_in_float32"),
    ),
    Mutant(
        "kernels/window: rows that see nothing keep what they summed",
        "pallas_kernels/tpu/window/forward.py",
        "out = jnp.where(seen, out, 0.0)",
        "out = jnp.where(seen, out, out)",
        (f"{TPU}/window/test_window_attention.py", "-k", "segments"),
    ),
    Mutant(
        "kernels/window: the backward pass forgets the last block's end",
        "pallas_kernels/tpu/window/backward.py",
        "if plan.ragged else x",
        "if False else x",
        (f"{TPU}/window/test_window_attention.py",),
    ),
    Mutant(
        "kernels/compress: the running total does not shrink",
        "pallas_kernels/tpu/compress/forward.py",
        "old = old if shrink is None else old * shrink",
        "old = old",
        (f"{TPU}/compress/test_compress.py", "-k", "matches_reference_in_float32 or large_logits"),
    ),
    Mutant(
        "kernels/compress: a history ends one token late",
        "pallas_kernels/tpu/compress/history.py",
        "row >= self._stop,",
        "row > self._stop,",
        (f"{TPU}/compress/test_compress.py", "-k", "lengths_and_poison or blockwise"),
    ),
    Mutant(
        "kernels/block: keys sum one head of a group only",
        "pallas_kernels/tpu/block/backward.py",
        "@pl.when(first & (member == 0))",
        "@pl.when(first)",
        (f"{TPU}/block/test_block_attention.py", "-k", "grouped_ragged"),
    ),
    Mutant(
        "kernels/scores: the Laplace slope has another width",
        "pallas_kernels/scores.py",
        "jnp.exp(-0.5 * jnp.square((logits - _LAPLACE_MEAN) / _LAPLACE_DEVIATION))",
        "jnp.exp(-1.0 * jnp.square((logits - _LAPLACE_MEAN) / _LAPLACE_DEVIATION))",
        (f"{TPU}/compress/test_compress.py", "-k", "matches_reference_in_float32"),
    ),
    # Layers and models.
    Mutant(
        "layers/BRL's output history keeps its gradient",
        "brl_jax/layers/compressed/brl_memory.py",
        "return BRLMemory(jax.lax.stop_gradient(history), jnp.minimum(",
        "return BRLMemory(history, jnp.minimum(",
        (LAWS, "-k", "a_memory_has_no_gradient"),
    ),
    Mutant(
        "layers/BRL's first block reads a history that is not there",
        "brl_jax/layers/compressed/compressed_tokens.py",
        "jnp.where(jnp.atleast_2d(history_lengths > 0)[:, :, None, None], read, tokens)",
        "jnp.where(jnp.atleast_2d(history_lengths >= 0)[:, :, None, None], read, tokens)",
        (LAWS, "-k", "law_3 and brl-output"),
    ),
    Mutant(
        "layers/BRL's history in a packed row goes back beyond its sequence",
        "brl_jax/layers/compressed/brl_layer.py",
        "jnp.minimum(packed.before, mechanism.history)",
        "jnp.where(packed.before > 0, mechanism.history, 0)",
        (LAWS, "-k", "law_4_packing and brl-layer"),
    ),
    Mutant(
        "layers/BRL's further blocks begin where a sequence does",
        "brl_jax/layers/compressed/packing.py",
        "begins = (offset > 0) & (place == 0)",
        "begins = (token > 0) & (place == 0)",
        ("tests/layers/compressed/test_packing.py",),
    ),
    Mutant(
        "layers/BRL's rotary keys count from the block's end",
        "brl_jax/layers/compressed/compressed_tokens.py",
        "starts = size + jnp.arange(blocks, dtype=jnp.int32) * block",
        "starts = size + (1 + jnp.arange(blocks, dtype=jnp.int32)) * block",
        (LAWS, "-k", "law_3 and brl-layer"),
    ),
    Mutant(
        "layers/BRL's share of carried tokens is swapped",
        "brl_jax/layers/compressed/compressed_tokens.py",
        "evolved = (1.0 - beta) * norm",
        "evolved = (1.0 + beta) * norm",
        (LAWS, "-k", "law_3 and brl-layer"),
    ),
    Mutant(
        "layers/BRL's decoding advances a block late",
        "brl_jax/layers/compressed/brl_layer.py",
        "first = cache.num_tokens % mechanism.block == 0",
        "first = cache.num_tokens % mechanism.block == 1",
        (LAWS, "-k", "law_2_generation and brl-output"),
    ),
    Mutant(
        "layers/keys have no norm where asked for",
        "brl_jax/layers/core/modules.py",
        'key = norm(d, name="key_norm", axis="head_dim")(key)',
        'norm(d, name="key_norm", axis="head_dim")(key)',
        (LAWS, "-k", "law_3 and mlr"),
    ),
    Mutant(
        "models/embedding dropout is never applied",
        "brl_jax/models/decoder.py",
        "x = self.dropout(self.inputs.embed(tokens), deterministic=deterministic)",
        "x = self.dropout(self.inputs.embed(tokens), deterministic=True)",
        ("tests/models/test_dropout.py",),
    ),
    Mutant(
        "models/sublayer dropout is never applied",
        "brl_jax/models/block.py",
        "self.dropout = nn.Dropout(d.dropout)",
        "self.dropout = nn.Dropout(0.0)",
        ("tests/models/test_dropout.py",),
    ),
    Mutant(
        "models/the loss in pieces counts its padding",
        "brl_jax/models/losses.py",
        "- chosen) * weights)",
        "- chosen) * jnp.where(weights == 0, 1.0, weights))",
        (
            "tests/train/test_mesh.py",
            "tests/train/test_loop.py",
            "-k",
            "loss_in_pieces or evaluation_carries",
        ),
    ),
    Mutant(
        "models/TLinFormer's windows read their own tokens twice",
        "brl_jax/models/tlinformer/layers.py",
        "read = layers.attend_history(both, keys, values, history)",
        "read = layers.attend_history(both, keys, values, history + 1)",
        (LAWS, "-k", "law_3 and tlinformer"),
    ),
    Mutant(
        "models/sinusoidal positions swap sine and cosine",
        "brl_jax/models/inputs.py",
        "jnp.where(feature[None] % 2 == 0, jnp.sin(angle), jnp.cos(angle))",
        "jnp.where(feature[None] % 2 == 1, jnp.sin(angle), jnp.cos(angle))",
        ("tests/models/test_encoder.py", "-k", "sinusoidal"),
    ),
    Mutant(
        "models/alternate schedules begin with the late mechanism",
        "brl_jax/models/config.py",
        "second if i % (run + 1) == run else first",
        "second if i % (run + 1) == 0 else first",
        ("tests/models/test_schedules.py", "-k", "which_layer"),
    ),
    # Decoding.
    Mutant(
        "decoding/top_p drops the token that reaches p",
        "brl_jax/decoding.py",
        "axis=-1) - jax.nn.softmax(ordered, axis=-1)",
        "axis=-1)",
        ("tests/test_decoding.py",),
    ),
    Mutant(
        "decoding/top_k keeps one token more",
        "brl_jax/decoding.py",
        "jax.lax.top_k(logits, top_k)[0][:, -1:]",
        "jax.lax.top_k(logits, top_k + 1)[0][:, -1:]",
        ("tests/test_decoding.py",),
    ),
    Mutant(
        "decoding/the temperature is ignored",
        "brl_jax/decoding.py",
        "sample(key, state.logits / settings.temperature,",
        "sample(key, state.logits,",
        ("tests/test_decoding.py", "tests/test_temperature.py"),
    ),
    Mutant(
        "decoding/ragged prompts are overwritten a token early",
        "brl_jax/decoding.py",
        "is_given = index < settings.num_forced",
        "is_given = index + 1 < settings.num_forced",
        ("tests/train/test_lm.py", "tests/models", "-k", "generation"),
    ),
    # Sharding.
    Mutant(
        "sharding/dimensions that do not divide are cut all the same",
        "brl_jax/sharding.py",
        "if not axes or size % math.prod(free[axis] for axis in axes):",
        "if not axes:",
        ("tests/test_sharding.py",),
    ),
    Mutant(
        "sharding/the halo comes from the wrong end of the neighbour",
        "brl_jax/attention/core/halo.py",
        "lax.slice_in_dim(x, size - part, size, axis=1)",
        "lax.slice_in_dim(x, 0, part, axis=1)",
        (f"{LOCAL}/test_sharded.py", "-k", "window"),
    ),
    Mutant(
        "sharding/stretches merge without their maximum",
        "brl_jax/attention/core/softmax.py",
        "share = jnp.exp(sums.maximum - maximum)",
        "share = jnp.ones_like(maximum)",
        (f"{LOCAL}/test_sharded.py", "-k", "compress"),
    ),
    # Training.
    Mutant(
        "train/patience is one evaluation too long",
        "train/loop.py",
        "best.misses >= loop.patience",
        "best.misses > loop.patience",
        ("tests/train/test_lra.py", "tests/train/test_loop.py", "-k", "no_better or patience"),
    ),
    Mutant(
        "train/the saved position is not restored",
        "train/loop.py",
        'stream.set_state(meta["position"])',
        'meta["position"]',
        ("tests/train/test_loop.py", "-k", "stopped_at_any_step"),
    ),
    Mutant(
        "train/a step does not clear the memory on reset",
        "train/step.py",
        'jnp.where(batch["reset"], fresh, old)',
        'jnp.where(batch["reset"], old, old)',
        ("tests/train/test_step.py",),
    ),
    Mutant(
        "train/microbatches share their dropout",
        "train/step.py",
        "key = jax.random.fold_in(step_key, index)",
        "key = step_key",
        ("tests/train/test_step.py",),
    ),
    Mutant(
        "train/gradients are averaged over microbatches, not targets",
        "train/step.py",
        'g / sums["weight"].astype(g.dtype)',
        "g / accumulation",
        ("tests/train/test_step.py",),
    ),
    Mutant(
        "train/gradients are clipped after Adam",
        "train/optimizer.py",
        "optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)",
        "optax.chain(adamw, optax.clip_by_global_norm(config.clip_norm))",
        ("tests/train/test_optimizer.py",),
    ),
    Mutant(
        "train/vectors decay too",
        "train/optimizer.py",
        "leaf.ndim >= 2 if not spec else sum(axis not in _NO_FEATURES for axis in spec) >= 2",
        "leaf.ndim >= 1",
        ("tests/train/test_optimizer.py",),
    ),
    Mutant(
        "train/the warm-up wastes its first step",
        "train/optimizer.py",
        "optax.linear_schedule(highest / warmup, highest, warmup - 1)",
        "optax.linear_schedule(0.0, highest, warmup)",
        ("tests/train/test_optimizer.py",),
    ),
    Mutant(
        "train/muP divides the wrong way",
        "train/mup.py",
        "return base_width / width if not is_vector",
        "return width / base_width if not is_vector",
        ("tests/train/test_mup.py", "-k", "rates"),
    ),
    Mutant(
        "train/the moments' spread uses the old mean twice",
        "train/moments.py",
        "spread=moments.spread + off * (norms - mean)",
        "spread=moments.spread + off * off",
        ("tests/train/test_moments.py",),
    ),
    Mutant(
        "train/the best checkpoint is the worst",
        "train/checkpoint.py",
        "best = min(self._scores, key=",
        "best = max(self._scores, key=",
        ("tests/train/test_checkpoint.py", "-k", "best"),
    ),
    Mutant(
        "train/the digest leaves bits out",
        "train/checkpoint.py",
        "width = min(x.dtype.itemsize, 4)",
        "width = min(x.dtype.itemsize, 4)\n            x = x[1:]",
        ("tests/train/test_checkpoint.py", "-k", "digest"),
    ),
    # Data.
    Mutant(
        "data/rows of a stream overlap",
        "train/data/streams.py",
        "chosen_rows[:, None] * (steps * length)",
        "chosen_rows[:, None] * (steps * length - 1)",
        ("tests/train/data/test_streams.py",),
    ),
    Mutant(
        "data/evaluation counts its padding",
        "train/data/streams.py",
        "counted = (within < row) & (at < self.num_targets)",
        "counted = at < self.num_targets",
        ("tests/train/data/test_streams.py",),
    ),
    Mutant(
        "data/held-out prompts are drawn as training prompts are",
        "train/data/in_context.py",
        "(config.valid_prompts, (_HELD_OUT, 0))",
        "(config.valid_prompts, (_TRAIN, 0))",
        ("tests/train/test_regression.py", "-k", "prompts"),
    ),
    Mutant(
        "data/a regression prompt contains the answer that it asks for",
        "train/tasks/regression.py",
        "questions = jnp.pad(x, ((0, 0), (0, 0), (0, 1)))",
        "questions = jnp.concatenate([x, y[..., None]], axis=-1)",
        ("tests/train/test_regression.py", "-k", "prompt or prediction"),
    ),
    Mutant(
        "data/series are normalised by all rows",
        "train/data/series.py",
        "training = values[: config.split[0]]",
        "training = values",
        ("tests/train/test_forecast.py", "-k", "normalised"),
    ),
    Mutant(
        "data/ListOps medians round up",
        "train/data/lra/listops.py",
        "ordered[starts + (arity - 1) // 2] + ordered",
        "1 + ordered[starts + (arity - 1) // 2] + ordered",
        ("tests/train/data/lra/test_listops.py", "-k", "label"),
    ),
    # Evaluation.
    Mutant(
        "eval/perplexity is of bits",
        "train/tasks/lm.py",
        'math.exp(metrics["val_loss"])',
        '2 ** metrics["val_loss"]',
        ("tests/train/test_lm.py", "-k", "eval_"),
    ),
    Mutant(
        "eval/neighbourhoods are shifted by a token",
        "eval/locality.py",
        "np.arange(length)[:, None] - size // 2",
        "np.arange(length)[:, None] - size // 2 + 1",
        ("tests/eval/test_locality.py", "-k", "score"),
    ),
    Mutant(
        "eval/a mesh that gives another loss passes",
        "eval/mesh_check.py",
        'return found if np.isfinite(found) else "not finite"',
        "return found",
        ("tests/eval/test_mesh_check.py", "-k", "worst"),
    ),
    Mutant(
        "eval/the reference of local attention has a wider window",
        "eval/speed/functions.py",
        "(j <= i) & (i - j < options.window)",
        "(j <= i) & (i - j <= options.window)",
        ("tests/eval/test_speed.py", "-k", "reference_equals_oracle"),
    ),
)
