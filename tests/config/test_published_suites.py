"""The published tasks: as many classes and templates as the suites have, met by whatever names data gives them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from driftlens.config.packaged import packaged_names, published_task
from driftlens.config.spec import RunSpec, TextHead, load_spec
from driftlens.data.task_data import normalize_name
from driftlens.experiment.study_loading import head_classes, open_heads
from driftlens.models.heads import TextTower
from driftlens.utils.errors import DataError
from tests.specs import minimal, refused

COUNTS = {  # classes and templates, as the suite's paper has them
    "sun397": (397, 2),
    "stanford-cars": (196, 8),
    "resisc45": (45, 18),
    "eurosat": (10, 3),
    "svhn": (10, 1),
    "gtsrb": (43, 3),
    "mnist": (10, 1),
    "dtd": (47, 8),
    "oxford_flowers102": (102, 1),
    "pcam": (2, 1),
    "fer2013": (7, 6),
    "oxford-iiit-pet": (37, 1),
    "stl10": (10, 2),
    "cifar100": (100, 18),
    "cifar10": (10, 18),
    "food101": (101, 1),
    "fashion_mnist": (10, 2),
    "emnist_letters": (26, 1),
    "kmnist": (10, 1),
    "rendered-sst2": (2, 1),
}


def test_every_task_of_the_suites_is_there_with_its_counts() -> None:
    assert packaged_names("published") == sorted(COUNTS)
    for name, counts in COUNTS.items():
        task = published_task(name)
        assert (len(task.classes), len(task.templates)) == counts, name
        assert len({normalize_name(each) for each in task.classes}) == counts[0], "told apart whatever the spelling"
        assert len(task.labels) in (0, counts[0]), name
        assert all("{}" in template for template in task.templates) and task.source and task.title


@pytest.mark.parametrize("name", ["cars", "Cars", "stanford_cars", "STANFORD-CARS"])
def test_a_task_is_found_under_the_names_in_use(name: str) -> None:
    assert published_task(name).name == "stanford-cars"


def named(task: str, data: list[str] | None, **head: Any) -> tuple[str, ...]:
    spec = load_spec(minimal(heads={"cars": {"suite": task, **head}}))
    return head_classes("cars", spec.heads["cars"], None if data is None else tuple(data))


def test_rows_are_called_what_the_data_calls_them_in_label_order() -> None:
    folders = ["AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial"]
    folders += ["Pasture", "PermanentCrop", "Residential", "River", "SeaLake"]
    assert named("eurosat", folders[::-1]) == tuple(folders)
    assert named("eurosat", None) == published_task("eurosat").classes
    underscores = [name.replace(" ", "_").upper() for name in published_task("dtd").classes]
    assert named("dtd", underscores[::-1]) == tuple(underscores)
    numbers = [f"{row:05d}" for row in range(43)]
    assert named("gtsrb", numbers[::-1]) == tuple(numbers)
    assert named("svhn", list("9876543210")) == tuple("0123456789")
    assert named("rendered-sst2", None, classes=["Positive", "Negative"]) == ("Negative", "Positive")


@pytest.mark.parametrize("data", [["negative"], ["negative", "neutral"], ["negative", "NEGATIVE"], ["1", "2"]])
def test_other_classes_are_refused(data: list[str]) -> None:
    with pytest.raises(DataError, match="Rendered SST-2"):
        named("rendered-sst2", data)


def test_the_words_of_the_suite_stand_in_the_prompts_and_the_datas_names_on_the_rows() -> None:
    asked: list[str] = []

    def embed(prompts: Any) -> torch.Tensor:
        asked.extend(prompts)
        return torch.eye(len(prompts), 4) + 1

    tower = TextTower(embed, 100.0)
    models: Any = SimpleNamespace(base=tower, stored={}, architecture=SimpleNamespace(text_tower=lambda base: base))
    spec = load_spec(minimal(heads={"cars": {"suite": "pcam"}}))
    (head,) = open_heads(spec, models, {"cars": ("1", "0")}).values()
    assert head.classes == ("0", "1")
    expected = ["lymph node", "lymph node containing metastatic tumor tissue"]
    assert asked == [f"this is a photo of {words}" for words in expected]


def test_a_suite_is_a_whole_head_and_its_templates_may_be_replaced() -> None:
    spec = load_spec(minimal(heads={"cars": {"suite": "Cars"}}))
    (head,) = spec.heads.values()
    assert isinstance(head, TextHead) and head.suite == "stanford-cars" and head.classes is None
    assert head.templates == published_task("cars").templates
    assert load_spec(spec.as_dict()) == spec
    (head,) = load_spec(minimal(heads={"cars": {"suite": "cars", "templates": ["{}!"]}})).heads.values()
    assert isinstance(head, TextHead) and head.templates == ("{}!",)


def test_a_suite_that_is_not_there_is_refused_with_the_nearest() -> None:
    error = refused(minimal(heads={"cars": {"suite": "standford-cars"}}))
    assert "heads.cars" in error.message and "resisc45" in error.message
    assert "'stanford-cars'" in error.hint


def test_the_schema_knows_that_a_suite_brings_templates() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(RunSpec.model_json_schema())
    for head, is_fine in (({"suite": "cars"}, True), ({"classes": ["a"]}, False)):
        spec = json.loads(json.dumps(minimal(heads={"cars": head})))
        assert (not list(validator.iter_errors(spec))) is is_fine
