"""Trains a language model: python -m train.lm [PRESET] [OPTIONS].

Without arguments, a small BRL model on the sources of Python's standard library, in minutes, into runs/small.
The run's folder holds config.json, metrics.jsonl, checkpoints/ and TensorBoard events; the same command again
goes on where the run stopped (Ctrl-C and SIGTERM save first), bit for bit as if it had not. Ends with a
sample of what it learnt.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from brl_jax.decoding import generate
from brl_jax.models import DecoderLM
from train.config import LmConfig, parse, to_json
from train.data import Corpus, EvalStream, Tokenizer, TokenStreams, load
from train.errors import UserError, command
from train.hosts import is_lead, join, lead_first
from train.loop import train
from train.mesh import held_rows, open_mesh
from train.metrics import say
from train.mup import make_rates
from train.presets import PRESETS
from train.step import Batch, Objective

# Tokens of held-out text that the sample goes on from where no prompt is given.
_SAMPLE_CONTEXT = 64
_SAMPLE_TEMPERATURE = 0.8


def lm_objective(model: DecoderLM) -> Objective:
    """Next-token prediction on {"tokens", "targets": (B, T) int32, perhaps "weights": (B, T) float32}."""

    def init(key: Array) -> Any:
        return model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def loss(params: Any, memory: Any, batch: Batch, key: Array | None):
        return model.apply(
            {"params": params},
            batch["tokens"],
            batch["targets"],
            batch.get("weights"),
            memory=memory,
            deterministic=key is None,
            rngs={} if key is None else {"dropout": key},
            method="loss",
        )

    return Objective(init, loss, model.init_memory, rates=make_rates(model.config))


def build_model(config: LmConfig) -> DecoderLM:
    """The model of a configuration, tried on a batch's shapes.

    Raises:
      UserError: its parts don't fit each other or the batch.
    """
    try:
        model = DecoderLM(config.model)
        objective = lm_objective(model)
        rows = config.loop.batch // config.loop.accumulation
        tokens = jax.ShapeDtypeStruct((rows, config.loop.length), jnp.int32)
        jax.eval_shape(
            lambda key, tokens: objective.loss(
                objective.init(key), objective.init_memory(rows), {"tokens": tokens, "targets": tokens}, key
            ),
            jax.random.key(0),
            tokens,
        )
    except ValueError as error:
        raise UserError(f"the model's options do not fit: {error}") from error
    return model


def held_out_stream(corpus: Corpus, config: LmConfig, limit: int, mesh: Mesh | None = None) -> EvalStream:
    """One pass over a held-out corpus, or its first `limit` tokens (0: all), in batches of a microbatch's
    shape; on a mesh, the rows of this process."""
    rows = config.loop.batch // config.loop.accumulation
    # A row needs a few targets, or a short text would be cut in rows without past.
    rows = max(1, min(rows, len(corpus.tokens) // config.loop.length))
    return EvalStream(
        corpus,
        batch=rows,
        length=config.loop.length,
        limit=limit or None,
        rows=None if mesh is None else held_rows(mesh, rows),
    )


def main(argv: Sequence[str]) -> None:
    """Trains; see the module's text and --help."""
    config = parse(
        PRESETS, "small", argv, prog="python -m train.lm", about="Trains a decoder language model on text."
    )
    join(config.hosts)
    mesh = open_mesh(config.mesh, config.loop, config.model, length=config.loop.length)
    with lead_first("data"):
        tokenizer, corpora = load(config.data, config.loop.workdir)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    )
    prompt = _sample_prompt(config, tokenizer, corpora["valid"])
    model = build_model(config)
    held_out = held_out_stream(corpora["valid"], config, config.loop.eval_tokens, mesh)
    whole = held_out_stream(corpora["valid"], config, 0, mesh) if config.loop.full_eval else held_out
    stream = TokenStreams(
        corpora["train"],
        batch=config.loop.batch,
        length=config.loop.length,
        seed=config.loop.seed,
        rows=held_rows(mesh, config.loop.batch),
    )
    state = train(
        lm_objective(model),
        config.loop,
        config.optimizer,
        config=to_json(config),
        stream=stream,
        held_out=held_out,
        full_held_out=whole,
        mesh=mesh,
    )
    say(f"done: {config.loop.steps} steps in {config.loop.workdir}")
    if config.sample_tokens:
        with jax.set_mesh(mesh):
            tokens = generate(
                model,
                {"params": state.params},
                jnp.asarray(prompt, jnp.int32)[None],
                max_new_tokens=config.sample_tokens,
                rng=jax.random.key(config.loop.seed),
                temperature=_SAMPLE_TEMPERATURE,
            )
        if is_lead():
            print(tokenizer.decode(np.asarray(tokens.addressable_data(0)[0])))


def _sample_prompt(config: LmConfig, tokenizer: Tokenizer, held_out: Corpus) -> Int[np.ndarray, " tokens"]:
    """Tokens that the sample goes on from, found before training so that a bad prompt is told at once."""
    if not config.sample_prompt:
        return np.asarray(held_out.tokens[:_SAMPLE_CONTEXT], np.int32)
    try:
        return tokenizer.encode(config.sample_prompt)
    except UserError as error:
        raise UserError(f"--sample_prompt: {error}") from error


if __name__ == "__main__":
    sys.exit(command(main, "train.lm"))
