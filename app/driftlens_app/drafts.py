"""A spec of one's own, pasted, dropped or picked; kept as a file, and data only: what the safe loader reads."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from driftlens.base.errors import DriftLensError, SpecError
from driftlens.base.files import entries, write_text_atomic
from driftlens.findings.reading import size
from driftlens.runs.layout import SPEC
from driftlens.runs.run import DriftRun
from driftlens.spec.drafted import ROWS, split_entry
from driftlens_app.calibration import methods
from driftlens_app.jobs.processes import ask
from driftlens_app.jobs.requests import MOST_BYTES
from driftlens_app.settings import Settings, is_inside
from driftlens_app.show import caption, plain

PASTED = "Models of your own, or pasted YAML"
"""What stands among the specs for one that is none of the files."""

PASTED_AS = "pasted"
"""How its file is called, but for the ending and a number."""

GIVEN = "given-merges"
"""Settings of merges that their fields begin with, by method."""

_KEPT, _TEXT, _DRAWER = "_draft", "pasted", "begin-draft"
_RECIPE, _WRITTEN, _TOLD, _PROBLEM = "_recipe", "_written", "_chosen-for-draft", "_draft-problem"
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
#  TASK: {suite: TASK}
#  TASK: {classes: [cat, dog], templates: ['a photo of a {}.']}
"""


def draft(root: Path) -> str:
    """The text in the field, which a dropped file or the pickers fill; refused where it is larger than specs may be."""
    state = st.session_state
    if _DRAWER not in state or state.pop(
        _WRITTEN, False
    ):  # open for whoever begins; then the text is to be seen
        state[_DRAWER] = not state.get(_TEXT)
    for key in [key for key in state if str(key).startswith("pick-")]:
        state[key] = state[key]  # what is not drawn while the drawer is closed would be forgotten
    drawer = st.expander("Drop a file, or pick base, experts and data", key=_DRAWER, on_change="rerun")
    with drawer:
        about = "A run's spec, or a recipe of mergekit, whose models then stand in one."
        st.file_uploader(
            "Drop a spec or a recipe", ["yaml", "yml"], key="dropped", on_change=_take, help=about
        )
        if (recipe := state.pop(_RECIPE, None)) is not None:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
                file.write(recipe)
                file.flush()
                _write(root, (), [file.name])
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
    written, sentences = state.get(_TOLD, ("", ()))
    for sentence in sentences if text == written else ():
        caption(f"{sentence[:1].upper()}{sentence[1:]}.")
    if problem := state.get(_PROBLEM):
        raise SpecError(problem[0], hint=problem[1])
    if (given := len(text.encode())) > MOST_BYTES:
        raise SpecError(f"the text has {size(given)}; a spec may have {size(MOST_BYTES)}", hint="Shorten it.")
    return text


def begin_with(text: str) -> None:
    """Let the page of new runs begin with this draft."""
    st.session_state.update({"spec": PASTED, _TEXT: text})


def begin_merge(run: DriftRun, command: str) -> None:
    """Let the page of new runs begin with a run's own spec, and with the merges that a command compares or makes."""
    spec = (run.path / SPEC).relative_to(Settings.from_environment().root).as_posix()
    merges: dict[str, dict[str, Any]] = {}
    for option, value in itertools.pairwise(shlex.split(command)):
        if option == "--compare":
            merges = {name: {} for name in value.split(",")}
        elif option == "--set" and value.startswith("merge="):
            settings = json.loads(value.removeprefix("merge="))
            merges = {settings.pop("method"): settings}
    names = [name for name in merges if name in methods("merge_methods")]
    st.session_state.update({"spec": spec, "new-merge": bool(names), "merges": names, GIVEN: merges})


def _take() -> None:
    dropped, state = st.session_state.get("dropped"), st.session_state
    state[_PROBLEM] = None
    if dropped is None:
        return
    try:
        text = dropped.getvalue().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"the dropped file is not UTF-8 text ({error.reason})", "It should be a YAML file."
        state[_PROBLEM] = problem
        return
    state[_RECIPE if _is_recipe(text) else _TEXT] = text


def _is_recipe(text: str) -> bool:
    """Whether the text is a recipe of mergekit; what can't be read is none, and the check tells where it is wrong."""
    from driftlens.spec.mergekit import is_recipe
    from driftlens.spec.yaml_text import from_yaml

    try:
        document = from_yaml(text, "dropped")
    except SpecError:
        return False
    return isinstance(document, Mapping) and is_recipe(document)


def _write(root: Path, options: Sequence[str], models: Sequence[str]) -> None:
    """Put the spec that `driftlens init` makes of models into the field, which is drawn later; or tell why it can't."""
    state = st.session_state
    state[_PROBLEM] = None
    try:
        with st.spinner("Reading configurations and data"):
            answer = ask(("init", *options, "--json", "--", *models), root)
    except DriftLensError as error:
        state[_PROBLEM] = error.message, error.hint
        return
    text = str(answer["spec"])
    if "\nheads:" not in text:
        text += _HEADS
    state[_TEXT], state[_WRITTEN] = text, True
    state[_TOLD] = text, tuple(answer["chosen"])
    st.rerun()


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
        document = ask(("validate", str(file), *options, "--json"), root)
    except SpecError as error:
        first, *rest = error.message.replace(str(file), spec).splitlines()
        told = [(line.strip(), "") for line in rest] or [(first.removeprefix(f"{spec}:").strip(), error.hint)]
        named = {"level": "problem", "subject": spec}
        problems = [{**named, "text": text_of, "hint": hint} for text_of, hint in told]
        document = {"ready": False, "needs": {}, "findings": problems}
    return {**document, "findings": [_placed(finding, text, spec) for finding in document["findings"]]}


def _placed(finding: Mapping[str, Any], text: str, spec: str) -> dict[str, Any]:
    """The finding with the number and the text of the line that it is about; None and empty where none is."""
    from driftlens.spec.yaml_text import line_of

    subject = finding["subject"]
    if subject == spec:
        syntax = re.match(rf"{re.escape(spec)} line (\d+), column", finding["text"])
        line = int(syntax[1]) if syntax else line_of(text, finding["text"])
    else:
        kind, _, which = subject.partition(" ")
        path = _PARTS[kind].format(which.removeprefix("of ")) if kind in _PARTS else subject
        line = line_of(text, _PATHS.get(path, path))
    lines = re.split("\r\n|\r|\n", text)  # as YAML counts them, but for three signs that nobody types
    return {**finding, "line": line, "code": lines[line - 1] if line and line <= len(lines) else ""}


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
        base = st.selectbox("Base", models, key="pick-base", **choose)
    with right:
        experts = st.multiselect(
            "Experts", models, key="pick-experts", accept_new_options=True, placeholder="one per task"
        )
    tasks, places = dict[str, str](), dict[str, str]()
    for number, expert in enumerate(experts, 1):
        proposed, about = _task(expert), plain(expert)
        name, picked = st.columns(2)
        typed = name.text_input(f"Task {number}", key=f"pick-task-{expert}", placeholder=proposed, help=about)
        task = typed.strip() or proposed
        tasks[task] = expert
        if source := picked.selectbox(
            f"Data of task {number}", data, key=f"pick-data-{expert}", index=None, help=about
        ):
            places[task] = source
    family = _pick_family(models, choose)
    lacking = [task for task in tasks if task not in places] if places else []
    reason = f"Data is missing for {', '.join(lacking)}." if lacking else None
    options = [f"--data={task}={place}" for task, place in places.items()]
    if st.button(
        "Write the spec",
        icon=":material/edit_note:",
        key="pick",
        disabled=not base or not tasks or bool(lacking),
        help=reason or "Without data a few dozen built-in texts or pictures are read.",
    ):
        pairs = [f"{task}={expert}" for task, expert in tasks.items()]
        _write(root, [*options, *family], [str(base), *pairs])


def _pick_family(models: Sequence[str], choose: Mapping[str, Any]) -> list[str]:
    """Options that say of which family the models are, where somebody says so; else the base does."""
    with st.expander("What nothing beside the base says"):
        left, right = st.columns(2)
        loader = left.selectbox(
            "Family of models",
            [*methods("loaders")],
            key="pick-loader",
            index=None,
            placeholder="by the base's configuration",
            help="By `driftlens doctor --methods`.",
        )
        about = "Configuration or name of the architecture; the base's own where it has one."
        source = right.selectbox("Architecture", models, key="pick-source", help=about, **choose)
    settings = {"loader": loader, "source": source}
    return [f"--set=architecture.{name}={value}" for name, value in settings.items() if value]


def _task(expert: str) -> str:
    """What a task is called after its expert's file or folder."""
    return re.sub(r"[^\w.-]+", "-", Path(expert).stem)


def _spread(root: Path, where: str) -> None:
    """Fill the pickers with what a folder in the root holds; what is in the way is told where the text stands."""
    folder = (root / where.strip()).resolve()
    st.session_state[_PROBLEM] = None
    if not folder.is_dir() or not is_inside(folder, root):
        problem = f"{where.strip()} is no folder in {root}", "Open the dashboard on the one that holds it."
        st.session_state[_PROBLEM] = problem
        return
    inside = folder.relative_to(root.resolve())
    paths = [(inside / name).as_posix() for name in checkpoints(folder)]
    models = [name for name in paths if not any(name.startswith(f"{other}/") for other in paths)]
    base = next((name for name in models if _task(name).lower() in _BASES), None)
    experts = [name for name in models if name != base and _task(name).lower() != "merged"]
    if base is None or not experts:
        there = ", ".join(models) or "no model"
        hint = f"One of them should be called {' or '.join(_BASES)}; the others are experts."
        st.session_state[_PROBLEM] = f"{where.strip()} holds no base and experts, but {there}", hint
        return
    data = {Path(name).stem: (inside / name).as_posix() for name in data_sets(folder)}
    chosen = {f"pick-data-{expert}": data.get(Path(expert).stem) for expert in experts}
    st.session_state.update({"pick-base": base, "pick-experts": experts, **chosen})


def checkpoints(root: Path) -> list[str]:
    """Paths, relative to the root, of files of weights and of folders with a configuration, two levels down."""
    paths = (
        place.relative_to(root).as_posix()
        for place in _places(root)
        if (place.suffix.lower() in _WEIGHTS and place.is_file())
        or any((place / name).is_file() for name in ("config.json", "open_clip_config.json"))
        or place.name == "model_config.json"
    )
    return sorted(itertools.islice(paths, MOST_PLACES))


def data_sets(root: Path) -> list[str]:
    """Paths, relative to the root, of folders of splits and of files of rows that are no split themselves."""
    places = [*_places(root)]
    folders = {place for place in places if split_entry(place, "") is not None}
    rows = {place for place in places if place.suffix.lower() in ROWS and place.parent not in folders}
    return sorted(place.relative_to(root).as_posix() for place in folders | rows)[:MOST_PLACES]


def _places(root: Path) -> Iterator[Path]:
    """What lies in the root, in its folders and in theirs, hidden things, runs and what leaves the root left out."""
    level = [root]
    for _ in range(3):
        places = [place for folder in level for place in sorted(entries(folder)) if place.name[0] != "."]
        places = [place for place in places[: 10 * MOST_PLACES] if is_inside(place, root)]
        yield from places
        level = [place for place in places if place.is_dir() and not (place / "manifest.json").exists()]
