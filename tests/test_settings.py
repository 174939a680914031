"""Settings read off signatures: what is declared is found, what is not allowed is refused in words."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest

from driftlens.base.errors import SpecError
from driftlens.base.settings import Bounds, Label, Setting, resolve, settings_of

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


def settings() -> dict[str, Setting]:
    return {setting.name: setting for setting in settings_of(method)}


def test_a_label_is_told_from_what_a_setting_does() -> None:
    def labelled(*, lam: Annotated[float, Label("Ridge λ"), "pulls"] = 1.0) -> None: ...

    (found,) = settings_of(labelled)
    assert (found.label, found.help) == ("Ridge λ", "pulls") and settings()["density"].label == ""


def test_a_function_declares_its_keyword_only_parameters_and_nothing_else() -> None:
    found = settings()
    assert list(found) == ["density", "steps", "signs", "rescale", "name", "scales", "drop", "plain"]
    assert found["density"] == Setting(
        "density", "number", 0.2, 0, 1, help="entries kept", unit="share", low_open=True
    )
    assert found["steps"] == Setting("steps", "integer", 10, low=1)
    assert found["signs"] == Setting("signs", "choice", "sum", choices=("sum", "count"))
    assert found["rescale"] == Setting("rescale", "flag", True)
    assert found["name"] == Setting("name", "text", optional=True)
    assert found["scales"] == Setting("scales", "number", (1.0,), high=2, many=True)
    assert found["drop"] == Setting("drop", "text", (), many=True)
    assert found["plain"] == Setting("plain", "number", 0.5)


def test_a_class_declares_its_constructor() -> None:
    assert settings_of(Owner) == (Setting("lam", "number", 0.05, low=0), Setting("anchor", "text", "merged"))


def test_settings_are_plain_data_that_a_page_without_the_method_can_be_sent() -> None:
    sent = json.loads(json.dumps([dataclasses.asdict(setting) for setting in settings_of(method)]))
    assert sent[0]["name"] == "density" and sent[2]["choices"] == ["sum", "count"]


def test_what_is_given_goes_over_the_defaults_in_the_types_that_are_declared() -> None:
    found = resolve(method, {"density": 1, "scales": [1, 0.5], "name": None}, "m")
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
        resolve(method, {name: value}, "merge method 'm'")
    assert refused.value.message.startswith(f"merge method 'm': {name} is {value!r}; expected ")
    assert words in refused.value.message
    assert refused.value.context == {"setting": name}


def test_an_empty_list_is_allowed_where_it_is_the_default() -> None:
    assert resolve(method, {"drop": []}, "m")["drop"] == ()


def test_misspelt_names_and_choices_are_told_the_nearest() -> None:
    with pytest.raises(SpecError, match="has no parameter 'densty'") as name:
        resolve(method, {"densty": 0.1}, "merge method 'm'")
    with pytest.raises(SpecError) as choice:
        resolve(method, {"signs": "sums"}, "merge method 'm'")
    with pytest.raises(SpecError) as far:
        resolve(Owner, {"zzz": 1}, "owner")
    assert name.value.hint == "Did you mean 'density'?" and choice.value.hint == "Did you mean 'sum'?"
    assert far.value.message.endswith("it takes lam, anchor") and not far.value.hint


def test_a_choice_is_told_apart_by_type_too() -> None:
    def owner(*, one: Literal[1, "auto"] = 1) -> None: ...

    assert resolve(owner, {"one": "auto"}, "o") == {"one": "auto"}
    for value in (True, 1.0):
        with pytest.raises(SpecError, match="one of 1, auto"):
            resolve(owner, {"one": value}, "o")


def test_a_setting_without_default_must_be_given() -> None:
    def owner(*, rank: Annotated[int, Bounds(low=1)]) -> None: ...

    assert settings_of(owner) == (Setting("rank", "integer", low=1, required=True),)
    assert resolve(owner, {"rank": 2}, "o") == {"rank": 2}
    with pytest.raises(SpecError, match="o needs rank: a whole number at least 1"):
        resolve(owner, {}, "o")


def test_what_no_setting_can_be_is_an_error_of_whoever_wrote_the_method() -> None:
    def owner(*, table: dict[str, float] | int = 0) -> None: ...

    with pytest.raises(TypeError, match="'table' can't be a setting"):
        settings_of(owner)


def test_reading_settings_takes_the_standard_library_alone() -> None:
    code = "import sys, driftlens.base.settings; print([m for m in ('torch', 'pydantic', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_on_and_off_are_words_though_yaml_reads_booleans() -> None:
    setting = Setting("cv", "choice", "on", choices=("on", "off"))
    assert [setting.read(value) for value in (False, True, "off")] == ["off", "on", "off"]
    with pytest.raises(SpecError, match="expected one of auto, off"):
        Setting("cv", "choice", "off", choices=("auto", "off")).read(False)
