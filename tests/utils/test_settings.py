"""Settings read off signatures: what is declared is found, what is not allowed is refused in words."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest

from driftlens.utils.errors import SpecError
from driftlens.utils.registry import Bounds, resolve_settings, setting_schemas, settings_model

if TYPE_CHECKING:
    from nowhere import Tensors  # type: ignore[import-not-found]

Share = Annotated[float, Bounds(0, 1, low_open=True, unit="share"), "entries kept"]


def method(
    base: Tensors,
    experts: Tensors,
    *,
    density: Share = 0.2,
    steps: Annotated[int, Bounds(low=1)] = 10,
    signs: Literal["sum", "count"] = "sum",
    rescale: bool = True,
    name: str | None = None,
    scales: Sequence[Annotated[float, Bounds(high=2)]] = (1.0,),
    drop: Sequence[str] = [],
    plain=0.5,  # type: ignore[no-untyped-def]
) -> None:
    """All kinds of setting."""


class Owner:
    def __init__(self, lam: Annotated[float, Bounds(low=0)] = 0.05, *, anchor: str = "merged") -> None:
        self.lam = lam
        self.anchor = anchor


def test_a_function_declares_its_keyword_only_parameters_and_nothing_else() -> None:
    found = setting_schemas(settings_model(method))
    assert json.loads(json.dumps(found)) == found, "plain data that a page without the method can be sent"
    told = {name: {key: at for key, at in schema.items() if at not in (name, "")} for name, schema in found.items()}
    text = {"type": "string", "minLength": 1}
    assert told == {
        "density": {
            **{"type": "number", "default": 0.2, "exclusiveMinimum": 0, "maximum": 1},
            **{"description": "entries kept", "unit": "share"},
        },
        "steps": {"type": "integer", "default": 10, "minimum": 1},
        "signs": {"type": "string", "default": "sum", "enum": ["sum", "count"]},
        "rescale": {"type": "boolean", "default": True},
        "name": {"anyOf": [text, {"type": "null"}], "default": None},
        "scales": {
            **{"type": "array", "items": {"type": "number", "maximum": 2}},
            **{"default": [1.0], "minItems": 1},
        },
        "drop": {"type": "array", "items": text, "default": []},
        "plain": {"type": "number", "default": 0.5},
    }


def test_what_is_given_goes_over_the_defaults_in_the_types_that_are_declared() -> None:
    found = resolve_settings(method, {"density": 1, "scales": [1, 0.5], "name": None}, "m")
    assert found == {
        "density": 1.0,
        "steps": 10,
        "signs": "sum",
        "rescale": True,
        "name": None,
        "scales": (1.0, 0.5),
        "drop": (),
        "plain": 0.5,
    }
    assert type(found["density"]) is float and type(found["scales"][0]) is float


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("density", "big", "a finite number more than 0 and at most 1"),
        ("density", True, "a finite number"),
        ("density", 0, "more than 0"),
        ("density", 1.001, "at most 1"),
        ("density", math.nan, "a finite number"),
        ("density", None, "a finite number"),
        ("density", [0.1], "a finite number"),
        ("plain", math.inf, "a finite number"),
        ("plain", 10**400, "a finite number"),
        ("steps", 2.0, "a whole number at least 1"),
        ("steps", 0, "at least 1"),
        ("signs", "su", "one of sum, count"),
        ("rescale", 1, "true or false"),
        ("rescale", "true", "true or false"),
        ("name", "", "text that is not empty, or nothing"),
        ("name", 3, "text"),
        ("scales", 1.0, "a list, each entry a finite number at most 2"),
        ("scales", [], "a list"),
        ("scales", [1, 2.5], "at most 2"),
        ("scales", [1, "x"], "a finite number"),
        ("drop", "abc", "a list, each entry text"),
        ("drop", {"a": 1}, "a list"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_what_is(name: str, value: Any, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        resolve_settings(method, {name: value}, "merge method 'm'")
    assert refused.value.message.startswith(f"merge method 'm': {name} is {value!r}; expected ")
    assert words in refused.value.message
    assert refused.value.context == {"setting": name}


def test_misspelt_names_and_choices_are_told_the_nearest() -> None:
    with pytest.raises(SpecError, match="has no parameter 'densty'") as name:
        resolve_settings(method, {"densty": 0.1}, "merge method 'm'")
    with pytest.raises(SpecError) as choice:
        resolve_settings(method, {"signs": "sums"}, "merge method 'm'")
    with pytest.raises(SpecError) as far:
        resolve_settings(Owner, {"zzz": 1}, "owner")
    assert name.value.hint == "Did you mean 'density'?" and choice.value.hint == "Did you mean 'sum'?"
    assert far.value.message.endswith("it takes lam, anchor") and not far.value.hint


def test_a_setting_without_default_must_be_given() -> None:
    def owner(*, rank: Annotated[int, Bounds(low=1)]) -> None: ...

    assert "default" not in setting_schemas(settings_model(owner))["rank"]
    assert resolve_settings(owner, {"rank": 2}, "o") == {"rank": 2}
    with pytest.raises(SpecError, match="o needs rank: a whole number at least 1"):
        resolve_settings(owner, {}, "o")


@pytest.mark.parametrize("kind", [dict[str, float] | int, int | float | None, Callable[[int], int]], ids=str)
def test_what_no_setting_can_be_is_an_error_of_whoever_wrote_the_method(kind: Any) -> None:
    def owner(*, table: Any = 0) -> None: ...

    owner.__annotations__["table"] = kind
    with pytest.raises(TypeError, match="'table' can't be a setting"):
        settings_model(owner)


def test_reading_settings_imports_no_arrays() -> None:
    code = "import sys, driftlens.utils.registry; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_on_and_off_are_words_though_yaml_reads_booleans() -> None:
    def owner(*, cv: Literal["on", "off"] = "on", best: Literal["auto", "off"] = "off") -> None: ...

    assert [resolve_settings(owner, {"cv": value}, "o")["cv"] for value in (False, True, "off")] == [
        "off",
        "on",
        "off",
    ]
    with pytest.raises(SpecError, match="expected one of auto, off"):
        resolve_settings(owner, {"best": False}, "o")
