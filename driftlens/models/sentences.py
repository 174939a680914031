"""Compute embeddings from the features of tokens, as sentence-transformers does.

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

from driftlens.checkpoints.loading import Pooling, modules_of, open_folder, pooling_of
from driftlens.checkpoints.tensor_sources import check_finite
from driftlens.models.chain import LayerChain, Pool, SideInputs, State
from driftlens.utils.errors import IncompatibleModelsError
from driftlens.utils.files import json_object

Step = Callable[[Tensor], Tensor]

# Some models leave the tokens of a prompt out of the pooling, but not out of attention. So `pooling_mask` is an entry
# of raw inputs next to `attention_mask`.
POOLED = "pooling"

# Name of the setting with the pooling, in chains that end in embeddings.
EMBEDDED = "embedding"

# Pooling at inner boundaries, which must be linear, unlike `max`. Only a pooling that selects a token is kept.
_INNER: Mapping[str, Pool] = {"cls": "cls", "lasttoken": "last"}


def _inner_pool(pooling: Pooling) -> Pool:
    """Return the pooling of features before the last layer, given that of the last."""
    return _INNER.get(pooling.said, "mean")


def weights_of(mode: str, mask: Tensor) -> Tensor:
    """Return the weight of each token in a linear pooling, [n, t].

    Args:
        mode: the pooling mode of sentence-transformers.
        mask: [n, t], 1 where a token counts and 0 elsewhere, in the dtype of features.
    """
    if mode in ("cls", "lasttoken"):
        places = mask.argmax(dim=1) if mode == "cls" else mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
        return F.one_hot(places, mask.shape[1]).to(mask)
    # The library weighs a token by its position, counted from 1.
    if mode == "weightedmean":
        mask = mask * torch.arange(1, mask.shape[1] + 1, dtype=mask.dtype, device=mask.device)
    # The library's own lower bound.
    total = mask.sum(dim=1, keepdim=True).clamp_min(1e-9)
    return mask / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


def pooled_tokens(tokens: Tensor, mask: Tensor, modes: tuple[str, ...]) -> Tensor:
    """Return one vector per text, the concatenation of several poolings of its tokens.

    Args:
        tokens: [n, t, d].
        mask: [n, t], true where a token counts.
        modes: pooling modes of sentence-transformers.

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
class _Readout:
    """The map from features of tokens to embeddings in a folder's modules."""

    pooling: Pooling
    steps: tuple[Step, ...] = ()

    def __call__(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Compute embeddings [n, e] of features [n, t, d]; masks as for `pooled_tokens`."""
        if mask is None:
            mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        embedding = pooled_tokens(tokens, mask, self.pooling.modes)
        for step in self.steps:
            embedding = step(embedding)
        return embedding


def readout_of(root: pathlib.Path) -> _Readout:
    """Return the map from features to embeddings of a folder.

    Raises:
        IncompatibleModelsError: its modules are not supported.
    """
    pooling, steps = pooling_of(root), list[Step]()
    kinds = [module.kind for module in modules_of(root)]
    if "Pooling" in kinds and set(kinds[1 : kinds.index("Pooling")]) - {"Dropout"}:
        raise IncompatibleModelsError(
            f"{root}: {kinds[1]} before Pooling is not supported",
            hint="Use a model that changes features after Pooling only.",
        )
    for module in modules_of(root)[1:]:
        place = root / module.place
        stated = json_object(place, "config.json") if module.place else {}
        if {stated.get(f"module_{end}put_name") or _EMBEDDING for end in ("in", "out")} != {_EMBEDDING}:
            raise IncompatibleModelsError(
                f"{place} reads or writes an entry other than {_EMBEDDING}",
                hint="Use a model whose modules compute only the embedding.",
            )
        if module.kind == "Normalize":
            steps.append(lambda x: F.normalize(x, dim=-1))
        elif module.kind == "Dense":
            residual = bool(stated.get("use_residual"))
            steps.append(partial(_dense, _weights(place), _activation(place, stated), residual))
        elif module.kind == "LayerNorm":
            steps.append(partial(_layer_norm, _weights(place)))
    return _Readout(pooling, tuple(steps))


_EMBEDDING = "sentence_embedding"


def _weights(place: pathlib.Path) -> dict[str, Tensor]:
    """Read a module's weights in float32."""
    source = open_folder(place)
    weights = {name: source.read(name).float() for name in source.headers}
    for name, value in weights.items():
        check_finite(source.name, name, value)
    return weights


def _dense(weights: Mapping[str, Tensor], activation: nn.Module, is_residual: bool, x: Tensor) -> Tensor:
    """Compute activation(W x + b), plus x or its own projection with `is_residual`."""
    bias = weights.get("linear.bias")
    linear = F.linear(x, weights["linear.weight"].to(x), None if bias is None else bias.to(x))
    output: Tensor = activation(linear)
    if not is_residual:
        return output
    projection = weights.get("residual.weight")
    return output + (x if projection is None else F.linear(x, projection.to(x)))


def _layer_norm(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Compute the library's LayerNorm, whose eps is torch's own."""
    weight, bias = (weights[f"norm.{end}"].to(x) for end in ("weight", "bias"))
    return F.layer_norm(x, weight.shape, weight, bias)


def _activation(place: pathlib.Path, stated: Mapping[str, Any]) -> nn.Module:
    """Return one of torch's own activations, by its name, without an import from the folder."""
    path = str(stated.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = path.rpartition(".")[2]
    # The library imports any path that a folder names. Only names of torch itself are looked up here.
    if not path.startswith("torch.nn.") or name not in (*activation.__all__, "Identity"):
        raise IncompatibleModelsError(
            f"{place}: activation {path!r} is not in torch.nn; custom code is never run",
            hint="Use a model with an activation of torch.nn.",
        )
    module: nn.Module = getattr(nn, name)()
    return module.eval()


def with_embedding(chain: LayerChain, readout: _Readout) -> LayerChain:
    """Return a chain that ends in features of tokens, with the embedding as its final feature."""
    head, pool = chain.layers[-1], _inner_pool(readout.pooling)

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
        # No module of the transformer returns the embedding.
        final=None,
    )


def _apart(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Return the inputs of the transformer, and the mask of the pooling if that differs."""
    batch = dict(inputs)
    return batch, batch.pop(f"{POOLED}_mask", None)
