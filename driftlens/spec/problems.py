"""From pydantic's findings to one error in the user's words: dotted path, bad value, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from driftlens.errors import SpecError, did_you_mean

Details = Mapping[str, Any]

RETIRED: Mapping[str, str] = {
    "projection": "Leave it out; `driftlens project` takes method, layer and number of points itself.",
    "compute.solve_dtype": "Leave it out; `driftlens calibrate --set solve_dtype=...` says in which dtype it solves.",
}
"""Keys that nothing ever read, by dotted path, and what to do instead; specs that runs keep may still have them."""

_EXPECTED: Mapping[str, str] = {
    "string_type": "text",
    "invalid_key": "text",
    "string_too_short": "text that is not empty",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "model_type": "a mapping (lines of key: value)",
    "model_attributes_type": "a mapping (lines of key: value)",
    "dict_type": "a mapping (lines of key: value)",
    "tuple_type": "a list",
    "too_short": "at least one entry",
}

_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


@dataclass(frozen=True)
class _Finding:
    path: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


def spec_error(error: ValidationError, raw: Any, where: str) -> SpecError:
    """One error for all that is wrong.

    Args:
        error: what pydantic found.
        raw: the values as they were given.
        where: what messages call the spec, for example its file name.
    """
    findings = [finding for details in error.errors() for finding in _findings(details, raw)]
    problems = [str(finding) for finding in findings]
    if len(findings) == 1:
        return SpecError(f"{where}: {findings[0]}", hint=findings[0].hint, problems=problems)
    lines = [f"  {finding}" + (f" ({finding.hint})" if finding.hint else "") for finding in findings]
    return SpecError("\n".join([f"{where}: {len(findings)} problems", *lines]), problems=problems)


def _findings(details: Any, raw: Any) -> list[_Finding]:
    kind, context, given = details["type"], details.get("ctx", {}), details["input"]
    path = _dotted(_keys(_without_bad_name(details["loc"], kind), raw, kind))
    if kind == "unknown_keys":
        return [_unknown_key(path, key, context["allowed"]) for key in context["keys"]]
    if kind == "driftlens":
        return [_Finding(path, context["message"], context["hint"])]
    if kind == "missing":
        return [_Finding(path, "missing", "This key is required.")]
    if kind in ("literal_error", "union_tag_invalid"):
        return [_not_allowed(path, kind, context, given)]
    if kind == "too_short" and given:
        return []  # Entries that are wrong don't count, and each of them has its own finding.
    return [_Finding(path, _wanted(kind, context, details["msg"], given), _quote_hint(kind, given))]


def _without_bad_name(location: tuple[int | str, ...], kind: str) -> tuple[int | str, ...]:
    """Where the name itself is what is wrong, the path of the section that holds it."""
    if kind == "invalid_key":
        return location[:-1]
    return location[:-2] if location[-1:] == ("[key]",) else location


def _unknown_key(path: str, key: object, allowed: list[str]) -> _Finding:
    if not isinstance(key, str):
        return _Finding(path, f"the key {key!r} is not text", f'Write it in quotes: "{key}".')
    dotted = f"{path}.{key}" if path else key
    if dotted in RETIRED:
        return _Finding(dotted, "no key any more, as nothing read it", RETIRED[dotted])
    return _Finding(dotted, f"unknown key; allowed here: {', '.join(allowed)}", did_you_mean(key, allowed))


def _not_allowed(path: str, kind: str, context: Details, given: Any) -> _Finding:
    allowed = re.findall(r"'([^']*)'", context.get("expected_tags") or context.get("expected") or "")
    if kind == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        path, given = f"{path}.{key}", given.get(key)
    wanted = ", ".join(allowed) or context["expected"]
    return _Finding(path, f"expected one of {wanted}; got {_short(given)}", did_you_mean(given, allowed))


def _wanted(kind: str, context: Details, message: str, given: Any) -> str:
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {_short(given)}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"expected {words} {context[bound]:g}, got {_short(given)}"
    return f"{message[:1].lower()}{message[1:]}, got {_short(given)}"


def _quote_hint(kind: str, given: Any) -> str:
    is_scalar = given is not None and not isinstance(given, Mapping | list | tuple)
    return f'Write it in quotes: "{given}".' if kind in ("string_type", "invalid_key") and is_scalar else ""


def _keys(location: tuple[int | str, ...], raw: Any, kind: str) -> list[int | str]:
    """The location without the names of union members, which stand in no file."""
    kept: list[int | str] = []
    here = raw
    for depth, key in enumerate(location):
        is_missing_key = kind == "missing" and depth == len(location) - 1
        if _holds(here, key):
            here = here[key]
        elif not is_missing_key:
            continue
        kept.append(key)
    return kept


def _holds(values: Any, key: int | str) -> bool:
    if isinstance(values, Mapping):
        return key in values
    return isinstance(values, list | tuple) and isinstance(key, int) and key < len(values)


def _dotted(keys: Iterable[int | str]) -> str:
    parts: list[str] = []
    for key in keys:
        if isinstance(key, int) and parts:
            parts[-1] += f"[{key}]"
        else:
            parts.append(str(key) if str(key).isprintable() else repr(key))
    return ".".join(parts)


def _short(value: Any, limit: int = 80) -> str:
    shown = "nothing" if value is None else repr(value)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."
