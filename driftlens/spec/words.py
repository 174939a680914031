"""From words on a command line to values: `name=value`, lists with commas, methods with settings behind colons."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from driftlens.base.errors import SpecError


def parts(given: str | Sequence[str]) -> list[str]:
    """The names in comma-separated text; repeated options and comma-separated ones are the same."""
    joined = given if isinstance(given, str) else ",".join(given)
    return [part.strip() for part in joined.split(",") if part.strip()]


def layer_named(text: str) -> int | str:
    """A layer's number, or what its path is matched with: other digits than 0 to 9, and too many, number none."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else text


def layers_named(given: str | Sequence[str]) -> list[int | str]:
    """The layers in comma-separated text."""
    return [*map(layer_named, parts(given))]


def assignments(given: Sequence[str] | None) -> dict[str, Any]:
    """The values of `--set name=value`, each read as YAML."""
    from driftlens.spec.yaml_text import from_yaml

    values = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise SpecError(
                f"--set {text}: expected name=value", hint=f"For example --set {name or 'scaling'}=0.4."
            )
        values[name] = from_yaml(value, f"--set {name}")
    return values


def lists(given: Sequence[str]) -> dict[str, list[Any]]:
    """The values of `--param name=1,2`, each read as YAML; the same name twice adds to its values."""
    from driftlens.spec.yaml_text import from_yaml

    by_name: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not name.strip() or not equals:
            raise SpecError(
                f"--param {text}: expected name=value,value", hint="For example --param lam=0.01,0.05."
            )
        by_name.setdefault(name.strip(), []).extend(from_yaml(f"[{values}]", f"--param {name}"))
    return by_name


def with_settings(given: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Methods joined by commas, each with settings behind colons: `ties:scaling=0.4`, by name and settings."""
    methods = []
    # Commas inside brackets are those of a list.
    for text in re.split(r",(?![^\[]*\])", ",".join(given)):
        name, *settings = text.strip().split(":")
        methods.append((name, assignments(settings)))
    return methods


def spelled_out(entry: object) -> str:
    """An entry of a list as its option has it: a name, a number, or a method with its settings."""
    if not isinstance(entry, tuple):
        return str(entry)
    method, settings = entry
    return ":".join([method, *(f"{name}={json.dumps(value)}" for name, value in settings.items())])


def names_shown(given: str) -> dict[str, str]:
    """What names are shown as, from `mnist=MNIST,merged=Ours`."""
    shown = {}
    for pair in parts(given):
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not (name and equals and text):
            raise SpecError(
                f"--names has {pair!r}, expected NAME=SHOWN", hint="Write --names mnist=MNIST,merged=Ours."
            )
        shown[name] = text
    return shown
