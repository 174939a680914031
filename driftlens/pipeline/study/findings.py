"""What a preflight found: one finding per check, collected instead of stopping at the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from driftlens.errors import DriftLensError, IncompatibleModelsError
from driftlens.pipeline.preflight.costs import Cost

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


@dataclass(frozen=True)
class Preflight:
    """The outcome of all checks of one spec.

    Attributes:
        findings: in the order of the checks.
        cost: what an analysis will take; None where problems kept it from being estimated.
    """

    findings: tuple[Finding, ...]
    cost: Cost | None = None

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that must be dealt with first."""
        return tuple(finding for finding in self.findings if finding.level == "problem")

    @property
    def exit_code(self) -> int:
        """0 without problems, otherwise the code of the gravest."""
        return max((finding.exit_code for finding in self.problems), default=0)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "ready": not self.problems,
            "exit_code": self.exit_code,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "estimate": None if self.cost is None else dataclasses.asdict(self.cost),
        }

    def text(self) -> str:
        """The same for a person: aligned lines, the estimate, and `ready` or the number of problems last."""
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = [line for finding in self.findings for line in _lines(finding, width)]
        if self.cost is not None:
            lines += ["", f"estimate: {self.cost.text()}"]
        count = len(self.problems)
        return "\n".join([*lines, f"{count} problem{'s' if count > 1 else ''}" if count else "ready"])


def _lines(finding: Finding, width: int) -> list[str]:
    level = "PROBLEM" if finding.level == "problem" else finding.level
    first, *others = [*finding.text.splitlines(), *finding.hint.splitlines()]
    start = f"{level:<7}  {finding.subject:<{width}}  "
    return [start + first, *(" " * len(start) + line for line in others)]
