"""What every kind of batches promises: the seed decides them, they resume exactly from a state as JSON, and any number
of processes shares their rows."""

import json

import numpy as np
import pytest
import scipy.sparse as sp

from tests.support.examples import BUCKETS, examples
from tests.support.texts import numbered
from train.data.bucketed import EvalBatches, TrainBatches
from train.data.drawn import DrawnBatches, HeldOutDrawn
from train.data.graphs.batches import HeldOutNodes, NodeBatches
from train.data.graphs.graph import Graph, Relation
from train.data.graphs.subgraphs import Subgraphs
from train.data.in_context import HeldOutPrompts, InContextConfig
from train.data.masking import MaskedBatches, MaskedHeldOut
from train.data.mixture import MixedStreams, Mixture
from train.data.packed import PackedHeldOut, PackedStreams
from train.data.recall import RecallDataConfig
from train.data.series import HeldOutWindows, SeriesConfig, Windows, WindowStream, load_series, origins
from train.data.streams import EvalStream, TokenStreams
from train.engine.errors import UserError

CORPUS = numbered(200, [0, *range(3, 190, 7)])
RECALL = RecallDataConfig(vocabulary=64, length=(20,), pairs=(2,), gap=0)
SIZES = {"batch": 4, "length": 9}
MASKING = {"vocab_size": 200, "mask": 200, "share": 0.3}
SERIES = SeriesConfig(data="kernels:1", target="k0", split=(40, 10, 14), lookback=8, horizon=4)
WINDOWS = Windows(load_series(SERIES), SERIES)
LINKS = Relation("", 0, 0, sp.csr_matrix(np.random.default_rng(0).random((30, 30)) < 0.3))
GRAPH = Graph("", ("node",), (30,), (np.eye(30, dtype=np.float32),), (LINKS,), 0, {}, 3, "")
NODES = (Subgraphs(GRAPH, hops=2, neighbours=2, targets=2), np.arange(30), np.arange(30) % 3)


def masked(seed=0, rows=None):
    inner = TokenStreams(CORPUS, **SIZES, seed=seed, rows=rows)
    return MaskedBatches(inner, batch=4, seed=seed, rows=rows, **MASKING)


def windows(seed=0, rows=None):
    return WindowStream(WINDOWS, origins(SERIES, "train"), batch=4, seed=seed, digest="", rows=rows)


def nodes(seed=0, rows=None):
    return NodeBatches(*NODES, batch=4, targets=2, seed=seed, digest="", has_edges=True, rows=rows)


TRAINED = {
    "text": lambda **o: TokenStreams(CORPUS, **SIZES, segments=True, **o),
    "mixture": lambda **o: MixedStreams(
        Mixture((CORPUS, numbered(99, [0])), (0.5, 0.5)), batch=4, length=2, **o
    ),
    "packed": lambda **o: PackedStreams(CORPUS, **SIZES, **o),
    "examples": lambda **o: TrainBatches(examples(), batch=4, buckets=BUCKETS, **o),
    "drawn": lambda **o: DrawnBatches(RECALL, batch=4, **o),
    "masked": masked,
    "windows": windows,
    "nodes": nodes,
}
HELD_OUT = {
    "text": lambda **o: EvalStream(CORPUS, **SIZES, segments=True, **o),
    "packed": lambda **o: PackedHeldOut(CORPUS, **SIZES, **o),
    "examples": lambda **o: EvalBatches(examples(), batch=4, buckets=BUCKETS, **o),
    "drawn": lambda **o: HeldOutDrawn(RECALL, batch=4, **o),
    "masked": lambda **o: MaskedHeldOut(EvalStream(CORPUS, **SIZES, **o), **MASKING, **o),
    "windows": lambda **o: HeldOutWindows(WINDOWS, origins(SERIES, "test"), batch=4, **o),
    "nodes": lambda **o: HeldOutNodes(*NODES, batch=4, targets=2, has_edges=True, **o),
    "prompts": lambda **o: HeldOutPrompts(
        InContextConfig(input_dim=2, pairs=3, valid_prompts=9), batch=4, **o
    ),
}


def take(stream, count):
    return [batch for _, batch in zip(range(count), stream)]


def assert_same(ours, theirs, rows=slice(None)):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert a.arrays.keys() == b.arrays.keys()
        for name in a.arrays:
            np.testing.assert_array_equal(a[name], b[name][rows])
        assert a.reset == b.reset


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("step", [0, 1, 5, 6, 13, 40])
def test_resumed_it_is_the_stream_never_stopped(name, step):
    make = TRAINED[name]
    whole, stopped, resumed = take(make(seed=5), step + 15), make(seed=5), make(seed=5)
    take(stopped, step)
    state = json.loads(json.dumps(stopped.get_state()))
    assert state["step"] == stopped.step == step
    take(resumed, 3)
    for stream in (resumed, stopped):  # also in place, discarding what was read ahead
        stream.set_state(state)
        assert_same(take(stream, 15), whole[step:])
    other = make(seed=6)
    pairs = [(a[name], b[name]) for a, b in zip(take(other, 15), whole) for name in a.arrays]
    assert not all(np.array_equal(a, b) for a, b in pairs)
    with pytest.raises(UserError, match="the saved input position is of seed 5, now it is 6"):
        other.set_state(state)


@pytest.mark.parametrize("rows", [[(0, 1), (2, 3)], [(3, 0), (1, 2)]])
@pytest.mark.parametrize(
    ("make", "count"),
    [*((x, 10) for x in TRAINED.values()), *((x, 99) for x in HELD_OUT.values())],
    ids=[*TRAINED, *(f"held out {x}" for x in HELD_OUT)],
)
def test_processes_share_the_rows(make, count, rows):
    whole = make()
    batches, shares = take(whole, count), [make(rows=np.array(part)) for part in rows]
    for part, share in zip(rows, shares):
        assert_same(take(share, count), batches, list(part))
        if count == 10:  # a state fits any number of processes
            assert share.get_state() == whole.get_state()
