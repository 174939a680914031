"""What opening models and data may do, and on which device their numbers are computed."""

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
    """What the caller allows beyond what a spec says; `device` goes over the spec's, None leaves it to the spec."""

    device: str | None = None
    offline: bool = False
    trust: bool = False
    team: Team = ALONE

    @property
    def words(self) -> list[str]:
        """Options of the command line that allow the same."""
        device = [] if self.device is None else ["--device", self.device]
        return [*device, *["--offline"] * self.offline, *["--trust-code"] * self.trust]

    def function(self, target: str, what: str) -> Callable[..., Any]:
        """The function `package.module:function`; importing it runs its code."""
        if not self.trust:
            raise SpecError(
                f"the {what} {target} is Python code, which runs only when it is trusted",
                hint="If you trust it, repeat the command with --trust-code.",
            )
        module, _, name = target.partition(":")
        with concerning(f"the {what} {target}"):
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


@dataclass(frozen=True)
class Context:
    """What a job is given that is no part of what it is asked: what it may use, who watches, and who may stop it.

    `live`: calibration samples per task, or None -> the study behind a run of live modules, and its models.
    """

    access: Access = Access()
    on_progress: ProgressSink | None = None
    cancel: CancelToken | None = None
    live: Callable[[int | None], Any] | None = None

    def about(self, what: str) -> Context:
        """The same for a job that is one of several: its phases are told as those of `what`."""
        sink = self.on_progress
        if sink is None:
            return self
        return replace(self, on_progress=lambda event: sink(replace(event, phase=f"{what}: {event.phase}")))

    def reporter(self, *sinks: ProgressSink) -> Reporter:
        """Hands events to these sinks and to whoever watches, and polls the token."""
        return Reporter(all_of(*sinks, self.on_progress), self.cancel)
