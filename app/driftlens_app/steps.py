"""What to do next about a run, as buttons in the place of the command that its verdict names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import streamlit as st

from driftlens.findings.verdict import Verdict, shareable
from driftlens.runs.run import DriftRun
from driftlens_app.jobs.processes import is_at_work
from driftlens_app.jobs.requests import resume_request
from driftlens_app.live import begin
from driftlens_app.selection import lead

GO_ON = "Go on with the analysis"
_STEPS = {
    " --resume": GO_ON,
    " calibrate ": "Repair",
    " sweep ": "Repair",
    " report ": "Write a report",
}
"""The button that stands for a command, by what the command has in it; others are read and copied."""
_PAGES = {"Repair": ("build", "repair"), "Write a report": ("description", "export")}
"""Icon and page of a button."""


def steps_of(run: DriftRun, found: Verdict) -> tuple[list[str], list[str]]:
    """Buttons that stand for the verdict's command, and its sentences without what they or a job under way answer."""
    command = found.command.replace("'", "")
    steps = [] if is_at_work(run.path) else [label for part, label in _STEPS.items() if part in command][:1]
    is_answered = steps or is_at_work(run.path)
    return steps, [text for text in found.sentences if not (is_answered and f"`{found.command}`" in text)]


def show_steps(run: DriftRun, steps: Sequence[str], command: str, *others: str) -> None:
    """Buttons to press: first those that do what `command` does, then `others`."""
    for label in dict.fromkeys([*steps, *others]):
        icon, page = _PAGES.get(label, ("play_arrow", ""))
        kind: Literal["primary", "secondary"] = "primary" if label in steps else "secondary"
        about = shareable(run, command) if label in steps else None
        if st.button(label, type=kind, icon=f":material/{icon}:", key=f"to-{page or 'resume'}", help=about):
            if page:
                lead(page, run=run.id)
            begin(resume_request(run))
