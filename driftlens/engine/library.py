"""The library's own forward pass, with weights that are read block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


@contextmanager
def streamed_weights(
    module: nn.Module, block_paths: Sequence[str], read: Callable[[str], Tensor], device: torch.device
) -> Iterator[None]:
    """Inside the context, an ordinary forward of `module` runs with the weights that `read` gives.

    Parameters of a block are read when the block is about to run and dropped when it is done; all others stay for the
    whole context. Afterwards the module is as it was, also after an exception.

    Args:
        module: the library's module; parameters may be on meta.
        block_paths: module paths of the blocks.
        read: full parameter name -> tensor on `device`.
        device: where buffers are put meanwhile.
    """
    blocks = {path: module.get_submodule(path) for path in block_paths}
    in_blocks = {f"{path}.{name}" for path, block in blocks.items() for name in _weights(block)}
    outside = [name for name in _weights(module) if name not in in_blocks]
    with ExitStack() as stack:
        stack.enter_context(_buffers_on(module, device))
        stack.enter_context(_replaced(module, outside, read))
        for path, block in blocks.items():
            stack.enter_context(_streamed_block(block, path, read))
        yield


@contextmanager
def _streamed_block(block: nn.Module, path: str, read: Callable[[str], Tensor]) -> Iterator[None]:
    names = _weights(block)
    loaded = ExitStack()

    def load(*_: Any) -> None:
        loaded.enter_context(_replaced(block, names, lambda name: read(f"{path}.{name}")))

    def drop(*_: Any) -> None:
        loaded.close()

    handles = [block.register_forward_pre_hook(load), block.register_forward_hook(drop)]
    try:
        yield
    finally:
        loaded.close()
        for handle in handles:
            handle.remove()


def _weights(module: nn.Module) -> list[str]:
    """Names of parameters, tied ones under each of their names, and of saved buffers of floating numbers."""
    saved = module.state_dict(keep_vars=True)
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return [
        name
        for name, value in saved.items()
        if isinstance(value, Tensor) and (name not in buffers or value.is_floating_point())
    ]


@contextmanager
def _replaced(module: nn.Module, names: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[None]:
    """Put other tensors in the place of weights, and the weights back afterwards."""
    owners = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    before = [owner._parameters.get(leaf, owner._buffers.get(leaf)) for owner, leaf in owners]
    try:
        for name, (owner, leaf) in zip(names, owners, strict=True):
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(read(name), requires_grad=False)
            else:
                owner._buffers[leaf] = read(name)
        yield
    finally:
        for (owner, leaf), weight in zip(owners, before, strict=True):
            if leaf in owner._parameters:
                owner._parameters[leaf] = cast("nn.Parameter", weight)
            else:
                owner._buffers[leaf] = weight


@contextmanager
def _buffers_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    owners = [
        (owner, name) for owner in module.modules() for name, b in owner._buffers.items() if b is not None
    ]
    before = [owner._buffers[name] for owner, name in owners]
    try:
        for owner, name in owners:
            buffer = owner._buffers[name]
            assert buffer is not None
            owner._buffers[name] = buffer.to(device)
        yield
    finally:
        for (owner, name), buffer in zip(owners, before, strict=True):
            owner._buffers[name] = buffer
