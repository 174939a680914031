"""What opening models and data may do, and where their numbers are computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """What the caller allows beyond what a spec says.

    Attributes:
        device: `auto`, `cpu` or `cuda`, over the spec's; None leaves it to the spec.
        offline: whether only files that were downloaded before may be used.
        trust: whether Python code that the spec names may run.
    """

    device: str | None = None
    offline: bool = False
    trust: bool = False
