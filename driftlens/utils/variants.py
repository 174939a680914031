"""Names of variants: which part each plays, and which belong together."""

from __future__ import annotations

from typing import Literal

Part = Literal["base", "expert", "merged", "calibrated", "baseline"]

_ANCHOR = "-anchor"


def part_of(variant: str) -> Part:
    """Return the part of a variant: base, expert, merged, calibrated or baseline."""
    part = variant.partition(":")[0]
    assert part in ("base", "expert", "merged", "calibrated", "baseline"), variant
    return part  # type: ignore[return-value]


def expert_of(task: str) -> str:
    """Return the pool's name of the model fine-tuned on `task`; tables call each task's own expert `expert`."""
    return f"expert:{task}"


def baseline(name: str) -> str:
    """Return the variant of an additional checkpoint."""
    return f"baseline:{name}"


def task_of(model: str) -> str | None:
    """Return the task whose expert a model of a pool is; None for other models."""
    part, _, task = model.partition(":")
    return task if part == "expert" else None


def calibrated(name: str) -> str:
    """Return the variant of the calibration `name`."""
    return f"calibrated:{name}"


def calibration_of(variant: str) -> str | None:
    """Return the calibration of a calibrated variant, or None. A control does not count as calibrated."""
    part, _, name = variant.partition(":")
    return name if part == "calibrated" else None


def control_of(name: str) -> str:
    """Return the variant that measures the anchor of the calibration `name` alone.

    With rho != 1 the anchor is another merge of the same experts.
    """
    return baseline(f"{name}{_ANCHOR}")


def is_control(variant: str) -> bool:
    """Return True if the variant is the anchor-only control of a calibration."""
    return part_of(variant) == "baseline" and variant.endswith(_ANCHOR)


def is_explained(variant: str) -> bool:
    """Return True if the variant's drift is attributed to layers: all but the base and controls."""
    return variant != "base" and not is_control(variant)


def title(variant: str) -> str:
    """Return the name for readers: "merged", "featcal", "featcal, anchor only" for its control."""
    if is_control(variant):
        return f"{variant.partition(':')[2].removesuffix(_ANCHOR)}, anchor only"
    return variant.partition(":")[2] or variant
