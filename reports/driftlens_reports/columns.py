"""Text in columns, safe to show in a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], num_names: int) -> list[str]:
    """Lines with columns as wide as a terminal shows them, wide characters counted as two.

    Args:
        rows: the cells, as many in every row.
        num_names: how many columns, from the left, are names and start at the left; the others are numbers.
    """
    from rich.cells import cell_len

    clean = [[printable(cell) for cell in row] for row in rows]
    widths = [max(cell_len(row[column]) for row in clean) for column in range(len(clean[0]))]
    lines = []
    for row in clean:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        names = [cell + gap for cell, gap in zip(row[:num_names], gaps[:num_names], strict=True)]
        numbers = [gap + cell for cell, gap in zip(row[num_names:], gaps[num_names:], strict=True)]
        lines.append("  ".join([*names, *numbers]))
    return lines


def printable(text: str) -> str:
    """`text` on one line, without control characters: a name in a run must not steer the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
