"""Imports of the product: no module takes part in a cycle, lazy and type-checking imports counted."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_module_takes_part_in_an_import_cycle() -> None:
    graph = grimp.build_graph("driftlens", "driftlens_reports", "driftlens_app")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imports.values())) > 1000, "the graph is not that of the product"
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules of one cycle
