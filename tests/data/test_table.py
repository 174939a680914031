"""Tables of paths and labels: CSV, TSV and Parquet, one file per split or one with a column of splits."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from driftlens.config.data import DataDefaults
from driftlens.config.spec import load_spec
from driftlens.data.sources import Split, SplitView, open_split
from driftlens.data.task_data import open_task_data
from driftlens.models.texts import TextSample
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import DataError
from tests.data.sources import entry_of, images, labels_of, opened, shades, write_images
from tests.refusing import refusing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven images, their shades as their names."""
    return write_images(tmp_path / "images 花", {f"{at}.png": at for at in range(7)}).parent


def written(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    return str(file)


def one_file(folder: Path, text: str, name: str = "rows.csv", **values: Any) -> dict[str, Any]:
    file = written(folder / name, text)
    return {"kind": "table", "calibration": file, "test": file, **values}


def read(view: SplitView) -> list[int]:
    return shades([view.read(position) for position in range(len(view))])


def test_relative_paths_start_at_the_file_and_labels_are_text(folder: Path) -> None:
    text = f'\ufefflabel,more,path\n"a, ""b""",,images 花/3.png\n花,x,{folder / "images 花/1.png"}\n'
    view = images(**one_file(folder, text))
    assert view.ids == ("images 花/3.png", str(folder / "images 花/1.png"))
    assert read(view) == [3, 1]
    assert (labels_of(view), view.class_names) == (['a, "b"', "花"], ('a, "b"', "花"))


def test_one_file_may_hold_all_splits_under_any_names(folder: Path) -> None:
    rows = "".join(f"images 花/{at}.png\t{at % 2}\t{at // 3}\n" for at in range(7))
    file = written(folder / "all.TSV", f"file\tclass\tfold\n{rows}")
    entry = {"kind": "table", "file": file, "split": "fold", "image": "file", "label": "class"}
    entry |= {"calibration": "0", "test": "1", "diagnosis": "2", "classes": ["even", "odd"]}
    splits: tuple[Split, ...] = ("calibration", "test", "diagnosis")
    views = {split: open_split(entry_of(**entry), split, Permissions()) for split in splits}  # type: ignore[arg-type]
    assert [read(view) for view in views.values()] == [[0, 1, 2], [3, 4, 5], [6]]
    assert labels_of(views["test"]) == ["odd", "even", "odd"]
    assert len({view.origin for view in views.values()}) == 3
    with pytest.raises(DataError, match=r"all\.TSV, test: no samples"):
        open_split(entry_of(**entry | {"test": "test"}), "test", Permissions())


def test_values_of_the_column_of_splits_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    spec = {
        "version": 1,
        "architecture": {"loader": "open-clip", "source": "any"},
        "merged": {"weights": "org/merged"},
        "experts": {"t": {"weights": "org/expert"}},
        "data": {"t": {"kind": "table", "file": "all.csv", "calibration": "train", "test": "test"}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(spec))
    resolved = load_spec(tmp_path / "run.yaml")
    entry = resolved.as_dict()["data"]["t"]
    assert (entry["file"], entry["calibration"]) == (str(tmp_path / "all.csv"), "train")
    assert load_spec(resolved.as_dict()) == resolved
    del spec["data"]["t"]["file"]
    (tmp_path / "run.yaml").write_text(json.dumps(spec))
    assert load_spec(tmp_path / "run.yaml").as_dict()["data"]["t"]["calibration"] == str(tmp_path / "train")


@pytest.mark.parametrize(
    ("labels", "classes", "names", "class_names"),
    [
        pytest.param([2, 0], ["a", "b", "c"], ["c", "a"], ["a", "b", "c"], id="numbers index the classes"),
        pytest.param(["2", "0"], ["a", "b", "c"], ["c", "a"], ["a", "b", "c"], id="so they do as text"),
        pytest.param(["2", "0"], ["2", "1", "0"], ["2", "0"], ["2", "1", "0"], id="unless they are names"),
        pytest.param([10, 9], None, ["10", "9"], ["9", "10"], id="without classes they are names, in order"),
        pytest.param(["10", "9"], None, ["10", "9"], ["9", "10"], id="as text too"),
        pytest.param(["x", None], None, ["x", None], ["x"], id="a row without label"),
    ],
)
def test_numbers_and_names_in_parquet(
    folder: Path, labels: list[Any], classes: list[str] | None, names: list[str], class_names: list[str]
) -> None:
    file = folder / "rows.parquet"
    rows = pd.DataFrame({"path": ["images 花/5.png", "images 花/2.png"], "label": labels, "x": [b"", b""]})
    rows.to_parquet(file)
    view = images(kind="table", calibration=str(file), test=str(file), classes=classes)
    assert read(view) == [5, 2]
    assert (labels_of(view), list(view.class_names or ())) == (names, class_names)


def test_classes_may_stand_in_a_file(folder: Path) -> None:
    names = written(folder / "names.json", '["a", "花"]')
    view = images(**one_file(folder, "path,label\nimages 花/1.png,1\n", classes=names))
    assert labels_of(view) == ["花"]


def test_calibration_needs_no_labels_and_one_list_serves_two_splits(folder: Path) -> None:
    test = written(folder / "test.csv", "path,label\nimages 花/1.png,a\nimages 花/2.png,b\n")
    bare = written(folder / "bare.csv", "path\nimages 花/3.png\nimages 花/4.png\n")

    def made(calibration: str) -> Any:
        entry = entry_of(kind="table", calibration=calibration, test=test)
        return open_task_data("t", entry, DataDefaults(n=1, n_diagnosis=1), len, reads="image", access=Permissions())

    data = made(bare)
    assert (data.calibration.labels, set(data.test.labels)) == (None, {"a", "b"})
    assert data.class_names == ("a", "b")
    assert not set(made(test).calibration.ids) & set(made(test).test.ids), "one origin, kept apart"
    with refusing(DataError, match="no column 'label'; columns are path", hint="`label: COLUMN`"):
        opened(kind="table", calibration=test, test=bare)
    assert labels_of(images(kind="table", calibration=bare, test=bare, label=None)) == [None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("path,label\nimages 花/1.png,a\nimages 花/9.png,a\n", "1 of 2 images are missing", id="gone"),
        pytest.param("path,label\nimages 花/1.png,a\nimages 花/1.png,b\n", "1.png occurs more than once", id="twice"),
        pytest.param(
            "path,label\nimages 花/1.png,a, b\n",
            "Length of header or names does not match",
            id="comma in a label",
        ),
        pytest.param("path,label\n", "no data", id="only a header"),
        pytest.param("path,label\n,a\n", "1 of 1 images are missing", id="no path"),
        pytest.param("path,path\nx,a\n", "several columns named 'path'", id="twice a column"),
        pytest.param("Path,label\nx,a\n", "no column 'path'; columns are Path, label", id="another column"),
        pytest.param("", "no column 'path'", id="empty"),
        pytest.param('path,label\n"x,a\n', "EOF inside string", id="open quote"),
    ],
)
def test_what_is_no_list_of_images_is_refused_by_file(folder: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        opened(**one_file(folder, text))
    assert message in caught.value.message
    assert "rows.csv" in caught.value.message


@pytest.mark.parametrize(
    ("encoding", "separator"),
    [("cp1252", ";"), ("utf-16", "tab"), ("utf-8", "|"), ("utf-8-sig", ",")],
)
def test_encodings_and_separators_are_those_that_the_entry_names(
    tmp_path: Path, encoding: str, separator: str
) -> None:
    file, between = tmp_path / "rows.csv", "\t" if separator == "tab" else separator
    rows = [["q", "a"], ["naïve, \tor; not|", "007"], ["b", ""], ["NA", "1.0"]]
    lines = [between.join(f'"{cell}"' if between in cell else cell for cell in row) for row in rows]
    file.write_bytes("\r\n".join(lines).encode(encoding))
    entry = {"kind": "table", "calibration": str(file), "test": str(file), "input": "q", "target": "a"}
    view = opened("calibration", **entry, encoding=encoding, separator=separator)
    assert [view.read(row) for row in range(3)] == [TextSample(*row) for row in rows[1:]]
    if encoding in ("cp1252", "utf-16"):
        with refusing(DataError, "rows.csv", "UnicodeDecodeError", hint="encoding: cp1252"):
            opened("calibration", **entry)


PACKED: dict[str, bytes] = {
    "gzip": gzip.compress(b"q,a\nb,c\n"),
    "workbook": b"PK\x03\x04\x14\0",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "page": b"<!DOCTYPE html><html></html>",
    "Parquet": b"PAR1\x15",
}


@pytest.mark.parametrize("kind", ["table", "jsonl"])
@pytest.mark.parametrize("packing", PACKED)
def test_what_is_no_text_is_refused_by_file(kind: str, packing: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(PACKED[packing])
    entry = {"kind": kind, "calibration": str(tmp_path / "rows.csv"), "test": str(tmp_path / "rows.csv")}
    with refusing(DataError, "rows.csv", hint=""):
        opened("calibration", **entry, input="q", target="a")


def test_calibration_samples_are_never_test_samples_in_any_writing(folder: Path) -> None:
    header, train = "path,label,split\n", "images 花/1.png,a,train\nimages 花/2.png,a,train\n"
    again = "images 花/./1.png,a,test\n"
    (folder / "link").symlink_to(folder)
    one = written(folder / "one.csv", header + train + again + "images 花/1.png,a,old\n")
    written(folder / "train.csv", header + train)
    test = written(folder / "test.csv", f"{header}{folder}/images 花/2.png,a,x\n")
    for places in (
        {"file": one, "calibration": "train", "test": "test", "diagnosis": "test"},
        {"calibration": str(folder / "link/train.csv"), "test": test, "diagnosis": test},
    ):
        for split in ("test", "diagnosis"):
            with pytest.raises(DataError, match="images shared with calibration: 1"):
                opened(split, kind="table", **places)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"1\.png occurs more than once"):
        opened(**one_file(folder, header + train + again))


def test_paths_and_columns_that_nothing_can_read_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="File name too long"):
        opened(**one_file(folder, f"path,label\n{'x' * 300},a\n"))
    file, schema = folder / "wide.parquet", pa.schema({"path": pa.string(), "label": pa.int64()})
    pq.write_table(schema.empty_table(), file)
    stored = schema.serialize().to_pybytes()
    wide = stored.replace(b"\x40\0\0\0", b"\x80\0\0\0")  # labels of 128 bits
    file.write_bytes(file.read_bytes().replace(b64encode(stored), b64encode(wide)))
    with pytest.raises(DataError, match=r"wide\.parquet: can't be read: .*Integers with more than 64 bits"):
        opened(kind="table", calibration=str(file), test=str(file))
