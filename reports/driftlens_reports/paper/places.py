"""Where a run belongs among the paper's settings: kind of model, backbone, merger, suite of tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from driftlens.errors import RunError
from driftlens.records.run import DriftRun
from driftlens_reports.paper.published import AVERAGE, PublishedTable

Family = Literal["image", "text", "language"]

_MERGERS = MappingProxyType(
    {
        "average": "Simple Averaging",
        "task_arithmetic": "Task Arithmetic",
        "adamerging": "AdaMerging",
        "wudi": "WUDI-Merging",
        "wudi_merging": "WUDI-Merging",
    }
)
"""Registered names of merge methods, as the paper calls them."""

_TASKS = MappingProxyType(
    {
        "stanfordcars": "cars",
        "oxfordflowers102": "flowers",
        "flowers102": "flowers",
        "fer2013": "fer",
        "oxfordiiitpet": "pets",
        "cifar100": "c100",
        "cifar10": "c10",
        "food101": "food",
        "fashionmnist": "fmnist",
        "emnistletters": "emnist",
        "renderedsst2": "rendered",
    }
)
"""Names of the data sets, letters and digits only, as the paper's column heads shorten them."""

_BACKBONE = re.compile(r"vit[-_ ]?(b|l|base|large)[-_ /]?(?:patch)?(16|32|14)", re.IGNORECASE)


def family(run: DriftRun) -> Family:
    """Which kind of model the run is about: image classifiers, text to text, or language models."""
    adapter = str(run.manifest.architecture.get("adapter", ""))
    return "text" if adapter.startswith("t5") else "language" if adapter.startswith("llama") else "image"


def backbone(run: DriftRun) -> str:
    """The backbone as the paper writes it, for example "B/32"; empty where the run's source doesn't say."""
    found = _BACKBONE.search(str(run.manifest.architecture.get("source", "")))
    return f"{found[1][0].upper()}/{found[2]}" if found else ""


def merger(run: DriftRun) -> str:
    """What the merge is called, as the paper writes it; "Merged" where weights were given.

    Raises:
        RunError: the run's spec can't be read.
    """
    method = str((run_spec(run).get("merge") or {}).get("method", "merged"))
    return _MERGERS.get(method, method.replace("_", " ").title())


def run_spec(run: DriftRun) -> Mapping[str, Any]:
    """The resolved spec of the run, as it stands in its folder; empty where there is none.

    Raises:
        RunError: it is no YAML.
    """
    import yaml

    path = run.path / "spec.yaml"
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(
            f"{path} can't be read: {error}", hint="`driftlens verify` lists damaged files."
        ) from error
    return spec if isinstance(spec, dict) else {}


def canonical(task: str) -> str:
    """A task's name by which runs and the paper's columns can be matched."""
    plain = re.sub(r"[^a-z0-9]", "", task.lower())
    return _TASKS.get(plain, plain)


def titles_of(run: DriftRun, table: PublishedTable) -> Mapping[str, str] | None:
    """The table's column of each of the run's tasks; None unless tasks and backbone are those of the table.

    A merge of fewer experts, or of another backbone, is another model: its numbers don't belong beside these.
    """
    columns = {canonical(name): name for name in table.columns if name != AVERAGE}
    tasks = {canonical(task): task for task in run.tasks}
    if set(columns) != set(tasks) or not backbone(run) or not table.model.endswith(backbone(run)):
        return None
    return {task: columns[name] for name, task in tasks.items()}
