"""The adapters and loaders there are: each in one file of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from driftlens.models.chain import Adapter
from driftlens.registry import Registry

if TYPE_CHECKING:
    from driftlens.models.architecture import Architecture

adapters: Registry[Adapter] = Registry("adapter", "driftlens.models")
loaders: Registry[Callable[[str, bool], Architecture]] = Registry("loader", "driftlens.models")
"""(source, offline) -> the architecture that `source` describes."""
