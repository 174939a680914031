"""Tar files of samples: grouped by key, indexed once, read where they lie, never unpacked."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import datasets
import pytest

from driftlens.data.sources import SplitView
from driftlens.utils.errors import DataError
from tests.data.sources import encoded, images, labels_of, opened, shades, shard
from tests.refusing import refusing


def sample(key: str, shade: int, label: bytes = b"0", ending: str = "cls") -> dict[str, bytes]:
    return {f"{key}.png": encoded(shade), f"{key}.{ending}": label}


def entry(place: Path | str, **values: Any) -> dict[str, Any]:
    return {"kind": "webdataset", "calibration": str(place), "test": str(place), **values}


def read(view: SplitView) -> list[int]:
    return shades([view.read(position) for position in range(len(view))])


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("prepared"))


def test_members_with_one_key_are_one_sample(tmp_path: Path) -> None:
    first = {"d/a.b/0.png": encoded(1), "d/a.b/0.cls": b" 0 ", "._1.png": b"a Mac's", "d/x": b"no ending"}
    shard(tmp_path / "花-0.tar", first | {"1.png": encoded(2), "1.cls": b"1\n"})
    shard(tmp_path / "花-1.tar", sample("1", 3, b"2"))
    (tmp_path / "notes.txt").write_text("no shard")
    view = images(**entry(tmp_path, classes=["a", "b", "花"]))
    assert view.ids == ("花-0.tar/d/a.b/0", "花-0.tar/1", "花-1.tar/1")
    assert read(view) == [1, 2, 3]
    assert (labels_of(view), view.class_names) == (["a", "b", "花"], ("a", "b", "花"))
    for place, ids in (("花-1.tar", view.ids[2:]), ("花-*.tar", view.ids)):
        assert images(**entry(tmp_path / place)).ids == ids


@pytest.mark.parametrize(
    ("label", "content", "names"),
    [
        ("txt", "花\n".encode(), ["花"]),
        ("json", b'{"label": 1, "x": 0}', ["b"]),
        ("json", b'"b"', ["b"]),
        ("META.json", b'{"label": "x"}', ["x"]),
        ("json", b'{"x": 1}', [None]),
    ],
)
def test_labels_are_text_or_json(tmp_path: Path, label: str, content: bytes, names: list[str | None]) -> None:
    members = sample("0", 1, content, label.lower()) | sample(
        "1", 2, b'{"label": 0}' if names == [None] else content, label.lower()
    )
    view = images(**entry(shard(tmp_path / "0.tar", members), label=label, classes=["a", "b"]))
    assert labels_of(view)[:1] == names


def test_the_key_of_json_labels_and_the_ending_of_images_are_chosen(tmp_path: Path) -> None:
    members = {
        "0.png": encoded(1),
        "0.mask.png": encoded(9),
        "0.seg.png": encoded(7),
        "0.json": b'{"name": "x"}',
    }
    view = images(**entry(shard(tmp_path / "0.tar", members), label="json", key="name", image="seg.png"))
    assert (labels_of(view), read(view)) == (["x"], [7])


def test_calibration_needs_no_labels(tmp_path: Path) -> None:
    bare = shard(tmp_path / "0.tar", {"0.png": encoded(1)})
    assert labels_of(images("calibration", **entry(bare))) == [None]
    assert labels_of(images(**entry(bare, label=None))) == [None]
    with pytest.raises(DataError, match=r"members end in png; expected one image and \.cls"):
        opened(**entry(bare))


def test_hostile_members_are_neither_followed_nor_written(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(encoded(66))
    kinds = {
        "0.png": tarfile.SYMTYPE,
        "1.png": tarfile.LNKTYPE,
        "2.png": tarfile.CHRTYPE,
        "3.png": tarfile.FIFOTYPE,
    }
    hostile = []
    for name, kind in kinds.items():
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, str(tmp_path / "secret.png")
        hostile.append(info)
    plain = sample("/etc/evil", 5) | sample("../../up", 6)
    before = sorted(tmp_path.rglob("*"))
    file = shard(tmp_path / "shards/x.tar", plain, *hostile)
    view = images(**entry(file))
    assert view.ids == ("x.tar//etc/evil", "x.tar/../../up")
    assert read(view) == [5, 6]
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "shards", Path(file)])
    assert not Path("/etc/evil.png").exists()
    with refusing(DataError, "members end in cls; expected one image", hint="image: ENDING"):
        opened(**entry(shard(tmp_path / "x.tar", {"0.cls": b"1"}, *hostile)))


def test_postscript_in_disguise_is_no_image(tmp_path: Path) -> None:
    """Pillow would start Ghostscript for it."""
    view = images(**entry(shard(tmp_path / "0.tar", {"0.png": encoded(1, "EPS"), "0.cls": b"0"})))
    with pytest.raises(DataError, match=r"0\.tar/0: can't be read: ValueError: PostScript is a program"):
        view.read(0)


def negative() -> bytes:
    """A second header whose size leads back to itself."""
    info = tarfile.TarInfo("0.txt")
    first = info.tobuf(tarfile.GNU_FORMAT)
    info.size = -tarfile.BLOCKSIZE
    info.name = "skipped"
    return first + info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


@pytest.mark.parametrize("damage", ["cut in a member", "a damaged header", "negative", "text"])
def test_a_damaged_file_is_refused_whole(tmp_path: Path, damage: str) -> None:
    file = Path(shard(tmp_path / "0.tar", sample("0", 1) | sample("1", 2)))
    whole = file.read_bytes()
    with tarfile.open(file) as tar:
        second = tar.getmember("1.png")
    damaged = {
        "cut in a member": whole[: second.offset_data + 10],
        "a damaged header": whole[: second.offset] + b"\xff" * 300 + whole[second.offset + 300 :],
        "negative": negative(),
        "text": b"images\n" * 100,
    }
    file.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"0\.tar"):
        opened(**entry(file))


def test_an_image_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    file = Path(shard(tmp_path / "0.tar", {"0.png": b"no image", "0.cls": b"0"} | sample("1", 2)))
    view = images(**entry(file))
    with pytest.raises(DataError, match=r"0\.tar/0: can't be read"):
        view.read(0)
    assert read(SplitView("", ("1",), None, view.label, lambda _: view.read(1))) == [2]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        pytest.param({"0.txt": b"x"}, "members end in txt; expected one image", id="no image"),
        pytest.param(sample("0", 1) | {"0.jpg": b""}, "members end in png, cls, jpg", id="two images"),
        pytest.param(sample("0", 1) | {"0.PNG": b""}, "members end in png, cls, PNG", id="one member twice"),
        pytest.param(sample("0", 1, b"\xff"), "invalid literal for int()", id="no number"),
        pytest.param(
            {"0.png": encoded(1), "1.png": encoded(2), "0.cls": b"0", "1.cls": b"1"},
            "don't share the same prefix",
            id="unsorted",
        ),
        pytest.param(
            {key: content for at in range(5) for key, content in sample(f"{at}", at).items()}
            | {"a.png": encoded(1), "b.png": encoded(2), "a.cls": b"0", "b.cls": b"1"},
            "occurs more than once",
            id="unsorted at the end",
        ),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with refusing(DataError, message, "0.tar"):
        opened(**entry(shard(tmp_path / "0.tar", members)))


@pytest.mark.parametrize("content", [b"[" * 10**5, b"{", b"1.5", b'{"label": [1]}'])
def test_json_that_is_no_label_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"0\.tar: (can't be read|label .* is neither)"):
        opened(**entry(shard(tmp_path / "0.tar", sample("0", 1, content, "json")), label="json"))


def test_calibration_samples_are_never_test_samples(tmp_path: Path) -> None:
    for at in range(3):
        shard(tmp_path / f"food/{at}.tar", sample("0", at))
    (tmp_path / "link").symlink_to(tmp_path / "food")
    every, pattern = str(tmp_path / "food"), str(tmp_path / "link/*.tar")
    views = [images(split, **entry(every, test=pattern)) for split in ("calibration", "test")]
    assert views[0].origin == views[1].origin and views[0].ids == views[1].ids, "so they are kept apart"
    apart = entry(
        tmp_path / "food/0.tar", test=str(tmp_path / "food/[12].tar"), diagnosis=str(tmp_path / "food/2.tar")
    )
    assert len({images(split, **apart).origin for split in ("calibration", "test", "diagnosis")}) == 3
    for test in ("food/[01].tar", "link/?.tar"):
        with pytest.raises(DataError, match="files shared with calibration: 1") as caught:
            opened(**apart | {"test": str(tmp_path / test)})
        assert caught.value.hint
