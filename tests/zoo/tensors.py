"""Every tensor of a saved folder, against what the method says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file
from torch import Tensor

from driftlens.checkpoints.alignment import KeyLayout, expand_concat_pattern
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.models.architecture import Architecture


def weights_in(folder: Path) -> dict[str, Tensor]:
    """All weights in a file, or in the files of a folder."""
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    return {key: value for file in files for key, value in load_file(file).items()}


def site_keys(known: Architecture, folder: Path) -> dict[str, str]:
    """The tensors in a folder that are solved for in blocks -> the kind of their site."""
    source, names = open_checkpoint(folder), {key: key for key in known.keys}
    headers = source.headers
    if known.layout is not None:
        fitted = known.layout.regroup(source) if isinstance(known.layout, KeyLayout) else source
        names = known.layout.key_map(fitted.headers, known.keys, folder.name)
    return {
        stored: site.kind
        for layer in known.chain.blocks
        for site in layer.sites
        for name, slot in layer.parameters.items()
        if name.rpartition(".")[0] == site.name
        for stored in (_of_expert(names[slot.key], site.expert, layer.num_experts, headers))
    }


def _of_expert(name: str, expert: int | None, count: int, headers: Mapping[str, object]) -> list[str]:
    """The tensors of a file that hold one expert's part of what memory fuses."""
    if expert is None or name in headers:
        return [name]
    each = len(apart := expand_concat_pattern(name, count)) // count
    return apart[expert * each : (expert + 1) * each]


def assert_every_tensor(
    base: Path,
    experts: Iterable[Path],
    saved: Path,
    *,
    scaling: float,
    heads: str | tuple[str, ...] = (),
    solved: Mapping[str, str] = MappingProxyType({}),
    shared: int = 0,
) -> None:
    """A folder merged by Task Arithmetic holds `base + scaling * sum(expert - base)` in each of its tensors.

    Args:
        base: the base's folder; experts' folders use the same names.
        experts: theirs.
        saved: what was saved.
        scaling: of task vectors.
        heads: beginning, or beginnings, of what belongs to each task and stays the base's.
        solved: the tensors that a calibration solved for, by kind: these alone may differ, and linear weights do.
        shared: how many tensors no expert changes.
    """
    before, after, changed = weights_in(base), weights_in(saved), [weights_in(expert) for expert in experts]
    assert after.keys() == before.keys() and solved.keys() <= before.keys()
    alike, kept = 0, []
    for key, value in before.items():
        if not value.is_floating_point() or key.startswith(heads):
            wanted = value
        else:
            alike += all(torch.equal(value, one[key]) for one in changed)
            change = torch.stack([one[key].double() - value.double() for one in changed]).sum(0)
            wanted = (value.double() + scaling * change).to(value.dtype)
        if key not in solved:
            torch.testing.assert_close(
                after[key], wanted, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
            )
        elif solved[key] == "linear" and key.endswith("weight") and torch.allclose(after[key], wanted):
            kept.append(key)
    assert not kept and alike == shared, (kept, alike, shared)
