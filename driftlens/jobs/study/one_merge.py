"""One merge, saved: by a method, or as a spec says itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from driftlens.base.access import Context
from driftlens.base.errors import SpecError
from driftlens.spec import load_spec
from driftlens.spec.requests import MergeRequest
from driftlens.spec.run import RunSpec


def save_one(
    source: Path | str | Mapping[str, Any] | RunSpec,
    request: MergeRequest,
    context: Callable[[], AbstractContextManager[Context]],
) -> tuple[str, list[str]]:
    """Make the merge that is asked for, and save it; returns the method and notices.

    Without a method it is the spec's own.

    Raises:
        SpecError: there is no place to save it, settings have no method, or a spec names a merged model instead.
        DriftLensError: as for `merge_experts`.
    """
    method, parameters, out = request.method, request.parameters, request.out
    if out is None:
        raise SpecError(
            "a merge is saved to a file or folder", hint="Give `--out merged.safetensors` or `--out FOLDER`."
        )
    if method is None and parameters:
        raise SpecError("--set belongs to --method", hint="`driftlens doctor --methods` lists the methods.")
    spec = load_spec(source)
    if method is None:
        if spec.merge is None:
            raise SpecError(
                f"the spec of {spec.name!r} names a merged model, and no merge to make",
                hint="Say which with --method, or add `merge:`.",
            )
        method, parameters = spec.merge.method, spec.merge.parameters
    from driftlens.jobs.study.merging import merge_experts

    with context() as opened:
        return method, merge_experts(spec, method, parameters, out, opened, request.out_dtype)
