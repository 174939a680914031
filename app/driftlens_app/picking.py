"""Base, experts and data picked from what lies in the folder, written as the text of a spec that the form checks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from driftlens_app.calibration import loaders
from driftlens_app.jobs.requests import entries
from driftlens_app.settings import is_inside
from driftlens_app.show import plain

MOST_PLACES = 200
"""Places of a kind that are offered."""
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
_ROWS = {".npz": "npz", ".jsonl": "jsonl", ".csv": "table", ".tsv": "table", ".parquet": "table"}
_SPLITS = (("train", "calibration"), ("test", "val", "validation"))
_HEADS = """
# Scores need heads, task by task; `suite` names a published task, which brings its class names and prompts.
#heads:
#  {task}: {{suite: {task}}}
#  {task}: {{classes: [cat, dog], templates: ['a photo of a {{}}.']}}
"""


def pick(root: Path, text: str, drawer: str) -> None:
    """Draw the pickers; a button writes a spec into the field with the key `text`, and closes that of `drawer`."""
    left, right = st.columns(2)
    choose = {"index": None, "accept_new_options": True, "placeholder": "in this folder, or a Hub id"}
    models, data = checkpoints(root), data_sets(root)
    with left:
        loader = st.selectbox(
            "Family of models", loaders(), key="pick-loader", help="By `driftlens methods`."
        )
        base = st.selectbox("Base", models, key="pick-base", **choose)
    with right:
        told = "Configuration or name of the architecture; the base's own where it has one."
        source = st.selectbox("Architecture", models, key="pick-source", help=told, **choose)
        experts = st.multiselect(
            "Experts", models, key="pick-experts", accept_new_options=True, placeholder="one per task"
        )
    rows: dict[str, tuple[str, Mapping[str, str] | None]] = {}
    for number, expert in enumerate(experts, 1):
        proposed, about = re.sub(r"[^\w.-]+", "-", Path(expert).stem), plain(expert)
        name, picked = st.columns(2)
        task = name.text_input(f"Task {number}", proposed, key=f"pick-task-{expert}", help=about)
        of = picked.selectbox(
            f"Data of task {number}", [*data], key=f"pick-data-{expert}", index=None, help=about
        )
        rows[task.strip()] = expert, data[of] if of else None
    is_whole = bool(base and rows)
    made = spec_text(str(loader), source or str(base), str(base), rows) if is_whole else ""
    st.button(
        "Write the spec",
        icon=":material/edit_note:",
        key="pick",
        disabled=not is_whole,
        # The drawer closes, so that the text stands where one looks.
        on_click=lambda: st.session_state.update({text: made, drawer: False}),
    )


def spec_text(
    loader: str, source: str, base: str, tasks: Mapping[str, tuple[str, Mapping[str, str] | None]]
) -> str:
    """A spec in YAML of these parts, merged by Task Arithmetic; of each task the expert and its entry under `data`."""
    from driftlens.spec.yaml_text import to_yaml

    parts: dict[str, Any] = {
        "version": 1,
        "name": "picked",
        "architecture": {"loader": loader, "source": source},
        "base": {"weights": base},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "experts": {task: {"weights": expert} for task, (expert, _) in tasks.items()},
        "data": {task: dict(entry) for task, (_, entry) in tasks.items() if entry is not None},
    }
    return to_yaml(parts) + _HEADS.format(task=next(iter(tasks)))


def checkpoints(root: Path) -> list[str]:
    """Paths, relative to the root, of files of weights and of folders with a configuration, two levels down."""
    found = (
        place
        for place in _places(root)
        if (place.suffix.lower() in _WEIGHTS and place.is_file())
        or any((place / name).is_file() for name in ("config.json", "open_clip_config.json"))
        or place.name == "model_config.json"
    )
    return _told(found, root)


def data_sets(root: Path) -> dict[str, dict[str, str]]:
    """By path, relative to the root, what a spec says of the data there: files of rows, folders of splits."""
    found = {}
    for place in _places(root):
        if (entry := _data_entry(place, place.relative_to(root).as_posix())) is not None:
            found[place.relative_to(root).as_posix()] = entry
    return dict(sorted(found.items())[:MOST_PLACES])


def _data_entry(place: Path, name: str) -> dict[str, str] | None:
    if place.suffix.lower() == ".npz":
        return {"kind": "npz", "file": name}
    splits = [_split(place, names) for names in _SPLITS]
    if not place.is_dir() or None in splits:
        return None
    if (place / "dataset_dict.json").is_file():
        return {"kind": "hf", "path": name, "calibration": splits[0].name, "test": splits[1].name}
    kinds = {"imagefolder" if split.is_dir() else _ROWS.get(split.suffix.lower(), "") for split in splits}
    kind = kinds.pop()
    if kinds or not kind:
        return None
    return {
        "kind": kind,
        **{key: f"{name}/{at.name}" for key, at in zip(("calibration", "test"), splits, strict=True)},
    }


def _split(folder: Path, names: Sequence[str]) -> Path | None:
    """The first entry of a folder that is called so, whatever its ending."""
    there = {entry.stem.lower(): entry for entry in sorted(entries(folder), reverse=True)}
    return next((there[name] for name in names if name in there), None)


def _places(root: Path) -> Iterator[Path]:
    """What lies in the root, in its folders and in theirs, hidden things, runs and what leaves the root left out."""
    level = [root]
    for _ in range(3):
        found = [place for folder in level for place in sorted(entries(folder)) if place.name[0] != "."]
        found = [place for place in found[: 10 * MOST_PLACES] if is_inside(place, root)]
        yield from found
        level = [place for place in found if place.is_dir() and not (place / "manifest.json").exists()]


def _told(found: Iterator[Path], root: Path) -> list[str]:
    return sorted(place.relative_to(root).as_posix() for place in itertools.islice(found, MOST_PLACES))
