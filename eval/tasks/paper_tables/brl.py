"""Tables of BRL-Attention (OpenReview Vpyg3fqXbl); `lra.py` has the Long Range Arena's."""

from __future__ import annotations

from eval.tasks.paper_tables.table import PERPLEXITIES, VALIDATION_LOSS, PaperTable

_PAPER = "BRL-Attention (OpenReview Vpyg3fqXbl)"
_LENGTHS = dict.fromkeys(("n = 128", "256", "512", "1024", "2048", "3072", "4096"), "")
_DECODERS = "python -m eval.speed --levels decoders --heads 8 --lengths 128 256 512 1024 2048 3072 4096"

TABLES = {
    "brl-3": PaperTable(
        f"{_PAPER}, table 3, WikiText-103; its other rows are TransNormer's table 4",
        "lm",
        PERPLEXITIES,
        {
            "Transformer (our-imp)": ("wikitext103-full", 21.31, 22.03),
            "Local-Attention (our-imp)": ("wikitext103-local", 22.08, 23.74),
            "BRL-Former": ("wikitext103-brl-paper-128", 20.56, 22.11),
        },
    ),
    "brl-7": PaperTable(
        f"{_PAPER}, figure 7, WikiText-103: curves, without numbers in the text",
        "lm",
        VALIDATION_LOSS,
        {
            "full": ("wikitext103-full", None),
            "local, w = 64": ("wikitext103-local-64", None),
            "local, w = 128": ("wikitext103-local", None),
            "BRL, w = m = 64, lambda 0.5": ("wikitext103-brl-paper-64", None),
            "lambda 0.1": ("wikitext103-brl-paper-64-lambda-0.1", None),
            "lambda 0.2": ("wikitext103-brl-paper-64-lambda-0.2", None),
            "lambda 1": ("wikitext103-brl-paper-64-lambda-1", None),
            "beta 0": ("wikitext103-brl-paper-64-beta-0", None),
            "BRL, w = m = 128": ("wikitext103-brl-paper-128", None),
            "gamma 0": ("wikitext103-brl-paper-128-gamma-0", None),
        },
    ),
    "brl-table-6": PaperTable(
        f"{_PAPER}, table 6, GB of training and of inference; here: {_DECODERS}",
        "lm",
        _LENGTHS,
        {
            "train, full": ("wikitext103-full", 3.030, 3.301, 3.921, 5.760, 12.772, 23.869, None),
            "train, local": ("wikitext103-local", 3.030, 3.215, 3.563, 4.076, 5.740, 7.131, 8.732),
            "train, BRL": ("wikitext103-brl-paper-128", 3.809, 3.979, 4.256, 4.842, 6.428, 7.948, 9.615),
            "inference, full": ("wikitext103-full", 2.260, 2.260, 2.264, 2.266, 2.590, 3.676, 4.875),
            "inference, local": ("wikitext103-local", 2.260, 2.260, 2.264, 2.266, 2.340, 2.950, 3.063),
            "inference, BRL": ("wikitext103-brl-paper-128", 2.397, 2.401, 2.446, 2.456, 2.735, 3.280, 3.588),
        },
    ),
    "brl-table-7": PaperTable(
        f"{_PAPER}, table 7, milliseconds of inference; here: {_DECODERS}",
        "lm",
        _LENGTHS,
        {
            "full": ("wikitext103-full", 4.24, 4.26, 4.40, 10.28, 29.19, 61.95, 92.27),
            "local": ("wikitext103-local", 4.24, 4.26, 4.37, 5.82, 9.54, 13.53, 18.19),
            "BRL": ("wikitext103-brl-paper-128", 10.26, 10.26, 10.98, 11.15, 14.10, 19.57, 24.85),
        },
    ),
    "brl-10": PaperTable(
        f"{_PAPER}, figure 10, OpenWebText: curves, without numbers in the text",
        "lm",
        VALIDATION_LOSS,
        {
            "full": ("openwebtext-full", None),
            "local, w = 128": ("openwebtext-local-128", None),
            "local, w = 256": ("openwebtext-local", None),
            "BRL, w = m = 128": ("openwebtext-brl-paper-128", None),
            "BRL, w = m = 256": ("openwebtext-brl-paper", None),
        },
    ),
}
