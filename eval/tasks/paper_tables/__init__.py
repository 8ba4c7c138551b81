"""The tables of the papers, each row with the preset that trains it."""

from collections.abc import Mapping

from eval.tasks.paper_tables import brl, graphs, lra, others, transnormer
from eval.tasks.paper_tables.table import PaperTable

TABLES: Mapping[str, PaperTable] = {
    name: table for module in (brl, transnormer, others, lra, graphs) for name, table in module.TABLES.items()
}
