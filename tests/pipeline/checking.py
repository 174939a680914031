"""Preflight of a spec that a test made wrong, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from driftlens.jobs.preflight import calibrating, job, jobs
from driftlens.jobs.preflight.job import preflight
from driftlens.jobs.preflight.outcome import Preflight
from driftlens.jobs.study.suspicion import Finding
from driftlens.spec import load_spec
from driftlens.spec.requests import PreflightRequest
from tests.zoo.world import Weights, World


def check(spec: Mapping[str, Any], *, estimate: bool = False, **options: Any) -> Preflight:
    return preflight(load_spec(spec), PreflightRequest(**options), estimate=estimate)


def rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all estimates of a test rest on one rehearsal, to which opening the models adds no time."""
    rehearsed, known = jobs.rehearsed, list[Any]()

    def once(*given: Any, **how: Any) -> Any:
        known.extend([] if known else [rehearsed(*given, **how)])
        return known[0]

    monkeypatch.setattr(jobs, "rehearsed", once)
    for opening in (job, calibrating):
        monkeypatch.setattr(opening, "time", SimpleNamespace(perf_counter=lambda: 0.0))


def found(result: Preflight, level: str, subject: str) -> Finding:
    """The one finding of a level about a subject."""
    matching = [
        finding for finding in result.findings if (finding.level, finding.subject) == (level, subject)
    ]
    assert len(matching) == 1, result.text()
    return matching[0]


def notices(result: Preflight) -> list[Finding]:
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
