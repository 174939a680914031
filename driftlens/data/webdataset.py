"""Tar files in the manner of webdataset: files that share a name up to its first dot are one sample."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from driftlens.base.access import Access
from driftlens.base.errors import DataError
from driftlens.base.files import from_json, plain_file
from driftlens.data.image_folder import SUFFIXES, check_names, read_image
from driftlens.data.sources import PATHS_HINT, Split, SplitView, data_sources, listed_classes, named, refused

if TYPE_CHECKING:
    from driftlens.spec.data import WebdatasetData

LONGEST_LABEL = 2**20
"""Bytes of a label, which is a word, a number or some lines of JSON; more are no label, and are not read."""


class _Sample(NamedTuple):
    """Where an image's bytes lie in a tar file, and what its label says."""

    name: str
    shard: Path
    offset: int
    size: int
    label: Any


@data_sources.register("webdataset")
def open_webdataset(entry: WebdatasetData, split: Split, access: Access) -> SplitView:
    """The samples of a split's tar files, in their order; ids are a file's name and the sample's key in it.

    Headers and labels are read once, an image when it is asked for, from its place in the file. Nothing is unpacked,
    and members that are no plain files (links, devices) are not followed.
    """
    place = getattr(entry, split)
    shards = _shards(Path(place))
    origin = _origin(entry, place, shards)
    samples = [sample for shard in shards for sample in _samples(shard, entry)]
    labels = [sample.label for sample in samples]
    if not samples or (split == "test" and entry.label and not any(label is not None for label in labels)):
        missing = f"with a member .{entry.label}" if samples else "with an image"
        raise DataError(
            f"{place}: no sample {missing}",
            hint="Name the members as `image: ENDING` and `label: ENDING`; `label: null` is for data without labels.",
        )
    names, class_names = named(labels, listed_classes(entry.classes), place)

    def read(position: int) -> Any:
        sample = samples[position]
        with refused(f"{sample.shard}: can't be read", PATHS_HINT, OSError), sample.shard.open("rb") as file:
            file.seek(sample.offset)
            return read_image(io.BytesIO(file.read(sample.size)), sample.name)

    return SplitView(
        origin=origin,
        ids=tuple(sample.name for sample in samples),
        class_names=class_names,
        label=lambda position: names[position],
        read=read,
    )


def _shards(place: Path) -> list[Path]:
    """The tar file itself, those of a folder, or those that a pattern matches."""
    if place.is_file():
        return [place]
    files = sorted(place.glob("*.tar") if place.is_dir() else place.parent.glob(place.name))
    if not files:
        raise DataError(
            f"{place}: no tar files",
            hint=f"Name a folder of them, one, or a pattern such as train-*.tar. {PATHS_HINT}",
        )
    return files


def _origin(entry: WebdatasetData, place: str, shards: list[Path]) -> str:
    """The place of a split's tar files: that of the calibration samples, where they are the same ones by name."""
    if place != entry.calibration:
        of_split, other = (
            {file.name: file.resolve() for file in shards_of}
            for shards_of in (shards, _shards(Path(entry.calibration)))
        )
        shared = sorted(set(of_split.values()) & set(other.values()))
        if shared and of_split != other:
            raise DataError(
                f"{place}: {len(shared)} of its files hold calibration samples too, the first is {shared[0]}",
                hint="Name each file for one of both, or the same for both: then other samples are drawn of them.",
            )
        place = entry.calibration if shared else place
    return str(Path(place).resolve())


def _samples(shard: Path, entry: WebdatasetData) -> Iterator[_Sample]:
    endings = [f".{entry.image.lower()}"] if entry.image else SUFFIXES
    groups, labels = _members(shard, entry)
    check_names(groups)
    for key, members in groups.items():
        where = f"{shard.name}/{key}"
        images = [ending for ending in members if f".{ending}" in endings]
        if len(images) == 1:
            member = members[images[0]]
            yield _Sample(where, shard, member.offset_data, member.size, labels.get(key))
        elif images or key in labels:
            raise DataError(
                f"{where}: its images are {', '.join(images) or 'none'}, among {', '.join(members)}",
                hint="Each sample has one; `image: ENDING` says which. Links in a tar file are not followed.",
            )


def _members(
    shard: Path, entry: WebdatasetData
) -> tuple[dict[str, dict[str, tarfile.TarInfo]], dict[str, Any]]:
    """By key of a sample, its members by their ending, and the label of those that have one."""
    wanted = (entry.label or "").lower()
    groups: dict[str, dict[str, tarfile.TarInfo]] = {}
    labels: dict[str, Any] = {}
    hint = "Write it anew; of tar.gz files only the unpacked tar can be read at any place."
    with refused(f"{shard}: no tar file, or damaged", hint), tarfile.open(plain_file(shard), "r:") as tar:
        for member in tar:
            if member.size < 0:  # which would lead tarfile round in circles
                raise DataError(f"{shard}: {member.name} has {member.size} bytes", hint=hint)
            folder, slash, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")
            if not (member.isreg() and stem and ending) or member.issparse():
                continue
            key, ending = f"{folder}{slash}{stem}", ending.lower()
            members = groups.setdefault(key, {})
            if ending in members:
                raise DataError(
                    f"{shard}: {member.name} occurs twice", hint="Every sample needs a key of its own."
                )
            members[ending] = member
            if ending == wanted:
                labels[key] = _label(tar, member, entry)
        # tarfile takes whatever it can't read for the end.
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if any(tar.fileobj.read(tarfile.BLOCKSIZE)):
            raise DataError(f"{shard}: damaged behind byte {tar.offset}", hint=hint)
    return groups, labels


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, entry: WebdatasetData) -> Any:
    """Text as it is; of JSON the value, or of an object that under `key`."""
    hint = f"A member .{entry.label} must hold UTF-8 text, or JSON where it ends so."
    with refused(f"{tar.name!s}: the label {member.name} can't be read", hint, ValueError):
        if member.size > LONGEST_LABEL:
            raise ValueError(f"it has {member.size} bytes")
        stream = tar.extractfile(member)  # a plain file's bytes; nothing is written
        assert stream is not None
        text = stream.read().decode("utf-8-sig").strip()
        value = from_json(text) if str(entry.label).endswith("json") else text or None
    return value.get(entry.key) if isinstance(value, dict) else value
