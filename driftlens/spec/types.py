"""The small types that sections of the spec are made of: names, paths, counts, byte sizes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from driftlens.base.errors import SpecError, harmless
from driftlens.base.files import LONGEST_FILE_NAME, escape, expanded

_FILE_SUFFIX = re.compile(r"\.(bin|ckpt|gguf|h5|json|msgpack|npz|onnx|pkl|pt|pth|safetensors)", re.IGNORECASE)
"""Endings that mark a value as a file even where none exists yet; `Llama-3.2-3B` has a dot but no ending."""

BYTES_PER_UNIT = {"": 1, "b": 1} | {
    f"{prefix}{unit}": step**power
    for unit, step in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}

PYTHON_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def problem(message: str, hint: str = "") -> PydanticCustomError:
    """An error for pydantic to collect; `message` and `hint` reach the user as they are."""
    return PydanticCustomError("driftlens", "{message}", {"message": message, "hint": hint})


class Part(BaseModel):
    """A section of the spec: immutable, and unknown keys are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        # Pydantic would refuse them too, but only here are the keys known that could have been meant.
        unknown = [key for key in given if key not in cls.model_fields] if isinstance(given, Mapping) else []
        if unknown and cls.model_config.get("extra") == "forbid":
            raise PydanticCustomError(
                "unknown_keys", "unknown keys", {"keys": unknown, "allowed": list(cls.model_fields)}
            )
        return given


def _checked_name(name: str) -> str:
    if not isinstance(name, str):  # a key of somebody's dict
        raise problem(f"the name {name!r} is no text", f"Call it {str(name)!r}.")
    if not name.strip():
        raise problem("a name is empty", "Give it at least one visible character.")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        raise problem(
            f"the name {name!r} holds a control character", "Any other character may stand in a name."
        )
    if (length := len(escape(name))) > LONGEST_FILE_NAME:
        raise problem(
            f"the name {name[:20]!r}... of {len(name)} characters takes {length} in names of files, at most "
            f"{LONGEST_FILE_NAME} fit",
            "Shorten it. There a letter from A to Z takes one character, one of other scripts or a sign 3 to 12.",
        )
    return name


def require_name(name: str) -> None:
    """Refuse, by a SpecError, what can't name a task."""
    try:
        _checked_name(name)
    except PydanticCustomError as error:
        raise SpecError(str(error.context["message"]), hint=str(error.context["hint"])) from None  # type: ignore[index]


Name = Annotated[str, AfterValidator(_checked_name)]
"""A task's or variant's name: any text but control characters, as long as a file's name may be."""

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def _count_or_all(given: Any) -> Any:
    if given == "all" or (type(given) is int and 1 <= given < 2**31):
        return given
    raise problem(f"expected a whole number of at least 1, or all; got {given!r}")


CountOrAll = Annotated[int | Literal["all"], BeforeValidator(_count_or_all)]


def _selection(given: Any) -> Any:
    entries = given if isinstance(given, list | tuple) else [given]
    numbers_allowed = entries is given
    if entries and all(
        (isinstance(entry, str) and entry != "") or (numbers_allowed and type(entry) is int and entry >= 1)
        for entry in entries
    ):
        return given
    raise problem(f"expected blocks, a pattern, or a list of patterns and layer numbers; got {given!r}")


Selection = Annotated[str | tuple[int | str, ...], BeforeValidator(_selection)]
"""Some layers: `blocks`, a pattern on module paths, or a list of patterns and layer numbers."""


def plain_text(given: Any) -> Any:
    """A path object as text; anything else as it is."""
    return fspath(given) if isinstance(given, PathLike) else given


LONGEST_PART, LONGEST_PATH = 255, 4000
"""Characters of a path: between two slashes, and in all."""


def resolved(value: str, info: ValidationInfo) -> str:
    """A path, relative ones against the spec file's folder."""
    if (
        harmless(value) != value
        or max(map(len, value.split("/"))) > LONGEST_PART
        or len(value) > LONGEST_PATH
    ):
        raise problem(
            "no path can have this name",
            f"Control characters and more than {LONGEST_PART} characters can't stand in one.",
        )
    folder: Path | None = (info.context or {}).get("folder")
    try:
        # Links are left alone: in a download cache they carry the file's name, their target does not.
        path = expanded(value)
        return value if folder is None else str(folder / path)
    except SpecError as error:
        raise problem(error.message, error.hint) from error


def _resolved_if_a_path(value: str, info: ValidationInfo) -> str:
    path = Path(value)
    is_path = (
        value.startswith((".", "/", "~"))
        or path.is_absolute()
        or _FILE_SUFFIX.fullmatch(path.suffix) is not None
    )
    place = resolved(value, info)
    return place if is_path or Path(place).exists() else value


LocalPath = Annotated[Text, BeforeValidator(plain_text), AfterValidator(resolved)]
"""A file or folder; relative ones are resolved against the spec file's folder."""

Source = Annotated[Text, BeforeValidator(plain_text), AfterValidator(_resolved_if_a_path)]
"""A path if it exists, starts with `.`, `/` or `~`, or ends like a file; else a name such as a Hub id."""


def _bytes(given: Any) -> int:
    if type(given) is int and 1 <= given < 2**63:
        return given
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", given.strip().lower()) if isinstance(given, str) else None
    )
    if match is None or match[2] not in BYTES_PER_UNIT or not 0 < float(match[1]) < 1e15:
        raise problem(f"expected a number of bytes or a size such as 2GiB; got {given!r}")
    return round(float(match[1]) * BYTES_PER_UNIT[match[2]])


Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}], "examples": ["2GiB"]}),
]
"""A number of bytes; may be written `512MB` (powers of ten) or `2GiB` (powers of two)."""


def _python_target(value: str) -> str:
    if not PYTHON_TARGET.fullmatch(value):
        raise problem(f"expected a Python target package.module:function, got {value!r}")
    return value


PythonTarget = Annotated[str, AfterValidator(_python_target)]
"""`package.module:function`; importing it runs code, so it needs the user's trust on the command line."""
