"""Calibratable modules inside any block, found by what they are and in the order in which they run."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from driftlens.models.chain import Site, SiteKind, Slot, State, Tap

# Name of a site that is the whole block, for which the path in the block would be empty.
BLOCK_ITSELF = "self"


def site_kind(module: nn.Module) -> SiteKind | None:
    """Return the kind of site that a module is, or None.

    Sites are linear modules, GPT-2's included; convolutions, as linear maps of patches; layer norms over one axis; and
    modules named like an RMS norm, with a weight vector and no bias.
    """
    if isinstance(module, nn.Linear) or _is_transposed(module) or _is_convolution(module):
        return "linear"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if isinstance(module, nn.LayerNorm):
        return "layer_norm"
    # By name, because each family of transformers has its own class, and torch's `nn.RMSNorm` is used by few.
    called = type(module).__name__
    if ("RMSNorm" in called or "T5LayerNorm" in called) and getattr(module, "bias", None) is None:
        return "rms_norm"
    return None


def _is_transposed(module: nn.Module) -> bool:
    """Return True for the linear module of GPT-2, whose weight is [in, out]."""
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2


def _is_convolution(module: nn.Module) -> bool:
    """Return True for a module that computes torch's own convolution, every output from all channels."""
    return (
        isinstance(module, nn.Conv2d)
        and (type(module).forward, type(module)._conv_forward) == (nn.Conv2d.forward, nn.Conv2d._conv_forward)
        and module.groups == 1
        and module.padding_mode == "zeros"
    )


def _reads_channels(module: nn.Module) -> bool:
    """Return True for a norm over the channels of [n, c, h, w], found by a trial call."""
    if site_kind(module) in (None, "linear") or type(module).forward in (
        nn.LayerNorm.forward,
        nn.RMSNorm.forward,
    ):
        return False
    weight: Any = module.weight
    # The extra axis of a norm of width 2 has length 3, so that it is not mistaken for the channels.
    try:
        module.forward(weight.new_zeros(1, len(weight), 1, 2 + (len(weight) == 2)))
    # A norm over the last axis expects another width; which error it raises depends on the library.
    except Exception:
        return False
    return True


class FeatureLayout(NamedTuple):
    """The layout that a module expects of features [n, c, h, w] or [n, h, w, c], and their shape per sample."""

    channels_last: bool
    shape: torch.Size


@contextlib.contextmanager
def readers(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[list[FeatureLayout | None]]:
    """Watch one run of `module`; then the list holds the next reader after each boundary of its blocks, or None.

    Modules that read no features in space (a pooling) are skipped.
    """
    upcoming_readers: list[FeatureLayout | None] = []
    passed: list[FeatureLayout | None] = []  # None for a boundary

    def read(channels_last: bool, x: Tensor) -> None:
        if x.dim() > 3:
            passed.append(FeatureLayout(channels_last, x.shape[1:]))

    with contextlib.ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(lambda *_: passed.append(None)).remove)
            last = block
        hooks.callback(last.register_forward_hook(lambda *_: passed.append(None)).remove)
        for part in module.modules():
            if (channels_last := _reads_channels_last(part)) is not None:
                hooks.callback(_on_input(part, partial(read, channels_last)))
        yield upcoming_readers
    upcoming = None
    for reader in reversed(passed):
        if reader is None:
            upcoming_readers.insert(0, upcoming)
        else:
            upcoming = reader


def _reads_channels_last(module: nn.Module) -> bool | None:
    """Return True if a module expects channels last, False if first, None if it does not matter."""
    if isinstance(module, _ConvNd | _NormBase | nn.GroupNorm):
        return False
    return None if site_kind(module) is None else not _reads_channels(module)


def slot_of(block: nn.Module, parameter: str, key: str) -> Slot:
    """Return the slot of a block's parameter, which is a matrix [out, in] for sites.

    Args:
        block: the block.
        parameter: the parameter's name in the block.
        key: its name in the whole model.
    """
    owner, _, leaf = parameter.rpartition(".")
    module = block.get_submodule(owner)
    if leaf == "weight" and _is_convolution(module):
        return Slot(key, kernel=tuple(module.get_parameter(leaf).shape[1:]))
    return Slot(key, transposed=leaf == "weight" and _is_transposed(module))


def sites_in_block(
    block: nn.Module,
    parameters: Collection[str],
    run: Callable[[], State],
    state: State,
    streams: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[tuple[Site, ...], State]:
    """Return the sites of a block in the order of their first call, and its output.

    Args:
        block: the block.
        parameters: names of its parameters; a module without one of its own is no site.
        run: runs the block on `state` and returns the state after it.
        state: the state before the block.
        streams: features of other tokens that the block reads, by the name of their stream.
    """
    # Inputs are compared by identity. The tensors are kept, so that no later one gets the same address.
    calls: defaultdict[str, list[_Reading]] = defaultdict(list)
    # Subclasses of linear modules that return more than the product, such as routers.
    not_linear: set[str] = set()
    candidates: dict[str, tuple[SiteKind, nn.Module]] = {}

    def note(name: str, _module: nn.Module, _args: object, output: object) -> None:
        if not isinstance(output, Tensor):
            not_linear.add(name)

    def append(name: str, geometry: Hashable, x: Tensor) -> None:
        calls[name].append((x, None if x.is_inference() else x._version, geometry))

    with contextlib.ExitStack() as hooks:
        for name, kind, module in _candidates(block, parameters):
            candidates[name] = kind, module
            hooks.callback(_on_input(module, partial(append, name, _geometry(module))))
            hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        output = run()
    # Modules that read some tokens only, such as experts, are no sites: their rows [m, k] are neither one per sample
    # nor one per place of the features. All children of a list are experts if one of them is or never runs, because an
    # expert can read that many rows by chance.
    whole = [_num_places(features["hidden"]) for features in (state, output)]
    reads_rows = {name for name, inputs in calls.items() if any(x.dim() == 2 for x, _, _ in inputs)}
    partial_readers = {
        _unnumbered(name)
        for name in candidates
        if name not in calls
        or any(
            x.dim() == 2
            and len(x) != len(state["hidden"])
            and (not len(x) or all(len(x) % places for places in whole))
            for x, _, _ in calls[name]
        )
    }
    sites = [
        Site(
            name,
            kind,
            _first_reader(calls, name),
            # The name of the constant depends on the library.
            eps=getattr(module, "eps", getattr(module, "variance_epsilon", None)),
            runs=len(inputs),
            stream=next((stream for stream, x in streams.items() if inputs[0][0] is x), ""),
        )
        for name, inputs in calls.items()
        for kind, module in [candidates[name]]
        if name not in not_linear
        if name not in reads_rows or _unnumbered(name) not in partial_readers
    ]
    return tuple(sites), output


def _num_places(features: Tensor) -> int:
    """Return the number of vectors in features [n, d], [n, t, d] or [n, c, h, w]."""
    return features.numel() // features.shape[1 if features.dim() > 3 else -1]


def _unnumbered(path: str) -> str:
    """Return a path with `*` in the place of numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def no_sites(
    block: nn.Module, parameters: Collection[str], sites: Collection[Site]
) -> dict[str, tuple[str, str]]:
    """Return the parameters of a block that belong to no site -> their module, and its `kind: reason`.

    Args:
        block: the block.
        parameters: names of its parameters.
        sites: its sites.
    """
    names, without_site = {site.name for site in sites}, {}
    for parameter in parameters:
        owner, _, leaf = parameter.rpartition(".")
        if owner not in names:
            parent = owner.rpartition(".")[0]
            # `nn.MultiheadAttention` never calls its output projection, so this is no site either.
            if owner != BLOCK_ITSELF and isinstance(block.get_submodule(parent), nn.MultiheadAttention):
                owner = parent
            module = block.get_submodule("" if owner == BLOCK_ITSELF else owner)
            without_site[parameter] = owner, _in_words(module, owner, leaf)
    return without_site


def _in_words(module: nn.Module, path: str, parameter: str) -> str:
    kind, why = type(module).__name__, ""
    if isinstance(module, nn.MultiheadAttention):
        why = "its projections don't run as modules"
    elif _is_routed(path) or "Expert" in kind:
        why = "experts of a mixture, which only some tokens reach"
    elif isinstance(module, _NormBase):
        why = "it uses training statistics"
    elif isinstance(module, _ConvNd):
        why = "depthwise or grouped" if module.groups > 1 else "no plain convolution of images"
    elif site_kind(module) is not None:
        why = "it never runs, or not on exactly all tokens"
    elif next(module.children(), None) is not None:
        kind = f"{kind}.{parameter}"
    return f"{kind}: {why}" if why else kind


# An input, its version and the geometry of its rows. Tensors of inference mode have no version.
_Reading = tuple[Tensor, int | None, Hashable]


def _first_reader(calls: Mapping[str, Sequence[_Reading]], reader: str) -> str:
    value, *reading = calls[reader][0]
    # In inference mode, a tensor that was overwritten in between can't be recognized.
    if reading[0] is None:
        return reader
    return next(name for name, [(x, *other), *_] in calls.items() if x is value and other == reading)


def _geometry(module: nn.Module) -> Hashable:
    """Return what distinguishes the rows that two sites make of one tensor."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size, module.stride, module.padding, module.dilation
    return _reads_channels(module)


@contextlib.contextmanager
def tapped(block: nn.Module, sites: Collection[Site], tap: Tap | None) -> Iterator[None]:
    """Call `tap` for each site in the body of a `with` statement.

    Args:
        block: the block.
        sites: the sites.
        tap: see `chain.Tap`; None does nothing.
    """
    with contextlib.ExitStack() as hooks:
        if tap is not None:
            for site in sites:
                module = block.get_submodule("" if site.name == BLOCK_ITSELF else site.name)
                _tap(module, partial(tap, site.name), hooks)
        yield


def _candidates(block: nn.Module, parameters: Collection[str]) -> Iterator[tuple[str, SiteKind, nn.Module]]:
    for path, module in block.named_modules():
        name, kind = path or BLOCK_ITSELF, site_kind(module)
        # A module whose weight is computed (weight norm) has no such parameter and can't be solved for.
        if kind is not None and f"{name}.weight" in parameters and not _is_routed(name):
            yield name, kind, module


def _is_routed(path: str) -> bool:
    """Return True if a module is among the experts of a mixture, which not every token reaches."""
    return "experts" in path.split(".")


def _on_input(module: nn.Module, listen: Callable[[Tensor], object]) -> Callable[[], None]:
    """Call `listen` with each input of `module`; return a function that ends this."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listen(args[0] if args else next(iter(kwargs.values())))

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def _tap(
    module: nn.Module,
    tap: Callable[[Tensor], Callable[[Tensor], Tensor | None] | None],
    hooks: contextlib.ExitStack,
) -> None:
    """Call `tap` with copies of each input and output of `module`, one row per place, until `hooks` is closed."""
    # Copies, as blocks may overwrite either later. A linear module's output is computed from its weight and bias,
    # without what a subclass, a parametrization or a hook adds.
    rows_of: Callable[[Tensor], Tensor] = Tensor.clone
    is_image = isinstance(module, nn.Conv2d) or _reads_channels(module)
    if is_image:
        rows_of = partial(_patches, module) if isinstance(module, nn.Conv2d) else _places
    heard: list[tuple[Tensor, Callable[[Tensor], Tensor | None] | None]] = []
    computes = isinstance(module, nn.Linear) and (
        type(module).forward is not nn.Linear.forward or is_parametrized(module)
    )

    def before(x: Tensor) -> None:
        copy = rows_of(x)
        heard.append((copy, tap(copy)))

    def after(_module: nn.Module, _args: object, output: Tensor) -> Tensor | None:
        x, hear = heard.pop()
        if hear is None:
            return None
        # No copy: the gradient must flow back to this tensor.
        if output.requires_grad:
            rows = _places(output) if is_image else output
        elif computes:
            weights = dict(module.named_parameters(recurse=False))
            rows = F.linear(x, weights["weight"], weights.get("bias"))
        else:
            rows = _places(output) if is_image else output.clone()
        changed = hear(rows)
        if changed is None and not output.requires_grad:
            return None
        rows = rows.clone() if changed is None else changed
        return rows.mT.reshape(output.shape) if is_image else rows

    hooks.callback(_on_input(module, before))
    # Before other hooks, because a site's output is that of the module alone.
    hooks.callback(module.register_forward_hook(after, prepend=True).remove)


def _places(x: Tensor) -> Tensor:
    """Copy [n, c, h, w] as [n, h * w, c]."""
    return x.flatten(-2).mT.clone(memory_format=torch.contiguous_format)


def _patches(module: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the patches that a convolution reads, [n, places, in * h * w]."""
    # Not the padding of `unfold`, which can't be asymmetric, as for `same`.
    padded = F.pad(x, module._reversed_padding_repeated_twice)
    return F.unfold(padded, module.kernel_size, module.dilation, stride=module.stride).mT.contiguous()
