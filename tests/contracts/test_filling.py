"""Which command fills a column is declared once, beside it; what measures it and what a spec may ask for agree."""

from __future__ import annotations

import pytest

from driftlens.config.spec import Metrics
from driftlens.runs.schema import ATTRIBUTED, EXPLAIN, LAYERS, TABLES
from driftlens.utils.registry import diagnostics

declared = {(table.name, column.name): column.option for table in TABLES.values() for column in table.columns}


@pytest.mark.parametrize("option", sorted({*declared.values()} - {""}))
def test_the_spec_knows_every_option_and_has_those_of_the_attribution_on(option: str) -> None:
    asked: object = Metrics()
    for field in option.split("."):
        assert hasattr(asked, field)
        asked = getattr(asked, field)
    assert bool(asked) == (option in ATTRIBUTED)


@pytest.mark.parametrize("name", list(diagnostics))
def test_columns_name_the_option_that_switches_their_diagnostic_on(name: str) -> None:
    entry = diagnostics[name]
    options = {declared[entry.table, column.name] for column in entry.columns}
    if not entry.option:
        assert options == {""}
    elif entry.option == "jacobian":  # which has settings of its own, and parts that are left out one by one
        assert options <= {"jacobian", "jacobian.spectral", "contributions"}
    else:
        assert options == {entry.option}


@pytest.mark.parametrize(
    ("names", "command"),
    [
        (["final_share", "remainder_share"], EXPLAIN),
        (["jacobian_samples"], EXPLAIN),
        (["final_share", "cka"], f"{EXPLAIN} --add cka"),
        (["drift_rel", "of a plugin"], "driftlens analyze RUN/spec.yaml --out NEW"),
    ],
)
def test_what_options_ask_for_is_filled_in_the_run_itself(names: list[str], command: str) -> None:
    assert LAYERS.command_to_fill(names) == command
