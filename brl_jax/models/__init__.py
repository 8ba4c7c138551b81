"""Complete networks: decoder, encoder, encoder-decoder, regressor and node classifier."""

from brl_jax.models.config import StackConfig as StackConfig
from brl_jax.models.decoder import DecoderConfig as DecoderConfig
from brl_jax.models.decoder import DecoderLM as DecoderLM
from brl_jax.models.encoder import Classifier as Classifier
from brl_jax.models.encoder import Encoder as Encoder
from brl_jax.models.encoder import EncoderConfig as EncoderConfig
from brl_jax.models.encoder import PairClassifier as PairClassifier
from brl_jax.models.encoder import TokenClassifier as TokenClassifier
from brl_jax.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from brl_jax.models.encoder_decoder import EncoderDecoderConfig as EncoderDecoderConfig
from brl_jax.models.graph import GraphConfig as GraphConfig
from brl_jax.models.graph import NodeClassifier as NodeClassifier
from brl_jax.models.masked_lm import MaskedLM as MaskedLM
from brl_jax.models.networks import make_stack as make_stack
from brl_jax.models.pooling import Pooling as Pooling
from brl_jax.models.regressor import Regressor as Regressor
from brl_jax.models.regressor import RegressorConfig as RegressorConfig
from brl_jax.models.stack import Stack as Stack
from brl_jax.models.transnormer import TRANSNORMER_SIZES as TRANSNORMER_SIZES
from brl_jax.models.transnormer import transnormer as transnormer
