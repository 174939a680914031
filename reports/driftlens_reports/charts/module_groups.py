"""Modules of different blocks that play the same part, by their names inside their blocks."""

from __future__ import annotations

from driftlens.records.run import DriftRun

OUTSIDE = "stem and head"


def group_of(run: DriftRun, path: str) -> str:
    """A module's name inside its block, for example `attn.q_proj`; `OUTSIDE` for modules in no block."""
    place = block_of(run, path)
    return path[len(place) + 1 :] if place else OUTSIDE


def block_of(run: DriftRun, path: str) -> str:
    """Path of the block that holds the module; empty for one in no block."""
    # The trailing dot keeps block 1 from holding what is block 10's.
    return next(
        (
            layer.path
            for layer in run.manifest.layers
            if layer.role == "block" and path.startswith(f"{layer.path}.")
        ),
        "",
    )
