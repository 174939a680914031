"""New run: write a spec from base, experts and data, or choose one that is there, and start its analysis."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from driftlens.utils.errors import SpecError
from driftlens.utils.files import list_folder, write_text_atomic
from driftlens_app import job_requests
from driftlens_app.calibration import available_methods
from driftlens_app.job_panel import show_new_run_jobs
from driftlens_app.processes import JobRequest, run_json_command, start_job
from driftlens_app.selection import open_page
from driftlens_app.settings import Settings, is_inside
from driftlens_app.show import Page, escape_except_code, show_errors_in_place, show_note
from driftlens_app.views.compare import show_merge_ranking

PAGE = Page(
    "New run",
    icon=":material/add_circle:",
    order=15,
    is_listed=False,
    needs_run=False,
    says="Choose a base model, experts and data; DriftLens writes the spec.",
)

_USUAL = "task_arithmetic"


def show() -> None:
    """Draw the page New run: forms that start an analysis."""
    settings = Settings.from_environment()
    if settings.is_single_run:
        show_note("The dashboard shows a single run. To add runs, open a folder: `driftlens ui FOLDER`.")
        return
    show_new_run_jobs(settings)
    if settings.read_only:
        show_note("This dashboard is read-only.", "lock")
    else:
        with show_errors_in_place():
            _show_models_form(settings)
        with show_errors_in_place():
            _show_spec_choice(settings)
    with show_errors_in_place():
        show_merge_ranking(settings)


def _show_models_form(settings: Settings) -> None:
    """Show a form for models and data; write a spec from it and start the analysis."""
    mergers = available_methods("merge_methods")
    names = sorted(mergers, key=lambda name: name != _USUAL)
    st.header("From models", anchor=False)
    with st.form("new-run", enter_to_submit=False):
        name = st.text_input("Name", key="new-name", help="Name of the run's folder and spec.")
        base = st.text_input("Base", key="base", placeholder="path in this folder, or Hub id")
        experts = st.text_area(
            "Experts",
            key="experts",
            placeholder="one per line: MODEL or TASK=MODEL",
            help="Paths in this folder or Hub ids. Without TASK=, the file name is the task.",
        )
        data = st.text_input(
            "Data folder",
            key="data",
            placeholder="built-in samples",
            help="A folder with an entry per task, or the data of all tasks.",
        )
        merged = st.text_input(
            "Merged model",
            key="merged",
            placeholder="merged by the method below",
            help="Path in this folder, or Hub id.",
        )
        method = st.selectbox("Merge method", names, format_func=lambda name: mergers[name].title, key="merge-method")
        pressed = st.form_submit_button(
            "Start the analysis", type="primary", icon=":material/play_arrow:", key="start-new"
        )
    if not pressed:
        return
    models = [line.strip() for line in experts.splitlines() if line.strip()]
    if not base.strip() or not models:
        raise SpecError("base or experts are missing", hint="Fill in both fields.")
    options = [f"--data={entry}" for entry in data_option_values(settings.root, data.strip(), models)]
    if merged.strip():
        options += ["--set=merge=null", f"--set=merged.weights={json.dumps(merged.strip())}"]
    else:
        options.append(f"--set=merge={json.dumps({'method': method})}")
    file = job_requests.new_spec_path(settings, name.strip())
    options.append(f"--set=name={json.dumps(name.strip())}")
    # `--` ends the options, so that no model name is read as one.
    with st.spinner("Reading configurations and data"):
        answer = run_json_command(("init", *options, "--json", "--", base.strip(), *models), settings.root)
    write_text_atomic(file, str(answer["spec"]))
    _start_and_open_runs_page(job_requests.analyze_request(settings, file.name, name.strip()))


def data_option_values(root: Path, folder: str, experts: Sequence[str]) -> list[str]:
    """Return values of `--data`: one folder entry per task if all have one, else the folder.

    Args:
        root: the dashboard's folder.
        folder: path of the data relative to the root; empty for built-in samples.
        experts: `MODEL` or `TASK=MODEL` each.
    """
    if not folder:
        return []
    place = root / folder
    if not is_inside(place, root) or not place.exists():
        raise SpecError(f"{folder} is not in {root}", hint="Move data into the dashboard's folder.")
    by_task = {entry.stem: entry.name for entry in list_folder(place)} if place.is_dir() else {}
    tasks = [_task_name(expert) for expert in experts]
    if all(task in by_task for task in tasks):
        return [f"{task}={folder.rstrip('/')}/{by_task[task]}" for task in tasks]
    return [folder]


def _task_name(expert: str) -> str:
    """Return the task in `TASK=MODEL`, or a name derived from the expert's file or folder."""
    task, sign, _ = expert.partition("=")
    return task.strip() if sign else re.sub(r"[^\w.-]+", "-", Path(expert).stem)


def _show_spec_choice(settings: Settings) -> None:
    """Show the spec files in the folder with a button that starts an analysis."""
    specs = job_requests.spec_files(settings.root)
    if not specs:
        return
    st.header("From a spec", anchor=False)
    spec = st.selectbox("Spec", specs, key="spec", help="YAML files in this folder and its subfolders.")
    name = st.text_input("Name of the folder", Path(spec).stem, key=f"name-of-{spec}")
    with st.container(horizontal=True, vertical_alignment="center"):
        pressed = st.button("Start the analysis", icon=":material/play_arrow:", key="start-analysis")
        st.caption(escape_except_code(f"To check it in a terminal: `driftlens validate {shlex.quote(spec)}`"))
    if pressed:
        _start_and_open_runs_page(job_requests.analyze_request(settings, spec, name.strip()))


def _start_and_open_runs_page(request: JobRequest) -> None:
    start_job(request)
    open_page("runs")


if __name__ == "__main__":
    show()
