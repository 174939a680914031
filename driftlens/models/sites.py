"""Calibratable modules inside any block, found by what they are and in the order in which they run."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from driftlens.models.chain import Site, SiteKind, Tap

BLOCK_ITSELF = "self"
"""Name of the site that is the whole block."""


def site_kind(module: nn.Module) -> SiteKind | None:
    """What kind of site a module is, or None.

    Linear modules, layer norms over one axis, and modules called like an RMS norm that have a weight vector
    and no bias.
    """
    if isinstance(module, nn.Linear):
        return "linear"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if isinstance(module, nn.LayerNorm):
        return "layer_norm"
    if "RMSNorm" in type(module).__name__ and getattr(module, "bias", None) is None:
        return "rms_norm"
    return None


def registered_sites(block: nn.Module, parameters: Collection[str]) -> tuple[Site, ...]:
    """Sites in the order in which they are registered, each with an input of its own.

    This is what can be said without running the block.
    """
    return tuple(
        Site(name, kind, name, eps=_eps(module))
        for name, kind, module in _candidates(block, parameters)
        if not _inside_attention(block, name)
    )


def traced_sites(
    block: nn.Module, parameters: Collection[str], run: Callable[[], object]
) -> tuple[tuple[Site, ...], object]:
    """Sites in the order of their first call while `run` runs the block, and what `run` returned.

    Sites that are handed the same tensor, not overwritten in between, share the `input` name of the first of them.
    The output projection of `nn.MultiheadAttention` is used but never called, so it is no site.
    """
    # Keeps the tensors, so that none is taken for a later one at the same address.
    calls: defaultdict[str, list[_Seen]] = defaultdict(list)
    known: dict[str, tuple[SiteKind, float | None]] = {}
    with contextlib.ExitStack() as hooks:
        for name, kind, module in _candidates(block, parameters):
            known[name] = kind, _eps(module)
            hooks.callback(_on_input(module, partial(_append, calls, name)))
        output = run()
    sites = [
        Site(name, kind, _first_reader(calls, name), eps=eps, runs=len(inputs))
        for name, inputs in calls.items()
        for kind, eps in [known[name]]
    ]
    return tuple(sites), output


_Seen = tuple[Tensor, int | None]
"""An input, and how often it had been overwritten when it was seen; None in inference mode, which doesn't count."""


def _append(calls: defaultdict[str, list[_Seen]], name: str, value: Tensor) -> None:
    calls[name].append((value, None if value.is_inference() else value._version))


def _first_reader(calls: Mapping[str, Sequence[_Seen]], reader: str) -> str:
    value, version = calls[reader][0]
    if version is None:
        return reader
    return next(name for name, [(x, at), *_] in calls.items() if x is value and at == version)


@contextlib.contextmanager
def tapped(block: nn.Module, sites: Collection[Site], tap: Tap | None) -> Iterator[None]:
    """While this is open, `tap` hears of each site as `Tap` says."""
    with contextlib.ExitStack() as hooks:
        if tap is not None:
            for site in sites:
                module = block.get_submodule("" if site.name == BLOCK_ITSELF else site.name)
                _tap(module, partial(tap, site.name), hooks)
        yield


def _candidates(block: nn.Module, parameters: Collection[str]) -> Iterator[tuple[str, SiteKind, nn.Module]]:
    for path, module in block.named_modules():
        name, kind = path or BLOCK_ITSELF, site_kind(module)
        # A module whose weight is computed (weight norm and the like) has no such parameter and can't be
        # solved for.
        if kind is not None and f"{name}.weight" in parameters:
            yield name, kind, module


def _eps(module: nn.Module) -> float | None:
    """The constant of a norm; libraries keep it under two names."""
    return getattr(module, "eps", getattr(module, "variance_epsilon", None))


def _inside_attention(block: nn.Module, name: str) -> bool:
    parent = name.rpartition(".")[0]
    return name != BLOCK_ITSELF and isinstance(block.get_submodule(parent), nn.MultiheadAttention)


def _on_input(module: nn.Module, listen: Callable[[Tensor], object]) -> Callable[[], None]:
    """Have `listen` hear of each input of `module`; call what is returned to end that."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listen(args[0] if args else next(iter(kwargs.values())))

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def _tap(
    module: nn.Module,
    tap: Callable[[Tensor], Callable[[Tensor], None] | None],
    hooks: contextlib.ExitStack,
) -> None:
    """Have `tap` hear of each input of `module`, and what it returns of the output, until `hooks` is closed.

    They hear copies, as blocks may overwrite either one later: residual sums, in-place activations. The output of a
    linear module is that of its own weight and bias, whatever a subclass, a parametrisation or a hook makes of it.
    """
    heard: list[tuple[Tensor, Callable[[Tensor], None] | None]] = []
    computes = isinstance(module, nn.Linear) and (
        type(module).forward is not nn.Linear.forward or is_parametrized(module)
    )

    def before(x: Tensor) -> None:
        copy = x.clone()
        heard.append((copy, tap(copy)))

    def after(_module: nn.Module, _args: object, output: Tensor) -> None:
        x, hear = heard.pop()
        if hear is not None:
            own = dict(module.named_parameters(recurse=False))
            hear(F.linear(x, own["weight"], own.get("bias")) if computes else output.clone())

    hooks.callback(_on_input(module, before))
    hooks.callback(module.register_forward_hook(after, prepend=True).remove)
