"""A diagnostic is one file: spec, preflight, run directory and export know it without another being touched."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import driftlens as dl
from driftlens.config.spec import load_spec
from driftlens.pipelines.validate import preflight
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import LAYERS
from driftlens.runs.tables import append_rows, read_table, stored_columns
from driftlens.utils.errors import SpecError
from driftlens.utils.registry import ColumnSchema, diagnostics
from driftlens_reports.charts.picking import ChartOptions, missing_columns_message, missing_data_message
from tests.pipelines.fixtures import finished, light, world
from tests.refusing import refusing
from tests.zoo.world import World

__all__ = ["finished", "light", "world"]

MODULE = "toy_gap_diagnostic"
FILE = """
import numpy as np
from driftlens.utils.registry import ColumnSchema, diagnostic

GAP = ColumnSchema("toy_gap", "float", "feature", "Distance of the mean features.", "higher", (0.0, None))
PEAK = ColumnSchema("toy_peak", "float", "feature", "Largest entry of the drift.", "higher", (0.0, None))


@diagnostic("toy", columns=[GAP])
def gap(seen):
    return {"toy_gap": float(np.linalg.norm(seen.variant.mean(axis=0) - seen.expert.mean(axis=0)))}


def entries(view, pool):
    drift = view.merged_out[view.layer.stream] - view.expert_out[view.layer.stream]
    return {"toy_peak": drift.abs().flatten(1).amax(dim=1)}


@diagnostic("toy_peaks", table="samples", columns=[PEAK], needs="view", option="toy", per_view=entries)
def peaks(seen):
    return {"toy_peak": seen.columns["toy_peak"]}
"""
OVERRIDES = ["metrics.toy=true"]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{MODULE}.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(MODULE)
    yield
    forget()


def forget() -> None:
    sys.modules.pop(MODULE, None)
    for name in ("toy", "toy_peaks"):
        vars(diagnostics)["_entries"].pop(name, None)


def values(world: World) -> dict[str, object]:
    return world.one_task(metrics={"jacobian": False})


def test_the_spec_knows_it_by_name(toy: None, world: World) -> None:
    spec = load_spec(values(world), OVERRIDES)
    assert "toy" in spec.metrics.enabled and load_spec(spec) == spec
    assert "toy" not in load_spec(values(world), ["metrics.toy=false"]).metrics.enabled
    with pytest.raises(SpecError, match=r"metrics\.toy: Input should be a valid boolean, got 3"):
        load_spec(values(world), ["metrics.toy=3"])
    with refusing(SpecError, match=r"metrics\.tox: unknown key; .*adjoint, toy", hint="'toy'"):
        load_spec(values(world), ["metrics.tox=true"])


WRONG = {
    "another name": ({"toy_gape": 1.0}, "'toy' returned toy_gape; expected .* by .'toy_gap'."),
    "one per sample": ({"toy_gap": np.ones(3)}, r"'toy' returned .'toy_gap': \(3,\).; expected \(\)"),
}


@pytest.mark.parametrize(("found", "words"), WRONG.values(), ids=WRONG)
def test_what_fills_no_column_is_refused_by_its_name(
    toy: None, world: World, tmp_path: Path, found: object, words: str
) -> None:
    entries = vars(diagnostics)["_entries"]
    entries["toy"] = dataclasses.replace(entries["toy"], measure=lambda seen: found)
    with pytest.raises(SpecError, match=f"diagnostic {words}"):
        dl.analyze(load_spec(values(world), OVERRIDES), out=tmp_path / "run", progress="none")


def test_a_column_that_another_one_fills_is_refused(toy: None, world: World, tmp_path: Path) -> None:
    """Or which of both is in the table would hang on their names."""
    entries, taken = vars(diagnostics)["_entries"], "drift_l2_mean"
    column = ColumnSchema(taken, "float", "feature", "Not the drift.")
    entries["toy"] = dataclasses.replace(entries["toy"], columns=(column,), measure=lambda seen: {taken: 1.0})
    with pytest.raises(SpecError, match=f"diagnostic 'toy' returned {taken}; expected"):
        dl.analyze(load_spec(values(world), OVERRIDES), out=tmp_path / "run", progress="none")


def test_without_its_file_it_is_refused(world: World) -> None:
    with pytest.raises(SpecError, match=r"metrics\.toy: unknown key"):
        load_spec(values(world), OVERRIDES)


def test_preflight_names_it(toy: None, world: World) -> None:
    more = preflight(load_spec(values(world), OVERRIDES))
    said = next(finding.text for finding in more.findings if finding.subject == "metrics")
    assert "toy" in said.split(", ")


def test_the_run_keeps_its_columns_and_what_they_mean(toy: None, world: World, tmp_path: Path) -> None:
    made = dl.analyze(load_spec(values(world), OVERRIDES), out=tmp_path / "run", progress="none")
    forget()  # a reader that has never heard of it
    run = dl.open_run(made.path)
    task = run.tasks[0]
    rows = run.layers(task, "merged")
    assert rows["toy_gap"].gt(0).all()
    for layer, found in zip(rows["layer"], rows["toy_gap"], strict=True):
        variant, expert = (np.asarray(run.features(task, name, layer), float) for name in ("merged", "expert"))
        assert found == pytest.approx(np.linalg.norm(variant.mean(0) - expert.mean(0)), rel=2e-2)
    samples = run.samples(task, "merged", "final")
    # One token leaves the head: its largest entry against its norm.
    assert (samples["toy_peak"] <= samples["drift_l2"] * (1 + 1e-6)).all() and samples["toy_peak"].gt(0).all()
    declared = {column.name: column for name in ("layers", "samples") for column in run.columns(name)}
    assert declared["toy_gap"] == ColumnSchema(
        "toy_gap", "float", "feature", "Distance of the mean features.", "higher", (0.0, None)
    )
    assert declared["toy_peak"].unit == "feature"
    units = dl.Report(run, sections=["setup"]).files(["csv"])["csv/layers.units.csv"].decode()
    assert "toy_gap,feature,Distance of the mean features." in units


def test_rows_that_are_added_without_it_leave_its_values(tmp_path: Path) -> None:
    path, key = tmp_path / "layers.parquet", {"task": "cars", "variant": "merged"}
    added = LAYERS.with_columns([ColumnSchema("toy_gap", "float", "feature", "A distance.")])
    append_rows(path, added, pd.DataFrame([key | {"layer": 1, "toy_gap": 0.1}]))
    append_rows(path, LAYERS, pd.DataFrame([key | {"layer": 2}]))
    rows = read_table(path, LAYERS)
    assert rows["toy_gap"].iloc[0] == 0.1 and np.isnan(rows["toy_gap"].iloc[1])
    assert {column.name: column.unit for column in stored_columns(path, LAYERS)}["toy_gap"] == "feature"


def test_a_chart_of_it_says_which_command_measures_it(light: DriftRun) -> None:
    command = "driftlens analyze RUN --add toy"
    said = missing_data_message(light, ChartOptions(), "layers", ["toy_gap"])
    assert said is not None and "toy_gap" in said and "driftlens analyze" in said
    assert command in missing_columns_message("layers", ["toy_gap"], command)
