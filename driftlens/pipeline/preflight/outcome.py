"""The outcome of a preflight: its findings and what the work will take, for a program and for a person."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from driftlens.pipeline.preflight.costs import Cost
from driftlens.pipeline.study.findings import Finding


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
