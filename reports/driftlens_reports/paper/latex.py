"""LaTeX tables for exhibits and reports, written by pandas' `Styler`; names are set literally."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pandas as pd

from driftlens.findings.reading import printable, with_code

_SPECIAL = {
    **{letter: f"\\{letter}" for letter in "{}$&#_%"},
    # At the start of a line these would be read as arguments of the line break before.
    **{letter: f"{{{letter}}}" for letter in "[]*"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "…": r"\dots{}",
    "\ufffd": "?",
    "−": "$-$",
    **{"±": r"$\pm$", "×": r"$\times$", "≤": r"$\le$", "≥": r"$\ge$"},
    **{"λ": r"$\lambda$", "ρ": r"$\rho$", "α": r"$\alpha$"},
}
_LITERAL = {"-": "{-}", "'": r"\textquotesingle{}", ",": r",\allowbreak{}"}
"""Letters that fonts would join to a dash or bend in code, and where a long command may break."""
_COMMAND = re.compile(r"\\[a-zA-Z]+|[{}$\\]")
_BREAKABLE = re.compile(r"([/.:=,]|\\_)(?=\w)")
"""Where a word that is longer than its column may continue on the next line."""
_COLUMN, _PAGE = 60, 76
"""Letters of small type that fit into one column and across a page."""
_WRAP = 32
"""Letters of a cell beyond which its words are wrapped in tables wider than a page."""
_NEEDS = "% Needs \\usepackage{booktabs,graphicx}\n"
_PARAGRAPH = f"p{{{_WRAP / 2:g}em}}"


def escape(text: str) -> str:
    """Return text that LaTeX sets literally: no command, markup or line break survives."""
    return "".join(_SPECIAL.get(letter, letter) for letter in printable(text))


def prose(text: str) -> str:
    """Return a sentence that LaTeX sets literally, with what is between backticks as code."""

    def code(part: str) -> str:
        literal = "".join(_LITERAL.get(letter, letter) for letter in escape(part))
        return rf"\texttt{{{literal}}}".replace(r"\_", r"{\char95}")

    return with_code(text, escape, code)


def rounded(value: float, digits: int | None = None) -> str:
    """Return a number with these decimals, or with three significant digits and powers of ten; a dash for NaN."""
    if math.isnan(value):
        return "--"
    if digits is not None:
        return _minus(f"{value:.{digits}f}")
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    if not exponent:
        return _minus(mantissa)
    power = f"$10^{{{int(exponent)}}}$"
    return power if mantissa == "1" else rf"{_minus(mantissa)} $\times$ {power}"


def _minus(number: str) -> str:
    return number.replace("-", "$-$")


def table(frame: pd.DataFrame, name: str, caption: str, *, notes: Sequence[str] = ()) -> str:
    """Return a table environment.

    Args:
        frame: cells and heads as LaTeX; `escape` those that are names. The index is not shown.
        name: what follows `tab:drift-` in the label.
        caption: a plain sentence.
        notes: plain sentences below the table.
    """
    label = f"tab:drift-{re.sub(r'[^A-Za-z0-9.:-]+', '-', name)}"
    below = " ".join(map(prose, notes))
    below = f"\\par\\smallskip{{\\footnotesize\\raggedright {below}\\par}}\n" if below else ""
    if frame.empty:
        head = (
            f"{_NEEDS}\\begin{{table}}[t]\n\\centering\n\\caption{{{prose(caption)}}}\n\\label{{{label}}}\n"
        )
        return f"{head}{below}\\end{{table}}\n"
    widths = _widths(frame)
    is_wide = sum(widths) > _PAGE
    kinds = _kinds(frame)
    wraps = [is_wide and kind == "l" and width > _WRAP for kind, width in zip(kinds, widths, strict=True)]
    for at, wrap in enumerate(wraps):
        if wrap:
            frame = frame.copy()
            frame.isetitem(at, [_BREAKABLE.sub(r"\1\\allowbreak{}", cell) for cell in frame.iloc[:, at]])
    environment = "table*" if sum(widths) > _COLUMN else "table"
    text = frame.style.hide(axis="index").to_latex(
        hrules=True,
        caption=prose(caption),
        label=label,
        environment=environment,
        position="t",
        position_float="centering",
        column_format="".join(_PARAGRAPH if wrap else kind for kind, wrap in zip(kinds, wraps, strict=True)),
    )
    text = text.replace("\\begin{tabular}", "\\footnotesize\n\\begin{tabular}", 1)
    if sum(_WRAP if wrap else width for width, wrap in zip(widths, wraps, strict=True)) > _PAGE:
        text = text.replace("\\begin{tabular}", "\\resizebox{\\linewidth}{!}{%\n\\begin{tabular}", 1)
        text = text.replace("\\end{tabular}", "\\end{tabular}}", 1)
    return _NEEDS + text.replace(f"\\end{{{environment}}}", f"{below}\\end{{{environment}}}")


def _widths(frame: pd.DataFrame) -> list[int]:
    """Return the letters of each column's longest cell, with the gap between columns."""
    columns = [(str(name), frame.iloc[:, at]) for at, name in enumerate(frame.columns)]
    return [3 + max(len(_COMMAND.sub("", str(text))) for text in (head, *cells)) for head, cells in columns]


def _kinds(frame: pd.DataFrame) -> list[str]:
    """Return the alignment of each column: words to the left, numbers to the right."""
    number = re.compile(r"\$?[-+\d]|\\textbf\{[\d$]|--|$")
    columns = (frame.iloc[:, at] for at in range(frame.shape[1]))
    return ["r" if all(number.match(cell) for cell in cells) else "l" for cells in columns]
