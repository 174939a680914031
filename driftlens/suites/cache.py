"""Suites that are made here once, without network, and kept: what decides what they are, and how they are built."""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from driftlens.base.errors import RunError, SpecError
from driftlens.base.files import Guard, atomic_folder, sha256_of, write_json_atomic
from driftlens.base.progress import Reporter
from driftlens.base.registry import Registry
from driftlens.suites.drawing import DrawnTask
from driftlens.suites.recipe import AnyRecipe
from driftlens.suites.training import Worker, work_together
from driftlens.suites.writing import WrittenTask

RECORD = "suite.json"
FORMAT = 2
"""Version of the layout and of the record."""
PACKED = pathlib.Path(__file__).with_name("weights")
"""What the package holds of each usual suite in a folder named after its kind: all but the samples."""
SCALING = 0.3
"""Task Arithmetic's scaling, as in the published benchmarks."""
DRAWN = "drawn"
"""Folder for samples as they come, until all is built."""
_DRAWN = ("base", "train and test")
"""What is drawn of every task, each at once."""
_NAME_LENGTH = 12
"""Characters of the digest in the folder's name."""
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Suite(ABC):
    """A base, experts fine-tuned from it, and samples of their tasks, in one folder named after recipe and seed.

    `suite.json` says what was measured when they were made. A kind of suite says what it is called, its usual recipe,
    its tasks, and where in the folder its architecture and base are, and an expert, with `{}` for its task.
    """

    folder: pathlib.Path
    digest: str
    prefix: ClassVar[str]
    usual: ClassVar[AnyRecipe]
    drawn: ClassVar[Registry[DrawnTask] | Mapping[str, WrittenTask]]
    loader: ClassVar[str]
    source: ClassVar[str]
    base: ClassVar[str]
    expert: ClassVar[str]

    @classmethod
    def made(
        cls,
        *,
        seed: int = 0,
        cache: pathlib.Path | None = None,
        reporter: Reporter | None = None,
        rebuild: bool = False,
        recipe: AnyRecipe | None = None,
        apart: bool = False,
    ) -> Self:
        """The suite from the cache; unpacked or built, by one process, where there is none or a damaged one.

        The package holds the weights of the usual recipe's seed 0; others are trained, in minutes, and so is that one
        with `rebuild`. With `apart` two processes draw its samples.
        """
        import platformdirs

        if seed < 0:
            raise SpecError(f"the seed is {seed}", hint="Give a whole number from 0 upwards.")
        recipe, reporter = recipe or cls.usual, reporter or Reporter()
        digest = recipe.digest(seed)
        folder = (
            cache or platformdirs.user_cache_path("driftlens")
        ) / f"{cls.prefix}-{digest[:_NAME_LENGTH]}"
        suite = cls(folder, digest)
        if rebuild or not suite.is_whole():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _building(folder, reporter):
                # Asked again: another process may have built it while this one waited.
                if rebuild or not suite.is_whole():
                    with atomic_folder(folder, replace=True) as partial:
                        is_packed = not rebuild and cls.packed().get("digest") == digest
                        if is_packed:
                            cls.unpack(partial, recipe, seed, reporter, apart=apart)
                        else:
                            cls.build(partial, recipe, seed, reporter)
        return suite

    @classmethod
    def packed(cls) -> dict[str, Any]:
        """The record of what the package holds, with size and SHA-256 of every file as it is there; or nothing."""
        file = PACKED / cls.prefix / RECORD
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return record

    @classmethod
    def unpack(
        cls, folder: pathlib.Path, recipe: Any, seed: int, reporter: Reporter, *, apart: bool = False
    ) -> None:
        """Fill an empty folder with what the package holds, every number as it was trained, and samples drawn anew."""
        from safetensors.torch import load

        packed = cls.packed()
        (folder / "data").mkdir()
        for name, stated in packed["files"].items():
            content = (PACKED / cls.prefix / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != stated["sha256"]:
                raise RunError(
                    f"{PACKED / cls.prefix / name} is not the file that the package was made with",
                    hint="Install driftlens again.",
                )
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".safetensors"):
                save({key: tensor.float() for key, tensor in load(content).items()}, folder / name)
            else:
                (folder / name).write_bytes(content)
        if apart:
            reporter.step("draw", 0, None, "starting two processes")
            heard = Heard({"draw": (len(cls.drawn), 1)}, reporter)
            work_together(cls.draw_kept, (folder, recipe, seed), heard, num_values=0)
        else:
            for name in reporter.track([*cls.drawn], "draw"):
                cls.draw(folder, name, recipe, seed)
        cls._vouch(folder, packed)

    @classmethod
    def build(cls, folder: pathlib.Path, recipe: Any, seed: int, reporter: Reporter) -> None:
        """Fill an empty folder, with a record that vouches for every file at last."""
        reporter.step("draw", 0, None, "starting two processes")
        for name in (DRAWN, "data", "experts"):
            (folder / name).mkdir()
        sizes = {
            "draw": (len(cls.drawn) * len(_DRAWN), 1),
            "train base": (1, recipe.base.steps),
            "train experts": (len(cls.drawn), recipe.expert.steps),
        }
        heard = Heard(sizes, reporter)
        num_values = sum(parameter.numel() for parameter in cls.untrained(recipe).parameters())
        work_together(cls.work, (folder, recipe, seed), heard, num_values)
        shutil.rmtree(folder / DRAWN)
        measured = {name: heard.measured.pop(name) for name in cls.drawn}
        record = {
            "format": FORMAT,
            "digest": recipe.digest(seed),
            "seed": seed,
            "recipe": asdict(recipe),
            **heard.measured,
            "heads": {name: cls.head(name) for name in cls.drawn},
            "test_accuracy": measured,
            "seconds": heard.seconds,
        }
        cls._vouch(folder, record)

    @staticmethod
    def _vouch(folder: pathlib.Path, record: dict[str, Any]) -> None:
        """Write the record, with size and SHA-256 of every file."""
        write_json_atomic(folder / RECORD, {**record, "files": listing(folder)})

    @staticmethod
    @abstractmethod
    def untrained(recipe: Any, seed: int = 0) -> Any:
        """A model as it is before its training."""

    @classmethod
    def draw_all(cls, worker: Worker, folder: pathlib.Path, recipe: Any, seed: int) -> None:
        """In every worker: its share of all samples, which are there when this returns."""
        for name, what in worker.jobs(list(itertools.product(cls.drawn, _DRAWN))):
            (cls.draw_for_base if what == "base" else cls.draw)(folder, name, recipe, seed)
            worker.tell("draw", f"{name}, {what}", 1)
        worker.meet()

    @classmethod
    def draw_kept(cls, worker: Worker, folder: pathlib.Path, recipe: Any, seed: int) -> None:
        """In every worker: its share of the samples that are kept."""
        for name in worker.jobs(list(cls.drawn)):
            cls.draw(folder, name, recipe, seed)
            worker.tell("draw", name, 1)

    @staticmethod
    @abstractmethod
    def draw(folder: pathlib.Path, task: str, recipe: Any, seed: int) -> None:
        """Write a task's samples for its expert and for testing."""

    @staticmethod
    @abstractmethod
    def draw_for_base(folder: pathlib.Path, task: str, recipe: Any, seed: int) -> None:
        """Write a task's samples for the base, which are not kept."""

    @staticmethod
    @abstractmethod
    def work(worker: Worker, folder: pathlib.Path, recipe: Any, seed: int) -> None:
        """In every worker: its share of all the work."""

    @staticmethod
    @abstractmethod
    def head(task: str) -> dict[str, Any]:
        """How the spec says what a task's head is."""

    @staticmethod
    @abstractmethod
    def data(folder: pathlib.Path, task: str) -> dict[str, Any]:
        """How the spec says where a task's samples are."""

    def record(self) -> dict[str, Any]:
        """What `suite.json` says: heads, recipe, test accuracies, seconds, size and SHA-256 of every file."""
        record: dict[str, Any] = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
        return record

    def is_whole(self) -> bool:
        """Whether every file is there as it was written; all are read: a damaged one would give wrong numbers."""
        try:
            record = self.record()
            return (record["format"], record["digest"]) == (FORMAT, self.digest) and all(
                sha256_of(self.folder / name) == stated["sha256"] for name, stated in record["files"].items()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    @property
    def tasks(self) -> tuple[str, ...]:
        """One expert each, sorted."""
        return tuple(sorted(self.record()["heads"]))

    def spec(self) -> dict[str, Any]:
        """The run spec of this suite, all paths absolute: Task Arithmetic of the experts."""
        folder = self.folder.resolve()
        experts = {task: {"weights": str(folder / self.expert.format(task))} for task in self.tasks}
        heads = self.record()["heads"]
        return {
            "version": 1,
            "name": self.prefix,
            "architecture": {"loader": self.loader, "source": str(folder / self.source)},
            "base": {"weights": str(folder / self.base)},
            "merge": {"method": "task_arithmetic", "scaling": SCALING},
            "experts": experts,
            # A language model has its own.
            **({"heads": heads} if all("templates" in head for head in heads.values()) else {}),
            # Jacobians are the dear part; a demo is about the way there, not about the third digit.
            "metrics": {"jacobian": {"samples": 8}},
            "data": {
                "defaults": {"n": 64, "n_diagnosis": 128, "n_test": "all"},
                **{task: self.data(folder, task) for task in self.tasks},
            },
        }


@contextmanager
def _building(folder: pathlib.Path, reporter: Reporter) -> Iterator[None]:
    """The exclusive right to build `folder`; the reporter may cancel the wait for it."""
    lock = Guard(folder.with_name(f"{folder.name}.lock"), _POLL_SECONDS)
    while not lock.is_held:
        try:
            lock.acquire()
        except TimeoutError:
            reporter.step("wait", 0, None, "another process is building the embedded suite")
    try:
        yield
    finally:
        lock.release()


class Heard:
    """What the workers have told: progress, which is passed on, and what they have measured."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]], reporter: Reporter) -> None:
        """`sizes` says of every phase how many things are made in it, and the steps that each takes."""
        self.measured: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self._reporter = reporter
        self._sizes = sizes
        self._done: dict[str, dict[str, int]] = {phase: {} for phase in self._sizes}
        self._began = time.monotonic()

    def __call__(self, phase: str, name: str, step: int, value: Any = None) -> None:
        """So many steps of the thing called `name` are done; `value` is the loss, or in no phase what was measured."""
        if not phase:
            self.measured[name] = value
            return
        things, steps = self._sizes[phase]
        done = self._done[phase]
        if not done:
            self._reporter.step(phase, 0, things * steps)
        done[name] = step
        finished = sum(each == steps for each in done.values())
        label = f"{name} ({finished} of {things} done)" if things > 1 and steps > 1 else name
        metrics = {} if value is None else {"loss": value}
        self._reporter.step(phase, sum(done.values()), things * steps, label, **metrics)
        if finished == things:
            self.seconds[phase] = round(time.monotonic() - self._began, 1)
            self._began = time.monotonic()


def listing(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below, by path."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rounded(model: nn.Module) -> None:
    """Round all weights in place to what half precision holds, so that they can be packed without loss."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.half())


def save(weights: Mapping[str, Tensor], path: pathlib.Path) -> None:
    """Write tensors as safetensors."""
    from safetensors.torch import save_file

    kept = {key: tensor.detach().contiguous() for key, tensor in weights.items()}
    save_file(kept, path, metadata={"format": "pt"})  # without which transformers takes no file
