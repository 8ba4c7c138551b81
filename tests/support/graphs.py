"""A small graph in the files of the heterogeneous graph benchmark, and the options of a tiny network for it."""

import gzip

import numpy as np

PAPERS, AUTHORS = 60, 12
TINY = "--num_layers 1 --d_model 16 --num_heads 2 --features 16 --tensorboard False"


def write_graph(folder, changes=(), papers=PAPERS):
    """Writes 60 papers with random features and 12 authors without; the two authors of a paper write papers of one
    class. `changes` are (file, line number, replacement line). Returns the authors of each paper."""
    rng = np.random.default_rng(0)
    authors = [[i % 3 + 3 * k for k in rng.choice(4, 2, replace=False)] for i in range(papers)]
    noise = rng.integers(3, size=(papers, 5))
    files = {
        "node.dat": [f"{i}\tpaper {i}\t0\t{','.join(map(str, noise[i]))}" for i in range(papers)]
        + [f"{papers + a}\t\t1" for a in range(AUTHORS)],
        "link.dat": [f"{i}\t{papers + a}\t0\t1.0" for i in range(papers) for a in authors[i]]
        + [f"{papers + a}\t{i}\t1\t1.0" for i in range(papers) for a in authors[i]],
        "label.dat": [f"{i}\t\t0\t{i % 3}" for i in range(papers // 2)],
        "label.dat.test": [f"{i}\t\t0\t{i % 3}" for i in range(papers // 2, papers)],
    }
    for name, number, line in changes:
        files[name][number - 1 : number] = [] if line is None else [line]
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        data = "\r\n".join(lines).encode() + b"\n"
        (folder / f"{name}.gz").write_bytes(gzip.compress(data))
    return authors
