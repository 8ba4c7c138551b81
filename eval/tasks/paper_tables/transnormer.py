"""Tables of TransNormer (arXiv:2210.10340). Table 5 is in `eval.tasks.glue`, table 6 in `lra.py`, and
table 7 is printed by `python -m eval.speed --levels classifiers`."""

from __future__ import annotations

from eval.tasks.paper_tables.table import PERPLEXITIES, PaperTable

_PAPER = "TransNormer (arXiv:2210.10340)"


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
        f"{_PAPER}, table 2, with --log_gradient_std True",
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
