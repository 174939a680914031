"""Every tensor of a saved folder, against what the method says of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def stored(folder: Path) -> dict[str, Tensor]:
    """All weights in the files of a folder."""
    return {
        key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()
    }


def assert_every_tensor(
    base: Path,
    experts: Iterable[Path],
    merged: Path,
    *,
    scaling: float,
    heads: str | tuple[str, ...] = (),
    solved: Path | None = None,
) -> None:
    """A folder merged by Task Arithmetic holds `base + scaling * sum(expert - base)` in each of its tensors.

    Args:
        base: the base's folder; experts' folders use the same names.
        experts: theirs.
        merged: what was saved.
        scaling: of task vectors.
        heads: beginning, or beginnings, of what belongs to each task and stays the base's.
        solved: the file of weights that a calibration solved; these stand in the place of the merged ones.
    """
    before, after = stored(base), stored(merged)
    changed = [stored(expert) for expert in experts]
    new = {} if solved is None else load_file(solved)
    assert after.keys() == before.keys() and (solved is None or new)
    solved_keys = set()
    for key, value in before.items():
        own = key if key in new else next((name for name in new if key.endswith(f".{name}")), None)
        if own is not None:
            solved_keys.add(own)
            wanted = new[own].to(value.dtype)
        elif not value.is_floating_point() or key.startswith(heads):
            wanted = value
        else:
            assert any(not torch.equal(value, one[key]) for one in changed), f"no expert changes {key}"
            change = torch.stack([one[key].double() - value.double() for one in changed]).sum(0)
            wanted = (value.double() + scaling * change).to(value.dtype)
        torch.testing.assert_close(
            after[key], wanted, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert solved_keys == new.keys()
