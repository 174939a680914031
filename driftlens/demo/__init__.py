"""The demo's files: small models with samples and a run spec per suite, and samples for models without data.

`tools/build_demo` in the repository makes them. Entry point: `spec_file_path`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

_FOLDER = Path(__file__).parent

_TEXTS = str(_FOLDER / "probe.jsonl")
_PICTURES = {"file": str(_FOLDER / "probe.npz"), "x": "x"}
PROBES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"kind": "jsonl", "calibration": _TEXTS, "test": _TEXTS}, "64 built-in texts"),
    "image": (
        {"kind": "npz", "calibration": _PICTURES, "test": _PICTURES},
        "96 built-in drawn pictures",
    ),
}
"""By what a model reads: the data entry of samples of no task in particular, and what they are."""


def spec_file(suite: Literal["image", "text"]) -> Path:
    """Return the run spec of a small CLIP and eight experts, or of a small language model and four."""
    return _FOLDER / suite / "run.yaml"
