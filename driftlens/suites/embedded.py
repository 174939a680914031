"""The embedded suite: a small real CLIP and its experts, made here once without network, and kept."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens.errors import SpecError
from driftlens.files import atomic_folder, sha256_of
from driftlens.progress import Reporter

if TYPE_CHECKING:
    from driftlens.suites.recipe import Recipe

CONFIG, BASE, RECORD = "open_clip_config.json", "base.safetensors", "suite.json"
FORMAT = 1
"""Version of the layout and of the record."""
SCALING = 0.3
"""Task Arithmetic's scaling, as in the published benchmarks."""
_NAME_LENGTH = 12
"""Characters of the digest in the folder's name."""
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Suite:
    """A CLIP, experts fine-tuned from its image tower, and their pictures, in one folder.

    Attributes:
        folder: where the files are; `suite.json` says what was measured when they were made.
        tasks: one expert each, sorted.
        digest: names the recipe and the seed.
    """

    folder: pathlib.Path
    tasks: tuple[str, ...]
    digest: str

    def record(self) -> dict[str, Any]:
        """What `suite.json` says: heads, recipe, test accuracies, seconds, size and SHA-256 of every file."""
        return read_record(self.folder)

    def spec(self) -> dict[str, Any]:
        """The run spec of this suite, all paths absolute: Task Arithmetic of the experts, zero-shot heads."""
        folder = self.folder.resolve()
        return {
            "version": 1,
            "name": "embedded",
            "architecture": {"loader": "open-clip", "source": str(folder / CONFIG)},
            "base": {"weights": str(folder / BASE)},
            "merge": {"method": "task_arithmetic", "scaling": SCALING},
            "experts": {task: {"weights": str(folder / expert_file(task))} for task in self.tasks},
            "heads": self.record()["heads"],
            # Jacobians are the dear part; a demo is about the way there, not about the third digit.
            "metrics": {"jacobian": {"samples": 8}},
            "data": {
                "defaults": {"n": 64, "n_diagnosis": 128, "n_test": "all"},
                **{task: {"kind": "npz", "file": str(folder / data_file(task))} for task in self.tasks},
            },
        }


def embedded_suite(
    *,
    seed: int = 0,
    cache: pathlib.Path | None = None,
    reporter: Reporter | None = None,
    rebuild: bool = False,
    recipe: Recipe | None = None,
) -> Suite:
    """The suite from the cache; drawn and trained first where there is none, or where the one there is damaged.

    Building takes a few minutes on two cores. Of several processes that want the same suite one builds it, and the
    others wait.

    Args:
        seed: of everything random; each seed is a suite of its own.
        cache: folder that holds suites; the user's cache folder if left out.
        reporter: told what is being drawn or trained; also asked whether to stop.
        rebuild: whether to build it anew even if a whole one is there.
        recipe: sizes and schedules, if not the usual ones.

    Raises:
        SpecError: the seed is negative.
        RunError: the cache can't be written to, or the disk is full.
        Cancelled: somebody asked to stop; no half of a suite is left behind.
    """
    from driftlens.suites.build import build
    from driftlens.suites.recipe import Recipe

    if seed < 0:
        raise SpecError(f"the seed is {seed}", hint="Give a whole number from 0 upwards.")
    recipe, reporter = recipe or Recipe(), reporter or Reporter()
    digest = recipe.digest(seed)
    folder = (cache or _user_cache()) / f"embedded-{digest[:_NAME_LENGTH]}"
    if rebuild or not is_whole(folder, digest):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _building(folder, reporter):
            # Asked again: another process may have built it while this one waited.
            if rebuild or not is_whole(folder, digest):
                with atomic_folder(folder, replace=True) as partial:
                    build(partial, recipe, seed, reporter)
    return Suite(folder, tuple(sorted(read_record(folder)["heads"])), digest)


def _user_cache() -> pathlib.Path:
    import platformdirs

    return platformdirs.user_cache_path("driftlens")


@contextmanager
def _building(folder: pathlib.Path, reporter: Reporter) -> Iterator[None]:
    """The exclusive right to build `folder`; the reporter may cancel the wait for it."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_POLL_SECONDS)
        except Timeout:
            reporter.step("wait", 0, None, "another process is building the embedded suite")
    try:
        yield
    finally:
        lock.release()


def expert_file(task: str) -> str:
    """Where the expert's image tower lies in the folder."""
    return f"experts/{task}.safetensors"


def data_file(task: str) -> str:
    """Where the pictures of a task lie in the folder."""
    return f"data/{task}.npz"


def file_digests(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file in the folder, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in files
    }


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """What `suite.json` says.

    Raises:
        OSError: there is no such file, or it can't be read.
        ValueError: it holds no JSON object.
    """
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{folder / RECORD} holds no JSON object")
    return record


def is_whole(folder: pathlib.Path, digest: str) -> bool:
    """Whether the folder is the whole suite called `digest`.

    Every file is read: it takes well under a second, and a suite with a damaged file would give wrong numbers.
    """
    try:
        record = read_record(folder)
        return (record["format"], record["digest"]) == (FORMAT, digest) and all(
            sha256_of(folder / name) == stated["sha256"] for name, stated in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
