"""Types that sections of the spec consist of. Entry points: `SpecSection` and `validate_section`."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from driftlens.utils.errors import SpecError, did_you_mean, sanitize_text
from driftlens.utils.files import expand_home, regular_file
from driftlens.utils.variants import LONGEST_FILE_NAME, safe_file_name

# Suffixes that mark a value as a file even if none exists. A list, since Hub ids such as `Llama-3.2-3B` have dots too.
_FILE_SUFFIX = re.compile(r"\.(bin|ckpt|gguf|h5|json|msgpack|npz|onnx|pkl|pt|pth|safetensors)", re.IGNORECASE)

PYTHON_TARGET = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"


def field_error(message: str, hint: str = "") -> PydanticCustomError:
    """Build a validation error for pydantic to collect; the user sees `message` and `hint` unchanged."""
    return PydanticCustomError("driftlens", "{message}", {"message": message, "hint": hint})


class SpecSection(BaseModel):
    """Base class of the spec's sections: immutable; unknown keys raise an error that lists the allowed ones."""

    # Validators are built at their first use: most commands use few sections, and `--help` none.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, section: Any) -> Any:
        # Pydantic would refuse them too, but without the allowed keys that a hint needs.
        unknown = [key for key in section if key not in cls.model_fields] if isinstance(section, Mapping) else []
        if unknown and cls.model_config.get("extra") == "forbid":
            raise unknown_keys_error(unknown, list(cls.model_fields))
        return section


def unknown_keys_error(unknown: list[Any], allowed: list[str]) -> PydanticCustomError:
    """Build the validation error for keys that a section of the spec does not have."""
    return PydanticCustomError("unknown_keys", "unknown keys", {"keys": unknown, "allowed": allowed})


def _require_valid_name(name: str) -> str:
    if not isinstance(name, str) or not name.strip():
        raise field_error(f"the name {name!r} is not text, or empty", "Give it at least one visible character.")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        raise field_error(f"the name {name!r} holds a control character", "Any other character may be in a name.")
    if (length := len(safe_file_name(name))) > LONGEST_FILE_NAME:
        raise field_error(
            f"the name {name[:20]!r}... of {len(name)} characters is {length} long as a file name; at most "
            f"{LONGEST_FILE_NAME} fit",
            "Shorten it: a character outside A to Z, digits, -, _ and . counts as 3 to 12.",
        )
    return name


def require_task_name(name: str) -> None:
    """Raise a `SpecError` if a value cannot be the name of a task."""
    try:
        _require_valid_name(name)
    except PydanticCustomError as error:
        raise SpecError(str(error.context["message"]), hint=str(error.context["hint"])) from None  # type: ignore[index]


Name = Annotated[str, AfterValidator(_require_valid_name)]
"""A task's or variant's name: any text but control characters, as long as a file's name may be."""

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
CountOrAll = Count | Literal["all"]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Selection = Text | Annotated[tuple[Count | Text, ...], Field(min_length=1)]
"""Some layers: `blocks`, a pattern on module paths, or a list of patterns and layer numbers."""


def path_to_text(value: Any) -> Any:
    """Convert a path object to text; return other values unchanged."""
    return fspath(value) if isinstance(value, PathLike) else value


# Limits of common file systems, in characters: a path's part between slashes, and a whole path.
LONGEST_PART, LONGEST_PATH = 255, 4000


def resolve_path(value: str, info: ValidationInfo) -> str:
    """Resolve a path in a spec; relative paths start at the spec file's folder."""
    if sanitize_text(value) != value or max(map(len, value.split("/"))) > LONGEST_PART or len(value) > LONGEST_PATH:
        raise field_error(
            "no path can have this name",
            f"Control characters and more than {LONGEST_PART} characters are not allowed.",
        )
    folder: Path | None = (info.context or {}).get("folder")
    try:
        # Links are not resolved: in a download cache the link has the file's name and its target a digest.
        path = expand_home(value)
        return value if folder is None else str(folder / path)
    except SpecError as error:
        raise field_error(error.message, error.hint) from error


def _resolve_if_path(value: str, info: ValidationInfo) -> str:
    path = Path(value)
    is_path = (
        value.startswith((".", "/", "~")) or path.is_absolute() or _FILE_SUFFIX.fullmatch(path.suffix) is not None
    )
    place = resolve_path(value, info)
    return place if is_path or Path(place).exists() else value


LocalPath = Annotated[Text, BeforeValidator(path_to_text), AfterValidator(resolve_path)]
"""A file or folder; relative ones are resolved against the spec file's folder."""

Source = Annotated[Text, BeforeValidator(path_to_text), AfterValidator(_resolve_if_path)]
"""A path if it exists, starts with `.`, `/` or `~`, or ends like a file; else a name such as a Hub id."""

Bytes = Annotated[
    ByteSize,
    Field(gt=0, lt=2**63),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}], "examples": ["2GiB"]}),
]
"""A number of bytes, or `512MB` (powers of ten) or `2GiB` (powers of two)."""

PythonTarget = Annotated[str, Field(pattern=f"^{PYTHON_TARGET}$")]
"""`package.module:function`; importing it runs code, which needs `--trust-code`."""

# YAML 1.1 reads 1e-4 as text because it has no dot, but users mean the number.
_FLOAT_WITHOUT_DOT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$")


# Limits of a spec or value: characters of text, and values after aliases are expanded.
MOST_CHARACTERS, MOST_NODES = 4_000_000, 100_000


class _YamlLoader(yaml.SafeLoader):
    """A safe YAML loader that reads `1e-4` as a number and refuses duplicate keys."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"not a value of {node.tag}", node.start_mark
            ) from error
        if type(value) is int and value.bit_length() > 64:
            raise yaml.constructor.ConstructorError(None, None, "a whole number of more than 64 bits", node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        # PyYAML keeps the last of duplicate keys without a warning. Merge keys (`<<`) may repeat.
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} occurs twice", key.start_mark
                    )
                keys.add(key.value)
        return super().construct_mapping(node, deep)


class _YamlDumper(yaml.SafeDumper):
    """A safe YAML dumper without aliases that quotes text which would be read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML takes these for line breaks (or drops them) unless they are escaped between double quotes.
_NEEDS_ESCAPES = re.compile("[\x85\u2028\u2029\ufeff]")


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _NEEDS_ESCAPES.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_YamlDumper.add_representer(str, _represent_text)

for _class in (_YamlLoader, _YamlDumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT_WITHOUT_DOT, list("-+0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; raise a `SpecError` with line and column if it is invalid."""
    if len(text) > MOST_CHARACTERS:
        raise SpecError(f"{where}: {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        value = yaml.load(text, Loader=_YamlLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = "Check indentation, colons and quotes at that place."
        if "constructor" in str(error.problem):
            hint = "Custom YAML tags (`!name`) are not supported; remove the tag."
        raise SpecError(f"{where}{place}: {error.problem or error.context}", hint=hint) from error
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{where}: not YAML: {error}") from error
    except RecursionError:
        # Without the cause, whose traceback has a thousand equal lines.
        raise SpecError(f"{where}: lists or mappings are nested too deeply to be read") from None
    # Aliases share memory only until the value is copied, so a small file of nested aliases could fill it.
    pending, count = [value], 0
    while pending:
        here = pending.pop()
        count += 1
        if count > MOST_NODES:
            raise SpecError(f"{where}: more than {MOST_NODES:,} values, aliases counted in full")
        pending += here.values() if isinstance(here, dict) else here if isinstance(here, list) else ()
    return value


def read_yaml_mapping(file: Path, what: str, start: str) -> dict[str, Any]:
    """Read a YAML file whose content is a mapping.

    Args:
        file: the file.
        what: its name in messages.
        start: a hint how to begin.
    """
    try:
        # /dev/stdin and /dev/fd/63 are pipes from the shell; endless devices stop at the limit.
        place = file if file.is_relative_to("/dev") else regular_file(file)
        with place.open(encoding="utf-8-sig") as stream:
            raw = parse_yaml(stream.read(MOST_CHARACTERS + 1), str(file))
    except (OSError, UnicodeDecodeError) as error:
        inside = file / "spec.yaml"
        hint = f"Give {inside}." if inside.is_file() else f"Check the path. {start}"
        raise SpecError(f"{file}: the {what} can't be read: {error}", hint=hint) from error
    if not isinstance(raw, dict):
        raise SpecError(f"{file}: expected a mapping, found {type(raw).__name__}", hint=start)
    return raw


def to_yaml(value: Any) -> str:
    """Format a value as YAML that `parse_yaml` reads back to an equal value; the order of keys is kept."""
    return yaml.dump(value, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True, width=100)


_Part = TypeVar("_Part", bound=BaseModel)


def validate_section(kind: type[_Part], raw: Any, where: str, context: Any = None) -> _Part:
    """Validate raw values as a section of the spec; the `SpecError` lists all problems.

    Args:
        kind: the model to validate against.
        raw: the values.
        where: the beginning of the message.
        context: passed to pydantic.
    """
    try:
        return kind.model_validate(raw, context=context)
    except ValidationError as error:
        raise to_spec_error(error, raw, where) from error


def to_spec_error(error: ValidationError, raw: Any, where: str) -> SpecError:
    """Convert pydantic's errors to one `SpecError`: a dotted path and message each, and a hint if there is one.

    Args:
        error: pydantic's error; errors at one path come from members of a union and are one problem.
        raw: the values.
        where: the beginning of the message.
    """
    # pydantic reports an error per member of a union; grouped by path, they read as alternatives.
    by_path: dict[str, tuple[list[str], str]] = {}
    for details in error.errors():
        for path, text, hint in _problems_of_error(details, raw):
            texts, _ = by_path.setdefault(path, ([], hint))
            texts.append(text)
    findings = [
        (f"{path}: {'; or: '.join(texts)}".removeprefix(": "), hint) for path, (texts, hint) in by_path.items()
    ]
    problems = [text for text, _ in findings]
    if len(findings) == 1:
        ((text, hint),) = findings
        return SpecError(f"{where}: {text}", hint=hint, problems=problems)
    lines = [f"  {text}" + (f" ({hint})" if hint else "") for text, hint in findings]
    return SpecError("\n".join([f"{where}: {len(findings)} problems", *lines]), problems=problems)


def _problems_of_error(details: Any, raw: Any) -> list[tuple[str, str, str]]:
    """Return path, message and hint of every problem in one pydantic error."""
    kind, context, given = details["type"], details.get("ctx", {}), details["input"]
    path = _dotted_path(details["loc"], kind, raw)
    if kind == "unknown_keys":
        allowed = context["allowed"]
        return [
            (
                f"{path}.{key}".removeprefix("."),
                f"unknown key; allowed here: {', '.join(allowed)}",
                did_you_mean(str(key), allowed),
            )
            for key in context["keys"]
        ]
    if kind == "driftlens":
        return [(path, context["message"], context["hint"])]
    if kind == "missing":
        return [(path, "missing", "This key is required.")]
    if kind == "too_short" and given:
        # Invalid entries do not count for the length, and each has its own finding.
        return []
    hint = ""
    if kind in ("literal_error", "union_tag_invalid"):
        allowed = re.findall(r"'([^']*)'", context.get("expected_tags") or context["expected"])
        hint = did_you_mean(given.get("kind") if kind == "union_tag_invalid" else given, allowed)
    elif kind == "string_type" and isinstance(given, int | float):
        hint = f'Write it in quotes: "{given}".'
    return [(path, f"{details['msg']}, got {_truncated_repr(given)}", hint)]


def _dotted_path(location: tuple[int | str, ...], kind: str, raw: Any) -> str:
    """Return the dotted path of a pydantic error in the spec file, without names of union members."""
    # An invalid key has no path of its own, so its section is reported.
    if kind == "invalid_key":
        location = location[:-1]
    elif location[-1:] == ("[key]",):
        location = location[:-2]
    parts: list[str] = []
    here = raw
    for depth, key in enumerate(location):
        is_entry = isinstance(here, list | tuple) and isinstance(key, int) and key < len(here)
        if is_entry or (isinstance(here, Mapping) and key in here):
            here = here[key]
        elif kind != "missing" or depth < len(location) - 1:
            continue
        if isinstance(key, int) and parts:
            parts[-1] += f"[{key}]"
        else:
            parts.append(str(key) if str(key).isprintable() else repr(key))
    return ".".join(parts)


def _truncated_repr(value: Any, limit: int = 80) -> str:
    shown = "nothing" if value is None else repr(value)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def _require_unique_names(names: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise field_error(f"class names occur more than once: {', '.join(twice)}", "Each row needs a unique name.")
    return names


ClassNames = Annotated[Texts, AfterValidator(_require_unique_names)] | LocalPath | None
"""Class names in the order of the rows, or a JSON file of them; None leaves naming to the data source."""
