"""Export: whether the run's checks hold, reports to read and hand on, figures and tables for a paper."""

from __future__ import annotations

import io
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import streamlit as st

from driftlens.findings.checks import self_checks
from driftlens.findings.reading import size
from driftlens.runs.run import DriftRun
from driftlens.runs.status import Failure
from driftlens_app import processes
from driftlens_app.processes import told_failure
from driftlens_app.runs import key_of
from driftlens_app.selection import selection
from driftlens_app.show import Page, caption, note, open_part, plain, show_error, show_sheet
from driftlens_reports.build import formats
from driftlens_reports.paper.exhibit import exhibits
from driftlens_reports.paper.style import WIDTHS
from driftlens_reports.sections import PRESETS

PAGE = Page(
    "Export",
    icon=":material/description:",
    order=60,
    says="The run as a report, and as figures and tables for a paper.",
)

_BUILT = "_built"
_FORMATS = {
    "html": "HTML, interactive",
    "html-light": "HTML without scripts, for mail",
    "json": "JSON",
    "md": "Markdown, for a pull request",
    "csv": "CSV, a file per table",
    "latex": "LaTeX",
}
_EXHIBIT_FORMATS = "pdf,png,tex,csv"
_MOST_PREVIEW = 5_000_000
_LOG_LINES = 20


@dataclass(frozen=True)
class Built:
    """What one command wrote, by path relative to its folder; or its own message and hint, and the end of its log."""

    name: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    problem: str = ""
    hint: str = ""
    log: str = ""

    def download(self) -> bytes:
        """The one file to hand out: the only one there is, or an archive of all."""
        return next(iter(self.files.values())) if len(self.files) == 1 else zipped(self.files)

    @property
    def file_name(self) -> str:
        """Name of the one file to hand out."""
        return Path(next(iter(self.files))).name if len(self.files) == 1 else f"{self.name}.zip"


def build(name: str, arguments: Sequence[str], folder: Path) -> Built:
    """Run `driftlens ARGUMENTS --out ...` in `folder` and collect what it wrote."""
    with tempfile.TemporaryDirectory(prefix="driftlens-") as scratch:
        out = Path(scratch) / "out"
        try:
            done = processes.answer([*arguments, "--out", str(out)], folder)
        except subprocess.TimeoutExpired:
            return Built(name, problem=f"it took longer than {processes.PATIENCE_SECONDS:.0f} seconds")
        log = "\n".join((done.stdout + done.stderr).replace(scratch, "").splitlines()[-_LOG_LINES:])
        if done.returncode:
            silent = Failure("Error", f"it ended with exit code {done.returncode}")
            failure = told_failure(done.stderr.replace(scratch, "")) or silent
            return Built(name, problem=failure.message, hint=failure.hint, log=log)
        files = {
            path.relative_to(out).as_posix(): path.read_bytes()
            for path in sorted(out.rglob("*"))
            if path.is_file()
        }
        return Built(name, files, problem="" if files else "it wrote nothing", log=log)


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A ZIP archive of the files, the same bytes every time."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return target.getvalue()


def show() -> None:
    """Draw the page."""
    run = selection().run
    parts = {"Report": _report, "Figures and tables": _exhibits, "Checks": _checks}
    parts[open_part([*parts], key="export")](run)


def _report(run: DriftRun) -> None:
    with st.form("report", border=False):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            preset = st.selectbox(
                "Sections", [*PRESETS], index=[*PRESETS].index("standard"), key="preset", width=180
            )
            wanted = st.multiselect(
                "Formats",
                formats(),
                default=["html", "html-light"],
                format_func=lambda name: _FORMATS.get(name, name),
                key="formats",
                width=760,
            )
        raw = st.checkbox("With charts and tables of single samples", key="raw")
        pressed = st.form_submit_button("Build the report", type="primary", icon=":material/description:")
    commands = {
        name: ("report", str(run.path), "--format", name, "--sections", preset, *(["--raw"] if raw else []))
        for name in wanted
    }
    built = _built(run, "report", commands, pressed)
    for entry in built:
        _offer(run, entry, _FORMATS.get(entry.name, entry.name))
    _preview(built)


def _exhibits(run: DriftRun) -> None:
    with st.form("exhibits", border=False):
        chosen = st.multiselect(
            "Figures and tables",
            [*exhibits],
            default=["intro", "decomposition"],
            format_func=lambda name: f"{name}: {exhibits[name].title}",
            key="exhibits",
        )
        style = st.selectbox(
            "Width", [*WIDTHS], key="style", help="Text or column width of the venue.", width=180
        )
        pressed = st.form_submit_button("Draw them", type="primary", icon=":material/draw:")
    commands = {
        name: (
            *("export", str(run.path), f"--{exhibits[name].kind}", name),
            *("--style", style, "--format", _EXHIBIT_FORMATS),
        )
        for name in chosen
    }
    for entry in _built(run, "exhibits", commands, pressed):
        _offer(run, entry, exhibits[entry.name].title)
        for name, data in entry.files.items():
            if name.endswith(".png"):
                caption = entry.files.get(f"{entry.name}.txt", b"").decode("utf-8", errors="replace").strip()
                st.image(data, caption=plain(caption), alt=f"Figure {entry.name}")


def _built(run: DriftRun, kind: str, commands: dict[str, tuple[str, ...]], pressed: bool) -> list[Built]:
    """What was built for this reader of the run as it is now; builds it when the button was pressed."""
    if pressed and not commands:
        st.warning("Choose at least one.", icon=":material/warning:")
    key = key_of(run)
    kept = st.session_state.setdefault(_BUILT, {})
    if pressed:
        every = []
        for name, arguments in commands.items():
            with st.spinner(f"Building {name}"):
                every.append(build(name, arguments, run.path.parent))
        kept[kind] = (key, every)
    built = kept.get(kind)
    return built[1] if built is not None and built[0] == key else []


def _offer(run: DriftRun, built: Built, label: str) -> None:
    """A button that downloads what was built; where it failed, why."""
    if built.problem:
        show_error(f"{label} could not be built", built.problem, built.hint)
        if built.log:
            with st.expander(f"Log of {plain(built.name)}"):
                st.code(built.log, language=None, wrap_lines=True)
        return
    length = size(sum(map(len, built.files.values())))
    st.download_button(
        f"{plain(label)} ({length})",
        data=built.download,
        file_name=f"{run.id}-{built.file_name}",
        on_click="ignore",
        icon=":material/download:",
        key=f"download-{built.name}",
    )


def _preview(built: list[Built]) -> None:
    """The light page in a frame: it holds no script, and its own policy would stop one."""
    pages = [
        data.decode() for entry in built for name, data in entry.files.items() if name == "report-light.html"
    ]
    if not built:
        st.caption("What is built appears here: downloads, and a preview of the HTML without scripts.")
        return
    if not pages:
        st.caption("Choose the HTML without scripts to preview the report here.")
        return
    if len(pages[0]) > _MOST_PREVIEW or "<script" in pages[0].lower():
        note("The report is too large to preview; download it.")
        return
    st.header("Preview", anchor=False)
    st.iframe(pages[0], height=800, alt="Preview of the report")


def _checks(run: DriftRun) -> None:
    caption(
        "Claims that are exact in theory, tested on this run. `driftlens check RUN --tests FILE` holds it against "
        "bounds of your own."
    )
    show_sheet(self_checks(run).table("self-checks", "Self-checks", "error"))


if __name__ == "__main__":
    show()
