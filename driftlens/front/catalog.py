"""What there is to choose from, as plain values: loaders; calibrators and merge methods with settings and presets.

The dashboard, which never imports torch, asks the command line for it: `driftlens doctor --methods --json`.
"""

from __future__ import annotations

import re
from typing import Any

from driftlens.base.settings import expected, schemas_of, settings_of
from driftlens.calibration.automatic import NUM_FOLDS
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.jobs.contest.automatic import titles
from driftlens.merging.method import READS, merge_methods
from driftlens.models.architecture import loaders

_VIEWS = re.compile(r"\b\d+ views\b")


def catalog() -> dict[str, dict[str, Any]]:
    """Calibrators, merge methods and loaders by name, each with title, source and settings.

    Of calibrators also the presets, which settings can be chosen by themselves, what `--auto` compares, and the fewest
    samples of a task that the choice of the best method is made on; 0 where nothing is chosen.
    """
    return {
        "calibrators": {
            name: {
                "title": kind.title or name,
                "source": kind.source,
                "kind": "closed form" if kind.takes_sites else "trained",
                "needs_task_id": not kind.takes_sites,
                "effort": kind.effort,
                "settings": schemas_of(settings_of(kind)),
                "presets": {preset: dict(values) for preset, values in kind.presets.items()},
                "suited": dict(kind.suited),
                "automatic": _varied(kind),
                "swept": {setting: [*factors] for setting, factors in kind.swept.items()},
                "of_base": [*kind.of_base],
                "candidates": _compared(kind),
                "fewest": 2 * NUM_FOLDS if kind.candidates else 0,
            }
            # Those with published settings first.
            for name, kind in sorted(calibrators.items(), key=lambda entry: not entry[1].presets)
        },
        "merge_methods": {
            name: {
                "title": method.title,
                "source": method.source,
                "reads": READS[method.reads],
                "settings": schemas_of(settings_of(method.function)),
            }
            for name, method in merge_methods.items()
        },
        "loaders": {
            name: {"title": (loader.__doc__ or name).partition("\n")[0], "source": "", "settings": {}}
            for name, loader in loaders.items()
        },
    }


def _varied(kind: type[Calibrator]) -> list[str]:
    """The settings that candidates differ in, in the order of the constructor."""
    return [
        name
        for name in settings_of(kind).model_fields
        if any(name in settings for settings in kind.candidates)
    ]


def _compared(kind: type[Calibrator]) -> dict[str, list[str]]:
    """What the choice of the best compares from each preset on; how many views depends on the samples."""
    presets = kind.presets if kind.candidates else {}
    return {
        name: [_VIEWS.sub("views", title) for title in titles(kind(**values))]
        for name, values in presets.items()
    }


def as_text(found: dict[str, dict[str, Any]]) -> str:
    """The catalogue for a person: a paragraph per method, a line per setting."""
    lines = []
    for kind, methods in found.items():
        lines.append(kind.replace("_", " ").capitalize())
        for name, method in methods.items():
            source = f", {method['source']}" if method["source"] else ""
            reads = f"; reads {method['reads']}" if "reads" in method else ""
            reads += ", wants to know the task of an input" if method.get("needs_task_id") else ""
            lines.append(f"  {name}: {method['title']}{source}{reads}")
            for setting, schema in method["settings"].items():
                default = f"default {_shown(schema['default'])}" if "default" in schema else "required"
                unit = f" {schema['unit']}" if schema["unit"] and "default" in schema else ""
                lines.append(
                    f"    {setting}  {schema.get('description') or expected(schema)} ({default}{unit})"
                )
            for preset, values in method.get("presets", {}).items():
                given = ", ".join(f"{key} {_shown(value)}" for key, value in values.items())
                lines.append(f"    preset {preset}: {given}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
