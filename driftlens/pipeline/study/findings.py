"""What a preflight found: one finding per check, collected instead of stopping at the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from driftlens.errors import DriftLensError, IncompatibleModelsError

T = TypeVar("T")

Level = Literal["ok", "notice", "problem"]
"""A problem keeps an analysis from running, or from meaning anything; a notice is for the reader to judge."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        level: how bad it is.
        subject: what was looked at: a model, a task's data, the device.
        text: what was found, in a sentence that names its subject.
        hint: what to do about it.
        exit_code: of the command if this is the gravest problem; 0 unless it is a problem.
    """

    level: Level
    subject: str
    text: str
    hint: str = ""
    exit_code: int = 0


def problem(subject: str, error: DriftLensError) -> Finding:
    """The finding that an error makes."""
    return Finding("problem", subject, error.message, error.hint, error.exit_code)


def incompatible(subject: str, text: str, hint: str) -> Finding:
    """The finding that something doesn't belong to the models beside it."""
    return problem(subject, IncompatibleModelsError(text, hint=hint))


@dataclass
class Collector:
    """Findings in the order in which they were made."""

    findings: list[Finding] = field(default_factory=list)

    def ok(self, subject: str, text: str, hint: str = "") -> None:
        """Say that something is as it should be."""
        self.findings.append(Finding("ok", subject, text, hint))

    def notice(self, subject: str, text: str, hint: str = "") -> None:
        """Say what the reader should judge."""
        self.findings.append(Finding("notice", subject, text, hint))

    def attempt(self, subject: str, work: Callable[[], T]) -> T | None:
        """What `work` returns, or None after filing the error that it raised on purpose."""
        try:
            return work()
        except DriftLensError as error:
            self.findings.append(problem(subject, error))
            return None

    @property
    def has_problems(self) -> bool:
        """Whether anything so far keeps an analysis from running."""
        return any(finding.level == "problem" for finding in self.findings)
