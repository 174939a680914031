"""Frames and rows as the tables of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from driftlens.records.tables import plain
from driftlens_reports.content import Cell, Column, Kind, Table

_UNITS = {
    **dict.fromkeys(("L2 drift", "drift +-", "mean drift", "10 % quantile", "90 % quantile"), "feature"),
    **dict.fromkeys(("mismatch", "propagation", "drift"), "feature"),
    **dict.fromkeys(("score drift", "secant", "directional", "spectral", "certified"), "score"),
    **dict.fromkeys(("relative drift", "of base distance", "drift / base distance", "amplification"), "1"),
    **dict.fromkeys(
        ("cosine", "mean cosine", "cosine of task vectors", "cosine gain", "cka", "cross term"), "1"
    ),
    **dict.fromkeys(("accuracy", "value", "share of final drift"), "1"),
    **dict.fromkeys(
        ("n", "test n", "samples", "test samples", "calibration", "diagnosis", "test"), "samples"
    ),
    **{"seconds": "s", "peak memory (GiB)": "GiB", "peak GPU memory (GiB)": "GiB", "energy (Wh)": "Wh"},
}
"""Units of columns by heading, in the words of the run's schema; a heading means the same in every table."""


def table(
    name: str, title: str, columns: Mapping[str, Kind], rows: Sequence[Sequence[object]], *, note: str = ""
) -> Table:
    """A table of these rows; what is missing or not finite becomes None.

    Args:
        name: its name in files and anchors.
        title: its heading.
        columns: headings and how their values are written, in order.
        rows: one value per column each.
        note: what a reader must know about the rows.
    """
    heads = tuple(
        Column(name=head, kind=kind, unit="1" if kind == "share" else _UNITS.get(head, ""))
        for head, kind in columns.items()
    )
    return Table(
        name=name,
        title=title,
        note=note,
        columns=heads,
        rows=tuple(tuple(plain(value) for value in row) for row in rows),
    )


def frame_table(name: str, title: str, frame: pd.DataFrame) -> Table:
    """Every row of a frame as a table, with the kind of each column read off its type."""
    columns = tuple(
        Column(name=str(head), kind=_kind(frame[head]), unit=_UNITS.get(str(head), ""))
        for head in frame.columns
    )
    values = [_plain_column(frame[head]) for head in frame.columns]
    return Table(name=name, title=title, columns=columns, rows=tuple(zip(*values, strict=True)))


def _kind(values: pd.Series) -> Kind:
    if pd.api.types.is_bool_dtype(values) or not pd.api.types.is_numeric_dtype(values):
        return "text"
    return "count" if pd.api.types.is_integer_dtype(values) else "number"


def _plain_column(values: pd.Series) -> list[Cell]:
    return [plain(value) for value in values.tolist()]
