"""A small random decoder in the layout of transformers, made without it."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from brl_jax.layers import FullConfig
from brl_jax.models import DecoderConfig, DecoderLM, huggingface
from tests.support.texts import write_splits

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION = {"eos_token_id": [3, 5], "temperature": 0.5}


def write_text(folder):
    """Two lines about colours, many times; returns the value of --data for them."""
    text = "the colour of the sky is blue\nthe colour of grass is green\n"
    return write_splits(folder, train=60 * text, valid=6 * text)


def write_tokenizer(folder, template=TEMPLATE):
    """Bytes, a few pairs of them, and special tokens."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    model.train_from_iterator(["the colour of the sky is blue, the colour of grass is green"] * 4, trainer)
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<|im_end|>", "bos_token": None}
    if template is not None:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return model.get_vocab_size()


def write_model(folder, tokenizer, *, vocab_size=304, **changes):
    """A folder with the weights, a generation_config.json and the tokenizer; returns its parameters."""
    config = DecoderConfig(
        num_layers=2,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        d_ff=48,
        ffn="swiglu",
        norm="rms",
        norm_epsilon=1e-6,
        embedding_scale=1.0,
        mechanism=FullConfig(),
        vocab_size=vocab_size,
        **changes,
    )
    shapes = nn.unbox(
        jax.eval_shape(DecoderLM(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    )
    rng = np.random.default_rng(0)

    def draw(path, x):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return (center + 0.2 * rng.standard_normal(x.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    kept = {"token_ids": {"eos_token_id": 2}, "generation": GENERATION, "max_length": 77}
    huggingface.save(
        folder, huggingface.PretrainedConfig(**vars(config), **kept), params, tokenizer=tokenizer
    )
    return params
