"""What a preflight finds and what the work will take, for a program and for a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from driftlens.base.errors import DriftLensError
from driftlens.jobs.preflight.processes import Processes
from driftlens.jobs.preflight.rehearsal import Cost, Rehearsed
from driftlens.jobs.study.suspicion import Finding, problem

T = TypeVar("T")


@dataclass
class Preflight:
    """All checks of one spec or calibration, each of which becomes a finding instead of stopping at the first error.

    There is no `cost` where problems kept it from being estimated, or nobody asked.
    """

    findings: list[Finding] = field(default_factory=list)
    cost: Cost | None = None
    processes: Processes | None = None

    def ok(self, subject: str, text: str, hint: str = "") -> None:
        """Say that something is as it should be."""
        self.findings.append(Finding("ok", subject, text, hint))

    def notice(self, subject: str, text: str, hint: str = "") -> None:
        """Say what the reader should judge."""
        self.findings.append(Finding("notice", subject, text, hint))

    def problem(self, subject: str, error: DriftLensError) -> None:
        """Say what must be dealt with first."""
        self.findings.append(problem(subject, error))

    def attempt(self, subject: str, work: Callable[[], T]) -> T | None:
        """What `work` returns, or None after filing the error that it raised on purpose."""
        try:
            return work()
        except DriftLensError as error:
            self.problem(subject, error)
            return None

    def estimate(self, rehearse: Callable[[], Rehearsed]) -> Rehearsed | None:
        """Set `cost` by a rehearsal; where that is not possible, say why there is no estimate."""
        try:
            rehearsal = rehearse()
            self.cost = rehearsal.cost
        except (DriftLensError, MemoryError) as error:
            reason = error.message if isinstance(error, DriftLensError) else "there is too little memory"
            self.notice("estimate", f"none, as the work could not be rehearsed: {reason}")
            return None
        return rehearsal

    @property
    def problems(self) -> list[Finding]:
        """The findings that must be dealt with first."""
        return [finding for finding in self.findings if finding.level == "problem"]

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
            **({} if self.processes is None else {"processes": dataclasses.asdict(self.processes)}),
        }

    def text(self) -> str:
        """The same for a person: aligned lines, the estimate, and `ready` or the number of problems last."""
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = [line for finding in self.findings for line in _lines(finding, width)]
        if self.cost is not None:
            lines += ["", f"estimate: {self.cost.text()}"]
        if self.processes is not None:
            lines += [self.processes.text()]
        count = len(self.problems)
        return "\n".join([*lines, f"{count} problem{'s' if count > 1 else ''}" if count else "ready"])


def _lines(finding: Finding, width: int) -> list[str]:
    level = "PROBLEM" if finding.level == "problem" else finding.level
    first, *others = [*finding.text.splitlines(), *finding.hint.splitlines()]
    start = f"{level:<7}  {finding.subject:<{width}}  "
    return [start + first, *(" " * len(start) + line for line in others)]
