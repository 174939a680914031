"""What holds for all formats: the same numbers, the same bytes, no torch, and an answer to every kind of bad run."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest

from driftlens.results.formatting import INTERVAL, format_value, typeset_signs
from driftlens.results.verdict import task_table, verdict
from driftlens.runs import schema, tables
from driftlens.runs.manifest import table_file
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.utils.errors import RunError, SpecError
from driftlens.utils.variants import display_name
from driftlens_reports.build import FORMATS, Report
from driftlens_reports.charts.chart import charts
from driftlens_reports.charts.theme import DARK, LIGHT
from driftlens_reports.formats.page import interactive_page
from driftlens_reports.paper.exhibit import ExhibitOptions, draw_exhibit
from tests.quick import few
from tests.reports.conftest import HOSTILE, SMALL
from tests.runs.full_run import Size, write_full_run

pytestmark = pytest.mark.slow

Key = tuple[str, str]


class Page(HTMLParser):
    """An HTML report: elements, seen text, cells and unrounded numbers by the table's id, scripts, style sheet."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.style = "", ""
        self.tables: dict[str, list[list[str]]] = {}
        self.exact: dict[str, list[float]] = {}
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._open = ""
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.append((tag, values))
        if tag in ("script", "style"):
            self._open = tag
        if tag == "script":
            self.scripts.append((values, ""))
        elif tag == "table":
            self.tables[str(values["id"])] = self._rows = []
            self.exact[str(values["id"])] = self._numbers = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
            self._in_cell = True
        elif tag == "data":
            self._numbers.append(float(values["value"] or "nan"))

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = ""
        if tag in ("th", "td"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._open == "style":
            self.style += data
        else:
            self.text += data
            if self._in_cell:
                self._rows[-1][-1] += data

    @property
    def policy(self) -> dict[str, list[str]]:
        """The page's security policy: sources by directive."""
        content = next(a["content"] for tag, a in self.tags if tag == "meta" and "http-equiv" in a)
        parts = [part.split() for part in str(content).split(";")]
        return {name: sources for name, *sources in parts}


def markdown_tables(text: str) -> dict[str, list[list[str]]]:
    """Rows of the tables of a Markdown report by their headings, rendered as GitHub would."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    found: dict[str, list[list[str]]] = {}
    heading, rows = "", []
    for at, token in enumerate(tokens):
        if token.type == "paragraph_open":
            heading = "".join(child.content for child in tokens[at + 1].children or ())
        elif token.type == "table_open":
            rows = found[heading] = []
        elif token.type == "tr_open":
            rows.append([])
        elif token.type in ("th_open", "td_open"):
            rows[-1].append("".join(child.content for child in tokens[at + 1].children or ()))
    return found


@pytest.fixture(scope="module")
def files(standard: Report) -> dict[str, bytes]:
    return standard.files(FORMATS)


def expected(run: DriftRun) -> dict[Key, float]:
    return {
        (task, display_name(variant)): run.value("drift_l2_mean", task=task, variant=variant)
        for task in run.tasks
        for variant in run.variants
    }


def in_html(data: bytes) -> dict[Key, float]:
    page = Page(data.decode())
    rows = page.tables["final-drift"][1:]
    numbers = page.exact["final-drift"]
    return {(row[0], row[1]): numbers[at * (len(numbers) // len(rows))] for at, row in enumerate(rows)}


def in_json(data: bytes) -> dict[Key, float]:
    sections = json.loads(data)["sections"]
    table = next(table for section in sections for table in section["tables"] if table["name"] == "final-drift")
    return {(row[0], row[1]): row[2] for row in table["rows"]}


def in_csv(data: bytes) -> dict[Key, float]:
    rows = csv.DictReader(io.StringIO(data.decode()))
    return {(row["task"], row["model"]): float(row["L2 drift"]) for row in rows}


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("report.html", in_html),
        ("report-light.html", in_html),
        ("report.json", in_json),
        ("csv/report-final-drift.csv", in_csv),
    ],
)
def test_every_digit_of_the_final_drift_is_that_of_the_table(
    name: str, read: Callable[[bytes], dict[Key, float]], full: DriftRun, files: dict[str, bytes]
) -> None:
    assert read(files[name]) == expected(full)


def test_markdown_shows_the_same_numbers_rounded(full: DriftRun, files: dict[str, bytes]) -> None:
    (rows,) = markdown_tables(files["report.md"].decode()).values()
    sheet = task_table(full, verdict(full))
    assert rows == [[*map(typeset_signs, row)] for row in sheet.formatted_rows()]
    ends = [
        typeset_signs(f"{format_value(row[6], 'points')} to {format_value(row[7], 'points')}") for row in sheet.rows
    ]
    assert [*sheet.column_formats][6:8] == ["95 % low", "95 % high"] and [row[6] for row in rows] == [
        INTERVAL,
        *ends,
    ]


def test_the_runs_own_tables_are_in_csv_with_every_digit(full: DriftRun, files: dict[str, bytes]) -> None:
    rows = list(csv.DictReader(io.StringIO(files["csv/layers.csv"].decode())))
    shown = [float(row["cos_mean"]) for row in rows]
    assert shown == full.layers()["cos_mean"].tolist()
    units = list(csv.DictReader(io.StringIO(files["csv/layers.units.csv"].decode())))
    assert [row["column"] for row in units] == list(schema.LAYERS.names) == list(rows[0])
    assert {row["column"]: row["unit"] for row in units}["drift_l2_mean"] == "feature"


def test_single_samples_are_in_csv_only_if_asked_for(full: DriftRun, files: dict[str, bytes]) -> None:
    assert "csv/samples.csv" not in files
    raw = Report(full, "full").files(["csv"])
    assert len(raw["csv/samples.csv"].splitlines()) == len(full.samples()) + 1


@pytest.mark.slow
def test_a_second_report_has_the_same_bytes(full: DriftRun, files: dict[str, bytes]) -> None:
    assert Report(open_run(full.path)).files(FORMATS) == files


def test_saving_leaves_the_files_and_nothing_else(standard: Report, files: dict[str, bytes], tmp_path: Path) -> None:
    light = ["json", "md", "csv", "latex"]  # the others are drawn, which takes long, and saved no other way
    paths = standard.save(tmp_path / "out", light)
    found = {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in paths}
    assert found == {name: data for name, data in files.items() if not name.endswith(".html")}
    assert sorted(paths) == sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())


def test_a_report_in_the_run_is_one_of_its_files(tmp_path: Path) -> None:
    run = open_run(write_full_run(tmp_path / "run", size=SMALL))
    paths = Report(run, "summary").save(formats=["json", "md"])
    listed = {run.path / name for name in open_run(run.path).manifest.files if name.startswith("reports/")}
    assert set(paths) == listed and len(paths) == 2
    assert verify_files(run.path).ok


def test_an_unknown_format_is_refused_with_the_nearest(standard: Report) -> None:
    with pytest.raises(SpecError, match="no format 'htlm'") as caught:
        standard.files(["htlm"])
    assert "'html'" in caught.value.hint


@pytest.mark.slow
def test_reports_need_neither_torch_nor_streamlit(full: DriftRun) -> None:
    script = """
        import sys

        class Without:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torch", "streamlit"):
                    raise ImportError(name)

        sys.meta_path.insert(0, Without())
        from driftlens_reports.build import FORMATS, Report
        report = Report(sys.argv[1])
        assert report.files(["json", "html"]) and "matplotlib" not in sys.modules  # it takes as long to import
        print(len(report.files(FORMATS)) > 50)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(full.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


TINY = Size(blocks=1, samples=3, width=3, classes=2, tests=10)
RUNS: dict[str, dict[str, object]] = {
    "one task": {"tasks": ["cars"]},
    "no blocks": {"tasks": ["cars"], "size": Size(0, 3, 3, 2, 10), "variants": ("base", "merged")},
    "one sample": {"tasks": ["cars", "dtd"], "size": Size(1, 1, 3, 2, 10)},
    "not calibrated": {"tasks": ["cars", "dtd"], "variants": ("base", "merged")},
    "only the base": {"tasks": ["cars", "dtd"], "variants": ("base",)},
    "no merged model": {"tasks": ["cars", "dtd"], "variants": ("calibrated:a", "calibrated:b")},
    "no labels": {"tasks": ["cars"], "has_labels": False},
    "names with markup": {
        "name": HOSTILE,
        "tasks": [f"{HOSTILE} 手写", "$\\input{/etc/passwd}$", "=cmd|' /C calc'!A0\x1b[31mred\nline"],
        "class_names": [HOSTILE, "=1+1"],
        "variants": ("merged", "calibrated:featcal"),
    },
}


QUICK = ("no blocks",)
SOME = ("one sample", "no labels", "names with markup")


@pytest.mark.parametrize("name", few(RUNS, QUICK, some=SOME))
def test_every_run_has_a_report_in_every_format_and_no_invented_number(name: str, tmp_path: Path) -> None:
    folder = write_full_run(tmp_path / "run", **{"size": TINY, **RUNS[name]})  # type: ignore[arg-type]
    found = Report(folder).files(FORMATS)
    for file in ("report.md", "report-light.html"):
        assert not re.search(r"\b(nan|inf|None|<NA>)\b", found[file].decode()), file
    assert json.loads(found["report.json"])["run"]["tasks"] == list(open_run(folder).tasks)


def test_columns_that_hold_nothing_are_said_to_be_missing(tmp_path: Path) -> None:
    folder = write_full_run(tmp_path / "run", size=TINY)
    for table in schema.TABLES.values():
        path = folder / table_file(table.name)
        if path.exists():
            rows = tables.read_table(path, table)
            numbers = [c.name for c in table.columns if c.dtype in ("float", "bool") and c.name not in table.key]
            path.unlink()
            tables.append_rows(path, table, rows.drop(columns=numbers))
    content = Report(folder, "full").content
    # Points of the scatter are of stored features, which are there.
    assert {figure.name for figure in content.figures if not figure.missing} == {"scatter"}
    assert content.verdict.changes == ()
    assert set(Report(folder).files(["html-light", "md", "json"])) >= {"report-light.html", "report.md"}


@pytest.mark.parametrize("harm", ["truncated", "removed"])
def test_a_damaged_table_is_an_error_that_names_it(harm: str, tmp_path: Path) -> None:
    folder = write_full_run(tmp_path / "run", size=TINY)
    path = folder / table_file("layers")
    path.write_bytes(path.read_bytes()[:200]) if harm == "truncated" else path.unlink()
    with pytest.raises(RunError, match=re.escape(str(path))):
        Report(folder).save(tmp_path / "out", FORMATS)
    assert not (tmp_path / "out").exists()


BREAKING = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def light(files: dict[str, bytes]) -> str:
    return files["report-light.html"].decode()


@pytest.fixture(scope="module")
def interactive(files: dict[str, bytes]) -> str:
    return files["report.html"].decode()


@pytest.fixture(scope="module")
def hostile_pages(tmp_path_factory: pytest.TempPathFactory) -> list[Page]:
    folder = write_full_run(
        tmp_path_factory.mktemp("hostile") / "run",
        name=HOSTILE,
        tasks=[HOSTILE, BREAKING],
        class_names=[BREAKING, "b"],
        size=Size(1, 4, 3, 2, 10),
    )
    files = Report(folder, "full").files(["html", "html-light"])
    return [Page(data.decode()) for data in files.values()]


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_plotly_is_in_the_interactive_page_exactly_once(interactive: str) -> None:
    from plotly.offline import get_plotlyjs

    assert interactive.count(get_plotlyjs()) == 1
    programs = [text for attributes, text in Page(interactive).scripts if "type" not in attributes]
    assert len(programs) == 2 and programs[0] == get_plotlyjs()


def test_the_light_page_has_no_script(light: str) -> None:
    page = Page(light)
    assert page.scripts == [] and "<script" not in light
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_the_light_page_allows_its_own_style_and_nothing_else(light: str) -> None:
    page = Page(light)
    assert page.policy == {
        "default-src": ["'none'"],
        "style-src": [digest(page.style)],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert not [attributes for _, attributes in page.tags if "style" in attributes]


def test_the_interactive_page_allows_its_own_scripts_and_no_other(interactive: str) -> None:
    page = Page(interactive)
    programs = [text for attributes, text in page.scripts if "type" not in attributes]
    assert page.policy["script-src"] == [digest(text) for text in programs]
    assert page.policy["default-src"] == ["'none'"]
    assert "connect-src" not in page.policy


def test_only_charts_of_many_points_need_compiled_drawing_commands(standard: Report, interactive: str) -> None:
    assert "'unsafe-eval'" not in Page(interactive).policy["script-src"]
    drawn = charts["layer-drift"].draw(standard.run)
    many = {"layer-drift": dataclasses.replace(drawn, figure=go.Figure(go.Scattergl(x=[1], y=[1])))}
    page = Page(interactive_page(standard.content, many).decode())
    assert "'unsafe-eval'" in page.policy["script-src"]


@pytest.mark.parametrize("name", ["light", "interactive"])
def test_a_page_refers_to_nothing_outside_itself(name: str, request: pytest.FixtureRequest) -> None:
    page = Page(request.getfixturevalue(name))
    targets = [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in {"src", "href", "srcset", "xlink:href", "action", "data", "poster"}
    ]
    pictures = [target for target in targets if str(target).startswith("data:image/png;base64,")]
    targets = [target for target in targets if target not in pictures]
    assert targets and all(str(target).startswith("#") for target in targets)
    assert bool(pictures) == (name == "light")
    assert "url(" not in page.style and "@import" not in page.style
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {str(target)[1:] for target in targets} <= ids


@pytest.mark.parametrize("name", ["light", "interactive"])
def test_no_id_is_there_twice(name: str, request: pytest.FixtureRequest) -> None:
    ids = [attributes["id"] for _, attributes in Page(request.getfixturevalue(name)).tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_names_are_text_and_never_markup(hostile_pages: list[Page]) -> None:
    for page in hostile_pages:
        pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
        assert all(str(source).startswith("data:image/png;base64,") for source in pictures)
        assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
        assert HOSTILE in page.text and BREAKING in page.text
        assert sum("type" not in attributes for attributes, _ in page.scripts) in (0, 2)


def test_embedded_charts_are_the_charts_and_never_end_their_element(
    interactive: str, standard: Report, hostile_pages: list[Page]
) -> None:
    for page in (Page(interactive), hostile_pages[0]):
        embedded = {str(a["id"]): text for a, text in page.scripts if a.get("type") == "application/json"}
        assert embedded and not any("<" in text for text in embedded.values())
        for text in embedded.values():
            figure = json.loads(text)
            assert set(figure) == {"data", "layout", "dark"} and "uid" not in figure["dark"]
            assert figure["layout"]["paper_bgcolor"] == LIGHT.surface
            assert figure["dark"]["layout"]["paper_bgcolor"] == DARK.surface
            assert set(map(int, figure["dark"].get("data", {}))) < {*range(len(figure["data"]) + 1)}
            assert len(json.dumps(figure["dark"])) < len(text) / 2, "no more than what differs"
    ids = {attributes["id"] for attributes, _ in Page(interactive).scripts if "id" in attributes}
    assert ids == {f"plot-{figure.name}" for figure in standard.content.figures}


def test_every_picture_is_a_paper_figure_that_says_what_it_shows(light: str, full: DriftRun) -> None:
    pictures = [attributes for tag, attributes in Page(light).tags if tag == "img"]
    said = {draw_exhibit(name, [full], ExhibitOptions()).text for name in ("intro", "drift")}
    assert said <= {picture["alt"] for picture in pictures}
    assert all(str(picture["src"]).startswith("data:image/png;base64,") for picture in pictures)


def test_no_line_of_a_paragraph_ends_within_a_number(light: str) -> None:
    said = re.findall(r"<p\b[^>]*>(.*?)</p>", light, flags=re.DOTALL)
    assert any("\N{NO-BREAK SPACE}%" in text for text in said)
    assert not any(re.search(r"\d [%±]", text) for text in said)


@pytest.mark.slow
def test_a_large_light_page_stays_below_a_megabyte(tmp_path: Path) -> None:
    folder = write_full_run(
        tmp_path / "run",
        tasks=[f"task number {at} of many" for at in range(30)],
        size=Size(blocks=6, samples=3, width=3, classes=2, tests=10),
    )
    report = Report(open_run(folder))
    data = report.files(["html-light"])["report-light.html"]
    assert len(data) < 1_000_000
    assert "data:image/png;base64," in data.decode()
