"""What is attached to the boundaries of a model: maps of features, in the layers taken apart and in the library's own.

A map is part of the layer before it: e = m + p, p = A e and the split of the final drift hold with it as without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from driftlens.base.errors import IncompatibleModelsError
from driftlens.models.chain import LayerChain, Tap
from driftlens.models.frames import features_of, find_features
from driftlens.models.taking_apart.carried import num_streams


class Attachment(Protocol):
    """A pure, differentiable map of the features at one boundary of one variant, for one task.

    Surgery puts one behind the last layer, SurgeryV2 one behind every layer. One that has an attribute `site`, the name
    of a site of the layer, is put on the output of that site in place of the layer's (IntervMerge); one whose attribute
    `reads_inputs` is true is then given what the site reads, too, as a second argument (low-rank corrections).
    """

    def __call__(self, stream: Tensor) -> Tensor:
        """Features [n, t, d] or [n, d] in the place of those that left the layer, of the same shape."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """All numbers that make up the map, by name: what is saved of it.

        An attribute `code` may hold Python that makes `f` anew of `f` and of these tensors, `t`, for others to read.
        """
        ...


Attachments = Mapping[tuple[str, int], Attachment]
"""(task, boundary) -> what is attached there; boundary l is what leaves layer l."""


@dataclass(frozen=True)
class InSites:
    """Several attachments in one layer, each on the output of a site of its own."""

    parts: tuple[Attachment, ...]

    def __call__(self, stream: Tensor) -> Tensor:
        """Nothing is put on what leaves the layer."""
        return stream

    def tensors(self) -> Mapping[str, Tensor]:
        """Those of the parts lie apart; see `by_site`."""
        return {}


def by_site(attachment: Attachment | None) -> dict[str, Attachment]:
    """Site of the layer -> what is put on its output; under an empty name, what is put on what leaves the layer."""
    parts = attachment.parts if isinstance(attachment, InSites) else [attachment] if attachment else []
    return {str(getattr(part, "site", "")): part for part in parts}


def _put(attachment: Attachment, output: Tensor, inputs: Tensor | None) -> Tensor:
    called: Any = attachment
    changed: Tensor = called(output, inputs) if getattr(attachment, "reads_inputs", False) else called(output)
    return changed


def attachment_tensors(attachments: Attachments) -> dict[str, Tensor]:
    """All tensors of some attachments by their names in files: `boundary/tensor/task`, `boundary:site/tensor/task`."""
    return {
        f"{boundary}{f':{site}' if site else ''}/{name}/{task}": value.detach()
        for (task, boundary), attachment in sorted(attachments.items(), key=lambda entry: entry[0])
        for site, part in by_site(attachment).items()
        for name, value in part.tensors().items()
    }


def portable_tensors(
    module: nn.Module, chain: LayerChain, attachments: Attachments, prefix: str = ""
) -> dict[str, Tensor]:
    """All tensors of some attachments as `module/tensor/task`, by the path of the module behind which they act.

    `prefix` is what the paths begin with where the library's whole model holds the module.
    """
    return {
        f"{prefix}{module_of(module, chain, boundary, site)}".rstrip(".") + f"/{name}/{task}": value.detach()
        for (task, boundary), attachment in attachments.items()
        for site, part in by_site(attachment).items()
        for name, value in part.tensors().items()
    }


def attachments_from(
    tensors: Iterable[tuple[str, Tensor]], make: Callable[[Mapping[str, Tensor], str], Attachment]
) -> dict[tuple[str, int], Attachment]:
    """What `attachment_tensors` took apart, put together by `make` from the tensors of a place and its site."""
    by_place: defaultdict[tuple[str, int], dict[str, dict[str, Tensor]]] = defaultdict(dict)
    for key, value in tensors:
        place, tensor, task = key.split("/", 2)
        boundary, _, site = place.partition(":")
        by_place[task, int(boundary)].setdefault(site, {})[tensor] = value
    made = {place: [make(of, site) for site, of in sites.items()] for place, sites in by_place.items()}
    return {place: parts[0] if len(parts) == 1 else InSites(tuple(parts)) for place, parts in made.items()}


def changing(attachments: Mapping[str, Attachment], tap: Tap | None) -> Tap:
    """A tap that puts attachments on the outputs of sites; another one hears what comes of it."""

    def both(name: str, x: Tensor) -> Callable[[Tensor], Tensor | None] | None:
        hear = None if tap is None else tap(name, x)

        def change(output: Tensor) -> Tensor:
            changed = _put(attachments[name], output, x)
            heard = None if hear is None else hear(changed)
            return changed if heard is None else heard

        return change if name in attachments else hear

    return both


@contextmanager
def attached_to(
    module: nn.Module, chain: LayerChain, attachments: Mapping[int, Attachment]
) -> Iterator[None]:
    """Inside the context, an ordinary forward pass of `module` runs with attachments behind its stem and blocks.

    What is attached behind the head is not: no module's output is the final feature in every library.
    """
    with ExitStack() as hooks:
        for layer in chain.blocks:
            for site, attachment in by_site(attachments.get(layer.index)).items():
                path = module_of(module, chain, layer.index, site)
                hook = behind(path, attachment)
                hooks.callback(module.get_submodule(path).register_forward_hook(hook).remove)
        if 1 in attachments:
            first = chain.blocks[0].path
            enter = _before(first, attachments[1])
            hooks.callback(
                module.get_submodule(first).register_forward_pre_hook(enter, with_kwargs=True).remove
            )
        yield


def module_of(module: nn.Module, chain: LayerChain, boundary: int, site: str = "") -> str:
    """The path of the library's module that gives what leaves a layer, or a site of it; refused where none does.

    An attention may not call its projection as a module; then its own output is that.
    """
    layer = chain.layers[boundary - 1]
    if layer.role != "block":
        if layer.role == "stem" or chain.final is None:
            raise IncompatibleModelsError(
                f"what leaves the {layer.role} is no module's output in {chain.architecture}, so nothing can be "
                "attached to the library's own model there",
                hint="Choose a method that attaches behind blocks, or one that changes weights.",
            )
        return chain.final
    if num_streams(module.get_submodule(layer.path)) > 1 and not site:
        raise IncompatibleModelsError(
            f"what leaves {layer.path} is several streams of each token, so nothing can be attached to the library's "
            "own model there",
            hint="Choose a method that attaches behind the head, or one that changes weights.",
        )
    if not layer.is_returned and not site:
        raise IncompatibleModelsError(
            f"what leaves {layer.path} is not what that module returns, so nothing can be attached to the library's "
            "own model there",
            hint="Choose a method that attaches behind the head, or one that changes weights.",
        )
    parent = f"{layer.path}.{site}".rpartition(".")[0]
    if site and isinstance(module.get_submodule(parent), nn.MultiheadAttention):
        return parent
    return f"{layer.path}.{site}" if site else layer.path


def behind(path: str, attachment: Attachment) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook of the module at a path that puts the map on its features."""

    def change(_module: nn.Module, inputs: Any, output: Any) -> Any:
        changed = _put(attachment, features_of(path, output), inputs[0] if inputs else None)
        return changed if isinstance(output, Tensor) else type(output)([changed, *output[1:]])

    return change


def _before(path: str, attachment: Attachment) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def change(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place, features = find_features(path, args, kwargs)
        if isinstance(place, int):
            return (*args[:place], attachment(features), *args[place + 1 :]), kwargs
        return args, {**kwargs, place: attachment(features)}

    return change
