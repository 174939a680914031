"""Environment: versions, machine, and what the work cost."""

from __future__ import annotations

from driftlens.records.run import DriftRun
from driftlens_reports.content import Section
from driftlens_reports.sections.outline import TITLES
from driftlens_reports.sections.tabulate import table

_GIB = 2**30


def environment_section(run: DriftRun) -> Section:
    """What the numbers may depend on besides their inputs, and time, memory and energy by phase."""
    manifest = run.manifest
    groups = {
        "version": manifest.versions,
        "platform": manifest.platform,
        "variable": manifest.environment,
        "threads": manifest.threads,
    }
    values = [(group, name, str(value)) for group, found in groups.items() for name, value in found.items()]
    rows = run.resources()
    memory = ["peak_rss_bytes", "peak_gpu_bytes"]
    rows[memory] = rows[memory].astype("Float64") / _GIB
    costs = [tuple(row) for row in rows.astype(object).itertuples(index=False)]
    tables = (
        table(
            "environment", "Software and machine", {"what": "text", "name": "text", "value": "text"}, values
        ),
        table(
            "resources",
            "Time, memory and energy",
            {
                "phase": "text",
                "seconds": "number",
                "peak memory (GiB)": "number",
                "peak GPU memory (GiB)": "number",
                "energy (Wh)": "number",
            },
            costs,
            note="Peak memory is that of the whole process up to the end of the phase.",
        ),
    )
    return Section(
        name="environment", title=TITLES["environment"], tables=tuple(entry for entry in tables if entry.rows)
    )
