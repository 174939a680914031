"""Plotted numbers against references computed from the tables in another way."""

from __future__ import annotations

import pathlib
import statistics

import matplotlib.axes
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from driftlens.base.errors import DataError
from driftlens.findings.arena import arena_rows
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens_reports.charts.theme import look
from driftlens_reports.paper.exhibit import Exhibited
from driftlens_reports.paper.features import MOST
from driftlens_reports.paper.published import published_tables
from tests.records.full_run import VARIANTS, Size, write_full_run
from tests.reports.paper.drawn import (
    bands,
    bars,
    draw,
    images,
    line_points,
    lines,
    segments,
    words,
)
from tests.reports.paper.figure_runs import POINTS, figure_run

CONTROL, CALIBRATED = "baseline:featcal-anchor", "calibrated:featcal"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return figure_run(tmp_path_factory.mktemp("runs") / "run", name="upstream")


def panel(drawn: Exhibited, start: str) -> matplotlib.axes.Axes:
    """The panel, or the first of a part of the figure, whose heading starts so."""
    assert drawn.figure is not None
    headed = [axes for axes in drawn.figure.axes if axes.get_title(loc="left").startswith(start)]
    headed += [part.axes[0] for part in parts(drawn.figure) if part.get_suptitle().startswith(start)]
    (axes,) = headed
    return axes


def parts(figure: Figure | SubFigure) -> list[SubFigure]:
    """All parts of a figure, however deep."""
    return [inner for part in figure.subfigs for inner in (part, *parts(part))]


def colour_of(run: DriftRun, variant: str) -> str:
    return look(run.variants, variant, dark=False).colour


def values(drawn: Exhibited, quantity: str, **key: str) -> list[float]:
    rows = drawn.data[drawn.data["quantity"] == quantity]
    for column, wanted in key.items():
        rows = rows[rows[column] == wanted]
    return rows["value"].tolist()


def worst_task(run: DriftRun) -> str:
    return max(run.tasks, key=lambda task: run.value("drift_l2_mean", task=task))


def test_intro_shows_the_task_that_drifts_most_unless_told(run: DriftRun) -> None:
    other = next(task for task in run.tasks if task != worst_task(run))
    assert panel(draw("intro", run), "(b)").get_title(loc="left") == worst_task(run)
    assert panel(draw("intro", run, task=other), "(b)").get_title(loc="left") == other


def test_intro_lines_are_mean_drifts_in_the_look_of_their_variant(run: DriftRun) -> None:
    body, head = body_and_head(draw("intro", run))
    drawn, last = ({line.get_color(): line for line in lines(axes)} for axes in (body, head))
    for variant in ("merged", CONTROL, CALIBRATED):
        rows = run.layers(worst_task(run), variant)
        expected = rows[["layer", "drift_l2_mean"]].to_numpy(dtype=float)
        found = np.concatenate([line_points(part[colour_of(run, variant)]) for part in (drawn, last)])
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def body_and_head(drawn: Exhibited) -> tuple[Axes, Axes]:
    """Panel (b) and the head's own beside it."""
    body = panel(drawn, "(b)")
    axes = list(body.get_figure(root=True).axes)
    return body, axes[axes.index(body) + 1]


def test_intro_bands_run_between_the_10_and_90_percent_quantiles(run: DriftRun) -> None:
    shown = ("merged", CONTROL, CALIBRATED)
    for band, variant in zip(bands(panel(draw("intro", run), "(b)")), shown, strict=True):
        for layer, rows in run.layers(worst_task(run), variant).query("role != 'head'").groupby("layer"):
            heights = band[band[:, 0] == layer][:, 1]
            assert heights.min() == pytest.approx(rows["drift_l2_q10"].iloc[0])
            assert heights.max() == pytest.approx(rows["drift_l2_q90"].iloc[0])


def test_intro_box_tells_the_change_at_the_final_layer(run: DriftRun) -> None:
    drawn, task = draw("intro", run), worst_task(run)
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


def test_intro_bars_and_intervals_are_those_of_the_accuracy_table(run: DriftRun) -> None:
    axes, shown = panel(draw("intro", run), "(c)"), ("base", "merged", CONTROL, CALIBRATED, "expert")
    rows = run.accuracy().set_index(["variant", "task"])
    keys = [(variant, task) for variant in shown for task in run.tasks]
    drawn = np.array(bars(axes)).reshape(len(shown), len(run.tasks) + 1)
    single = drawn[:, :-1].ravel().tolist()
    assert [bar.get_height() for bar in single] == pytest.approx(rows.loc[keys, "value"].tolist())
    means = [rows.loc[variant, "value"].mean() for variant in shown]
    assert [bar.get_height() for bar in drawn[:, -1]] == pytest.approx(means)
    ends = np.concatenate(segments(axes))[:, :, 1].reshape(len(shown), -1, 2)[:, : len(run.tasks)]
    np.testing.assert_allclose(
        ends.reshape(-1, 2), rows.loc[keys, ["ci_low", "ci_high"]].to_numpy(dtype=float)
    )
    for bar, (_, task) in zip(single, keys, strict=True):
        assert round(bar.get_x() + bar.get_width() / 2) == run.tasks.index(task)
        assert bar.get_y() == 0 == axes.get_ylim()[0]


def test_many_samples_are_thinned_and_the_caption_says_so(tmp_path: pathlib.Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=["cars"], size=Size(blocks=1, samples=MOST + 20))
    drawn = draw("intro", open_run(path))
    assert len(values(drawn, "x", variant="merged")) == MOST
    assert f"{MOST} of {MOST + 20} samples are drawn" in drawn.caption


def test_drawing_features_leaves_the_run_as_it_is(tmp_path: pathlib.Path) -> None:
    path = write_full_run(tmp_path / "run")
    before = sorted(file for file in path.rglob("*"))
    draw("intro", open_run(path))
    assert sorted(file for file in path.rglob("*")) == before


@pytest.mark.parametrize("baseline", [None, CONTROL], ids=["merged by default", "anchor on request"])
def test_gains_are_counted_from_the_baseline(run: DriftRun, baseline: str | None) -> None:
    drawn, start = draw("diagnostics", run, baseline=baseline), baseline or "merged"
    accuracy = run.accuracy().set_index(["task", "variant"])["value"]
    expected = [
        (
            run.value("cos_mean", task=task, variant=CALIBRATED)
            - run.value("cos_mean", task=task, variant=start),
            100 * (accuracy[task, CALIBRATED] - accuracy[task, start]),
        )
        for task in run.tasks
    ]
    shown = {line.get_markerfacecolor(): line for line in lines(panel(drawn, "(c)"))}
    np.testing.assert_allclose(line_points(shown[colour_of(run, CALIBRATED)]), expected, rtol=1e-12)
    assert [text.get_text() for text in panel(drawn, "(c)").texts] == list(run.tasks)


def test_mean_gain_is_the_mean_over_matched_samples(run: DriftRun) -> None:
    drawn, task = draw("diagnostics", run), worst_task(run)
    before, after = (
        run.samples(task, variant, "final").set_index("sample_id")["cos"]
        for variant in ("merged", CALIBRATED)
    )
    gain = statistics.fmean(after[sample] - before[sample] for sample in before.index)
    assert values(drawn, "mean gain of cos", variant=CALIBRATED) == pytest.approx([gain])
    assert f"+{gain:.3f}" in words(drawn.figure)
    shown = {line.get_markerfacecolor(): line for line in lines(panel(drawn, "(b)"))}
    np.testing.assert_array_equal(
        line_points(shown[colour_of(run, CALIBRATED)]), np.column_stack([before, after[before.index]])
    )


def test_averages_over_tasks_are_means_of_the_dots_above_them(run: DriftRun) -> None:
    drawn = draw("diagnostics", run)
    for variant in ("merged", CONTROL, CALIBRATED):
        dots = [run.value("cos_mean", task=task, variant=variant) for task in run.tasks]
        assert values(drawn, "cos_mean (average over tasks)", variant=variant) == pytest.approx(
            [statistics.fmean(dots)]
        )


def test_no_average_is_drawn_over_some_of_the_tasks(tmp_path: pathlib.Path) -> None:
    path = write_full_run(tmp_path / "run")
    with RunWriter.resume(path) as writer:
        row = open_run(path).layers("cars", "merged", "final").assign(cos_mean=np.nan)
        writer.append("layers", row, replace=True)
    drawn = draw("diagnostics", open_run(path))
    assert len(values(drawn, "cos_mean", variant="merged")) == 2
    assert not values(drawn, "cos_mean (average over tasks)", variant="merged")
    assert values(drawn, "cos_mean (average over tasks)", variant=CALIBRATED)


@pytest.mark.slow
def test_a_layer_without_a_number_is_a_gap_in_lines_and_maps(tmp_path: pathlib.Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=["cars"])
    with RunWriter.resume(path) as writer:
        row = open_run(path).layers("cars", "merged", 3).assign(drift_l2_mean=np.nan, drift_rel=np.nan)
        writer.append("layers", row, replace=True)
    gappy = open_run(path)
    drawn = draw("intro", gappy)
    line = lines(panel(drawn, "(b)"))[0]
    assert np.isnan(np.asarray(line.get_ydata(), float)).tolist() == [False, False, True, False, False]
    (grid,) = images(panel(draw("heatmap", gappy), "merged"))
    assert np.isnan(grid).nonzero()[1].tolist() == [2]
    assert "1 cell without a number" in draw("heatmap", gappy).caption


def test_heatmaps_share_one_scale_from_zero(run: DriftRun) -> None:
    figure, shown = draw("heatmap", run).figure, ("merged", CONTROL, CALIBRATED)
    largest = run.layers()["drift_rel"][run.layers()["variant"].isin(shown)].max()
    for axes, variant in zip(figure.axes[:3], shown, strict=True):
        assert axes.collections[0].get_clim() == (0, largest)
        table = run.layers(variant=variant).pivot(index="task", columns="layer", values="drift_rel")
        np.testing.assert_array_equal(images(axes)[0], table.loc[list(run.tasks)].to_numpy())


def test_contributions_with_their_rest_sum_to_one(run: DriftRun) -> None:
    drawn = draw("contributions", run)
    stacks: dict[float, float] = {}
    for bar in bars(panel(drawn, "(a)")):
        stacks[bar.get_y()] = stacks.get(bar.get_y(), 0.0) + bar.get_width()
    assert list(stacks.values()) == pytest.approx([1.0] * 3)
    for variant in ("merged", CONTROL, CALIBRATED):
        assert sum(values(drawn, "prefix_share", variant=variant)) == pytest.approx(1)


def test_the_jacobian_band_is_as_wide_as_the_error_says(run: DriftRun) -> None:
    axes = draw("amplification", run).figure.axes[0]
    rows = run.layers(worst_task(run), "merged").set_index("layer").loc[4]
    heights = bands(axes)[0][bands(axes)[0][:, 0] == 4][:, 1]
    off = rows["amplification"] * rows["jacobian_error"]
    assert [heights.min(), heights.max()] == pytest.approx(
        [rows["amplification"] - off, rows["amplification"] + off], rel=1e-12
    )


@pytest.mark.slow
def test_fewer_samples_behind_jacobians_are_counted_apart(tmp_path: pathlib.Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=["cars"])
    assert "need a Jacobian" not in draw("amplification", open_run(path)).caption
    with RunWriter.resume(path) as writer:
        rows = open_run(path).layers()
        writer.append("layers", rows.assign(jacobian_samples=16), replace=True)
    for name in ("amplification", "contributions"):
        caption = draw(name, open_run(path)).caption
        assert "24 diagnosis samples" in caption and "need a Jacobian: n = 16 of them" in caption


def test_shares_of_decisions_are_means_over_samples(run: DriftRun) -> None:
    drawn = draw("output-drift", run)
    for quantity in ("certified", "flipped"):
        for task in run.tasks:
            flags = run.outputs(task, CALIBRATED)[quantity].tolist()
            share = sum(flags) / len(flags)
            assert values(drawn, f"share {quantity}", task=task, variant=CALIBRATED) == pytest.approx([share])


def test_flipped_and_kept_decisions_are_all_of_the_task(run: DriftRun) -> None:
    drawn = draw("output-drift", run)
    for variant in ("merged", CONTROL, CALIBRATED):
        flags = run.outputs(worst_task(run), variant)["flipped"]
        assert sum(values(drawn, "flipped decisions", variant=variant)) == flags.sum()
        assert sum(values(drawn, "kept decisions", variant=variant)) == (~flags.astype(bool)).sum()


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


def test_the_own_setting_is_ringed_or_lined_where_it_was_not_swept(run: DriftRun) -> None:
    drawn = draw("sweeps", run)
    guides = {
        start: [line for line in panel(drawn, start).lines if line.get_label() == "_guide"]
        for start in ("(a)", "(b)", "(c)")
    }
    for start, own in (("(a)", 0.05), ("(b)", 0.3), ("(c)", 2.0)):
        (guide,) = guides[start]
        assert set(np.asarray(guide.get_xdata(), float)) == {own}
        assert (guide.get_marker() == "o") == (start != "(b)")


def test_a_seed_that_lacks_a_task_makes_no_average(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run"
    full = figure_run(path)
    torn = full.sweeps()
    is_torn = (torn["sweep"] == "n") & (torn["seed"] == 2) & (torn["task"] == "cars")
    with RunWriter.resume(path) as writer:
        writer.append("sweeps", torn[is_torn].assign(accuracy=np.nan), replace=True)
    caption = draw("data-efficiency", open_run(path)).caption
    assert "mean over 2 seeds" in caption and "mean over 3 seeds" in draw("data-efficiency", full).caption


def test_one_seed_has_no_spread(tmp_path: pathlib.Path) -> None:
    drawn = draw("data-efficiency", figure_run(tmp_path / "run", seeds=(4,)))
    assert not values(drawn, "accuracy (average over tasks), std over seeds")
    assert "One seed per point, so no spread is shown." in drawn.caption


def test_lambda_zero_is_left_out_and_mentioned(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run"
    zero = figure_run(path).sweeps().query("sweep == 'lam' and point == 0").assign(point=9, lam=0.0)
    with RunWriter.resume(path) as writer:
        writer.append("sweeps", zero)
    drawn = draw("sweeps", open_run(path))
    assert "λ = 0 was measured too" in drawn.caption
    assert (drawn.data["lam"].dropna() > 0).all()


def test_runs_have_a_line_each_and_names_of_their_own(run: DriftRun, tmp_path: pathlib.Path) -> None:
    twin = figure_run(tmp_path / "twin", name="upstream")
    said = words(draw("sweeps", run, twin).figure)
    assert run.id in said and twin.id in said
    colours = [line.get_color() for line in lines(panel(draw("sweeps", run, twin), "(a)"))]
    assert len(set(colours)) == 2


def test_printed_curves_are_the_papers_and_look_it(run: DriftRun) -> None:
    assert set(draw("data-efficiency", run).data["source"]) == {"measured"}
    drawn = draw("data-efficiency", run, paper=True)
    table = published_tables()["tab:ta8-full-data-efficiency"]
    hollow = [line for line in lines(drawn.figure.axes[0]) if line.get_markerfacecolor() == "white"]
    assert len(hollow) == len(table.rows)
    for line, row in zip(hollow, table.rows, strict=True):
        np.testing.assert_allclose(line_points(line)[:, 1] * 100, list(row.values.values()), rtol=1e-12)
        assert line.get_linestyle() != "-"
    assert f"as printed in {table.number}" in drawn.caption
    marked = drawn.data[drawn.data["source"] == "paper"]
    assert marked["run"].isna().all() and set(marked["variant"]) == {row.name for row in table.rows}


def test_self_checks_stand_at_their_largest_error(run: DriftRun) -> None:
    drawn = draw("self-checks", run)
    layers = run.layers()
    assert values(drawn, "error of closure") == [layers["closure_error"].max()]
    assert values(drawn, "error of Jacobian") == [layers["jacobian_error"].max()]
    axes = drawn.figure.axes[0]
    limits = line_points(lines(axes)[0])[:, 0]
    assert limits.tolist() == [bar.get_x() + bar.get_width() for bar in bars(axes)]


def test_only_the_tasks_asked_for_are_shown(run: DriftRun) -> None:
    for name in ("intro", "diagnostics", "scatter-grid", "output-drift", "heatmap"):
        assert set(draw(name, run, tasks=("mnist",)).data["task"].dropna()) == {"mnist"}


@pytest.mark.parametrize(
    "options", [{"task": "dogs"}, {"tasks": ("dogs",)}, {"calibrated": "calibrated:no"}, {"baseline": "no"}]
)
def test_what_the_run_lacks_is_refused_by_name(run: DriftRun, options: dict[str, object]) -> None:
    with pytest.raises(DataError, match="the run has no") as caught:
        draw("diagnostics", run, **options)
    assert any(name in caught.value.message for name in ("cars", "merged"))


@pytest.mark.slow
def test_another_calibrated_variant_can_be_chosen(tmp_path: pathlib.Path) -> None:
    path = write_full_run(tmp_path / "run", variants=[*VARIANTS, "calibrated:second"])
    run = open_run(path)
    shown = set(draw("decomposition", run).data["variant"])
    assert shown == {"merged", "calibrated:second"}
    chosen = set(draw("decomposition", run, calibrated=CALIBRATED).data["variant"])
    assert chosen == {"merged", CONTROL, CALIBRATED}


def test_repairs_stand_where_the_arena_puts_them(tmp_path: pathlib.Path) -> None:
    run = open_run(write_full_run(tmp_path / "run", variants=[*VARIANTS, "calibrated:second"]))
    found = draw("repairs", run)
    data = found.data.set_index(["model", "quantity"])["value"]
    rows = {row["model"]: row for row in arena_rows(run)}
    assert {"featcal", "second"} <= set(found.data["model"]) == set(rows)
    for model, row in rows.items():
        assert data[model, "accuracy"] == row["score"] and data[model, "ci_low"] == row["low"]
    assert data["second", "seconds"] == rows["second"]["seconds"]
    axes = found.figure.axes[0]
    assert axes.get_xscale() == "log" and len(axes.get_xticks()) >= 2


def test_rows_say_which_run_they_come_from(run: DriftRun) -> None:
    data: pd.DataFrame = draw("heatmap", run).data
    assert set(data["run"]) == {run.id} and set(data["source"]) == {"measured"}
