"""Text for language modeling: `load` gives a tokenizer and corpora, the streams cut them in batches."""

from train.data.corpus import Corpus
from train.data.dataset import DataConfig, forget_unstarted, load
from train.data.streams import EvalStream, TokenStreams
from train.data.tokenizers.base import Tokenizer
from train.data.tokenizers.named import load_tokenizer

__all__ = [
    "Corpus",
    "DataConfig",
    "EvalStream",
    "TokenStreams",
    "Tokenizer",
    "forget_unstarted",
    "load",
    "load_tokenizer",
]
