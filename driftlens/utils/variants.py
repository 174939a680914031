"""Names of variants: which part each plays, and which belong together."""

from __future__ import annotations

from typing import Literal

Part = Literal["base", "expert", "merged", "calibrated", "baseline"]

_ANCHOR = "-anchor"


def part_of(variant: str) -> Part:
    """The part a variant plays: base, expert, merged, calibrated or baseline."""
    part = variant.partition(":")[0]
    assert part in ("base", "expert", "merged", "calibrated", "baseline"), variant
    return part  # type: ignore[return-value]


def expert_of(task: str) -> str:
    """The model fine-tuned on `task`, as a pool of models calls it; in tables each task's own is `expert`."""
    return f"expert:{task}"


def baseline(name: str) -> str:
    """The variant that an extra checkpoint of the user's makes."""
    return f"baseline:{name}"


def task_of(model: str) -> str | None:
    """The task whose expert a model of a pool is; None for all other models."""
    part, _, task = model.partition(":")
    return task if part == "expert" else None


def calibrated(name: str) -> str:
    """The variant that the calibration `name` makes."""
    return f"calibrated:{name}"


def calibration_of(variant: str) -> str | None:
    """The calibration that makes this variant; None where none does. A control belongs to its calibrated variant."""
    part, _, name = variant.partition(":")
    return name if part == "calibrated" else None


def control_of(name: str) -> str:
    """The variant that shows what the anchor of the calibration `name` does by itself.

    With rho != 1 the anchor is another merge of the same experts.
    """
    return baseline(f"{name}{_ANCHOR}")


def is_control(variant: str) -> bool:
    """Whether the variant is the anchor-only control of a calibration."""
    return part_of(variant) == "baseline" and variant.endswith(_ANCHOR)


def is_explained(variant: str) -> bool:
    """Whether the variant's drift is traced back to layers: nobody repairs the base, or uses an anchor alone."""
    return variant != "base" and not is_control(variant)


def title(variant: str) -> str:
    """What a reader sees: "merged", "featcal" for calibrated:featcal, "featcal, anchor only" for its control."""
    if is_control(variant):
        return f"{variant.partition(':')[2].removesuffix(_ANCHOR)}, anchor only"
    return variant.partition(":")[2] or variant
