"""From pydantic's findings to one error in the user's words: dotted path, bad value, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from driftlens.base.errors import SpecError, did_you_mean

RETIRED: Mapping[str, str] = {
    "projection": "Leave it out; `driftlens view --method` chooses the layout.",
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


_Part = TypeVar("_Part", bound=BaseModel)
_Finding = tuple[str, str]
"""What is wrong, with its dotted path, and the hint; empty where there is none."""


def checked(kind: type[_Part], raw: Any, where: str, context: Any = None) -> _Part:
    """Values of a spec, or of a part of one, checked; a SpecError that begins with `where` says all that is wrong."""
    try:
        return kind.model_validate(raw, context=context)
    except ValidationError as error:
        raise spec_error(error, raw, where) from error


def spec_error(error: ValidationError, raw: Any, where: str) -> SpecError:
    """One error in the user's words that says all that is wrong with `raw`, and begins with `where`."""
    findings = [finding for details in error.errors() for finding in _findings(details, raw)]
    problems = [text for text, _ in findings]
    if len(findings) == 1:
        ((text, hint),) = findings
        return SpecError(f"{where}: {text}", hint=hint, problems=problems)
    lines = [f"  {text}" + (f" ({hint})" if hint else "") for text, hint in findings]
    return SpecError("\n".join([f"{where}: {len(findings)} problems", *lines]), problems=problems)


def _findings(details: Any, raw: Any) -> list[_Finding]:
    kind, context, given = details["type"], details.get("ctx", {}), details["input"]
    path = _path_of(details["loc"], kind, raw)
    at = f"{path}: " if path else ""
    if kind == "unknown_keys":
        return [_unknown_key(path, key, context["allowed"]) for key in context["keys"]]
    if kind == "driftlens":
        return [(f"{at}{context['message']}", context["hint"])]
    if kind == "missing":
        return [(f"{at}missing", "This key is required.")]
    if kind in ("literal_error", "union_tag_invalid"):
        return [_not_allowed(path, kind, context, given)]
    if kind == "too_short" and given:
        return []  # Entries that are wrong don't count, and each of them has its own finding.
    return [(f"{at}{_wanted(kind, context, details['msg'])}, got {_short(given)}", _quote_hint(kind, given))]


def _unknown_key(path: str, key: object, allowed: list[str]) -> _Finding:
    if not isinstance(key, str):
        text = f"the key {key!r} is not text"
        return f"{path}: {text}" if path else text, f'Write it in quotes: "{key}".'
    dotted = f"{path}.{key}" if path else key
    if dotted in RETIRED:
        return f"{dotted}: no key any more, as nothing read it", RETIRED[dotted]
    return f"{dotted}: unknown key; allowed here: {', '.join(allowed)}", did_you_mean(key, allowed)


def _not_allowed(path: str, kind: str, context: Mapping[str, Any], given: Any) -> _Finding:
    allowed = re.findall(r"'([^']*)'", context.get("expected_tags") or context.get("expected") or "")
    if kind == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        path, given = f"{path}.{key}", given.get(key)
    wanted = ", ".join(allowed) or context["expected"]
    return f"{path}: expected one of {wanted}; got {_short(given)}", did_you_mean(given, allowed)


def _wanted(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"expected {words} {context[bound]:g}"
    return f"{message[:1].lower()}{message[1:]}"


def _quote_hint(kind: str, given: Any) -> str:
    is_scalar = given is not None and not isinstance(given, Mapping | list | tuple)
    return f'Write it in quotes: "{given}".' if kind in ("string_type", "invalid_key") and is_scalar else ""


def _path_of(location: tuple[int | str, ...], kind: str, raw: Any) -> str:
    """The dotted path of what is wrong, without the names of union members, which stand in no file."""
    # Where the name itself is what is wrong, the section that holds it.
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


def _short(value: Any, limit: int = 80) -> str:
    shown = "nothing" if value is None else repr(value)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."
