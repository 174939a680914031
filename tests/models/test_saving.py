"""Writing weights: the safetensors library reads back what was given, and failures leave nothing behind."""

from __future__ import annotations

import errno
import json
import pathlib
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from driftlens.base.errors import CheckpointError, NumericsError, RunError, ShapeError
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.sources import OnDemand, StateSource, TensorHeader, TensorsSource, content_digest
from driftlens.models.saving import Patched, save_state_dict


@pytest.fixture
def weights(generator: torch.Generator) -> dict[str, Tensor]:
    """Numbers of all widths, in an order that would leave wide ones unaligned if written as they come."""
    return {
        "mask": torch.tensor([True, False, True]),
        "number": torch.tensor(3, dtype=torch.int64),
        "half": torch.randn(5, generator=generator).half(),
        "brain": torch.randn(3, 3, generator=generator).bfloat16(),
        "weight": torch.randn(7, 3, generator=generator),
        "double": torch.randn(2, 2, generator=generator, dtype=torch.float64),
        "tiny": torch.randn(3, generator=generator).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 2),
        "名前": torch.ones(1),
    }


@pytest.fixture
def base(weights: dict[str, Tensor]) -> StateSource:
    return TensorsSource("base", weights)


def test_the_library_reads_back_what_was_written(weights: dict[str, Tensor], tmp_path: pathlib.Path) -> None:
    save_state_dict(tmp_path / "w.safetensors", weights, {"made_by": "a test"})
    read = load_file(tmp_path / "w.safetensors")
    assert set(read) == set(weights)
    for key, value in weights.items():
        assert read[key].dtype == value.dtype and read[key].shape == value.shape
        assert (
            torch.equal(read[key].view(torch.uint8), value.view(torch.uint8))
            if value.dim()
            else read[key] == value
        )
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made_by": "a test"}


def test_every_tensor_is_aligned_to_its_width(weights: dict[str, Tensor], tmp_path: pathlib.Path) -> None:
    """Readers that map the file cast in place, which processors do slowly or not at all across words."""
    save_state_dict(tmp_path / "w.safetensors", weights)
    data = (tmp_path / "w.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for key, value in weights.items():
        assert (start + header[key]["data_offsets"][0]) % value.dtype.itemsize == 0, key


def test_pairs_and_mappings_are_written_alike(weights: dict[str, Tensor], tmp_path: pathlib.Path) -> None:
    save_state_dict(tmp_path / "a.safetensors", weights)
    save_state_dict(tmp_path / "b.safetensors", ((key, value) for key, value in weights.items()))
    save_state_dict(tmp_path / "c.safetensors", Patched(TensorsSource("base", weights), {}))
    written = {(tmp_path / f"{name}.safetensors").read_bytes() for name in "abc"}
    assert len(written) == 1


def test_views_ties_and_leaves_are_written_by_value(tmp_path: pathlib.Path) -> None:
    shared = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    save_state_dict(
        tmp_path / "w.safetensors", {"a": shared, "b": shared, "t": shared.T, "part": shared[:, 1:]}
    )
    read = load_file(tmp_path / "w.safetensors")
    assert torch.equal(read["a"], shared) and torch.equal(read["b"], shared)
    assert torch.equal(read["t"], shared.T) and torch.equal(read["part"], shared[:, 1:])


def test_a_number_type_the_format_does_not_know_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"'w' is torch\.complex128"):
        save_state_dict(tmp_path / "w.safetensors", {"w": torch.zeros(2, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


def test_patching_keeps_keys_order_and_dtypes(base: StateSource, tmp_path: pathlib.Path) -> None:
    update = torch.linspace(-1, 1, 5, dtype=torch.float64)
    result = Patched(base, {"half": update})
    assert [key for key, _ in result] == list(base.headers)
    assert torch.equal(result.read("half"), update.half())
    assert torch.equal(result.read("half", (1, 3)), update[1:3].half())
    assert torch.equal(result.read("weight", (1, 3)), base.read("weight")[1:3])
    save_state_dict(tmp_path / "w.safetensors", result)
    saved = open_checkpoint(tmp_path / "w.safetensors")
    assert saved.headers == base.headers
    assert content_digest(saved) == content_digest(result)
    others = [key for key in base.headers if key != "half"]
    assert content_digest(saved, others) == content_digest(base, others)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("wait", torch.zeros(7, 3), CheckpointError, "no tensor 'wait'\nThe nearest key is 'weight'"),
        ("weight", torch.zeros(3, 7), ShapeError, r"shape \[7, 3\] in base, its update \[3, 7\]"),
        ("weight", torch.full((7, 3), float("nan")), NumericsError, "'weight' holds 21 NaN"),
        ("half", torch.full((5,), 1e6), NumericsError, "'half' holds 5 NaN or infinite"),
        ("number", torch.tensor(2.5), CheckpointError, "'number' is torch.int64"),
    ],
    ids=["unknown_key", "shape", "nan", "overflow_in_float16", "float_for_integer"],
)
def test_updates_that_would_spoil_the_base_are_refused(
    key: str, value: Tensor, error: type[Exception], message: str, base: StateSource, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(error, match=message):
        save_state_dict(tmp_path / "w.safetensors", Patched(base, {key: value}))
    assert not list(tmp_path.iterdir())


class Counting:
    """A source that counts how many of the tensors it handed out are still alive."""

    def __init__(self) -> None:
        self.name = "counting"
        self.headers = {f"t{i}": TensorHeader((100,), torch.float32) for i in range(8)}
        self.alive = self.most = 0

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        tensor = torch.full((100,), float(key[1:]))
        weakref.finalize(tensor, self._dropped)
        self.alive += 1
        self.most = max(self.most, self.alive)
        return tensor

    def _dropped(self) -> None:
        self.alive -= 1


def test_an_update_is_put_together_once_however_often_it_is_patched(tmp_path: pathlib.Path) -> None:
    source, made = Counting(), []

    def update(key: str) -> Tensor:
        made.append(key)
        return torch.zeros(100)

    inner = Patched(source, OnDemand(["t3", "t6"], update))
    save_state_dict(tmp_path / "w.safetensors", Patched(source, OnDemand(source.headers, inner.read)))
    assert made == ["t3", "t6"]


def test_patched_weights_are_streamed(tmp_path: pathlib.Path) -> None:
    source = Counting()
    save_state_dict(tmp_path / "w.safetensors", Patched(source, {"t3": torch.zeros(100)}))
    assert source.most <= 2  # the one at hand, and the next while it takes its place
    assert [float(value[0]) for _, value in sorted(load_file(tmp_path / "w.safetensors").items())] == [
        0,
        1,
        2,
        0,
        4,
        5,
        6,
        7,
    ]


class Failing(Counting):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        if key == "t5":
            raise self.error
        return super().read(key, rows)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), CheckpointError("gone"), OSError(errno.EIO, "unreadable")]
)
def test_whatever_stops_the_writing_the_old_file_stays(error: BaseException, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "w.safetensors"
    save_state_dict(path, {"a": torch.ones(2)})
    before = path.read_bytes()
    with pytest.raises(type(error)):
        save_state_dict(path, Patched(Failing(error), {}))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_with_what_is_needed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RunError, match=r"can't write .*w\.safetensors: No space left") as refusal:
        save_state_dict(
            tmp_path / "w.safetensors", Patched(Failing(OSError(errno.ENOSPC, "No space left")), {})
        )
    assert refusal.value.context["need"] > 8 * 400
    assert "bytes needed are free there" in refusal.value.hint
    assert not list(tmp_path.iterdir())
