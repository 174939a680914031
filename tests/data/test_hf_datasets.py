"""Data sets in the Hugging Face format, saved to disk by the library itself."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from huggingface_hub import constants
from PIL import Image

from driftlens.utils.errors import DataError
from tests.data.sources import colour, images, labels_of, opened
from tests.refusing import refusing

NAMES = ["sedan", "T-shirt/top", "花"]


def rows(labels: list[Any], feature: Any) -> datasets.Dataset:
    pictures = [Image.fromarray(colour(shade)) for shade in range(len(labels))]
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    return datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "cars"
    label = datasets.ClassLabel(names=NAMES)
    splits = {
        "train": rows([0, 1, 2, 0], label),
        "test": rows([2, 1], label),
        "texts": rows(["b", "a"], datasets.Value("string")),
        "numbers": rows([10, 2], datasets.Value("int64")),
        "gap": rows([0, -1], label),
    }
    for name in ("texts", "numbers"):
        # A DatasetDict wants one schema on disk, so these stand beside it.
        datasets.DatasetDict({name: splits.pop(name)}).save_to_disk(folder.with_name(name))
    datasets.DatasetDict(splits).save_to_disk(folder)
    return folder


def entry(path: Path | str, **values: Any) -> dict[str, Any]:
    return {"kind": "hf", "path": str(path), "calibration": "train", "test": "test", **values}


def test_rows_carry_the_names_of_their_class_labels(saved: Path) -> None:
    view = images("calibration", **entry(saved))
    assert view.ids == ("0", "1", "2", "3")
    assert (labels_of(view), view.class_names) == (["sedan", "T-shirt/top", "花", "sedan"], tuple(NAMES))
    assert all(np.array_equal(np.asarray(view.read(row)), colour(row)) for row in range(4))
    assert view.origin != images("test", **entry(saved)).origin


@pytest.mark.parametrize(
    ("name", "labels", "class_names"),
    [("texts", ["b", "a"], ("a", "b")), ("numbers", ["10", "2"], ("2", "10"))],
)
def test_without_class_labels_the_values_are_the_names(
    saved: Path, name: str, labels: list[str], class_names: tuple[str, ...]
) -> None:
    view = opened("test", **entry(saved.with_name(name), test=name))
    assert (labels_of(view), view.class_names) == (labels, class_names)


def test_the_label_column_may_be_left_out(saved: Path) -> None:
    view = opened("test", **entry(saved, label=None))
    assert (labels_of(view), view.class_names) == ([None, None], None)


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        pytest.param({"test": "tset"}, "no split 'tset', expected train, test, gap", "'test'", id="split"),
        pytest.param(
            {"label": "labels"}, "no column 'labels'; columns are image, label", "'label'", id="label column"
        ),
        pytest.param(
            {"image": "img"},
            "no column 'img'; columns are image, label",
            "`image: COLUMN`",
            id="image column",
        ),
        pytest.param({"image": "label"}, "'label' holds no images; image columns are image", "cast", id="no images"),
        pytest.param({"test": "gap"}, "sample 1: label -1 is outside 0 to 2", "", id="gap"),
    ],
)
def test_a_wrong_name_is_refused_with_those_there_are(
    saved: Path, values: dict[str, Any], message: str, hint: str
) -> None:
    with refusing(DataError, message, str(saved), hint=hint):
        opened("test", **entry(saved, **values))


def test_one_data_set_without_splits_is_refused_with_how_to_save_it(tmp_path: Path) -> None:
    rows(["a"], datasets.Value("string")).save_to_disk(tmp_path / "one")
    with refusing(DataError, match="without splits", hint="DatasetDict"):
        opened(**entry(tmp_path / "one"))


def test_offline_nothing_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    with refusing(
        DataError,
        match="org/cars: no such folder, not in the local cache",
        hint="hf download --repo-type dataset org/cars --revision v2",
    ):
        opened(offline=True, **entry("org/cars", revision="v2"))
    assert not datasets.config.HF_HUB_OFFLINE, "what was forbidden for a moment is allowed again"


def test_what_the_hubs_cache_holds_is_read_offline_by_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    for name, digit in (("main", "0"), ("v1", "1")):
        place = tmp_path / "hub" / "datasets--org--words"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / name).write_text(digit * 40)
        snapshot = place / "snapshots" / (digit * 40)
        snapshot.mkdir(parents=True)
        for split in ("train", "test"):
            (snapshot / f"{split}.jsonl").write_text(f'{{"input": "{split} of {name}", "target": "yes"}}\n')
    texts = {"kind": "hf", "path": "org/words", "calibration": "train", "test": "test", "input": "input"}
    assert opened("test", offline=True, **texts).read(0).input == "test of main"
    assert opened("calibration", offline=True, **texts, revision="v1").read(0).input == "train of v1"
    again = opened("test", offline=True, **texts)
    assert again.read(0).input == "test of main", "what was prepared of another revision is no answer"


def test_a_hub_id_is_loaded_with_its_configuration(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def load(path: str, config: str | None, *, revision: str | None) -> datasets.DatasetDict:
        assert revision is None
        asked.append((path, config))
        return datasets.load_from_disk(str(saved))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(opened(**entry("org/cars", config="cropped_digits"))) == 2
    assert asked == [("org/cars", "cropped_digits")]


def test_images_are_opened_without_programs_addresses_and_files_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import EpsImagePlugin

    def picture(form: str, **values: Any) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(colour(7)).convert("L").save(stream, form, **values)
        return stream.getvalue()

    folder, turned = tmp_path / "set", Image.Exif()
    turned[0x0112] = 6
    for place in (tmp_path / "out.png", folder / "in.png"):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(picture("PNG"))
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    found: list[dict[str, Any] | None] = [
        {"bytes": picture("PNG", exif=turned), "path": "https://example.org/x.png"},
        {"bytes": None, "path": str(folder / "in.png")},
        {"bytes": picture("EPS"), "path": None},
        *({"bytes": None, "path": str(path)} for path in (tmp_path / "out.png", folder / "link.png")),
        *({"bytes": None, "path": path} for path in ("https://example.org/x.png", "x" * 300, "\0", None)),
        None,
    ]
    # Written as plain columns: `datasets` would put the files into the data set.
    struct = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    table = datasets.Dataset.from_dict({"image": found}, features=datasets.Features({"image": struct}))
    datasets.DatasetDict(test=table.with_format("numpy")).save_to_disk(folder)
    info = folder / "test/dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"features": {"image": {"_type": "Image"}}}))

    def never(*_: Any, **__: Any) -> Any:
        pytest.fail("ran a program, or asked the network")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", never)
    monkeypatch.setattr(datasets.features.image, "xopen", never)
    view = opened(offline=True, **entry(folder, label=None, calibration="test"))
    first, second = view.read(0), view.read(1)
    assert (first.size, second.size) == ((4, 6), (6, 4)), "turned as the camera says"
    assert first.mode == second.mode == "RGB"
    for position, message in enumerate(["PostScript", *["no image, and the path"] * 2], 2):
        with pytest.raises(DataError, match=message):
            view.read(position)
    for position in range(5, len(found)):
        with pytest.raises(DataError, match=f"set, .*{position}"):
            view.read(position)
