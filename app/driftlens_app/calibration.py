"""What there is to merge and to calibrate with, as the command line tells it, and one calibration, as a form asks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args

import streamlit as st
from pydantic import TypeAdapter

from driftlens.base.errors import SpecError, did_you_mean
from driftlens.base.settings import Schema, choices_of, entry_of, expected, model_of, read
from driftlens.base.words import counted
from driftlens.spec.requests import DEFAULT_METHOD, CalibrationRequest, OutDtype, layers_named
from driftlens_app.processes import ask
from driftlens_app.settings import Settings
from driftlens_app.show import caption, coded, is_narrow, note, plain

_START, _BEST = "start-calibration", "best-calibration"
_SUGGESTED = "_suggested_name"
_OWN = "the run's spec, or the defaults"
_NUMBERS: Mapping[str, type[int] | type[float]] = {"number": float, "integer": int}
"""Kinds of settings that are numbers, and what they are in Python."""

_ON_BEST = (
    "Compares on held-out samples. They are calibration samples, without labels. The simplest stays unless another is "
    "clearly better; where that is the base, the merge is not worth its use."
)
REPLACE = "Replace a calibration of this name"
"""What the form's field `replace` is called; an error points to it."""

_COUNTED = re.compile(r"(.+)-(\d{1,9})")
_TOO_LARGE = 2**53
"""A field of a web page holds no whole number from here on."""


@dataclass(frozen=True)
class Method:
    """A calibrator or a merge method, as `driftlens doctor --methods --json` tells it.

    `suited` is by loader the preset for its kind of models where that isn't the first one, `automatic` what can be
    chosen on held-out samples, `swept` the factors of what is published that a sweep tries (those `of_base` beside a
    base alone), `candidates` what `--auto` compares from each preset on. `effort` is the processor time against
    FeatCal's, and `fewest` how many samples a task that choice needs.
    """

    title: str
    settings: Mapping[str, Schema]
    source: str = ""
    reads: str = ""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    suited: Mapping[str, str] = field(default_factory=dict)
    automatic: tuple[str, ...] = ()
    swept: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    of_base: tuple[str, ...] = ()
    candidates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    effort: float = 1.0
    fewest: int = 0

    def preset_for(self, loader: str) -> str | None:
        """The published setting for models of a loader; None where the method has none."""
        return self.suited.get(loader, next(iter(self.presets), None))


@st.cache_resource(show_spinner="Asking for the methods")
def methods(kind: str = "calibrators") -> Mapping[str, Method]:
    """Methods, or `loaders`, by name. The command line is asked, since they need torch, once per server and kind."""
    entries = ask(("doctor", "--methods", "--json"), Settings.from_environment().root)[kind]
    return TypeAdapter(dict[str, Method]).validate_python(entries)


def _known(kind: str, name: str, there: Mapping[str, Any]) -> Any:
    if name not in there:
        hint = did_you_mean(name, there) or f"There are {', '.join(there) or 'none'}."
        raise SpecError(f"there is no {kind} {name!r}", hint=hint)
    return there[name]


def checked(request: CalibrationRequest) -> CalibrationRequest:
    """The request with its settings as its method reads them; refuses, by a SpecError, what the method would refuse."""
    method = _known("calibrator", request.method or DEFAULT_METHOD, methods())
    if request.preset is not None:
        _known("preset", request.preset, method.presets)
    given = {name: _known("setting", name, method.settings) for name in request.parameters}
    settings = read(model_of(given), request.parameters)
    both = [name for name in method.automatic if name in settings]
    if request.auto and both:
        raise SpecError(
            f"{', '.join(both)}: given, and to be chosen too",
            hint="Leave the fields empty, or switch the automatic choice off.",
        )
    return request.changed(parameters=settings)


def recorded(values: Mapping[str, Any]) -> CalibrationRequest | None:
    """The request that a job's record holds; None where it holds none that a form can show."""
    try:
        request = checked(CalibrationRequest(**values))
    except SpecError:
        return None
    whole = [value for value in request.parameters.values() if isinstance(value, int)]
    return request if all(abs(value) < _TOO_LARGE for value in whole) else None


def is_search(request: CalibrationRequest) -> bool:
    """Whether the best of all methods is looked for, which has a button of its own."""
    return request.auto and request.method is None


def require_free_name(request: CalibrationRequest, taken: Container[str]) -> None:
    """Refuse a name that a finished calibration has, unless that is to be replaced or gone on with."""
    if request.name in taken and not (request.replace or request.resume):
        raise SpecError(
            f"the run has a calibration {request.name!r} already",
            hint=f"Tick '{REPLACE}', or choose another name.",
        )


def freely_named(request: CalibrationRequest, taken: Container[str]) -> CalibrationRequest:
    """The same under the first name that is not among `taken`, replacing nothing: `featcal`, `featcal-2` ..."""
    counted = _COUNTED.fullmatch(request.name)
    stem, number = counted.groups() if counted is not None else (request.name, "1")
    numbered = (f"{stem}-{count}" for count in itertools.count(int(number) + 1))
    free = next(name for name in itertools.chain([request.name], numbered) if name not in taken)
    return request.changed(name=free, replace=False)


def calibration_form(
    last: CalibrationRequest | None,
    *,
    taken: Container[str],
    blocked: bool,
    obstacle: str,
    exports: str | None,
    loader: str = "",
    counts: Mapping[str, int] = MappingProxyType({}),
) -> tuple[CalibrationRequest, bool]:
    """What the form says, `last` at first, and whether one of its buttons was pressed.

    `counts` are calibration samples by task, `obstacle` is why no calibration of the run could begin.
    """
    first = methods()[DEFAULT_METHOD]
    few = next((task for task, count in counts.items() if count < first.fewest), None)
    best = st.button(
        "Repair with the best method",
        type="primary",
        icon=":material/auto_awesome:",
        disabled=blocked or few is not None or bool(obstacle),
        key=_BEST,
    )
    if obstacle:
        st.warning(f"A calibration can't begin: {coded(obstacle.rstrip('.'))}.", icon=":material/warning:")
    if few is not None:
        note(
            f"Task {plain(few)} has {counted(counts[few], 'calibration sample')}, and the choice takes {first.fewest} "
            "or more of each task: some are held out. Settings under Advanced need none held out."
        )
    caption(_ON_BEST)
    preset = first.preset_for(loader)
    # Between the button and what a repair has done a telephone has no room for them.
    tried = st.expander("What it compares") if is_narrow() else st.container()
    tried.markdown("\n".join(f"- {plain(name)}" for name in first.candidates[preset or ""]))
    with st.expander("Advanced", expanded=last is not None):  # open for whoever used it last
        start = _chosen_method(last, taken, loader)
        _fill_name(start, taken)
        with st.form("calibrate", enter_to_submit=False):
            asked, pressed = _form_fields(start, loader, blocked=blocked, may_export=exports is not None)
    if best:
        wanted = CalibrationRequest(name="best", preset=preset, auto=True)
        return freely_named(wanted, taken), True
    if asked.pop("export"):
        asked["save_weights"] = f"{exports}-{asked['name']}"
    return CalibrationRequest(**asked), pressed


def _chosen_method(last: CalibrationRequest | None, taken: Container[str], loader: str) -> CalibrationRequest:
    """What the form begins with, for the calibrator that is chosen."""
    calibrators = methods()

    def fresh(method: str) -> CalibrationRequest:
        preset = calibrators[method].preset_for(loader)
        return freely_named(CalibrationRequest(name=method, method=method, preset=preset), taken)

    start = last or fresh(DEFAULT_METHOD)
    names, method = [*calibrators], start.method or DEFAULT_METHOD
    if len(names) > 1:
        called = st.selectbox(
            "Calibrator",
            names,
            index=names.index(method),
            format_func=lambda name: calibrators[name].title,
            key="calibrator",
        )
        if called != method:
            return fresh(called)
    return start


def _form_fields(
    start: CalibrationRequest, loader: str, *, blocked: bool, may_export: bool
) -> tuple[dict[str, Any], bool]:
    """What the fields say, by those of a request, whether weights are exported, and whether the button was pressed."""
    chosen = start.method or DEFAULT_METHOD
    method = methods()[chosen]
    asked: dict[str, Any] = {"method": chosen}
    asked["name"] = st.text_input(
        "Name", key="name", help="The new variant is called calibrated:NAME. Letters, digits, - _ ."
    ).strip()
    presets = [_OWN, *sorted(method.presets, key=lambda name: name != method.preset_for(loader))]
    preset = st.selectbox(
        "Published settings",
        presets,
        index=presets.index(start.preset or _OWN),
        format_func=lambda name: _preset_label(name, method.presets),
        key=f"{chosen} preset",
        help="Values from the paper or its code; the fields below go over them.",
    )
    asked["preset"] = None if preset == _OWN else preset
    published = method.presets.get(preset, {})
    parameters = _fields(start, method)
    asked["parameters"] = {name: value for name, value in parameters.items() if value != published.get(name)}
    asked["samples"] = st.number_input(
        "Samples per task",
        min_value=1,
        value=start.samples,
        step=1,
        placeholder="as in the run's spec",
        key="samples",
        help="Calibration samples; they need no labels and are never those that accuracy is measured on.",
    )
    asked["views"] = _text(
        "Views of samples",
        start.views,
        placeholder="as in the run's spec",
        key="views",
        help="Copies of every sample that are read beside it: crop:3, mix:3, words:3, auto or none.",
    )
    asked["shrink"] = _text(
        "Share of the way from the base",
        start.shrink,
        placeholder="all of it",
        key="shrink",
        help="A number from 0 (the base) to 1.5, or auto for the best on held-out calibration samples.",
    )
    asked["auto"] = bool(method.automatic) and st.checkbox(
        f"Choose {', '.join(method.automatic)} on held-out calibration samples",
        start.auto,
        key="auto",
        help="Leave their fields empty then. Takes several calibrations' time.",
    )
    layers = st.text_input(
        "Layers",
        ",".join(map(str, start.layers or ())),
        key="layers",
        placeholder="all blocks",
        help="Numbers or patterns on module paths, with commas between them.",
    )
    asked["layers"] = layers_named(layers) or None
    asked |= _saved_fields(start, may_export=may_export)
    asked["replace"] = st.checkbox(REPLACE, key="replace")
    label = f"{method.title} calibrate"
    pressed = st.form_submit_button(label, icon=":material/tune:", disabled=blocked, key=_START)
    return asked, pressed


def _text(label: str, start: object, **field: Any) -> str | None:
    """What a field of text says; None where it is empty."""
    return st.text_input(label, "" if start is None else str(start), **field).strip() or None


def _saved_fields(start: CalibrationRequest, *, may_export: bool) -> dict[str, Any]:
    """Whether weights are exported, and the number type that they are saved in."""
    types = get_args(OutDtype)
    export = st.checkbox(
        "Also export a folder that the original library loads",
        start.save_weights is not None and may_export,
        key="save_weights",
        disabled=not may_export,
        help="Beside the run, with config, preprocessor and model card. The weights alone are saved anyway.",
    )
    out_dtype = st.selectbox(
        "Saved in",
        types,
        index=None if start.out_dtype is None else types.index(start.out_dtype),
        placeholder="the base's own number type",
        key="out_dtype",
        help="float32 keeps the small changes that a half-precision type would round away.",
    )
    return {"export": export, "out_dtype": out_dtype}


def _fill_name(start: CalibrationRequest, taken: Container[str]) -> None:
    """Put the name to begin with into the form, and the next one once a calibration has got it or another is meant."""
    state = st.session_state
    if any(state.get(button) for button in (_START, _BEST)):
        return  # What was just sent stands, even if somebody else took the name meanwhile.
    suggested = state.get(_SUGGESTED)
    is_used_up = start.name != suggested and (state.get("name") == suggested or state.get("name") in taken)
    if "name" not in state or is_used_up:
        state["name"], state["replace"] = start.name, start.replace
    state[_SUGGESTED] = start.name


def _fields(start: CalibrationRequest, method: Method) -> dict[str, Any]:
    """What the fields of a calibrator's settings say; those that no published setting is about are folded away."""
    published = {name for preset in method.presets.values() for name in preset} or {*method.settings}
    given = (start.parameters, start.method or DEFAULT_METHOD)
    values = fields(
        {name: each for name, each in method.settings.items() if name in published}, *given, empty="as above"
    )
    rest = {name: each for name, each in method.settings.items() if name not in published}
    if rest:
        with st.expander("More settings"):
            values |= fields(rest, *given, empty="as above")
    return values


def fields(
    settings: Mapping[str, Schema], given: Mapping[str, Any], owner: str, *, empty: str = ""
) -> dict[str, Any]:
    """The values of the fields that are not empty, `given` at first; an empty one reads as `empty` or its default."""
    numbers = [name for name, schema in settings.items() if _is_number(schema)]
    columns = st.columns(3) if numbers else []
    places = {name: columns[place % 3] for place, name in enumerate(numbers)}
    values = {
        name: _value(f"{owner}.{name}", settings[name], given.get(name), places.get(name, st), empty)
        for name in sorted(settings, key=lambda name: name not in places)
    }
    return {name: value for name, value in values.items() if value is not None}


def _is_number(schema: Schema) -> bool:
    entry, is_list = entry_of(schema)
    return entry.get("type") in _NUMBERS and not choices_of(entry) and not is_list


def _value(key: str, schema: Schema, value: Any, place: Any, empty: str) -> Any:
    """What the field of a setting says; None where it is empty."""
    entry, is_list = entry_of(schema)
    default = schema.get("default")
    usual = "" if default is None else f"; {_in_words(default)} unless something says otherwise"
    about = schema.get("description") or key.rpartition(".")[2]
    look: dict[str, Any] = {
        "label": schema["title"],
        "key": key,
        "placeholder": empty or _in_words(default),
        "help": plain(f"{about}: {expected(schema)}{usual}."),
    }
    if choices_of(entry) or entry["type"] == "boolean":
        return _choice(choices_of(entry) or (True, False), is_list, value, place, look)
    number = _NUMBERS.get(entry["type"])
    if number is not None and not is_list:
        low = entry.get("minimum", entry.get("exclusiveMinimum"))
        low, high, value = (
            None if bound is None else number(bound) for bound in (low, entry.get("maximum"), value)
        )
        form = "%g" if number is float else "%d"
        return place.number_input(min_value=low, max_value=high, value=value, format=form, **look)
    text = place.text_input(value="" if value is None else _in_words(value), **look)
    entries = tuple(_entry(part, number or str) for part in text.split(",") if part.strip())
    return (entries or None) if is_list else text.strip() or None


def _choice(options: tuple[Any, ...], is_list: bool, value: Any, place: Any, look: Mapping[str, Any]) -> Any:
    if is_list:
        chosen = place.multiselect(options=options, default=value, format_func=_in_words, **look)
        return tuple(option for option in options if option in chosen) or None
    index = None if value is None else options.index(value)
    return place.selectbox(options=options, index=index, format_func=_in_words, **look)


def _entry(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text  # the setting says what it expects


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _preset_label(name: str, presets: Mapping[str, Mapping[str, Any]]) -> str:
    numbers = _valued(presets.get(name, {}))
    return f"{name}: {numbers}" if numbers else name


def _valued(settings: Mapping[str, Any]) -> str:
    """The numbers among settings, for reading."""
    return ", ".join(f"{key} {value:g}" for key, value in settings.items() if isinstance(value, int | float))
