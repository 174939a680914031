"""Small files are kept open, large ones opened for each read; nobody can tell which from what is read."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from driftlens.base.errors import CheckpointError
from driftlens.checkpoints import sources
from driftlens.checkpoints.sources import SafetensorsSource


@pytest.fixture
def weights(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "w": torch.randn(6, 4, generator=generator),
        "half": torch.randn(3, 2, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(7),
    }


@pytest.fixture
def file(tmp_path: pathlib.Path, weights: dict[str, Tensor]) -> pathlib.Path:
    save_file(weights, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


@pytest.fixture(params=["kept open", "opened for each read"])
def source(
    request: pytest.FixtureRequest, file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> SafetensorsSource:
    size = file.stat().st_size
    limit = size if request.param == "kept open" else size - 1
    monkeypatch.setattr(sources, "KEPT_OPEN", limit)
    return SafetensorsSource(file)


def equal(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_tensors_and_rows_are_those_that_were_saved(
    source: SafetensorsSource, weights: dict[str, Tensor]
) -> None:
    assert all(equal(source.read(key), value) for key, value in weights.items())
    assert equal(source.read("w", (2, 5)), weights["w"][2:5])
    assert {key: header.shape for key, header in source.headers.items()} == {
        key: tuple(value.shape) for key, value in weights.items()
    }


@pytest.mark.parametrize("rows", [None, (1, 3)], ids=["whole", "rows"])
def test_writing_to_a_tensor_changes_neither_the_next_read_nor_the_file(
    source: SafetensorsSource,
    weights: dict[str, Tensor],
    file: pathlib.Path,
    rows: tuple[int, int] | None,
) -> None:
    before = file.read_bytes()
    mine = source.read("w", rows)
    mine.fill_(99)
    assert equal(source.read("w"), weights["w"]) and equal(source.read("w", (1, 3)), weights["w"][1:3])
    assert file.read_bytes() == before
    assert bool((mine == 99).all())


@pytest.mark.parametrize(
    ("spare", "opened"), [(0, 2), (-1, 4)], ids=["up to the limit", "one byte beyond the limit"]
)
def test_a_file_up_to_the_limit_is_opened_no_more_after_its_header(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, spare: int, opened: int
) -> None:
    """Once for the header, and then once for all reads, or once for each of three."""
    calls: list[pathlib.Path] = []
    plain = sources._open

    def counting(path: pathlib.Path) -> Any:
        calls.append(path)
        return plain(path)

    monkeypatch.setattr(sources, "_open", counting)
    monkeypatch.setattr(sources, "KEPT_OPEN", file.stat().st_size + spare)
    source = SafetensorsSource(file)
    for _ in range(3):
        source.read("w")
    assert calls == [file] * opened


@pytest.mark.parametrize("spare", [0, -1], ids=["up to the limit", "one byte beyond the limit"])
@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_a_file_that_changes_meanwhile_is_reported(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, spare: int, damage: str
) -> None:
    monkeypatch.setattr(sources, "KEPT_OPEN", file.stat().st_size + spare)
    source = SafetensorsSource(file)
    if damage == "gone":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        source.read("w")
