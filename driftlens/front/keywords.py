"""Keyword arguments from the fields of requests. Entry point: the decorator `fields_as_keywords`.

@fields_as_keywords(request=SweepRequest)
def sweep(run: PathLike | DriftRun, request: SweepRequest, around: JobArguments) -> Run: ...

sweep("runs/ta8", param={"lam": [0.1]}, progress="none")
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from driftlens.config.requests import Request, check_keywords
from driftlens.utils.distributed import JobContext, Permissions
from driftlens.utils.progress import CancelToken, Mode, ProgressSink, combine_sinks, open_progress_sink

T = TypeVar("T")


@dataclass(frozen=True)
class JobArguments:
    """Keyword arguments of every function that computes: progress, cancellation, device and permissions.

    Attributes:
        progress: display of progress on stderr: auto, rich, jsonl or none.
        on_progress: called with every `ProgressEvent`.
        cancel: a token whose `cancel()` stops the work at the next batch; finished phases are kept.
        device: `auto`, `cpu`, `cuda`, `mps`, `xpu`, or `cuda:1`; overrides the spec.
        offline: True to use only files that were downloaded before.
        trust: True to run Python code that the spec names.
    """

    progress: Mode = "auto"
    on_progress: ProgressSink | None = None
    cancel: CancelToken | None = None
    device: str | None = None
    offline: bool = False
    trust: bool = False

    @property
    def access(self) -> Permissions:
        """Device and permissions of the job."""
        return Permissions(self.device, self.offline, self.trust)

    @contextmanager
    def context(self, live: Callable[[int | None], Any] | None = None) -> Iterator[JobContext]:
        """Yield the job context; progress is displayed inside the block."""
        # A caller's inference mode would forbid gradients. If torch is not imported, the mode is off.
        torch = sys.modules.get("torch")
        with (
            open_progress_sink(self.progress) as shown,
            torch.inference_mode(False) if torch else nullcontext(),
        ):
            yield JobContext(self.access, combine_sinks(shown, self.on_progress), self.cancel, live)


@dataclass(frozen=True)
class QuietJobArguments(JobArguments):
    """The same keyword arguments as `JobArguments`, without a progress display by default."""

    progress: Mode = "none"


def fields_as_keywords(**kinds: type[Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that replaces request parameters by keyword arguments, one per field of the request."""

    def _replace_request_parameters(function: Callable[..., T]) -> Callable[..., T]:
        own = dict(inspect.signature(function).parameters)
        taken = {
            name: kind for name, kind in {**kinds, "around": kinds.get("around", JobArguments)}.items() if name in own
        }
        own = {name: parameter for name, parameter in own.items() if name not in taken}
        fields = {name: _signature_parameters(kind) for name, kind in taken.items()}
        by_field = {field: parameter for parameters in fields.values() for field, parameter in parameters.items()}
        # A function's own parameters come first, and again last, because they win over fields of the same name.
        accepted = own | by_field | own
        if main := next((field for name in taken for field in fields[name] if name != "around"), None):
            accepted[main] = accepted[main].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # A signature requires the order of kinds; within a kind, sorting keeps the order.
        signature = inspect.Signature(sorted(accepted.values(), key=lambda parameter: parameter.kind))

        @functools.wraps(function)
        def _call_with_requests(*positional: Any, **named: Any) -> T:
            # Before `bind`, whose TypeError would not name the most similar keyword.
            check_keywords(function.__name__, named, accepted)
            bound = signature.bind(*positional, **named).arguments
            # Only bound fields are passed, so that a request knows which ones the caller has set.
            parts = {
                name: kind(**{key: bound[key] for key in fields[name] if key in bound}) for name, kind in taken.items()
            }
            return function(**{name: bound[name] for name in own if name in bound}, **parts)

        # Editors and `help` read this attribute, which type checkers don't allow on a function.
        vars(_call_with_requests)["__signature__"] = signature
        return _call_with_requests

    return _replace_request_parameters


def _signature_parameters(kind: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the fields of a request as optional keyword-only parameters of a signature."""
    if not issubclass(kind, Request):
        parameters = inspect.signature(kind).parameters.items()
        return {name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, one in parameters}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return {name: inspect.Parameter(name, keyword, default=value) for name, value in kind.field_defaults().items()}
