"""Any module with a list of blocks, taken apart by interception: no code is asked of the user.

The stem is all the module does before its first block, the head all it does after the last; a block is run on
its own. What flows is `hidden`: the first tensor each block is given and the first it returns. Whatever else
a block is given (masks, positions) is recorded once per batch from the module itself and must be the same for
every model. Rows of padding are zeros wherever the batch's mask says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from driftlens.models.chain import TENSOR, TEXT, Layer, LayerChain, Modality, Site, Slot
from driftlens.models.tracing.block_call import Mask, mapped, raw_inputs, result
from driftlens.models.tracing.block_runner import (
    BlockRunner,
    fitted,
    own_weights,
    run,
    same_values,
    tied_weights,
)
from driftlens.models.tracing.hooks import buffers_on
from driftlens.models.tracing.sites import no_sites, traced_sites
from driftlens.utils.errors import NumericsError, SpecError, some_of

NAME = "sequential"


def sequential_chain(
    module: nn.Module,
    example: Any,
    *,
    blocks: str | None = None,
    mask: Mask = None,
    final: str = "",
    beside: Mapping[str, str] = MappingProxyType({}),
    reads_last: bool = True,
) -> LayerChain:
    """A module that holds its blocks in a list, taken apart; parameter names are those of `module.state_dict()`.

    The module itself lends its structure; it is run in eval mode, and its training flags, hooks and weights are left
    as they are. One that has shapes only serves where what its blocks are given beside features depends on no weight.

    Args:
        module: a model as its library made it.
        example: a batch of raw inputs. It shows in which order sites run, which of them share an input, which blocks
            keep their features' shape, and which parameters only the head needs.
        blocks: path of the list of blocks, or a pattern of the blocks' own paths (`layer?`), part by part; None takes
            the list with the most children of one class, among equals the outermost one. Where that is one of several
            stages, all of which hold such a list, the stages are the blocks.
        mask: which tokens count; see `driftlens.models.tracing.block_call.Mask`.
        final: path of the module that the final feature leaves, the whole head; "" takes what the model returns.
        beside: raw input -> the stream that it is: features of other tokens, which blocks read beside their own.
        reads_last: whether `final` is given what leaves the last block; else the head is all behind that block.
    """
    path, blocks_by_path = block_list(module, blocks)
    parts = BlockRunner(module, blocks_by_path, mask, final, beside, reads_last)
    pieces = _traced(parts, example)
    layers = [
        Layer(
            index=position + 2,
            role="block",
            path=parts.paths[position],
            parameters=parts.parameters(position),
            call=partial(parts.block, position, pieces.sites[position]),
            sites=pieces.sites[position],
            is_residual=pieces.is_residual[position],
            no_sites=no_sites(parts.blocks[position], parts.slots[position], pieces.sites[position]),
        )
        for position in range(len(parts.blocks))
    ]
    outer = {name: Slot(name) for name in parts.outer_weights()}
    # The head also lists the stem's parameters, because it runs the stem again; those belong to the stem,
    # which lists them first. What the example shows nobody using belongs to the stem too.
    of_blocks = {key for entry in parts.computed.values() for key in entry.names}
    stem = {
        name: slot
        for name, slot in outer.items()
        if (name in pieces.before or name not in pieces.behind) and name not in of_blocks
    }
    if final:  # what is behind it belongs to no layer
        stem = {name: slot for name, slot in stem.items() if name in pieces.before}
        outer = {
            name: slot
            for name, slot in outer.items()
            if (name.startswith(f"{final}.") if reads_last else name in pieces.behind)
        }
    return LayerChain(
        architecture=NAME,
        layers=(
            Layer(1, "stem", "stem", stem, parts.stem),
            *layers,
            Layer(len(layers) + 2, "head", final or "head", outer, parts.head),
        ),
        start=parts.start,
        library_states=parts.library_states,
        require_shared=parts.require_shared,
        tied=tied_weights(module),
        final=final or None,
        modality=pieces.modality,
        settings={"blocks": path, "block_classes": sorted({type(block).__name__ for block in parts.blocks})},
    )


def block_list(module: nn.Module, path: str | None) -> tuple[str, dict[str, nn.Module]]:
    """Path of the list of blocks or their pattern, and path -> block in forward order; None looks for the list."""
    lists = _candidates(module)
    if path is None:
        path = _likely_list(module, lists)
    if path not in lists and any(sign in path for sign in "*?["):
        parts = path.split(".")
        blocks = {
            name: part
            for name, part in module.named_modules()
            if len(names := name.split(".")) == len(parts) and all(map(fnmatchcase, names, parts))
        }
    elif path in lists:
        container = module.get_submodule(path)
        blocks = {f"{path}.{name}" if path else name: block for name, block in container.named_children()}
        if len(blocks) != len(lists[path]):
            raise SpecError(
                f"{path or 'the module'} holds one block several times, so its layers can't be told apart",
                hint="Pass blocks= the path of another list, or give every block its own weights.",
            )
    else:
        blocks = {}
    if not blocks:
        raise SpecError(
            f"{path!r} is not a list of blocks in {type(module).__name__}; {_shown(lists)}",
            hint="Pass blocks= the path of an nn.ModuleList or nn.Sequential whose children have weights, or a pattern "
            "of the blocks' own paths such as 'layer?'.",
        )
    return path, blocks


def _candidates(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Path -> children of every list that could hold the blocks."""
    return {
        path: list(part)
        for path, part in module.named_modules()
        # A module list that is the whole model has no forward of its own.
        if isinstance(part, nn.Sequential) or (isinstance(part, nn.ModuleList) and path)
        if _most_alike(part)
    }


def _likely_list(module: nn.Module, lists: dict[str, list[nn.Module]]) -> str:
    if not lists:
        raise SpecError(
            f"{type(module).__name__} has no list of blocks",
            hint="Put its blocks in an nn.ModuleList or nn.Sequential.",
        )
    ranks = {
        path: (
            -sum(_most_alike(lists[other]) for other in _numbered(lists, path)),
            len(path.split(".")) if path else 0,
        )
        for path in lists
    }
    best = [path for path in lists if ranks[path] == min(ranks.values())]
    if (stages := _stages(lists, best[0])) is not None:
        return stages
    if len(best) > 1:
        raise SpecError(
            f"{type(module).__name__} has several lists that could be its blocks; {_shown(lists)}",
            hint=f"Pass blocks={best[0]!r} or another of them.",
        )
    return best[0]


def _numbered(lists: dict[str, list[nn.Module]], path: str) -> list[str]:
    """The lists beside each other of which `path` is one and that differ in a number of their names (`layer1`)."""
    name = path.rpartition(".")[2]
    if name.isdecimal():  # a child of a list
        return [path]
    return [other for other in lists if re.sub(r"\d+$", "", other) == re.sub(r"\d+$", "", path)]


def _stages(lists: dict[str, list[nn.Module]], path: str) -> str | None:
    """Return the list or the pattern of the stages that `path` is in; None where there are none."""
    parts = path.split(".")
    for depth, part in enumerate(parts):
        container = ".".join(parts[:depth])
        if part.isdecimal() and container in lists:
            places = {tuple(other.split(".")) for other in lists}
            alike = [
                place
                for place in places
                if (*place[:depth], *place[depth + 1 :]) == (*parts[:depth], *parts[depth + 1 :])
            ]
            if sum(place[depth].isdecimal() for place in alike) > 1:
                return container
    return re.sub(r"\d+$", "[0-9]*", path) if len(_numbered(lists, path)) > 1 else None


def _most_alike(children: nn.Sequential | nn.ModuleList | list[nn.Module]) -> int:
    """The largest number of children of one class, among those with weights."""
    classes = Counter(type(child) for child in children if next(child.parameters(), None) is not None)
    return max(classes.values(), default=0)


def _shown(lists: dict[str, list[nn.Module]]) -> str:
    if not lists:
        return "there is none"
    entries = [f"{path or '(the module itself)'} with {len(children)}" for path, children in lists.items()]
    return f"there are {some_of(entries, 8)}"


class _Pieces(NamedTuple):
    """What is known of a module's pieces, by block, or by names of outer weights used before or behind the blocks."""

    sites: list[tuple[Site, ...]]
    is_residual: list[bool]
    before: frozenset[str]
    behind: frozenset[str]
    modality: Modality


def _traced(parts: BlockRunner, example: Any) -> _Pieces:
    """Run a batch through a module's pieces and note what they are."""
    # Of a module that has shapes only, stem and head run on numbers that stand for weights, and blocks on shapes.
    module = parts.module
    state, side = parts.start(fitted(module, example))
    # Fresh tensors for the outer weights, so that each can be told from weights it is tied to.
    outer = parts.stand_ins(next(tensor.device for tensor in (*state.values(), *side.values())))
    sites: list[tuple[Site, ...]] = []
    is_residual: list[bool] = []
    with torch.no_grad():
        with Watch() as before:
            features = parts.stem(outer, state, side)
        weights = own_weights(module)  # buffers among them may be real where parameters have shapes only
        device = features["hidden"].device
        bare = torch.device("meta") if parts.is_hollow else device
        with buffers_on(module, bare) if parts.is_hollow else nullcontext():
            features, beside = {name: x.to(bare) for name, x in features.items()}, side.to(bare)
            streams = {stream: beside[f"inputs.{name}"] for name, stream in parts.beside.items()}
            for position, (block, slots) in enumerate(zip(parts.blocks, parts.slots, strict=True)):
                parameters = {
                    name: slot.own(slot.of(weights[slot.key].detach()).to(bare))
                    for name, slot in parts.parameters(position).items()
                }
                alone = partial(parts.block, position, (), parameters, features, beside)
                with parts.shapes_only():
                    block_sites, features = traced_sites(block, slots, alone, features, streams)
                block_sites = (*block_sites, *parts.experts(position))
                sites.append(_of_tokens(block_sites) if parts.computed or parts.streams > 1 else block_sites)
                is_residual.append(side.calls[position].entered == side.calls[position].left)
        if parts.is_hollow:
            features = {"hidden": torch.zeros(features["hidden"].shape, device=device)}
        with Watch() as behind, ExitStack() as hooks:
            if parts.final:  # whose head looks back at nothing before the last block
                last = parts.blocks[-1].register_forward_hook(lambda *_: behind.seen.clear())
                hooks.callback(last.remove)
            parts.head(outer, features, side)
    lies_in_space = parts.streams == 1 and any(len(block_call.left) > 2 for block_call in side.calls)
    modality = replace(TENSOR, pool="mean") if lies_in_space else _read_by(module)
    return _Pieces(sites, is_residual, among(outer, before), among(outer, behind), modality)


def _read_by(module: nn.Module) -> Modality:
    """Texts where a library of language models says so; of a decoder's tokens the last alone has read all others."""
    if getattr(module, "main_input_name", None) != "input_ids":
        return TENSOR
    is_causal = any(getattr(part, "is_causal", False) for part in module.modules())
    return replace(TEXT, pool="last" if is_causal else "mean")


def among(weights: dict[str, Tensor], watch: Watch) -> frozenset[str]:
    """The names of weights that an operation was given."""
    return frozenset(name for name, value in weights.items() if id(value) in watch.seen)


def _of_tokens(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """Sites without those that run on something else too: positions, or streams before and behind (AltUp's router)."""
    readers: dict[str, str] = {}
    sites_run_once = [site for site in sites if site.runs == 1]
    return tuple(replace(site, input=readers.setdefault(site.input, site.name)) for site in sites_run_once)


class Watch(TorchFunctionMode):
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

    `chain` is the module taken apart, where less than the whole of it is run: the image tower of a whole CLIP.
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
    )
