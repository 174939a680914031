"""Images in folders, against torchvision's ImageFolder, and in `.npz` files; what is refused with which remedy."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from driftlens.config.data import DataDefaults
from driftlens.data.task_data import TaskData, open_task_data
from driftlens.utils.errors import DataError
from tests.data.sources import (
    DEEP,
    colour,
    deep,
    entry_of,
    images,
    labels_of,
    opened,
    shades,
    shard,
    write_images,
)
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
    expected = {Path(path).relative_to(tmp_path).as_posix(): theirs.classes[target] for path, target in theirs.samples}
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


def test_a_class_folder_that_is_missing_in_the_test_split_alone_is_a_class_and_a_notice(
    tmp_path: Path,
) -> None:
    places = [
        *(f"calibration/{name}/{n}.png" for name in "abc" for n in range(3)),
        "test/a/0.png",
        "test/b/1.png",
    ]
    write_images(tmp_path, {place: n for n, place in enumerate(places)})
    entry = {"kind": "imagefolder", **{split: str(tmp_path / split) for split in ("calibration", "test")}}

    def opened() -> TaskData:
        return open_task_data(
            "t",
            entry_of(**entry),
            DataDefaults(n=3, n_diagnosis=1),
            len,
            reads="image",
            head_classes=("c", "b", "a"),
        )

    assert opened().notices == (f"t: {tmp_path / 'test'}: no images of calibration's class 'c'",)
    (tmp_path / "test" / "b").rename(tmp_path / "test" / "B")
    with refusing(DataError, "only in data: 'B'"):
        opened()


def test_hidden_files_and_folders_are_no_images_and_no_classes(tmp_path: Path) -> None:
    hidden = ("a/._x.png", "a/.cache/y.png", ".ipynb_checkpoints/z.png", "__MACOSX/a/v.png", "a/@eaDir/w.png")
    write_images(tmp_path, {"a/x.png": 1, **dict.fromkeys(hidden, 2)})
    for name in (".DS_Store", "Thumbs.db", "a/.DS_Store", "a/Thumbs.db"):
        (tmp_path / name).write_bytes(b"")
    view = images(**folder_entry(tmp_path))
    assert (view.ids, view.class_names, view.notices) == (("a/x.png",), ("a",), ())


@pytest.mark.parametrize("lacking", ["calibration", "test"])
def test_a_class_that_one_split_lacks_and_another_fills_is_a_class_and_a_notice(tmp_path: Path, lacking: str) -> None:
    full = {f"{split}/a/{place}.png": place for split in ("calibration", "test") for place in range(3)}
    other = "test" if lacking == "calibration" else "calibration"
    write_images(tmp_path, full | {f"{other}/b/9.png": 9})
    (tmp_path / lacking / "b" / ".ipynb_checkpoints").mkdir(parents=True)
    entry = {"kind": "imagefolder", **{split: str(tmp_path / split) for split in ("calibration", "test")}}
    counts = DataDefaults(n=3, n_diagnosis=3)
    data = open_task_data("t", entry_of(**entry), counts, len, reads="image", head_classes=("b", "a"))
    assert data.class_names == ("b", "a")
    said = f"t: {tmp_path / 'test'}: no images of calibration's class 'b'"
    assert data.notices == (said,) * (lacking == "test")


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
    assert images(**folder_entry(tmp_path / "real")).origin == images(**folder_entry(tmp_path / "link")).origin


def test_a_damaged_image_is_refused_by_name_when_it_is_read_and_not_before(tmp_path: Path) -> None:
    write_images(tmp_path, {"a/good.png": 1})
    whole = (tmp_path / "a" / "good.png").read_bytes()
    (tmp_path / "a" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "a" / "text.png").write_text("no image")
    view = images(**folder_entry(tmp_path))
    assert shades([view.read(view.ids.index("a/good.png"))]) == [1]
    for name in ("a/cut.png", "a/text.png"):
        with refusing(DataError, match=name, hint=""):
            view.read(view.ids.index(name))


@pytest.mark.parametrize(
    ("files", "place", "message", "hint"),
    [
        ({"leer/x.png": 1, "stray.png": 2}, "", "stray.png", ""),
        ({}, "leer", "leer: no samples", ""),
        ({}, "missing", "missing", "spec's folder"),
        ({"file.png": 1}, "file.png", "file.png", ""),
    ],
    ids=["next to class folders", "no images", "no folder", "a file"],
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
    write_images(tmp_path, {"all/2024/may/a.png": 1, "all/b.png": 2, "test/cat/c.png": 3, "test/dog/d.png": 4})
    entry = {"kind": "imagefolder", "calibration": str(tmp_path / "all"), "test": str(tmp_path / "test")}
    with refusing(DataError, match="next to class folders", hint="unlabelled: [calibration]"):
        opened("calibration", **entry)
    for splits, named in ((["calibration"], ("cat", "dog")), (["calibration", "test"], None)):
        views = {split: images(split, **entry, unlabelled=splits) for split in ("calibration", "test")}
        assert views["calibration"].ids == ("2024/may/a.png", "b.png")
        assert labels_of(views["calibration"]) == [None, None] and views["calibration"].class_names is None
        assert views["test"].class_names == named
    (tmp_path / "all" / "b.png").unlink()
    with refusing(
        DataError,
        match="only in data: '2024'",
        hint="unlabelled: [calibration]",
    ):
        open_task_data("task", entry_of(**entry), DataDefaults(n=1, n_diagnosis=1), list, reads="image")


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
        pytest.param({"x_test": np.zeros((3, 3, 4, 4), np.uint8)}, "[3, 4, 4]", "", id="channels first"),
        pytest.param({"x_test": np.zeros((3, 4, 4, 4), np.uint8)}, "[4, 4, 4]", "others", id="alpha channel"),
        pytest.param({"x_test": np.zeros((3, 16), np.uint8)}, "[16]", "", id="flat rows"),
        pytest.param({"x_test": None}, "x_test is not a file in the archive", "", id="no pixels"),
        pytest.param({"y_test": np.array([0, 3, 1])}, "sample 1: label 3 is outside 0 to 2", "", id="label too high"),
        pytest.param({"y_test": np.array([0, 1, -1])}, "sample 2: label -1", "from 0", id="negative label"),
        pytest.param({"y_test": np.array([0, 1])}, "shape [2] for 3 images", "", id="label missing"),
        pytest.param({"y_test": np.zeros(3)}, "neither text nor an integer", "", id="labels as floats"),
        pytest.param({"class_names": np.array(["a", "b", "a"])}, "more than once", "", id="name twice"),
        pytest.param(
            {"class_names": np.array(["a", "b", "c"], dtype=object)},
            "Object arrays cannot be loaded when allow_pickle=False",
            "",
            id="names as a pickle",
        ),
        pytest.param({"x_test": np.array([b"1"] * 3, dtype=object)}, "Object", "", id="images as a pickle"),
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
    with pytest.raises(DataError, match="can't be read: BadZipFile"):
        images("test", **entry)


def _in_folder(folder: Path, content: bytes) -> dict[str, Any]:
    (folder / "x.tiff").write_bytes(content)
    return folder_entry(folder)


def _in_table(folder: Path, content: bytes) -> dict[str, Any]:
    (folder / "x.tiff").write_bytes(content)
    (folder / "rows.csv").write_text("path,label\nx.tiff,a\n")
    return {"kind": "table", **dict.fromkeys(("calibration", "test"), str(folder / "rows.csv"))}


def _in_shard(folder: Path, content: bytes) -> dict[str, Any]:
    file = shard(folder / "0.tar", {"x.tiff": content, "x.cls": b"0"})
    return {"kind": "webdataset", "calibration": file, "test": file}


def _in_rows(folder: Path, content: bytes) -> dict[str, Any]:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    rows = datasets.Dataset.from_dict({"image": [{"bytes": content}], "label": ["a"]}, features=features)
    datasets.DatasetDict(test=rows, train=rows).save_to_disk(folder / "rows")
    return {"kind": "hf", "path": str(folder / "rows"), "calibration": "train", "test": "test"}


@pytest.mark.parametrize(("kind", "form"), DEEP, ids=str)
@pytest.mark.parametrize("source", [_in_folder, _in_table, _in_shard, _in_rows], ids=lambda made: made.__name__)
def test_samples_beyond_a_byte_are_refused_by_name(tmp_path: Path, source: Any, kind: str, form: str) -> None:
    """`convert("RGB")` takes all of 255 and more for white, and floats for black: images would all be one."""
    view = images(**source(tmp_path, deep(kind, form)))
    with refusing(DataError, f"pixels are {np.dtype(kind).name} ", "expected 8 bits", hint="one rule"):
        view.read(0)


@pytest.mark.parametrize("source", [_in_folder, _in_table, _in_shard, _in_rows], ids=lambda made: made.__name__)
def test_pictures_are_upright_and_without_alpha_wherever_they_come_from(tmp_path: Path, source: Any) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 4), dtype=np.uint8)
    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # the camera was turned: the picture's top is the right of what it stored
    Image.fromarray(pixels).save(stream, "PNG", exif=exif)
    read = images(**source(tmp_path, stream.getvalue())).read(0)
    assert np.array_equal(np.asarray(read), np.rot90(pixels[..., :3], -1))


def test_what_holds_a_byte_a_channel_is_read_whatever_its_mode(tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.fromarray(colour(9))
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB"):
        picture.convert(mode, **({"palette": Image.Palette.ADAPTIVE} if mode == "P" else {})).save(tmp_path / "x.tif")
        expected = Image.open(tmp_path / "x.tif")
        assert expected.mode == mode
        read = images(**folder_entry(tmp_path)).read(0)
        assert np.array_equal(np.asarray(read), np.asarray(expected.convert("RGB")))
