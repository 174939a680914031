"""What a library's own modules return in one ordinary forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


def record_outputs(modules: Sequence[nn.Module], run: Callable[[], object]) -> list[Tensor]:
    """Output of each of `modules` while `run` runs without gradients, in the order of `modules`.

    Modules that return tuples (encoder layers of transformers 4) are recorded by their first entry. The
    hooks are gone afterwards, also when `run` fails.
    """
    seen: dict[int, Tensor] = {}

    def hook_at(position: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            seen[position] = output[0] if isinstance(output, tuple) else output

        return keep

    with ExitStack() as hooks, torch.no_grad():
        for position, module in enumerate(modules):
            hooks.callback(module.register_forward_hook(hook_at(position)).remove)
        run()
    return [seen[position] for position in range(len(modules))]
