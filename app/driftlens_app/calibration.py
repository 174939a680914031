"""What there is to merge and to calibrate with, as the command line tells it, and one calibration, as a form asks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import streamlit as st

from driftlens.base.errors import SpecError, did_you_mean
from driftlens.base.settings import Setting
from driftlens_app.jobs.command_line import ask
from driftlens_app.settings import Settings
from driftlens_app.show import caption, plain

_START, _ESTIMATE, _BEST = "start-calibration", "estimate-calibration", "best-calibration"
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

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}")
_COUNTED = re.compile(r"(.+)-(\d{1,9})")
_TOO_LARGE = 2**53
"""A field of a web page holds no whole number from here on."""


@dataclass(frozen=True)
class Method:
    """A calibrator or a merge method.

    Attributes:
        title: what it is called.
        settings: by name, in the order of its declaration.
        source: the paper.
        reads: of a merge method, what it is made from.
        presets: published settings by name.
        suited: loader of models -> the preset for its kind, where that isn't the first one.
        automatic: names of the settings that can be chosen on held-out calibration samples.
        candidates: settings, over the defaults, that the choice of the best method tries.
        effort: processor time of a calibration against FeatCal's, roughly.
        choosing: as how many calibrations by FeatCal the choice of the best method takes from here, at most.
    """

    title: str
    settings: Mapping[str, Setting]
    source: str
    reads: str
    presets: Mapping[str, Mapping[str, Any]]
    suited: Mapping[str, str]
    automatic: tuple[str, ...]
    candidates: tuple[Mapping[str, Any], ...]
    effort: float
    choosing: float

    def preset_for(self, loader: str) -> str | None:
        """The published setting for models of a loader; None where the method has none."""
        return self.suited.get(loader, next(iter(self.presets), None))


@st.cache_resource(show_spinner="Asking for the methods")
def methods(kind: str = "calibrators") -> Mapping[str, Method]:
    """The methods of a kind by name. The command line is asked, since they need torch, once per server and kind."""
    found = ask(("methods", "--json"), Settings.from_environment().root)[kind]
    return {
        name: Method(
            title=entry["title"],
            settings={setting["name"]: Setting(**setting) for setting in entry["settings"]},
            source=entry["source"],
            reads=entry.get("reads", ""),
            presets=entry.get("presets", {}),
            suited=entry.get("suited", {}),
            automatic=tuple(entry.get("automatic", ())),
            candidates=tuple(entry.get("candidates", ())),
            effort=float(entry.get("effort", 1.0)),
            choosing=float(entry.get("choosing", 0.0)),
        )
        for name, entry in found.items()
    }


@st.cache_resource(show_spinner="Reading the methods")
def loaders() -> list[str]:
    """The families of models that specs name."""
    return [*ask(("methods", "--json"), Settings.from_environment().root)["loaders"]]


@dataclass(frozen=True)
class CalibrationSettings:
    """One calibration, as a form asks for it. What is left out comes from the preset, then from the run's spec.

    Attributes:
        name: of the calibration; its variant is `calibrated:NAME`.
        method: name of the calibrator.
        preset: name of a published setting of it.
        parameters: its own settings, over the preset's.
        samples: calibration samples per task.
        layers: pattern on module paths; empty is all blocks.
        auto: whether some of its settings are chosen on held-out calibration samples.
        best: whether the best of all methods is, starting from the preset.
        save_weights: whether a folder is written that the original library loads, with a model card.
        replace: whether a calibration of that name may be replaced.
        resume: whether an interrupted calibration of that name goes on where it stopped.
    """

    name: str = "featcal"
    method: str = "featcal"
    preset: str | None = "paper-clip"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    layers: str = ""
    auto: bool = False
    best: bool = False
    save_weights: bool = False
    replace: bool = False
    resume: bool = False

    def check(self) -> None:
        """Refuse, by a SpecError, what the command line would refuse."""
        if not _NAME.fullmatch(self.name):
            raise SpecError(
                f"{self.name!r} can't be the name of a calibration",
                hint="Use letters, digits, `-`, `_` and `.`, for example featcal.",
            )
        if self.samples is not None and not 1 <= self.samples < _TOO_LARGE:
            raise SpecError(f"samples is {self.samples}, expected a whole number from 1 upwards")
        if not self.layers.isprintable() or self.layers.startswith("-"):
            raise SpecError(f"{self.layers!r} can't be a pattern on module paths")
        method = _known("calibrator", self.method, methods())
        if self.preset is not None:
            _known("preset", self.preset, method.presets)
        for name, value in self.parameters.items():
            _known("setting", name, method.settings).read(value)
        both = [name for name in method.automatic if name in self.parameters]
        if self.auto and both:
            raise SpecError(
                f"{', '.join(both)}: given, and to be chosen too",
                hint="Leave the fields empty, or switch the automatic choice off.",
            )

    def require_free_name(self, taken: Container[str]) -> None:
        """Refuse a name that a finished calibration has, unless that is to be replaced or gone on with."""
        if self.name in taken and not (self.replace or self.resume):
            raise SpecError(
                f"the run has a calibration {self.name!r} already",
                hint=f"Tick '{REPLACE}', or choose another name.",
            )

    def with_free_name(self, taken: Container[str]) -> Self:
        """The same under the first name that is not among `taken`, replacing nothing: `featcal`, `featcal-2` ..."""
        counted = _COUNTED.fullmatch(self.name)
        stem, number = counted.groups() if counted is not None else (self.name, "1")
        numbered = (f"{stem}-{count}" for count in itertools.count(int(number) + 1))
        free = next(name for name in itertools.chain([self.name], numbered) if name not in taken)
        return dataclasses.replace(self, name=free, replace=False)

    def arguments(self, run: Path) -> tuple[str, ...]:
        """Options of `driftlens calibrate`, behind the run; refuses what `check` does."""
        self.check()
        values = {
            "--name": self.name,
            "--method": None if self.best else self.method,
            "--preset": self.preset,
            "--samples": self.samples,
            "--layers": self.layers or None,
            # Beside the run, which lists every file in it.
            "--save-weights": run.parent / f"{run.name}-{self.name}" if self.save_weights else None,
        }
        flags = {"--auto": self.auto or self.best, "--replace": self.replace, "--resume": self.resume}
        # One argument each, so that no value can be taken for an option.
        options = [f"{option}={value}" for option, value in values.items() if value is not None]
        options += [f"--set={name}={json.dumps(value)}" for name, value in self.parameters.items()]
        return (*options, *(flag for flag, is_given in flags.items() if is_given))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `dataclasses.asdict` gave, also that of older versions, which had FeatCal's settings beside the others.

        What is missing or ill-typed stays at its default, and everything does where a value can't be.
        """
        known = {
            name: values[name]
            for name, kinds in _KINDS.items()
            if name in values and type(values[name]) in kinds
        }
        given = values.get("parameters", values)
        try:
            method = _known("calibrator", known.get("method", cls.method), methods())
            known["parameters"] = {
                name: setting.read(given[name])
                for name, setting in method.settings.items()
                if isinstance(given, Mapping) and given.get(name) not in (None, [])
            }
            settings = cls(**known)
            settings.check()
        except SpecError:
            return cls()
        whole = [value for value in settings.parameters.values() if isinstance(value, int)]
        return settings if all(abs(value) < _TOO_LARGE for value in whole) else cls()


def _known(kind: str, name: str, there: Mapping[str, Any]) -> Any:
    if name not in there:
        hint = did_you_mean(name, there) or f"There are {', '.join(there) or 'none'}."
        raise SpecError(f"there is no {kind} {name!r}", hint=hint)
    return there[name]


_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "method", "layers"), (str,)),
    "preset": (str, type(None)),
    "samples": (int, type(None)),
    **dict.fromkeys(("auto", "best", "save_weights", "replace", "resume"), (bool,)),
}
"""What may stand in a record, exactly: True is no number."""


def calibration_form(
    last: CalibrationSettings | None,
    *,
    taken: Container[str],
    blocked: bool,
    may_export: bool,
    loader: str = "",
    cost: str = "",
) -> tuple[CalibrationSettings, str]:
    """What the form says, and which of its buttons was pressed: "estimate", "calibrate" or "".

    Its fields are the settings that the chosen calibrator declares; an empty one leaves its value to the preset, then
    to the run's spec.

    Args:
        last: what it is filled in with on its first showing; its name also follows one that was used up.
        taken: names that the run's calibrations have.
        blocked: whether its buttons are off: a job writes to the run, or no jobs may be started at all.
        may_export: whether a folder may be written beside the run.
        loader: of the run's models, whose published settings stand first.
        cost: what the choice of the best method takes.
    """
    known = methods()
    first, label = known[CalibrationSettings.method], "Repair with the best method"
    best = st.button(label, type="primary", icon=":material/auto_awesome:", disabled=blocked, key=_BEST)
    if cost:
        caption(cost)
    caption(_ON_BEST)
    st.markdown(
        "\n".join(f"- {plain(tried)}" for tried in _tried_by_best(known, first, first.preset_for(loader)))
    )
    with st.expander("Advanced", expanded=last is not None):  # open for whoever used it last
        names, fresh = [*known], CalibrationSettings(preset=first.preset_for(loader))
        start = last or fresh.with_free_name(taken)
        if len(names) > 1:
            called = st.selectbox(
                "Calibrator",
                names,
                index=names.index(start.method),
                format_func=lambda name: known[name].title,
                key="calibrator",
            )
            if called != start.method:
                fresh = CalibrationSettings(called, called, known[called].preset_for(loader))
                start = fresh.with_free_name(taken)
        method = known[start.method]
        usual = method.preset_for(loader)
        _fill_name(start, taken)
        with st.form("calibrate", enter_to_submit=False):
            name = st.text_input(
                "Name",
                key="name",
                help="The new variant is called calibrated:NAME. Letters, digits, - _ .",
            )
            presets = [_OWN, *sorted(method.presets, key=lambda name: name != usual)]
            preset = st.selectbox(
                "Published settings",
                presets,
                index=presets.index(start.preset or _OWN),
                format_func=lambda name: _preset_label(name, method.presets),
                key=f"{start.method} preset",
                help="Values from the paper or its code; the fields below go over them.",
            )
            parameters = _fields(start, method)
            samples = st.number_input(
                "Samples per task",
                min_value=1,
                value=start.samples,
                step=1,
                placeholder="as in the run's spec",
                key="samples",
                help="Calibration samples; they need no labels and are never those that accuracy is measured on.",
            )
            auto = bool(method.automatic) and st.checkbox(
                f"Choose {', '.join(method.automatic)} on held-out calibration samples",
                start.auto,
                key="auto",
                help="Leave their fields empty then. Takes several calibrations' time.",
            )
            layers = st.text_input(
                "Layers",
                start.layers,
                key="layers",
                placeholder="all blocks",
                help="Numbers or patterns on module paths, with commas between them.",
            )
            save = st.checkbox(
                "Also export a folder that the original library loads",
                start.save_weights and may_export,
                key="save_weights",
                disabled=not may_export,
                help="Beside the run, with config, preprocessor and model card. The weights alone are saved anyway.",
            )
            replace = st.checkbox(REPLACE, key="replace")
            with st.container(horizontal=True):
                calibrate = st.form_submit_button(
                    f"{method.title} calibrate", icon=":material/tune:", disabled=blocked, key=_START
                )
                estimate = st.form_submit_button(
                    "Estimate", icon=":material/timer:", disabled=blocked, key=_ESTIMATE
                )
        published = method.presets.get(preset, {})
        settings = CalibrationSettings(
            name=name.strip(),
            method=start.method,
            preset=None if preset == _OWN else preset,
            parameters={key: at for key, at in parameters.items() if at != published.get(key)},
            samples=samples,
            layers=layers.strip(),
            auto=auto,
            save_weights=save,
            replace=replace,
        )
    if best:
        wanted = CalibrationSettings("best", preset=first.preset_for(loader), best=True)
        settings = wanted.with_free_name(taken)
    return settings, "calibrate" if calibrate or best else "estimate" if estimate else ""


def _tried_by_best(known: Mapping[str, Method], first: Method, preset: str | None) -> list[str]:
    """What is compared, with the values that it begins with."""
    start = f" ({_preset_label(preset, first.presets)})" if preset else ""
    tried = ["the merged model and the base", first.title + start]
    tried += [f"{first.title} with {', '.join(first.automatic)} searched from there"]
    return tried + [f"{of.title} {_valued(at)}".strip() for of in known.values() for at in of.candidates]


def _fill_name(start: CalibrationSettings, taken: Container[str]) -> None:
    """Put the name to begin with into the form, and the next one once a calibration has got it or another is meant."""
    state = st.session_state
    if any(state.get(button) for button in (_START, _ESTIMATE, _BEST)):
        return  # What was just sent stands, even if somebody else took the name meanwhile.
    suggested = state.get(_SUGGESTED)
    is_used_up = start.name != suggested and (state.get("name") == suggested or state.get("name") in taken)
    if "name" not in state or is_used_up:
        state["name"], state["replace"] = start.name, start.replace
    state[_SUGGESTED] = start.name


def _fields(start: CalibrationSettings, method: Method) -> dict[str, Any]:
    """What the fields of a calibrator's settings say; those that no published setting is about are folded away."""
    published = {name for preset in method.presets.values() for name in preset} or {*method.settings}
    given = (start.parameters, start.method)
    found = fields(
        [method.settings[name] for name in method.settings if name in published], *given, empty="as above"
    )
    rest = [method.settings[name] for name in method.settings if name not in published]
    if rest:
        with st.expander("More settings"):
            found |= fields(rest, *given, empty="as above")
    return found


def fields(
    settings: Sequence[Setting], given: Mapping[str, Any], owner: str, *, empty: str = ""
) -> dict[str, Any]:
    """The values of the fields that are not empty, `given` at first. Numbers stand side by side, before all else.

    An empty field reads as `empty`, or as its setting's default.
    """
    numbers = [setting for setting in settings if setting.kind in _NUMBERS and not setting.many]
    columns = st.columns(3) if numbers else []
    places = {setting.name: columns[at % 3] for at, setting in enumerate(numbers)}
    ordered = sorted(settings, key=lambda setting: setting.name not in places)
    found = {
        setting.name: _value(setting, given.get(setting.name), owner, places.get(setting.name, st), empty)
        for setting in ordered
    }
    return {name: value for name, value in found.items() if value is not None}


def _value(setting: Setting, value: Any, owner: str, place: Any, empty: str) -> Any:
    """What the field of a setting says; None where it is empty."""
    number = _NUMBERS.get(setting.kind)
    default = (
        "" if setting.default is None else f"; {_in_words(setting.default)} unless something says otherwise"
    )
    look: dict[str, Any] = {
        "label": setting.label or setting.name,
        "key": f"{owner}.{setting.name}",
        "placeholder": empty or _in_words(setting.default),
        "help": plain(f"{setting.help or setting.name}: {setting.expected}{default}."),
    }
    if setting.kind in ("choice", "flag"):
        return _choice(setting, value, place, look)
    if number is not None and not setting.many:
        low, high, value = (
            None if bound is None else number(bound) for bound in (setting.low, setting.high, value)
        )
        form = "%g" if number is float else "%d"
        return place.number_input(min_value=low, max_value=high, value=value, format=form, **look)
    text = place.text_input(value="" if value is None else _in_words(value), **look)
    entries = tuple(_entry(part, number or str) for part in text.split(",") if part.strip())
    return (entries or None) if setting.many else text.strip() or None


def _choice(setting: Setting, value: Any, place: Any, look: Mapping[str, Any]) -> Any:
    options = setting.choices or (True, False)
    if setting.many:
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
