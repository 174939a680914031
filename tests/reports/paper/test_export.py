"""Files of exhibits: the same bytes every time, with their numbers and where those come from beside them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest

import driftlens as dl
from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.errors import DataError, SpecError
from driftlens_reports.paper.exhibit import (
    FORMATS,
    ExhibitOptions,
    draw_exhibit,
    exhibits,
    export_exhibits,
    readable_names,
)
from tests.reports.paper.drawn import code_of, words
from tests.reports.paper.saved_runs import table_run
from tests.runs.full_run import Size, write_full_run, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return table_run(tmp_path_factory.mktemp("export") / "toy")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_exporting_again_writes_the_same_bytes(run: DriftRun, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        export_exhibits([run], tmp_path / folder, names=["accuracy", "self-checks", "drift"])
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert {name.partition(".")[2] for name in first} == set(FORMATS)
    assert first == second


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(run: DriftRun, tmp_path: Path) -> None:
    names = ["accuracy", "drift", "intro"]
    export_exhibits([run], tmp_path / "here", names=names)
    script = f"""
        import sys

        class NoTorch:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "torch":
                    raise ImportError("exhibits are drawn without torch")

        sys.meta_path.insert(0, NoTorch())
        from driftlens.runs.run import open_run
        from driftlens_reports.paper.exhibit import ExhibitOptions, draw_exhibit, exhibits
        from driftlens_reports.paper.exhibit import export_exhibits
        run = open_run(sys.argv[1])
        export_exhibits([run], sys.argv[2], names={names})
        assert all(draw_exhibit(name, [run], ExhibitOptions()) for name in exhibits)
        assert "matplotlib.pyplot" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(run.path), str(tmp_path / "there")]
    subprocess.run(command, check=True)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


@pytest.mark.slow
def test_every_exhibit_has_its_siblings(run: DriftRun, tmp_path: Path) -> None:
    names = [name for name, entry in exhibits.items() if entry.kind == "table"] + ["drift"]
    written = export_exhibits([run], tmp_path, names=names, formats=["tex", "svg"])
    assert [entry.name for entry in written] == names
    for entry in written:
        own = "svg" if entry.name == "drift" else "tex"
        assert [path.name for path in entry.files] == [f"{entry.name}.{end}" for end in (own, "csv", "json", "txt")]
    assert sorted(path for entry in written for path in entry.files) == sorted(tmp_path.iterdir())


def test_the_csv_holds_the_numbers_with_every_digit(run: DriftRun, tmp_path: Path) -> None:
    export_exhibits([run], tmp_path, names=["accuracy"])
    read = pd.read_csv(tmp_path / "accuracy.csv")
    assert read["value"].tolist() == draw_exhibit("accuracy", [run], ExhibitOptions()).data["value"].tolist()


@pytest.mark.slow
def test_provenance_names_the_run_its_spec_and_what_is_missing(run: DriftRun, tmp_path: Path) -> None:
    options = ExhibitOptions(style="icml-column", task="cars")
    export_exhibits([run], tmp_path, names=["efficiency", "sweeps"], options=options)
    told = json.loads((tmp_path / "sweeps.json").read_text())
    assert [entry["id"] for entry in told["runs"]] == [run.id]
    assert told["runs"][0]["spec_digest"] == run.manifest.spec_digest
    assert told["versions"]["driftlens"] == run.manifest.versions["driftlens"]
    assert [gap["name"] for gap in told["missing"]] == [
        f"({letter}) accuracy by {what}"
        for letter, what in zip("abc", ("λ (ridge)", "α (expert share of target)", "ρ (anchor)"), strict=True)
    ]
    assert told["command"] == "driftlens export toy --figure sweeps --style icml-column --task cars"
    assert not json.loads((tmp_path / "efficiency.json").read_text())["missing"]


def test_what_is_chosen_stands_in_the_command_that_draws_it_again(run: DriftRun, tmp_path: Path) -> None:
    flags = ["--tasks", "cars", "--calibrated", "base"]
    wanted = ["export", run.path, "--figure", "drift", "--format", "png", "--out", tmp_path]
    assert code_of(*wanted, *flags) == 0
    told = json.loads((tmp_path / "drift.json").read_text())
    assert told["command"] == "driftlens export toy --figure drift --style neurips --calibrated base --tasks cars"
    shown = pd.read_csv(tmp_path / "drift.csv")
    assert set(shown["variant"]) == {"base", "merged"} and set(shown["task"]) == {"cars"}
    assert code_of(*wanted, "--calibrated", "nobody") == 4


def test_what_shows_no_measured_number_is_not_among_all(run: DriftRun, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "driftlens_reports.paper.exhibit.exhibits",
        {name: exhibits[name] for name in ("accuracy", "sweeps")},
    )
    made = export_exhibits([run], tmp_path, formats=["csv"])
    assert [entry.name for entry in made if entry.files] == ["accuracy"]
    (asked,) = export_exhibits([run], tmp_path, names=["sweeps"], formats=["csv"])
    assert asked.missing, "asked for by name it is written, and says what is missing"


def test_the_opening_figure_has_the_base_beside_what_is_compared(run: DriftRun) -> None:
    shown = draw_exhibit("intro", [run], ExhibitOptions()).data
    scored = shown[(shown["panel"] == "c") & (shown["quantity"] == "accuracy")]
    assert set(scored["variant"]) >= {"base", "merged", "expert"}
    assert "base" not in set(shown[shown["panel"] == "b"]["variant"])


@pytest.mark.slow
def test_the_command_writes_what_was_asked_for(
    run: DriftRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = ("--figure", "drift", "--table", "runtime", "--format", "png,tex", "--out", out, "--json")
    assert code_of("export", run.path, *asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert [entry["exhibit"] for entry in told] == ["drift", "runtime"]
    assert sorted(path for entry in told for path in entry["files"]) == sorted(map(str, out.iterdir()))
    assert {path.suffix for path in out.glob("drift.*")} == {".png", ".csv", ".json", ".txt"}


def test_what_a_part_needs_is_printed(run: DriftRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert code_of("export", run.path, "--figure", "sweeps", "--format", "png", "--out", out) == 0
    assert (out / "sweeps.png").exists()
    assert f"driftlens sweep {run.path} --param lam=" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--table", "acuracy"],
        ["--table", "accuracy", "--format", "docx"],
        ["--table", "accuracy", "--format", "pdf"],
        ["--table", "accuracy", "--style", "nature"],
    ],
    ids=["misspelt", "format", "format of a figure", "style"],
)
def test_a_wrong_wish_is_refused_before_anything_is_written(
    run: DriftRun, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert code_of("export", run.path, *arguments, "--out", out) == SpecError.exit_code
    assert "hint:" in capsys.readouterr().err
    assert not out.exists()


def test_an_unknown_task_is_a_data_error(run: DriftRun, tmp_path: Path) -> None:
    assert code_of("export", run.path, "--figure", "intro", "--task", "moon", "--out", tmp_path) == 4


def test_an_exhibit_without_a_run_is_refused() -> None:
    with pytest.raises(DataError, match="was given no run"):
        dl.paper.figure("efficiency", [])


@pytest.mark.slow
def test_python_has_the_same_figures_and_tables(run: DriftRun, tmp_path: Path) -> None:
    export_exhibits([run], tmp_path, names=["drift", "accuracy"])
    dl.paper.figure("drift", run).save(tmp_path / "fig1.pdf")
    table = dl.paper.table("accuracy", [run])
    text = table.to_latex(tmp_path / "tab1.tex")
    written = contents(tmp_path)
    assert written["fig1.pdf"] == written["drift.pdf"]
    assert written["tab1.tex"] == written["accuracy.tex"] == text.encode()
    assert set(dl.paper.names()) == set(exhibits)


@pytest.mark.slow
def test_all_says_what_is_not_written_and_which_command_fills_it(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    made = {entry.name: entry for entry in export_exhibits([run], tmp_path / "out", formats=["csv"])}
    assert {*made} == {*exhibits}
    empty = [entry for entry in made.values() if not entry.files]
    assert empty and all("`driftlens " in gap.missing for entry in empty for gap in entry.missing)
    assert {path.name.partition(".")[0] for path in (tmp_path / "out").iterdir()} == {
        entry.name for entry in made.values() if entry.files
    }


@pytest.mark.slow
def test_the_first_figure_shows_the_task_with_the_median_gain(tmp_path: Path) -> None:
    """Neither the task without an effect nor the best one speaks for a run."""
    run = open_run(write_full_run(tmp_path / "run", size=Size(blocks=1, samples=6, width=4, tests=60)))
    after, rows = run.variants[-1], run.accuracy()
    score = rows.pivot(index="task", columns="variant", values="value")
    gains = (score[after] - score["merged"]).loc[list(run.tasks)]
    median = gains[(gains.rank(method="first") == len(gains) // 2 + 1)]
    options = ExhibitOptions()
    assert gains[options.median_task_of(run)] == median.iloc[0]
    assert ExhibitOptions(task=run.tasks[0]).median_task_of(run) == run.tasks[0]
    shown = readable_names(run.tasks)[options.median_task_of(run)]
    assert f"(a) final features, {shown}" in words(draw_exhibit("intro", [run], options).figure)


@pytest.mark.parametrize("style", ["neurips", "icml-column"])
@pytest.mark.parametrize("name", list(exhibits))
def test_captions_have_two_lines_and_provenance_has_the_rest(name: str, style: str, run: DriftRun) -> None:
    shown = draw_exhibit(name, [run], ExhibitOptions(style=style))
    assert len(shown.caption) <= 2 * int(shown.options.width * 17.5) and shown.caption.endswith(".")
    told = shown.provenance()
    assert told["caption"] == shown.caption and told["notes"] == list(shown.notes)
    if len(shown.data):
        assert any(run.id in note for note in shown.notes) and run.id not in shown.caption
    assert shown.latex is None or run.id not in shown.latex


def test_names_are_written_as_papers_write_them() -> None:
    names = ["mnist", "house_numbers", "ImageNet", "merged", "featcal", "prob_surgery", "calibrated:featcal"]
    assert readable_names(names) == {
        **{"mnist": "MNIST", "house_numbers": "House numbers", "ImageNet": "ImageNet"},
        **{"featcal": "FeatCal", "prob_surgery": "ProbSurgery"},
    }
    assert readable_names(["a_b", "a b"]) == {}, "two tasks keep two names"
    assert readable_names(["$x_1$", "a_b^{c}", "<b>"]) == {}, "names with signs stay letter by letter"


def test_there_are_twelve_exhibits_and_their_bars_are_solid(run: DriftRun) -> None:
    assert len(exhibits) == 12
    for name in ("intro", "contributions", "output-drift"):
        figure = draw_exhibit(name, [run], ExhibitOptions()).figure
        assert figure is not None and not any(bar.get_hatch() for axes in figure.axes for bar in axes.patches)
