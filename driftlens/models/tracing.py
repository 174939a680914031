"""What can only be learnt of a module by running it on an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from driftlens.errors import NumericsError
from driftlens.models.chain import Site
from driftlens.models.dissection import Dissection, fitted, run, same_values
from driftlens.models.frames import features_of, frame_at, mapped, raw_inputs, result
from driftlens.models.interception import call
from driftlens.models.sites import traced_sites


@dataclass(frozen=True)
class Trace:
    """What one batch shows.

    Attributes:
        sites: of each block, in the order in which they run.
        is_residual: of each block, whether its features keep their shape.
        head_only: names of weights that are used behind the blocks and not before.
    """

    sites: list[tuple[Site, ...]]
    is_residual: list[bool]
    head_only: frozenset[str]


def trace(parts: Dissection, example: Any) -> Trace:
    """Run a module's pieces one after the other on a batch, with its own weights and in its own dtype.

    Raises:
        SpecError: features don't flow from block to block.
    """
    state, side = parts.start(fitted(parts.module, example))
    # Fresh tensors for the outer weights, so that each can be told from weights it is tied to.
    outer = {name: value.detach() for name, value in parts.outer_weights().items()}
    sites: list[tuple[Site, ...]] = []
    is_residual: list[bool] = []
    with torch.no_grad():
        before, features = _touched(outer, lambda: parts.stem(outer, state, side))
        for position, (block, path) in enumerate(zip(parts.blocks, parts.paths, strict=True)):
            hidden = features["hidden"]
            args, kwargs = frame_at(side, position).arguments(hidden.clone())
            alone = partial(call, block, {}, args, kwargs)
            found, output = traced_sites(block, parts.block_weights(position), alone)
            features = {"hidden": features_of(path, output)}
            sites.append(found)
            is_residual.append(features["hidden"].shape == hidden.shape)
        everywhere, _ = _touched(outer, lambda: parts.head(outer, features, side))
    return Trace(sites, is_residual, everywhere - before)


def _touched(tensors: Mapping[str, Tensor], run: Callable[[], Any]) -> tuple[frozenset[str], Any]:
    """Names of the tensors that some operation reads while `run` runs, and what it returned."""
    with _Watch(tensors) as watch:
        output = run()
    return frozenset(watch.seen), output


class _Watch(TorchFunctionMode):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self._names = {id(tensor): name for name, tensor in tensors.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        mapped((list(args), kwargs or {}), self._note)
        return func(*args, **(kwargs or {}))

    def _note(self, value: Any) -> None:
        name = self._names.get(id(value))
        if name is not None:
            self.seen.add(name)


def check_deterministic(module: nn.Module, batch: Any) -> None:
    """Refuse a model that answers one batch in two ways, in eval mode, bit for bit.

    Args:
        module: the model; it is not modified.
        batch: raw inputs.

    Raises:
        NumericsError: the two outputs differ; says by how much.
    """
    first, second = (result(run(module, raw_inputs(batch))) for _ in range(2))
    if same_values(first, second):
        return
    difference = float((first - second).abs().max()) if first.shape == second.shape else float("nan")
    raise NumericsError(
        f"{type(module).__name__} gives two outputs for one batch; they differ by up to {difference:.3g}",
        hint="Something random runs in eval mode: dropout as a function without `training=self.training`, "
        "stochastic depth, noise, or a kernel that is not deterministic.",
        difference=difference,
    )
