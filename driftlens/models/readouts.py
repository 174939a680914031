"""Maps from the features of tokens to scores or embeddings: classification heads of several layers, run by their
library's own model, and the modules of sentence-transformers, for texts that are padded on the right.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import activation
from torch.overrides import TorchFunctionMode

from driftlens.checkpoints.loading import Pooling, open_model_folder, read_pooling, sentence_modules
from driftlens.checkpoints.tensor_sources import StateSource, check_finite
from driftlens.models.chain import LayerChain, Pool, SideInputs, State, pool_features
from driftlens.models.heads import class_names
from driftlens.models.tracing.block_call import call_with_weights, find_features, first_tensor
from driftlens.utils.devices import match_device_dtype
from driftlens.utils.errors import DataError, IncompatibleModelsError
from driftlens.utils.files import read_json_object

# Bounds on the slopes of functions. The slope of GELU has its maximum 1.1290 at the square root of 2.
_SLOPES = {
    **dict.fromkeys(("__getitem__", "contiguous", "dropout", "float", "relu", "tanh", "to"), 1.0),
    "gelu": 1.13,
}


class TokenEncoder(nn.Module):
    """A model without its head, as a module that returns token features under the whole model's key names.

    With a `pool` it returns one vector per sample.
    """

    def __init__(self, core: Any, name: str, pool: Pool | None = None) -> None:
        super().__init__()
        self.base_model_prefix, self.main_input_name, self.pool = name, core.main_input_name, pool
        self.add_module(name, core)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return features of the core's inputs."""
        features = first_tensor(self.get_submodule(self.base_model_prefix)(*args, **kwargs))
        return features if self.pool is None else pool_features(features, self.pool, kwargs.get("attention_mask"))


class _CoreStandIn(nn.Module):
    """Replaces a model's transformer: takes features as input and returns them, with the pooler's output."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        features: Any = find_features("core", args, kwargs)[1]
        pooler_output = None if self.pooler is None else self.pooler(features)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=pooler_output)


@dataclass(frozen=True, eq=False)
class ExpertHead:
    """A `ScoreMap` that is an expert's own classification head of several layers."""

    classes: tuple[str, ...]
    form: HeadTemplate
    weights: Mapping[str, Tensor]

    def scores(self, features: Tensor) -> Tensor:
        """Compute class scores [n, classes] of final features [n, d], on their device and in their dtype."""
        weights = {name: match_device_dtype(features, value) for name, value in self.weights.items()}
        # One token per sample: every supported pooling of a single token returns this token.
        return self.form.run(weights, features[:, None])

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor | None:
        """Return the head's Lipschitz bound, the product of those of its layers; None if one is unknown."""
        return None if self._head_gain_bound is None else self._head_gain_bound.to(start).expand(len(start))

    @cached_property
    def _head_gain_bound(self) -> Tensor | None:
        weights = {name: value.double() for name, value in self.weights.items()}
        features = torch.zeros(1, 1, self.form.width, dtype=torch.float64)
        gain = lipschitz_bound(partial(self.form.run, weights), features)
        return gain if bool(gain.isfinite()) else None


def lipschitz_bound(run: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return a bound on the change of the output of `run` per change of its input `start`; NaN if unknown."""
    with torch.no_grad(), _SlopeTracker(start) as path:
        end = run(start)
    # If the output is another tensor, it took a way that was not followed, such as a residual sum.
    return path.gain if end is path.current else path.gain * torch.nan


@dataclass(frozen=True, eq=False)
class HeadTemplate:
    """A classification head of several layers, without weights, run by the library's model on features.

    `names` maps its weights' names to those in a file of the whole model, `takes` is the whole model's input, and
    `pool` the pooling of a sample's tokens to the vector that the head reads.
    """

    module: nn.Module
    names: Mapping[str, str]
    takes: str
    width: int
    pool: Pool = "cls"

    def run(self, weights: Mapping[str, Tensor], tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the head's scores [n, classes] of token features [n, t, d].

        Args:
            weights: the head's weights by their names in `names`.
            tokens: [n, t, d].
            mask: [n, t], 0 for padding; None means no padding.
        """
        inputs: dict[str, Tensor] = {self.takes: tokens}
        # Only texts are padded: forward functions of image models take no mask.
        if self.takes == "input_ids":
            ones = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
            inputs["attention_mask"] = ones if mask is None else mask
        return first_tensor(call_with_weights(self.module, weights, (), inputs))

    def load_head(self, source: StateSource, keys: Sequence[str], classes: Sequence[str]) -> ExpertHead:
        """Load the head's weights of one expert.

        Args:
            source: the expert's weights.
            keys: keys of the head's weights in `source`, in the order of `names`.
            classes: class names in the order of scores.
        """
        weights = {name: source.read(key).float() for name, key in zip(self.names, keys, strict=True)}
        for key, value in zip(keys, weights.values(), strict=True):
            check_finite(source.name, key, value)
        head = ExpertHead(class_names(classes), self, weights)
        count = head.scores(torch.zeros(1, self.width)).shape[1]
        if count != len(head.classes):
            raise DataError(
                f"the classifier of {source.name} has {count} scores, but {len(head.classes)} class names",
                hint="Set heads.<task>.classes to one name per score, in their order.",
            )
        return head


def split_head(whole: Any, names: Mapping[str, str]) -> tuple[nn.Module, HeadTemplate] | None:
    """Split a classification model into its transformer and its head, which share its modules.

    Return None, and leave the model unchanged, if the head does not read one vector: the first token, the last or the
    mean. A trial with random weights and a padded sample shows which.
    """
    prefix = whole.base_model_prefix
    core = getattr(whole, prefix)
    pooler = getattr(core, "pooler", None)
    setattr(whole, prefix, _CoreStandIn(pooler))
    try:
        names_in_file = {key: names[key] for key in whole.state_dict()}
        form = HeadTemplate(whole, names_in_file, whole.main_input_name, whole.config.hidden_size)
        pool = _find_head_pooling(form)
    except Exception:  # a forward function that needs more than features
        pool = None
    if pool is None:
        setattr(whole, prefix, core)
        return None
    if pooler is not None:
        # The pooler belongs to the head now; in the core it would be merged as well.
        core.pooler = None
    return TokenEncoder(core, prefix), replace(form, pool=pool)


def _find_head_pooling(form: HeadTemplate) -> Pool | None:
    generator = torch.Generator().manual_seed(0)

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Small weights, because saturated activations (tanh) would make different poolings look equal.
    weights = {name: random_tensor(*value.shape) / 10 for name, value in form.module.state_dict().items()}
    tokens, mask = random_tensor(2, 3, form.width), torch.tensor([[1, 1, 1], [1, 1, 0]])
    scores = form.run(weights, tokens, mask)
    for pool in get_args(Pool):
        alone = pool_features(tokens, pool, mask)
        # `all` flattens tokens to a vector of another width.
        if alone.shape[1] == form.width and torch.allclose(form.run(weights, alone[:, None]), scores):
            return pool
    return None


class _SlopeTracker(TorchFunctionMode):
    """Follows a tensor through torch functions; `gain` is the product of bounds on their slopes, or NaN."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.current, self.gain = start, start.new_ones(())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if args and args[0] is self.current and isinstance(output, Tensor):
            name, slope = func.__name__, _SLOPES.get(func.__name__, torch.nan)
            if name == "linear":
                slope = torch.linalg.matrix_norm(args[1], ord=2)
            elif name in ("mul", "div") and isinstance(args[1], int | float):
                slope = abs(args[1]) if name == "mul" else 1 / abs(args[1])
            self.current, self.gain = output, self.gain * slope
        return output


Step = Callable[[Tensor], Tensor]

# Some models leave the tokens of a prompt out of the pooling, but not out of attention. So `pooling_mask` is an entry
# of raw inputs next to `attention_mask`.
POOLED = "pooling"

# Name of the setting with the pooling, in chains that end in embeddings.
EMBEDDED = "embedding"

# Pooling at inner boundaries, which must be linear, unlike `max`. Only a pooling that selects a token is kept.
_INNER: Mapping[str, Pool] = {"cls": "cls", "lasttoken": "last"}


def _pooling_weights(mode: str, mask: Tensor) -> Tensor:
    """Return the weight of each token in a linear pooling, [n, t], given the mask [n, t]."""
    if mode in ("cls", "lasttoken"):
        places = mask.argmax(dim=1) if mode == "cls" else mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
        return F.one_hot(places, mask.shape[1]).to(mask)
    # The library weighs a token by its position, counted from 1.
    if mode == "weightedmean":
        mask = mask * torch.arange(1, mask.shape[1] + 1, dtype=mask.dtype, device=mask.device)
    # The library's own lower bound.
    total = mask.sum(dim=1, keepdim=True).clamp_min(1e-9)
    return mask / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


def _pooled_tokens(tokens: Tensor, mask: Tensor, modes: tuple[str, ...]) -> Tensor:
    """Pool token features [n, t, d] to one vector per text, [n, d * modes], as sentence-transformers does.

    `mask` [n, t] is true where a token counts.
    """
    counts, parts = mask.to(tokens), []
    for mode in modes:
        if mode == "max":
            parts.append(tokens.masked_fill(counts[..., None] == 0, -torch.inf).amax(dim=1))
        else:
            parts.append(torch.einsum("nt,ntd->nd", _pooling_weights(mode, counts), tokens))
    return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class _EmbeddingHead:
    """The pooling and dense layers of a sentence-transformers folder: token features -> embeddings."""

    pooling: Pooling
    steps: tuple[Step, ...] = ()

    def __call__(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Compute embeddings [n, e] of features [n, t, d]; masks as for `_pooled_tokens`."""
        if mask is None:
            mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        embedding = _pooled_tokens(tokens, mask, self.pooling.modes)
        for step in self.steps:
            embedding = step(embedding)
        return embedding


def embedding_head(root: pathlib.Path) -> _EmbeddingHead:
    """Load the pooling and dense layers of a sentence-transformers folder."""
    pooling, steps = read_pooling(root), list[Step]()
    kinds = [module.kind for module in sentence_modules(root)]
    if "Pooling" in kinds and set(kinds[1 : kinds.index("Pooling")]) - {"Dropout"}:
        raise IncompatibleModelsError(
            f"{root}: {kinds[1]} before Pooling is not supported",
            hint="Use a model that changes features after Pooling only.",
        )
    for module in sentence_modules(root)[1:]:
        place = root / module.place
        stated = read_json_object(place, "config.json") if module.place else {}
        if {stated.get(f"module_{end}put_name") or _EMBEDDING for end in ("in", "out")} != {_EMBEDDING}:
            raise IncompatibleModelsError(
                f"{place} reads or writes an entry other than {_EMBEDDING}",
                hint="Use a model whose modules compute only the embedding.",
            )
        if module.kind == "Normalize":
            steps.append(lambda x: F.normalize(x, dim=-1))
        elif module.kind == "Dense":
            residual = bool(stated.get("use_residual"))
            weights, function = _read_float32_weights(place), _activation_module(place, stated)
            steps.append(partial(_apply_dense_layer, weights, function, residual))
        elif module.kind == "LayerNorm":
            steps.append(partial(_apply_layer_norm, _read_float32_weights(place)))
    return _EmbeddingHead(pooling, tuple(steps))


_EMBEDDING = "sentence_embedding"


def _read_float32_weights(place: pathlib.Path) -> dict[str, Tensor]:
    source = open_model_folder(place)
    weights = {name: source.read(name).float() for name in source.headers}
    for name, value in weights.items():
        check_finite(source.name, name, value)
    return weights


def _apply_dense_layer(weights: Mapping[str, Tensor], activation: nn.Module, is_residual: bool, x: Tensor) -> Tensor:
    """Compute activation(W x + b), plus x or its own projection with `is_residual`."""
    bias = weights.get("linear.bias")
    linear = F.linear(x, weights["linear.weight"].to(x), None if bias is None else bias.to(x))
    output: Tensor = activation(linear)
    if not is_residual:
        return output
    projection = weights.get("residual.weight")
    return output + (x if projection is None else F.linear(x, projection.to(x)))


def _apply_layer_norm(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Compute the library's LayerNorm, whose eps is torch's own."""
    weight, bias = (weights[f"norm.{end}"].to(x) for end in ("weight", "bias"))
    return F.layer_norm(x, weight.shape, weight, bias)


def _activation_module(place: pathlib.Path, stated: Mapping[str, Any]) -> nn.Module:
    """Return an activation of torch.nn by its name; import nothing from the folder."""
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


def add_embedding_head(chain: LayerChain, readout: _EmbeddingHead) -> LayerChain:
    """Append pooling and dense layers to a chain, so that its final feature is the sentence embedding."""
    head, pool = chain.layers[-1], _INNER.get(readout.pooling.description, "mean")

    def start_with_pooling_mask(inputs: Any) -> tuple[State, SideInputs]:
        batch, mask = _split_off_pooling_mask(inputs)
        state, side = chain.start(batch)
        masks = {} if mask is None else {f"{POOLED}_mask": mask}
        return state, replace(side, tensors={**side.tensors, **masks})

    def run_head_and_readout(parameters: Any, state: State, side: SideInputs, tap: Any = None) -> State:
        tokens = head.call(parameters, state, side, tap)[head.stream]
        counts = side.mask(POOLED)
        return {head.stream: readout(tokens, side.mask(head.stream) if counts is None else counts)}

    def states_with_embedding(module: nn.Module, inputs: Any) -> list[State]:
        batch, mask = _split_off_pooling_mask(inputs)
        *inner, last = chain.library_states(module, batch)
        tokens, counts = last[head.stream], batch.get("attention_mask") if mask is None else mask
        return [*inner, {head.stream: readout(tokens, None if counts is None else counts.to(tokens.device))}]

    shared = chain.require_shared
    return replace(
        chain,
        layers=(*chain.layers[:-1], replace(head, call=run_head_and_readout)),
        start=start_with_pooling_mask,
        library_states=states_with_embedding,
        require_shared=shared and (lambda models, batch: shared(models, _split_off_pooling_mask(batch)[0])),
        modality=replace(chain.modality, pool=pool),
        settings={**chain.settings, EMBEDDED: readout.pooling.description},
        # No module of the transformer returns the embedding.
        final=None,
    )


def _split_off_pooling_mask(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Split a batch into the transformer's inputs and the pooling mask, if it has one."""
    batch = dict(inputs)
    return batch, batch.pop(f"{POOLED}_mask", None)
