"""Where a module keeps its blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from driftlens.errors import SpecError


@dataclass(frozen=True)
class BlockList:
    """A list of blocks inside a module.

    Attributes:
        path: path of the list; empty when the module is the list.
        blocks: path of each block -> block, in forward order.
    """

    path: str
    blocks: dict[str, nn.Module]


def has_block_list(module: nn.Module) -> bool:
    """Whether `module` has a list of children with weights, so that it can be taken apart block by block."""
    return bool(_candidates(module))


def block_list(module: nn.Module, path: str | None = None) -> BlockList:
    """The blocks of `module`.

    Args:
        module: any module that holds its blocks in an `nn.ModuleList` or `nn.Sequential`.
        path: path of that list. None looks for the list with the most children of one class; among equals the
            outermost one.

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
    return BlockList(path, {f"{path}.{name}" if path else name: block for name, block in children})


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
