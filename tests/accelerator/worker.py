"""The command line where there are pretended accelerators."""

from driftlens.cli import main
from tests.accelerator import plugged

if __name__ == "__main__":
    with plugged():
        main()
