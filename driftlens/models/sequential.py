"""Any module with a list of blocks, taken apart by interception: no code is asked of the user.

The stem is all the module does before its first block, the head all it does after the last; a block is run on
its own. What flows is `hidden`: the first tensor each block is given and the first it returns. Whatever else
a block is given (masks, positions) is recorded once per batch from the module itself and must be the same for
every model. Rows of padding are zeros wherever the batch's mask says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from driftlens.errors import NumericsError, SpecError
from driftlens.models.chain import Layer, LayerChain, Site, Slot
from driftlens.models.dissection import Dissection, fitted, run, same_values, tied_weights
from driftlens.models.frames import Mask, features_of, frame_at, mapped, raw_inputs, result
from driftlens.models.interception import call
from driftlens.models.registry import adapters
from driftlens.models.sites import registered_sites, traced_sites

_WIDTH = 16
_PATCH = 8
_HEADS = 2


class SequentialAdapter:
    """Takes modules apart that hold their blocks in a list; the fallback where no other adapter matches.

    Args:
        blocks: path of the list of blocks; None takes the list with the most children of one class; among equals
            the outermost one.
        mask: which tokens count; see `driftlens.models.frames.Mask`.
    """

    name = "sequential"

    def __init__(self, blocks: str | None = None, mask: Mask = None) -> None:
        self.blocks = blocks
        self.mask = mask

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` has a list of children with weights."""
        return bool(_candidates(module))

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
        path, found = _block_list(module, self.blocks)
        parts = Dissection(module, found, self.mask)
        weights = [parts.block_weights(position) for position in range(len(parts.blocks))]
        if example is None:
            sites = [registered_sites(block, own) for block, own in zip(parts.blocks, weights, strict=True)]
            is_residual, head_only = [False] * len(sites), frozenset[str]()
        else:
            sites, is_residual, head_only = _traced(parts, example)
        blocks = [
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
                "blocks": path,
                "block_classes": sorted({type(block).__name__ for block in parts.blocks}),
            },
        )

    def tiny(self) -> nn.Module:
        """A small transformer over image patches, for images [n, 3, h, w] with h and w multiples of 8."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return TinyStack().eval()


adapters.register(SequentialAdapter.name)(SequentialAdapter())


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
    return sites, is_residual, everywhere - before


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


class TinyStack(nn.Module):
    """Patches and a class token through three pre-norm blocks; the feature is the normed class token.

    Takes images [n, 3, h, w] with h and w multiples of 8; returns [n, 16].
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _WIDTH, _PATCH, stride=_PATCH)
        self.class_token = nn.Parameter(torch.randn(1, 1, _WIDTH))
        self.blocks = nn.ModuleList(_TinyBlock() for _ in range(3))
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of a batch of images."""
        patches = self.patches(pixels).flatten(2).mT
        hidden = torch.cat([self.class_token.expand(len(pixels), -1, -1), patches], dim=1)
        for block in self.blocks:
            hidden = block(hidden)
        features: Tensor = self.norm(hidden[:, 0])
        return features


class _TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm_1(hidden)
        query, key, value = (
            project(normed).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        change: Tensor = self.down(F.gelu(self.up(self.norm_2(hidden))))
        return hidden + change
