"""The form of the page Calibrate: nothing is computed while it is filled in."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import streamlit as st

from driftlens.calibration.presets import PRESETS
from driftlens_app.calibration import REPLACE, UPDATES, CalibrationSettings

_START, _ESTIMATE = "start-calibration", "estimate-calibration"
_SUGGESTED = "_suggested_name"
_OWN = "the run's spec, or FeatCal's defaults"
_NUMBERS: Sequence[tuple[str, str, float | None, float, str]] = (
    (
        "lam",
        "Ridge λ",
        None,
        0.01,
        "Pull towards the anchor, for Gram matrices of norm 1; no unit. Published: 0.05 (CLIP).",
    ),
    (
        "rho",
        "Anchor ρ",
        None,
        0.1,
        "The anchor is ρ · merged + (1 − ρ) · base; 1 is the merged model. Published: 2 (CLIP).",
    ),
    ("alpha", "Target α", 1.0, 0.05, "Share of the expert in the target, 0 to 1. Published: 0.3 (CLIP)."),
)
"""The method's numbers: setting, label, largest value, step, help."""


def calibration_form(
    start: CalibrationSettings, *, taken: Container[str], blocked: bool, may_export: bool
) -> tuple[CalibrationSettings, str]:
    """What the form says, and which of its buttons was pressed: "estimate", "calibrate" or "".

    Args:
        start: what it is filled in with on its first showing; its name also follows one that was used up.
        taken: names that the run's calibrations have.
        blocked: whether its buttons are off: a job writes to the run, or no jobs may be started at all.
        may_export: whether a folder may be written beside the run.
    """
    _fill_name(start, taken)
    with st.form("calibrate", enter_to_submit=False):
        name = st.text_input(
            "Name",
            key="name",
            help="The new variant is called calibrated:NAME. Letters, digits, - _ .",
        )
        presets = [_OWN, *PRESETS]
        preset = st.selectbox(
            "Published settings",
            presets,
            index=presets.index(start.preset) if start.preset in PRESETS else 0,
            format_func=_preset_label,
            key="preset",
            help="Values from the paper or its code; the fields below go over them.",
        )
        values = _numbers(start)
        auto = st.checkbox(
            "Choose λ, ρ and α on held-out calibration samples",
            start.auto,
            key="auto",
            help="Leave the three fields empty then. Takes several calibrations' time.",
        )
        update = st.multiselect(
            "Parameters to solve for",
            UPDATES,
            list(start.update),
            key="update",
            placeholder="as the settings say",
            help="Weights of linear modules, their biases, scale and shift of norms.",
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
                "FeatCal calibrate",
                type="primary",
                icon=":material/tune:",
                disabled=blocked,
                key=_START,
            )
            estimate = st.form_submit_button(
                "Estimate", icon=":material/timer:", disabled=blocked, key=_ESTIMATE
            )
    settings = CalibrationSettings(
        name=name.strip(),
        preset=None if preset == _OWN else preset,
        layers=layers.strip(),
        update=tuple(kind for kind in UPDATES if kind in update),
        auto=auto,
        save_weights=save,
        replace=replace,
        **values,
    )
    return settings, "calibrate" if calibrate else "estimate" if estimate else ""


def _fill_name(start: CalibrationSettings, taken: Container[str]) -> None:
    """Put the name to begin with into the form, and the next free one once a calibration has got it."""
    state = st.session_state
    if state.get(_START) or state.get(_ESTIMATE):
        return  # What was just sent stands, even if somebody else took the name meanwhile.
    is_used_up = start.name != state.get(_SUGGESTED) and state.get("name") in taken
    if "name" not in state or is_used_up:
        state["name"], state["replace"] = start.name, start.replace
    state[_SUGGESTED] = start.name


def _numbers(start: CalibrationSettings) -> Mapping[str, Any]:
    """The fields of the method's numbers; an empty one leaves the value to the settings above it."""
    values = {
        name: column.number_input(
            label,
            min_value=0.0,
            max_value=most,
            value=getattr(start, name),
            format="%g",
            step=step,
            placeholder="as above",
            key=name,
            help=help_text,
        )
        for column, (name, label, most, step, help_text) in zip(st.columns(3), _NUMBERS, strict=True)
    }
    samples = st.number_input(
        "Samples per task",
        min_value=1,
        value=start.samples,
        step=1,
        placeholder="as in the run's spec",
        key="samples",
        help="Calibration samples; they need no labels and are never those that accuracy is measured on.",
    )
    return {**values, "samples": samples}


def _preset_label(name: str) -> str:
    if name == _OWN:
        return name
    values = PRESETS[name]
    return f"{name}: λ {values['lam']:g}, ρ {values['rho']:g}, α {values['alpha']:g}"
