"""Image folders, against torchvision's ImageFolder and by their bad examples."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from driftlens.base.errors import DataError
from driftlens.data.task_data import open_task_data
from driftlens.spec.data import DataDefaults
from tests.data.sources import colour, entry_of, images, labels_of, opened, shades, write_images
from tests.refusing import refusing

FILES = {
    "sedan/b.png": 1,
    "sedan/a.PNG": 2,
    "sedan/deep/er/c.bmp": 3,
    "T-shirt top/z.png": 4,
    "花 Blüten/ä.png": 5,
    "Zebra/1.ppm": 6,
}


def folder_entry(folder: Path) -> dict[str, str]:
    return {"kind": "imagefolder", "calibration": str(folder), "test": str(folder)}


def test_ids_labels_and_pixels_are_those_of_torchvision(tmp_path: Path) -> None:
    write_images(tmp_path, FILES)
    (tmp_path / "sedan" / "notes.txt").write_text("no image")
    view = images(**folder_entry(tmp_path))
    theirs = ImageFolder(str(tmp_path))
    expected = {
        Path(path).relative_to(tmp_path).as_posix(): theirs.classes[target] for path, target in theirs.samples
    }
    assert dict(zip(view.ids, labels_of(view), strict=True)) == expected
    assert view.class_names == tuple(theirs.classes)
    for position, sample in enumerate(view.ids):
        assert np.array_equal(np.asarray(view.read(position)), colour(FILES[sample]))


def test_samples_are_sorted_by_class_and_path(tmp_path: Path) -> None:
    write_images(tmp_path, FILES)
    assert images(**folder_entry(tmp_path)).ids == (
        "T-shirt top/z.png",
        "Zebra/1.ppm",
        "sedan/a.PNG",
        "sedan/b.png",
        "sedan/deep/er/c.bmp",
        "花 Blüten/ä.png",
    )


def test_the_order_of_the_file_system_plays_no_part(tmp_path: Path) -> None:
    numbers = random.Random(0).sample(range(10, 99), 60)
    write_images(tmp_path, {f"{number // 20}/{number}.png": number for number in numbers})
    assert images(**folder_entry(tmp_path)).ids == tuple(
        f"{number // 20}/{number}.png" for number in sorted(numbers)
    )


def test_hidden_files_and_folders_are_no_images_and_no_classes(tmp_path: Path) -> None:
    write_images(tmp_path, {"a/x.png": 1, "a/._x.png": 2, "a/.cache/y.png": 3, ".ipynb_checkpoints/z.png": 4})
    view = images(**folder_entry(tmp_path))
    assert (view.ids, view.class_names) == (("a/x.png",), ("a",))


def test_one_image_of_one_class_is_a_data_set(tmp_path: Path) -> None:
    view = images(**folder_entry(write_images(tmp_path, {"only/one.png": 9})))
    assert (view.ids, labels_of(view), shades([view.read(0)])) == (("only/one.png",), ["only"], [9])


def test_images_without_class_folders_have_no_labels(tmp_path: Path) -> None:
    view = images(**folder_entry(write_images(tmp_path, {"b.png": 2, "a.png": 1})))
    assert (view.ids, labels_of(view), view.class_names) == (("a.png", "b.png"), [None, None], None)
    assert shades([view.read(0), view.read(1)]) == [1, 2]


def test_grey_images_become_rgb(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.full((3, 3), 7, dtype=np.uint8)).save(tmp_path / "grey.png")
    assert np.asarray(images(**folder_entry(tmp_path)).read(0)).tolist() == [[[7, 7, 7]] * 3] * 3


def test_two_ways_to_one_folder_have_one_origin(tmp_path: Path) -> None:
    write_images(tmp_path / "real", {"a/x.png": 1})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert (
        images(**folder_entry(tmp_path / "real")).origin == images(**folder_entry(tmp_path / "link")).origin
    )


def test_a_damaged_image_is_refused_by_name_when_it_is_read_and_not_before(tmp_path: Path) -> None:
    write_images(tmp_path, {"a/good.png": 1})
    whole = (tmp_path / "a" / "good.png").read_bytes()
    (tmp_path / "a" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "a" / "text.png").write_text("no image")
    view = images(**folder_entry(tmp_path))
    assert shades([view.read(view.ids.index("a/good.png"))]) == [1]
    for name in ("a/cut.png", "a/text.png"):
        with refusing(DataError, match=name, hint="Replace the file"):
            view.read(view.ids.index(name))


@pytest.mark.parametrize(
    ("files", "place", "message", "hint"),
    [
        ({"full/x.png": 1}, "", "leer: the class folder holds no images", "remove the folder"),
        ({"leer/x.png": 1, "stray.png": 2}, "", "stray.png", ""),
        ({}, "leer", "no images", ".jpeg"),
        ({}, "missing", "missing", "spec file's folder"),
        ({"file.png": 1}, "file.png", "file.png", "spec file's folder"),
    ],
    ids=["empty class", "beside class folders", "no images", "no folder", "a file"],
)
def test_what_is_no_folder_of_images_is_refused_by_name(
    tmp_path: Path, files: dict[str, int], place: str, message: str, hint: str
) -> None:
    write_images(tmp_path, files)
    (tmp_path / "leer").mkdir(exist_ok=True)
    with refusing(DataError, message, hint=hint):
        opened(**folder_entry(tmp_path / place))


def test_sub_folders_of_unlabelled_splits_are_no_classes(tmp_path: Path) -> None:
    """Of calibration images alone, or of all; without being told, folders that are no classes are pointed out."""
    write_images(
        tmp_path, {"all/2024/may/a.png": 1, "all/b.png": 2, "test/cat/c.png": 3, "test/dog/d.png": 4}
    )
    entry = {"kind": "imagefolder", "calibration": str(tmp_path / "all"), "test": str(tmp_path / "test")}
    with refusing(DataError, match="beside class folders", hint="unlabelled: [calibration]"):
        opened("calibration", **entry)
    for splits, named in ((["calibration"], ("cat", "dog")), (["calibration", "test"], None)):
        views = {split: images(split, **entry, unlabelled=splits) for split in ("calibration", "test")}
        assert views["calibration"].ids == ("2024/may/a.png", "b.png")
        assert labels_of(views["calibration"]) == [None, None] and views["calibration"].class_names is None
        assert views["test"].class_names == named
    (tmp_path / "all" / "b.png").unlink()
    with refusing(
        DataError,
        match=r"none of its sub-folders .*'2024'.* is a class.*'cat'",
        hint="unlabelled: [calibration]",
    ):
        open_task_data("task", entry_of(**entry), DataDefaults(n=1, n_diagnosis=1), list, reads="image")
