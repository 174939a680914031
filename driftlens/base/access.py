"""What opening models and data may do, and where their numbers are computed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens.base.errors import SpecError
from driftlens.base.progress import CancelToken, ProgressSink, Reporter, all_of
from driftlens.base.team import ALONE, Team

if TYPE_CHECKING:
    import torch


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
        try:
            function = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise SpecError(
                f"{target}: the module can't be imported: {error}",
                hint="Install it, or add its folder to PYTHONPATH.",
            ) from error
        if not callable(function):
            raise SpecError(
                f"{target}: {module} has no function {name}", hint="The form is package.module:function."
            )
        checked: Callable[..., Any] = function
        return checked


@dataclass(frozen=True)
class Context:
    """What a job is given that is no part of what it is asked: what it may use, who watches, and who may stop it.

    `live`: calibration samples per task, or None -> the study behind a run of live modules, and its models.
    """

    access: Access = Access()
    on_progress: ProgressSink | None = None
    cancel: CancelToken | None = None
    live: Callable[[int | None], Any] | None = None

    def reporter(self, *sinks: ProgressSink) -> Reporter:
        """Hands events to these sinks and to whoever watches, and polls the token."""
        return Reporter(all_of(*sinks, self.on_progress), self.cancel)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of that name, tried out; `auto` is the GPU if there is one."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        # A name may be known and its device not there: the second GPU of one, another build's.
        torch.zeros(1, device=resolved).cpu()
    except (RuntimeError, AssertionError, ValueError, TypeError, ImportError) as error:
        there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SpecError(
            f"there is no device {str(device)!r} here: {reason}",
            hint=f"Use `auto` or {', '.join(f'`{name}`' for name in there)}.",
        ) from None
    return resolved
