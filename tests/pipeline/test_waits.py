"""How often a device is asked to wait doesn't depend on how many batches there are.

On a CPU asking costs nothing, so that nobody would notice. Whatever hands a tensor's numbers to Python is counted.
"""

from __future__ import annotations

import pathlib
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import driftlens as dl
from tests.zoo.world import World

ASKING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
METHODS = ("cpu", "numpy", "tolist")
OF_DATA = "preprocessing.py"
"""Pictures are made tensors on the CPU, wherever models are."""


class Waits(TorchDispatchMode):
    """Counts them by line of the product, while it is entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        for name in METHODS:
            monkeypatch.setattr(Tensor, name, self._counting(name, getattr(Tensor, name)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(entry, Tensor) and entry.dtype is torch.bool for entry in args[1] or ()
        )
        if name in ASKING or by_mask:
            self._count(name)
        return func(*args, **(kwargs or {}))

    def _counting(self, name: str, method: Any) -> Any:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._count(name)
            return method(tensor, *args, **kwargs)

        return counted

    def _count(self, name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and "/driftlens/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.endswith(OF_DATA):
            self.lines[f"{name} in {pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1


def test_more_batches_don_t_make_a_device_wait_more_often(
    world: World, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = Waits(monkeypatch)
    found: dict[tuple[str, int], Counter[str]] = {}
    for batch_size in (6, 2):
        spec = world.one_task(metrics={"jacobian": {"samples": 2}})
        defaults = {"n": 6, "n_diagnosis": 6, "batch_size": batch_size}
        spec["data"] = {"flowers": spec["data"]["flowers"], "defaults": defaults}
        out = tmp_path / f"run-{batch_size}"
        for step in ("analyze", "featcal", "residual"):
            waits.lines = found[step, batch_size] = Counter()
            with waits:
                if step == "analyze":
                    dl.analyze(spec, out=out, progress="none")
                else:
                    dl.calibrate(out, method=step, name=step, progress="none")
    for (step, batch_size), lines in found.items():
        assert lines.total() > 0
        assert lines == found[step, 6], (step, batch_size)
