"""The studies of the paper, each as one entry: what is varied on which merges of a suite, which exhibits that fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from driftlens.base.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from driftlens.suites.reproduce import Suite

GRIDS: Mapping[str, Sequence[float]] = MappingProxyType(
    {
        "lam": (0.0005, 0.005, 0.05, 0.5, 5.0),
        "alpha": (0.0, 0.15, 0.3, 0.6, 1.0),
        "rho": (1.0, 1.5, 2.0, 2.5, 3.0),
    }
)
"""Values around the published ones. The paper prints its curves without their values: from small to too large, alpha to
1, rho from the merged model on."""

SAMPLES = (8, 16, 32, 64, 128, 256, 512)
"""The paper's numbers of calibration samples per task."""

CORRUPTIONS = (
    "none",
    "gaussian_noise",
    "motion_blur",
    "fog",
    "impulse_noise",
    "contrast",
    "pixelate",
    "jpeg",
)
"""Of calibration pictures, by the names of `driftlens.data.corruption`; the paper's stand first."""


@dataclass(frozen=True)
class Protocol:
    """One study.

    Attributes:
        about: what it runs, in a few words.
        exhibits: of `driftlens export` that its runs fill.
        mergers: the merges that it runs, of those that a suite has; its first one if it has none; empty for all.
        vary: the suite -> what is swept, by setting; None makes a calibration of every repair.
        methods: repairs that are swept; empty for all of the suite.
        seeds: draws of the calibration samples.
        ablate: whether every method is taken apart.
        traces: whether drift is traced back to layers.
        is_excess: whether what is measured is the excess of FeatCal's fits on other features than the deployed ones.
    """

    about: str
    exhibits: Sequence[str]
    mergers: Sequence[str] = ("task_arithmetic",)
    vary: Callable[[Suite], Mapping[str, Sequence[Any]]] | None = None
    methods: Sequence[str] = ()
    seeds: int = 1
    ablate: bool = False
    traces: bool = False
    is_excess: bool = False

    def of(self, suite: Suite) -> list[str]:
        """The merges of the suite that it runs."""
        every = suite.merges
        return [name for name in every if name in self.mergers] or (every[:1] if self.mergers else every)

    def repairs(self, suite: Suite) -> Mapping[str, Mapping[str, Any]]:
        """The repairs that it tries, with the suite's settings."""
        found = suite.repairs or {"featcal": {}}
        return {name: found.get(name, {}) for name in self.methods or found}


_SUITES = {
    f"accuracy-full-{name}": f"clip-{name}" for name in ("l14-8", "b32-14", "l14-14", "b32-20", "l14-20")
}
_SUITES |= {"accuracy-text": "flan-t5-base"}
_SUITES |= dict.fromkeys(("accuracy-llm", "experts-llm"), "mergebench-llama-3.2-3b")
"""Exhibits about one kind of model -> a suite of it."""

PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(
    {
        "main": Protocol(
            "every merge with every repair",
            (
                *("accuracy", "accuracy-avg", "experts", *_SUITES),
                *("hyper", "drift", "heatmap", "decomposition", "output-drift"),
            ),
            mergers=(),
        ),
        "features": Protocol(
            "Task Arithmetic with every repair, and drift traced back to layers",
            (
                *("intro", "diagnostics", "scatter-grid", "amplification", "contributions"),
                *("closure", "self-checks"),
            ),
            traces=True,
        ),
        "samples": Protocol(
            "8 to 512 calibration samples per task, three draws, every repair",
            ("data-efficiency", "efficiency", "resources"),
            vary=lambda suite: {"n": suite.samples},
            seeds=3,
        ),
        "sensitivity": Protocol(
            "lambda, rho and alpha of FeatCal, one at a time, on Task Arithmetic and WUDI",
            ("sweeps",),
            mergers=("task_arithmetic", "wudi"),
            vary=lambda suite: suite.grids,
            methods=("featcal",),
        ),
        "ablations": Protocol(
            "FeatCal and residual calibration taken apart, one part at a time, three draws",
            (),
            vary=lambda suite: {},
            methods=("featcal", "residual"),
            seeds=3,
            ablate=True,
        ),
        "corruption": Protocol(
            "calibration pictures clean and corrupted (severity 3), every repair; tests stay clean",
            ("corruption", "corruptions"),
            vary=lambda suite: {"corruption": suite.corruptions},
        ),
        "source": Protocol(
            "what FeatCal's fits lose on features of the merged model or the experts in place of the deployed ones",
            (),
            methods=("featcal",),
            is_excess=True,
        ),
        "runtime": Protocol("time, energy and memory of every repair", ("runtime", "repairs")),
    }
)


def protocol_called(name: str) -> Protocol:
    """The protocol of a name."""
    if name not in PROTOCOLS:
        known = ", ".join(PROTOCOLS)
        hint = did_you_mean(name, PROTOCOLS) or "Name one of these."
        raise SpecError(f"no protocol is called {name!r}; there are {known}", hint=hint)
    return PROTOCOLS[name]


def filling(exhibit: str) -> str:
    """The command that fills an exhibit from a suite; empty for those of other packages."""
    found = (name for name, of in PROTOCOLS.items() if exhibit in of.exhibits)
    suite = _SUITES.get(exhibit, "SUITE")
    return "".join(f"driftlens reproduce {suite} --protocol {name}" for name in found)
