"""The Python front door: `dl.analyze`, for specs and for live modules."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from driftlens.errors import SpecError
from driftlens.files import PathLike
from driftlens.progress import CancelToken, ProgressSink
from driftlens.progress_sinks import sink_for

if TYPE_CHECKING:
    from torch import nn

    from driftlens.records.run import DriftRun
    from driftlens.spec import RunSpec

Progress = Literal["auto", "rich", "jsonl", "none"]


def analyze(
    spec: Path | str | Mapping[str, Any] | RunSpec | None = None,
    *,
    out: PathLike | None = None,
    merged: nn.Module | None = None,
    experts: Mapping[str, nn.Module] | None = None,
    data: Mapping[str, Any] | None = None,
    base: nn.Module | None = None,
    progress: Progress = "auto",
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
    resume: bool = False,
    force: bool = False,
    **options: Any,
) -> DriftRun:
    """Measure feature drift and write a run directory, from a spec or from live modules.

        run = dl.analyze("run.yaml", out="runs/ta8")
        run = dl.analyze(base=b, merged=m, experts={"cars": e}, data={"cars": loader}, out="runs/live")

    Args:
        spec: a spec file, its values, or a checked spec; leave it out to pass modules.
        out: the run directory; `runs/<name>` if left out.
        merged: the merged model, a live module.
        experts: one live module per task.
        data: per task a tensor, Dataset, DataLoader or iterable of batches.
        base: the common base, if there is one.
        progress: how progress is shown on stderr.
        on_progress: called with every `ProgressEvent`, besides.
        cancel: a token whose `cancel()` stops the work at the next batch.
        resume: go on where an interrupted run of the same spec stopped.
        force: replace the run that is there.
        **options: with a spec, those of `driftlens.pipeline.analyze.job.analyze` (device, offline, trust, overrides);
            with modules, those of `driftlens.pipeline.analyze.live.live_study` (heads, layers, blocks, pool, n,
            batch_size, cka, jacobian, device, seed, name).

    Raises:
        SpecError: both a spec and modules are given, or neither.
        DriftLensError: see the tree in `driftlens.errors`.
    """
    with ExitStack() as stack:
        shown = stack.enter_context(sink_for(progress))

        def sink(event: Any) -> None:
            shown(event)
            if on_progress is not None:
                on_progress(event)

        if spec is not None and merged is None and experts is None and data is None:
            # Reading a spec needs libraries that a machine which only computes may lack.
            from driftlens.pipeline.analyze.job import analyze as analyze_spec
            from driftlens.spec import load_spec

            resolved = load_spec(spec)
            return analyze_spec(
                resolved,
                out=out if out is not None else Path("runs") / resolved.name,
                resume=resume,
                force=force,
                on_progress=sink,
                cancel=cancel,
                **options,
            )
        if spec is not None or merged is None or experts is None or data is None:
            raise SpecError("pass either a spec, or merged=, experts= and data=")
        from driftlens.pipeline.analyze.live import analyze_study, live_study

        study = live_study(merged=merged, experts=experts, data=data, base=base, **options)
        place = out if out is not None else Path("runs") / study.name
        return analyze_study(study, out=place, force=force, on_progress=sink, cancel=cancel)
