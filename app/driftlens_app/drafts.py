"""A spec of one's own, pasted, dropped or picked; kept as a file, and data only: what the safe loader reads."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from driftlens.base.errors import SpecError
from driftlens.base.files import entries, write_text_atomic
from driftlens.findings.reading import size
from driftlens.spec.drafted import split_entry
from driftlens_app.calibration import methods
from driftlens_app.jobs.processes import ask
from driftlens_app.jobs.requests import MOST_BYTES
from driftlens_app.settings import is_inside
from driftlens_app.show import plain

PASTED = "Paste or drop YAML"
"""What stands among the specs for one that is none of the files."""

PASTED_AS = "pasted"
"""How its file is called, but for the ending and a number."""

_KEPT, _TEXT, _DRAWER = "_draft", "pasted", "begin-draft"
_PARTS = {"expert": "experts.{}.weights", "head": "heads.{}", "data": "data.{}", "baseline": "baselines.{}"}
_PATHS = {"base": "base.weights", "merged model": "merged.weights", "device": "compute.device"}

_BASES = ("base", "pretrained", "zeroshot")
"""Names of models that others were fine-tuned from."""
MOST_PLACES = 200
"""Places of a kind that are offered."""
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
_HEADS = """
# Scores need heads, task by task; `suite` names a published task, which brings its class names and prompts.
#heads:
#  {task}: {{suite: {task}}}
#  {task}: {{classes: [cat, dog], templates: ['a photo of a {{}}.']}}
"""


def draft(root: Path) -> str:
    """The text in the field, which a dropped file or the pickers fill; refused where it is larger than specs may be."""
    drawer = st.expander("Drop a file, or pick base, experts and data", key=_DRAWER, on_change="rerun")
    with drawer:
        about = "A run's spec, or a recipe of mergekit, whose models then stand in one."
        st.file_uploader(
            "Drop a spec or a recipe", ["yaml", "yml"], key="dropped", on_change=_take, help=about
        )
        if drawer.open:
            _pick(root)
    text = st.text_area(
        "Spec",
        key=_TEXT,
        height=260,
        max_chars=MOST_BYTES,
        placeholder="version: 1\nname: ...",
        help="YAML. It is kept as a file in this folder once it is checked, and relative paths begin here.",
    )
    if problem := st.session_state.get("_undropped") or st.session_state.get("_unspread"):
        raise SpecError(problem[0], hint=problem[1])
    if (given := len(text.encode())) > MOST_BYTES:
        raise SpecError(f"the text has {size(given)}; a spec may have {size(MOST_BYTES)}", hint="Shorten it.")
    return text


def begin_with(text: str) -> None:
    """Let the page of new runs begin with this draft."""
    st.session_state.update({"spec": PASTED, _TEXT: text})


def _take() -> None:
    dropped = st.session_state.get("dropped")
    st.session_state["_undropped"] = None
    if dropped is not None:
        try:
            st.session_state[_TEXT] = as_spec(dropped.getvalue().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            problem = f"the dropped file is not UTF-8 text ({error.reason})", "It should be a YAML file."
            st.session_state["_undropped"] = problem
        except SpecError as error:  # of a recipe that no merge method here takes
            st.session_state["_undropped"] = error.message, error.hint


def as_spec(text: str) -> str:
    """The text, or the spec with the models of the recipe of mergekit that it is."""
    from driftlens.spec.mergekit import is_recipe, recipe_of
    from driftlens.spec.yaml_text import from_yaml

    try:
        given = from_yaml(text, "dropped")
    except SpecError:  # the check tells where it is wrong
        return text
    if not isinstance(given, Mapping) or not is_recipe(given):
        return text
    recipe = recipe_of(given)
    base = recipe.base or recipe.models[0]
    experts = [model for model in recipe.models if model != base]
    return spec_text("hf-decoder", base, base, {_task(expert): (expert, None) for expert in experts})


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


def _pick(root: Path) -> None:
    """Draw the pickers; a button writes a spec into the field, and closes their drawer."""
    named, filled = st.columns((3, 1), vertical_alignment="bottom")
    where = named.text_input(
        "Folder that holds base, experts and data",
        key="pick-folder",
        placeholder="a folder below this one",
        help="With a model called base; every other model is an expert, and data of an expert's name is its own.",
    )
    filled.button(
        "Fill in from the folder", key="spread", disabled=not where, on_click=_spread, args=(root, where)
    )
    left, right = st.columns(2)
    choose = {"index": None, "accept_new_options": True, "placeholder": "in this folder, or a Hub id"}
    models, data = checkpoints(root), data_sets(root)
    with left:
        loader = st.selectbox(
            "Family of models", [*methods("loaders")], key="pick-loader", help="By `driftlens methods`."
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
        proposed, about = _task(expert), plain(expert)
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
        on_click=lambda: st.session_state.update({_TEXT: made, _DRAWER: False}),
    )


def _task(expert: str) -> str:
    """What a task is called after its expert's file or folder."""
    return re.sub(r"[^\w.-]+", "-", Path(expert).stem)


def _spread(root: Path, where: str) -> None:
    """Fill the pickers with what a folder in the root holds; what is in the way is told where the text stands."""
    folder = (root / where.strip()).resolve()
    st.session_state["_unspread"] = None
    if not folder.is_dir() or not is_inside(folder, root):
        problem = f"{where.strip()} is no folder in {root}", "Open the dashboard on the one that holds it."
        st.session_state["_unspread"] = problem
        return
    inside = folder.relative_to(root.resolve())
    found = [(inside / name).as_posix() for name in checkpoints(folder)]
    models = [name for name in found if not any(name.startswith(f"{other}/") for other in found)]
    base = next((name for name in models if _task(name).lower() in _BASES), None)
    experts = [name for name in models if name != base and _task(name).lower() != "merged"]
    if base is None or not experts:
        there = ", ".join(models) or "no model"
        hint = f"One of them should be called {' or '.join(_BASES)}; the others are experts."
        st.session_state["_unspread"] = f"{where.strip()} holds no base and experts, but {there}", hint
        return
    data = {Path(name).stem: (inside / name).as_posix() for name in data_sets(folder)}
    chosen = {f"pick-data-{expert}": data.get(Path(expert).stem) for expert in experts}
    st.session_state.update({"pick-base": base, "pick-experts": experts, **chosen})


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
        place.relative_to(root).as_posix()
        for place in _places(root)
        if (place.suffix.lower() in _WEIGHTS and place.is_file())
        or any((place / name).is_file() for name in ("config.json", "open_clip_config.json"))
        or place.name == "model_config.json"
    )
    return sorted(itertools.islice(found, MOST_PLACES))


def data_sets(root: Path) -> dict[str, dict[str, str]]:
    """By path, relative to the root, what a spec says of the data there: files of rows, folders of splits."""
    names = {place.relative_to(root).as_posix(): place for place in _places(root)}
    found = {name: entry for name, place in names.items() if (entry := split_entry(place, name)) is not None}
    return dict(sorted(found.items())[:MOST_PLACES])


def _places(root: Path) -> Iterator[Path]:
    """What lies in the root, in its folders and in theirs, hidden things, runs and what leaves the root left out."""
    level = [root]
    for _ in range(3):
        found = [place for folder in level for place in sorted(entries(folder)) if place.name[0] != "."]
        found = [place for place in found[: 10 * MOST_PLACES] if is_inside(place, root)]
        yield from found
        level = [place for place in found if place.is_dir() and not (place / "manifest.json").exists()]
