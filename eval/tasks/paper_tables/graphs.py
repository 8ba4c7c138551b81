"""BRL-Attention's tables 4 and 5 (OpenReview Vpyg3fqXbl): classification of nodes, a table for each graph."""

from __future__ import annotations

from eval.tasks.paper_tables.table import PaperTable

_PAPER = "BRL-Attention (OpenReview Vpyg3fqXbl)"
_ROWS = {
    "GCN": "gcn",
    "GAT": "gat",
    "RGCN": "rgcn",
    "HAN": "han",
    "HetGNN": "",
    "Simple-HGN": "simple_hgn",
    "GTN": "",
    "HGT": "hgt",
    "NodeFormer": "nodeformer",
    "HINormer": "",
    "Full-Transformer": "full",
    "Local-Attn": "local",
    "BRL-Former": "brl",
}
# Micro and macro F1 of each row.
_FIGURES: dict[str, tuple[float | None, ...]] = {
    "dblp": (
        91.47, 90.84, 93.39, 93.83, 92.07, 91.52, 92.05, 91.67, 92.33, 91.76, 94.46, 94.01, 93.97, 93.52, 93.49, 93.01,
        93.68, 93.05, 94.94, 94.57, 95.33, 94.96, 94.96, 94.87, 95.67, 95.35,
    ),
    "imdb": (
        64.82, 57.88, 64.84, 58.94, 62.05, 58.85, 64.63, 57.74, 51.16, 48.25, 67.36, 63.53, 65.14, 60.47, 67.20, 63.00,
        65.86, 62.15, 67.83, 64.65, 68.81, 65.91, 67.93, 65.45, 68.99, 66.29,
    ),
    "acm": (
        92.12, 92.17, 92.19, 92.26, 91.41, 91.55, 90.79, 90.89, 86.05, 85.91, 93.35, 93.42, 91.20, 91.31, 91.00, 91.12,
        91.89, 92.72, 93.15, 93.28, 93.72, 93.79, 93.33, 93.58, 93.78, 93.81,
    ),
    "freebase": (
        60.23, 27.84, 65.26, 40.74, 60.82, 59.08, 61.42, 57.05, None, None, 67.49, 62.49, None, None, 66.43, 60.03,
        67.01, 60.83, 67.78, 62.67, 68.74, 61.73, 67.78, 60.98, 69.54, 61.80,
    ),
}  # fmt: skip
# Accuracy; the presets take any set of images.
_SETS = {
    "20news": (
        "20news", 65.98, 64.06, 64.46, 65.09, 66.15, 64.71, 64.94, 64.54, 64.38, 64.61, 64.81, 65.02, 65.19,
    ),
    "mini_imagenet": (
        "images", 85.96, 85.41, 85.81, 85.66, None, 87.45, 87.46, 86.62, 87.03, 87.17, 87.37, 87.46, 87.55,
    ),
}  # fmt: skip
_SET_ROWS = {
    "GCN": "gcn",
    "GAT": "gat",
    "DropEdge": "",
    "IDGL": "",
    "LDS-GNN": "",
    "NodeFormer": "nodeformer",
    "Full-Attn": "full",
    "Local-Attn, m = 8": "local-8",
    "Local-Attn, m = 16": "local-16",
    "Local-Attn, m = 32": "local",
    "BRL-Attn, m = w = 8": "brl-8",
    "BRL-Attn, m = w = 16": "brl-16",
    "BRL-Attn, m = w = 32": "brl",
}

TABLES = {
    f"brl-4-{graph}": PaperTable(
        f"{_PAPER}, table 4, {graph}",
        "graph",
        {"micro F1": "test_micro_f1", "macro F1": "test_macro_f1"},
        {
            row: (network and f"{graph}-{network}", *pair)
            for (row, network), *pair in zip(_ROWS.items(), figures[::2], figures[1::2], strict=True)
        },
    )
    for graph, figures in _FIGURES.items()
} | {
    f"brl-5-{data}": PaperTable(
        f"{_PAPER}, table 5, {data}",
        "graph",
        {"accuracy": "test_micro_f1"},
        {
            row: (network and f"{preset}-{network}", figure)
            for (row, network), figure in zip(_SET_ROWS.items(), figures, strict=True)
        },
    )
    for data, (preset, *figures) in _SETS.items()
}
