"""What a notebook shows of a run."""

from __future__ import annotations

import html
import math

from driftlens.records.listing import current_state
from driftlens.records.run import DriftRun


def final_drift_html(run: DriftRun) -> str:
    """A small table: mean L2 drift of the final feature by task and variant; everything is escaped."""
    caption = f"{run.name} ({run.id}), {current_state(run)}: mean L2 drift of the final feature"
    final = run.layers(layer="final") if run.manifest.layers else run.layers()
    drift = final.pivot(index="task", columns="variant", values="drift_l2_mean")
    header = "".join(f"<th>{html.escape(variant)}</th>" for variant in drift.columns)
    body = "".join(
        f"<tr><th>{html.escape(str(task))}</th>{''.join(_cell(value) for value in values)}</tr>"
        for task, values in zip(drift.index, drift.to_numpy(), strict=True)
    )
    return f"<table><caption>{html.escape(caption)}</caption><tr><th>task</th>{header}</tr>{body}</table>"


def _cell(value: float) -> str:
    return f"<td>{'–' if math.isnan(value) else format(value, '.4g')}</td>"
