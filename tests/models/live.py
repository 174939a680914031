"""The architecture of a module in memory, for tests of alignment and saving."""

from __future__ import annotations

from typing import Any

from torch import nn

from driftlens.models.architecture import Architecture
from driftlens.models.architectures.module_list import chain_of_module
from driftlens.models.chain import adapter_for


def architecture_of(module: nn.Module, example: Any = None) -> Architecture:
    layout = getattr(adapter_for(module), "layout", None)
    return Architecture("live", type(module).__name__, module, chain_of_module(module, example), layout)
