"""The command line in processes of a job, each with the pretended accelerator plugged in."""

from __future__ import annotations

from driftlens.cli import main
from tests.accelerator import plugged

if __name__ == "__main__":
    with plugged():
        main()
