"""Permissions and device of a command. Entry points: `Access`, `Context`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from driftlens.utils.distributed import ALONE, Team
from driftlens.utils.errors import SpecError, concerning
from driftlens.utils.progress import CancelToken, ProgressSink, Reporter, all_of


@dataclass(frozen=True)
class Access:
    """Permissions that the caller grants in addition to a spec.

    Attributes:
        device: overrides the spec's device; None keeps it.
        offline: True forbids network access.
        trust: True allows Python code that a spec names.
        team: the processes of the job.
    """

    device: str | None = None
    offline: bool = False
    trust: bool = False
    team: Team = ALONE

    @property
    def words(self) -> list[str]:
        """Options of the command line that allow the same."""
        device = [] if self.device is None else ["--device", self.device]
        return [*device, *["--offline"] * self.offline, *["--trust-code"] * self.trust]

    def function(self, target: str, role: str) -> Callable[..., Any]:
        """Import and return the function `package.module:function`. Importing runs its code.

        Raises:
            SpecError: code is not trusted.
        """
        if not self.trust:
            raise SpecError(
                f"the {role} {target} is Python code, which needs permission to run",
                hint="If you trust it, repeat the command with --trust-code.",
            )
        module, _, name = target.partition(":")
        with concerning(f"the {role} {target}"):
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


@dataclass(frozen=True)
class Context:
    """The environment of a job: permissions, progress sink and cancel token.

    Attributes:
        live: number of calibration samples per task, or None -> the experiment of a run of live modules.
    """

    access: Access = Access()
    on_progress: ProgressSink | None = None
    cancel: CancelToken | None = None
    live: Callable[[int | None], Any] | None = None

    def about(self, prefix: str) -> Context:
        """Return the context of one of several jobs. Its phases are reported with this prefix."""
        sink = self.on_progress
        if sink is None:
            return self
        return replace(self, on_progress=lambda event: sink(replace(event, phase=f"{prefix}: {event.phase}")))

    def reporter(self, *sinks: ProgressSink) -> Reporter:
        """Return a reporter that sends events to these sinks and to the progress sink, and polls the cancel token."""
        return Reporter(all_of(*sinks, self.on_progress), self.cancel)
