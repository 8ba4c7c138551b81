"""The papers' accuracies on the Long Range Arena in percent, the averages they print, and the presets of the rows."""

from __future__ import annotations

_TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")


def _row(*accuracies: float | None) -> dict[str, float]:
    return {task: value for task, value in zip(_TASKS, accuracies) if value is not None}


BRL = "BRL-Attention (OpenReview Vpyg3fqXbl), table 1"
BRL_ABLATION = "BRL-Attention, table 2"
TRANSNORMER = "TransNormer (arXiv:2210.10340), table 6"

PAPERS: dict[str, dict[str, dict[str, float]]] = {
    BRL: {
        "Transformer": _row(36.37, 64.27, 57.46, 42.44, 71.40),
        "Transformer (our-imp)": _row(47.90, 79.08, 82.31, 75.04, 76.64, 84.72),
        "Linformer": _row(35.70, 53.94, 52.27, 38.56, 76.34),
        "Linear Trans": _row(16.13, 65.90, 53.09, 42.34, 75.30),
        "Performer": _row(18.01, 65.40, 53.82, 42.77, 77.05),
        "Luna": _row(35.33, 65.11, 59.61, 38.67, 77.80),
        "cosFormer": _row(37.90, 63.41, 61.36, 43.17, 70.33),
        "Flowformer": _row(38.70, 64.29, 62.24, 43.20, 73.95),
        "Local-Attn": _row(15.82, 52.98, 53.39, 41.46, 66.63),
        "Sparse Trans": _row(17.07, 63.58, 59.59, 44.24, 71.71),
        "Longformer": _row(35.63, 62.85, 56.89, 42.22, 69.71),
        "BigBird": _row(36.05, 64.02, 59.29, 40.83, 74.87),
        "Sliceformer": _row(37.65, 64.60, 62.23, 48.02, 82.04),
        "Reformer": _row(37.27, 56.10, 53.40, 38.07, 68.50),
        "Sinkhorn Trans": _row(33.67, 61.20, 53.83, 41.23, 67.45),
        "Synthesizer": _row(36.99, 61.68, 54.67, 41.61, 69.45),
        "BRL-Former (m = 64)": _row(47.37, 80.29, 82.69, 75.75, 76.94, 85.26),
        "BRL-Former (m = 128)": _row(49.14, 80.33, 82.98, 76.47, 76.06, 86.16),
        "BRL-Former (m = 256)": _row(49.98, 80.90, 83.22, 76.20, 77.48, 86.89),
    },
    BRL_ABLATION: {
        "Transformer": _row(36.37, 64.27, 57.46, 42.44, 71.40),
        "Transformer (our-imp)": _row(47.90, 79.08, 82.31, 75.04, 76.64),
        "Local-Attn (m = 0)": _row(15.82, 52.98, 53.39, 41.46, 66.63),
        "BRL-Former (w/o Attn-Diff)": _row(48.10, 78.79, 81.95, 74.53, 76.70),
        "BRL-Former": _row(49.98, 80.90, 83.22, 76.20, 77.48),
    },
    TRANSNORMER: {
        "Transformer": _row(38.37, 61.95, 80.69, 40.57, 65.26),
        "Kernelized Attention": _row(38.78, 60.22, 81.77, 41.29, 70.73),
        "Nystromformer": _row(38.51, 64.83, 80.52, 41.30, 69.48),
        "Linformer": _row(37.45, 58.93, 78.19, 37.96, 60.93),
        "Informer": _row(32.53, 62.64, 77.57, 38.10, 57.83),
        "Performer": _row(38.02, 64.19, 80.04, 41.43, 66.30),
        "Reformer": _row(37.68, 62.93, 78.99, 48.87, 66.49),
        "BigBird": _row(39.25, 63.86, 80.28, 43.16, 68.72),
        "Skyformer": _row(38.69, 64.70, 82.06, 40.77, 70.73),
        "LS": _row(40.30, 66.62, 81.68, 47.60, 69.98),
        "cosFormer": _row(36.50, 67.70, 83.15, 51.23, 71.96),
        "FLASH-quad": _row(42.20, 64.10, 83.00, 48.30, 63.28),
        "FLASH": _row(38.70, 64.10, 86.10, 47.40, 70.25),
        "TransNormer T1": _row(41.03, 66.90, 83.11, 51.60, 75.92),
        "TransNormer T2": _row(41.60, 72.20, 83.82, 49.60, 76.80),
    },
}

PRESETS: dict[str, dict[str, str]] = {
    BRL: {
        "Transformer": "original",
        "Transformer (our-imp)": "full",
        "Linformer": "original-linformer",
        "Linear Trans": "original-linear",
        "Performer": "original-performer",
        "Luna": "original-luna",
        "cosFormer": "original-cosformer",
        "Flowformer": "original-flowformer",
        "Local-Attn": "original-local",
        "Sparse Trans": "original-sparse",
        "Longformer": "original-longformer",
        "BigBird": "original-bigbird",
        "Sliceformer": "original-sliceformer",
        "Reformer": "original-reformer",
        "Sinkhorn Trans": "original-sinkhorn",
        "Synthesizer": "original-synthesizer",
        "BRL-Former (m = 64)": "brl-64",
        "BRL-Former (m = 128)": "brl-128",
        "BRL-Former (m = 256)": "brl-256",
    },
    BRL_ABLATION: {
        "Transformer": "original",
        "Transformer (our-imp)": "full",
        "Local-Attn (m = 0)": "original-local",
        "BRL-Former (w/o Attn-Diff)": "brl-256 --mechanism.gamma 0",
        "BRL-Former": "brl-256",
    },
    TRANSNORMER: {
        "Transformer": "transnormer-full",
        "Kernelized Attention": "transnormer-kernelized",
        "Nystromformer": "transnormer-nystromformer",
        "Linformer": "transnormer-linformer",
        "Informer": "transnormer-informer",
        "Performer": "transnormer-performer",
        "Reformer": "transnormer-reformer",
        "BigBird": "transnormer-bigbird",
        "Skyformer": "transnormer-skyformer",
        "LS": "transnormer-long-short",
        "cosFormer": "transnormer-cosformer",
        "FLASH-quad": "transnormer-flash-quad",
        "FLASH": "transnormer-flash",
        "TransNormer T1": "transnormer-t1",
        "TransNormer T2": "transnormer-t2",
    },
}
"""What follows lra-TASK- in the command that trains each row's network."""

# Table 1's average of BRL-Former (m = 64) is missing in the paper's text, and table 2 has none.
AVERAGES: dict[str, dict[str, float]] = {
    BRL: {
        "Transformer": 54.39,
        "Transformer (our-imp)": 72.19,
        "Linformer": 51.36,
        "Linear Trans": 50.55,
        "Performer": 51.41,
        "Luna": 55.30,
        "cosFormer": 55.23,
        "Flowformer": 56.48,
        "Local-Attn": 46.06,
        "Sparse Trans": 51.24,
        "Longformer": 53.46,
        "BigBird": 55.01,
        "Sliceformer": 58.91,
        "Reformer": 50.67,
        "Sinkhorn Trans": 51.39,
        "Synthesizer": 52.88,
        "BRL-Former (m = 128)": 75.19,
        "BRL-Former (m = 256)": 75.78,
    },
    BRL_ABLATION: {},
    TRANSNORMER: {
        "Transformer": 57.37,
        "Kernelized Attention": 58.56,
        "Nystromformer": 58.93,
        "Linformer": 54.69,
        "Informer": 53.73,
        "Performer": 58.00,
        "Reformer": 58.99,
        "BigBird": 59.05,
        "Skyformer": 59.39,
        "LS": 61.24,
        "cosFormer": 62.11,
        "FLASH-quad": 60.18,
        "FLASH": 61.31,
        "TransNormer T1": 63.71,
        "TransNormer T2": 64.80,
    },
}
