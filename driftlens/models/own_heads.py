"""Classification heads of several layers, run by their library's own model, whose core is replaced by its features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from driftlens.checkpoints.tensor_sources import StateSource, check_finite
from driftlens.models.chain import Pool, pooled
from driftlens.models.heads import class_names
from driftlens.models.tracing.block_call import call, find_features, result
from driftlens.utils.devices import to_match
from driftlens.utils.errors import DataError

# Bounds on the slopes of functions. The slope of GELU has its maximum 1.1290 at the square root of 2.
_SLOPES = {
    **dict.fromkeys(("__getitem__", "contiguous", "dropout", "float", "relu", "tanh", "to"), 1.0),
    "gelu": 1.13,
}


class Tokens(nn.Module):
    """The core of a model under the names of the whole model, returning the features of tokens.

    With a `pool` it returns one vector per sample.
    """

    def __init__(self, core: Any, name: str, pool: Pool | None = None) -> None:
        super().__init__()
        self.base_model_prefix, self.main_input_name, self.pool = name, core.main_input_name, pool
        self.add_module(name, core)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return features of the core's inputs."""
        features = result(self.get_submodule(self.base_model_prefix)(*args, **kwargs))
        return features if self.pool is None else pooled(features, self.pool, kwargs.get("attention_mask"))


class _CoreStandIn(nn.Module):
    """Replaces a core: its input are the features, which the pooler, if any, reads."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        features: Any = find_features("core", args, kwargs)[1]
        pooler_output = None if self.pooler is None else self.pooler(features)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=pooler_output)


@dataclass(frozen=True, eq=False)
class OwnHead:
    """A `ScoreMap` that is a model's own head, with the weights of one expert by the names of the form."""

    classes: tuple[str, ...]
    form: HeadForm
    weights: Mapping[str, Tensor]

    def scores(self, features: Tensor) -> Tensor:
        """Compute class scores [n, classes] of final features [n, d], on their device and in their dtype."""
        weights = {name: to_match(features, value) for name, value in self.weights.items()}
        # One token per sample: every supported pooling of a single token returns this token.
        return self.form.run(weights, features[:, None])

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor | None:
        """Return the product of bounds on its layers' slopes, |weight|_2 for a linear one; None if one is unknown."""
        return None if self._gain is None else self._gain.to(start).expand(len(start))

    @cached_property
    def _gain(self) -> Tensor | None:
        weights = {name: value.double() for name, value in self.weights.items()}
        features = torch.zeros(1, 1, self.form.width, dtype=torch.float64)
        gain = followed(partial(self.form.run, weights), features)
        return gain if bool(gain.isfinite()) else None


def followed(run: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return a bound on the change of the output of `run` per change of `start`; NaN if unknown."""
    with torch.no_grad(), _Follow(start) as path:
        end = run(start)
    # If the output is another tensor, it took a way that was not followed, such as a residual sum.
    return path.gain if end is path.current else path.gain * torch.nan


@dataclass(frozen=True, eq=False)
class HeadForm:
    """A head of several layers, without weights: the whole model `module`, its core replaced by features.

    Attributes:
        names: its weights' names -> their names in a file of the whole model.
        takes: the name of the whole model's input.
        width: the width of features.
        pool: the pooling of a sample's tokens to the vector that the head reads.
    """

    module: nn.Module
    names: Mapping[str, str]
    takes: str
    width: int
    pool: Pool = "cls"

    def run(self, weights: Mapping[str, Tensor], tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the scores of features of tokens.

        Args:
            weights: the head's weights by their names in `names`.
            tokens: [n, t, d].
            mask: [n, t], 0 for padding; None means no padding.

        Returns:
            [n, classes].
        """
        inputs: dict[str, Tensor] = {self.takes: tokens}
        # Only texts are padded: forward functions of image models take no mask.
        if self.takes == "input_ids":
            ones = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
            inputs["attention_mask"] = ones if mask is None else mask
        return result(call(self.module, weights, (), inputs))

    def head(self, source: StateSource, keys: Sequence[str], classes: Sequence[str]) -> OwnHead:
        """Return the head of one expert.

        Args:
            source: the expert's weights.
            keys: keys of the head's weights in `source`, in the order of `names`.
            classes: class names in the order of scores.

        Raises:
            DataError: the number of class names is not that of scores.
        """
        weights = {name: source.read(key).float() for name, key in zip(self.names, keys, strict=True)}
        for key, value in zip(keys, weights.values(), strict=True):
            check_finite(source.name, key, value)
        head = OwnHead(class_names(classes), self, weights)
        count = head.scores(torch.zeros(1, self.width)).shape[1]
        if count != len(head.classes):
            raise DataError(
                f"the classifier of {source.name} has {count} scores, but {len(head.classes)} class names",
                hint="Set heads.<task>.classes to one name per score, in their order.",
            )
        return head


def split_head(whole: Any, names: Mapping[str, str]) -> tuple[nn.Module, HeadForm] | None:
    """Split a model for classification into its core and its head, which share its modules.

    Return None, and leave the model unchanged, if the head does not read one vector: the first token, the last or the
    mean. A trial with random weights and a padded sample shows which.
    """
    prefix = whole.base_model_prefix
    core = getattr(whole, prefix)
    pooler = getattr(core, "pooler", None)
    setattr(whole, prefix, _CoreStandIn(pooler))
    try:
        names_in_file = {key: names[key] for key in whole.state_dict()}
        form = HeadForm(whole, names_in_file, whole.main_input_name, whole.config.hidden_size)
        pool = _pool_of(form)
    except Exception:  # a forward function that needs more than features
        pool = None
    if pool is None:
        setattr(whole, prefix, core)
        return None
    if pooler is not None:
        # The pooler belongs to the head now; in the core it would be merged as well.
        core.pooler = None
    return Tokens(core, prefix), replace(form, pool=pool)


def _pool_of(form: HeadForm) -> Pool | None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Small weights, because saturated activations (tanh) would make different poolings look equal.
    weights = {name: random(*value.shape) / 10 for name, value in form.module.state_dict().items()}
    tokens, mask = random(2, 3, form.width), torch.tensor([[1, 1, 1], [1, 1, 0]])
    scores = form.run(weights, tokens, mask)
    for pool in get_args(Pool):
        alone = pooled(tokens, pool, mask)
        # `all` flattens tokens to a vector of another width.
        if alone.shape[1] == form.width and torch.allclose(form.run(weights, alone[:, None]), scores):
            return pool
    return None


class _Follow(TorchFunctionMode):
    """Follows a tensor through functions; `gain` is the product of bounds on their slopes, NaN if one is unknown."""

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
