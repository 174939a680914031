"""Any module with a list of blocks, taken apart by interception: no code is asked of the user.

The stem is all the module does before its first block, the head all it does after the last; a block is run on
its own. What flows is `hidden`: the first tensor each block is given and the first it returns. Whatever else
a block is given (masks, positions) is recorded once per batch from the module itself and must be the same for
every model. Rows of padding are zeros wherever the batch's mask says so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from driftlens.models.block_list import block_list, has_block_list
from driftlens.models.chain import Layer, LayerChain, Slot
from driftlens.models.dissection import Dissection, tied_weights
from driftlens.models.padding import Mask
from driftlens.models.registry import adapters
from driftlens.models.sites import registered_sites
from driftlens.models.tracing import Trace, trace


class SequentialAdapter:
    """Takes modules apart that hold their blocks in a list; the fallback where no other adapter matches.

    Args:
        blocks: path of the list of blocks; None looks for it (see `block_list`).
        mask: which tokens count; see `driftlens.models.padding.Mask`.
    """

    name = "sequential"

    def __init__(self, blocks: str | None = None, mask: Mask = None) -> None:
        self.blocks = blocks
        self.mask = mask

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` has a list of children with weights."""
        return has_block_list(module)

    def chain(self, module: nn.Module, example: Any = None) -> LayerChain:
        """The module taken apart; parameter names are those of `module.state_dict()`.

        The module itself lends its structure and must have weights; it is run in eval mode, and its training
        flags, hooks and weights are left as they are.

        Args:
            module: a model as its library made it.
            example: a batch of raw inputs. With it the chain knows in which order sites run, which of them
                share an input, which blocks keep their features' shape, and which parameters only the head
                needs. Without it sites come in the order of registration, no block counts as residual, and
                every parameter outside the blocks counts as the stem's.

        Raises:
            SpecError: no list of blocks is found, or (with an example) features don't flow from block to
                block.
        """
        found = block_list(module, self.blocks)
        parts = Dissection(module, found, self.mask)
        seen = None if example is None else trace(parts, example)
        blocks = [_block(parts, position, seen) for position in range(len(parts.blocks))]
        outer = {name: Slot(name) for name in parts.outer_weights()}
        # The head also lists the stem's parameters, because it runs the stem again; those belong to the stem,
        # which lists them first. What the example shows nobody using belongs to the stem too.
        stem = {name: slot for name, slot in outer.items() if seen is None or name not in seen.head_only}
        return LayerChain(
            architecture=self.name,
            layers=(
                Layer(1, "stem", "stem", stem, parts.stem),
                *blocks,
                Layer(len(blocks) + 2, "head", "head", outer, parts.head),
            ),
            start=parts.start,
            library_states=parts.library_states,
            require_shared=parts.require_shared,
            tied=tied_weights(module),
            settings={
                "blocks": found.path,
                "block_classes": sorted({type(b).__name__ for b in parts.blocks}),
            },
        )

    def tiny(self) -> nn.Module:
        """A small transformer over image patches, for images [n, 3, h, w] with h and w multiples of 8."""
        from driftlens.models.tiny_stack import TinyStack

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return TinyStack().eval()


def _block(parts: Dissection, position: int, seen: Trace | None) -> Layer:
    weights = parts.block_weights(position)
    sites = registered_sites(parts.blocks[position], weights) if seen is None else seen.sites[position]
    return Layer(
        index=position + 2,
        role="block",
        path=parts.paths[position],
        parameters={name: Slot(key) for name, key in weights.items()},
        call=partial(parts.block, position, sites),
        sites=sites,
        is_residual=seen is not None and seen.is_residual[position],
    )


adapters.register(SequentialAdapter.name)(SequentialAdapter())
