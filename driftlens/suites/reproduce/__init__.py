"""Suites whose numbers are published, as data: models and tasks on the Hub, what is run, and where the numbers stand.

One YAML file per suite; what it `extends` it shares. Anybody's file of the same form, or a run's spec, serves as well.
A protocol is one study of the paper: what is varied on which merges of a suite, and which exhibits that fills.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, JsonValue

from driftlens.base.errors import SpecError, did_you_mean
from driftlens.base.files import PathLike
from driftlens.spec import RunSpec
from driftlens.spec.problems import checked
from driftlens.spec.published import find_published, published_task
from driftlens.spec.types import Part
from driftlens.spec.yaml_text import from_yaml, read_mapping

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
    """One study: which merges of a suite it runs, what it varies there, and which exhibits of `export` that fills.

    Of `mergers` the suite's first one is run if it has none of them, and all where they are empty. `vary` says what is
    swept, by setting; without it every repair, or every one of `methods`, becomes a calibration. `seeds` are draws of
    the calibration samples; `ablate` takes every method apart, and `traces` drift back to layers. `is_excess` measures
    what FeatCal's fits on other features than the deployed ones lose.
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
                *("accuracy", "accuracy-avg", "algorithm", "experts", *_SUITES),
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


Methods = dict[str, dict[str, JsonValue]]

MERGED = "merged"
"""Stands for the merge of a spec that names none of its own."""


class Printed(Part):
    """Where a suite's published numbers stand, or they themselves, in percent.

    Attributes:
        table: a table of the paper by its LaTeX label, which holds errata too.
        model: whose rows, where a table has several models.
        values: merge method -> `base`, `expert`, `merged` or a repair -> a task or `mean` -> percent.
        protocols: tables of the paper about protocols other than `main`, by their LaTeX labels.
        attached: whether what is printed are benchmarks of other tools, whose scores `driftlens attach` brings.
    """

    table: str = ""
    model: str = ""
    values: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    protocols: dict[str, str] = Field(default_factory=dict)
    attached: bool = False


class Suite(Part):
    """A suite.

    Attributes:
        title: what it is.
        tasks: by the names that the Hub has for them.
        more_tasks: those that it has beyond the suite that it extends.
        expert: a Hub id or a path with `{task}` in it; empty where `spec` names the experts.
        revisions: repository as it stands in `expert` or `spec` -> branch, tag or commit; None where nobody says.
        spec: everything else that a run's spec says. Heads and data of tasks that are missing are the published ones.
        mergers: merge method -> settings.
        repairs: method of calibration -> settings; FeatCal alone if left out.
        samples: calibration samples per task of the protocol `samples`; the paper's if left out.
        grids: FeatCal's settings and their values of the protocol `sensitivity`.
        corruptions: of the protocol `corruption`, see `driftlens.data.corruption`; all if left out.
        published: None where there is nothing to compare with.
        note: what a reader must know.
    """

    title: str
    tasks: Annotated[list[str], Field(min_length=1)]
    more_tasks: list[str] = Field(default_factory=list)
    expert: str = ""
    revisions: dict[str, str | None] = Field(default_factory=dict)
    spec: dict[str, Any]
    mergers: Methods = Field(default_factory=dict)
    repairs: Methods = Field(default_factory=dict)
    samples: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [*SAMPLES])
    grids: dict[str, list[float]] = Field(
        default_factory=lambda: {name: [*values] for name, values in GRIDS.items()}
    )
    corruptions: list[str] = Field(default_factory=lambda: [*CORRUPTIONS])
    published: Printed | None = None
    note: str = ""

    @property
    def merges(self) -> list[str]:
        """Its merge methods, or `MERGED` alone."""
        return [*self.mergers] or [MERGED]

    def run_spec(self, name: str, merger: str, folder: PathLike = ".") -> RunSpec:
        """The spec of the suite's run with one of its mergers; relative paths are resolved against the folder."""
        raw: dict[str, Any] = copy.deepcopy({"version": 1, **self.spec, "name": f"{name} {merger}"})
        if merger != MERGED:
            raw["merge"] = {"method": merger, **self.mergers[merger]}
        every = [*self.tasks, *self.more_tasks]
        if self.expert:
            raw["experts"] = {task: {"weights": self._expert(task)} for task in every}
        for task in filter(find_published, every):
            raw.setdefault("heads", {}).setdefault(task, {"suite": task})
            raw.setdefault("data", {}).setdefault(task, {"kind": "hf", **published_task(task).data})
        models = [
            raw.get("architecture"),
            raw.get("base"),
            raw.get("merged"),
            *raw.get("experts", {}).values(),
        ]
        for entry, key in itertools.product(models, ("source", "weights")):
            if isinstance(entry, dict) and (revision := self.revisions.get(str(entry.get(key)))):
                entry[key] = f"{entry[key]}@{revision}"
        for entry in raw.get("data", {}).values():
            if isinstance(entry, dict) and (revision := self.revisions.get(str(entry.get("path")))):
                entry.setdefault("revision", revision)
        return checked(RunSpec, raw, name, {"folder": Path(folder).absolute()})

    def _expert(self, task: str) -> str:
        place, revision = self.expert.replace("{task}", task), self.revisions.get(self.expert)
        return f"{place}@{revision}" if revision else place


def suite_names() -> list[str]:
    """Names of the published suites, sorted."""
    names = (entry.name for entry in files(__name__).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def load_suite(given: str) -> tuple[str, Suite, Path]:
    """A suite's name, the suite, and the folder that its paths are relative to."""
    if given in suite_names():
        return given, checked(Suite, _published(given), given), Path()
    file = Path(given)
    if not file.is_file():
        names = suite_names()
        raise SpecError(
            f"no published suite is called {given!r}, and there is no such file; there are {', '.join(names)}",
            hint=did_you_mean(given, names) or "Name one of these, or a YAML file.",
        )
    raw = read_mapping(file, "suite", "docs/reproduce.md shows one.")
    if "title" not in raw and "architecture" in raw:
        raw = _of_spec(raw, file.stem)
    elif "extends" in raw:
        raw = _extended(raw, str(file))
    return file.stem, checked(Suite, raw, str(file)), file.parent


def _published(name: str) -> dict[str, Any]:
    raw = from_yaml(files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"), name)
    return _extended(raw, name) if "extends" in raw else dict(raw)


def _extended(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a suite says over the one that it extends: `spec` key by key, the rest whole."""
    name = raw["extends"]
    if name not in suite_names():
        raise SpecError(f"{where}: extends: no published suite is called {name!r}")
    under = _published(name)
    own = {key: value for key, value in raw.items() if key != "extends"}
    if isinstance(own.get("spec"), dict):
        own["spec"] = {**under["spec"], **own["spec"]}
    return {**under, **own}


def _of_spec(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A run's spec as a suite without published numbers."""
    merge = raw.get("merge")
    mergers = {}
    if isinstance(merge, dict) and isinstance(merge.get("method"), str):
        mergers = {merge["method"]: {key: value for key, value in merge.items() if key != "method"}}
    rest = {key: value for key, value in raw.items() if key != "merge" or not mergers}
    return {
        "title": str(raw.get("name", name)),
        "tasks": list(raw.get("experts") or ()),
        "spec": rest,
        "mergers": mergers,
    }


def hub_ids(spec: RunSpec, of: str = "models") -> Sequence[str]:
    """Repositories on the Hub that a spec reads, `@` their revisions: `models`, or `data`; none is on this disk."""
    if of == "data":
        entries = [
            (getattr(at, "path", ""), getattr(at, "revision", None)) for at in spec.data.tasks.values()
        ]
        places = [f"{path}@{revision}" if revision else path for path, revision in entries]
    else:
        models = [spec.base, *spec.experts.values()]
        places = [str(at.weights) for at in models if at is not None] + [str(spec.architecture.source)]
    return [
        *dict.fromkeys(at for at in places if at.partition("@")[0].count("/") == 1 and not Path(at).exists())
    ]
