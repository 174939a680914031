"""Suites whose numbers are published, as data: models and tasks on the Hub, what is run, and where the numbers stand.

One YAML file per suite; what it `extends` it shares. Anybody's file of the same form, or a run's spec, serves as well.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue

from driftlens.base.errors import SpecError, did_you_mean
from driftlens.base.files import PathLike
from driftlens.spec import RunSpec
from driftlens.spec.problems import checked
from driftlens.spec.published import find_published, published_task
from driftlens.spec.types import Part
from driftlens.spec.yaml_text import from_yaml, read_mapping
from driftlens.suites.protocols import CORRUPTIONS, GRIDS, SAMPLES

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
