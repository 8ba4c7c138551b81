"""Results for `test_mesh.py`, computed by the process of tests/support/devices.py.

A network of four mechanisms takes the same steps on several meshes, and a run resumes checkpoints on other meshes."""

import functools
import re
import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from brl_jax.layers import MECHANISMS, BRLConfig
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.models import DecoderConfig, DecoderLM, EncoderConfig, MaskedLM, huggingface, losses
from brl_jax.models.networks import make_stack
from brl_jax.sharding import MeshConfig, constrain, make_mesh, parameter_shardings
from tests.support.command_lines import config_of
from tests.support.logs import metrics_lines
from tests.train.pretrained import write_model
from tests.train.toy import ToyHeldOut, ToyStream
from train.data.masking import mask_tokens
from train.engine.batch import Batch
from train.engine.config import LoopConfig
from train.engine.errors import UserError
from train.engine.loop import train
from train.engine.mesh import place_batch, training_programs
from train.engine.optimizer import OptimizerConfig
from train.lm import main as train_lm
from train.tasks.lm import LM, lm_objective
from train.tasks.mlm import mlm_objective

ROWS, LENGTH, STEPS = 16, 16, 4
MESHES = {
    "rows": MeshConfig(data=2, fsdp=4),
    "mixed": MeshConfig(data=2, fsdp=2, tensor=2),
    "sequence": MeshConfig(sequence=8),
}
REFUSED = (
    "--mesh.sequence 8 --length 100",
    "--mesh.sequence 8 --length 512 --mechanism.memory layer --mechanism.block_size 48",
    "--mesh.sequence 8 --length 512 --mechanism.memory output --mechanism.block_size 100",
    "--mesh.data 2 --mesh.sequence 4 --batch 9",
    "--mesh.fsdp 8 --d_model 36 --num_heads 3 --mechanism full",
    "--mesh.sequence 8 --length 64 --mechanism local --mechanism.window 100",
)
TOKENS = ("batch", "length", "embed")
BRL = BRLConfig(window=8, num_compressed=4, block_size=16, history_size=16, memory="output")
# Each of eight devices has 2 of the 16 tokens: one block, whose history lies on three other devices, and one chunk.
LAYER = BRLConfig(window=4, num_compressed=4, block_size=2, history_size=5)


class FourMechanisms(DecoderConfig):
    """A decoder with one layer of each kind, twice; local attention is part of the first and the last."""

    @property
    def mechanisms(self):
        state = MECHANISMS["deltanet"](chunk_size=2)
        return (BRL, MECHANISMS["full"](), state, LAYER) * 2


def take_steps(mesh, **options):
    """(losses, the first step's gradients as the optimizer keeps them, last state, HLO) on a mesh."""
    size = {"num_layers": 8, "d_model": 32, "num_heads": 4, "d_ff": 64, "vocab_size": 64}
    model = DecoderLM(FourMechanisms(**size, dropout=0.1, implementation="xla", **options))
    loop = LoopConfig(batch=2 * ROWS, accumulation=2, steps=STEPS)
    settings = OptimizerConfig(learning_rate=1e-3, warmup_steps=2, clip_norm=0.0)
    rng, lost, first = np.random.default_rng(0), [], None
    with jax.set_mesh(mesh):
        programs = training_programs(mesh, lm_objective(model), settings, loop)
        state = programs.fresh()
        compiled = None
        for i in range(STEPS):
            text = rng.integers(64, size=(loop.batch, LENGTH + 1)).astype(np.int32)
            batch = Batch({"tokens": text[:, :-1], "targets": text[:, 1:]}, reset=np.bool_(i == 0))
            batch = place_batch(mesh, batch, loop.batch)
            compiled = compiled or programs.step.lower(state, batch).compile()
            state, metrics = compiled(state, batch)
            lost.append(float(metrics["loss"]))
            first = first or {
                jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
                for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state[0].mu)
            }
    return lost, first, state, compiled.as_text()


def shares(state):
    """For each array of the state with at least two dimensions: (elements, elements on one device)."""
    parts = {
        "params": state.params,
        "mu": state.opt_state[0].mu,
        "nu": state.opt_state[0].nu,
        "memory": state.memory,
    }
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            leaf.size,
            leaf.addressable_shards[0].data.size,
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(parts)
    }


def gathers(hlo):
    """(shape, where in the program, "" for what the compiler added) of everything gathered in a compiled program.

    A gather of what the scan over layers kept is named after the slice that takes one layer's share of it, so the
    names of the operations that read such a gather are added.
    """
    found = []
    lines = hlo.splitlines()
    for line in lines:
        gather = re.search(r"(%\S+) = \(?(.*?) all-gather(?:-start)?\(", line)
        if not gather:
            continue
        names = _op_names(line)
        if names[:1] and names[0].endswith("dynamic_index_in_dim)/squeeze"):
            operands = (f"{gather[1]},", f"{gather[1]})")
            names += [
                name for other in lines if any(x in other for x in operands) for name in _op_names(other)
            ]
        for dims in re.findall(r"\w+\[([\d,]*)\]", gather[2]):
            found.append(([int(n) for n in dims.split(",") if n], " read by ".join(names)))
    return found


def _op_names(line):
    return re.findall(r'op_name="([^"]*)"', line)


def careless(mesh):
    """A program that gathers a moment, which should stay sharded."""
    cut, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((None, "fsdp"), ()))
    mean = jax.ShapeDtypeStruct((2, 64, 32), jnp.float32, sharding=cut)
    return jax.jit(lambda x: 0.9 * x, out_shardings=whole).lower(mean).compile().as_text()


def run(workdir, mesh, steps, optimizer):
    """Trains in `workdir` up to `steps`; every loss there, and the held-out losses."""
    model = DecoderLM(
        DecoderConfig(num_layers=1, d_model=32, num_heads=4, d_ff=32, mechanism=BRL, vocab_size=64)
    )
    loop = LoopConfig(workdir=str(workdir), steps=steps, batch=8, eval_every=100, tensorboard=False)
    train(
        lm_objective(model),
        loop,
        OptimizerConfig(optimizer, learning_rate=1e-2, warmup_steps=2, decay="constant"),
        config={"loop": {"steps": steps}},
        stream=ToyStream(rows=8),
        held_out=ToyHeldOut(),
        mesh=mesh,
    )
    lines = metrics_lines(workdir)
    return [line["loss"] for line in lines] + [line["val_loss"] for line in lines[-1:]]


def loss_in_pieces(mesh):
    """The weighted loss of a few rows, with z-loss, in pieces of three tokens a device, and its gradient."""
    rng = np.random.default_rng(3)
    hidden, table = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 40, 8), (16, 8)))
    targets = rng.integers(16, size=(2, 40)).astype(np.int32)
    weights = rng.integers(3, size=(2, 40)).astype(np.float32)

    def loss(hidden, table):
        to_logits = lambda x: jnp.einsum("btd,vd->btv", x, table)  # noqa: E731
        hidden = constrain(hidden, TOKENS)
        return losses.cross_entropy(hidden, to_logits, targets, weights, vocab_size=16, z_loss=0.1)[0]

    usual, losses._LOGITS = losses._LOGITS, 3 * 2 * 16
    with jax.set_mesh(mesh):
        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, table)
    losses._LOGITS = usual
    return [np.asarray(x) for x in (value, *grads)]


def packed_rows(mesh):
    """The loss of a batch of packed rows of an encoder, and its gradient, from one layer of each kind that packs."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(64, size=(8, LENGTH)).astype(np.int32)
    starts = rng.random((8, LENGTH)) < 0.3
    batch = mask_tokens(
        tokens, np.ones(tokens.shape), share=0.3, vocab_size=64, mask=64, seed=(1,), rows=np.arange(8)
    )
    batch["segment_ids"] = np.cumsum(starts, axis=1, dtype=np.int32)
    size = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 32, "vocab_size": 65}
    kinds = {"mechanism": MECHANISMS["full"](), "late_mechanism": MECHANISMS["linear"](chunk_size=4)}
    objective = mlm_objective(MaskedLM(EncoderConfig(**size, **kinds, implementation="xla")))
    params = nn.unbox(jax.jit(objective.init)(jax.random.key(0)))
    with jax.set_mesh(mesh):
        batch = place_batch(mesh, Batch(batch), 8).arrays
        loss = jax.jit(jax.value_and_grad(lambda params, batch: objective.loss(params, None, batch, None)[0]))
        return [np.asarray(x) for x in jax.tree.leaves(loss(params, batch))]


def refused():
    """The error message for each set of options that eight devices cannot share."""
    messages = {}
    for line in REFUSED:
        config = config_of(LM, line, "small")
        try:
            mesh = LM.open_mesh(config)
            training_programs(mesh, lm_objective(DecoderLM(config.model)), config.optimizer, config.loop)
        except UserError as error:
            messages[line] = str(error)
    return messages


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def low_rank(mesh):
    """The losses and first gradients of low-rank changes, and in how many parts the devices hold each parameter."""
    lost, first, state, _ = take_steps(mesh, lora_rank=2)
    parts = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.size / x.addressable_shards[0].data.size
        for path, x in jax.tree_util.tree_leaves_with_path(state.params)
    }
    return lost, first, parts


def looked_at(mesh):
    """The losses, first gradients, shard sizes and gathers of training on a mesh."""
    lost, first, state, hlo = take_steps(mesh)
    return {"losses": lost, "first": first, "shares": shares(state), "gathers": gathers(hlo)}


def straight(optimizer):
    """The losses of a run on one device."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), one_device(), 6, optimizer)


def moved(optimizer):
    """The losses of the same run, which goes on from eight devices to one, and back to eight on another mesh."""
    with tempfile.TemporaryDirectory() as folder:
        for steps, mesh in zip(
            (2, 4, 6), (make_mesh(MESHES["rows"]), one_device(), make_mesh(MESHES["mixed"]))
        ):
            lost = run(Path(folder), mesh, steps, optimizer)
    return lost


def kernels_on_a_mesh(is_causal):
    """What lowering for TPUs says of the layers of each mechanism, on a mesh of rows and one of tokens: {} if it can.

    The compiler cannot share a kernel among devices, which lowering reports.
    """
    failures = {}
    length = 2048
    dimensions = Dimensions(
        d_model=32, num_heads=2, num_kv_heads=2, head_dim=16, d_ff=32, is_causal=is_causal
    )
    for name, config in MECHANISMS.items():
        mechanism = config()
        if not (mechanism.causal if is_causal else mechanism.bidirectional):
            continue
        stack = make_stack((mechanism,) * mechanism.group, dimensions)
        for axis in ("data", "sequence"):
            mesh = make_mesh(MeshConfig(**{"data": 1, "fsdp": 1} | {axis: 8}))

            def shape(x, *spec, mesh=mesh):
                return jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
                )

            with jax.set_mesh(mesh):
                x = jnp.zeros((8 if axis == "data" else 1, length, 32))
                variables = jax.eval_shape(
                    lambda x, stack=stack: nn.unbox(stack.init(jax.random.key(0), x)), x
                )
                operands = (jax.tree.map(shape, variables), shape(x, "data", "sequence"))
                run = jax.jit(lambda v, x, stack=stack: stack.apply(v, x)[0])
                try:
                    run.trace(*operands).lower(lowering_platforms=("tpu",))
                except NotImplementedError as error:
                    failures[name, axis] = str(error)
    return failures


def weights_read():
    """How many arrays of a folder of transformers are divided on each mesh, where they are as if read whole."""
    divided = []
    with tempfile.TemporaryDirectory() as folder:
        expected = write_model(Path(folder) / "model", None)
        model = DecoderLM(huggingface.load_config(Path(folder) / "model"))
        boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        for mesh in map(make_mesh, MESHES.values()):
            shardings = parameter_shardings(mesh, boxed)
            with jax.set_mesh(mesh):
                params = jax.tree.map(lambda x, to: jax.device_put(np.zeros_like(x), to), expected, shardings)
                got = huggingface.load_onto(params, Path(folder) / "model")
            jax.tree.map(np.testing.assert_array_equal, got, expected)
            assert jax.tree.map(lambda x: x.sharding, got) == shardings
            divided.append(sum(x.addressable_shards[0].data.size < x.size for x in jax.tree.leaves(got)))
    return divided


def converted_losses(options=""):
    """The losses of a run that is converted from another, of its matching and of what follows, on a mesh."""
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "valid"):
            Path(folder, f"{split}.txt").write_text("the colour of the sky is blue\n" * 60)
        common = (
            f"--data text:{folder}/*.txt --batch 8 --length 32 --sample_tokens 0 --tensorboard False --eval_tokens 64 "
            f"--warmup_steps 0 --optimizer adamw --learning_rate 1e-3 {options}"
        )
        sizes = "--num_layers 2 --d_model 32 --num_heads 4 --d_ff 64 --mechanism full"
        train_lm(f"{common} --tokenizer bytes --steps 2 {sizes} --workdir {folder}/full".split())
        student = (
            f"--convert_from {folder}/full --match_steps 3 --steps 2 --mechanism brl --mechanism.window 4 "
            "--mechanism.num_compressed 8 --mechanism.history_size 8"
        )
        train_lm(f"{common} {student} --workdir {folder}/run".split())
        return [
            [line["loss"] for line in metrics_lines(Path(folder, "run", place))] for place in ("matching", "")
        ]


PARTS = {
    "converted": lambda: [
        converted_losses(mesh)
        for mesh in (
            "--mesh.data 2 --mesh.fsdp 4",
            "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2",
            "--mesh.sequence 8",
        )
    ],
    "weights": weights_read,
    "decoders": lambda: kernels_on_a_mesh(True),
    "encoders": lambda: kernels_on_a_mesh(False),
    "one": lambda: looked_at(one_device()),
    **{
        name: functools.partial(lambda config: looked_at(make_mesh(config)), config)
        for name, config in MESHES.items()
    },
    "low rank": lambda: [low_rank(mesh) for mesh in (one_device(), make_mesh(MESHES["mixed"]))],
    "refused": refused,
    "careless": lambda: gathers(careless(make_mesh(MESHES["rows"]))),
    "pieces": lambda: [loss_in_pieces(mesh) for mesh in (one_device(), make_mesh(MESHES["sequence"]))],
    "packed": lambda: [packed_rows(mesh) for mesh in (one_device(), make_mesh(MESHES["rows"]))],
    **{
        f"{way.__name__} by {optimizer}": functools.partial(way, optimizer)
        for way in (straight, moved)
        for optimizer in ("adamw", "muon")
    },
}
