"""Any module with a list of blocks, taken apart by interception: no code is asked of the user.

The stem is all the module does before its first block, the head all it does after the last; a block is run on
its own. What flows is `hidden`: the first tensor each block is given and the first it returns. Whatever else
a block is given (masks, positions) is recorded once per batch from the module itself and must be the same for
every model. Rows of padding are zeros wherever the batch's mask says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from driftlens.errors import NumericsError, SpecError
from driftlens.models.chain import Layer, LayerChain, Site, Slot
from driftlens.models.dissection import Dissection, fitted, run, same_values, tied_weights
from driftlens.models.frames import Mask, features_of, frame_at, mapped, raw_inputs, result
from driftlens.models.interception import buffers_on, call
from driftlens.models.sites import registered_sites, traced_sites

NAME = "sequential"


def sequential_chain(
    module: nn.Module, example: Any = None, *, blocks: str | None = None, mask: Mask = None
) -> LayerChain:
    """A module that holds its blocks in a list, taken apart; parameter names are those of `module.state_dict()`.

    The module itself lends its structure; it is run in eval mode, and its training flags, hooks and weights are left
    as they are. One that has shapes only serves where its blocks are given nothing but features.

    Args:
        module: a model as its library made it.
        example: a batch of raw inputs, on the meta device where the module is. With it the chain knows in which order
            sites run, which of them share an input, which blocks keep their features' shape, and which parameters only
            the head needs. Without it sites come in the order of registration, no block counts as residual, and every
            parameter outside the blocks counts as the stem's.
        blocks: path of the list of blocks; None takes the list with the most children of one class; among equals
            the outermost one.
        mask: which tokens count; see `driftlens.models.frames.Mask`.

    Raises:
        SpecError: no list of blocks is found, or (with an example) features don't flow from block to block.
    """
    path, found = _block_list(module, blocks)
    parts = Dissection(module, found, mask)
    weights = [parts.block_weights(position) for position in range(len(parts.blocks))]
    if example is None:
        sites = [registered_sites(block, own) for block, own in zip(parts.blocks, weights, strict=True)]
        is_residual, head_only = [False] * len(sites), frozenset[str]()
    else:
        is_meta = next((weight.is_meta for weight in module.parameters()), False)
        with buffers_on(module, torch.device("meta")) if is_meta else nullcontext():
            if is_meta:
                parts.look_at(example)
            sites, is_residual, head_only = _traced(parts, example)
    layers = [
        Layer(
            index=position + 2,
            role="block",
            path=parts.paths[position],
            parameters={name: Slot(key) for name, key in weights[position].items()},
            call=partial(parts.block, position, sites[position]),
            sites=sites[position],
            is_residual=is_residual[position],
        )
        for position in range(len(parts.blocks))
    ]
    outer = {name: Slot(name) for name in parts.outer_weights()}
    # The head also lists the stem's parameters, because it runs the stem again; those belong to the stem,
    # which lists them first. What the example shows nobody using belongs to the stem too.
    stem = {name: slot for name, slot in outer.items() if name not in head_only}
    return LayerChain(
        architecture=NAME,
        layers=(
            Layer(1, "stem", "stem", stem, parts.stem),
            *layers,
            Layer(len(layers) + 2, "head", "head", outer, parts.head),
        ),
        start=parts.start,
        library_states=parts.library_states,
        require_shared=parts.require_shared,
        tied=tied_weights(module),
        settings={
            "blocks": path,
            "block_classes": sorted({type(block).__name__ for block in parts.blocks}),
        },
    )


def _block_list(module: nn.Module, path: str | None) -> tuple[str, dict[str, nn.Module]]:
    """Path of the list of blocks, and path -> block in forward order; None looks for the list.

    Raises:
        SpecError: `path` is no list of blocks, there is none, or several lists are equally good; the message
            names the candidates.
    """
    lists = _candidates(module)
    if path is None:
        path = _found(module, lists)
    elif path not in lists:
        raise SpecError(
            f"{path!r} is not a list of blocks in {type(module).__name__}; {_shown(lists)}",
            hint="Pass blocks= the path of an nn.ModuleList or nn.Sequential whose children have weights.",
        )
    container = module.get_submodule(path)
    children = list(container.named_children())
    if len(children) != len(lists[path]):
        raise SpecError(
            f"{path or 'the module'} holds one block several times, so its layers can't be told apart",
            hint="Pass blocks= the path of another list, or give every block its own weights.",
        )
    return path, {f"{path}.{name}" if path else name: block for name, block in children}


def _candidates(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Path -> children of every list that could hold the blocks."""
    return {
        path: list(part)
        for path, part in module.named_modules()
        # A module list that is the whole model has no forward of its own.
        if isinstance(part, nn.Sequential) or (isinstance(part, nn.ModuleList) and path)
        if _most_alike(part)
    }


def _found(module: nn.Module, lists: dict[str, list[nn.Module]]) -> str:
    if not lists:
        raise SpecError(
            f"{type(module).__name__} has no list of blocks",
            hint="Put its blocks in an nn.ModuleList or nn.Sequential.",
        )
    ranks = {
        path: (-_most_alike(children), len(path.split(".")) if path else 0)
        for path, children in lists.items()
    }
    best = [path for path in lists if ranks[path] == min(ranks.values())]
    if len(best) > 1:
        raise SpecError(
            f"{type(module).__name__} has several lists that could be its blocks; {_shown(lists)}",
            hint=f"Pass blocks={best[0]!r} or another of them.",
            candidates=best,
        )
    return best[0]


def _most_alike(children: nn.Sequential | nn.ModuleList | list[nn.Module]) -> int:
    """The largest number of children of one class, among those with weights."""
    classes = Counter(type(child) for child in children if next(child.parameters(), None) is not None)
    return max(classes.values(), default=0)


def _shown(lists: dict[str, list[nn.Module]]) -> str:
    if not lists:
        return "there is none"
    entries = [f"{path or '(the module itself)'} with {len(children)}" for path, children in lists.items()]
    return (
        "there are " + ", ".join(entries[:8]) + (f" and {len(entries) - 8} more" if len(entries) > 8 else "")
    )


def _traced(parts: Dissection, example: Any) -> tuple[list[tuple[Site, ...]], list[bool], frozenset[str]]:
    """What a batch shows that runs through a module's pieces, with its own weights and in its own dtype.

    Returns:
        Sites of each block, in the order in which they run; whether its features keep their shape; and the names of
        weights that are used behind the blocks and not before.

    Raises:
        SpecError: features don't flow from block to block.
    """
    state, side = parts.start(fitted(parts.module, example))
    # Fresh tensors for the outer weights, so that each can be told from weights it is tied to.
    outer = {name: value.detach() for name, value in parts.outer_weights().items()}
    sites: list[tuple[Site, ...]] = []
    is_residual: list[bool] = []
    with torch.no_grad():
        with _Watch() as before:
            features = parts.stem(outer, state, side)
        for position, (block, path) in enumerate(zip(parts.blocks, parts.paths, strict=True)):
            hidden = features["hidden"]
            args, kwargs = frame_at(side, position).arguments(hidden.clone())
            alone = partial(call, block, {}, args, kwargs)
            found, output = traced_sites(block, parts.block_weights(position), alone)
            features = {"hidden": features_of(path, output)}
            sites.append(found)
            is_residual.append(features["hidden"].shape == hidden.shape)
        with _Watch() as behind:
            parts.head(outer, features, side)
    head_only = behind.seen - before.seen
    return sites, is_residual, frozenset(name for name, value in outer.items() if id(value) in head_only)


class _Watch(TorchFunctionMode):
    """Remembers all that operations are given, by `id`; ask only for what is alive throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        mapped((list(args), kwargs or {}), lambda value: self.seen.add(id(value)))
        return func(*args, **(kwargs or {}))


def check_deterministic(module: nn.Module, batch: Any, chain: LayerChain | None = None) -> None:
    """Refuse a model that answers one batch in two ways, in eval mode, bit for bit.

    Args:
        module: the model.
        batch: its raw inputs.
        chain: the module taken apart, where less than the whole of it is run: the image tower of a whole CLIP.

    Raises:
        NumericsError: the two outputs differ; says by how much.
    """
    first, second = (
        result(run(module, raw_inputs(batch)))
        if chain is None
        else chain.library_states(module, batch)[-1][chain.layers[-1].stream]
        for _ in range(2)
    )
    if same_values(first, second):
        return
    difference = float((first - second).abs().max()) if first.shape == second.shape else float("nan")
    raise NumericsError(
        f"{type(module).__name__} gives two outputs for one batch; they differ by up to {difference:.3g}",
        hint="Something random runs in eval mode: dropout as a function without `training=self.training`, "
        "stochastic depth, noise, or a kernel that is not deterministic.",
        difference=difference,
    )
