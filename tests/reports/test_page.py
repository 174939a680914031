from __future__ import annotations

import base64
import hashlib
import pathlib
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser

import pytest

from driftlens.records.run import DriftRun
from driftlens_reports.curves import HEIGHT, MARGIN, WIDTH, curves
from driftlens_reports.page import render_page, write_page
from tests.reports.conftest import HOSTILE


class Page(HTMLParser):
    """Tags with their attributes, the text of the page, and per table the rows of its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.tables: dict[str, list[list[str]]] = {}
        self.exact: dict[str, list[float]] = {}
        self._rows: list[list[str]] = []
        self._numbers: list[float] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.append((tag, values))
        if tag == "table":
            name = values.get("id") or f"layers {sum(known.startswith('layers') for known in self.tables)}"
            self._rows = self.tables[name] = []
            self._numbers = self.exact[name] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
        elif tag == "data":
            self._numbers.append(float(values["value"] or "nan"))

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._rows and self._rows[-1] and self.lasttag in ("th", "td", "data"):
            self._rows[-1][-1] += data.strip()


def test_final_drift_on_the_page_is_that_of_the_table(run: DriftRun) -> None:
    page = Page(render_page(run))
    header, *rows = page.tables["final-drift"]
    assert header == ["task", "variant", "L2 drift", "relative", "cosine", "samples"]
    assert [tuple(row[:2]) for row in rows] == [(task, name) for task in run.tasks for name in run.variants]
    exact = iter(page.exact["final-drift"])
    for task, variant, *shown in rows:
        for text, column in zip(shown, ("drift_l2_mean", "drift_rel", "cos_mean", "n"), strict=True):
            value = run.value(column, task=task, variant=variant)
            if column != "n":
                assert next(exact) == value  # every digit, beside the rounded text
                assert text == f"{value:#.4g}"
            else:
                assert text == "6"


def test_the_table_under_a_chart_holds_every_layer(run: DriftRun) -> None:
    page = Page(render_page(run))
    for position, task in enumerate(run.tasks):
        rows = run.layers(task).pivot(index="layer", columns="variant", values="drift_l2_mean")
        expected = rows[list(run.variants)].to_numpy().ravel().tolist()
        assert page.exact[f"layers {position}"] == expected
        assert page.tables[f"layers {position}"][0][2:] == list(run.variants)


def test_accuracies_on_the_page_are_those_of_the_table(run: DriftRun) -> None:
    header, *rows = Page(render_page(run)).tables["accuracy"]
    for task, *shown in rows:
        for variant, text in zip(header[1:], shown, strict=True):
            value = run.accuracy(task, variant)["value"].item()
            assert text == f"{100 * value:.1f} %"


def test_names_are_text_and_never_markup(hostile: DriftRun) -> None:
    page = Page(render_page(hostile))
    assert "script" not in {tag for tag, _ in page.tags}
    assert HOSTILE in page.text
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_the_page_asks_the_network_for_nothing(run: DriftRun) -> None:
    text = render_page(run)
    page = Page(text)
    asking = {"src", "href", "srcset", "xlink:href", "action", "style"}
    assert not [attributes for _, attributes in page.tags if asking & set(attributes)]
    assert "url(" not in text and "@import" not in text


def test_the_policy_allows_the_pages_own_style_and_nothing_else(run: DriftRun) -> None:
    text = render_page(run)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    policy = next(a["content"] for tag, a in Page(text).tags if tag == "meta" and "http-equiv" in a)
    assert style is not None and policy is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy.split("; ") == [
        *("default-src 'none'", f"style-src 'sha256-{digest}'", "base-uri 'none'", "form-action 'none'"),
    ]


def test_a_synthetic_run_is_stamped_and_another_is_not(run: DriftRun, bare: DriftRun) -> None:
    assert "Synthetic demo" in Page(render_page(run)).text
    assert "Synthetic" not in Page(render_page(bare)).text


def test_what_was_not_measured_is_said_and_not_invented(bare: DriftRun) -> None:
    page = Page(render_page(bare))
    assert "accuracy" not in page.tables
    assert page.text.count("not measured") >= 3
    assert not re.search(r"\bnan\b", page.text, re.IGNORECASE)


def test_every_chart_says_what_it_shows(run: DriftRun) -> None:
    labels = [a["aria-label"] for tag, a in Page(render_page(run)).tags if tag == "svg" and a.get("role")]
    merged = [f"merged {run.value('drift_l2_mean', task=task):#.4g}" for task in run.tasks]
    assert len(labels) == len(merged)
    assert all(number in (label or "") for number, label in zip(merged, labels, strict=True))


def test_writing_replaces_the_page(run: DriftRun, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "reports/report.html"
    write_page(run, path)
    write_page(run, path)
    assert path.read_text(encoding="utf-8") == render_page(run)
    assert [child.name for child in path.parent.iterdir()] == ["report.html"]


def test_reports_need_no_torch(run: DriftRun) -> None:
    script = """
        import sys
        sys.modules["torch"] = None
        from driftlens.records.run import open_run
        from driftlens_reports.page import render_page
        from driftlens_reports.summary import summary
        run = open_run(sys.argv[1])
        print(summary(run) and render_page(run)[:15])
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "<!doctype html>\n"


def test_a_curve_is_proportional_to_its_values() -> None:
    (curve,) = curves([1, 2, 4], {"merged": [0.0, 1.0, 4.0]})
    bottom, height = HEIGHT - MARGIN, HEIGHT - 2 * MARGIN
    assert [y for _, y in curve.points] == pytest.approx([bottom, bottom - height / 4, MARGIN])
    left, middle, right = (x for x, _ in curve.points)
    assert (left, right) == (MARGIN, WIDTH - MARGIN)
    assert (middle - left) * 2 == pytest.approx(right - middle, abs=0.3)


def test_a_value_that_was_not_measured_is_a_gap_and_not_a_zero() -> None:
    (curve,) = curves([1, 2, 3, 4], {"calibrated:featcal": [1.0, float("nan"), 2.0, 2.0]})
    assert re.sub(r"[\d. ]", "", curve.path) == "MML"
    assert len(curve.points) == 3
    assert curve.role == "calibrated"


@pytest.mark.parametrize("values", [[0.0], [float("nan")]], ids=["zero drift", "nothing measured"])
def test_a_single_layer_without_drift_still_draws(values: list[float]) -> None:
    (curve,) = curves([1], {"merged": values})
    assert all(y == HEIGHT - MARGIN for _, y in curve.points)
