"""The Python blocks of README.md and docs/ run, each page's blocks in order and in one namespace."""

import importlib.util
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """A page's Python blocks, padded with empty lines so that errors give the page's line numbers."""
    text = page.read_text()
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in _BLOCK.finditer(text)]


def surroundings(page: Path) -> dict:
    """What some pages' blocks assume: a model and its batch, or a run's folder."""
    if page.name == "packing.md":
        from brl_jax import DecoderConfig, DecoderLM, Encoder, EncoderConfig, LocalConfig, MaskedLM

        sizes = {"num_layers": 1, "d_model": 32, "num_heads": 2, "d_ff": 32}
        model = DecoderLM(DecoderConfig(**sizes, mechanism=LocalConfig(window=4)))
        config = EncoderConfig(**sizes, mechanism=LocalConfig(window=4))
        encoder, masked = Encoder(config), MaskedLM(config)
        tokens, places = jnp.arange(32).reshape(2, 16), jnp.zeros((2, 1), jnp.int32)
        variables = nn.unbox(model.init(jax.random.key(0), tokens))
        return {
            "encoder": encoder,
            "encoder_variables": nn.unbox(encoder.init(jax.random.key(0), tokens)),
            "masked": masked,
            "masked_variables": nn.unbox(masked.init(jax.random.key(0), tokens, places)),
            "places": places,
            "model": model,
            "variables": variables,
            "tokens": tokens,
            "targets": tokens,
            "weights": jnp.ones((2, 16)),
            "segment_ids": jnp.asarray(np.arange(16) // 8)[None].repeat(2, 0),
        }
    if page.name == "huggingface.md":
        from brl_jax import DecoderConfig, DecoderLM, FullConfig
        from brl_jax.models import huggingface

        config = DecoderConfig(
            num_layers=1,
            d_model=32,
            num_heads=2,
            d_ff=32,
            ffn="swiglu",
            norm="rms",
            tied_embeddings=False,
            vocab_size=64,
            mechanism=FullConfig(),
        )
        init = DecoderLM(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        for folder in ("path/to/model", "FOLDER"):
            Path(folder).parent.mkdir(parents=True, exist_ok=True)
            huggingface.save(folder, config, nn.unbox(init)["params"])
            Path(folder, "tokenizer.json").write_text("{}")
    if page.name == "package.md":
        from train.lm import main

        small = "--d_model 32 --num_heads 2 --d_ff 32 --num_layers 1 --length 32 --batch 2 --steps 2 --eval_every 2"
        main([*small.split(), "--eval_tokens", "128", "--full_eval", "False", "--workdir", "runs/stdlib"])
    return {}


CASES = [page for page in PAGES if blocks(page)]


def test_blocks_are_found():
    assert {"README.md", "doors.md", "lra.md", "packing.md", "package.md"} <= {page.name for page in CASES}
    # A block that is neither Python nor shell would not be tested.
    fences = [f for page in PAGES for f in re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)]
    assert set(fences) <= {"", "python"}


@pytest.mark.slow
@pytest.mark.parametrize("page", CASES, ids=lambda page: page.stem)
def test_blocks_run(page, tmp_path, monkeypatch):
    # The pages' commands run in a checkout whose folder `data` holds the data sets.
    data = next(
        (folder for folder in (ROOT / "data", ROOT.parent / "shared" / "data") if folder.exists()), None
    )
    if data is not None:
        (tmp_path / "data").symlink_to(data)
    monkeypatch.chdir(tmp_path)
    # Users run with JAX's default settings; the tests' are stricter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        namespace = surroundings(page)
        for block in blocks(page):
            if "import equinox" in block and importlib.util.find_spec("equinox") is None:
                continue
            if '"data/' in block and data is None:
                continue
            exec(compile(block, str(page), "exec"), namespace)
