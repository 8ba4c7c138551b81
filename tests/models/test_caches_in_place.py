"""A decoding step updates its caches in place: the compiled program copies no array as long as the context."""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from brl_jax import DecoderConfig, DecoderLM, decoding
from brl_jax.layers import MECHANISMS
from brl_jax.models.stack import Stack
from tests.support.programs import optimised

CONTEXT = 4096
SIZES = {"d_model": 64, "num_heads": 2, "d_ff": 16, "vocab_size": 11}
# Names in the program that may be as large as a layer's cache: the layers' parameters, and arrays that are not copies
# of a cache.
PARAMETERS = "stack._unrolled/s(lice|queeze)"
OTHERS = {
    "gau": "mixer.step/vmap",  # the rotation of all positions
    "long_short": "mixer.step/cond",  # one projected token for each chunk of 16
    "tlinformer": "while/body/",  # a miss
}


def model_of(name):
    mechanism = MECHANISMS[name]()
    return DecoderLM(DecoderConfig(mechanism=mechanism, num_layers=2 * mechanism.group, **SIZES))


def growing(model):
    """The bytes of each array of the cache that grows with the context, and the smallest of a layer's largest."""
    long, short = (
        jax.tree.leaves(jax.eval_shape(lambda n=n: model.init_cache(1, n))) for n in (CONTEXT, CONTEXT // 2)
    )
    return [a.size * a.dtype.itemsize for a, b in zip(long, short) if a.size > 1.5 * b.size and a.ndim > 2]


def variables_of(model):
    return jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))))


def compiled_loop(model):
    """The program of the loop inside `generate`."""
    shape = jax.ShapeDtypeStruct
    number, row = shape((), jnp.int32), shape((1, 8), jnp.int32)
    state = decoding._State(
        index=number,
        cache=jax.eval_shape(lambda: model.init_cache(1, CONTEXT)),
        logits=shape((1, SIZES["vocab_size"]), jnp.float32),
        tokens=row,
        ended=shape((1,), bool),
    )
    settings = decoding._Settings(
        forced=row,
        num_forced=shape((1,), jnp.int32),
        max_new_tokens=number,
        keys=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)),
        temperature=shape((), jnp.float32),
        stop_tokens=shape((1,), jnp.int32),
    )
    choice = {"greedy": True, "top_k": None, "top_p": None}
    lowered = decoding._advance.lower(model, variables_of(model), state, settings, number, **choice)
    return optimised(lowered).as_text()


def compiled(model):
    """The program of one step with donated caches."""
    variables = variables_of(model)
    step = jax.jit(lambda v, token, cache: model.apply(v, token, cache=cache), donate_argnums=2)
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    cache = jax.eval_shape(lambda: model.init_cache(1, CONTEXT))
    return optimised(step.lower(variables, token, cache)).as_text()


def copies(hlo, limit):
    """The operations of a program that move `limit` bytes or more, except in branches (`lax.cond`), which run once per
    chunk or window."""
    bodies, entry, current = {}, None, None
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if head:
            current = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None:
            current.append(line)
    found, seen = [], set()

    def walk(name):
        if name in seen:
            return
        seen.add(name)
        for line in bodies[name]:
            match = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (\w+?)(\d*)\[([\d,]*)\]\S* ([\w-]+)\(", line)
            moves = r"copy|transpose|concatenate|slice|dynamic-slice|pad|reverse|gather"
            if match and re.fullmatch(moves, match[4]):
                bits = int(match[2] or 8)
                if math.prod(map(int, filter(None, match[3].split(",")))) * bits // 8 >= limit:
                    found.append(line.strip())
            if " conditional(" in line:
                continue
            for callee in re.findall(r"(?:calls|to_apply|body)=%?([\w.-]+)", line):
                walk(callee)

    walk(entry)
    return found


CACHED = [
    name
    for name, kind in MECHANISMS.items()
    if kind().causal and kind().decodes and len(growing(model_of(name))) > 0
]
FAST = ["full"]


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CACHED]
)
def test_a_step_copies_no_cache(name):
    check(name, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "bsbr", "mlr", "native_sparse"])
def test_the_loop_of_generate_copies_no_cache(name):
    check(name, compiled_loop)


def check(name, program):
    model = model_of(name)
    found = copies(program(model), max(growing(model)))
    others = f"{PARAMETERS}|{OTHERS.get(name, PARAMETERS)}"
    found = [line for line in found if not re.search(others, line)]
    assert not found, "\n".join(found)


def test_the_mechanisms_with_such_a_cache_are_known():
    assert {"full", "bsbr", "mlr", "native_sparse", "reformer", "tlinformer", "gau"} <= set(CACHED)
    assert not {"local", "brl", "linear", "diag"} & set(CACHED)


def test_a_scan_over_layers_would_copy(monkeypatch):
    """The control: with the layers in a loop, the check does find copies."""
    monkeypatch.setattr(Stack, "_is_observed", lambda self: True)
    model = model_of("full")
    assert copies(compiled(model), max(growing(model)))
