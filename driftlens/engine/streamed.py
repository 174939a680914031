"""A library's own forward pass with weights that are read while it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from driftlens.models.interception import buffers_on
from driftlens.models.sources import Table


@contextmanager
def streamed_weights(
    module: nn.Module,
    block_paths: Sequence[str],
    read: Callable[[str], Tensor],
    device: torch.device,
    used: Collection[str] | None = None,
) -> Iterator[None]:
    """Inside the context, an ordinary forward of `module` runs with the weights that `read` gives.

    Parameters of a block are read when the block is about to run and dropped when it is done; all others stay for the
    whole context. Afterwards the module is as it was, also after an exception.

    Args:
        module: the library's module; parameters may be on meta.
        block_paths: module paths of the blocks.
        read: full parameter name -> tensor on `device`.
        device: where buffers are put meanwhile.
        used: the names that are read; None reads all. Others keep their place, a language-model head for instance.
    """
    blocks = {path: module.get_submodule(path) for path in block_paths}
    in_blocks = {f"{path}.{name}" for path, block in blocks.items() for name in weight_names(block)}
    outside = [
        name for name in weight_names(module) if name not in in_blocks and (used is None or name in used)
    ]
    with ExitStack() as stack:
        if any(buffer.device != device for buffer in module.buffers()):
            stack.enter_context(buffers_on(module, device))
        stack.enter_context(replaced(module, outside, read))
        for path, block in blocks.items():
            stack.enter_context(_streamed_block(block, path, read))
        yield


@contextmanager
def _streamed_block(block: nn.Module, path: str, read: Callable[[str], Tensor]) -> Iterator[None]:
    names = weight_names(block)
    loaded = ExitStack()

    def load(*_: Any) -> None:
        loaded.enter_context(replaced(block, names, lambda name: read(f"{path}.{name}")))

    def drop(*_: Any) -> None:
        loaded.close()

    handles = [block.register_forward_pre_hook(load), block.register_forward_hook(drop)]
    try:
        yield
    finally:
        loaded.close()
        for handle in handles:
            handle.remove()


def weight_names(module: nn.Module) -> list[str]:
    """Names of parameters, tied ones under each of their names, and of saved buffers of floating numbers."""
    saved = module.state_dict(keep_vars=True)
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return [
        name
        for name, value in saved.items()
        if isinstance(value, Tensor) and (name not in buffers or value.is_floating_point())
    ]


@contextmanager
def replaced(module: nn.Module, names: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[None]:
    """Put other tensors in the place of weights, and the weights back afterwards."""
    owners = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    before = [owner._parameters.get(leaf, owner._buffers.get(leaf)) for owner, leaf in owners]
    try:
        for name, (owner, leaf) in zip(names, owners, strict=True):
            if leaf in owner._parameters:
                value = read(name)
                is_table = isinstance(value, Table)  # a parameter would be made of all of it
                owner._parameters[leaf] = cast(
                    "nn.Parameter", value if is_table else nn.Parameter(value, requires_grad=False)
                )
            else:
                owner._buffers[leaf] = read(name)
        yield
    finally:
        for (owner, leaf), weight in zip(owners, before, strict=True):
            if leaf in owner._parameters:
                owner._parameters[leaf] = cast("nn.Parameter", weight)
            else:
                owner._buffers[leaf] = weight
