"""Weights and models written back: libraries read what was given, nothing else moves, failures leave nothing behind."""

from __future__ import annotations

import errno
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import (
    InMemorySource,
    LazyTensors,
    StateSource,
    TensorHeader,
    content_digest,
    module_source,
)
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.models.architectures.module_list import chain_of_module
from driftlens.models.chain import updated_tensors
from driftlens.models.saving import PatchedSource, save_model, save_state_dict
from driftlens.utils.errors import (
    CheckpointError,
    IncompatibleModelsError,
    NumericsError,
    RunError,
    ShapeError,
    SpecError,
)
from tests.models.live import architecture_of
from tests.refusing import refusing
from tests.zoo.towers import hf_folder, hf_tower, open_clip_folder, open_clip_tower, pixels
from tests.zoo.walking import chain_states, parameters


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
    return InMemorySource("base", weights)


def test_the_library_reads_back_what_was_written(weights: dict[str, Tensor], tmp_path: Path) -> None:
    save_state_dict(tmp_path / "w.safetensors", weights, {"made_by": "a test"})
    read = load_file(tmp_path / "w.safetensors")
    assert set(read) == set(weights)
    for key, value in weights.items():
        assert read[key].dtype == value.dtype and read[key].shape == value.shape
        assert torch.equal(read[key].view(torch.uint8), value.view(torch.uint8)) if value.dim() else read[key] == value
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made_by": "a test"}


def test_every_tensor_is_aligned_to_its_width(weights: dict[str, Tensor], tmp_path: Path) -> None:
    """Readers that map the file cast in place, which processors do slowly or not at all across words."""
    save_state_dict(tmp_path / "w.safetensors", weights)
    data = (tmp_path / "w.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for key, value in weights.items():
        assert (start + header[key]["data_offsets"][0]) % value.dtype.itemsize == 0, key


def test_views_ties_and_leaves_are_written_by_value(tmp_path: Path) -> None:
    shared = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    save_state_dict(tmp_path / "w.safetensors", {"a": shared, "b": shared, "t": shared.T, "part": shared[:, 1:]})
    read = load_file(tmp_path / "w.safetensors")
    assert torch.equal(read["a"], shared) and torch.equal(read["b"], shared)
    assert torch.equal(read["t"], shared.T) and torch.equal(read["part"], shared[:, 1:])


def test_patching_keeps_keys_order_and_dtypes(base: StateSource, tmp_path: Path) -> None:
    update = torch.linspace(-1, 1, 5, dtype=torch.float64)
    result = PatchedSource(base, {"half": update})
    assert list(result.headers) == list(base.headers)
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
        ("wait", torch.zeros(7, 3), CheckpointError, "no tensor 'wait'\nDid you mean 'weight'"),
        ("weight", torch.zeros(3, 7), ShapeError, r"shape \[3, 7\]; expected \[7, 3\] as in base"),
        ("weight", torch.full((7, 3), float("nan")), NumericsError, "'weight' holds 21 NaN"),
        ("half", torch.full((5,), 1e6), NumericsError, "'half' holds 5 NaN or infinite"),
        ("number", torch.tensor(2.5), CheckpointError, "'number' is torch.int64"),
    ],
    ids=["unknown_key", "shape", "nan", "overflow_in_float16", "float_for_integer"],
)
def test_updates_that_would_spoil_the_base_are_refused(
    key: str, value: Tensor, error: type[Exception], message: str, base: StateSource, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        save_state_dict(tmp_path / "w.safetensors", PatchedSource(base, {key: value}))
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


def test_an_update_is_put_together_once_however_often_it_is_patched(tmp_path: Path) -> None:
    source, made = Counting(), []

    def update(key: str) -> Tensor:
        made.append(key)
        return torch.zeros(100)

    inner = PatchedSource(source, LazyTensors(["t3", "t6"], update))
    save_state_dict(tmp_path / "w.safetensors", PatchedSource(source, LazyTensors(source.headers, inner.read)))
    assert made == ["t3", "t6"]


def test_patched_weights_are_streamed(tmp_path: Path) -> None:
    source = Counting()
    save_state_dict(tmp_path / "w.safetensors", PatchedSource(source, {"t3": torch.zeros(100)}))
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


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CheckpointError("gone"), OSError(errno.EIO, "unreadable")])
def test_whatever_stops_the_writing_the_old_file_stays(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_state_dict(path, {"a": torch.ones(2)})
    before = path.read_bytes()
    with pytest.raises(type(error)):
        save_state_dict(path, PatchedSource(Failing(error), {}))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"can't write .*w\.safetensors: No space left") as refusal:
        save_state_dict(tmp_path / "w.safetensors", PatchedSource(Failing(OSError(errno.ENOSPC, "No space left")), {}))
    assert refusal.value.context["need"] > 8 * 400
    assert "bytes needed are free there" in refusal.value.hint
    assert not list(tmp_path.iterdir())


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "hf-clip": hf_folder,
    "open-clip": open_clip_folder,
}


@pytest.fixture(scope="module", params=FOLDERS)
def base_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FOLDERS[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture
def architecture(base_folder: Path) -> Architecture:
    return load_architecture(base_folder.name, str(base_folder))


def doubled(architecture: Architecture, base: StateSource) -> StateSource:
    """Every parameter of the image tower times two, set layer by layer."""
    tower = architecture.align(base)
    weights = {key: tower.read(key) for key in tower.headers}
    changes = {
        (layer.index, name): 2 * value
        for layer in architecture.chain.layers
        for name, value in parameters(layer, weights).items()
    }
    return PatchedSource(tower, updated_tensors(architecture.chain, changes, tower))


def test_rows_that_are_not_given_stay_those_of_the_start() -> None:
    module = open_clip_tower()
    source = module_source(module, "merged")
    before = {key: value.clone() for key, value in module.state_dict().items()}
    key = "transformer.resblocks.1.attn.in_proj_weight"
    back = updated_tensors(
        chain_of_module(module),
        {
            (3, "attn.k_proj.weight"): torch.full((32, 32), 7.0),
            (5, "proj.weight"): torch.ones(8, 32).cumsum(1),
        },
        source,
    )
    assert back.keys() == {key, "proj"}
    assert (back[key][32:64] == 7).all()
    assert torch.equal(back[key][:32], before[key][:32]) and torch.equal(back[key][64:], before[key][64:])
    assert back[key].dtype == torch.float64
    assert torch.equal(back["proj"][:, 0], torch.arange(1.0, 33, dtype=torch.float64))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_state_dict_keeps_the_bases_names_and_what_else_it_holds(
    architecture: Architecture, base_folder: Path, tmp_path: Path
) -> None:
    plain = open_checkpoint(base_folder)
    base = InMemorySource("base", {f"module.{key}": plain.read(key).half() for key in plain.headers})
    save_model(architecture, base, doubled(architecture, base), tmp_path / "out.safetensors", metadata={"by": "test"})
    saved = load_file(tmp_path / "out.safetensors")
    assert saved.keys() == base.headers.keys()
    tower = ("module.visual.", "module.vision_model.", "module.visual_projection.")
    assert any(key.startswith(tower) for key in saved) and not all(key.startswith(tower) for key in saved)
    for key, value in saved.items():
        expected = base.read(key) * (2 if key.startswith(tower) else 1)
        assert value.dtype == torch.float16 and torch.equal(value, expected), key


def expected_feature(architecture: Architecture, model: StateSource) -> Tensor:
    module = architecture.skeleton
    module.load_state_dict({key: model.read(key) for key in architecture.keys}, assign=True)
    return chain_states(architecture.chain, module, pixels().float())[-1]["hidden"]


def test_a_folder_of_transformers_may_hold_the_tower_alone(tmp_path: Path) -> None:
    from transformers import CLIPVisionModelWithProjection

    module = hf_tower().float()
    module.save_pretrained(tmp_path / "base")
    architecture = load_architecture("hf-clip", str(tmp_path / "base"))
    base = open_checkpoint(tmp_path / "base")
    model = doubled(architecture, base)
    save_model(architecture, base, model, tmp_path / "out")
    with torch.no_grad():
        found = CLIPVisionModelWithProjection.from_pretrained(tmp_path / "out")(pixels().float()).image_embeds
    torch.testing.assert_close(found, expected_feature(architecture, model), rtol=1e-5, atol=1e-5)
    processor = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert processor["crop_size"] == {"height": 16, "width": 16}


def test_a_part_of_an_open_clip_model_makes_no_folder(tmp_path: Path) -> None:
    folder = open_clip_folder(tmp_path / "base")
    architecture, whole = load_architecture("open-clip", str(folder)), open_checkpoint(folder)
    tower = InMemorySource("tower", {key: whole.read(key) for key in whole.headers if key.startswith("visual.")})
    with pytest.raises(SpecError, match="is not a whole model"):
        save_model(architecture, tower, doubled(architecture, tower), tmp_path / "out")
    save_model(architecture, tower, doubled(architecture, tower), tmp_path / "out.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out.safetensors"]


def test_a_live_model_is_saved_as_a_state_dict_only(tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    architecture = architecture_of(module, torch.ones(2, 4))
    source = module_source(module, "base")
    with pytest.raises(SpecError, match="only be saved as a state dict"):
        save_model(architecture, source, doubled(architecture, source), tmp_path / "out")
    save_model(architecture, source, doubled(architecture, source), tmp_path / "out.safetensors")
    saved = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(value, 2 * module.state_dict()[key]) for key, value in saved.items())
    assert len(saved) == 6


def test_a_model_with_a_hole_is_not_saved(architecture: Architecture, base_folder: Path, tmp_path: Path) -> None:
    base = open_checkpoint(base_folder)
    tower = architecture.align(base)
    key = architecture.chain.parameter_keys()[5]
    holed = InMemorySource("calibrated", {name: tower.read(name) for name in tower.headers if name != key})
    with refusing(IncompatibleModelsError, key, match="calibrated lacks"):
        save_model(architecture, base, holed, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_overwritten(
    architecture: Architecture, base_folder: Path, tmp_path: Path
) -> None:
    base = open_checkpoint(base_folder)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(RunError):
        save_model(architecture, base, doubled(architecture, base), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("ending", [".bin", ".ckpt", ".gguf"])
def test_a_file_of_another_format_is_not_written_as_a_folder(
    architecture: Architecture, base_folder: Path, tmp_path: Path, ending: str
) -> None:
    base = open_checkpoint(base_folder)
    with refusing(SpecError, f"not as {ending}", hint=f"Use {tmp_path / 'out.safetensors'}, or"):
        save_model(architecture, base, doubled(architecture, base), tmp_path / f"out{ending}")
    assert list(tmp_path.iterdir()) == []
