"""A chart that one new file registers is in the report and on the dashboard, without another file knowing of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from driftlens.runs.run import open_run
from driftlens_reports.build import Report
from driftlens_reports.charts.chart import charts
from driftlens_reports.sections import PRESETS
from tests.app.conftest import Open, open_sections
from tests.app.pages import said

TOY = """
import plotly.graph_objects as go

from driftlens_reports.charts.chart import Drawn, chart
from driftlens_reports.charts.picking import layer_rows


@chart(
    "toy",
    title="A toy of a chart",
    section="drift",
    rank=5,
    presets=("standard",),
    needs=("layers", ("cka",)),
    caption="CKA of all diagnosis samples as a toy shows it.",
    hint="It can't tell anything.",
)
def toy(run, options):
    rows = layer_rows(run, options)[["task", "variant", "layer", "cka"]]
    figure = go.Figure(go.Scatter(x=rows["layer"], y=rows["cka"], mode="markers", name="toy"))
    return Drawn(figure, alt="What the toy shows.", data=rows, notes=("Made of one file.",))
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a chart that a module outside the package registers; it is gone with the test."""
    len(charts)  # every chart of the package is known before, so that none is forgotten with the toy
    monkeypatch.setattr(charts, "_entries", dict(charts._entries))
    file = tmp_path / "toy_chart.py"
    file.write_text(TOY, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("toy_chart", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return "toy"


@pytest.mark.slow
def test_it_is_in_the_report_in_the_section_and_at_the_rank_that_it_declares(toy: str, root: Path) -> None:
    report = Report(open_run(root / "full"))
    layers = next(section for section in report.content.sections if section.name == "layers")
    assert [figure.name for figure in layers.figures] == ["drift-parts", toy, "layer-drift"]
    page = report.files(["html"])["report.html"].decode()
    assert "A toy of a chart" in page and f'id="plot-{toy}"' in page and "Made of one file." in page


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_in_the_presets_that_it_declares_and_in_the_full_one(toy: str, preset: str, root: Path) -> None:
    figures = Report(open_run(root / "full"), preset).content.figures
    assert (toy in {figure.name for figure in figures}) == (preset in ("standard", "full"))


def test_it_is_on_the_page_of_its_section(toy: str, open_app: Open, root: Path) -> None:
    app = open_app(root, "layers", layers="Drift")
    assert open_sections(app)[:2] == ["A toy of a chart", charts["layer-drift"].title]
    assert not app.error and not app.exception
    assert any("Made of one file" in f"{element.value} {element.help}".replace("\\", "") for element in app.caption)


@pytest.mark.slow
def test_where_its_column_was_not_measured_it_says_what_fills_it(toy: str, open_app: Open, root: Path) -> None:
    file = root / "full" / "tables" / "layers.parquet"
    rows = pq.read_table(file)
    at = rows.schema.get_field_index("cka")
    field = rows.schema.field(at)
    pq.write_table(rows.set_column(at, field, pa.nulls(len(rows), field.type)), file)
    command = "driftlens analyze RUN --add cka"
    app = open_app(root, "layers", layers="Drift")
    open_sections(app)
    assert "--add cka" in said(app) and not app.error
    content = Report(open_run(root / "full")).content
    assert command in next(figure for figure in content.figures if figure.name == toy).missing
