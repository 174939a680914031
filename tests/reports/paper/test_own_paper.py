"""What a writer needs for a paper of their own: names, several calibrations, honest bold, notes and type that fit."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from driftlens.runs.manifest import CalibrationInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import DataError
from driftlens_reports.paper.exhibit import WIDTHS, ExhibitOptions, draw_exhibit, exhibits
from driftlens_reports.paper.latex_tables import latex_table
from tests.quick import few
from tests.reports.paper.drawn import bars, code_of, draw as drawn, line_points, lines, segments, texts, typeset, words
from tests.reports.paper.saved_runs import figure_run
from tests.runs.full_run import VARIANTS, Size

NAMES = {"mnist": "Digits_0 & 50 %", "merged": "Ours", "featcal": "Cal^1", "residual": "Rest"}
TABLES = [name for name, entry in exhibits.items() if entry.kind == "table"]
FIGURES = [name for name, entry in exhibits.items() if entry.kind == "figure"]
NAMED = ["drift", "contributions", "intro", "scatter-grid", "decomposition"]
SEVERAL = [("accuracy", "drift", "runtime"), ("intro", "scatter-grid", "contributions")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run with two calibrations."""
    path = tmp_path_factory.mktemp("own") / "run"
    variants = [*VARIANTS, "baseline:residual-anchor", "calibrated:residual"]
    figure_run(path, variants=variants, size=Size(blocks=2, samples=8, tests=400))
    with RunWriter.resume(path) as writer:
        samples = dict.fromkeys(open_run(path).tasks, 64)
        infos = {
            name: CalibrationInfo(name, {"lam": 0.05}, f"baseline:{name}-anchor", 2.0, samples)
            for name in ("featcal", "residual")
        }
        writer.update_manifest(calibrations=infos)
    return open_run(path)


@pytest.mark.parametrize("name", few(NAMED, NAMED[:1]))
def test_figures_say_the_names_that_a_writer_gives(name: str, run: DriftRun) -> None:
    options = ExhibitOptions(names=NAMES, task="mnist" if name != "scatter-grid" else None)
    shown = draw_exhibit(name, [run], options)
    said = f"{words(shown.figure)} {shown.text}"
    assert "Ours" in said and "Rest" in said and "Digits_0 & 50 %" in said
    assert not {"mnist", "residual"} & set(said.replace(",", " ").replace(":", " ").split())
    assert "merged" in set(shown.data["variant"]), "data keep the names of the run"


def test_tables_say_them_escaped(run: DriftRun) -> None:
    accuracy, runtime = (
        draw_exhibit(name, [run], ExhibitOptions(names=NAMES)).latex or "" for name in ("accuracy", "runtime")
    )
    assert r"Digits\_0 \& 50 \%" in accuracy and "mnist" not in accuracy
    assert r"Cal\textasciicircum{}1" in accuracy and "featcal" not in accuracy
    assert "Rest &" in runtime and "residual" not in runtime


def test_a_spec_may_name_them_and_the_command_line_wins(run: DriftRun, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    spec = "name: run\nnames: {mnist: Digits, cars: Autos}\n"
    (path / "spec.yaml").write_text(spec, encoding="utf-8")
    out = tmp_path / "out"
    asked = ("export", path, "--table", "accuracy", "--format", "tex", "--out", out)
    assert code_of(*asked, "--names", "mnist=MNIST, featcal=FeatCal") == 0
    text = (out / "accuracy.tex").read_text()
    assert "MNIST" in text and "Autos" in text and "FeatCal" in text and "Digits" not in text
    told = json.loads((out / "accuracy.json").read_text())
    assert "--names mnist=MNIST,featcal=FeatCal" in told["command"]
    assert code_of(*asked, "--names", "mnits=MNIST") == DataError.exit_code
    assert code_of(*asked, "--names", "mnist=Autos") == DataError.exit_code, "two tasks by one name"
    assert code_of(*asked, "--names", "mnist") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    SEVERAL,
)
def test_several_calibrations_stand_in_one_exhibit(run: DriftRun, names: tuple[str, ...]) -> None:
    both = {"calibrated:featcal", "calibrated:residual"}
    for name, asked in itertools.product(names, ("residual,featcal", ("calibrated:featcal", "residual"))):
        assert both <= set(drawn(name, run, calibrated=asked).data["variant"]), name
    one = drawn("accuracy", run, calibrated="featcal").data
    assert both & set(one["variant"]) == {"calibrated:featcal"}
    assert both & set(drawn("drift", run).data["variant"]) == {"calibrated:residual"}, "the last one"


def with_answers(run: DriftRun, right: dict[str, int]) -> DriftRun:
    """The run with these many right answers of 100 to each task's test samples, wrong ones first."""
    copy, rows = open_run(run.path), run.accuracy()
    rows = rows[rows["variant"].isin([*right, "base", "expert"])].assign(n=100)
    rows["value"] = [right.get(variant, 100) / 100 for variant in rows["variant"]]
    copy._frames["accuracy"] = rows
    return copy


def bold_of(run: DriftRun) -> list[str]:
    text = draw_exhibit("accuracy", [run], ExhibitOptions()).latex or ""
    return [line.partition("&")[0].strip() for line in text.splitlines() if r"\textbf" in line]


def test_only_what_is_told_apart_from_the_next_best_is_bold(run: DriftRun) -> None:
    few = {"merged": 40, "calibrated:featcal": 60}
    assert bold_of(with_answers(run, {**few, "calibrated:residual": 90})) == ["Residual"]
    assert not bold_of(with_answers(run, {**few, "calibrated:residual": 62})), "62 and 60 of 100"
    assert not bold_of(with_answers(run, {"merged": 99})), "nothing to compare with but base and expert"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["OT1", "T1"])
def test_commands_can_be_pasted_from_the_pdf(tmp_path: Path, encoding: str) -> None:
    if shutil.which("pdftotext") is None:
        pytest.skip("pdftotext is not installed")
    command = "driftlens sweep RUN --param 'lam=0.005,0.05,0.5,5' --name first-fine_tune"
    latex = latex_table(pd.DataFrame(), "t", "C", notes=[f"`{command}` measures it."])
    typeset(tmp_path, rf"\usepackage[{encoding}]{{fontenc}}", latex)
    subprocess.run(["pdftotext", "all.pdf"], cwd=tmp_path, check=True)
    assert command in " ".join((tmp_path / "all.txt").read_text().split())


@pytest.mark.slow
@pytest.mark.parametrize("style", ["icml-column", "neurips"])
def test_parameters_can_be_pasted_from_a_figure(run: DriftRun, tmp_path: Path, style: str) -> None:
    if shutil.which("pdftotext") is None:
        pytest.skip("pdftotext is not installed")
    bare = open_run(run.path)
    bare._frames["sweeps"] = run.sweeps().iloc[:0]
    draw_exhibit("sweeps", [bare], ExhibitOptions(style=style)).save(tmp_path / "all.pdf")
    subprocess.run(["pdftotext", "-layout", "all.pdf"], cwd=tmp_path, check=True)
    said = (tmp_path / "all.txt").read_text().split()
    assert "--param" in said
    assert {"lam=0.0005,0.005,0.05,0.5,5", "alpha=0,0.15,0.3,0.6,1", "rho=1,1.5,2,2.5,3"} <= set(said)


@pytest.mark.slow
def test_no_exhibit_names_a_folder_of_this_machine(run: DriftRun) -> None:
    places = {str(run.path), str(run.path.parent), str(Path.home()) + "/"}
    for name in exhibits:
        shown = drawn(name, run)
        artifact = draw_exhibit(name, [run], ExhibitOptions()) if name in ("accuracy", "intro") else None
        told = json.dumps(artifact.provenance()) if artifact else ""
        said = f"{shown.text} {shown.latex} {shown.data.to_csv()} {told}"
        said += words(shown.figure) if shown.figure else ""
        assert not [place for place in places if place in said], name


@pytest.mark.parametrize(
    "which",
    few([*itertools.product(FIGURES, WIDTHS)], [("drift", "icml-column"), ("drift", "slide")]),
)
def test_type_is_never_below_7_pt(which: tuple[str, str], run: DriftRun) -> None:
    name, style = which
    figure = drawn(name, run, style=style).figure
    assert figure is not None
    small = [text.get_text() for text in texts(figure) if text.get_visible() and text.get_fontsize() < 7]
    assert not small


def with_ends(run: DriftRun) -> DriftRun:
    """The run with an interval around every share and amplification."""
    copy, rows = open_run(run.path), run.layers()
    for column in ("final_share", "amplification"):
        rows[f"{column}_low"], rows[f"{column}_high"] = rows[column] - 0.05, rows[column] + 0.1
    copy._frames["layers"] = rows
    return copy


def test_negative_shares_are_drawn_below_zero(run: DriftRun) -> None:
    copy, rows = open_run(run.path), run.layers()
    rows["final_share"] = np.where(rows["layer"] == 2, -0.2, 0.4)
    copy._frames["layers"] = rows
    figure = drawn("contributions", copy).figure
    assert figure is not None
    for axes in figure.axes:
        assert min(bar.get_height() for bar in bars(axes)) == pytest.approx(-0.2)
        assert axes.get_ylim()[0] < -0.2


def test_shares_have_whiskers_at_the_ends_of_their_intervals(run: DriftRun) -> None:
    shown = drawn("contributions", with_ends(run), task="mnist")
    ends = np.concatenate(segments(shown.figure.axes[0])).reshape(-1, 2)[:, 1] if shown.figure else []
    for value in run.layers("mnist", "merged")["final_share"]:
        assert np.isclose(ends, value - 0.05).any() and np.isclose(ends, value + 0.1).any()
    assert "Whiskers: 95 %" in shown.text
    assert "Whiskers" not in drawn("contributions", run, task="mnist").text


def test_shares_by_prefixes_that_were_not_measured_are_neither_drawn_nor_named(run: DriftRun) -> None:
    copy, rows = open_run(run.path), run.layers()
    copy._frames["layers"] = rows.assign(prefix_share=np.nan)
    shown = drawn("contributions", copy, task="mnist")
    assert shown.figure is not None and "prefixes" not in shown.text
    assert not any("prefixes" in text.get_text() for legend in shown.figure.legends for text in legend.get_texts())
    # Bars of the other shares stand on their layers.
    places = [bar.get_x() + bar.get_width() / 2 for bar in bars(shown.figure.axes[0])]
    assert {*rows["layer"]} <= {round(place, 6) for place in places}
    assert "by swapping model prefixes" in drawn("contributions", run, task="mnist").text


@pytest.mark.parametrize("name", ["contributions", "amplification"])
def test_repairs_whose_drift_is_not_attributed_are_named_and_not_drawn(name: str, run: DriftRun) -> None:
    copy, rows = open_run(run.path), run.layers()
    columns = ["final_share", "prefix_share", "remainder_share", "amplification"]
    rows.loc[rows["variant"] == "calibrated:residual", columns] = np.nan
    copy._frames["layers"] = rows
    shown = drawn(name, copy, task="mnist", calibrated="featcal,residual")
    assert shown.figure is not None and {*shown.data["variant"]} == {"merged", "calibrated:featcal"}
    assert "Residual" not in words(shown.figure) and "of Residual" in shown.text


def test_amplification_has_whiskers_at_the_ends_of_its_intervals(run: DriftRun) -> None:
    shown = drawn("amplification", with_ends(run), task="mnist")
    rows = run.layers("mnist", "merged")
    panels = shown.figure.axes if shown.figure else []
    assert len(panels) == 2, "the head has its own"
    ends = np.concatenate([np.concatenate(segments(axes)).reshape(-1, 2)[:, 1] for axes in panels])
    for value in rows["amplification"].dropna():
        assert np.isclose(ends, value - 0.05).any() and np.isclose(ends, value + 0.1).any()
    assert {"amplification_low", "amplification_high"} <= set(shown.data["quantity"])
    assert "Whiskers: 95 %" in shown.text
    assert "Whiskers" not in drawn("amplification", run, task="mnist").text


def test_the_head_has_a_panel_of_its_own_where_drift_is_in_feature_units(run: DriftRun) -> None:
    shown = drawn("decomposition", run, task="mnist")
    last = len(run.manifest.layers)
    assert shown.figure is not None
    panels = {axes.get_title(loc="left") or axes.get_title(): axes for axes in shown.figure.axes}
    ends = [{x for line in lines(axes) for x, _ in line_points(line)} for axes in shown.figure.axes]
    assert ends.count({float(last)}) == 3, "drift, mismatch, propagation"
    assert sum(float(last) in places and len(places) > 1 for places in ends) == 1, "the cross term is a ratio"
    assert "head" in panels
    drift = shown.data[shown.data["quantity"] == "drift_l2_mean"]
    assert set(drift["layer"]) == set(range(1, last + 1)), "no number is lost"


@pytest.mark.parametrize("name", ["sweeps", "efficiency"])
def test_sweeps_name_the_levels_of_merged_model_and_base(name: str, run: DriftRun) -> None:
    shown = draw_exhibit(name, [run], ExhibitOptions(names={"merged": "Ours"}))
    assert shown.figure is not None
    axes = shown.figure.axes[0]
    for variant, said in {"merged": "Ours", "base": "base"}.items():
        level = run.accuracy(variant=variant)["value"].mean()
        assert said in [text.get_text() for text in shown.figure.legends[0].get_texts()]
        assert any(np.allclose(line.get_ydata(), level) for line in axes.lines)
