"""The tables of the papers, each row with the preset that trains it."""

from collections.abc import Mapping

from eval.tasks.paper_tables import brl, bsbr, graphs, lra, structured, tlinformer, transnormer
from eval.tasks.paper_tables.table import PaperTable

TABLES: Mapping[str, PaperTable] = {
    name: table
    for module in (brl, transnormer, structured, tlinformer, bsbr, lra, graphs)
    for name, table in module.TABLES.items()
}
