"""Our functions against public implementations of the same mathematics, where those are right.

Compared with, each where it is installed (`pip install -e '.[references]'`):
  fla-core 0.6.0 (flash-linear-attention's recurrences in plain PyTorch): linear attention, the delta rule;
  performer-pytorch 1.1.4: FAVOR+ features, bidirectional (its causal features look at later tokens);
  FLASH-pytorch 0.1.9: gated attention units, bidirectional (where causal it divides by the length of the sequence, we
  by the keys seen), and mixed chunks in both directions;
  linformer 0.2.3: projected keys and values;
  PyTorch 2.13: softmax attention, whole and under a window's mask.
"""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax

torch = pytest.importorskip("torch")
LENGTH, HEADS, SIZE = 64, 2, 16


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def _tensors(count, length=LENGTH):
    return [torch.randn(2, length, HEADS, SIZE) for _ in range(count)]


def _ours(function, tensors, *args, **options):
    return function(*(jnp.asarray(x.detach().numpy()) for x in tensors), *args, **options)


def _close(ours, theirs, tolerance=2e-5):
    theirs = theirs.detach().numpy()
    assert np.linalg.norm(np.asarray(ours) - theirs) <= tolerance * np.linalg.norm(theirs)


def _recurrences(name):
    """Loads one file of flash-linear-attention; importing its package would need a GPU compiler."""
    spec = importlib.util.find_spec("fla")
    if spec is None:
        pytest.skip("fla-core is not installed")
    path = Path(spec.submodule_search_locations[0]) / "ops" / name / "naive.py"
    loader = importlib.util.spec_from_file_location(f"fla_{name}", path)
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


@pytest.mark.parametrize("window", [None, 5])
def test_softmax_attention(window):
    query, key, value = _tensors(3)
    i = torch.arange(LENGTH)
    mask = i[None] <= i[:, None]
    if window is not None:
        mask = mask & (i[:, None] - i[None] < window)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), attn_mask=mask
    )
    if window is None:
        ours = _ours(brl_jax.full_attention, (query, key, value), is_causal=True)
    else:
        options = {"local_window_size": (window - 1, 0), "is_causal": True}
        ours = _ours(brl_jax.local_attention, (query, key, value), **options)
    _close(ours, theirs.transpose(1, 2))


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_attention(normalize):
    query, key, value = _tensors(3)
    phi = torch.nn.functional.elu
    theirs, _ = _recurrences("linear_attn").naive_recurrent_linear_attn(
        phi(query) + 1, phi(key) + 1, value, scale=1.0, normalize=normalize
    )
    _close(_ours(brl_jax.linear_attention, (query, key, value), is_causal=True, normalize=normalize), theirs)


def test_delta_rule():
    query, key, value = _tensors(3)
    key = torch.nn.functional.normalize(key, dim=-1)
    beta = torch.rand(2, LENGTH, HEADS)
    theirs, _ = _recurrences("delta_rule").delta_rule_recurrence(
        *(x.transpose(1, 2) for x in (query * SIZE**0.5, key, value, beta))
    )
    _close(
        _ours(brl_jax.delta_rule, (query, key, value), beta=jnp.asarray(beta.numpy())), theirs.transpose(1, 2)
    )


def test_performer():
    reference = pytest.importorskip("performer_pytorch.performer_pytorch")
    query, key, value = _tensors(3)
    projection = reference.gaussian_orthogonal_random_matrix(24, SIZE)
    query_features, key_features = (
        reference.softmax_kernel(
            x.transpose(1, 2), projection_matrix=projection, is_query=x is query, eps=0.0
        )
        for x in (query, key)
    )
    theirs = reference.linear_attention(query_features, key_features, value.transpose(1, 2))
    projection = jnp.asarray(projection.numpy())
    ours = _ours(brl_jax.performer_attention, (query, key, value), projection=projection)
    _close(ours, theirs.transpose(1, 2), 1e-3)  # ours adds a millionth of a query's largest feature to each


def _gated_parts(unit, maps, x):
    """What a unit passes to its attention: its maps and values, as (B, T, 1, ...), and its gate."""
    normed = unit.norm(x)
    value, gate = unit.to_hidden(normed).chunk(2, dim=-1)
    return [part[:, :, None] for part in (*maps(unit.to_qk(normed)), value)], gate


def _larger_weights(scale):
    """The products of queries and keys start near 0; larger weights make them matter."""
    torch.nn.init.normal_(scale.gamma)
    torch.nn.init.normal_(scale.beta)


def test_gated_attention():
    reference = pytest.importorskip("flash_pytorch")
    unit = reference.GAU(dim=SIZE, query_key_dim=8, add_residual=False)
    _larger_weights(unit.offsetscale)
    torch.nn.init.zeros_(unit.rel_pos_bias.relative_attention_bias.weight)
    x = torch.randn(2, LENGTH, SIZE)
    parts, gate = _gated_parts(unit, unit.offsetscale, x)
    attended = torch.from_numpy(np.array(_ours(brl_jax.gau_attention, parts)))[:, :, 0]
    _close(unit.to_out(attended * gate).detach().numpy(), unit(x))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [LENGTH, 57])
def test_mixed_chunks(is_causal, length):
    reference = pytest.importorskip("flash_pytorch")
    unit = reference.FLASH(dim=SIZE, group_size=16, query_key_dim=8, causal=is_causal)
    _larger_weights(unit.qk_offset_scale)
    torch.nn.init.zeros_(unit.rel_pos_bias.relative_attention_bias.weight)
    x = torch.randn(2, length, SIZE)
    (query, linear_query, key, linear_key, value), gate = _gated_parts(unit, unit.qk_offset_scale, x)
    # If not causal, it divides the linear part by the sequence length, and we by the chunk length.
    linear_query = linear_query if is_causal else linear_query * (16 / length)
    parts = (query, key, linear_query, linear_key, value)
    attended = _ours(brl_jax.mixed_chunk_attention, parts, is_causal=is_causal, chunk_size=16)
    attended = torch.from_numpy(np.array(attended))[:, :, 0]
    _close((unit.to_out(attended * gate) + x).detach().numpy(), unit(x))


def test_linformer():
    reference = pytest.importorskip("linformer")
    layer = reference.LinformerSelfAttention(dim=HEADS * SIZE, seq_len=80, k=12, heads=HEADS)
    x = torch.randn(2, LENGTH, HEADS * SIZE)
    parts = [to(x).reshape(2, LENGTH, HEADS, SIZE) for to in (layer.to_q, layer.to_k, layer.to_v)]
    projections = {
        f"{name}_projection": jnp.asarray(getattr(layer, f"proj_{name[0]}").detach().numpy().T)
        for name in ("key", "value")
    }
    attended = torch.from_numpy(np.array(_ours(brl_jax.linformer_attention, parts, **projections)))
    _close(layer.to_out(attended.reshape(2, LENGTH, -1)).detach().numpy(), layer(x))
