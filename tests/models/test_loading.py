"""Opening checkpoints: what is read is what was saved, and what can't be read safely is refused by name."""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from driftlens.checkpoints import tensor_sources as sources
from driftlens.checkpoints.loading import (
    companion_files,
    fetch_config_folder,
    fetch_if_hub_id,
    find_config_folder,
    open_checkpoint,
    read_config,
)
from driftlens.checkpoints.tensor_sources import (
    SafetensorsSource,
    check_finite,
    content_digest,
    module_source,
    rename_keys,
)
from driftlens.utils.errors import CheckpointError, IncompatibleModelsError, NumericsError
from tests.models.writing import Weights, write_mergekit
from tests.refusing import refusing


@pytest.fixture
def weights(generator: torch.Generator) -> Weights:
    """Tensors of many kinds: half precision, integers, a number, an empty one."""
    return {
        "embed.weight": torch.randn(6, 4, generator=generator),
        "block.half": torch.randn(3, 2, 2, generator=generator).to(torch.bfloat16),
        "block.count": torch.tensor(7),
        "block.mask": torch.tensor([True, False, True]),
        "block.none": torch.zeros(0, 4, dtype=torch.float16),
    }


def write_safetensors(folder: Path, weights: Weights) -> Path:
    save_file(weights, folder / "w.safetensors")
    return folder / "w.safetensors"


def write_torch(wrap: Callable[[Weights], Any] = dict, **options: Any) -> Callable[..., Path]:
    def write(folder: Path, weights: Weights) -> Path:
        torch.save(wrap(weights), folder / "w.pt", **options)
        return folder / "w.pt"

    return write


def training_checkpoint(weights: Weights) -> dict[str, Any]:
    state = {
        f"module.{key}": nn.Parameter(value) if value.is_floating_point() else value for key, value in weights.items()
    }
    return {"epoch": 3, "optimizer": {"lr": [0.1]}, "state_dict": state}


def write_folder(name: str) -> Callable[[Path, Weights], Path]:
    def write(folder: Path, weights: Weights) -> Path:
        (save_file if name.endswith(".safetensors") else torch.save)(weights, folder / name)
        (folder / "config.json").write_text("{}")
        return folder

    return write


def write_shards(stem: str, suffix: str) -> Callable[[Path, Weights], Path]:
    def write(folder: Path, weights: Weights) -> Path:
        shards: dict[str, Weights] = {}
        for position, (key, value) in enumerate(weights.items()):
            shards.setdefault(f"{stem}-0000{position % 2 + 1}-of-00002{suffix}", {})[key] = value
        for shard, content in shards.items():
            (save_file if suffix == ".safetensors" else torch.save)(content, folder / shard)
        index = {"metadata": {}, "weight_map": {key: shard for shard, part in shards.items() for key in part}}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
        return folder

    return write


FORMS = {
    "safetensors": write_safetensors,
    "torch": write_torch(),
    "torch_before_1_6": write_torch(_use_new_zipfile_serialization=False),
    "training_checkpoint": write_torch(training_checkpoint),
    "under_model": write_torch(lambda weights: {"model": weights, "step": 1}),
    "folder_safetensors": write_folder("model.safetensors"),
    "folder_torch": write_folder("pytorch_model.bin"),
    "folder_open_clip": write_folder("open_clip_model.safetensors"),
    "folder_open_clip_torch": write_folder("open_clip_pytorch_model.bin"),
    "shards_safetensors": write_shards("model", ".safetensors"),
    "shards_torch": write_shards("pytorch_model", ".bin"),
    "mergekit": write_mergekit,
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_is_what_was_saved(form: str, weights: Weights, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path, weights)
    source = open_checkpoint(path)
    assert source.name.startswith(str(path))
    assert set(source.headers) == set(weights)
    for key, value in weights.items():
        assert (source.headers[key].shape, source.headers[key].dtype) == (tuple(value.shape), value.dtype)
        read = source.read(key)
        assert read.dtype == value.dtype and torch.equal(read, value) and not read.requires_grad
    assert torch.equal(source.read("embed.weight", (1, 4)), weights["embed.weight"][1:4])


@pytest.mark.parametrize("form", FORMS)
def test_the_same_weights_have_the_same_digest(form: str, weights: Weights, tmp_path: Path) -> None:
    module = nn.Module()
    for key, value in reversed(weights.items()):
        module.register_buffer(key.replace(".", "_"), value)
    names = {key: key.replace(".", "_") for key in weights}
    live = rename_keys(module_source(module, "live"), names)
    assert content_digest(open_checkpoint(FORMS[form](tmp_path, weights))) == content_digest(live)


CHANGES: dict[str, Callable[[Weights], Weights]] = {
    "value": lambda weights: weights | {"embed.weight": weights["embed.weight"].flip(0)},
    "name": lambda weights: {key.replace("embed", "embedding"): value for key, value in weights.items()},
    "shape": lambda weights: weights | {"embed.weight": weights["embed.weight"].reshape(4, 6)},
    "dtype": lambda weights: weights | {"block.half": weights["block.half"].view(torch.float16)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_weights_have_another_digest(change: Callable[[Weights], Weights], weights: Weights) -> None:
    def digest(tensors: Weights) -> str:
        module = nn.Module()
        for key, value in tensors.items():
            module.register_buffer(key.replace(".", "_"), value)
        return content_digest(module_source(module, "live"))

    assert digest(change(weights)) != digest(weights)


def test_a_digest_of_some_keys_ignores_the_rest(weights: Weights, tmp_path: Path) -> None:
    source = open_checkpoint(write_safetensors(tmp_path, weights))
    keys = ["embed.weight", "block.count"]
    before = content_digest(source, keys)
    other = weights | {"block.mask": ~weights["block.mask"]}
    source = open_checkpoint(write_safetensors(tmp_path, other))
    assert content_digest(source, reversed(keys)) == before != content_digest(source)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_reading_one_tensor_maps_only_that_tensor(tmp_path: Path) -> None:
    """Resident memory grows by the tensor read, not by the file, and shrinks when the tensor is dropped."""
    save_file({f"t{i}": torch.full((4 << 20,), float(i)) for i in range(8)}, tmp_path / "big.safetensors")
    source = open_checkpoint(tmp_path / "big.safetensors")
    start = resident_bytes()
    total = sum(float(source.read(f"t{i}")[:: 1 << 10].sum()) for i in range(8))  # touches every page
    assert total == sum(range(8)) * (4 << 10)
    assert resident_bytes() - start < 40 << 20  # the file is 128 MiB, a tensor 16


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- what is refused
# -------------------------------------------------------------------------------------------------


def pickled_model(weights: Weights) -> nn.Module:
    module = nn.Module()
    module._buffers.update(weights)
    return module


def test_the_lines_in_the_hint_convert_the_file(tmp_path: Path, weights: Weights) -> None:
    path = tmp_path / "it's $w.pt"
    torch.save(pickled_model(weights), path)
    with pytest.raises(CheckpointError, match=r"holds objects other than tensors.*torch\.nn\.modules") as refusal:
        open_checkpoint(path)
    warning, *lines = refusal.value.hint.splitlines()
    assert "runs its code" in warning and len(lines) == 3
    exec("\n".join(lines), {"torch": torch, "safetensors": safetensors})
    converted = open_checkpoint(tmp_path / "it's $w.safetensors")
    assert set(converted.headers) == set(weights)
    assert all(torch.equal(converted.read(key), value) for key, value in weights.items())


class Trap:
    """An object whose unpickling would leave a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def torchscript(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(nn.Linear(2, 2)).save(str(path))


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (
            lambda path: torch.save({"w": Trap(path.with_name("trace"))}, path),
            "holds objects other than tensors",
        ),
        (
            lambda path: torch.save({"w": Trap(path.with_name("trace"))}, path, _use_new_zipfile_serialization=False),
            "holds objects other than tensors",
        ),
        (
            lambda path: path.write_bytes(pickle.dumps({"w": torch.ones(2)})),
            "holds objects other than tensors",
        ),
        (torchscript, "holds objects other than tensors.*TorchScript"),
        (lambda path: torch.save({"lr": 0.1, "net": {"w": torch.ones(2)}}, path), "a dict without tensors"),
        (lambda path: torch.save([torch.ones(2)], path), "a list without tensors"),
        (lambda path: torch.save({"w": torch.eye(2).to_sparse()}, path), "'w' is sparse or quantised"),
    ],
    ids=["code", "code, old format", "plain pickle", "torchscript", "nested deeper", "list", "sparse"],
)
def test_what_torch_builds_from_more_than_tensors_is_refused(
    save: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message) as refusal:
        open_checkpoint(tmp_path / "w.pt")
    assert refusal.value.hint and not (tmp_path / "trace").exists()


def test_the_arguments_of_a_training_script_may_lie_next_to_weights(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=0.1)}, tmp_path / "w.pt")
    assert torch.equal(open_checkpoint(tmp_path / "w.pt").read("w"), torch.ones(2))


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint64, torch.bool],
    ids=str,
)
def test_every_type_of_number_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"a": torch.tensor([0, 1, 2, 0, 5, 1]).to(dtype).reshape(2, 3), "b": torch.ones(1).to(dtype)}
    torch.save(state, tmp_path / "w.pt")
    source = open_checkpoint(tmp_path / "w.pt")
    for key, value in state.items():
        read = source.read(key)
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        assert torch.equal(read.view(torch.uint8), value.view(torch.uint8))
    assert torch.equal(source.read("a", (1, 2)).view(torch.uint8), state["a"][1:2].view(torch.uint8))


def test_a_torch_file_is_mapped_and_writing_to_a_tensor_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"a": torch.arange(6.0)}, path)
    before, source = path.read_bytes(), open_checkpoint(path)
    source.read("a").zero_()
    assert path.read_bytes() == before and torch.equal(open_checkpoint(path).read("a"), torch.arange(6.0))


@pytest.mark.parametrize("name", ["a.pkl", "a.gguf", "a.txt"])
def test_other_formats_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"anything")
    (tmp_path / "config.json").write_text("{}")
    for place in (tmp_path / name, *([tmp_path] if name != "a.txt" else [])):
        with pytest.raises(CheckpointError, match=f"{name}: expected a file of type .safetensors"):
            open_checkpoint(place)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.bin"])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.95], ids=["empty", "header_cut", "half", "tail_cut"])
def test_a_file_cut_short_is_refused(name: str, kept: float, tmp_path: Path, weights: Weights) -> None:
    path = tmp_path / name
    (save_file if name.endswith("safetensors") else torch.save)(weights, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CheckpointError, match="not a complete"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin"])
def test_a_git_lfs_pointer_is_refused_with_the_remedy(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer, not the weights\nRun `git lfs pull`"):
        open_checkpoint(tmp_path / name)


def test_quantised_folders_are_refused_before_their_weights_are_opened(tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig, CLIPConfig

    config = CLIPConfig(quantization_config=BitsAndBytesConfig(load_in_4bit=True).to_dict())
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not even a header")
    with refusing(IncompatibleModelsError, match=r"quantised weights \(bitsandbytes\)", hint="dequantize"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        *("layers.0.q_proj.weight_scale_inv", "layers.0.q_proj.weight_scale", "layers.0.q_proj.qweight"),
        *("layers.0.q_proj.weight.absmax", "layers.0.q_proj.weight.quant_state.bitsandbytes__nf4"),
        *("layers.0.q_proj.SCB", "layers.0.q_proj.weight_packed", "layers.0.mlp.experts.down_proj_blocks"),
    ],
)
def test_quantised_files_without_a_configuration_are_told_by_their_keys(
    key: str, tmp_path: Path, weights: Weights
) -> None:
    for name in ("layers.0.scale", "layers.0.logit_scale", "layers.0.down_proj.weight", "layers.0.blocks.scales"):
        weights[name] = torch.ones(2)
    save_file(weights, tmp_path / "model.safetensors")
    open_checkpoint(tmp_path)
    save_file(weights | {key: torch.ones(1)}, tmp_path / "model.safetensors")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        with refusing(IncompatibleModelsError, f"quantised weights: 1 tensors of scales or codes, such as {key!r}"):
            open_checkpoint(place)


@pytest.mark.parametrize("reference", ["abc123", "../../outside", "gone", ""])
def test_the_root_of_a_cached_repository_is_its_snapshot(reference: str, tmp_path: Path, weights: Weights) -> None:
    root = tmp_path / "models--org--name"
    for folder in ("refs", "blobs", "snapshots/abc123", "outside"):
        (root / folder).mkdir(parents=True)
    for folder in ("snapshots/abc123", "outside"):
        save_file(weights, root / folder / "model.safetensors")
        (root / folder / "config.json").write_text("{}")
    (root / "refs" / "main").write_text(reference + "\n")
    if reference != "abc123":
        with pytest.raises(CheckpointError, match="holds no weights; found blobs"):
            open_checkpoint(root)
        return
    assert open_checkpoint(root).headers.keys() == open_checkpoint(str(root)).headers.keys() == weights.keys()
    snapshot = root / "snapshots" / "abc123"
    assert fetch_config_folder(str(root)) == find_config_folder(str(root)) == snapshot
    assert fetch_if_hub_id(str(root)) == str(snapshot) and fetch_if_hub_id(str(snapshot)) == str(snapshot)


def test_a_missing_shard_is_named(tmp_path: Path, weights: Weights) -> None:
    write_shards("model", ".safetensors")(tmp_path, weights)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not an index"),
        ("[]", "is not an index"),
        ('{"weight_map": {}}', "is not an index"),
        ('{"weight_map": {"a": "../w.safetensors"}}', "outside its folder"),
    ],
    ids=["no_json", "list", "empty", "outside"],
)
def test_a_malformed_index_is_refused(index: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors")
    (tmp_path / "inner" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "inner")


# --- the Hub
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Weights) -> Path:
    """A local Hub cache that holds `someone/model`."""
    from huggingface_hub import constants

    cache = tmp_path / "cache"
    repository = cache / "models--someone--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    save_file(weights, snapshot / "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return snapshot


def test_a_cached_repository_is_read_offline(hub_cache: Path, weights: Weights) -> None:
    source = open_checkpoint("someone/model", offline=True)
    assert source.name == str(hub_cache / "model.safetensors")
    assert torch.equal(source.read("embed.weight"), weights["embed.weight"])


def test_a_revision_behind_an_id_is_the_one_that_is_read(hub_cache: Path, weights: Weights) -> None:
    older = {name: value + 1 for name, value in weights.items()}
    sha = "1" * 40
    (hub_cache.parents[1] / "refs" / "v1.0").write_text(sha)
    old = hub_cache.parent / sha
    old.mkdir()
    save_file(older, old / "model.safetensors")
    (old / "config.json").write_text('{"hidden_size": 1}')
    (hub_cache / "config.json").write_text('{"hidden_size": 2}')
    name = next(iter(weights))
    for place, wanted, folder, size in (
        ("someone/model", weights, hub_cache, 2),
        ("someone/model@v1.0", older, old, 1),
        (f"someone/model@{sha}", older, old, 1),
    ):
        source = open_checkpoint(place, offline=True)
        torch.testing.assert_close(source.read(name), wanted[name], rtol=0, atol=0)
        assert find_config_folder(place) == folder
        assert read_config(place, "config.json", offline=True) == {"hidden_size": size}
    with refusing(CheckpointError, match="someone/model@v2", hint="hf download someone/model --revision v2"):
        open_checkpoint("someone/model@v2", offline=True)


def test_what_lies_beside_weights_is_found_by_folder_file_and_cached_id(hub_cache: Path) -> None:
    assert find_config_folder("someone/model") is None, "no library's folder without a configuration"
    for name in ("config.json", "tokenizer.json", "model.py", "other.json", "vocab.txt"):
        (hub_cache / name).write_text("{}")
    for place in (
        "someone/model",
        "hf-hub:someone/model",
        str(hub_cache),
        str(hub_cache / "model.safetensors"),
    ):
        assert find_config_folder(place) == hub_cache, place
    assert list(companion_files(hub_cache)) == ["tokenizer.json", "vocab.txt"]
    secret, blob = hub_cache.parents[2] / "id_rsa", hub_cache.parents[1] / "blobs/0"
    blob.parent.mkdir()
    for file, name in ((secret, "LICENSE"), (blob, "NOTICE"), (hub_cache / "other.json", "vocab.json")):
        file.write_text("{}")
        (hub_cache / name).symlink_to(file)
    kept = ["NOTICE", "tokenizer.json", "vocab.json", "vocab.txt"]
    assert list(companion_files(hub_cache)) == kept, "links leave the folder for its own blobs only"
    elsewhere = hub_cache.rename(hub_cache.parents[1] / "plain")
    assert list(companion_files(elsewhere)) == ["tokenizer.json", "vocab.txt"]
    elsewhere.rename(hub_cache)
    for place in ("", "someone/other", str(hub_cache / "none.safetensors")):
        assert companion_files(find_config_folder(place)) == {}


def test_a_download_is_announced_and_fetches_one_form_of_the_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    weights: Weights,
) -> None:
    asked: list[list[str]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        assert (repository, revision, local_files_only) == ("someone/model", None, False)
        asked.append(allow_patterns)
        if "*.bin" in allow_patterns:
            torch.save(weights, tmp_path / "pytorch_model.bin")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with caplog.at_level(logging.WARNING, "driftlens"):
        assert set(open_checkpoint("someone/model").headers) == set(weights)
    assert "someone/model" in caplog.text
    assert ["*.safetensors" in patterns for patterns in asked] == [True, False]


# --- live modules, views, finiteness
# ---------------------------------------------------------------------------------


def test_a_live_module_is_read_by_reference() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    source = module_source(module, "merged")
    assert source.name == "merged" and list(source.headers) == list(module.state_dict())
    assert source.read("0.weight").data_ptr() == module[0].weight.data_ptr()
    assert not source.read("0.weight").requires_grad
    assert torch.equal(source.read("0.weight", (1, 2)), module[0].weight[1:2])


def test_renaming_hides_what_it_does_not_name(weights: Weights, tmp_path: Path) -> None:
    view = rename_keys(open_checkpoint(write_safetensors(tmp_path, weights)), {"tokens": "embed.weight"})
    assert list(view.headers) == ["tokens"]
    assert torch.equal(view.read("tokens", (0, 2)), weights["embed.weight"][:2])
    for key in ("embed.weight", "block.half"):
        with pytest.raises(CheckpointError, match="holds no tensor"):
            view.read(key)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "minus_inf"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.float8_e5m2], ids=["float64", "float16", "float8"]
)
def test_what_is_not_finite_is_counted_and_named(value: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, value, 2.0, value]).to(dtype)
    with pytest.raises(
        NumericsError, match=r"expert\.safetensors: tensor 'w' holds 2 NaN or infinite values out of 4"
    ):
        check_finite("expert.safetensors", "w", tensor)
    check_finite("expert.safetensors", "w", tensor[::2])
    check_finite("expert.safetensors", "ids", torch.tensor([1, 2]))


# --- small files are read at once, large ones opened for each read


@pytest.fixture
def file(tmp_path: Path, weights: Weights) -> Path:
    save_file(weights, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


@pytest.fixture(params=["read at once", "opened for each read"])
def source(request: pytest.FixtureRequest, file: Path, monkeypatch: pytest.MonkeyPatch) -> SafetensorsSource:
    size = file.stat().st_size
    limit = size if request.param == "read at once" else size - 1
    monkeypatch.setattr(sources, "SMALL_FILE", limit)
    return SafetensorsSource(file)


def equal(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [None, (1, 3)], ids=["whole", "rows"])
def test_writing_to_a_tensor_changes_neither_the_next_read_nor_the_file(
    source: SafetensorsSource,
    weights: Weights,
    file: Path,
    rows: tuple[int, int] | None,
) -> None:
    before = file.read_bytes()
    mine = source.read("embed.weight", rows)
    mine.fill_(99)
    assert equal(source.read("embed.weight"), weights["embed.weight"]) and equal(
        source.read("embed.weight", (1, 3)), weights["embed.weight"][1:3]
    )
    assert file.read_bytes() == before
    assert bool((mine == 99).all())


@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_a_file_that_changes_meanwhile_is_reported(file: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr(sources, "SMALL_FILE", file.stat().st_size - 1)
    source = SafetensorsSource(file)
    if damage == "gone":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        source.read("embed.weight")


# --- configurations from the Hub


class Hub:
    """Stands for the Hub: what is cached, what could be downloaded, and how often it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cached: set[str] = set()
        self.remote: set[str] = set()
        self.asked = 0
        self.down = False

    def download(
        self, repository: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        assert repository == "org/model" and "*.safetensors" not in allow_patterns
        if local_files_only and not self.cached:
            raise FileNotFoundError("it is not in the cache")
        if not local_files_only:
            self.asked += 1
            if self.down:
                raise ConnectionError("no route to host\nand more")
        for name in self.cached if local_files_only else self.remote:
            (self.folder / name).write_text(f'{{"file": "{name}"}}')
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return hub


def test_a_download_is_announced_once(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.remote = {"config.json"}
    with caplog.at_level(logging.WARNING, "driftlens"):
        assert read_config("org/model", "config.json") == {"file": "config.json"}
        hub.cached = hub.remote
        assert read_config("org/model", "preprocessor_config.json") is None
    assert caplog.text.count("configuration of org/model") == 1


@pytest.mark.parametrize("by_environment", [False, True], ids=["by_argument", "by_environment"])
def test_offline_only_the_cache_is_looked_at(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: Any, by_environment: bool
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", by_environment)
    hub.remote = {"config.json", "other.json"}
    assert read_config("org/model", "config.json", offline=not by_environment) is None
    hub.cached = {"config.json"}
    assert read_config("org/model", "config.json", offline=not by_environment) == {"file": "config.json"}
    assert read_config("org/model", "other.json", offline=not by_environment) is None
    assert hub.asked == 0 and caplog.text == ""


def test_a_folder_is_read_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"here": 1}')
    assert read_config(str(tmp_path), "config.json") == {"here": 1}
    assert read_config(str(tmp_path), "other.json") is None
    assert hub.asked == 0
