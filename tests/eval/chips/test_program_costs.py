"""Costs of programs with known matrix products and communication."""

import jax
import jax.numpy as jnp
import pytest

from eval.chips.gpu_costs import tuned_products
from eval.chips.program_costs import collective_bytes
from train.engine.flops import matrix_flops


def _flops(function, *shapes, platform="tpu"):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return matrix_flops(jax.jit(function).trace(*arguments).jaxpr, platform)


ONE = 2 * 3 * 5 * 7  # of (3, 5) times (5, 7)


def _loop(x, y):
    return jax.lax.scan(lambda total, _: (total + x @ y, None), jnp.zeros((3, 7)), length=11)[0]


def _branches(x, y):
    once, twice = (lambda: x @ y), (lambda: 2 * (x @ y) @ (y.T @ y))
    return jax.lax.cond(x[0, 0] > 0, once, twice)


def _platforms(x, y):
    return jax.lax.platform_dependent(x, y, tpu=lambda x, y: x @ y, default=lambda x, y: (x @ y) @ (y.T @ y))


def _kernel(x, y):
    from jax.experimental import pallas as pl

    def body(x, y, out):
        out[...] = x[...] @ y[...]

    whole = [pl.BlockSpec((3, 5), lambda i: (0, 0)), pl.BlockSpec((5, 7), lambda i: (0, 0))]
    out = jax.ShapeDtypeStruct((3, 7), jnp.float32)
    return pl.pallas_call(
        body, out, grid=(4,), in_specs=whole, out_specs=pl.BlockSpec((3, 7), lambda i: (0, 0))
    )(x, y)


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda x, y: x @ y, ONE),
        (lambda x, y: jax.vmap(lambda row: row @ y)(x), ONE),
        (jax.checkpoint(lambda x, y: x @ y), ONE),
        (lambda x, y: jax.jit(jnp.matmul)(x, y) * 2, ONE),
        (_loop, 11 * ONE),
        (_branches, ONE + 2 * 7 * 5 * 7 + 2 * 3 * 7 * 7),
        (_platforms, ONE),
        (_kernel, 4 * ONE),
        (jax.grad(lambda x, y: (x @ y).sum(), argnums=(0, 1)), 3 * ONE),
    ],
)
def test_products_are_counted_as_often_as_they_run(function, flops):
    assert _flops(function, (3, 5), (5, 7)) == flops


def test_each_platform_has_its_own_form():
    assert _flops(_platforms, (3, 5), (5, 7), platform="cpu") > _flops(_platforms, (3, 5), (5, 7))


HLO = """HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (input: f32[64,32]) -> f32[8,32] {
  %all-reduce.1 = f32[64,32]{1,0} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}

%one (p: bf16[8,16]) -> bf16[64,16] {
  ROOT %all-gather.1 = bf16[64,16]{1,0} all-gather(%p), channel_id=2, frontend_attributes={chain_id="5"}, REPLICA
}

%other (p: bf16[8,16]) -> bf16[64,16] {
  ROOT %all-gather.2 = bf16[64,16]{1,0} all-gather(%p), channel_id=2, frontend_attributes={chain_id="5"}, REPLICA
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = bf16[64,16]{1,0} fusion(%p), kind=kCustom, calls=%one
  %b = bf16[64,16]{1,0} fusion(%p), kind=kCustom, calls=%other
  %c = f32[8,32]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  %inner = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%overlapping
}

%overlapping (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %d = bf16[64,16]{1,0} fusion(%p), kind=kCustom, calls=%other
}

%condition (t: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (p0: f32[4]) -> f32[4] {
  %loop = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%body
  %all-reduce.2 = (f32[4]{0}, f32[2,2]{1,0}) all-reduce(%x, %y), replica_groups=[2,4]<=[8], to_apply=%add
  %start = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %move = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %rs = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}
""".replace("REPLICA", "replica_groups=mesh['a'=4,'b'=8], device_ids=([8,4]T(1,0)) {'b'}, dimensions={0}")


def test_bytes_between_devices_by_kind():
    assert collective_bytes(HLO) == {
        # Six times in the loop and once outside: two computations that wait for it and a nested loop add nothing.
        "all-gather": 6 * (64 * 16 * 2) * 7 / 8 + 8 * 4 * 3 / 4,
        "reduce-scatter": 6 * (64 * 32 * 4) * 7 / 8 + 2 * 4 * 3,
        "all-reduce": 2 * (4 + 4) * 4 * 3 / 4,
        "collective-permute": 4 * 4,
    }


def test_the_products_that_xla_tunes_on_a_gpu():
    """Library calls and kernels that XLA generates for a product; not calls of cuDNN, nor other fusions."""
    program = """
  %a = f32[4] custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %b = f32[4] custom-call(%x), custom_call_target="__cublas$gemm"
  %c = f32[4] fusion(%x), kind=kCustom, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %d = f32[4] fusion(%x), kind=kCustom, backend_config={"fusion_backend_config":{"kind":"__custom_fusion"}}
  %e = f32[4] custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
"""
    assert tuned_products(program) == 3
