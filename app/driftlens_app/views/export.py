"""Export: reports to read and hand on, figures and tables for a paper."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import streamlit as st

from driftlens.results.formatting import format_bytes
from driftlens.runs.run import DriftRun
from driftlens_app.run_cache import run_cache_key
from driftlens_app.selection import current_selection
from driftlens_app.show import Page, escape_markdown, select_page_part, show_errors_in_place, show_note
from driftlens_reports.build import FORMATS, Report
from driftlens_reports.paper.exhibit import WIDTHS, ExhibitOptions, exhibits
from driftlens_reports.sections import PRESETS

PAGE = Page(
    "Export",
    icon=":material/description:",
    order=60,
    says="Reports, and figures and tables for a paper.",
)

_BUILT = "_built"
_FORMATS = {
    "html": "HTML, interactive",
    "html-light": "HTML without scripts, for mail",
    "json": "JSON",
    "md": "Markdown, for a pull request",
    "csv": "CSV, a file per table",
    "latex": "LaTeX, a file per table",
}
_EXHIBIT_FORMATS = {"figure": ("pdf", "png", "csv", "json", "txt"), "table": ("tex", "csv", "json", "txt")}
_MOST_PREVIEW = 5_000_000

Files = Mapping[str, bytes]
"""Contents of a report or exhibit by file name."""


def zip_files(files: Files) -> bytes:
    """Return a ZIP archive of the files, byte-identical for the same files."""
    # `ZipInfo` has a constant date, unlike `write`, which stores the current time.
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return target.getvalue()


def show() -> None:
    """Draw the page Export: report and paper figures for download."""
    run = current_selection().run
    parts = {"Report": _show_report_part, "Figures and tables": _show_exhibits_part}
    parts[select_page_part([*parts], key="export")](run)
    line = "from driftlens.integrations.tracking import to_run; "
    line += f"to_run({str(run.path)!r}, 'PROJECT', library='trackio')"
    st.markdown(f"In Python, `{line}` logs the run to trackio, and `library='wandb'` to Weights & Biases.")


def _show_report_part(run: DriftRun) -> None:
    with st.form("report", border=False):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            preset = st.selectbox("Sections", [*PRESETS], index=[*PRESETS].index("standard"), key="preset", width=180)
            selected = st.multiselect(
                "Formats",
                [*FORMATS],
                default=["html", "html-light"],
                format_func=_FORMATS.__getitem__,
                key="formats",
                width=760,
            )
        pressed = st.form_submit_button("Build the report", type="primary", icon=":material/description:")
    report = Report(run, preset)
    built = _built_files(run, "report", {name: partial(report.files, [name]) for name in selected}, pressed)
    for name, files in built.items():
        _show_download_button(run, name, files, _FORMATS[name])
    _show_report_preview(built)


def _show_exhibits_part(run: DriftRun) -> None:
    with st.form("exhibits", border=False):
        chosen = st.multiselect(
            "Figures and tables",
            [*exhibits],
            default=["intro", "decomposition"],
            format_func=lambda name: f"{name}: {exhibits[name].title}",
            key="exhibits",
        )
        style = st.selectbox("Width", [*WIDTHS], key="style", help="Text or column width of the venue.", width=180)
        pressed = st.form_submit_button("Draw them", type="primary", icon=":material/draw:")
    built = _built_files(
        run, "exhibits", {name: partial(_exhibit_files, run, name, style) for name in chosen}, pressed
    )
    for name, files in built.items():
        _show_download_button(run, name, files, exhibits[name].title)
        if picture := files.get(f"{name}.png"):
            st.image(picture, caption=escape_markdown(files[f"{name}.txt"].decode().strip()), alt=f"Figure {name}")


def _exhibit_files(run: DriftRun, name: str, style: str) -> Files:
    # Imports matplotlib, which no other page needs.
    from driftlens_reports.paper.exhibit import draw_exhibit

    drawn = draw_exhibit(name, [run], ExhibitOptions(style=style))
    return {f"{name}.{entry}": drawn.content(entry) for entry in _EXHIBIT_FORMATS[exhibits[name].kind]}


def _built_files(
    run: DriftRun, kind: str, makers: Mapping[str, Callable[[], Files]], pressed: bool
) -> Mapping[str, Files]:
    """Return the files built in this session for this state of the run; build them if the button was pressed."""
    if pressed and not makers:
        st.warning("Select at least one.", icon=":material/warning:")
    key, kept = run_cache_key(run), st.session_state.setdefault(_BUILT, {})
    if pressed:
        kept[kind] = key, {}
        for name, make in makers.items():
            with st.spinner(f"Building {name}"), show_errors_in_place():
                kept[kind][1][name] = make()
    built_of, built = kept.get(kind, (key, {}))
    return built if built_of == key else {}


def _show_download_button(run: DriftRun, name: str, files: Files, label: str) -> None:
    """Show a download button for one file, or for a ZIP archive of several."""
    single = [*files] if len(files) == 1 else []
    st.download_button(
        f"{escape_markdown(label)} ({format_bytes(sum(map(len, files.values())))})",
        data=partial(files.__getitem__, single[0]) if single else partial(zip_files, files),
        file_name=f"{run.id}-{Path(single[0]).name if single else f'{name}.zip'}",
        on_click="ignore",
        icon=":material/download:",
        key=f"download-{name}",
    )


def _show_report_preview(built: Mapping[str, Files]) -> None:
    # Only the page without scripts: a frame on this site could read the dashboard.
    if "html-light" not in built:
        st.caption("To preview the report, select HTML without scripts.")
        return
    page = built["html-light"]["report-light.html"].decode()
    if len(page) > _MOST_PREVIEW or "<script" in page.lower():
        show_note("The report is too large to preview; download it.")
        return
    st.header("Preview", anchor=False)
    st.iframe(page, height=800, alt="Preview of the report")


if __name__ == "__main__":
    show()
