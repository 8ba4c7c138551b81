"""Tables of TransNormer (arXiv:2210.10340). Table 5 is in `eval.tasks.glue`, table 6 in `lra.py`."""

from __future__ import annotations

from eval.tasks.paper_tables.table import PERPLEXITIES, PaperTable

_PAPER = "TransNormer (arXiv:2210.10340)"
_LENGTHS = dict.fromkeys(("1K", "2K", "3K", "4K", "5K"), "")
_CLASSIFIERS = "python -m eval.speed --levels classifiers --lengths 1024 2048 3072 4096 5120"


def _masked(table: str, rows: dict[str, tuple[str, float]]) -> PaperTable:
    """The ablations "use the PPL from the Roberta pre-training stage" (section 5.4)."""
    return PaperTable(f"{_PAPER}, {table}", "mlm", {"ppl (val)": "val_perplexity"}, rows)


def _both(table: str, figures: dict[str, tuple[str, float, float]]) -> PaperTable:
    """Rows of T1 and T2, by what the presets' names have after the variant's."""
    rows = {
        f"{variant}, {row}": (f"roberta-transnormer-{variant.lower()}{name}", figure)
        for row, (name, *pair) in figures.items()
        for variant, figure in zip(("T1", "T2"), pair)
    }
    return _masked(table, rows)


TABLES = {
    "transnormer-1": _masked(
        "table 1, masked words of WikiText-103",
        {
            "1 + elu": ("roberta-linear", 4.98),
            "1 + elu without scaling": ("roberta-linear-unscaled", 797.08),
            "NormAttention": ("roberta-norm", 4.94),
        },
    ),
    "transnormer-2": PaperTable(
        f"{_PAPER}, table 2, with --log_gradient_std",
        "mlm",
        {"relative standard deviation of the gradients": "grad_rsd"},
        {
            "1 + elu": ("roberta-linear", 0.58),
            "Performer": ("roberta-performer", 0.47),
            "vanilla": ("roberta-full", 0.25),
            "NormAttention": ("roberta-norm", 0.20),
        },
    ),
    "transnormer-3": _masked(
        "table 3",
        {
            "early 1 + elu, late 1 + elu": ("roberta-linear", 4.98),
            "early 1 + elu, late vanilla": ("roberta-linear-full", 3.90),
            "early vanilla, late 1 + elu": ("roberta-full-linear", 3.76),
        },
    ),
    "transnormer-4": PaperTable(
        f"{_PAPER}, table 4, WikiText-103",
        "lm",
        PERPLEXITIES,
        {
            "vanilla, 156.00M parameters": ("wikitext103-transnormer-vanilla", 29.63, 31.01),
            "LS, 159.46M parameters": ("wikitext103-transnormer-long-short", 32.37, 32.59),
            "FLASH-quad, 153.51M parameters": ("wikitext103-transnormer-flash-quad", 31.88, 33.50),
            "FLASH, 153.52M parameters": ("wikitext103-transnormer-flash", 33.18, 34.63),
            "1 + elu, 156.00M parameters": ("wikitext103-transnormer-linear", 32.63, 34.25),
            "Performer, 156.00M parameters": ("wikitext103-transnormer-performer", 75.29, 77.65),
            "T1, 155.99M parameters": ("wikitext103-transnormer-t1", 29.89, 31.35),
            "T2, 155.99M parameters": ("wikitext103-transnormer-t2", 29.57, 31.01),
        },
    ),
    "transnormer-7-inference": PaperTable(
        f"{_PAPER}, table 7, steps a second of inference; here: {_CLASSIFIERS}",
        "lra",
        _LENGTHS,
        {
            "Transformer": ("lra-text-transnormer-full", 39.06, 10.05, None, None, None),
            "FLASH-quad": ("lra-text-transnormer-flash-quad", 44.64, 16.45, 9.40, 6.54, 5.39),
            "FLASH": ("lra-text-transnormer-flash", 40.32, 23.15, 16.89, 14.04, 13.16),
            "LS": ("lra-text-transnormer-long-short", 32.05, 17.36, 12.14, 10.16, 9.06),
            "Performer": ("lra-text-transnormer-performer", 104.17, 56.82, 42.37, 33.78, 31.25),
            "cosFormer": ("lra-text-transnormer-cosformer", 86.21, 46.30, 32.47, 27.47, 25.00),
            "Linformer": ("lra-text-transnormer-linformer", 104.17, 58.14, 40.32, 31.25, 26.32),
            "Reformer": ("lra-text-transnormer-reformer", 78.13, 38.46, 26.04, 19.84, 16.23),
            "Nystromformer": ("lra-text-transnormer-nystromformer", 58.14, 38.46, 29.07, 23.81, 20.33),
            "T1": ("lra-text-transnormer-t1", 113.64, 65.79, 46.30, 39.06, 35.71),
            "T2": ("lra-text-transnormer-t2", 119.05, 65.79, 47.17, 39.68, 36.23),
        },
    ),
    "transnormer-7-training": PaperTable(
        f"{_PAPER}, table 7, steps a second of training; here: {_CLASSIFIERS}",
        "lra",
        _LENGTHS,
        {
            "Transformer": ("lra-text-transnormer-full", 15.34, 3.05, None, None, None),
            "FLASH-quad": ("lra-text-transnormer-flash-quad", 19.84, 8.47, 5.19, 3.59, 2.92),
            "FLASH": ("lra-text-transnormer-flash", 20.49, 11.06, 8.47, 7.23, 6.93),
            "LS": ("lra-text-transnormer-long-short", 15.43, 8.68, 6.28, 5.24, 4.76),
            "Performer": ("lra-text-transnormer-performer", 28.41, 16.23, 12.02, 10.04, 9.06),
            "cosFormer": ("lra-text-transnormer-cosformer", 22.94, 12.82, 9.19, 7.79, 7.14),
            "Linformer": ("lra-text-transnormer-linformer", 27.17, 15.63, 11.26, 8.77, 7.42),
            "Reformer": ("lra-text-transnormer-reformer", 20.16, 10.87, 7.46, 5.69, 4.70),
            "Nystromformer": ("lra-text-transnormer-nystromformer", 14.12, 9.62, 7.46, 6.11, 5.26),
            "T1": ("lra-text-transnormer-t1", 28.41, 17.12, 12.76, 10.87, 10.12),
            "T2": ("lra-text-transnormer-t2", 29.41, 17.24, 12.95, 10.96, 10.16),
        },
    ),
    "transnormer-8": _both(
        "table 8",
        {
            "12 NormAttention": ("-0-12", 4.23, 4.48),
            "3 DiagAttention, 9 NormAttention": ("-3-9", 4.13, 3.83),
            "6, 6": ("", 3.82, 3.81),
            "9, 3": ("-9-3", 3.87, 3.86),
            "12 DiagAttention": ("-12-0", 4.75, 4.66),
        },
    ),
    "transnormer-9": _both(
        "table 9",
        {"early NormAttention": ("-norm-first", 4.13, 4.21), "early DiagAttention": ("", 3.82, 3.81)},
    ),
    "transnormer-10": _both(
        "table 10",
        {"FFN": ("-ffn", 3.93, 3.93), "GLU": ("", 3.82, 3.81)},
    ),
    "transnormer-11": _both(
        "table 11",
        {
            "blocks of 32": ("-block-32", 3.92, 3.90),
            "64": ("", 3.82, 3.81),
            "128": ("-block-128", 3.72, 3.69),
        },
    ),
    "transnormer-12": _both(
        "table 12",
        {
            "alternating D, N": ("-d-n", 4.19, 4.23),
            "alternating N, D": ("-n-d", 4.11, 4.21),
            "parallel": ("-parallel", 3.77, 3.82),
            "stacked": ("", 3.82, 3.81),
        },
    ),
}
