"""What work will take, as numbers and in words; every number is an estimate, and the words say so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """About what a job will take: at most in memory, added to the run directory, and wall-clock time here and now."""

    memory_bytes: int
    disk_bytes: int
    seconds: float

    def text(self) -> str:
        """The same in words."""
        memory, disk = size_text(self.memory_bytes), size_text(self.disk_bytes)
        return f"about {memory} of memory, {disk} on disk, {duration_text(self.seconds)}"


def size_text(count: int) -> str:
    """A number of bytes as a person reads it."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.2g} {unit}" if size < 10 else f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2g} TB" if size < 10 else f"{size:.0f} TB"


def duration_text(seconds: float) -> str:
    """A time as a person reads it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
