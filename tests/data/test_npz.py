"""Arrays in `.npz` files: ids, names, labels, and what is refused with which remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftlens.base.errors import DataError
from tests.data.sources import images, labels_of, opened
from tests.refusing import refusing

RNG = np.random.default_rng(0)


def arrays(**changes: Any) -> dict[str, Any]:
    """A small data set; a change to None takes an array out."""
    values: dict[str, Any] = {
        "x_train": RNG.integers(0, 256, (5, 4, 4, 3), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 1, 0]),
        "x_test": RNG.integers(0, 256, (3, 4, 4, 3), dtype=np.uint8),
        "y_test": np.array([2, 0, 1], dtype=np.uint8),
        "class_names": np.array(["sedan", "T-shirt/top", "花"]),
    }
    values.update(changes)
    return {key: value for key, value in values.items() if value is not None}


def saved(folder: Path, **changes: Any) -> dict[str, Any]:
    file = folder / "data.npz"
    np.savez(file, **arrays(**changes))
    return {"kind": "npz", "file": str(file)}


def test_calibration_reads_train_and_everything_else_reads_test(tmp_path: Path) -> None:
    values = arrays()
    entry = saved(tmp_path, **values)
    for split, part in (("calibration", "train"), ("test", "test"), ("diagnosis", "test")):
        view = images(split, **entry)  # type: ignore[arg-type]
        pixels, numbers = values[f"x_{part}"], values[f"y_{part}"]
        assert view.ids == tuple(f"{part}/{row}" for row in range(len(pixels)))
        assert labels_of(view) == [values["class_names"][number] for number in numbers]
        assert all(np.array_equal(view.read(row), pixels[row]) for row in range(len(pixels)))
    assert images("test", **entry).origin == images("diagnosis", **entry).origin
    assert images("test", **entry).origin != images("calibration", **entry).origin


def test_real_files_open_with_their_own_names(real: Path) -> None:
    file = real / "data" / "clothing10.npz"
    view = images("test", kind="npz", file=str(file))
    with np.load(file, allow_pickle=False) as raw:
        assert view.class_names == tuple(raw["class_names"].tolist())
        assert labels_of(view) == raw["class_names"][raw["y_test"]].tolist()
        assert np.array_equal(view.read(371), raw["x_test"][371])
    assert (view.ids[0], view.ids[-1]) == ("test/0", "test/371")


def test_other_keys_and_files_are_named_per_split(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=arrays()["x_train"], targets=np.array(["b", "a", "b", "a", "b"]))
    np.savez(tmp_path / "b.npz", x_val=arrays()["x_test"])
    entry = {
        "kind": "npz",
        "calibration": {"file": str(tmp_path / "a.npz"), "x": "images", "y": "targets"},
        "test": {"file": str(tmp_path / "b.npz"), "x": "x_val"},
    }
    calibration, test = images("calibration", **entry), images("test", **entry)
    assert calibration.ids[4] == "images/4"
    assert (labels_of(calibration), calibration.class_names) == (["b", "a", "b", "a", "b"], ("a", "b"))
    assert test.ids == ("val/0", "val/1", "val/2")
    assert (labels_of(test), test.class_names) == ([None] * 3, None)


def test_a_split_without_its_label_array_has_no_labels(tmp_path: Path) -> None:
    view = images("test", **saved(tmp_path, y_test=None))
    assert (labels_of(view), view.class_names) == ([None] * 3, None)


def test_numbers_are_the_names_where_the_file_names_no_classes(tmp_path: Path) -> None:
    view = images("test", **saved(tmp_path, class_names=None, y_test=np.array([10, 2, 10])))
    assert (labels_of(view), view.class_names) == (["10", "2", "10"], ("2", "10"))


def test_names_stored_as_bytes_are_read_as_utf8(tmp_path: Path) -> None:
    names = np.array([name.encode() for name in ("sedan", "T-shirt/top", "花")])
    assert images("test", **saved(tmp_path, class_names=names)).class_names == ("sedan", "T-shirt/top", "花")


def test_grey_images_are_accepted_as_they_are(tmp_path: Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
    view = images("test", **saved(tmp_path, x_test=pixels))
    assert np.array_equal(view.read(2), pixels[2])


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        pytest.param(
            {"x_test": np.zeros((3, 4, 4, 3), dtype=np.float32)},
            "array x_test: pixels are float32, expected uint8",
            "(255 * x).round().astype('uint8')",
            id="floats for pixels",
        ),
        pytest.param(
            {"x_test": np.zeros((3, 3, 4, 4), np.uint8)}, "[3, 4, 4]", "transpose", id="channels first"
        ),
        pytest.param(
            {"x_test": np.zeros((3, 4, 4, 4), np.uint8)}, "[4, 4, 4]", "further", id="alpha channel"
        ),
        pytest.param({"x_test": np.zeros((3, 16), np.uint8)}, "[3, 16]", "One image per row", id="flat rows"),
        pytest.param(
            {"x_test": np.zeros((0, 4, 4), np.uint8)}, "it is empty, no image at all", "", id="no images"
        ),
        pytest.param({"x_test": None}, "no array x_test; there are x_train", "{x: KEY", id="no pixels"),
        pytest.param(
            {"y_test": np.array([0, 3, 1])}, "sample 1: label 3 is outside 0 to 2", "", id="label too high"
        ),
        pytest.param({"y_test": np.array([0, 1, -1])}, "sample 2: label -1", "from 0", id="negative label"),
        pytest.param({"y_test": np.array([0, 1])}, "shape [2] for 3 images", "", id="label missing"),
        pytest.param({"y_test": np.array([[0], [1], [2]])}, "shape [3, 1]", "[n]", id="labels in a column"),
        pytest.param({"y_test": np.zeros(3)}, "labels are float64", "Cast", id="labels as floats"),
        pytest.param({"class_names": np.array(["a", "b", "a"])}, "more than once", "", id="name twice"),
        pytest.param(
            {"class_names": np.array([1, 2, 3])}, "expected a list of text", "numpy.array", id="numbers"
        ),
        pytest.param(
            {"class_names": np.array(["a", "b", "c"], dtype=object)},
            "array class_names: can't be read",
            "Object arrays are pickles and never read",
            id="names as a pickle",
        ),
        pytest.param({"x_test": np.array([b"1"] * 3, dtype=object)}, "[3]", "", id="images as a pickle"),
    ],
)
def test_arrays_that_mean_something_else_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, hint: str
) -> None:
    entry = saved(tmp_path, **changes)
    with refusing(DataError, message, str(tmp_path / "data.npz"), hint=hint):
        opened("test", **entry)


@pytest.mark.parametrize("content", [None, b"", b"no zip", "cut short"], ids=str)
def test_a_missing_or_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes | str | None) -> None:
    entry = saved(tmp_path)
    file = tmp_path / "data.npz"
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"data\.npz"):
        opened("test", **entry)


def test_flipped_pixels_are_noticed_when_they_are_read(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    entry = saved(tmp_path, x_test=pixels)
    file = tmp_path / "data.npz"
    damaged = file.read_bytes().replace(pixels[1].tobytes(), bytes(pixels[1].nbytes))
    file.write_bytes(damaged)
    view = images("test", **entry)
    with pytest.raises(DataError, match="array x_test: can't be read"):
        view.read(0)


def test_an_explicitly_named_label_array_must_exist(tmp_path: Path) -> None:
    entry = {**saved(tmp_path), "test": {"x": "x_test", "y": "y_tset"}}
    with pytest.raises(DataError, match="no array y_tset; there are x_train, y_train, x_test, y_test"):
        opened("test", **entry)
