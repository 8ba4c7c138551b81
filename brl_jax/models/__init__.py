"""Whole networks."""

from brl_jax.models.decoder import DecoderConfig, DecoderLM
from brl_jax.models.stack import Stack

__all__ = ["DecoderConfig", "DecoderLM", "Stack"]
