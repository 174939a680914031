"""The one table that a reader sees, on whatever surface: values unrounded, and how those of each column are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from driftlens.findings.reading import NO_VALUE, Kind, half, printable, written
from driftlens.runs.tables import plain

Cell = str | int | float | bool | None
"""One value at full precision; None where nothing was measured."""
INTERVAL = "95 % interval"
_GAPS = "A dash: not measured."
_DTYPES = {"text": "object", "count": "Int64"}
"""Whole numbers stay whole where some are missing; all others are floats."""


class Part(BaseModel):
    """One part of a report: never changed, and without fields that its version does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True)


class Column(Part):
    """One column of a table."""

    name: str = Field(description="Heading, unique within the table.")
    kind: Kind = Field(description="How its values are written where they are rounded for reading.")
    unit: str = Field(
        default="", description="Unit of its values as the run's tables have it; empty without."
    )


@dataclass(frozen=True)
class Shown:
    """Columns that a reader sees as one: a number with half of its interval, or the two ends of one.

    `at` are their places; `joint` stands between their texts.
    """

    head: str
    kind: Kind
    at: tuple[int, ...]
    joint: str = ""


class Table(Part):
    """Rows of values, unrounded.

    Half of an interval stands under its number's heading with `+-` behind; an interval's two ends stand under headings
    that end in `low` and `high`. Read out, each pair is one cell.
    """

    name: str = Field(description="Name of its own, for file names, anchors and labels.")
    title: str
    note: str = Field(default="", description="What a reader must know about the rows.")
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...] = Field(description="One value per column; null: not measured.")

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        kinds: Mapping[str, Kind],
        rows: Sequence[Sequence[object]],
        note: str = "",
    ) -> Table:
        """A table of these rows; what is missing or not finite becomes None.

        Args:
            name: its name in files and anchors.
            title: its heading.
            kinds: headings and how their values are written, in order.
            rows: one value per column each.
            note: what a reader must know about the rows.
        """
        columns = tuple(
            Column(name=head, kind=kind, unit="1" if kind in ("share", "points") else UNITS.get(head, ""))
            for head, kind in kinds.items()
        )
        cells = tuple(tuple(map(plain, row)) for row in rows)
        return cls(name=name, title=title, note=note, columns=columns, rows=cells)

    @property
    def kinds(self) -> dict[str, Kind]:
        """How the values of each column are written, by heading."""
        return {column.name: column.kind for column in self.columns}

    @property
    def has_gaps(self) -> bool:
        """Whether any value was not measured."""
        return any(cell is None for row in self.rows for cell in row)

    def frame(self) -> pd.DataFrame:
        """The rows under their headings."""
        return pd.DataFrame(
            {
                column.name: pd.Series(
                    [row[at] for row in self.rows], dtype=_DTYPES.get(column.kind, "float64")
                )
                for at, column in enumerate(self.columns)
            }
        )

    def shown(self) -> Iterator[Shown]:
        """The columns as a reader sees them, pairs together, by the heading of the first unless both are ends."""
        places = {column.name: at for at, column in enumerate(self.columns)}
        for name, at in places.items():
            spread, high = places.get(f"{name} +-"), places.get(f"{name.removesuffix(' low')} high")
            kind = self.columns[at].kind
            if spread is not None:
                yield Shown(name, kind, (at, spread), " ± ")
            elif name.endswith(" low") and high is not None:
                yield Shown(INTERVAL, kind, (at, high), " to ")
            elif not name.endswith((" +-", " high")):
                yield Shown(name, kind, (at,))

    def cell(self, row: Sequence[Cell], shown: Shown, gap: str = NO_VALUE) -> list[str]:
        """The texts of one cell: of a pair, those of both unless the first or a half is missing."""
        texts = [written(row[shown.at[0]], shown.kind, gap)]
        if len(shown.at) > 1 and row[shown.at[0]] is not None:
            other = row[shown.at[1]]
            if shown.joint == " to ":
                texts = [texts[0].removesuffix(" %"), written(other, shown.kind, gap)]
            elif isinstance(other, int | float):
                texts.append(half(other, shown.kind))
        return texts

    def texts(self, *, plus_minus: str = "±", gap: str = NO_VALUE) -> list[list[str]]:
        """The headings, then the rows as a reader sees them."""
        columns = [*self.shown()]
        return [
            [shown.head for shown in columns],
            *(
                [shown.joint.replace("±", plus_minus).join(self.cell(row, shown, gap)) for shown in columns]
                for row in self.rows
            ),
        ]

    def notes(self) -> str:
        """The note, and what a dash means where there is one."""
        return " ".join(filter(None, (self.note, _GAPS if self.has_gaps else "")))

    def __repr__(self) -> str:
        heads, *rows = self.texts()
        table = pd.DataFrame(rows, columns=heads).to_string(index=False)
        return "\n".join(map(printable, [self.title, *table.split("\n"), self.notes()]))

    def _repr_html_(self) -> str:
        """The table as a reader sees it, for notebooks."""
        heads, *rows = self.texts()
        table = pd.DataFrame(rows, columns=heads).to_html(index=False)
        return f"<b>{escape(self.title)}</b>{table}<p>{escape(printable(self.notes()))}</p>"


UNITS = {
    **dict.fromkeys(("L2 drift", "L2 drift +-", "mean drift", "10 % quantile", "90 % quantile"), "feature"),
    **dict.fromkeys(("mismatch", "propagation", "drift"), "feature"),
    **dict.fromkeys(("score drift", "secant", "directional", "spectral", "certified"), "score"),
    **dict.fromkeys(("relative drift", "of base distance", "drift / base distance", "amplification"), "1"),
    **dict.fromkeys(
        ("cosine", "cosine +-", "mean cosine", "cosine of task vectors", "cosine gain", "cka", "cross term"),
        "1",
    ),
    **dict.fromkeys(("accuracy", "score", "value", "share of final drift"), "1"),
    **dict.fromkeys(
        ("n", "test n", "samples", "test samples", "calibration", "diagnosis", "test"), "samples"
    ),
    **{"seconds": "s", "peak memory (GiB)": "GiB", "peak GPU memory (GiB)": "GiB", "energy (Wh)": "Wh"},
}
"""Units of columns by heading, in the words of the run's schema; a heading means the same in every table."""
