"""Plotted numbers against references computed from the tables in another way."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib.axes
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure, SubFigure

from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import DataError
from driftlens_reports.paper.exhibit import ExhibitResult, readable_names
from driftlens_reports.paper.figures import MOST
from tests.reports.paper.drawn import draw, line_points, lines, segments, words
from tests.reports.paper.saved_runs import POINTS, figure_run
from tests.runs.full_run import VARIANTS, Size, write_full_run

CONTROL, CALIBRATED = "baseline:featcal-anchor", "calibrated:featcal"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return figure_run(tmp_path_factory.mktemp("runs") / "run", name="upstream")


def panel(drawn: ExhibitResult, start: str) -> matplotlib.axes.Axes:
    """The panel, or the first of a part of the figure, whose heading starts so."""
    assert drawn.figure is not None
    headed = [axes for axes in drawn.figure.axes if axes.get_title(loc="left").startswith(start)]
    headed += [part.axes[0] for part in parts(drawn.figure) if part.get_suptitle().startswith(start)]
    (axes,) = headed
    return axes


def parts(figure: Figure | SubFigure) -> list[SubFigure]:
    """All parts of a figure, however deep."""
    return [inner for part in figure.subfigs for inner in (part, *parts(part))]


def values(drawn: ExhibitResult, quantity: str, **key: str) -> list[float]:
    rows = drawn.data[drawn.data["quantity"] == quantity]
    for column, wanted in key.items():
        rows = rows[rows[column] == wanted]
    return rows["value"].tolist()


def typical_task(run: DriftRun) -> str:
    """That of the median gain in accuracy."""
    scores = run.accuracy().set_index(["variant", "task"])["value"]
    gains = scores[CALIBRATED] - scores["merged"]
    return str(gains.sort_values(kind="stable").index[len(gains) // 2])


@pytest.mark.slow
def test_intro_shows_the_task_of_the_median_gain_unless_told(run: DriftRun) -> None:
    other = next(task for task in run.tasks if task != typical_task(run))
    names = readable_names(run.tasks)
    assert panel(draw("intro", run), "(b)").get_title(loc="left") == f"(b) drift, {names[typical_task(run)]}"
    assert panel(draw("intro", run, task=other), "(b)").get_title(loc="left") == f"(b) drift, {names[other]}"


def test_intro_box_tells_the_change_at_the_final_layer(run: DriftRun) -> None:
    drawn, task = draw("intro", run), typical_task(run)
    before, after = (run.value("drift_l2_mean", task=task, variant=v) for v in ("merged", CALIBRATED))
    assert f"−{100 * (before - after) / before:.0f} % (−{before - after:.2f})" in words(drawn.figure)


def test_intro_panels_share_one_window_and_the_expert_points(run: DriftRun) -> None:
    first, second = draw("intro", run).figure.axes[:2]
    assert first.get_xlim() == second.get_xlim() and first.get_ylim() == second.get_ylim()
    (expert, merged), (expert_again, calibrated) = (map(line_points, lines(axes)) for axes in (first, second))
    np.testing.assert_array_equal(expert, expert_again)
    for axes, other in ((first, merged), (second, calibrated)):
        (joins,) = segments(axes)
        np.testing.assert_array_equal(joins[:, 0], expert)
        np.testing.assert_array_equal(joins[:, 1], other)


@pytest.mark.slow
def test_many_samples_are_thinned_and_the_caption_says_so(tmp_path: Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=["cars"], size=Size(blocks=1, samples=MOST + 20))
    drawn = draw("intro", open_run(path))
    assert len(values(drawn, "x", variant="merged")) == MOST
    assert f"{MOST} of {MOST + 20} samples are drawn" in drawn.text


@pytest.mark.slow
def test_fewer_samples_behind_jacobians_are_counted_apart(tmp_path: Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=["cars"])
    assert "needs a Jacobian" not in draw("amplification", open_run(path)).text
    with RunWriter.resume(path) as writer:
        rows = open_run(path).layers()
        writer.append("layers", rows.assign(jacobian_samples=16), replace=True)
    for name in ("amplification", "contributions"):
        caption = draw(name, open_run(path)).text
        assert "n = 24 samples" in caption and "needs a Jacobian: n = 16 of these samples" in caption
    assert "needs a Jacobian" not in draw("drift", open_run(path)).text, "nothing in it does"


@pytest.mark.parametrize(("factor", "start"), [("lam", "(a)"), ("alpha", "(b)"), ("rho", "(c)")])
def test_sweeps_are_means_over_seeds_of_means_over_tasks(run: DriftRun, factor: str, start: str) -> None:
    axes = panel(draw("sweeps", run), start)
    mean, spread = _reference(run, factor)
    np.testing.assert_allclose(line_points(lines(axes)[0]), np.column_stack([POINTS[factor], mean]))
    (ends,) = segments(axes)
    np.testing.assert_allclose((ends[:, 1] - ends[:, 0])[:, 1] / 2, spread, rtol=1e-9)


def _reference(run: DriftRun, factor: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation over seeds, in loops."""
    mean, spread = [], []
    for value in POINTS[factor]:
        by_seed: dict[int, list[float]] = {}
        for row in run.sweeps().to_dict("records"):
            if row["sweep"] == factor and row[factor] == value:
                by_seed.setdefault(row["seed"], []).append(row["accuracy"])
        averages = [statistics.fmean(found) for found in by_seed.values()]
        mean.append(statistics.fmean(averages))
        spread.append(statistics.stdev(averages))
    return mean, spread


def test_a_line_marks_the_own_setting(run: DriftRun) -> None:
    drawn = draw("sweeps", run)
    guides = {
        start: [line for line in panel(drawn, start).lines if line.get_label() == "_guide"]
        for start in ("(a)", "(b)", "(c)")
    }
    for start, own in (("(a)", 0.05), ("(b)", 0.3), ("(c)", 2.0)):
        (guide,) = guides[start]
        assert set(np.asarray(guide.get_xdata(), float)) == {own}


def test_a_seed_that_lacks_a_task_makes_no_average(tmp_path: Path) -> None:
    path = tmp_path / "run"
    full = figure_run(path)
    torn = full.sweeps()
    is_torn = (torn["sweep"] == "n") & (torn["seed"] == 2) & (torn["task"] == "cars")
    with RunWriter.resume(path) as writer:
        writer.append("sweeps", torn[is_torn].assign(accuracy=np.nan), replace=True)
    caption = draw("efficiency", open_run(path)).text
    assert "mean over 2 seeds" in caption and "mean over 3 seeds" in draw("efficiency", full).text


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    drawn = draw("efficiency", figure_run(tmp_path / "run", seeds=(4,)))
    assert not values(drawn, "accuracy (average over tasks), std over seeds")
    assert "One seed per point, so no spread is shown." in drawn.text


@pytest.mark.slow
def test_lambda_zero_is_left_out_and_mentioned(tmp_path: Path) -> None:
    path = tmp_path / "run"
    zero = figure_run(path).sweeps().query("sweep == 'lam' and point == 0").assign(point=9, lam=0.0)
    with RunWriter.resume(path) as writer:
        writer.append("sweeps", zero)
    drawn = draw("sweeps", open_run(path))
    assert "λ = 0 was measured too" in drawn.text
    assert (drawn.data["lam"].dropna() > 0).all()


@pytest.mark.slow
def test_runs_have_a_line_each_and_names_of_their_own(run: DriftRun, tmp_path: Path) -> None:
    twin = figure_run(tmp_path / "twin", name="upstream")
    said = words(draw("sweeps", run, twin).figure)
    assert run.id in said and twin.id in said
    colours = [line.get_color() for line in lines(panel(draw("sweeps", run, twin), "(a)"))]
    assert len(set(colours)) == 2


@pytest.mark.slow
def test_only_the_tasks_asked_for_are_shown(run: DriftRun) -> None:
    for name in ("intro", "scatter-grid", "output-drift", "drift"):
        assert set(draw(name, run, tasks=("mnist",)).data["task"].dropna()) == {"mnist"}


@pytest.mark.parametrize("options", [{"task": "dogs"}, {"tasks": ("dogs",)}, {"calibrated": "calibrated:no"}])
def test_what_the_run_lacks_is_refused_by_name(run: DriftRun, options: dict[str, object]) -> None:
    with pytest.raises(DataError, match="the run has no") as caught:
        draw("intro", run, **options)
    assert any(name in caught.value.message for name in ("cars", "merged"))


@pytest.mark.slow
def test_another_calibrated_variant_can_be_chosen(tmp_path: Path) -> None:
    path = write_full_run(tmp_path / "run", variants=[*VARIANTS, "calibrated:second"])
    run = open_run(path)
    shown = set(draw("decomposition", run).data["variant"])
    assert shown == {"merged", "calibrated:second"}
    chosen = set(draw("decomposition", run, calibrated=CALIBRATED).data["variant"])
    assert chosen == {"merged", CALIBRATED}


def test_rows_say_which_run_they_come_from(run: DriftRun) -> None:
    data: pd.DataFrame = draw("drift", run).data
    assert set(data["run"]) == {run.id}
