"""Preflight of a spec that a test made wrong, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from driftlens.config.requests import PreflightRequest
from driftlens.config.spec import load_spec
from driftlens.experiment.sanity_checks import Finding
from driftlens.pipelines.validate import PreflightReport, preflight
from tests.zoo.world import Weights, World


def check(spec: Mapping[str, Any], **options: Any) -> PreflightReport:
    return preflight(load_spec(spec), PreflightRequest(**options))


def found(result: PreflightReport, level: str, subject: str) -> Finding:
    """The one finding of a level about a subject."""
    matching = [finding for finding in result.findings if (finding.level, finding.subject) == (level, subject)]
    assert len(matching) == 1, result.text()
    return matching[0]


def notices(result: PreflightReport) -> list[Finding]:
    return [finding for finding in result.findings if finding.level == "notice"]


def saved(weights: Weights, file: Path) -> dict[str, str]:
    """An entry of the spec that names these weights."""
    save_file({name: value.contiguous() for name, value in weights.items()}, file)
    return {"weights": str(file)}


def with_expert(world: World, entry: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A spec whose expert of flowers is another."""
    experts = {**world.spec()["experts"], "flowers": entry}
    return world.spec(experts=experts, **changes)


def visual(weights: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    return {name: change(value) if name.startswith("visual.") else value for name, value in weights.items()}
