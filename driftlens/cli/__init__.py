"""The command line: `driftlens COMMAND`. Results go to stdout, progress and messages to stderr."""

from driftlens.cli.main import main

__all__ = ["main"]
