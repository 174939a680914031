"""What the host waits for: values of a device that it reads, copies of them, and copies to a device that block."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import driftlens as dl
from driftlens.runs.writer import RunWriter
from tests.accelerator import counted

Waits = tuple[int, int, int]
"""Values read by the host, copies to it, and copies from it that it waits for."""


def waited() -> Waits:
    """Since the devices are there."""
    seen = counted()
    return seen.read, seen.to_host, seen.to_device


def since(before: Waits) -> Waits:
    """The waits that came after others."""
    read, to_host, to_device = (now - then for now, then in zip(waited(), before, strict=True))
    return read, to_host, to_device


@dataclass
class Apart:
    """Calls of functions, and waits in them: each counts for the innermost of these."""

    calls: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> Waits:
        return self.read.total(), self.to_host.total(), self.to_device.total()

    def outside(self, more: Waits, before: Waits) -> Waits:
        """Of so many waits those that were not apart, by what these were in the beginning."""
        read, to_host, to_device = (
            each - (now - then) for each, now, then in zip(more, self.total, before, strict=True)
        )
        return read, to_host, to_device

    def listening(
        self, plain: Callable[..., Any], name: str, check: Callable[..., None] = lambda *_: None
    ) -> Callable[..., Any]:
        """The same function, listened to; `check` gets the reads of each call that ends, and the call once more."""

        @functools.wraps(plain)
        def counting(*given: Any, **named: Any) -> Any:
            before, inside = waited(), self.total
            try:
                made = plain(*given, **named)
                check(since(before)[0], lambda: plain(*given, **named))
                return made
            finally:
                own = self.outside(since(before), inside)
                self.calls[name] += 1
                for counter, number in zip((self.read, self.to_host, self.to_device), own, strict=True):
                    counter[name] += number

        return counting


def of_phases(spec: dict[str, Any], out: Path, apart: Apart | None = None) -> dict[str, Waits]:
    """Waits in every phase of an analysis, but for those that are counted apart meanwhile."""
    seen: dict[str, Waits] = {}
    phase, apart = RunWriter.phase, apart or Apart()

    @contextmanager
    def counting(self: RunWriter, name: str) -> Iterator[dict[str, Any]]:
        before, left_out = waited(), apart.total
        with phase(self, name) as usage:
            yield usage
        seen[name] = apart.outside(since(before), left_out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunWriter, "phase", counting)
        dl.analyze(spec, out=out, device="sim", progress="none")
    return seen


def read_of(inputs: Any) -> None:
    """A value that somebody reads who need not."""
    leaf = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    leaf.sum().item()


def plant(patch: pytest.MonkeyPatch, owner: Any, called: str, of: Callable[..., Any]) -> None:
    """Let a function read a value of what `of` picks from what it was given and what it made."""
    plain = getattr(owner, called)

    def reading(*given: Any, **named: Any) -> Any:
        made = plain(*given, **named)
        read_of(of(given, made))
        return made

    patch.setattr(owner, called, reading)
