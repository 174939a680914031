"""Experts of a mixture that lie in fused tensors: each of their matrices as a site of its own, and who goes where.

A mixture is found by what it is: a module with matrices of all its experts in tensors [experts, ., .], which either is
told which experts every token goes to and how much each counts, or is handed the tokens of every expert. Nothing of its
forward pass is replaced: what it reads of its tensors is watched while it runs, and where tokens go is what the router
takes of the largest scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from driftlens.models.chain import GATED, Routes, Site, Slot, Tap

_READ = (torch.Tensor.__getitem__, torch.select, torch.Tensor.select)
_PRODUCTS = (
    *(torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__),
    *(torch.mm, torch.Tensor.mm),
)
_BATCHED = (torch.bmm, torch.Tensor.bmm)
_TOP = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True, eq=False)
class Mixture:
    """Experts of one block in one module.

    Attributes:
        path: the module's, in the block.
        module: lends its structure.
        size: how many experts there are.
        matrices: names of its tensors [experts, ., .].
        is_routed: whether the module is told who goes where; otherwise it is handed the tokens of every expert.
    """

    path: str
    module: nn.Module
    size: int
    matrices: tuple[str, ...]
    is_routed: bool

    @property
    def is_transposed(self) -> bool:
        """Whether its matrices are stored as [in, out]."""
        return bool(getattr(self.module, "is_transposed", not self.is_routed))

    def slots(self, key: Callable[[str], str]) -> dict[str, Slot]:
        """Name of every expert's parameter in the block -> where it lies; `key` names a block's parameter elsewhere."""
        return {
            f"{self.site(expert, matrix)}.{leaf}": Slot(
                key(f"{self.path}.{fused}"),
                rows=(expert, expert + 1),
                transposed=leaf == "weight" and self.is_transposed,
                is_stacked=True,
            )
            for matrix in self.matrices
            for leaf, fused in (("weight", matrix), ("bias", f"{matrix}_bias"))
            if hasattr(self.module, fused)
            for expert in range(self.size)
        }

    def site(self, expert: int, matrix: str) -> str:
        """The name of an expert's matrix as a site."""
        return f"{self.path}.{expert}.{matrix}"

    def sites(self) -> tuple[Site, ...]:
        """Every expert's matrices, in the order in which they run; each reads what its own expert is sent."""
        return tuple(
            Site(name, "linear", name, token_weights=GATED, expert=expert)
            for expert in range(self.size)
            for matrix in self.matrices
            for name in [self.site(expert, matrix)]
        )


def mixture_of(block: nn.Module) -> Mixture | None:
    """The mixture of a block, where it has one; of several none is followed."""
    several = [
        mixture for path, module in block.named_modules() if (mixture := _mixture(path, module)) is not None
    ]
    return several[0] if len(several) == 1 else None


def _mixture(path: str, module: nn.Module) -> Mixture | None:
    """The module as a mixture, unless it is none."""
    stacks = {name: weight for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
    sizes = {len(weight) for weight in stacks.values()}
    if not path or len(stacks) < 2 or len(sizes) != 1 or isinstance(module, _ConvNd):
        return None
    parameters = [
        entry
        for entry in inspect.signature(type(module).forward).parameters.values()
        if entry.name != "self" and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
    ]
    if len(parameters) not in (1, 3):
        return None
    return Mixture(path, module, sizes.pop(), tuple(stacks), len(parameters) == 3)


def assembled(slots: Sequence[Slot], parts: Sequence[Tensor]) -> Tensor:
    """Parameters as the fused tensor: a view where they lie one behind the other in one memory."""
    first = parts[0]
    if any(
        part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        or part.stride() != first.stride()
        or part.storage_offset() != first.storage_offset() + place * first.numel()
        for place, part in enumerate(parts)
    ):
        return torch.cat([slot.stored(part) for slot, part in zip(slots, parts, strict=True)])
    order = slice(None, None, -1) if slots[0].transposed else slice(None)
    shape, strides = (len(parts), *first.shape[order]), (first.numel(), *first.stride()[order])
    return first.as_strided(shape, strides, first.storage_offset())


@contextmanager
def mixing(
    block: nn.Module,
    mixture: Mixture | None,
    weights: Mapping[str, Tensor],
    sites: Collection[Site],
    tap: Tap | None,
    routes: Routes | None,
) -> Iterator[None]:
    """While this is open, the block runs with `weights` by their names in it, and `tap` hears of experts' matrices.

    Who goes where is written to `routes`, or read from there where it is given.
    """
    if mixture is None:
        yield
        return
    names = {site.name for site in sites}
    watch = _Watch(mixture, weights, names, tap, Routes() if routes is None else routes)
    with ExitStack() as hooks:
        hooks.callback(mixture.module.register_forward_pre_hook(watch.before, with_kwargs=True).remove)
        if mixture.is_routed:
            hooks.callback(mixture.module.register_forward_hook(watch.after).remove)
        with watch:
            yield


class _Watch(TorchFunctionMode):
    """Follows one mixture through one pass: who goes where, what it reads of its tensors and multiplies."""

    def __init__(
        self,
        mixture: Mixture,
        weights: Mapping[str, Tensor],
        names: Collection[str],
        tap: Tap | None,
        routes: Routes,
    ) -> None:
        super().__init__()
        self.mixture, self.names, self.tap, self.routes = mixture, names, tap, routes
        self.biases = {
            mixture.site(expert, matrix): bias
            for matrix in mixture.matrices
            for expert, bias in enumerate(weights.get(f"{mixture.path}.{matrix}_bias", ()))
        }
        self.stacks = {id(weights[f"{mixture.path}.{matrix}"]): matrix for matrix in mixture.matrices}
        self.is_inside = False
        self.features: Tensor | None = None
        self.anew: Tensor | None = None
        self.read: dict[int, tuple[str, Tensor]] = {}  # keeps what was read, so that no other takes its id

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the mixture runs: who goes where, and how much each counts.

        A router that doesn't look for the largest scores is overruled here: experts come in the order in which they are
        given, as rows are told apart by it, with the gates that it made of them, and where tokens are to go elsewhere
        with those that are given.
        """
        self.is_inside = True
        if self.mixture.is_routed:
            self.features, chosen, gates = (*args, *kwargs.values())
            self.routes.record(chosen, gates)
        if self.features is None or not self.routes.is_given:
            return None
        assert self.routes.chosen is not None and self.routes.gates is not None
        experts = self.routes.chosen
        own_gates = gates.gather(-1, (experts[..., None] == chosen[:, None]).long().argmax(dim=-1))
        elsewhere = self.routes.changed(Routes(chosen, gates))[:, None]
        sent = experts, torch.where(elsewhere, self.routes.gates, own_gates)
        self.anew = self.routes.anew(self.features)
        if self.anew is None:
            return (self.features, *sent), {}
        return tuple(part[self.anew] for part in (self.features, *sent)), {}

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Behind a mixture that is told who goes where: its rows are kept, or completed by those of a pass beside."""
        assert self.features is not None
        if self.anew is not None:
            assert self.routes.beside is not None and self.routes.beside.rows is not None
            return self.routes.beside.rows[1].index_put((self.anew,), output)
        if self.routes.keeps_rows and self.features.dim() == 2 and output.shape == self.features.shape:
            self.routes.rows = self.features, output
        return None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros_like and self.is_inside:
            # What is added up in it may carry derivatives, also for many vectors at once.
            return args[0] * 0
        if func in _TOP and args[0].shape[-1] == self.mixture.size:
            return self._top(func, args, kwargs)
        if func in _READ and id(args[0]) in self.stacks:
            # A number that lies on a device is waited for once, as it is without us.
            expert = int(args[-1]) if isinstance(args[-1], Tensor) and not args[-1].dim() else args[-1]
            part = func(*args[:-1], expert, **kwargs)
            if part.dim() == 2:
                self.read[id(part)] = self.mixture.site(int(expert), self.stacks[id(args[0])]), part
            return part
        if self.tap is not None:
            if func in _PRODUCTS and id(args[1]) in self.read:
                return self._heard(self.read[id(args[1])][0], args[0], func(*args, **kwargs))
            if func in _BATCHED and id(args[1]) in self.stacks:
                return self._heard_by_expert(self.stacks[id(args[1])], *args)
        return func(*args, **kwargs)

    def _top(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The largest scores, or those of the experts that are given."""
        chosen = self.routes.chosen if self.routes.is_given else None
        if chosen is None or (kwargs.get("k") or args[1]) != chosen.shape[-1]:
            top = func(*args, **kwargs)
            if not self.mixture.is_routed:
                self.routes.record(top.indices, torch.ones_like(top.values))
            return top
        scores = args[0]
        return torch.return_types.topk((scores.gather(-1, chosen.reshape(*scores.shape[:-1], -1)), chosen))

    def _heard(self, site: str, x: Tensor, y: Tensor) -> Tensor:
        """What a matrix makes of its rows, or what whoever listens wants in its place."""
        if site not in self.names or self.tap is None or (hear := self.tap(site, x.clone())) is None:
            return y
        bias = self.biases.get(site, 0.0)
        heard = y + bias
        changed = hear(heard)
        if changed is None and not y.requires_grad:
            return y
        return (heard if changed is None else changed) - bias  # of what is heard come the gradients

    def _heard_by_expert(self, matrix: str, rows: Tensor, weights: Tensor) -> Tensor:
        """The same of all experts, each of which is handed every token, with zeros where it isn't meant."""
        outputs = torch.bmm(rows, weights)
        for expert, size in enumerate(self.routes.sizes(self.mixture.size)):
            tokens = self.routes.of(expert, size)[0]
            y = outputs[expert, tokens]
            outputs[expert, tokens] = self._heard(self.mixture.site(expert, matrix), rows[expert, tokens], y)
        return outputs
