"""Run benchmarks, which print a line per figure: `python -m benchmarks [--device auto] [name ...]`."""

from __future__ import annotations

import argparse
import importlib

from driftlens.utils.devices import resolve_device

NAMES = (
    "attribution",
    "memory",
    "calibration",
    "processes",
    "growth",
    "residual",
    "text",
    "report",
    "pages",
    "explorer",
    "dashboard",
    "mixtures",
    "layers",
    "commands",
    "merging",
    "why",
    "peers",
)


def main() -> None:
    """Run the named benchmarks, by default those that need no further data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"which ones: {', '.join(NAMES)}")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = str(resolve_device(arguments.device))
    for name in arguments.names:
        importlib.import_module(f"benchmarks.{name}").run(device)


if __name__ == "__main__":
    main()
