"""The embedded suite: a small real CLIP and its experts, made here once without network, and kept."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass
from typing import Any

SCALING = 0.3
"""Task Arithmetic's scaling, as in the published benchmarks."""
SHORTEST = 12
"""Characters of the digest that name the folder."""


@dataclass(frozen=True)
class Suite:
    """A CLIP, experts fine-tuned from its image tower, and their pictures, in one folder.

    Attributes:
        folder: where the files are; `suite.json` says what each is and what was measured when they were made.
        tasks: one expert each, sorted.
        digest: names the recipe and the seed.
    """

    folder: pathlib.Path
    tasks: tuple[str, ...]
    digest: str

    def record(self) -> dict[str, Any]:
        """What `suite.json` says: heads, recipe, accuracies, seconds, and a digest of every file."""
        record: dict[str, Any] = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
        return record

    def spec(self) -> dict[str, Any]:
        """The run spec of this suite, with absolute paths: merging by Task Arithmetic, zero-shot heads."""
        folder = self.folder.resolve()
        return {
            "version": 1,
            "name": "embedded",
            "architecture": {"loader": "open-clip", "source": str(folder / CONFIG)},
            "base": {"weights": str(folder / BASE)},
            "merge": {"method": "task_arithmetic", "scaling": SCALING},
            "experts": {task: {"weights": str(folder / expert_file(task))} for task in self.tasks},
            "heads": self.record()["heads"],
            "data": {
                "defaults": {"n": 64, "n_diagnosis": 128, "n_test": "all"},
                **{task: {"kind": "npz", "file": str(folder / data_file(task))} for task in self.tasks},
            },
        }
