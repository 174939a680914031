"""What a preflight or a dry run found: one line for each check, and what the job will take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from driftlens.progress_sinks import duration
from driftlens_app.texts import plain
from driftlens_reports.wording import size

_ICONS = {"ok": "check", "notice": "info", "problem": "error"}


def show_findings(found: Mapping[str, Any]) -> None:
    """Draw the document that `driftlens validate --json` and `driftlens calibrate --dry-run --json` print."""
    with st.container(border=True):
        _verdict(found)
        for finding in found["findings"]:
            hint = f" {plain(finding['hint'])}" if finding["hint"] else ""
            subject, text = plain(finding["subject"]), plain(finding["text"])
            st.markdown(f":material/{_ICONS[finding['level']]}: **{subject}**: {text}{hint}")


def _verdict(found: Mapping[str, Any]) -> None:
    if not found["ready"]:
        count = sum(finding["level"] == "problem" for finding in found["findings"])
        st.error(f"{count} problem{'s' if count > 1 else ''} to solve first.", icon=":material/error:")
        return
    cost = found["estimate"]
    if cost is None:
        st.success("Ready.", icon=":material/check:")
        return
    parts = [f"{size(cost['memory_bytes'])} of memory", f"{size(cost['disk_bytes'])} on disk"]
    parts += [] if cost["seconds"] is None else [duration(cost["seconds"])]
    st.success(f"Ready: about {', '.join(parts)}.", icon=":material/check:")
