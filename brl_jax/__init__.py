"""Linear-cost attention for JAX, from one laptop core to a TPU pod.

Functions (arrays in, arrays out; use them under your own jit, grad, vmap, shard_map):
  full_attention, local_attention, compress, compress_blocks and propagate, with their patterns and biases;
  diag_attention, linformer_attention, hopfield_attention;
  linear_attention, norm_attention, performer_attention, cosformer_attention, flowformer_attention, delta_rule,
  gated_delta_rule, kimi_delta_rule, gated_delta_rule_2 and rwkv7_attention, whose past is a state;
  luna_attention, gau_attention, mixed_chunk_attention, bsbr_attention;
  mlr_attention, long_short_attention, bilinear_mlr_attention, bilinear_btt_attention, global_window_attention;
  nystromformer_attention, skyformer_attention, kernelized_attention, synthesizer_attention; native_sparse_attention,
  reformer_attention, sinkhorn_attention, informer_attention, sliceformer_attention.
  Functions that can continue from earlier tokens take state= and return_state=, and init_NAME_state makes the first
  state. state_functions returns init, extend and step of a mechanism under the same three names, and for some of them
  summarize, whose Summary lets a caller divide sequences over devices.
Networks (Flax Linen):
  DecoderLM and its DecoderConfig, over any mechanism in MECHANISMS or a schedule of two. generate continues prompts
  (a Draft is a small model that drafts tokens for it), stream yields the tokens as they come, and generate_requests
  decodes requests of any length together.
  Encoder (with an EncoderConfig) returns an output for each token or feature vector; Classifier, PairClassifier and
  TokenClassifier classify sequences, pairs and tokens; NodeClassifier classifies the nodes of a graph; Regressor maps
  vectors to vectors.
  EncoderDecoder (with an EncoderDecoderConfig) writes a target from a source. transnormer returns the configuration of
  a TransNormer. Stack is the layers alone, and a configuration's `layer(Dimensions(...))` is a single layer.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The module of each public name, from the stub that type checkers read. A module is imported when a name of it is first
# used, so that a program that calls functions does not wait for the networks.
_MODULES = {
    alias.name: node.module or ""
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
