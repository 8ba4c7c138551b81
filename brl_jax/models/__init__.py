"""Complete networks: decoder, encoder, encoder-decoder, regressor and node classifier."""

from brl_jax.models.config import StackConfig
from brl_jax.models.decoder import DecoderConfig, DecoderLM
from brl_jax.models.encoder import (
    Classifier,
    Encoder,
    EncoderConfig,
    PairClassifier,
    TokenClassifier,
)
from brl_jax.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from brl_jax.models.graph import GraphConfig, NodeClassifier
from brl_jax.models.masked_lm import MaskedLM
from brl_jax.models.networks import make_stack
from brl_jax.models.pooling import Pooling
from brl_jax.models.regressor import Regressor, RegressorConfig
from brl_jax.models.stack import Stack
from brl_jax.models.transnormer import TRANSNORMER_SIZES, transnormer

__all__ = [
    "TRANSNORMER_SIZES",
    "Classifier",
    "DecoderConfig",
    "DecoderLM",
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "GraphConfig",
    "MaskedLM",
    "NodeClassifier",
    "PairClassifier",
    "Pooling",
    "Regressor",
    "RegressorConfig",
    "Stack",
    "StackConfig",
    "TokenClassifier",
    "make_stack",
    "transnormer",
]
