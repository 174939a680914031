"""Data sources that are functions of the user's: never run without trust."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision

from driftlens.utils.errors import DataError, SpecError
from tests.data.sources import images, labels_of, opened, shades
from tests.refusing import refusing

MODULE = """
from pathlib import Path

import numpy as np

Path(__file__).with_name("ran").touch()

class Pairs(list):
    pass

def image(shade):
    return np.full((2, 2, 3), shade, dtype=np.uint8)

def named(split):
    pairs = Pairs([(image(1), 1), (image(2), np.int64(0)), (image(3), "花")])
    pairs.class_names = ["a", "花"]
    return pairs

def unnamed(split):
    return [(image(len(split)), 10)]

def unlabelled(split):
    return [(image(4), None)]

def outside(split):
    pairs = Pairs([(image(1), 2)])
    pairs.class_names = ["a", "b"]
    return pairs

def fails(split):
    raise RuntimeError("disk on fire")

def bare(split):
    return [image(1)]

def floats(split):
    return [(np.zeros((2, 2, 3)), None)]

def generator(split):
    yield image(1), None

def empty(split):
    return []

constant = 3

def odd(split):
    pairs = Pairs([(image(4), 10)])
    pairs.class_names, pairs.classes = None, 10
    return pairs

def method(split):
    pairs = odd(split)
    pairs.class_names = pairs.count
    return pairs

def vision(split):
    import torch, torchvision
    data = torchvision.datasets.FakeData(6, image_size=(3, 2, 2), num_classes=3)
    data.classes = ["a", "b", ("花", "blossom")]
    return torch.utils.data.Subset(data, [4, 1]) if split == "calibration" else data
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh importable module; the file `ran` beside it says that its code was executed."""
    name = f"user_data_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name


def entry(module: str, function: str) -> dict[str, Any]:
    return {"kind": "python", "target": f"{module}:{function}"}


def test_without_trust_nothing_is_imported(module: str, tmp_path: Path) -> None:
    with refusing(SpecError, match="needs permission to run", hint="--trust-code"):
        opened(**entry(module, "named"))
    assert not (tmp_path / "ran").exists()


def test_labels_are_names_or_numbers_that_index_them(module: str) -> None:
    view = images(trust=True, **entry(module, "named"))
    assert view.ids == ("0", "1", "2")
    assert (labels_of(view), view.class_names) == (["花", "a", "花"], ("a", "花"))
    assert shades([view.read(position) for position in range(3)]) == [1, 2, 3]


def test_a_data_set_of_torchvision_names_its_classes(module: str) -> None:
    test, part = (images(split, trust=True, **entry(module, "vision")) for split in ("test", "calibration"))
    assert test.class_names == part.class_names == ("a", "b", "花, blossom")
    made = torchvision.datasets.FakeData(6, image_size=(3, 2, 2), num_classes=3)
    assert labels_of(test) == [test.class_names[made[at][1]] for at in range(6)]
    assert labels_of(part) == [labels_of(test)[at] for at in (4, 1)]
    assert np.array_equal(np.asarray(part.read(1)), np.asarray(made[1][0]))


def test_the_function_is_told_which_split_is_wanted(module: str) -> None:
    for split in ("calibration", "test"):
        view = images(split, trust=True, **entry(module, "unnamed"))  # type: ignore[arg-type]
        assert shades([view.read(0)]) == [len(split)]
        assert labels_of(view) == ["10"]


def test_samples_without_labels_have_none(module: str) -> None:
    assert labels_of(opened(trust=True, **entry(module, "unlabelled"))) == [None]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", "RuntimeError: disk on fire"),
        ("generator", "has no len()"),
        ("empty", "no samples"),
    ],
)
def test_a_function_that_gives_no_samples_is_refused(module: str, function: str, message: str) -> None:
    with refusing(DataError, message, f"{module}:{function}"):
        opened(trust=True, **entry(module, function))


@pytest.mark.parametrize(
    ("function", "message"),
    [("bare", "expected (image, label)"), ("floats", "pixels are float64, expected uint8")],
)
def test_a_sample_of_another_form_is_refused_when_it_is_read(module: str, function: str, message: str) -> None:
    view = images(trust=True, **entry(module, function))
    with refusing(DataError, message):
        view.read(0)


def test_a_label_beyond_the_class_names_is_refused(module: str) -> None:
    with pytest.raises(DataError, match="label 2 is outside 0 to 1"):
        labels_of(opened(trust=True, **entry(module, "outside")))


@pytest.mark.parametrize("target", ["no_such_module:f", "{module}:missing", "{module}:constant"])
def test_a_target_that_is_no_function_is_refused(module: str, target: str) -> None:
    with pytest.raises(DataError, match="can't be read"):
        opened(trust=True, kind="python", target=target.format(module=module))
