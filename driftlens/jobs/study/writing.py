"""Writing a run from several processes: the first one writes, the others keep up with what it says of the run."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from driftlens.base.progress import ProgressEvent
from driftlens.base.team import Team
from driftlens.runs.lock import RunLock
from driftlens.runs.manifest import Manifest, PhaseInfo
from driftlens.runs.writer import RunWriter


@contextmanager
def writing(team: Team, opened: Callable[[], RunWriter]) -> Iterator[RunWriter]:
    """The writer of a run, open for the length of the block; all processes enter it and leave it together."""
    team.meet()  # what others still read before they come here must not change
    with ExitStack() as stack:
        held: list[RunWriter] = []

        def begun() -> tuple[pathlib.Path, Manifest]:
            held.append(stack.enter_context(opened()))
            return held[0].folder, held[0].manifest

        folder, manifest = team.once(begun)
        yield held[0] if held else Follower(folder, manifest)
    team.meet()  # the run is finished now


def lead(team: Team, writer: RunWriter, work: Callable[[], object]) -> None:
    """Work that the first process does alone, because it writes; the others know the manifest afterwards."""

    def done() -> Manifest:
        work()
        return writer.manifest

    writer.manifest = team.once(done)


class Follower(RunWriter):
    """Stands for the writer where nothing is written: what is said of the run is noted, and so what is done."""

    def __init__(self, folder: pathlib.Path, manifest: Manifest) -> None:
        """Of the run in a folder, whose manifest is this."""
        super().__init__(folder, manifest, RunLock(folder))

    def append(self, *_: Any, **__: Any) -> None:
        """Rows are the first process's."""

    def fill(self, *_: Any) -> None:
        """So are their columns."""

    def drop(self, *_: Any) -> None:
        """So is what goes."""

    def write_features(self, *_: Any) -> None:
        """So are features."""

    def warn(self, text: str) -> None:
        """Note it."""
        self.describe(warnings=[text])

    def notice(self, text: str) -> None:
        """Note it."""
        self.describe(notices=[text])

    def event(self, event: str, **details: object) -> None:
        """Nobody is told."""

    def progress(self, event: ProgressEvent) -> None:
        """Nobody is told."""

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """A block that does this process's share of a phase."""
        yield {}
        self._set_phase(name, PhaseInfo("done", 0.0, ""))

    @contextmanager
    def file(self, relative: str) -> Iterator[pathlib.Path]:
        """Refused: only what `lead` does writes files."""
        assert not relative, "files are the first process's"
        yield self.folder

    def _set_phase(self, name: str, phase: PhaseInfo) -> None:
        self.describe(phases={name: phase})

    def _save(self, **changes: Any) -> None:
        self.manifest = dataclasses.replace(self.manifest, **changes)
