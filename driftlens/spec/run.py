"""The whole spec: which models, which data, what to measure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from driftlens.errors import did_you_mean
from driftlens.spec.data import Data
from driftlens.spec.sections import (
    Architecture,
    Calibration,
    Compute,
    Head,
    Layers,
    Merge,
    Metrics,
    Weights,
)
from driftlens.spec.types import Name, Part, Text, problem
from driftlens.spec.yaml_text import to_yaml

VERSION = 1

T = TypeVar("T")


def _sorted(mapping: dict[str, T]) -> dict[str, T]:
    return dict(sorted(mapping.items()))


PerName = Annotated[dict[Name, T], AfterValidator(_sorted)]


class RunSpec(Part):
    """One run, with every default spelled out and every path absolute. `load_spec` makes one.

    Attributes:
        experts: weights per task, sorted by the task's name.
        heads: how a task's features become class scores; tasks without one have no accuracy.
        baselines: further variants to measure beside the merged model.
    """

    version: Literal[1]
    name: Text = "run"
    architecture: Architecture
    base: Weights | None = None
    merged: Weights | None = None
    merge: Merge | None = None
    experts: Annotated[PerName[Weights], Field(min_length=1)]
    baselines: PerName[Weights] = Field(default_factory=dict)
    heads: PerName[Head] = Field(default_factory=dict)
    data: Data = Data()
    layers: Layers = Layers()
    metrics: Metrics = Metrics()
    calibration: Calibration | None = None
    compute: Compute = Compute()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks, sorted."""
        return tuple(self.experts)

    @model_validator(mode="after")
    def _one_merged_model(self) -> RunSpec:
        if (self.merged is None) == (self.merge is None):
            given = "neither" if self.merged is None else "both"
            raise problem(
                f"expected exactly one of merged and merge, got {given}",
                "Write `merged: {weights: FILE}`, or `merge: {method: task_arithmetic, scaling: 0.3}`.",
            )
        return self

    @model_validator(mode="after")
    def _only_known_tasks(self) -> RunSpec:
        if "defaults" in self.experts:
            raise problem(
                "a task can't be called 'defaults'", "That key of `data` holds the defaults of all tasks."
            )
        _require_tasks("heads", self.heads, self.experts)
        _require_tasks("data", self.data.tasks, self.experts)
        return self

    def as_dict(self) -> dict[str, Any]:
        """Plain mappings, lists, numbers and text; `load_spec` reads them back to an equal spec."""
        return self.model_dump(mode="json")

    def dump(self) -> str:
        """YAML with all defaults spelled out; `load_spec` reads it back to an equal spec."""
        return to_yaml(self.as_dict())

    def digest(self) -> str:
        """SHA-256 of the spec, the same in every process and whatever the order of keys in the file."""
        canonical = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _require_tasks(section: str, named: Iterable[str], tasks: Iterable[str]) -> None:
    known = list(tasks)
    for task in named:
        if task not in known:
            raise problem(
                f"{section}.{task}: no expert is called {task!r}; experts are {', '.join(known)}",
                did_you_mean(task, known) or f"Add experts.{task}, or take {section}.{task} out.",
            )


def json_schema() -> dict[str, Any]:
    """The grammar of a spec as JSON Schema, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunSpec.model_json_schema()}
