"""The losses of a run on one device and on eight, for `test_graph.py`; computed in tests/support/devices.py."""

import functools
import tempfile
from pathlib import Path

import jax

from brl_jax.sharding import MeshConfig, make_mesh
from tests.support.command_lines import config_of
from tests.support.graphs import write_graph
from tests.support.logs import metrics_lines
from train.engine.loop import train
from train.tasks.graph import GRAPH

_OPTIONS = "--num_layers 1 --d_model 16 --num_heads 2 --features 16 --dropout 0 --input_dropout 0 --tensorboard False"


def losses(folder, preset, mesh, name):
    """The losses of twelve steps."""
    line = f"{preset} --data_dir {folder}/g --cache_dir {folder}/cache --workdir {folder}/{name} --batch 8 {_OPTIONS}"
    config = config_of(GRAPH, f"{line} --steps 12")
    data = GRAPH.load(config, ("train", "valid"))
    config = GRAPH.sized(config, data)
    streams = GRAPH.streams(config, data, mesh)
    train(
        GRAPH.objective(GRAPH.build(config), config),
        config.loop,
        config.optimizer,
        config={},
        stream=streams.training,
        held_out=streams.held_out,
        mesh=mesh,
    )
    lines = metrics_lines(Path(folder) / name)
    return [line["loss"] for line in lines] + [lines[-1]["val_loss"]]


def compared(preset):
    """The losses on one device and on eight."""
    with tempfile.TemporaryDirectory() as folder:
        write_graph(Path(folder) / "g")
        one = losses(folder, preset, make_mesh(MeshConfig(), jax.devices()[:1]), "one")
        return one, losses(folder, preset, make_mesh(MeshConfig(data=2, fsdp=4)), "eight")


PARTS = {
    "tokens": functools.partial(compared, "acm-brl"),
    "edges": functools.partial(compared, "acm-simple_hgn"),
    "nodes": functools.partial(compared, "images-brl"),
}
