"""Heads from files and from prompts, against open_clip's own zero-shot recipe and on real checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import InMemorySource, StateSource
from driftlens.models.architecture import load_architecture
from driftlens.models.heads import Head, TextTower, class_names, head_from_file, linear_head, zero_shot_head
from driftlens.utils.errors import (
    CheckpointError,
    DataError,
    DriftLensError,
    NumericsError,
    SpecError,
)
from tests.families import OPEN_CLIP, TRANSFORMERS_CLIP
from tests.refusing import refusing
from tests.zoo.towers import hf_folder, open_clip_folder

CLASSES = ["cat", "dog", "a very long name of a thing"]
TEMPLATES = ["a photo of a {}.", "{}", "{} {}"]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def open_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return open_clip_folder(tmp_path_factory.mktemp("open_clip"))


def unit(n: int, d: int = 8) -> Tensor:
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (rows / rows.norm(dim=1, keepdim=True)).float()


def test_scores_are_scaled_cosines() -> None:
    head = Head(("a", "b"), torch.tensor([[1.0, 0.0], [0.6, 0.8]]), 10.0)
    features = torch.tensor([[3.0, 0.0], [0.0, -2.0]], dtype=torch.float64)
    expected = torch.tensor([[10.0, 6.0], [0.0, -8.0]], dtype=torch.float64)
    torch.testing.assert_close(head.scores(features), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(head.scores(7 * features), head.scores(features))


def test_class_names_come_from_a_list_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "classes.json"
    file.write_text(json.dumps(["über", "b"]), encoding="utf-8")
    assert class_names(file) == class_names(str(file)) == class_names(["über", "b"]) == ("über", "b")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't be read"),
        ("[", "can't be read"),
        ('{"a": 1}', "no list"),
        ("[1]", "no list"),
        ('["a", "a"]', "more than once: 'a'"),
    ],
    ids=["missing", "broken", "object", "numbers", "twice"],
)
def test_unusable_class_names_are_refused(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "classes.json"
    if content is not None:
        file.write_text(content)
    with refusing(DataError, words):
        class_names(file)


def test_a_file_head_holds_the_files_rows(tmp_path: Path) -> None:
    save_file({"cars": unit(3), "dogs": unit(2)}, tmp_path / "heads.safetensors")
    head = head_from_file(tmp_path / "heads.safetensors", "cars", 50.0, CLASSES)
    assert (head.classes, head.logit_scale) == (tuple(CLASSES), 50.0)
    assert torch.equal(head.embeddings, unit(3))


def test_half_precision_rows_count_as_unit_norm(tmp_path: Path) -> None:
    save_file({"cars": unit(3).half()}, tmp_path / "heads.safetensors")
    assert head_from_file(tmp_path / "heads.safetensors", "cars", 50.0, CLASSES).embeddings.dtype == torch.float32


UNUSABLE: dict[str, tuple[Tensor, str, list[str], type[DriftLensError], str]] = {
    "no_such_tensor": (unit(3), "dogs", CLASSES, CheckpointError, "holds no tensor 'dogs'"),
    "too_few_names": (unit(3), "cars", ["a", "b"], DataError, "3 rows, but 2 class names"),
    "name_twice": (unit(3), "cars", ["a", "b", "a"], DataError, "more than once: 'a'"),
    "not_normalised": (
        unit(3) * torch.tensor([[1.0], [1.5], [1.0]]),
        "cars",
        CLASSES,
        DataError,
        "'dog' has norm 1.5",
    ),
    "not_a_number": (
        unit(3) * torch.tensor([[1.0], [1.0], [math.nan]]),
        "cars",
        CLASSES,
        DataError,
        "has norm nan",
    ),
    "transposed": (unit(8, 3).T.contiguous(), "cars", CLASSES, DataError, "has norm"),
}


@pytest.mark.parametrize(("rows", "tensor", "classes", "error", "words"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_files_are_refused(
    tmp_path: Path,
    rows: Tensor,
    tensor: str,
    classes: list[str],
    error: type[DriftLensError],
    words: str,
) -> None:
    save_file({"cars": rows}, tmp_path / "heads.safetensors")
    with refusing(error, words):
        head_from_file(tmp_path / "heads.safetensors", tensor, 50.0, classes)


def tower_of(folder: Path) -> TextTower:
    return load_architecture("open-clip", str(folder)).text_tower(open_checkpoint(folder))


@OPEN_CLIP
@pytest.mark.shows(heads="prompts")
def test_prompts_give_open_clips_own_zero_shot_classifier(open_clip: Path) -> None:
    from open_clip import build_zero_shot_classifier, create_model, get_tokenizer

    model, tokenizer = create_model(f"local-dir:{open_clip}").eval(), get_tokenizer(f"local-dir:{open_clip}")
    templates = [lambda name, t=template: t.replace("{}", name) for template in TEMPLATES]
    expected = build_zero_shot_classifier(model, tokenizer, CLASSES, templates).T
    head = zero_shot_head(tower_of(open_clip), CLASSES, TEMPLATES)
    torch.testing.assert_close(head.embeddings, expected, rtol=0, atol=1e-6)
    assert head.classes == tuple(CLASSES)
    assert head.logit_scale == pytest.approx(model.logit_scale.exp().item())


@TRANSFORMERS_CLIP
@pytest.mark.shows(heads="prompts")
def test_prompts_give_the_text_features_of_transformers(hf: Path) -> None:
    from transformers import CLIPModel, CLIPTokenizer

    model, tokenizer = CLIPModel.from_pretrained(hf), CLIPTokenizer.from_pretrained(hf)
    rows = []
    for name in CLASSES:  # one prompt at a time: nothing is padded
        tokens = [tokenizer(template.replace("{}", name), return_tensors="pt") for template in TEMPLATES]
        with torch.no_grad():
            features = [model.get_text_features(**token).pooler_output[0] for token in tokens]
        rows.append(sum(feature / feature.norm() for feature in features))
    head = zero_shot_head(load_architecture("hf-clip", str(hf)).text_tower(open_checkpoint(hf)), CLASSES, TEMPLATES)
    torch.testing.assert_close(head.embeddings, torch.stack([row / row.norm() for row in rows]), rtol=0, atol=1e-5)
    assert head.logit_scale == pytest.approx(model.logit_scale.exp().item())


def test_other_braces_in_a_template_are_text(open_clip: Path) -> None:
    architecture, base = load_architecture("open-clip", str(open_clip)), open_checkpoint(open_clip)
    (row,) = zero_shot_head(architecture.text_tower(base), ["cat"], ["{0} {} {x!r}"]).embeddings
    (expected,) = zero_shot_head(architecture.text_tower(base), ["{0} cat {x!r}"], ["{}"]).embeddings
    torch.testing.assert_close(row, expected)


def test_a_wrapped_base_has_its_text_tower_all_the_same(open_clip: Path) -> None:
    architecture, base = load_architecture("open-clip", str(open_clip)), open_checkpoint(open_clip)
    wrapped = InMemorySource("base", {f"module.{key}": base.read(key) for key in base.headers})
    first, second = (zero_shot_head(architecture.text_tower(source), CLASSES, TEMPLATES) for source in (base, wrapped))
    assert torch.equal(first.embeddings, second.embeddings)


def only(source: StateSource, prefix: str) -> StateSource:
    return InMemorySource("the base", {key: source.read(key) for key in source.headers if key.startswith(prefix)})


def test_a_base_without_text_tower_is_refused_with_both_remedies(hf: Path, open_clip: Path) -> None:
    for loader, folder, tower in (("hf-clip", hf, "vision_model."), ("open-clip", open_clip, "visual.")):
        architecture = load_architecture(loader, str(folder))
        with refusing(SpecError, match="the base has no text tower", hint=("whole CLIP", "heads.<task>.file")):
            architecture.text_tower(only(open_checkpoint(folder), tower))


@pytest.mark.parametrize("files", [{}, {"vocab.json": "{}", "merges.txt": "a b\n"}], ids=["absent", "broken"])
def test_a_folder_without_tokenizer_is_refused(hf: Path, tmp_path: Path, files: dict[str, str]) -> None:
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    (tmp_path / "config.json").write_bytes((hf / "config.json").read_bytes())
    architecture = load_architecture("hf-clip", str(tmp_path))
    with pytest.raises(SpecError, match="no tokenizer for its text tower"):
        architecture.text_tower(open_checkpoint(hf))


@pytest.mark.parametrize("option", ["hf_model_name", "hf_tokenizer_name", "tokenizer_kwargs"])
def test_text_towers_that_need_more_than_open_clip_are_refused(open_clip: Path, tmp_path: Path, option: str) -> None:
    config = json.loads((open_clip / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"][option] = "some/repository"
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    architecture = load_architecture("open-clip", str(tmp_path / "model_config.json"))
    with pytest.raises(SpecError, match=option):
        architecture.text_tower(open_checkpoint(open_clip))


@pytest.mark.parametrize("key", ["weight", "bias"])
def test_a_classifier_that_is_not_finite_is_refused(key: str) -> None:
    tensors = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    tensors[key][1] = torch.inf
    with pytest.raises(NumericsError, match=f"head: tensor '{key}' holds"):
        linear_head(InMemorySource("head", tensors), None)
