"""A small spec for tests to change."""

from __future__ import annotations

from typing import Any

import pytest

from driftlens.config.spec import load_spec
from driftlens.utils.errors import SpecError


def minimal(**changes: Any) -> dict[str, Any]:
    """A small spec; a change to None takes a section out."""
    spec: dict[str, Any] = {
        "version": 1,
        "architecture": {"loader": "open-clip", "source": "ViT-B-32-quickgelu"},
        "base": {"weights": "base.safetensors"},
        "merged": {"weights": "merged.safetensors"},
        "experts": {"cars": {"weights": "cars.safetensors"}, "Blumen 花": {"weights": "org/flowers"}},
        "heads": {"cars": {"classes": ["sedan", "T-shirt/top"], "templates": ["a photo of a {}."]}},
        "data": {"cars": {"kind": "imagefolder", "calibration": "cars/train", "test": "cars/test"}},
    }
    spec.update(changes)
    return {key: value for key, value in spec.items() if value is not None}


def refused(spec: dict[str, Any], *overrides: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_spec(spec, overrides)
    return caught.value
