"""The counts of `eval.speed --tracing`. Its seconds depend on the machine."""

import jax
import jax.numpy as jnp

from eval.speed import tracing


def test_operations_inside_others_count():
    """A scan, the sine and the product in its body, and the sum after it."""
    program = jax.make_jaxpr(lambda c, x: jax.lax.scan(lambda c, y: (c * jnp.sin(y), None), c, x)[0] + 1)
    assert tracing._operations(program(jnp.zeros(()), jnp.zeros(3)).jaxpr) == 4


def test_a_decoding_step_traces_at_most_250_calls_of_the_library():
    function, arguments = tracing._programs(tracing.TracingOptions())["decoding step"]
    step = jax.jit(lambda *arguments: function(*arguments))
    step.trace(*arguments)  # annotations are read once in a process
    jax.clear_caches()
    assert 100 < tracing.library_calls(lambda: step.trace(*arguments)) <= 250


def test_one_row_compares_itself_with_jax_nn(capsys):
    tracing.run(["--repeats", "1", "--length", "64", "--window", "16", "--functions", "propagate"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| jax.nn.dot_product_attention",
        "| jax.nn.dot_product_attention, gradient",
        "| propagate",
        "| propagate, gradient",
    ]
    assert [line.split(" | ")[2] for line in lines[2:4]] == ["1.0", "1.0"]
