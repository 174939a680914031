"""Calibrators and merge methods as the command line lists them, and the form of one calibration."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args

import streamlit as st
from pydantic import TypeAdapter

from driftlens.config.requests import DEFAULT_METHOD, CalibrationRequest, OutDtype, parse_layers
from driftlens.utils.errors import SpecError, pluralize
from driftlens.utils.registry import Schema, allowed_values_text, setting_choices, value_schema
from driftlens.utils.variants import next_free_name, suited_preset
from driftlens_app.processes import run_json_command
from driftlens_app.settings import Settings
from driftlens_app.show import escape_except_code, escape_markdown, show_note

_START, _QUICK, _BEST = "start-calibration", "quick-calibration", "best-calibration"
_OWN = "the run's spec, or the defaults"
# Python types of the numeric kinds of JSON Schema.
_NUMBERS: Mapping[str, type[int] | type[float]] = {"number": float, "integer": int}
_ON_BEST = (
    "Compares repairs, base and merges on held-out calibration samples, without labels, and keeps the one that is "
    "nearest to the experts. If that is the base, do not use the merge. Settings lists the candidates."
)
START = "Calibrate with these settings"
# Label of the field `replace`; an error message refers to it.
REPLACE = "Replace a calibration of this name"


@dataclass(frozen=True)
class MethodInfo:
    """Metadata of a calibrator or merge method, as `driftlens doctor --methods --json` prints it.

    Attributes:
        suited: preset by kind of models; that of `""` is for all others.
        automatic: settings that can be chosen on held-out samples.
        swept: factors of published values that a sweep tries.
        of_base: swept settings that need a base.
        candidates: by preset what `--auto` compares.
        effort: CPU time relative to FeatCal.
        fewest: smallest number of samples per task for a choice.
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

    def preset_for(self, model_kinds: Sequence[str]) -> str | None:
        """Return the preset for models of these kinds, of which the first counts most; None for the defaults."""
        return suited_preset(self.suited, model_kinds)


# Cached for all users: importing torch in the subprocess takes seconds, and methods do not change while it runs.
@st.cache_resource(show_spinner="Loading methods")
def available_methods(kind: str = "calibrators") -> Mapping[str, MethodInfo]:
    """Return methods (or loaders) by name; the command line is queried once per server, as this imports torch."""
    entries = run_json_command(("doctor", "--methods", "--json"), Settings.from_environment().root)[kind]
    return TypeAdapter(dict[str, MethodInfo]).validate_python(entries)


def require_free_name(request: CalibrationRequest, taken: Container[str]) -> None:
    """Raise SpecError if a finished calibration has this name, unless it is to be replaced or resumed."""
    if request.name in taken and not (request.replace or request.resume):
        raise SpecError(
            f"the run has a calibration {request.name!r} already",
            hint=f"Check '{REPLACE}', or choose another name.",
        )


def show_calibration_form(
    place: Any,
    *,
    taken: Container[str],
    blocked: bool,
    obstacle: str,
    exports: str | None,
    model_kinds: Sequence[str] = (),
    counts: Mapping[str, int] = MappingProxyType({}),
) -> tuple[CalibrationRequest, bool]:
    """Show two buttons that repair, and a drawer of settings; return the request, and True if a button was pressed.

    Args:
        place: container of the buttons; None while a job's progress takes their place.
        taken: names of finished calibrations.
        blocked: True to disable all buttons.
        obstacle: why no calibration of the run can start; empty if one can.
        exports: start of the path of exported weights; None if they cannot be exported.
        model_kinds: kinds of the run's models, which decide the preset.
        counts: calibration samples by task.
    """
    default = available_methods()[DEFAULT_METHOD]
    preset = default.preset_for(model_kinds)
    few = next((task for task, count in counts.items() if count < default.fewest), None)
    quick = best = False
    if place is not None:
        with place, st.container(horizontal=True):
            quick = st.button(
                f"{default.title} calibrate",
                type="primary",
                icon=":material/tune:",
                disabled=blocked or bool(obstacle),
                key=_QUICK,
                help=escape_markdown(f"Settings for such models: {_preset_label(preset or _OWN, default.presets)}."),
            )
            best = st.button(
                "Find the best repair",
                icon=":material/auto_awesome:",
                disabled=blocked or few is not None or bool(obstacle),
                key=_BEST,
                help=_ON_BEST,
            )
    if obstacle:
        st.warning(
            f"Calibration is not possible: {escape_except_code(obstacle.rstrip('.'))}.",
            icon=":material/warning:",
        )
    if few is not None:
        show_note(
            f"Task {escape_markdown(few)} has {pluralize(counts[few], 'calibration sample')}, but the search needs "
            f"at least {default.fewest} per task to hold some out. Use {default.title} or a method under Settings."
        )
    with st.expander("Settings"):
        tried = ", ".join(default.candidates[preset or ""])
        st.caption(f"*Find the best repair* tries {escape_markdown(tried)}, and the settings of this run's repairs.")
        calibrators = available_methods()
        chosen = st.selectbox(
            "Calibrator",
            [*calibrators],
            index=[*calibrators].index(DEFAULT_METHOD),
            format_func=lambda name: calibrators[name].title,
            key="calibrator",
            on_change=lambda: st.session_state.pop("name", None),
        )
        _suggest_name(chosen, taken)
        with st.form("calibrate", enter_to_submit=False):
            fields, pressed = _show_request_fields(
                chosen, model_kinds, blocked=blocked, may_export=exports is not None
            )
    if quick or best:
        # The best one is named after its method.
        name = "" if best else next_free_name(DEFAULT_METHOD, taken)
        return CalibrationRequest(name=name, preset=preset, auto=best), True
    if fields.pop("export"):
        fields["save_weights"] = f"{exports}-{fields['name']}"
    return CalibrationRequest(**fields), pressed


def _show_request_fields(
    chosen: str, model_kinds: Sequence[str], *, blocked: bool, may_export: bool
) -> tuple[dict[str, Any], bool]:
    """Show the fields of a calibration request; return their values and if the button was pressed."""
    method = available_methods()[chosen]
    fields: dict[str, Any] = {"method": chosen}
    fields["name"] = st.text_input(
        "Name", key="name", help="Letters, digits, - _ . The variant is called calibrated:NAME."
    ).strip()
    suited = method.preset_for(model_kinds)
    presets = [_OWN, *sorted(method.presets, key=lambda name: name != suited)]
    preset = st.selectbox(
        "Preset",
        presets,
        index=presets.index(suited or _OWN),
        format_func=lambda name: _preset_label(name, method.presets),
        key=f"{chosen} preset",
        help="Settings from the paper, its code or a study; fields below override them.",
    )
    fields["preset"] = None if preset == _OWN else preset
    published = method.presets.get(preset, {})
    parameters = _show_method_settings(chosen, method)
    fields["parameters"] = {name: value for name, value in parameters.items() if value != published.get(name)}
    fields["samples"] = st.number_input(
        "Samples per task",
        min_value=1,
        value=None,
        step=1,
        placeholder="as in the spec",
        key="samples",
        help="Calibration samples: unlabelled, and disjoint from test samples.",
    )
    fields["views"] = _optional_text_field(
        "Views of samples",
        placeholder=f"auto:{published['views']} unless the spec has some"
        if "views" in published
        else "as in the spec",
        key="views",
        help="Augmented copies per sample: crop:3, mix:3, words:3, auto or none.",
    )
    fields["interpolate"] = _optional_text_field(
        "Interpolation with the base",
        placeholder="1",
        key="interpolate",
        help="From 0 (the base) over 1 (the repair) to 1.5.",
    )
    fields["auto"] = bool(method.automatic) and st.checkbox(
        f"Choose {', '.join(method.automatic)} on held-out calibration samples",
        key="auto",
        help="Leave their fields empty. Runs several calibrations.",
    )
    layers = st.text_input(
        "Layers",
        key="layers",
        placeholder="all blocks",
        help="Comma-separated numbers or patterns on module paths.",
    )
    fields["layers"] = parse_layers(layers) or None
    fields |= _show_export_fields(may_export=may_export)
    fields["replace"] = st.checkbox(REPLACE, key="replace")
    pressed = st.form_submit_button(START, icon=":material/tune:", disabled=blocked, key=_START)
    return fields, pressed


def _optional_text_field(label: str, **field: Any) -> str | None:
    return st.text_input(label, **field).strip() or None


def _show_export_fields(*, may_export: bool) -> dict[str, Any]:
    types = get_args(OutDtype)
    export = st.checkbox(
        "Also export for the original library",
        key="save_weights",
        disabled=not may_export,
        help="A folder next to the run, with config, preprocessor and model card. The run keeps the weights.",
    )
    out_dtype = st.selectbox(
        "Number type",
        types,
        index=None,
        placeholder="as the base",
        key="out_dtype",
        help="float32 keeps changes that half precision rounds away.",
    )
    return {"export": export, "out_dtype": out_dtype}


def _suggest_name(stem: str, taken: Container[str]) -> None:
    """Prefill the calibration name with an unused one."""
    state = st.session_state
    # A name that was just submitted is kept, even if another user took it meanwhile.
    if not any(state.get(button) for button in (_START, _QUICK, _BEST)) and state.get("name", "") in ("", *taken):
        state["name"], state["replace"] = next_free_name(stem, taken), False


def _show_method_settings(owner: str, method: MethodInfo) -> dict[str, Any]:
    """Show form fields for the settings of a method; return the values of non-empty fields."""
    # Settings outside every preset are rarely changed, so they are shown in an expander.
    published = {name for preset in method.presets.values() for name in preset} or {*method.settings}
    rest = {name: schema for name, schema in method.settings.items() if name not in published}
    values = _show_setting_columns(
        {name: schema for name, schema in method.settings.items() if name in published}, owner
    )
    if rest:
        with st.expander("More settings"):
            values |= _show_setting_columns(rest, owner)
    return {name: value for name, value in values.items() if value is not None}


def _show_setting_columns(settings: Mapping[str, Schema], owner: str) -> dict[str, Any]:
    """Show form fields in two columns; return their values."""
    columns = itertools.cycle(st.columns(2))
    return {name: _show_setting_field(f"{owner}.{name}", settings[name], next(columns)) for name in settings}


def _show_setting_field(key: str, schema: Schema, place: Any) -> Any:
    """Show the form field of one setting and return its value; None if it is empty."""
    entry, is_list = value_schema(schema)
    default = schema.get("default")
    usual = "" if default is None else f"; default {_format_setting_value(default)}"
    about = schema.get("description") or key.rpartition(".")[2]
    look: dict[str, Any] = {
        "label": schema["title"],
        "key": key,
        "placeholder": "as above",
        "help": escape_markdown(f"{about}: {allowed_values_text(schema)}{usual}."),
    }
    if setting_choices(entry) or entry["type"] == "boolean":
        options = setting_choices(entry) or (True, False)
        if not is_list:
            return place.selectbox(options=options, index=None, format_func=_format_setting_value, **look)
        chosen = place.multiselect(options=options, format_func=_format_setting_value, **look)
        return tuple(option for option in options if option in chosen) or None
    number = _NUMBERS.get(entry["type"])
    if number is not None and not is_list:
        low = entry.get("minimum", entry.get("exclusiveMinimum"))
        low, high = (None if bound is None else number(bound) for bound in (low, entry.get("maximum")))
        form = "%g" if number is float else "%d"
        return place.number_input(min_value=low, max_value=high, value=None, format=form, **look)
    text = place.text_input(**look)
    entries = tuple(_parse_list_entry(part, number or str) for part in text.split(",") if part.strip())
    return (entries or None) if is_list else text.strip() or None


def _parse_list_entry(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        # The command line refuses it and states what the setting expects.
        return text


def _format_setting_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _preset_label(name: str, presets: Mapping[str, Mapping[str, Any]]) -> str:
    settings = presets.get(name, {}).items()
    numbers = ", ".join(f"{key} {value:g}" for key, value in settings if isinstance(value, int | float))
    return f"{name}: {numbers}" if numbers else name
