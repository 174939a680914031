"""Settings as their owner declares them: the parameters of a function or of a class, read off the signature.

    def ties(base, experts, *, density: Annotated[float, Bounds(0, 1, low_open=True), "share kept"] = 0.2): ...

    settings_of(ties)                               # what a form, a help text or a preset needs to know
    resolve(ties, {"density": 1}, "method 'ties'")  # {"density": 1.0}; refuses unknown names and bad values

Nobody keeps a second list of names, types, defaults or bounds. Kinds of value: `float`, `int`, `bool`, `str`,
`Literal`, a `Sequence` of these, and `None` beside any. In `Annotated`, `Bounds` say which numbers are allowed, a
text what the setting does, and a `Label` what a form calls it.
"""

from __future__ import annotations

import collections.abc
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from driftlens.base.errors import SpecError, did_you_mean

Kind = Literal["number", "integer", "flag", "text", "choice"]

_KINDS: Mapping[object, Kind] = {float: "number", int: "integer", bool: "flag", str: "text"}
_WORDS: Mapping[Kind, str] = {
    "number": "a finite number",
    "integer": "a whole number",
    "flag": "true or false",
    "text": "text that is not empty",
}


@dataclass(frozen=True)
class Bounds:
    """Metadata of `Annotated`: between which a number lies, and its unit; of a sequence, every entry.

    Attributes:
        low: the least value; None for no bound.
        high: the greatest value; None for no bound.
        low_open: whether `low` itself is refused.
        unit: of the number.
    """

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    unit: str = ""


class Label(str):
    """Metadata of `Annotated`: what a form calls the setting, where its name would say too little."""


@dataclass(frozen=True)
class Setting:
    """One parameter of a method, as its signature declares it; every field is plain data.

    Attributes:
        name: of the parameter.
        kind: of the value, or of every entry where `many`.
        default: what it is if nobody says; None where `required`.
        low: the least number allowed; where `low_open`, it itself is not.
        high: the greatest number allowed.
        choices: the values of a `choice`.
        help: what it does.
        unit: of the number.
        low_open: see `low`.
        many: whether the value is a sequence.
        optional: whether None is allowed.
        required: whether there is no default.
        label: what a form calls it; its name where it is empty.
    """

    name: str
    kind: Kind
    default: Any = None
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    help: str = ""
    unit: str = ""
    low_open: bool = False
    many: bool = False
    optional: bool = False
    required: bool = False
    label: str = ""

    @property
    def expected(self) -> str:
        """What values are allowed, in words."""
        words = f"one of {', '.join(map(str, self.choices))}" if self.choices else _WORDS[self.kind]
        if self.low is not None:
            words += f" {'more than' if self.low_open else 'at least'} {self.low:g}"
        if self.high is not None:
            words += f"{'' if self.low is None else ' and'} at most {self.high:g}"
        words = f"a list, each entry {words}" if self.many else words
        return f"{words}, or nothing" if self.optional else words

    def read(self, value: Any) -> Any:
        """The value as the method gets it: a number as float, a list as tuple.

        Raises:
            SpecError: the value is not allowed; says what is.
        """
        if value is None and self.optional:
            return None
        if isinstance(value, bool) and {"on", "off"} <= {*self.choices}:
            value = "on" if value else "off"  # as YAML reads these words
        is_list = isinstance(value, list | tuple)
        entries = value if is_list else [value]
        is_empty = not entries and self.default != ()
        if is_list != self.many or is_empty or not all(map(self._fits, entries)):
            hint = did_you_mean(value, self.choices)
            raise SpecError(
                f"{self.name} is {value!r}; expected {self.expected}", hint=hint, setting=self.name
            )
        made = tuple(float(entry) if self.kind == "number" else entry for entry in entries)
        return made if self.many else made[0]

    def _fits(self, entry: Any) -> bool:
        if self.kind in ("number", "integer"):
            is_number = isinstance(entry, int if self.kind == "integer" else int | float)
            # Beyond these lie infinities and whole numbers that no machine has; NaN is never between two numbers.
            most = 2**63 - 1 if self.kind == "integer" else sys.float_info.max
            low = -most if self.low is None else self.low
            high = most if self.high is None else self.high
            is_inside = is_number and low <= entry <= high and not (self.low_open and entry == low)
            return is_inside and not isinstance(entry, bool)
        if self.kind == "choice":  # by type too: True and 1.0 are equal to 1
            return any(type(entry) is type(choice) and entry == choice for choice in self.choices)
        return isinstance(entry, bool) if self.kind == "flag" else isinstance(entry, str) and entry != ""


def settings_of(owner: Callable[..., object]) -> tuple[Setting, ...]:
    """The settings of a function, its keyword-only parameters, or of a class, the parameters of its constructor.

    A parameter without an annotation is of its default's type.

    Raises:
        TypeError: a parameter is annotated with something that no setting can be.
    """
    function: Any = inspect.unwrap(owner.__init__ if inspect.isclass(owner) else owner)
    ours = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = ours if inspect.isclass(owner) else ours[:1]
    parameters = [each for each in inspect.signature(owner).parameters.values() if each.kind in kinds]
    # Evaluated alone: the other annotations may name what is imported for type checkers only.
    given = {
        each.name: each.annotation for each in parameters if each.annotation is not inspect.Parameter.empty
    }
    holder = types.SimpleNamespace(__annotations__=given)
    hints = typing.get_type_hints(holder, globalns=function.__globals__, include_extras=True)
    return tuple(_setting(each, hints.get(each.name, type(each.default))) for each in parameters)


def _setting(parameter: inspect.Parameter, annotation: Any) -> Setting:
    required = parameter.default is inspect.Parameter.empty
    default = None if required else parameter.default
    default = tuple(default) if isinstance(default, list) else default
    return _described(Setting(parameter.name, "text", default, required=required), annotation)


def _described(setting: Setting, annotation: Any) -> Setting:
    """The setting with all that the annotation says."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        for said in arguments[1:]:
            if isinstance(said, Bounds):
                setting = replace(setting, **vars(said))
            elif isinstance(said, Label):
                setting = replace(setting, label=str(said))
            elif isinstance(said, str):
                setting = replace(setting, help=said)
        return _described(setting, arguments[0])
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        other = arguments[0] if arguments[1] is type(None) else arguments[1]
        return _described(replace(setting, optional=True), other)
    if origin in (collections.abc.Sequence, list, tuple):
        return _described(replace(setting, many=True), arguments[0])
    if origin is Literal:
        return replace(setting, kind="choice", choices=arguments)
    if annotation not in _KINDS:
        raise TypeError(
            f"the parameter {setting.name!r} can't be a setting: {annotation!r} is none of float, int, bool, str, "
            "Literal, a Sequence of these, or one of them beside None"
        )
    return replace(setting, kind=_KINDS[annotation])


def resolve(owner: Callable[..., object], given: Mapping[str, object], what: str) -> dict[str, Any]:
    """All settings of a function or class, those given over the defaults.

    Args:
        owner: whose signature declares them.
        given: by name.
        what: what messages call the owner, for example "merge method 'ties'".

    Raises:
        SpecError: a name that is none of its settings, a value that is not allowed, or one missing without default.
    """
    settings = {setting.name: setting for setting in settings_of(owner)}
    for name in given:
        if name not in settings:
            takes = ", ".join(settings) or "none"
            hint = did_you_mean(name, settings)
            raise SpecError(f"{what} has no parameter {name!r}; it takes {takes}", hint=hint, setting=name)
    values = {}
    for name, setting in settings.items():
        if name not in given and setting.required:
            raise SpecError(f"{what} needs {name}: {setting.expected}", setting=name)
        try:
            values[name] = setting.read(given[name]) if name in given else setting.default
        except SpecError as error:
            raise SpecError(f"{what}: {error.message}", hint=error.hint, **error.context) from None
    return values
