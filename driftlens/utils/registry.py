"""Registries of entries from the modules of one package and from installed plug-ins, with settings and diagnostics.

A distribution adds an entry by an entry point: its name is the entry's name, its value a module that registers the
entry (`examples/driftlens-example` has two). The settings of an entry are the parameters of its function or class, read
off the signature by `settings_model`: `float`, `int`, `bool`, `str`, `Literal`, a `Sequence` of these, and each of them
or `None`. In `Annotated`, `Bounds` limit a number, a string describes the setting, and a `Label` names it in forms.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import annotated_types
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from driftlens.utils.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")


def installed_plugins(group: str = "") -> list[EntryPoint]:
    """List the plug-in entry points of a group or of all, without imports; the current folder is no installation."""
    entries = _find_entry_points(tuple(folder for folder in sys.path if not _is_current_folder(folder)))
    return [entry for entry in entries if group in ("", entry.group)]


@functools.cache
def _find_entry_points(folders: tuple[str, ...]) -> list[EntryPoint]:
    from importlib.metadata import distributions  # slow to import

    entries = (entry for distribution in distributions(path=list(folders)) for entry in distribution.entry_points)
    # A set, because a package may be installed twice.
    ours = {entry for entry in entries if entry.group.startswith("driftlens.")}
    return sorted(ours, key=lambda entry: (entry.group, entry.name))


def _is_current_folder(folder: str) -> bool:
    try:
        return os.path.samefile(folder or ".", ".")  # noqa: PTH121
    except OSError:
        return False


def package_and_version(entry: EntryPoint) -> tuple[str, str]:
    """Return name and version of the package that provides a plug-in entry point."""
    return (entry.dist.name, entry.dist.version) if entry.dist else ("", "")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping of names to registered entries; it imports all modules of `package` and plug-ins on first use.

    Where one of the files can't be imported, every lookup says so: a list without its entries would pass for whole.
    Other distributions add entries under the entry point `group`, if there is one; `kind` is what messages say.
    """

    def __init__(self, kind: str, package: str, group: str = "") -> None:
        self.kind = kind
        self.package = package
        self.group = group
        self._entries: dict[str, T] = {}
        self._discovered = False
        self._broken: SpecError | None = None

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an entry under `name`; a notebook cell may register its own again."""

        def _add_entry(entry: T) -> T:
            is_by_hand = getattr(entry, "__module__", "") == "__main__"
            if is_by_hand:
                # Otherwise a duplicate would be reported for the file that had the name first.
                self._import_entries()
            before = self._entries.get(name)
            if before is not None and not (is_by_hand and getattr(before, "__module__", "") == "__main__"):
                raise ValueError(f"{self.kind} {name!r} is registered twice; rename the new one")
            self._entries[name] = entry
            return entry

        return _add_entry

    def __getitem__(self, name: str) -> T:
        """Return the entry called `name`; a `SpecError` lists the known names and the most similar one."""
        self._import_entries()
        try:
            return self._entries[name]
        except KeyError:
            raise SpecError(
                f"no {self.kind} called {name!r}; there are {', '.join(self)}",
                hint=did_you_mean(name, self._entries),
            ) from None

    def __contains__(self, name: object) -> bool:
        self._import_entries()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._import_entries()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._import_entries()
        return len(self._entries)

    def _import_entries(self) -> None:
        """Import every module of the package, then the installed plug-ins, once."""
        if self._broken is not None:
            raise self._broken
        if self._discovered:
            return
        # Set before the imports, because modules may look up entries while they are imported.
        self._discovered = True
        name, hint = self.package, "Fix that file, or remove it."
        try:
            for module in pkgutil.iter_modules(importlib.import_module(name).__path__):
                name = f"{self.package}.{module.name}"
                importlib.import_module(name)
            for entry in installed_plugins(self.group) if self.group else ():
                distribution, version = package_and_version(entry)
                name = f"{entry.value} of {distribution} {version}"
                hint = f"Install another version of {distribution}, or remove it: pip uninstall {distribution}"
                entry.load()
                if entry.name not in self._entries:
                    raise LookupError(f"it does not register the {self.kind} {entry.name!r}")
        except (Exception, SystemExit) as error:
            reason = f"{name} can't be imported ({type(error).__name__}: {error})"
            self._broken = SpecError(f"the {self.kind}s are incomplete: {reason}", hint=hint)
            raise self._broken from error
        except BaseException:
            # Interrupted by the user; the next lookup starts again.
            self._discovered = False
            raise


# JSON Schema of one setting: type and bounds, `title`, `description`, `default` unless it is required.
Schema = Mapping[str, Any]

_TYPES = {
    "number": "a finite number",
    "integer": "a whole number",
    "boolean": "true or false",
    "string": "text that is not empty",
}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most"}
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, str_min_length=1)


@dataclass(frozen=True)
class Bounds(annotated_types.GroupedMetadata):
    """Annotation of a setting: lower and upper limit of a number (`low_open` excludes the lower one) and unit."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    unit: str = ""

    def __iter__(self) -> Iterator[annotated_types.BaseMetadata]:
        """Yield the bounds as pydantic's metadata."""
        if self.low is not None:
            yield annotated_types.Gt(self.low) if self.low_open else annotated_types.Ge(self.low)
        if self.high is not None:
            yield annotated_types.Le(self.high)


class Label(str):
    """Annotation of a setting: its name in forms."""


def settings_model(owner: Callable[..., object]) -> type[BaseModel]:
    """Build a pydantic model of the settings of a function or class from its signature.

    A parameter without annotation has the type of its default.

    Raises:
        TypeError: a parameter has an annotation that is not supported.
    """
    # Hashable, which type checkers don't believe of an abstract class.
    key: Any = owner
    return _build_settings_model(key)


@functools.cache
def _build_settings_model(owner: Callable[..., object]) -> type[BaseModel]:
    function: Any = inspect.unwrap(owner.__init__ if inspect.isclass(owner) else owner)
    ours = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = ours if inspect.isclass(owner) else ours[:1]
    parameters = [parameter for parameter in inspect.signature(owner).parameters.values() if parameter.kind in kinds]
    # Only settings are evaluated: other annotations may use names imported for type checkers only.
    annotations = {
        parameter.name: parameter.annotation for parameter in parameters if parameter.annotation is not parameter.empty
    }
    holder = types.SimpleNamespace(__annotations__=annotations)
    hints = typing.get_type_hints(holder, globalns=function.__globals__, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in parameters:
        name, default = parameter.name, parameter.default
        annotation = hints.get(name, type(default))
        notes = getattr(annotation, "__metadata__", ())
        fields[name] = (
            _type_with_checks(annotation, name, least=0 if default in ((), []) else 1),
            Field(
                ... if default is parameter.empty else _list_to_tuple(default),
                title=next((str(note) for note in notes if isinstance(note, Label)), name),
                description=next((note for note in notes if type(note) is str), None),
                json_schema_extra={"unit": next((n.unit for n in notes if isinstance(n, Bounds)), "")},
            ),
        )
    return create_model("Settings", __config__=_STRICT, **fields)


def _type_with_checks(annotation: Any, name: str, least: int = 1) -> Any:
    """Return the annotated type of a setting with extra validators; lists need `least` entries or more."""
    notes = getattr(annotation, "__metadata__", ())
    kind = annotation.__origin__ if notes else annotation
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        kind = _type_with_checks(arguments[0], name) | None
    elif origin is Sequence:
        kind = tuple[_type_with_checks(arguments[0], name), ...]  # type: ignore[misc]
        # An empty list is refused, unless it is the default.
        notes = (*notes, Field(min_length=least or None), BeforeValidator(_list_to_tuple))
    elif origin is Literal:
        notes = (*notes, BeforeValidator(functools.partial(_validate_choice, arguments)))
    elif kind is int:
        notes = (*notes, AfterValidator(_validate_64_bit_integer))
    elif kind not in (float, bool, str):
        raise TypeError(
            f"parameter {name!r} can't be a setting: {annotation!r} is not float, int, bool, str, Literal, "
            "a Sequence of these, or one of them | None"
        )
    return Annotated[(kind, *notes)] if notes else kind


def setting_schemas(model: type[BaseModel]) -> dict[str, Schema]:
    """Return the JSON schema of every setting of a settings model, by name."""
    return dict(model.model_json_schema().get("properties", {}))


def setting_choices(schema: Schema) -> tuple[Any, ...]:
    """List the allowed values of an enumerated setting; empty if its values are not enumerated."""
    return tuple(schema.get("enum") or [schema["const"]] if "const" in schema or "enum" in schema else ())


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _validate_choice(choices: tuple[Any, ...], value: object) -> object:
    if isinstance(value, bool) and {"on", "off"} <= {*choices}:
        # As YAML reads these words.
        return "on" if value else "off"
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError("the type must match, too: True and 1.0 equal 1")
    return value


def _validate_64_bit_integer(value: int) -> int:
    if abs(value) >= 2**63:
        raise ValueError("the integer does not fit into 64 bits")
    return value


def value_schema(schema: Schema) -> tuple[Schema, bool]:
    """Return the JSON schema of a setting's value or list entries, and True if the setting is a list."""
    value = schema.get("anyOf", [schema])[0]
    return value.get("items", value), value.get("type") == "array"


def allowed_values_text(schema: Schema) -> str:
    """Describe the allowed values of a setting in words, from its JSON schema."""
    entry, is_list = value_schema(schema)
    choices = setting_choices(entry)
    words = f"one of {', '.join(map(str, choices))}" if choices else _TYPES[entry["type"]]
    bounds = [f"{bound} {entry[key]:g}" for key, bound in _BOUNDS.items() if key in entry]
    words = f"{words} {' and '.join(bounds)}" if bounds else words
    words = f"a list, each entry {words}" if is_list else words
    return f"{words}, or nothing" if "anyOf" in schema else words


def resolve_settings(
    owner: Callable[..., object], values: Mapping[str, object], owner_name: str = ""
) -> dict[str, Any]:
    """Validate settings of a function or class and merge them over its defaults.

    Args:
        owner: the function or class.
        values: settings by name.
        owner_name: the owner's name in messages, for example "merge method 'ties'".

    Raises:
        SpecError: an unknown name, a value that is not allowed, or a missing value without default.
    """
    settings = settings_model(owner)
    before = f"{owner_name}: " if owner_name else ""
    try:
        return dict(settings.model_validate(dict(values)))
    except ValidationError as error:
        # Reversed, so that the first of several errors of one setting stays.
        problems = {problem["loc"][0]: problem["type"] for problem in reversed(error.errors())}
    fields = settings.model_fields
    # Unknown names first: a misspelt name is usually the cause of a missing one.
    for name in values:
        if name not in fields:
            message = f"{owner_name} has no parameter {name!r}; it takes {', '.join(fields) or 'none'}"
            raise SpecError(message, hint=did_you_mean(name, fields), setting=name)
    name = next(field for field in fields if field in problems)
    schema = setting_schemas(settings)[name]
    if problems[name] == "missing":
        raise SpecError(f"{owner_name} needs {name}: {allowed_values_text(schema)}", setting=name)
    message = f"{before}{name} is {values[name]!r}; expected {allowed_values_text(schema)}"
    hint = did_you_mean(values[name], setting_choices(value_schema(schema)[0]))
    raise SpecError(message, hint=hint, setting=name)


Kind = Literal["str", "int", "float", "bool"]
Worse = Literal["higher", "lower"] | None
Range = tuple[float | None, float | None]
Needs = Literal["view", "features", "jacobian", "weights"]
F = TypeVar("F", bound=Callable[..., Any])

ANY: Range = (None, None)


@dataclass(frozen=True)
class ColumnSchema:
    """One column of a table: name, dtype, unit, meaning and range.

    Attributes:
        dtype: kind of value; a float that was not measured is null in the file and NaN in a frame.
        unit: "feature" is the length unit of the features, "1" a pure number, "" no number.
        meaning: one sentence for a reader of the table.
        worse: the direction that is worse, if there is one.
        range: lowest and highest possible value, up to rounding; None without a limit.
        option: key of the spec's `metrics` that enables it, for example "jacobian.spectral"; empty if it is always
            measured.
    """

    name: str
    dtype: Kind
    unit: str
    meaning: str
    worse: Worse = None
    range: Range = ANY
    option: str = ""


@dataclass(frozen=True)
class DiagnosticInput:
    """The input of a diagnostic: features of one variant after one layer, for all diagnosis samples of a task.

    Attributes:
        variant: the variant's pooled features, [n, d] in float32.
        expert: the expert's pooled features, [n, d].
        columns: results of the `per_view` functions by name, [n] each in float64.
        base: `drift_l2` of the base model; None without one.
        head: the variant's score map (`driftlens.models.heads.ScoreMap`); None if classes are unknown.
        expert_head: the expert's score map.
        labels: class of each sample; None without labels.
    """

    variant: NDArray[np.float32]
    expert: NDArray[np.float32]
    columns: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    base: Mapping[str, NDArray[np.float64]] | None = None
    head: Any = None
    expert_head: Any = None
    labels: Sequence[str] | None = None


@dataclass(frozen=True)
class Diagnostic:
    """A registered diagnostic: its function, the table columns it fills, and the setting that enables it.

    Attributes:
        table: the table that it adds columns to. `layers` and `samples` are measured after every stored layer,
            `outputs` after the last one, for tasks with a head.
        needs: "view" and "features" are measured during the walk, "jacobian" by the attribution, "weights" without
            samples.
        option: key of the spec's `metrics` that enables it; empty if it is always measured.
        measure: for "view" and "features", `DiagnosticInput` -> columns: one number each for `layers`, else one per
            sample.
        per_view: (layer view, pooling) -> named tensors [n], which reach `measure` as `DiagnosticInput.columns`, joined
            over batches. Several diagnostics may share one.
    """

    name: str
    table: str
    columns: tuple[ColumnSchema, ...]
    needs: Needs
    option: str
    measure: Callable[..., Any]
    per_view: Callable[[Any, Any], Mapping[str, Any]] | None = None


diagnostics: Registry[Diagnostic] = Registry("diagnostic", "driftlens.diagnostics", "driftlens.diagnostics")


def diagnostic(
    name: str,
    *,
    columns: Sequence[ColumnSchema],
    table: str = "layers",
    needs: Needs = "features",
    option: str | None = None,
    per_view: Callable[[Any, Any], Mapping[str, Any]] | None = None,
) -> Callable[[F], F]:
    """Return a decorator that registers a function as the diagnostic `name`, enabled by the setting `option`.

    Args:
        name: the registered name.
        columns: the columns that it fills.
        table: the table that it adds columns to.
        needs: when it is measured, see `Diagnostic`.
        option: key of the spec's `metrics` that enables it.
        per_view: quantities of each batch, see `Diagnostic`.
    """

    def _register_diagnostic(measure: F) -> F:
        switch = name if option is None else option
        diagnostics.register(name)(Diagnostic(name, table, tuple(columns), needs, switch, measure, per_view))
        return measure

    return _register_diagnostic


def enabled_diagnostics(options: Collection[str], *needs: Needs) -> list[Diagnostic]:
    """List the enabled diagnostics by name: by default those measured during the forward walk, else of `needs`."""
    passes = needs or ("view", "features")
    there = (entry for entry in diagnostics.values() if entry.needs in passes)
    return [entry for entry in there if not entry.option or entry.option in options]
