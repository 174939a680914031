"""Trains the usual suites anew and puts their weights into the package: `python -m driftlens.suites.packing`."""

from __future__ import annotations

import pathlib
import shutil
import tempfile

from driftlens.base.files import atomic_folder, write_json_atomic
from driftlens.base.progress import Reporter
from driftlens.suites.cache import PACKED, RECORD, Suite, listing, save
from driftlens.suites.embedded import ImageSuite
from driftlens.suites.text import TextSuite


def pack(suite: Suite, out: pathlib.Path) -> None:
    """Write all that the suite's folder holds, without its samples, to `out`, its weights in half precision.

    None of their bits are lost: they were rounded when they were trained.
    """
    from safetensors.torch import load_file

    with atomic_folder(out, replace=True) as partial:
        for name in suite.record()["files"]:
            file, packed = suite.folder / name, partial / name
            if name.startswith("data/"):
                continue
            packed.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".safetensors":
                save({key: tensor.half() for key, tensor in load_file(file).items()}, packed)
            else:
                shutil.copyfile(file, packed)
        write_json_atomic(partial / RECORD, {**suite.record(), "files": listing(partial)})


def main() -> None:
    """Train every suite in a folder of its own, and pack it."""
    for kind in (ImageSuite, TextSuite):
        with tempfile.TemporaryDirectory() as folder:
            suite = kind.made(cache=pathlib.Path(folder), reporter=Reporter(), rebuild=True)
            pack(suite, PACKED / kind.prefix)
            print(f"{kind.prefix}: {suite.record()['test_accuracy']}", flush=True)


if __name__ == "__main__":
    main()
