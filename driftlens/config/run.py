"""The whole spec, which models, which data, what to measure; from a file, mapping or spec to a checked `RunSpec`."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from driftlens.config.data import Data
from driftlens.config.mergekit import is_recipe
from driftlens.config.sections import (
    Architecture,
    Calibration,
    Compute,
    Head,
    Layers,
    Merge,
    Metrics,
    Weights,
)
from driftlens.config.types import Name, Part, Text, checked, problem
from driftlens.config.yaml_text import from_yaml, read_mapping, to_yaml
from driftlens.utils.errors import SpecError, did_you_mean

VERSION = 1
RETIRED = ("projection", "compute.solve_dtype")
"""Keys that nothing ever read, by dotted path; specs that runs keep may still have them."""
MOST_EXPERTS = 1000

log = logging.getLogger("driftlens")
T = TypeVar("T")
PerName = Annotated[dict[Name, T], AfterValidator(lambda entries: dict(sorted(entries.items())))]


class RunSpec(Part):
    """One run, with every default spelled out and every path absolute. `load_spec` makes one.

    Attributes:
        experts: weights per task, sorted by the task's name.
        heads: how a task's features become class scores; tasks without one have no accuracy.
        baselines: further variants to measure beside the merged model.
        names: what exhibits call tasks and variants; what is measured doesn't depend on it, so the digest doesn't.
        task_id: whether the task of an input is known where the model will be used; if not, repairs that attach a map
            per task are refused. Not in the digest either.
    """

    version: Literal[1]
    name: Text = "run"
    architecture: Architecture
    base: Weights | None = None
    merged: Weights | None = None
    merge: Merge | None = None
    experts: Annotated[PerName[Weights], Field(min_length=1, max_length=MOST_EXPERTS)]
    baselines: PerName[Weights] = Field(default_factory=dict)
    heads: PerName[Head] = Field(default_factory=dict)
    data: Data = Data()
    layers: Layers = Layers()
    metrics: Metrics = Metrics()
    calibration: Calibration | None = None
    compute: Compute = Compute()
    names: dict[Text, Text] = Field(default_factory=dict)
    task_id: Literal["known", "unknown"] = "known"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks, sorted."""
        return tuple(self.experts)

    @model_validator(mode="after")
    def _one_merged_model(self) -> RunSpec:
        if (self.merged is None) == (self.merge is None):
            which = "neither" if self.merged is None else "both"
            raise problem(
                f"expected exactly one of merged and merge, got {which}",
                "Write `merged: {weights: FILE}`, or `merge: {method: task_arithmetic, scaling: 0.3}`.",
            )
        return self

    @model_validator(mode="after")
    def _only_known_tasks(self) -> RunSpec:
        if "defaults" in self.experts:
            raise problem(
                "a task can't be called 'defaults'", "That key of `data` holds the defaults of all tasks."
            )
        for section, named in (("heads", self.heads), ("data", self.data.tasks)):
            for task in named:
                if task not in self.experts:
                    experts = ", ".join(self.experts)
                    raise problem(
                        f"{section}.{task}: no expert is called {task!r}; experts are {experts}",
                        did_you_mean(task, self.experts)
                        or f"Add experts.{task}, or take {section}.{task} out.",
                    )
        return self

    def as_dict(self) -> dict[str, Any]:
        """Plain mappings, lists, numbers and text; `load_spec` reads them back to an equal spec."""
        return self.model_dump(mode="json")

    def dump(self) -> str:
        """YAML with all defaults spelled out; `load_spec` reads it back to an equal spec."""
        return to_yaml(self.as_dict())

    def digest(self) -> str:
        """SHA-256 of the spec, the same in every process and whatever the order of keys in the file."""
        document = self.model_dump(mode="json", exclude={"names", "task_id"})
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def json_schema() -> dict[str, Any]:
    """The grammar of a spec as JSON Schema, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunSpec.model_json_schema()}


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
    folder, where = Path.cwd(), "spec"
    if isinstance(source, RunSpec):
        raw = source.as_dict()
    elif isinstance(source, Mapping):
        raw = copy.deepcopy(dict(source))
    elif not isinstance(source, str | os.PathLike):
        raise SpecError(
            f"expected a spec, a YAML file or its values, got {type(source).__name__}",
            hint="Modules are for dl.analyze, by keyword: merged=, experts=, data=.",
        )
    else:
        file, where = Path(source).absolute(), str(source)
        folder, raw = file.parent, _read(file, where)
    for text in overrides:
        override(raw, text)
    # Before the unknown keys of another version bury the reason.
    if raw.get("version") != VERSION:
        raise SpecError(
            f"{where}: version: expected {VERSION}, got {raw.get('version')!r}",
            hint=f"Add `version: {VERSION}`; `driftlens init` shows the form that this DriftLens reads.",
        )
    return checked(RunSpec, raw, where, {"folder": folder})


def _read(file: Path, where: str) -> dict[str, Any]:
    raw = read_mapping(file, "spec", "`driftlens init` writes a commented spec to start from.")
    if is_recipe(raw):
        raise SpecError(
            f"{where} is a recipe of mergekit, and no spec",
            hint=f"`driftlens init {shlex.quote(where)}` writes a spec of its models.",
        )
    if file.name == "spec.yaml" and (file.parent / "manifest.json").is_file():
        for dotted in RETIRED:
            section, _, key = dotted.rpartition(".")
            here = raw.get(section) if section else raw
            if isinstance(here, dict) and key in here:
                del here[key]
                log.info("%s: %s is left out, as nothing reads it", where, dotted)
    return raw


def override(raw: dict[str, Any], text: str) -> None:
    """Set one value of a spec in place, by `a.b=value`, the value in YAML."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SpecError(f"--set {text}: expected a.b=value", hint="For example --set data.defaults.n=64.")
    here = raw
    for depth, key in enumerate(keys[:-1], start=1):
        # An absent section, or one left empty in the file, starts as an empty mapping.
        if here.get(key) is None:
            here[key] = {}
        here = here[key]
        if not isinstance(here, dict):
            parent = ".".join(keys[:depth])
            raise SpecError(
                f"--set {text}: {parent} is {here!r}, which has no keys", hint=f"Set {parent} itself."
            )
    here[keys[-1]] = from_yaml(value, f"--set {text}")
