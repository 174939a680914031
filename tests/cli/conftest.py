"""Fixtures of this folder: the shared world, and a way to run one command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from driftlens.cli import main
from tests.pipelines.fixtures import finished, folder, light, spec_file, world

__all__ = [
    "Cli",
    "Result",
    "finished",
    "folder",
    "light",
    "run_cli",
    "spec_file",
    "world",
]


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The error, without its hint."""
        return self.err.split("error: ", 1)[1].split("\nhint: ")[0].rstrip("\n")

    @property
    def hint(self) -> str:
        return self.err.split("\nhint: ", 1)[1].rstrip("\n") if "\nhint: " in self.err else ""


Cli = Callable[..., Result]


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs one command line in this process."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main([str(argument) for argument in arguments])
        written = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return Result(leaving.value.code, written.out, written.err)

    return run
