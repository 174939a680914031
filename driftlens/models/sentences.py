"""What the modules of sentence-transformers make of the features of a text's tokens: its embedding.

The equations are those of its modules Pooling, Dense, LayerNorm and Normalize, for texts that are padded on the right.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import activation

from driftlens.base.errors import CheckpointError, IncompatibleModelsError
from driftlens.checkpoints.sentences import Pooling, modules_of, pooling_of, settings_in
from driftlens.checkpoints.sources import check_finite
from driftlens.checkpoints.weight_files import open_folder
from driftlens.models.chain import LayerChain, Pool, SideInputs, State

Step = Callable[[Tensor], Tensor]

POOLED = "pooling"
"""The entry `pooling_mask` of raw inputs says which tokens a pooling sees, where these are not all that count."""

EMBEDDED = "embedding"
"""The setting of a chain that ends in embeddings: how these are pooled."""

_INNER: Mapping[str, Pool] = {"cls": "cls", "lasttoken": "last"}
"""How features of inner boundaries are pooled; as the embedding is where that is a linear map, else by their mean."""


def inner_pool(pooling: Pooling) -> Pool:
    """How one vector per text is taken of features before the last layer, by what the folder says of the last."""
    return _INNER.get(pooling.said, "mean")


def weights_of(mode: str, mask: Tensor) -> Tensor:
    """How much each token counts in one of the pools that are linear maps, [n, t].

    Args:
        mode: the pool, in sentence-transformers' own words.
        mask: [n, t], 1 where a token counts and 0 elsewhere, in the dtype of features.
    """
    if mode in ("cls", "lasttoken"):
        places = mask.argmax(dim=1) if mode == "cls" else mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
        return F.one_hot(places, mask.shape[1]).to(mask)
    if mode == "weightedmean":  # a token weighs as much as its place, counted from 1
        mask = mask * torch.arange(1, mask.shape[1] + 1, dtype=mask.dtype, device=mask.device)
    total = mask.sum(dim=1, keepdim=True).clamp_min(1e-9)
    return mask / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


def pooled_tokens(tokens: Tensor, mask: Tensor, modes: tuple[str, ...]) -> Tensor:
    """One vector per text of the features of its tokens, those of several modes behind each other.

    Args:
        tokens: [n, t, d].
        mask: [n, t], true where a token counts.
        modes: sentence-transformers' own words, in their order.

    Returns:
        [n, d * modes].
    """
    counts, parts = mask.to(tokens), []
    for mode in modes:
        if mode == "max":
            parts.append(tokens.masked_fill(counts[..., None] == 0, -torch.inf).amax(dim=1))
        else:
            parts.append(torch.einsum("nt,ntd->nd", weights_of(mode, counts), tokens))
    return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class Readout:
    """What a folder's modules make of the features of tokens."""

    pooling: Pooling
    steps: tuple[Step, ...] = ()

    def __call__(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """The embeddings [n, e] of texts whose tokens have the features [n, t, d]; masks as for `pooled_tokens`."""
        if mask is None:
            mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        embedding = pooled_tokens(tokens, mask, self.pooling.modes)
        for step in self.steps:
            embedding = step(embedding)
        return embedding


def readout_of(root: pathlib.Path, width: int) -> Readout:
    """What reads the tokens of a folder's transformer, whose features have `width` entries.

    Raises:
        IncompatibleModelsError: its modules contradict each other, or do what is not followed.
    """
    pooling, steps = pooling_of(root), list[Step]()
    if pooling.width not in (None, width):
        raise IncompatibleModelsError(
            f"{root}: its Pooling is of features with {pooling.width} entries, its transformer's have {width}",
            hint="Restore the folder from the original: one of both belongs to another model.",
        )
    size = width * len(pooling.modes)
    kinds = [module.kind for module in modules_of(root)]
    if "Pooling" in kinds and set(kinds[1 : kinds.index("Pooling")]) - {"Dropout"}:
        raise IncompatibleModelsError(
            f"{root}: {kinds[1]} stands before its Pooling and changes tokens, which is not followed",
            hint="Only what reads one vector per text is.",
        )
    for module in modules_of(root)[1:]:
        stated = settings_in(root / module.place) if module.place else {}
        if {stated.get(f"module_{end}put_name") or _EMBEDDING for end in ("in", "out")} != {_EMBEDDING}:
            raise IncompatibleModelsError(
                f"{root / module.place} reads or writes something else than the {_EMBEDDING}",
                hint="Only modules that make the embedding are followed.",
            )
        if module.kind == "Normalize":
            steps.append(lambda x: F.normalize(x, dim=-1))
        elif module.kind in ("Dense", "LayerNorm"):
            of_module = _dense if module.kind == "Dense" else _layer_norm
            step, size = of_module(root / module.place, stated, size)
            steps.append(step)
    return Readout(pooling, tuple(steps))


_EMBEDDING = "sentence_embedding"


def _weights(place: pathlib.Path, names: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The weights of a module, all of them known by these names and shapes; a bias may be missing."""
    source = open_folder(place)
    weights = {name: source.read(name).float() for name in source.headers}
    for name, value in weights.items():
        check_finite(source.name, name, value)
        if names.get(name) != tuple(value.shape):
            expected = f"{list(names[name])}" if name in names else f"only {', '.join(names)}"
            raise IncompatibleModelsError(
                f"{source.name}: {name!r} has shape {list(value.shape)}; expected {expected}",
                hint="Restore the folder from the original; its settings and weights don't go together.",
            )
    if missing := [name for name in names if name not in weights and not name.endswith("bias")]:
        raise CheckpointError(
            f"{source.name} has no {missing[0]!r}", hint="Restore the folder from the original."
        )
    return weights


def _dense(place: pathlib.Path, stated: Mapping[str, Any], size: int) -> tuple[Step, int]:
    """activation(W x + b), plus x or its own projection with `use_residual`; and how many entries leave it."""
    width, is_residual = stated.get("out_features"), bool(stated.get("use_residual"))
    if stated.get("in_features") != size or not isinstance(width, int):
        raise IncompatibleModelsError(
            f"{place} maps {stated.get('in_features')} features to {width}; it is given {size}",
            hint="Restore the folder from the original: its modules don't go together.",
        )
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (width, size), "linear.bias": (width,)}
    if is_residual and width != size:
        shapes["residual.weight"] = (width, size)
    weights, act = _weights(place, shapes), _activation(place, stated)

    def step(x: Tensor) -> Tensor:
        linear, *projections = (weights[name].to(x) for name in weights if name.endswith("weight"))
        bias = weights["linear.bias"].to(x) if "linear.bias" in weights else None
        output: Tensor = act(F.linear(x, linear, bias))
        return output + (F.linear(x, projections[0]) if projections else x) if is_residual else output

    weights = {name: weights[name] for name in shapes if name in weights}  # the map first
    return step, width


def _layer_norm(place: pathlib.Path, stated: Mapping[str, Any], size: int) -> tuple[Step, int]:
    """The library's LayerNorm, whose eps is torch's own."""
    weights = _weights(place, {"norm.weight": (size,), "norm.bias": (size,)})
    return partial(_normed, weights), size


def _normed(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    weight, bias = (weights[f"norm.{end}"].to(x) for end in ("weight", "bias"))
    return F.layer_norm(x, weight.shape, weight, bias)


def _activation(place: pathlib.Path, stated: Mapping[str, Any]) -> nn.Module:
    """One of torch's own without settings, by its name; nothing else of that name is imported."""
    path = str(stated.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = path.rpartition(".")[2]
    names = [*activation.__all__, "Identity"]
    try:
        if path.startswith("torch.nn.") and name in names:
            module: nn.Module = getattr(nn, name)()
            return module.eval()
    except TypeError:  # one that wants settings
        pass
    raise IncompatibleModelsError(
        f"{place}: the activation {path!r} is none of torch.nn's that need no settings",
        hint="Only such are followed; code of a folder's own is never run.",
    )


def with_embedding(chain: LayerChain, readout: Readout) -> LayerChain:
    """A chain that ends in features of tokens, with the embedding that is made of them as its final feature."""
    head, pool = chain.layers[-1], inner_pool(readout.pooling)

    def start(inputs: Any) -> tuple[State, SideInputs]:
        batch, mask = _apart(inputs)
        state, side = chain.start(batch)
        masks = {} if mask is None else {f"{POOLED}_mask": mask}
        return state, replace(side, tensors={**side.tensors, **masks})

    def call(parameters: Any, state: State, side: SideInputs, tap: Any = None) -> State:
        tokens = head.call(parameters, state, side, tap)[head.stream]
        counts = side.mask(POOLED)
        return {head.stream: readout(tokens, side.mask(head.stream) if counts is None else counts)}

    def library_states(module: nn.Module, inputs: Any) -> list[State]:
        batch, mask = _apart(inputs)
        *inner, last = chain.library_states(module, batch)
        tokens, counts = last[head.stream], batch.get("attention_mask") if mask is None else mask
        return [*inner, {head.stream: readout(tokens, None if counts is None else counts.to(tokens.device))}]

    shared = chain.require_shared
    return replace(
        chain,
        layers=(*chain.layers[:-1], replace(head, call=call)),
        start=start,
        library_states=library_states,
        require_shared=shared and (lambda models, batch: shared(models, _apart(batch)[0])),
        modality=replace(chain.modality, pool=pool),
        settings={**chain.settings, EMBEDDED: readout.pooling.said},
        final=None,
    )


def _apart(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """What the transformer reads, and which tokens the pooling sees, where these aren't all that count."""
    batch = dict(inputs)
    return batch, batch.pop(f"{POOLED}_mask", None)
