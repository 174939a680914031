"""A spec that was pasted or dropped: kept as a file of its own, checked as every file is, its problems placed in it.

The text is data: only the command line's safe loader reads it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from driftlens.base.errors import SpecError
from driftlens.base.files import write_text_atomic
from driftlens.findings.reading import size
from driftlens_app.jobs.command_line import ask
from driftlens_app.jobs.requests import MOST_BYTES
from driftlens_app.picking import pick

PASTED = "Paste or drop YAML"
"""What stands among the specs for one that is none of the files."""

PASTED_AS = "pasted"
"""How its file is called, but for the ending and a number."""

_KEPT, _TEXT, _DRAWER = "_draft", "pasted", "begin-draft"
_PARTS = {"expert": "experts.{}.weights", "head": "heads.{}", "data": "data.{}", "baseline": "baselines.{}"}
_PATHS = {"base": "base.weights", "merged model": "merged.weights", "device": "compute.device"}


def draft(root: Path) -> str:
    """The text in the field, which a dropped file or the pickers fill; refused where it is larger than specs may be."""
    drawer = st.expander("Drop a file, or pick base, experts and data", key=_DRAWER, on_change="rerun")
    with drawer:
        st.file_uploader("Drop a spec", ["yaml", "yml"], key="dropped", on_change=_take)
        if drawer.open:
            pick(root, _TEXT, _DRAWER)
    text = st.text_area(
        "Spec",
        key=_TEXT,
        height=260,
        max_chars=MOST_BYTES,
        placeholder="version: 1\nname: ...",
        help="YAML. It is kept as a file in this folder once it is checked, and relative paths begin here.",
    )
    if problem := st.session_state.get("_undropped"):
        raise SpecError(problem, hint="It should be a YAML file.")
    if (given := len(text.encode())) > MOST_BYTES:
        raise SpecError(f"the text has {size(given)}; a spec may have {size(MOST_BYTES)}", hint="Shorten it.")
    return text


def _take() -> None:
    dropped = st.session_state.get("dropped")
    st.session_state["_undropped"] = ""
    if dropped is not None:
        try:
            st.session_state[_TEXT] = dropped.getvalue().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            st.session_state["_undropped"] = f"the dropped file is not UTF-8 text ({error.reason})"


def keep(root: Path, text: str) -> str:
    """The name of the file in `root` that holds the draft; mended text goes into the file that it had before."""
    name, before = st.session_state.get(_KEPT, ("", None))
    file = root / name
    if not name or file.is_symlink() or not file.is_file() or file.read_text("utf-8") != before:
        names = (f"{PASTED_AS}{f'-{number}' if number else ''}.yaml" for number in itertools.count())
        name = next(name for name in names if not (root / name).is_symlink() and not (root / name).exists())
    if text != before or name != st.session_state[_KEPT][0]:
        write_text_atomic(root / name, text)
    st.session_state[_KEPT] = (name, text)
    return name


def kept_as(text: str) -> str:
    """The name of the file that holds exactly this draft; empty before it was checked."""
    name, before = st.session_state.get(_KEPT, ("", None))
    return name if text == before else ""


def checked(file: Path, spec: str, options: Sequence[str], root: Path) -> dict[str, Any]:
    """What `driftlens validate` finds in the spec; that it can't be read is a finding too. Each has its line."""
    text = file.read_text("utf-8", errors="replace") if file.stat().st_size <= MOST_BYTES else ""
    try:
        found = ask(("validate", str(file), *options, "--json"), root)
    except SpecError as error:
        first, *rest = error.message.replace(str(file), spec).splitlines()
        told = [(line.strip(), "") for line in rest] or [(first.removeprefix(f"{spec}:").strip(), error.hint)]
        named = {"level": "problem", "subject": spec}
        problems = [{**named, "text": text_of, "hint": hint} for text_of, hint in told]
        found = {"ready": False, "estimate": None, "findings": problems}
    return {**found, "findings": [_placed(finding, text, spec) for finding in found["findings"]]}


def _placed(finding: Mapping[str, Any], text: str, spec: str) -> dict[str, Any]:
    """The finding with the number and the text of the line that it is about; None and empty where none is."""
    from driftlens.spec.yaml_text import line_of

    subject = finding["subject"]
    if subject == spec:
        syntax = re.match(rf"{re.escape(spec)} line (\d+), column", finding["text"])
        at = int(syntax[1]) if syntax else line_of(text, finding["text"])
    else:
        kind, _, which = subject.partition(" ")
        path = _PARTS[kind].format(which.removeprefix("of ")) if kind in _PARTS else subject
        at = line_of(text, _PATHS.get(path, path))
    lines = re.split("\r\n|\r|\n", text)  # as YAML counts them, but for three signs that nobody types
    return {**finding, "line": at, "code": lines[at - 1] if at and at <= len(lines) else ""}
