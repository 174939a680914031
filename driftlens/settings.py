"""Settings as their owner declares them: the parameters of a function or of a class, read off the signature.

    def ties(base, experts, *, density: Annotated[float, Bounds(0, 1, low_open=True), "share kept"] = 0.2): ...

    settings_of(ties)                               # what a form, a help text or a preset needs to know
    resolve(ties, {"density": 1}, "method 'ties'")  # {"density": 1.0}; refuses unknown names and bad values

Nobody keeps a second list of names, types, defaults or bounds. Kinds of value: `float`, `int`, `bool`, `str`,
`Literal`, a `Sequence` of these, and `None` beside any. In `Annotated`, `Bounds` say which numbers are allowed and a
text says what the setting does.
"""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from driftlens.errors import SpecError

Kind = Literal["number", "integer", "flag", "text", "choice"]

_KINDS: Mapping[object, Kind] = {float: "number", int: "integer", bool: "flag", str: "text"}
_WORDS: Mapping[Kind, str] = {
    "number": "a finite number",
    "integer": "a whole number",
    "flag": "true or false",
    "text": "text that is not empty",
}
_NUMBERS: Mapping[Kind, tuple[Any, Any]] = {
    "number": (numbers.Real, float),
    "integer": (numbers.Integral, int),
}
"""What is taken for a number, those of other libraries too, and what it is made into."""


@dataclass(frozen=True)
class Bounds:
    """Metadata of `Annotated`: between which a number lies; of a sequence, every entry.

    Attributes:
        low: the least value; None for no bound.
        high: the greatest value; None for no bound.
        low_open: whether `low` itself is refused.
        high_open: whether `high` itself is refused.
        unit: of the number.
    """

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    unit: str = ""


@dataclass(frozen=True)
class Setting:
    """One parameter of a method, as its signature declares it; every field is plain data.

    Attributes:
        name: of the parameter.
        kind: of the value, or of every entry where `many`.
        default: what it is if nobody says; None where `required`.
        low: the least number allowed.
        high: the greatest number allowed.
        choices: the values of a `choice`.
        help: what it does.
        unit: of the number.
        low_open: whether `low` itself is refused.
        high_open: whether `high` itself is refused.
        many: whether the value is a sequence.
        optional: whether None is allowed.
        required: whether there is no default.
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
    high_open: bool = False
    many: bool = False
    optional: bool = False
    required: bool = False

    @property
    def expected(self) -> str:
        """What values are allowed, in words."""
        words = f"one of {', '.join(map(str, self.choices))}" if self.choices else _WORDS[self.kind]
        bounds = []
        if self.low is not None:
            bounds.append(f"{'more than' if self.low_open else 'at least'} {self.low:g}")
        if self.high is not None:
            bounds.append(f"{'less than' if self.high_open else 'at most'} {self.high:g}")
        words = " ".join([words, " and ".join(bounds)]).strip()
        words = f"a list, each entry {words}" if self.many else words
        return f"{words}, or nothing" if self.optional else words

    def read(self, value: Any) -> Any:
        """The value as the method gets it: a number as float, a list as tuple.

        Raises:
            SpecError: the value is not allowed; says what is.
        """
        if value is None and self.optional:
            return None
        if not self.many:
            return self._entry(value, value)
        is_list = isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes)
        if not is_list or (not value and self.default != ()):
            raise self._refusal(value)
        return tuple(self._entry(entry, value) for entry in value)

    def _entry(self, entry: object, value: object) -> Any:
        if self.kind in _NUMBERS:
            return self._number(entry, value)
        is_one = {
            "flag": isinstance(entry, bool),
            "text": isinstance(entry, str) and entry != "",
            # By type too: True and 1.0 are equal to 1.
            "choice": any(type(entry) is type(choice) and entry == choice for choice in self.choices),
        }
        if not is_one[self.kind]:
            raise self._refusal(value, near=entry)
        return entry

    def _number(self, entry: object, value: object) -> Any:
        wanted, made = _NUMBERS[self.kind]
        if isinstance(entry, bool) or not isinstance(entry, wanted):
            raise self._refusal(value)
        try:
            found = made(entry)
        except OverflowError:  # a whole number beyond all floats
            raise self._refusal(value) from None
        is_above = self.low is None or found > self.low or (found == self.low and not self.low_open)
        is_below = self.high is None or found < self.high or (found == self.high and not self.high_open)
        if not (math.isfinite(found) and is_above and is_below):
            raise self._refusal(value)
        return found

    def _refusal(self, value: object, near: object = None) -> SpecError:
        hint = did_you_mean(near, self.choices) if isinstance(near, str) else ""
        message = f"{self.name} is {value!r}; expected {self.expected}"
        return SpecError(message, hint=hint, setting=self.name)


def did_you_mean(name: object, known: Collection[object]) -> str:
    """`Did you mean 'x'?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(str(name), [str(other) for other in known], n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def settings_of(owner: Callable[..., object]) -> tuple[Setting, ...]:
    """The settings of a function, its keyword-only parameters, or of a class, the parameters of its constructor.

    A parameter without an annotation is of its default's type.

    Raises:
        TypeError: a parameter is annotated with something that no setting can be.
    """
    function: Any = owner.__init__ if inspect.isclass(owner) else owner
    ours = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = ours if inspect.isclass(owner) else ours[:1]
    found = {name: p for name, p in inspect.signature(owner).parameters.items() if p.kind in kinds}
    hints = _annotations(function, found)
    return tuple(_setting(name, parameter, hints.get(name)) for name, parameter in found.items())


def _annotations(function: Any, names: Collection[str]) -> dict[str, Any]:
    """Annotations of some parameters, evaluated; the others may name what is imported for type checkers alone."""
    function = inspect.unwrap(function)
    given = getattr(function, "__annotations__", {})
    some = types.SimpleNamespace(__annotations__={name: given[name] for name in names if name in given})
    return typing.get_type_hints(some, globalns=getattr(function, "__globals__", {}), include_extras=True)


def _setting(name: str, parameter: inspect.Parameter, annotation: Any) -> Setting:
    required = parameter.default is inspect.Parameter.empty
    default = None if required else parameter.default
    if annotation is None and default is not None:
        annotation = type(default)
    default = tuple(default) if isinstance(default, list) else default
    return _described(Setting(name, "text", default, required=required), annotation)


def _described(setting: Setting, annotation: Any) -> Setting:
    """The setting with all that the annotation says."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        for said in arguments[1:]:
            if isinstance(said, Bounds):
                setting = replace(setting, **vars(said))
            elif isinstance(said, str):
                setting = replace(setting, help=said)
        return _described(setting, arguments[0])
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        other = next(argument for argument in arguments if argument is not type(None))
        return _described(replace(setting, optional=True), other)
    if origin in (collections.abc.Sequence, list, tuple):
        return _described(replace(setting, many=True), arguments[0])
    if origin is Literal:
        return replace(setting, kind="choice", choices=arguments)
    if annotation in _KINDS:
        return replace(setting, kind=_KINDS[annotation])
    raise TypeError(
        f"the parameter {setting.name!r} can't be a setting: {annotation!r} is none of float, int, bool, str, "
        "Literal, a Sequence of these, or one of them beside None"
    )


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
            hint = did_you_mean(name, settings) or f"It takes {', '.join(settings) or 'none'}."
            raise SpecError(f"{what} has no parameter {name!r}", hint=hint, setting=name)
    found = {}
    for name, setting in settings.items():
        if name not in given and setting.required:
            raise SpecError(f"{what} needs {name}: {setting.expected}", setting=name)
        try:
            found[name] = setting.read(given[name]) if name in given else setting.default
        except SpecError as error:
            raise SpecError(f"{what}: {error.message}", hint=error.hint, **error.context) from None
    return found
