"""Overview: the verdict as a headline and a picture, the next step, scores by task, sources of drift, and facts."""

from __future__ import annotations

import shlex
import zlib
from typing import Any
from urllib.parse import urlencode

import pandas as pd
import streamlit as st
from streamlit.column_config import AreaChartColumn, NumberColumn

from driftlens.results.checks import CheckReport, run_self_checks
from driftlens.results.formatting import NOT_MEASURED, Table, format_bytes, is_measured
from driftlens.results.verdict import Verdict, caveat_sentences as stamps_of, task_table, verdict
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import pluralize
from driftlens.utils.variants import display_name
from driftlens_app.job_panel import (
    COMPARE_MERGES,
    offer_attribution,
    recommended_steps,
    show_failed_job,
    show_live_job,
    show_step_buttons,
)
from driftlens_app.processes import has_live_job, poll_job
from driftlens_app.sample_explorer import open_explorer
from driftlens_app.selection import TASK, Selection, current_selection, select_value
from driftlens_app.settings import Settings
from driftlens_app.show import (
    Page,
    cached_chart,
    escape_markdown,
    format_time,
    is_narrow,
    show_before_after,
    show_caption,
    show_drawn_chart,
    show_errors_in_place,
    show_headline,
    show_note,
    show_page_title,
    show_table,
    sortable_table,
    verdict_markdown,
)
from driftlens_app.views.compare import show_merge_ranking
from driftlens_reports import facts
from driftlens_reports.charts.chart import charts

PAGE = Page("Overview", icon=":material/dashboard:", order=20)
_CELLS = "contributions-heatmap"
# More warnings on top would push the numbers off the screen.
_MAX_STAMPS = 3
# Characters of a task's name that fit on a button.
_LONG = 40


def show() -> None:
    """Draw the page Overview: headline, picture, verdict, scores by task and sources of drift."""
    chosen = current_selection()
    called = [f"{escape_markdown(chosen.run.name)} in its spec"] if chosen.run.name != chosen.run.path.name else []
    show_page_title(escape_markdown(chosen.name), " · ".join([*called, format_time(chosen.run.manifest.created)]))
    stamps = stamps_of(chosen.run)
    if stamps:
        st.warning("  \n".join(map(escape_markdown, stamps[:_MAX_STAMPS])), icon=":material/warning:")
    if more := stamps[_MAX_STAMPS:]:
        with st.expander(f"{len(more)} more", icon=":material/warning:"):
            st.markdown("\n".join(f"- {escape_markdown(stamp)}" for stamp in more))
    # A damaged table hides no more than what needs it.
    with show_errors_in_place():
        _show_headline_and_steps(chosen.run)
    show_before_after(chosen.run, chosen.options())
    with show_errors_in_place():
        _show_verdict(chosen.run)
    with show_errors_in_place():
        show_merge_ranking(Settings.from_environment(), chosen.run)
    with show_errors_in_place():
        _show_drift_sources(chosen)
    _show_provenance(chosen.run)


def _show_headline_and_steps(run: DriftRun) -> None:
    """Show the headline, and the button of what helps most; a live job's progress takes the place of buttons."""
    show_headline(run)
    judged, checks = verdict(run), run_self_checks(run)
    steps, _ = recommended_steps(run, judged)
    if not show_live_job(run.path):
        with st.container(horizontal=True, vertical_alignment="center"):
            over_base = judged.gap_between(judged.merged, "base")
            is_repaired_first = not run.manifest.calibrations and (over_base is None or over_base.side >= 0)
            # A merge that is no worse than its base is repaired first, which costs less than other merges.
            if steps == [COMPARE_MERGES] and is_repaired_first:
                show_step_buttons(run, ["Repair"], f"driftlens calibrate {shlex.quote(str(run.path))}", *steps)
            else:
                show_step_buttons(run, steps, judged.command, "Repair")
            _show_flipped_samples_button(run, judged)
            _show_self_checks(checks)
    show_failed_job(poll_job(run.path, "merge"))


def _show_verdict(run: DriftRun) -> None:
    """Show the verdict in words and by task."""
    judged = verdict(run)
    _, sentences = recommended_steps(run, judged)
    # A badge has this sentence.
    repeated = f"{_self_checks_label(run_self_checks(run))}."
    said = [text for text in sentences if text != repeated]
    with st.container(border=True, key="verdict"):
        st.markdown("\n\n".join(verdict_markdown(run, text, judged.command) for text in said))
    if judged.means:
        _show_task_table(run, judged)


def _show_flipped_samples_button(run: DriftRun, judged: Verdict) -> None:
    """Show a button that opens the flipped samples of the selected task, or of the task with most of them."""
    rows = run.outputs(variant=judged.merged)
    counts = rows[rows["flipped"].fillna(False).astype(bool)]["task"].value_counts()
    task = current_selection().task or next(iter(counts.index), "")
    if not counts.get(task, 0):
        return
    called = task if len(task) <= _LONG else f"{task[:_LONG]}…"
    label = f"See the {pluralize(counts[task], 'flipped sample')} of {escape_markdown(called)}"
    if st.button(
        label,
        icon=":material/scatter_plot:",
        key="to-samples",
        help="Samples on which it disagrees with the expert.",
    ):
        state = {"task": task, "stage": judged.merged, "only.flip": 1, "sort": "margin"}
        open_explorer(urlencode(state))


def _show_task_table(run: DriftRun, judged: Verdict) -> None:
    """Show scores with one row per task, worst first; a click selects the task on all pages."""
    sheet = task_table(run, judged)
    rows, columns = _task_table(run, judged, sheet)
    tasks = rows["task"].tolist()
    key = f"tasks-{zlib.crc32(repr((run.id, tasks)).encode())}"

    def _select_clicked_task() -> None:
        ticked = st.session_state[key]["selection"]["cells"]
        if ticked:
            task = tasks[ticked[0][0]]
            select_value(TASK, None if task == current_selection().task else task)

    st.header(escape_markdown(sheet.title), anchor=False, help=escape_markdown(sheet.notes()))
    settings = {"on_select": _select_clicked_task, "selection_mode": "single-cell"}
    show_table(rows, columns, key=key, alt=sheet.title, **settings)
    # The first sentence without its numbers: measure, tasks and samples.
    counted = judged.sentences[0].partition(":")[0]
    st.caption(f"{counted}. Worst first. Click a row to select its task on every page, and again for all tasks.")


def _task_table(run: DriftRun, judged: Verdict, sheet: Table) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the verdict's table for the page (worst task first, without means) and its column settings."""
    # The headline's tiles have the means.
    numbers = sheet.frame()[: len(run.tasks)]
    heads = dict(zip(judged.means, [*sheet.column_formats][1:], strict=False))
    last = next(name for name in (judged.after, judged.merged) if name in heads)
    sign = 1 if judged.measure.worse == "lower" else -1
    left = numbers[heads[last]].astype(float)
    loss = sign * (numbers[heads["expert"]].astype(float) - left) if "expert" in heads else left
    numbers = numbers.loc[loss.sort_values(ascending=False, kind="stable").index]
    table, columns = sortable_table(sheet)
    columns |= {head: NumberColumn(format="%.3g") for head, kind in sheet.column_formats.items() if kind == "number"}
    rows = table.loc[numbers.index].assign(task=numbers["task"])
    layers = run.layers(variant=last).sort_values("layer")
    rows["by layer"] = rows["task"].map(layers.groupby("task")["drift_rel"].agg(list))
    about, top = "Relative drift from the first layer to the last, on one scale.", float(layers["drift_rel"].max())
    columns["by layer"] = AreaChartColumn("by layer", width=70, y_min=0.0, y_max=top, help=about)
    return rows.reset_index(drop=True), columns


def _show_drift_sources(chosen: Selection) -> None:
    variant = facts.explained_variant(chosen.run)
    whose = f"{display_name(variant)}'s" if variant else "the"
    st.header(
        escape_markdown(f"Where {whose} final drift comes from"),
        anchor=False,
        help="Each layer's share of each task's final drift, by attribution.",
    )
    # A live job is shown once, in the place of the buttons.
    is_offered = not has_live_job(chosen.run.path) and offer_attribution(chosen.run)
    options = chosen.options(variants=(variant,))
    if charts[_CELLS].missing(chosen.run, options) is not None:
        if not is_offered:
            show_note("This run has no attribution of drift to layers.")
        return
    drawn = cached_chart(_CELLS, chosen.run, charts[_CELLS].draw, options, narrow=is_narrow())
    show_drawn_chart(_CELLS, chosen.run.id, drawn)


def _self_checks_label(report: CheckReport) -> str:
    failed = len(report.failed)
    if not report.count("pass") and not failed:
        return "No self-check was measured"
    return f"Self-checks failed: {failed}" if failed else "Self-checks hold"


def _show_self_checks(report: CheckReport) -> None:
    """Show the error of every identity that is exact in theory, as a badge."""
    with st.popover(_self_checks_label(report), icon=f":material/{'warning' if report.failed else 'verified'}:"):
        for check in report.results:
            icon = "remove" if not is_measured(check.value) else "check" if check.status == "pass" else "warning"
            st.markdown(f":material/{icon}: {escape_markdown(facts.self_check_sentence(check))}")


def _show_provenance(run: DriftRun) -> None:
    manifest = run.manifest
    with st.expander("Provenance"):
        facts_of_run = {
            "id": run.id,
            "architecture": ", ".join(f"{name} {value}" for name, value in manifest.architecture.items()),
            "device": f"{manifest.device}, {manifest.dtype}",
            "seeds": ", ".join(f"{name} {seed}" for name, seed in manifest.seeds.items()),
            "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
            "platform": ", ".join(f"{name} {value}" for name, value in manifest.platform.items()),
            "spec": manifest.spec_digest,
            "size": format_bytes(sum(file.bytes for file in manifest.files.values()))
            if manifest.files
            else NOT_MEASURED,
            **{f"weights of {name}": model.digest for name, model in manifest.models.items()},
        }
        rows = pd.DataFrame(facts_of_run.items(), columns=["what", "value"])
        st.dataframe(rows, hide_index=True, key="provenance", alt="Provenance of the run")
        for notice in manifest.notices:
            show_caption(notice)


if __name__ == "__main__":
    show()
