"""Experts of a mixture in fused tensors: each of their matrices as a site, and the routes of tokens.

A mixture is a module with matrices of all its experts in tensors [experts, ., .]. It is given the experts of each token
and their gates, or the tokens of every expert. Its forward function is not replaced: a `TorchFunctionMode` watches what
it reads from its tensors, and routes are read off the router's `topk`.
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
        path: path of the module in the block.
        module: the module, for its structure.
        size: number of experts.
        matrices: names of its tensors [experts, ., .].
        is_routed: True if the module is given routes, False if it is given the tokens of every expert.
    """

    path: str
    module: nn.Module
    size: int
    matrices: tuple[str, ...]
    is_routed: bool

    @property
    def is_transposed(self) -> bool:
        """True if its matrices are stored as [in, out]."""
        return bool(getattr(self.module, "is_transposed", not self.is_routed))

    def slots(self, key: Callable[[str], str]) -> dict[str, Slot]:
        """Return the slot of every expert's parameter by its name in the block; `key` maps names to checkpoint keys."""
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
        """Return the name of an expert's matrix as a site."""
        return f"{self.path}.{expert}.{matrix}"

    def sites(self) -> tuple[Site, ...]:
        """Return every expert's matrices, in forward order; each reads the tokens of its expert."""
        return tuple(
            Site(name, "linear", name, token_weights=GATED, expert=expert)
            for expert in range(self.size)
            for matrix in self.matrices
            for name in [self.site(expert, matrix)]
        )


def mixture_of(block: nn.Module) -> Mixture | None:
    """Return the mixture of a block; None without one, or with several."""
    # A router's `topk` is recognized by the number of experts alone, so routes of several mixtures would be confused.
    several = [
        mixture for path, module in block.named_modules() if (mixture := _mixture(path, module)) is not None
    ]
    return several[0] if len(several) == 1 else None


def _mixture(path: str, module: nn.Module) -> Mixture | None:
    """Return the module as a mixture, or None."""
    # Fused experts have no class in common, only tensors [experts, ., .] and a forward function of one or three inputs.
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
    """Return parameters as the fused tensor, as a view if they are contiguous in one storage."""
    base = parts[0]
    # Parts of one fused tensor are contiguous unless some were replaced. A copy would double their memory.
    if any(
        part.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        or part.stride() != base.stride()
        or part.storage_offset() != base.storage_offset() + place * base.numel()
        for place, part in enumerate(parts)
    ):
        return torch.cat([slot.stored(part) for slot, part in zip(slots, parts, strict=True)])
    order = slice(None, None, -1) if slots[0].transposed else slice(None)
    shape, strides = (len(parts), *base.shape[order]), (base.numel(), *base.stride()[order])
    return base.as_strided(shape, strides, base.storage_offset())


@contextmanager
def mixing(
    block: nn.Module,
    mixture: Mixture | None,
    weights: Mapping[str, Tensor],
    sites: Collection[Site],
    tap: Tap | None,
    routes: Routes | None,
) -> Iterator[None]:
    """Call `tap` for experts' matrices while the block runs; write `routes`, or use given ones.

    Args:
        block: the block.
        mixture: its mixture; None does nothing.
        weights: the block's weights of this pass by name.
        sites: the sites to call `tap` for.
        tap: see `chain.Tap`.
        routes: written, or used if they are given; None without either.
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
    """Follows one mixture through one pass: its routes, what it reads from its tensors, and their products."""

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
        self.read: dict[int, tuple[str, Tensor]] = {}  # keeps tensors, so that no other gets the same id

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record routes and gates, or replace them by given ones; a forward pre-hook.

        Args:
            _module: the mixture's module.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            The new arguments, or None to keep them.
        """
        self.is_inside = True
        # Routes are read here and not only in `topk`, as some routers do not call it.
        if self.mixture.is_routed:
            self.features, chosen, gates = (*args, *kwargs.values())
            self.routes.record(chosen, gates)
        if self.features is None or not self.routes.is_given:
            return None
        assert self.routes.chosen is not None and self.routes.gates is not None
        # Experts keep the given order, which identifies rows. Tokens with the same experts keep their router's own
        # gates; for others, the router has none, so they get the given ones.
        experts = self.routes.chosen
        own_gates = gates.gather(-1, (experts[..., None] == chosen[:, None]).long().argmax(dim=-1))
        elsewhere = self.routes.changed(Routes(chosen, gates))[:, None]
        sent = experts, torch.where(elsewhere, self.routes.gates, own_gates)
        self.anew = self.routes.anew(self.features)
        if self.anew is None:
            return (self.features, *sent), {}
        return tuple(part[self.anew] for part in (self.features, *sent)), {}

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Keep the rows of a routed mixture, or complete them by those of the other pass; a forward hook.

        Args:
            _module: the mixture's module.
            _args: its arguments.
            output: its output.

        Returns:
            The new output, or None to keep it.
        """
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
            # The module adds to these zeros in place, and the sums may carry derivatives, also under `vmap`. A product
            # with the features is batched as they are.
            return args[0] * 0
        if func in _TOP and args[0].shape[-1] == self.mixture.size:
            return self._top(func, args, kwargs)
        if func in _READ and id(args[0]) in self.stacks:
            # The index of an expert is read from the device once, as without this mode.
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
        """Return the largest scores, or those of the given experts."""
        chosen = self.routes.chosen if self.routes.is_given else None
        if chosen is None or (kwargs.get("k") or args[1]) != chosen.shape[-1]:
            top = func(*args, **kwargs)
            if not self.mixture.is_routed:
                self.routes.record(top.indices, torch.ones_like(top.values))
            return top
        scores = args[0]
        return torch.return_types.topk((scores.gather(-1, chosen.reshape(*scores.shape[:-1], -1)), chosen))

    def _heard(self, site: str, x: Tensor, y: Tensor) -> Tensor:
        """Return the product of a matrix, or what the tap puts in its place."""
        if site not in self.names or self.tap is None or (hear := self.tap(site, x.clone())) is None:
            return y
        bias = self.biases.get(site, 0.0)
        heard = y + bias
        changed = hear(heard)
        if changed is None and not y.requires_grad:
            return y
        return (heard if changed is None else changed) - bias  # the gradient flows back to `heard`

    def _heard_by_expert(self, matrix: str, rows: Tensor, weights: Tensor) -> Tensor:
        """Call the tap for all experts, each of which is given every token, with zeros in other experts' rows."""
        outputs = torch.bmm(rows, weights)
        for expert, size in enumerate(self.routes.sizes(self.mixture.size)):
            tokens = self.routes.of(expert, size)[0]
            y = outputs[expert, tokens]
            outputs[expert, tokens] = self._heard(self.mixture.site(expert, matrix), rows[expert, tokens], y)
        return outputs
