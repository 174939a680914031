"""Dataclasses as JSON and back: what comes back is exactly of the kinds that they declare, which readers rely on."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


_adapters: dict[type[Any], TypeAdapter[Any]] = {}
"""Made when they are first needed: to make one takes longer than to read a manifest."""


def _adapter_of(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def as_declared(kind: type[T], text: bytes) -> T:
    """The dataclass that JSON spells; keys that it doesn't have are passed over.

    Raises:
        ValueError: it is no JSON, or something in it is missing or of another kind: says what, what came and what was
            expected. True is no number here, and 1 no text.
    """
    try:
        declared: T = _adapter_of(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = "expected an object" if first["type"] == "dataclass_type" else first["msg"]
        came = f"{said[:1].lower()}{said[1:]}, got {first['input']!r:.80}"
        raise ValueError(": ".join([*filter(None, [".".join(map(str, first["loc"]))]), came])) from None
    return declared


def as_plain(record: object) -> dict[str, Any]:
    """A dataclass as JSON has it."""
    return dict(_adapter_of(type(record)).dump_python(record, mode="json"))
