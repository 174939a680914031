"""LaTeX as it is read back."""

from __future__ import annotations

import re

import pytest

from driftlens.cli import main


def code_of(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    return int(leaving.value.code or 0)


def rows_of(latex: str) -> list[list[str]]:
    """The cells of each line, read back as a reader would: without commands, with the letters they stand for."""
    plain = {r"\%": "%", r"\_": "_", r"\#": "#", r"\$": "$", "$-$": "-", r"\{": "{", r"\}": "}"}
    found = []
    for line in latex.splitlines():
        if not line.endswith(r"\\"):
            continue
        text = re.sub(r"\\driftgain\{[^}]*\}|\\textsuperscript\{\\dag\}|\\driftown|\\quad|\\\\$", "", line)
        text = re.sub(r"\\(?:textbf|emph|multicolumn\{\d+\}\{\w\})\{((?:[^{}]|\\[{}])*)\}", r"\1", text)
        for letters, meant in plain.items():
            text = text.replace(letters, meant)
        found.append([cell.strip() for cell in re.split(r"(?<!\\)&", text)])
    return found
