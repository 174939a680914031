"""Image classifiers of other libraries from files: drift as their own forward gives it, each task with its own head."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import driftlens as dl
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.config.spec import load_spec
from driftlens.experiment.study_loading import open_study
from driftlens.merging.method import merge_methods
from driftlens.models.architecture import load_architecture
from driftlens.models.heads import LinearHead, config_class_names
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import IncompatibleModelsError, SpecError
from tests.quick import paced, temporary_entries
from tests.zoo import saved_families
from tests.zoo.suite import spec_of_folders
from tests.zoo.tensors import assert_every_tensor, site_keys

TASKS = {"beasts": ("cat", "dog", "newt"), "sizes": ("big", "small")}


def logits(model: Any, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(pixels)
    return found if isinstance(found, Tensor) else found.logits


@dataclass(frozen=True)
class Suite:
    """Base and experts on disk and in memory, with images whose labels the experts mostly get right."""

    family: saved_families.Family
    folder: Path
    experts: dict[str, Any]
    pixels: dict[str, Tensor]
    labels: dict[str, list[int]]
    spec: dict[str, Any]

    @property
    def classifier(self) -> str:
        """Where the library's models have theirs."""
        return load_architecture(self.family.loader, str(self.folder / "base"), blocks=self.family.blocks).classifier


def suite(name: str, folder: Path) -> Suite:
    family = saved_families.FAMILIES[name]
    folder.mkdir(parents=True)
    saved_families.save(family, saved_families.trained(family, 5, 0), folder / "base")
    experts, pixels, labels, data = {}, {}, {}, {}
    for seed, (task, names) in enumerate(TASKS.items(), start=1):
        experts[task] = saved_families.trained(family, len(names), seed)
        named = names if seed == 1 else ()  # the other one's names come from its data
        saved_families.save(family, experts[task], folder / task, named)
        images = np.random.default_rng(seed).integers(0, 256, (24, family.size, family.size, 3), dtype=np.uint8)
        pixels[task] = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
        found = logits(experts[task], pixels[task]).argmax(dim=1).tolist()
        labels[task] = [(label + (row % 5 == 0)) % len(names) for row, label in enumerate(found)]
        labels[task][: len(names)] = range(len(names))  # every class occurs
        file = folder / f"{task}.npz"
        np.savez(
            file,
            x_train=images[12:],
            y_train=labels[task][12:],
            x_test=images[:12],
            y_test=labels[task][:12],
            class_names=names,
        )
        data[task] = {"kind": "npz", "file": str(file)}
    spec = spec_of_folders(
        family.loader,
        folder / "base",
        {task: folder / task for task in TASKS},
        {"defaults": {"n": 12, "n_diagnosis": 12, "batch_size": 5}, **data},
        merge={"method": "task_arithmetic", "scaling": 0.4},
    )
    if family.blocks is not None:
        spec["architecture"]["blocks"] = family.blocks
    return Suite(family, folder, experts, pixels, labels, spec)


def marked(name: str) -> Any:
    """The family as a parameter, with its row of the table in `docs/`: one at once, the others where time is."""
    loader = saved_families.FAMILIES[name].loader
    called = f"{name} (transformers)" if loader.startswith("hf") else f"{name.removeprefix('timm ')} (timm)"
    marks = [pytest.mark.family(called), pytest.mark.shows(files=loader)]
    return pytest.param(name, marks=[*marks, *paced(name, ["ViT"], ["ResNet", "timm NFNet"])])


@pytest.mark.slow
@pytest.mark.shows("drift", "sites", "reloads", heads="classifier of each expert")
@pytest.mark.parametrize("name", [marked(name) for name in saved_families.FAMILIES])
def test_a_classifier_is_measured_with_its_own_heads_calibrated_and_reloaded(name: str, tmp_path: Path) -> None:
    """Merged and calibrated folders give their library the same features and, by each expert's classifier, accuracy."""
    made = suite(name, tmp_path / "suite")
    run = dl.analyze(made.spec, out=tmp_path / "run", progress="none")
    assert run.layers()["closure_error"].max() < 1e-4
    dl.merge(made.spec, method="task_arithmetic", out=tmp_path / "merged", parameters={"scaling": 0.4})
    run = run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "calibrated")
    experts = [tmp_path / "suite" / task for task in TASKS]
    base = tmp_path / "suite" / "base"
    known = load_architecture(made.family.loader, str(base), blocks=made.family.blocks)
    for place, solved in {"merged": {}, "calibrated": site_keys(known, base)}.items():
        assert_every_tensor(base, experts, tmp_path / place, scaling=0.4, heads=made.classifier, solved=solved)
    accuracy = run.accuracy().set_index(["task", "variant"])["value"]
    stored = open_state(tmp_path / "suite" / "base" / "model.safetensors")
    for variant, place in (("merged", "merged"), ("calibrated:featcal", "calibrated")):
        assert list(open_state(tmp_path / place / "model.safetensors")) == list(stored)
        assert any(
            not torch.equal(stored[key], value)
            for key, value in open_state(tmp_path / place / "model.safetensors").items()
        )
        for task in TASKS:
            model, classifier = reloaded(made, tmp_path / place), made.classifier
            found = logits(with_classifier(model, classifier, nn.Identity()), made.pixels[task][:12]).numpy()
            ids = run.samples(task, variant, layer="final")["sample_id"]
            order = [int(sample.rpartition("/")[2]) for sample in ids]
            of_run = run.features(task, variant, "final")  # in float16
            np.testing.assert_allclose(of_run, found[order], rtol=2e-3, atol=2e-3 * np.abs(found).max())
            with_classifier(model, classifier, made.experts[task].get_submodule(classifier))
            assert accuracy[task, variant] == pytest.approx(right(made, model, task))
            head = open_state(tmp_path / place / "heads" / f"{task}.safetensors")
            assert head.keys() == {f"{classifier}.weight", f"{classifier}.bias"}
            assert all(torch.equal(made.experts[task].state_dict()[key], head[key]) for key in head)
    for task in TASKS:
        assert accuracy[task, "expert"] == pytest.approx(right(made, made.experts[task], task))


def reloaded(made: Suite, folder: Path) -> Any:
    """The model in a folder as its library's users load it, with everything that it wants and nothing beside."""
    if made.family.loader == "timm":
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    model, info = type(made.experts["beasts"]).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def with_classifier(model: Any, path: str, classifier: nn.Module) -> Any:
    model.set_submodule(path, classifier)
    return model


def right(made: Suite, model: Any, task: str) -> float:
    """The share of the test samples that a model of the library gets right."""
    found = logits(model, made.pixels[task][:12]).argmax(dim=1).tolist()
    return float(np.mean(np.equal(found, made.labels[task][:12])))


def open_state(file: Path) -> dict[str, Tensor]:
    source = open_checkpoint(file)
    return {key: source.read(key) for key in source.headers}


@pytest.mark.slow
def test_a_merge_method_gets_kernels_as_matrices_with_the_moments_of_their_patches(
    tmp_path: Path,
) -> None:
    seen = set()

    def toy(base: Any, experts: dict[str, Any], moments: dict[str, Tensor]) -> dict[str, Tensor]:
        _, width = base["weight"].shape
        seen.add(width)
        assert all(found.shape == (width, width) for found in moments.values())
        return {part: sum(expert[part] for expert in experts.values()) / 2 for part in base}

    made = suite("ResNet", tmp_path / "suite")
    with temporary_entries(merge_methods):
        merge_methods.method("toy", title="Toy", source="none", laws=set(), reads="moments")(toy)
        dl.analyze({**made.spec, "merge": {"method": "toy"}}, out=tmp_path / "run", progress="none")
    assert {8 * 9, 16 * 9, 8} <= seen
    merged = open_state(tmp_path / "run" / "models" / "merged.safetensors")
    kernels = [name for name in merged if name.endswith("convolution.weight")]
    assert len(kernels) == 8
    for name in kernels:
        mean = sum(expert.state_dict()[name] for expert in made.experts.values()) / 2
        torch.testing.assert_close(merged[name], mean)


def test_class_names_come_from_the_expert_then_from_the_data(tmp_path: Path) -> None:
    made = suite("ViT", tmp_path / "suite")
    reversed_names = list(reversed(TASKS["beasts"]))
    config = json.loads((made.folder / "beasts" / "config.json").read_text())
    config["id2label"] = dict(enumerate(reversed_names))
    (made.folder / "beasts" / "config.json").write_text(json.dumps(config))
    study, _ = open_study(load_spec(made.spec))
    heads = {task: at.head.classes for task, at in study.tasks.items() if at.head is not None}
    assert heads == {"beasts": tuple(reversed_names), "sizes": TASKS["sizes"]}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_bring_the_classifier_that_was_trained_beside_them(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    made = suite("ViT", tmp_path / "suite")
    base = saved_families.trained(saved_families.FAMILIES["ViT"], 5, 0)
    base.classifier = nn.Linear(16, 2)
    wanted = LoraConfig(r=2, target_modules=["q_proj", "fc1"], modules_to_save=["classifier"])
    model = get_peft_model(base, wanted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    model.save_pretrained(tmp_path / "lora")
    spec = copy.deepcopy(made.spec)
    spec["experts"]["sizes"]["weights"] = str(tmp_path / "lora")
    study, models = open_study(load_spec(spec))
    merged = model.merge_and_unload()
    source = models.sources["expert:sizes"]
    for key in models.architecture.chain.parameter_keys():
        torch.testing.assert_close(source.read(key), merged.state_dict()[key], rtol=0, atol=1e-6)
    head = study.tasks["sizes"].head
    assert isinstance(head, LinearHead) and torch.equal(head.weight, merged.classifier.weight)


@pytest.mark.parametrize("form", ["memory", "core", "wrapped"])
def test_checkpoints_under_other_spellings_are_the_same_model(form: str, tmp_path: Path) -> None:
    """As transformers holds it in memory, the core without its classifier, and with a wrapper's prefix."""
    model = saved_families.trained(saved_families.FAMILIES["ViT"], 3, 1)
    saved_families.save(saved_families.FAMILIES["ViT"], model, tmp_path / "model")
    state = dict(model.state_dict())
    if form == "core":
        state = transformers.ViTModel(model.config).state_dict() | model.vit.state_dict()
    elif form == "wrapped":
        state = {f"module.{key}": value for key, value in open_state(tmp_path / "model" / "model.safetensors").items()}
    save_file(state, tmp_path / "other.safetensors")
    architecture = load_architecture("hf-vit", str(tmp_path / "model"))
    one, other = (architecture.align(open_checkpoint(tmp_path / place)) for place in ("model", "other.safetensors"))
    assert set(one.headers) == set(architecture.keys) == set(other.headers)
    assert all(torch.equal(one.read(key), other.read(key)) for key in one.headers)


LOADED = """
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(48, 8)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

    def forward(self, pixels):
        return self.blocks(self.stem(pixels.flatten(1)))


def load(source):
    torch.manual_seed(0)
    return Net().eval(), lambda image: torch.tensor(np.asarray(image.resize((4, 4)))).flatten() / 255.0


def wrong(source):
    return Net()
"""


def test_a_function_of_the_users_loads_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loader.py").write_text(LOADED)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SpecError, match="needs permission to run"):
        load_architecture("python:own_loader:load", "x")
    with pytest.raises(SpecError, match="expected a pair"):
        load_architecture("python:own_loader:wrong", "x", access=Permissions(trust=True))
    found = load_architecture("python:own_loader:load", "x", access=Permissions(trust=True))
    assert [layer.path for layer in found.chain.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert found.preprocess is not None and found.chain.modality.name == "image"


def test_pixels_are_prepared_by_the_family_only_where_no_file_says_how(tmp_path: Path) -> None:
    saved_families.FAMILIES["ConvNeXt"].build(3).save_pretrained(tmp_path)
    found = load_architecture("hf-auto", str(tmp_path), blocks="convnext.encoder.stages")
    assert "no preprocessor_config.json" in found.notices[0]


def test_a_timm_folder_says_what_its_classes_and_pixels_are_and_loads_no_other_file(
    tmp_path: Path,
) -> None:
    family = saved_families.FAMILIES["timm ViT"]
    saved_families.save(family, saved_families.trained(family, 3, 0), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    stated = json.loads(file.read_text())
    flat = {**stated, **stated.pop("pretrained_cfg"), "label_names": ["x", "y", "z"], "mean": [0.1, 0.2, 0.3]}
    del flat["pretrained_cfg"], flat["input_size"]
    file.write_text(json.dumps(flat))
    found = load_architecture("timm", str(tmp_path / "model"))
    assert found.preprocess is not None and found.preprocess.settings["mean"] == [0.1, 0.2, 0.3]
    assert tuple(found.preprocess.settings["input_size"]) == (3, saved_families.SIZE, saved_families.SIZE)
    assert config_class_names(str(tmp_path / "model" / "model.safetensors")) == ("x", "y", "z")
    flat["model_args"] = {**flat["model_args"], "checkpoint_path": "/tmp/x.pt"}
    file.write_text(json.dumps(flat))
    with pytest.raises(IncompatibleModelsError, match="checkpoint_path"):
        load_architecture("timm", str(tmp_path / "model"))
