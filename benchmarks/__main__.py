"""Run every benchmark and print one line each: `python -m benchmarks [--device auto] [name ...]`."""

from __future__ import annotations

import argparse
import importlib

import torch

from driftlens.utils.devices import device_name, resolve_device

NAMES = (
    "attribution",
    "memory",
    "calibration",
    "calibration_memory",
    "processes",
    "growth",
    "residual",
    "text",
    "report",
    "pages",
    "explorer",
    "dashboard",
    "busy",
    "mixtures",
    "peers",
)


def main() -> None:
    """Print device and versions, then each benchmark's ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"which ones: {', '.join(NAMES)}")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    chosen = resolve_device(arguments.device)
    device = f"{torch.get_num_threads()} CPU threads" if chosen.type == "cpu" else device_name(chosen)
    print(f"torch {torch.__version__}, {device}, float32")
    for name in arguments.names:
        print(importlib.import_module(f"benchmarks.{name}").run(str(chosen)), flush=True)


if __name__ == "__main__":
    main()
