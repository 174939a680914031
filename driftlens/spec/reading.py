"""From a file, mapping or spec to a checked `RunSpec`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from driftlens.errors import SpecError
from driftlens.spec.problems import RETIRED, spec_error
from driftlens.spec.run import VERSION, RunSpec
from driftlens.spec.yaml_text import from_yaml

log = logging.getLogger("driftlens")


def load_spec(source: Path | str | Mapping[str, Any] | RunSpec, overrides: Sequence[str] = ()) -> RunSpec:
    """The run that `source` describes, checked, with all defaults filled in and all paths absolute.

    Args:
        source: a YAML file, or the values themselves. Relative paths are resolved against the file's folder,
            or against the current folder where there is no file. The spec that a run keeps, `spec.yaml` beside its
            manifest, may have keys that were taken out since: they are left out.
        overrides: `a.b=value` each, the value in YAML, applied in order before anything is checked.

    Raises:
        SpecError: the file can't be read, or something in it is wrong; the message names the dotted path, the
            value, what is allowed, and the nearest name where one was misspelt.
    """
    raw, folder, where = _read(source)
    for override in overrides:
        raw = _overridden(raw, override)
    _check_version(raw, where)
    try:
        return RunSpec.model_validate(raw, context={"folder": folder})
    except ValidationError as error:
        raise spec_error(error, raw, where) from error


def _read(source: Path | str | Mapping[str, Any] | RunSpec) -> tuple[dict[str, Any], Path, str]:
    if isinstance(source, RunSpec):
        return source.as_dict(), Path.cwd(), "spec"
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), Path.cwd(), "spec"
    file = Path(source).absolute()
    raw = from_yaml(_text_of(file), str(source))
    if not isinstance(raw, dict):
        found = "nothing" if raw is None else f"a {type(raw).__name__}"
        raise SpecError(
            f"{source}: expected a mapping (lines of key: value), found {found}",
            hint="`driftlens init` writes a commented spec to start from.",
        )
    if file.name == "spec.yaml" and (file.parent / "manifest.json").is_file():
        _leave_out_retired(raw, str(source))
    return raw, file.parent, str(source)


def _leave_out_retired(raw: dict[str, Any], where: str) -> None:
    for dotted in RETIRED:
        *sections, key = dotted.split(".")
        here: Any = raw
        for section in sections:
            here = here.get(section) if isinstance(here, dict) else None
        if isinstance(here, dict) and key in here:
            del here[key]
            log.info("%s: %s is left out, as nothing reads it", where, dotted)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{file}: not UTF-8 text ({error.reason})", hint="A spec is a YAML file.") from error
    except OSError as error:
        raise SpecError(
            f"{file}: the spec can't be read: {error.strerror}",
            hint="Check the path; `driftlens init` writes a commented spec to start from.",
        ) from error


def _overridden(raw: dict[str, Any], override: str) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SpecError(f"--set {override}: expected a.b=value", hint="For example --set data.defaults.n=64.")
    here = raw
    for depth, key in enumerate(keys[:-1], start=1):
        # An absent section, or one left empty in the file, starts as an empty mapping.
        if here.get(key) is None:
            here[key] = {}
        here = here[key]
        if not isinstance(here, dict):
            parent = ".".join(keys[:depth])
            raise SpecError(
                f"--set {override}: {parent} is {here!r}, which has no keys", hint=f"Set {parent} itself."
            )
    here[keys[-1]] = from_yaml(text, f"--set {override}")
    return raw


def _check_version(raw: Mapping[str, Any], where: str) -> None:
    """Refuse other versions before their unknown keys bury the reason."""
    version = raw.get("version")
    if type(version) is int and version == VERSION:
        return
    if version is None:
        raise SpecError(f"{where}: version: missing", hint=f"Add the line `version: {VERSION}`.")
    if type(version) is not int:
        raise SpecError(
            f"{where}: version: expected {VERSION}, got {version!r}", hint=f"Write `version: {VERSION}`."
        )
    age, remedy = ("a newer", "Update DriftLens.") if version > VERSION else ("an older", "Write a new spec.")
    raise SpecError(
        f"{where}: version: {version} was written for {age} DriftLens; this one reads version {VERSION}",
        hint=f"{remedy} `driftlens init` shows the form that this one reads.",
    )
