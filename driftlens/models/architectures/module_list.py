"""Split any module with a list of blocks into layers, without code of the user's. Entry point: `sequential_chain`.

The features `hidden` are the first tensor that a block is given and the first that it returns. A block's other
arguments (masks, positions) are recorded once per batch and must be the same for all models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from driftlens.models.chain import TENSOR, TEXT, Layer, LayerChain, Modality, Site, WeightSlot, adapter_for
from driftlens.models.tracing.block_call import (
    BlockCall,
    Mask,
    buffers_on_device,
    first_tensor,
    map_leaves,
    raw_inputs,
)
from driftlens.models.tracing.block_runner import (
    BlockRunner,
    is_bit_identical,
    move_to_module,
    named_weights,
    run_model,
    tied_weights,
)
from driftlens.models.tracing.block_sites import siteless_parameters
from driftlens.utils.errors import NumericsError, SpecError, shorten_list

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
    """Return the layers of a module that has its blocks in a list; parameter names are those of `module.state_dict()`.

    It may be on meta if the blocks' arguments other than features depend on no weight.

    Args:
        module: a model as its library made it, which does not change.
        example: a batch of raw inputs. One pass shows the order of sites, which of them share an input, which blocks
            keep their features' shape, and which parameters only the head needs.
        blocks: path of the list of blocks, or a pattern of the blocks' own paths (`layer?`), part by part. None takes
            the list with the most children of one class, among equals the outermost one. If that is one of several
            stages, each with such a list, the stages are the blocks.
        mask: which tokens count; see `driftlens.models.tracing.block_call.Mask`.
        final: path of the module whose output is the final feature, the whole head; "" takes the model's output.
        beside: raw input -> the stream that it is: features of other tokens, which blocks read next to their own.
        reads_last: True if `final` is given the output of the last block; else the head is everything after that block.
    """
    path, blocks_by_path = find_blocks(module, blocks)
    parts = BlockRunner(module, blocks_by_path, mask, final, beside, reads_last)
    pieces = _trace_layers(parts, example)
    outer = {name: WeightSlot(name) for name in parts.outer_weights()}
    # The head also lists the stem's parameters, because it runs the stem again; they belong to the stem, which lists
    # them first. Parameters that the example does not use belong to the stem too.
    stem = {
        name: slot
        for name, slot in outer.items()
        if (name in pieces.before or name not in pieces.after) and name not in parts.computed_keys
    }
    # Parameters after the final feature (a language-model head) belong to no layer.
    if final:
        stem = {name: slot for name, slot in stem.items() if name in pieces.before}
        outer = {
            name: slot
            for name, slot in outer.items()
            if (name.startswith(f"{final}.") if reads_last else name in pieces.after)
        }
    return LayerChain(
        architecture=NAME,
        layers=(
            Layer(1, "stem", "stem", stem, parts.run_stem),
            *pieces.blocks,
            Layer(len(parts.blocks) + 2, "head", final or "head", outer, parts.run_head),
        ),
        start=parts.initial_state,
        library_states=parts.library_states,
        require_shared=parts.require_same_arguments,
        tied=tied_weights(module),
        final=final or None,
        modality=pieces.modality,
        settings={"blocks": path, "block_classes": sorted({type(block).__name__ for block in parts.blocks})},
    )


def chain_of_module(module: nn.Module, example: Any = None) -> LayerChain:
    """Return the layers of a module by the adapter for its family, or of any list of blocks.

    `example`, a batch of raw inputs, is required for modules without an adapter.
    """
    adapter = adapter_for(module)
    return sequential_chain(module, example) if adapter is None else adapter.chain(module)


def module_path(module: nn.Module, part: object) -> str:
    """Return the path of a submodule; "" if the module does not contain it, or if it is the module itself."""
    return next((path for path, inner in module.named_modules() if inner is part), "")


def find_blocks(module: nn.Module, path: str | None) -> tuple[str, dict[str, nn.Module]]:
    """Find a model's list of blocks; return its path or pattern, and the blocks by path in forward order."""
    lists = _possible_block_lists(module)
    if path is None:
        path = _most_likely_block_list(module, lists)
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
                f"{path or 'the module'} has one block several times; expected different blocks",
                hint="Set `blocks` to the path of another list, or give each block its own weights.",
            )
    else:
        blocks = {}
    if not blocks:
        raise SpecError(
            f"{path!r} is not a list of blocks in {type(module).__name__}; {_describe_lists(lists)}",
            hint="Set `blocks` to the path of an nn.ModuleList or nn.Sequential of modules with weights, or to a "
            "pattern of paths such as 'layer?'.",
        )
    return path, blocks


def _possible_block_lists(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Return path -> children of every list that may contain the blocks."""
    return {
        path: list(part)
        for path, part in module.named_modules()
        # A module list that is the whole model has no forward of its own.
        if isinstance(part, nn.Sequential) or (isinstance(part, nn.ModuleList) and path)
        if _max_children_of_one_class(part)
    }


def _most_likely_block_list(module: nn.Module, lists: dict[str, list[nn.Module]]) -> str:
    if not lists:
        raise SpecError(
            f"{type(module).__name__} has no list of blocks",
            hint="Move its blocks to an nn.ModuleList or nn.Sequential.",
        )
    ranks = {
        path: (
            -sum(_max_children_of_one_class(lists[other]) for other in _lists_differing_in_number(lists, path)),
            len(path.split(".")) if path else 0,
        )
        for path in lists
    }
    best = [path for path in lists if ranks[path] == min(ranks.values())]
    if (stages := _stage_list_path(lists, best[0])) is not None:
        return stages
    if len(best) > 1:
        raise SpecError(
            f"{type(module).__name__} has several possible lists of blocks; {_describe_lists(lists)}",
            hint=f"Set blocks={best[0]!r} or another.",
        )
    return best[0]


def _lists_differing_in_number(lists: dict[str, list[nn.Module]], path: str) -> list[str]:
    """Return the lists whose names differ from `path` only in a number at the end (`layer1`)."""
    name = path.rpartition(".")[2]
    # A number alone is a child of a list (`0`, `1`), not one of several numbered lists.
    if name.isdecimal():
        return [path]
    return [other for other in lists if re.sub(r"\d+$", "", other) == re.sub(r"\d+$", "", path)]


def _stage_list_path(lists: dict[str, list[nn.Module]], path: str) -> str | None:
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
    return re.sub(r"\d+$", "[0-9]*", path) if len(_lists_differing_in_number(lists, path)) > 1 else None


def _max_children_of_one_class(children: nn.Sequential | nn.ModuleList | list[nn.Module]) -> int:
    """Return the size of the largest group of children of one class, among those with weights."""
    classes = Counter(type(child) for child in children if next(child.parameters(), None) is not None)
    return max(classes.values(), default=0)


def _describe_lists(lists: dict[str, list[nn.Module]]) -> str:
    if not lists:
        return "there is none"
    entries = [f"{path or '(the module itself)'} with {len(children)}" for path, children in lists.items()]
    return f"there are {shorten_list(entries, 8)}"


def block_layer(parts: BlockRunner, position: int, sites: tuple[Site, ...], block_call: BlockCall) -> Layer:
    """Return the chain's `Layer` for one block."""
    return Layer(
        index=position + 2,
        role="block",
        path=parts.paths[position],
        parameters=parts.parameter_slots(position),
        call=partial(parts.run_block, position, sites),
        sites=sites,
        is_residual=block_call.entered == block_call.left,
        no_sites=siteless_parameters(parts.blocks[position], parts.slots[position], sites),
    )


class _TracedLayers(NamedTuple):
    """The blocks as layers, and the names of the outer weights that are read before and after them."""

    blocks: list[Layer]
    before: frozenset[str]
    after: frozenset[str]
    modality: Modality


def _trace_layers(parts: BlockRunner, example: Any) -> _TracedLayers:
    """Run a batch layer by layer; record the sites of each block, and the weights that stem and head read."""
    # If the module is on meta, stem and head run with stand-ins for weights, because they may read numbers such as
    # token ids. Blocks, which are most of the cost, run on meta.
    module = parts.module
    state, side = parts.initial_state(move_to_module(module, example))
    # Reads are recorded by object, so tied weights must be different objects.
    outer = parts.stand_in_weights(next(tensor.device for tensor in (*state.values(), *side.values())))
    blocks: list[Layer] = []
    with torch.no_grad():
        with ReadRecorder() as before:
            features = parts.run_stem(outer, state, side)
        # Not the stand-ins: buffers may be real where parameters are on meta.
        weights = named_weights(module)
        device = features["hidden"].device
        bare = torch.device("meta") if parts.is_on_meta else device
        with buffers_on_device(module, bare) if parts.is_on_meta else nullcontext():
            features, beside = {name: x.to(bare) for name, x in features.items()}, side.to(bare)
            streams = {stream: beside[f"inputs.{name}"] for name, stream in parts.beside.items()}
            for position in range(len(parts.blocks)):
                block_sites, features = parts.find_sites(position, weights, features, beside, streams)
                if parts.computed or parts.streams > 1:
                    block_sites = _single_run_sites(block_sites)
                blocks.append(block_layer(parts, position, block_sites, side.calls[position]))
        if parts.is_on_meta:
            features = {"hidden": torch.zeros(features["hidden"].shape, device=device)}
        # A head in one module reads nothing before the last block, but runs the stem again.
        after, last = ReadRecorder(), parts.blocks[-1]
        forget = last.register_forward_hook(lambda *_: after.seen.clear()) if parts.final else nullcontext()
        with after, forget:
            parts.run_head(outer, features, side)
    lies_in_space = parts.streams == 1 and any(len(block_call.left) > 2 for block_call in side.calls)
    modality = replace(TENSOR, pool="mean") if lies_in_space else _modality_of_module(module)
    return _TracedLayers(blocks, read_weight_names(outer, before), read_weight_names(outer, after), modality)


def _modality_of_module(module: nn.Module) -> Modality:
    """Return the modality of a module: texts if its main input is token ids, pooled at a decoder's last token."""
    if getattr(module, "main_input_name", None) != "input_ids":
        return TENSOR
    is_causal = any(getattr(part, "is_causal", False) for part in module.modules())
    return replace(TEXT, pool="last" if is_causal else "mean")


def read_weight_names(weights: dict[str, Tensor], watch: ReadRecorder) -> frozenset[str]:
    """Return the names of the weights that torch functions read while the recorder was active."""
    return frozenset(name for name, value in weights.items() if id(value) in watch.seen)


def _single_run_sites(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """Return the sites that are called exactly once per pass."""
    readers: dict[str, str] = {}
    sites_run_once = [site for site in sites if site.runs == 1]
    return tuple(replace(site, input=readers.setdefault(site.input, site.name)) for site in sites_run_once)


class ReadRecorder(TorchFunctionMode):
    """Records the `id` of every object that torch functions read, while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # By `id`, because `==` of tensors compares their entries.
        map_leaves((list(args), kwargs or {}), lambda value: self.seen.add(id(value)))
        return func(*args, **(kwargs or {}))


def check_deterministic(module: nn.Module, batch: Any, chain: LayerChain | None = None) -> None:
    """Raise if two passes of a model over one batch in eval mode are not bit-identical.

    `chain` runs only these layers, such as the image tower of a whole CLIP.
    """
    one, other = (
        first_tensor(run_model(module, raw_inputs(batch)))
        if chain is None
        else chain.library_states(module, batch)[-1][chain.layers[-1].stream]
        for _ in range(2)
    )
    if is_bit_identical(one, other):
        return
    difference = float((one - other).abs().max()) if one.shape == other.shape else float("nan")
    raise NumericsError(
        f"{type(module).__name__} is not deterministic: outputs for one batch differ by up to {difference:.3g}",
        hint="Remove random steps in eval mode: dropout without `training=self.training`, stochastic depth, noise, "
        "nondeterministic kernels.",
    )
