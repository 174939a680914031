"""`driftlens convert`: a task-vector suite as its authors pickle it, read without their code, ready to be analysed."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.transforms import Compose, Normalize

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.models.families.vit import scrambled
from driftlens.models.heads import file_head, linear_head
from driftlens.spec import load_spec
from driftlens.spec.sections import LinearHead
from tests.cli.conftest import Cli
from tests.models.hostile import hostile
from tests.zoo.world import MEAN, MODEL, SIZE, STD, WIDTH, write_images, write_spec

SOURCE = """
import torch
import torch.nn.functional as F

class ImageEncoder(torch.nn.Module):
    def __init__(self, model, preprocess, keep_lang=False):
        super().__init__()
        self.model, self.val_preprocess, self.cache_dir = model, preprocess, None
        if not keep_lang:
            del self.model.transformer

    def forward(self, images):
        return self.model.encode_image(images)

class ClassificationHead(torch.nn.Linear):
    def __init__(self, normalize, weights, biases=None):
        super().__init__(weights.shape[1], weights.shape[0])
        self.normalize = normalize
        self.weight = torch.nn.Parameter(weights.clone())
        self.bias = torch.nn.Parameter(torch.zeros(len(weights)) if biases is None else biases)

    def forward(self, features):
        return super().forward(F.normalize(features, dim=-1) if self.normalize else features)
"""
FORMS: dict[str, Callable[[object, Path], None]] = {
    "flowers": lambda model, path: path.write_bytes(pickle.dumps(model)) and None,
    "shapes": lambda model, path: save_old(model, path),
    "MNIST": lambda model, path: torch.save(model, path),
}
Encoders = dict[str, nn.Module]


def save_old(model: object, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for the source of the classes, to keep it too
        torch.save(model, path, _use_new_zipfile_serialization=False)


def rows(count: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Encoders]:
    """A suite's folder, its experts in the three forms there are, and the encoders; the code is gone afterwards."""
    code = types.ModuleType("src.modeling")
    exec(SOURCE, vars(code))
    sys.modules |= {"src": types.ModuleType("src"), "src.modeling": code}
    folder = tmp_path_factory.mktemp("suite") / "ViT-tiny"
    preprocess = open_clip.image_transform(SIZE, is_train=False, mean=MEAN, std=STD)
    encoders: Encoders = {}
    for seed, name in enumerate(("zeroshot", *FORMS)):
        clip = scrambled(lambda: open_clip.CLIP(**MODEL), seed)
        encoders[name] = code.ImageEncoder(clip, preprocess)
        place = folder if name == "zeroshot" else folder / name
        place.mkdir()
        save = FORMS.get(name, FORMS["MNIST"])
        save(encoders[name], place / ("zeroshot.pt" if name == "zeroshot" else "finetuned.pt"))
    for seed, (task, count) in enumerate({"flowers": 3, "shapes": 3, "MNIST": 10}.items()):
        save_zip = FORMS["MNIST"]
        save_zip(code.ClassificationHead(True, 100 * rows(count, seed)), folder / f"head_{task}.pt")
    del sys.modules["src"], sys.modules["src.modeling"]
    return folder, encoders


@pytest.fixture
def suite(made: tuple[Path, Encoders], tmp_path: Path) -> tuple[Path, Encoders]:
    """A copy of it for a test to change."""
    return shutil.copytree(made[0], tmp_path / made[0].name), made[1]


@pytest.mark.slow
def test_a_suite_becomes_a_folder_that_its_original_library_and_validate_accept(
    suite: tuple[Path, Encoders], run_cli: Cli, tmp_path: Path
) -> None:
    folder, encoders = suite
    before, out = set(sys.modules), tmp_path / "ViT-tiny-safetensors"
    result = run_cli("convert", folder)
    assert result.code == 0, result.err
    assert not {name for name in set(sys.modules) - before if name.startswith("src")}
    assert f"driftlens validate {out / 'run.yaml'}" in result.out
    assert (
        "no whole text tower" in result.err
        and "nothing names the 3 rows of the head of flowers" in result.err
    )
    written = {"base", *FORMS, "heads"}
    assert {path.name for path in out.iterdir()} == {
        *(f"{name}.safetensors" for name in written),
        "open_clip_config.json",
        "run.yaml",
    }

    config = json.loads((out / "open_clip_config.json").read_text())
    assert config["preprocess_cfg"] == {"mean": pytest.approx(MEAN), "std": pytest.approx(STD)}
    model = open_clip.CLIP(**config["model_cfg"]).eval()
    pixels = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    for name, encoder in encoders.items():
        weights = load_file(out / f"{'base' if name == 'zeroshot' else name}.safetensors")
        assert all(key.startswith("visual.") for key in weights)
        model.visual.load_state_dict({key.removeprefix("visual."): value for key, value in weights.items()})
        with torch.no_grad():
            assert torch.equal(model.encode_image(pixels), encoder(pixels)), name

    spec = load_spec(out / "run.yaml")
    assert {task: getattr(head, "suite", None) for task, head in spec.heads.items()} == {
        "flowers": None,
        "shapes": None,
        "MNIST": "mnist",
    }
    head = file_head(out / "heads.safetensors", "MNIST", spec.heads["MNIST"].logit_scale, list("0123456789"))  # type: ignore[union-attr]
    features = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(head.scores(features), F.normalize(features, dim=1) @ (100 * rows(10, 2)).T)

    found = run_cli("validate", out / "run.yaml", "--json")
    problems = [each for each in json.loads(found.out)["findings"] if each["level"] == "problem"]
    assert found.code == 4 and {each["subject"] for each in problems} == {f"data of {task}" for task in FORMS}
    data = {}
    for task, classes in {"flowers": "abc", "shapes": "abc", "MNIST": "0123456789"}.items():
        write_images(tmp_path / f"{task}.npz", list(classes), train=20, test=20)
        data[task] = {"kind": "npz", "file": str(tmp_path / f"{task}.npz")}
    filled = spec.as_dict() | {"data": {"defaults": {"n": 10, "n_diagnosis": 10}, **data}}
    found = run_cli("validate", write_spec(tmp_path / "filled.yaml", filled))
    assert found.code == 0, found.out


@pytest.mark.parametrize("trap", ["base", "expert", "head"])
def test_a_hostile_file_in_a_suite_leaves_neither_trace_nor_half_a_folder(
    suite: tuple[Path, Encoders], run_cli: Cli, tmp_path: Path, trap: str
) -> None:
    folder, _ = suite
    files = {"base": "zeroshot.pt", "expert": "shapes/finetuned.pt", "head": "head_shapes.pt"}
    canary, content = tmp_path / "canary", folder / files[trap]
    content.write_bytes(hostile(canary)["os.system, protocol 4"])
    before = sorted(tmp_path.rglob("*"))
    result = run_cli("convert", folder, "--out", tmp_path / "out")
    assert result.code == 4 and str(content) in result.message and "posix.system" in result.message
    assert "torch.load" in result.hint
    assert sorted(tmp_path.rglob("*")) == before, "no canary, no folder, no scratch"


def change_head(folder: Path, weight: Tensor, bias: Tensor) -> None:
    torch.save({"weight": weight, "bias": bias}, folder / "head_shapes.pt")


def test_a_head_that_is_no_zero_shot_head_stays_a_linear_classifier(
    suite: tuple[Path, Encoders], run_cli: Cli, tmp_path: Path
) -> None:
    folder, _ = suite
    weight, bias = rows(3) * torch.tensor([[1.0], [2.0], [3.0]]), torch.ones(3)
    for changed in ((weight, bias), (weight, 0 * bias), (rows(3), bias)):
        change_head(folder, *changed)
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        result = run_cli("convert", folder, "--out", out)
        assert "head of shapes is no zero-shot head" in result.err
        heads = load_file(out / "heads.safetensors")
        assert torch.equal(heads["shapes.weight"], changed[0]) and torch.equal(
            heads["shapes.bias"], changed[1]
        )
        entry = load_spec(out / "run.yaml").heads["shapes"]
        assert isinstance(entry, LinearHead) and not entry.normalize
        source = open_checkpoint(entry.linear)
        head = linear_head(source, ["a", "b", "c"], weight=entry.weight, bias=entry.bias)
        features = rows(5, 2)
        torch.testing.assert_close(head.scores(features), F.linear(features, *changed))


def a_level_too_high(folder: Path) -> None:
    inner = folder / "ViT-B-32"
    inner.mkdir()
    for entry in [entry for entry in folder.iterdir() if entry != inner]:
        entry.rename(inner / entry.name)


def truncated(folder: Path) -> None:
    path = folder / "MNIST" / "finetuned.pt"
    path.write_bytes(path.read_bytes()[:-200])


Spoilt = tuple[Callable[[Path], object], tuple[str, ...]]


def a_weight_of_other_axes(key: str) -> Spoilt:
    def spoil(folder: Path) -> None:
        state = scrambled(lambda: open_clip.CLIP(**MODEL)).state_dict()
        torch.save(state | {key: torch.ones(3)}, folder / "zeroshot.pt")

    return spoil, ("zeroshot.pt", f"{key!r} of shape [3]")


def an_odd_head(weight: Tensor, bias: Tensor) -> Spoilt:
    words = "head_shapes.pt is no head", str(list(weight.shape))
    return lambda folder: change_head(folder, weight, bias), words


AXES = ("visual.conv1.weight", "visual.positional_embedding", "visual.proj", "positional_embedding")
ODD: dict[str, Spoilt] = {
    **{key: a_weight_of_other_axes(key) for key in AXES},
    "a head without rows": an_odd_head(torch.zeros(0, WIDTH), torch.zeros(0)),
    "a head of zeros": an_odd_head(torch.zeros(3, WIDTH), torch.zeros(3)),
    "a head of NaN": an_odd_head(torch.full((3, WIDTH), torch.nan), torch.zeros(3)),
    "a bias of another length": an_odd_head(rows(3), torch.ones(2)),
    "missing base": (
        lambda folder: (folder / "zeroshot.pt").unlink(),
        ("no zeroshot.pt", "Expected zeroshot.pt"),
    ),
    "a level too high": (a_level_too_high, ("no task-vector suite", "ViT-tiny/ViT-B-32")),
    "a name that is taken": (
        lambda folder: (folder / "shapes").rename(folder / "base"),
        ("the name 'base' is taken", "Rename"),
    ),
    "no tower": (
        lambda folder: torch.save({"weight": torch.zeros(2)}, folder / "zeroshot.pt"),
        ("zeroshot.pt", "class_embedding"),
    ),
    "a truncated expert": (truncated, ("ViT-tiny/MNIST/finetuned.pt", "Copy or download it again")),
    "no matrix": (
        lambda folder: torch.save({"weight": torch.zeros(2)}, folder / "head_shapes.pt"),
        ("head_shapes.pt", "no matrix"),
    ),
}


@pytest.mark.parametrize(("spoil", "words"), ODD.values(), ids=ODD)
def test_what_is_no_suite_is_refused_and_nothing_is_written(
    suite: tuple[Path, Encoders],
    run_cli: Cli,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    words: tuple[str, ...],
) -> None:
    spoil(suite[0])
    result = run_cli("convert", suite[0], "--out", tmp_path / "out")
    assert result.code == 4 and "Traceback" not in result.err
    assert all(word in result.err for word in words), result.err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".partial-*"))


def test_a_normalisation_that_is_not_plain_numbers_is_left_out_with_a_notice(
    suite: tuple[Path, Encoders], run_cli: Cli, tmp_path: Path
) -> None:
    clip = scrambled(lambda: open_clip.CLIP(**MODEL))
    for name, mean in {"numpy": list(np.float64(MEAN)), "nan": [math.nan, *MEAN[1:]]}.items():
        clip.val_preprocess = Compose([Normalize(mean, STD)])
        torch.save(clip, suite[0] / "zeroshot.pt")
        result = run_cli("convert", suite[0], "--out", tmp_path / name)
        assert result.code == 0 and "aren't three plain numbers each" in result.err, result.err
        assert "preprocess_cfg" not in json.loads((tmp_path / name / "open_clip_config.json").read_text())


def test_suites_of_validation_splits_and_whole_models_convert_too(
    suite: tuple[Path, Encoders], run_cli: Cli, tmp_path: Path
) -> None:
    """Bases beside their experts, state dicts, `TASKVal` folders, text towers that were kept."""
    folder = tmp_path / "whole"
    weights = scrambled(lambda: open_clip.CLIP(**MODEL)).state_dict()
    for task in ("CarsVal", "D: 花Val"):
        (folder / task).mkdir(parents=True)
        for name in ("nonlinear_zeroshot.pt", "nonlinear_finetuned.pt"):
            state = {f"model.{key}": value for key, value in weights.items()}
            torch.save({"state_dict": state, "model_name": "ViT"}, folder / task / name)
    torch.save({"weight": 100 * rows(196), "bias": torch.zeros(196)}, folder / "head_CarsVal.pt")
    result = run_cli("convert", folder, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "activation" in result.err and "D: 花 has no head_D: 花.pt" in result.err
    converted = load_file(tmp_path / "out" / "Cars.safetensors")
    assert set(converted) == set(weights)
    assert all(torch.equal(converted[key], value) for key, value in weights.items())
    spec = load_spec(tmp_path / "out" / "run.yaml")
    assert set(spec.experts) == {"Cars", "D: 花"} and set(spec.heads) == {"Cars"}
    assert getattr(spec.heads["Cars"], "suite", None) == "stanford-cars"
    written = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())["model_cfg"]
    clip = open_clip.CLIP(**written)
    clip.load_state_dict(converted)
    assert "tanganke/stanford_cars" in (tmp_path / "out" / "run.yaml").read_text()


def test_one_file_becomes_one_file_and_nothing_is_overwritten(
    suite: tuple[Path, Encoders], run_cli: Cli, tmp_path: Path
) -> None:
    folder, encoders = suite
    file = folder / "flowers" / "finetuned.pt"
    result = run_cli("convert", file)
    written = load_file(file.with_suffix(".safetensors"))
    expected: dict[str, Any] = encoders["flowers"].state_dict()
    assert result.code == 0 and set(written) == set(expected)
    assert all(torch.equal(written[key], value) for key, value in expected.items())
    for given in ((file,), (folder, "--out", folder), (file, "--out", folder / "zeroshot.pt")):
        result = run_cli("convert", *given)
        assert result.code == 4 and "exists already" in result.message
    assert run_cli("convert", tmp_path / "nowhere").code == 4
    result = run_cli("convert", folder / "head_flowers.pt", "--out", tmp_path / "converted.pt")
    assert (
        result.code == 2
        and "end in .safetensors" in result.message
        and "converted.pt.safetensors" in result.hint
    )
    assert not (tmp_path / "converted.pt").exists()


def test_the_folder_above_is_written_beside_itself(
    suite: tuple[Path, Encoders], run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = suite
    monkeypatch.chdir(folder / "flowers")
    result = run_cli("convert", "..")
    assert result.code == 0, result.err
    assert load_spec(folder.with_name("ViT-tiny-safetensors") / "run.yaml").name == "ViT-tiny"
    assert not (folder / "flowers" / "..-safetensors").exists()


def test_a_damaged_archive_is_not_sent_to_the_command_that_refuses_it(
    suite: tuple[Path, Encoders], run_cli: Cli
) -> None:
    path = suite[0] / "head_flowers.pt"
    content = path.read_bytes()
    place = content.rindex(b"PK\x01\x02")
    path.write_bytes(content[:place] + b"PK__" + content[place + 4 :])
    result = run_cli("convert", path)
    assert result.code == 4 and "is not a complete PyTorch checkpoint (BadZipFile: " in result.message
    assert "Copy or download it again" in result.hint and "driftlens convert" not in result.hint
