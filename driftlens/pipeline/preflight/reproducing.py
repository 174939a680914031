"""What a suite's protocol will download and cost, before it is begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftlens.access import Access
from driftlens.errors import CheckpointError
from driftlens.models.loading import hub_folder
from driftlens.pipeline.preflight.costs import size_text
from driftlens.pipeline.preflight.job import preflight
from driftlens.spec import RunSpec
from driftlens.suites.reproduce import Suite, hub_ids


def plan(
    suite: Suite, specs: Mapping[str, RunSpec], protocol: str, *, access: Access = Access()
) -> dict[str, Any]:
    """The plan of a protocol as plain values; nothing is downloaded or written.

    `models` says of each repository whether it is in the cache, and the bytes that it takes there; the Hub isn't asked
    how large others are. `runs` holds what each analysis takes (preflight) once all models are there, else problems.
    Repairs and sweeps come on top: their cost is not estimated.

    Args:
        suite: as loaded.
        specs: of its runs, by merge.
        protocol: its name.
        access: what may be used, and on which device.
    """
    first = next(iter(specs.values()))
    models = {name: _cached_bytes(name) for name in hub_ids(first)}
    missing = [name for name, size in models.items() if size is None]
    runs = {}
    for merger, spec in specs.items() if not missing else ():
        checks = preflight(spec, access=Access(access.device, True, access.trust))
        runs[merger] = {
            "cost": checks.cost and vars(checks.cost),
            "text": checks.cost.text() if checks.cost else "; ".join(map(str, checks.problems)),
        }
    return {
        **{"title": suite.title, "protocol": protocol, "merges": [*specs], "repairs": [*suite.repairs]},
        **{"models": models, "missing": missing, "data": list(hub_ids(first, "data"))},
        **{"runs": runs, "note": suite.note},
    }


def plan_text(planned: Mapping[str, Any]) -> str:
    """The plan in lines."""
    lines = [f"{planned['title']}, protocol {planned['protocol']}"]
    lines += [f"merges: {', '.join(planned['merges'])}", f"repairs: {', '.join(planned['repairs'])}"]
    for name, size in planned["models"].items():
        lines.append(
            f"model {name}: {'to be downloaded' if size is None else f'in the cache, {size_text(size)}'}"
        )
    lines += [f"data {name}: downloaded unless it is in the cache" for name in planned["data"]]
    lines += [f"analysis of {merger}: {run['text']}" for merger, run in planned["runs"].items()]
    if planned["missing"]:
        lines.append(f"The cost is known once {len(planned['missing'])} models are in the cache.")
    lines.append("Repairs and sweeps come on top of the analyses.")
    return "\n".join([*lines, planned["note"]]).strip()


def _cached_bytes(repository: str) -> int | None:
    try:
        folder = hub_folder(repository, offline=True)
    except CheckpointError:
        return None
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
