"""Split causal language models of transformers into layers, by what runs in them. Entry point: `causal_chain`.

The head of the chain is the one module between the last block and the language-model head, whose input is the final
feature; the latter belongs to no layer. If not exactly one module computes that feature (no norm, or a factor after
it), the chain's head is everything after the blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.models.architectures.module_list import block_list, sequential_chain
from driftlens.models.chain import TEXT, LayerChain, Parameters
from driftlens.models.heads import LmScores
from driftlens.models.readouts import followed
from driftlens.models.tracing.block_call import call, find_features, replaced_forwards
from driftlens.models.tracing.block_runner import BlockRunner, is_view, num_streams
from driftlens.utils.errors import IncompatibleModelsError

NOT_ELEMENTWISE = "its scores are not an elementwise function of its head's outputs"
_WRAPPED = (
    "No loader supports it yet. Use live modules that pass only features from block to block; answers are not "
    "measured then."
)


def causal_chain(whole: Any, example: Any, blocks: str | None = None) -> tuple[LayerChain, LmScores]:
    """Return the layers of a causal language model, which may be on meta, and its language-model head.

    Args:
        whole: the library's model with its head.
        example: a batch as its tokenizer makes it.
        blocks: path of the list of blocks; None searches for it.

    Raises:
        IncompatibleModelsError: the layers can't reproduce the library's forward pass.
    """
    path, of_blocks = block_list(whole, blocks)
    head, table = whole.get_output_embeddings(), whole.get_input_embeddings()
    # A subclass of `nn.Linear` with another forward function may compute more than the product.
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        raise not_causal(whole, f"its head is a {type(head).__name__}; expected a linear map")
    paths = {id(module): name for name, module in whole.named_modules()}
    trace = ForwardTrace(whole, list(of_blocks))
    read, after_head = _pass(trace, head, example)
    final = trace.final(read) or paths[id(head)]
    chain = sequential_chain(whole, example, blocks=path, final=final, reads_last=trace.reads_last)
    weight = f"{paths[id(head)]}.weight"
    keys = (f"{paths[id(table)]}.weight", weight)
    # The library ties weights when it loads them, so two tensors on meta do not show it; the configuration does.
    is_tied = getattr(whole.config, "tie_word_embeddings", False) and weight in (
        getattr(whole, "_tied_weights_keys", None) or ()
    )
    stem, *middle, last = chain.layers
    last = replace(last, path="head") if final == paths[id(head)] else last
    chain = replace(
        chain,
        architecture=f"hf_{whole.config.model_type}",
        layers=(replace(stem, path=paths[id(table)]), *middle, last),
        tied=dict.fromkeys(keys, keys) if is_tied else {},
        modality=replace(TEXT, pool="last"),
        settings={**chain.settings, "model": type(whole).__name__},
    )
    return chain, LmScores(
        key=keys[0] if is_tied else weight,
        head=weight,
        bias="" if head.bias is None else f"{paths[id(head)]}.bias",
        after_head=after_head,
        slope=1.0 if after_head is None else slope(after_head, head.out_features),
    )


def not_causal(
    whole: Any, reason: str, hint: str = _WRAPPED, kind: str = "a causal language model"
) -> IncompatibleModelsError:
    """Return the error for a language model that can't be split into layers.

    Args:
        whole: the library's model with its head.
        reason: what was found, without a final period.
        hint: what to do.
        kind: the kind of model that was expected.
    """
    return IncompatibleModelsError(
        f"a {whole.config.model_type} model ({type(whole).__name__}) can't be split into layers as {kind}: {reason}",
        hint=hint,
    )


@dataclass(eq=False)
class AfterHead:
    """The steps of a model's forward pass between its head and its scores, as a function of the head's output.

    Attributes:
        whole: the model; none of its weights is read.
        cores: the modules that compute the head's input, which do not run, and the classes of their outputs; None for
            a tensor.
        head: the head, which does not run either.
        reads: names of the token ids among the model's inputs.
    """

    whole: Any
    cores: tuple[tuple[nn.Module, Any], ...]
    head: nn.Module
    reads: tuple[str, ...] = ("input_ids",)

    def __call__(self, scores: Tensor) -> Tensor:
        """Compute scores [n, classes] from the head's output for one token each, [n, classes]."""
        # Classes stand for tokens of one position; the features do not matter, as the head is replaced.
        features = torch.zeros(len(scores), 1, 1, dtype=scores.dtype, device=scores.device)
        return self.scores(features, lambda *_: scores[:, None])[:, 0]

    def computes(self, outputs: Tensor, scores: Tensor) -> bool:
        """Return True if `scores` [n, classes] are computed from the head's `outputs`, each from its own."""
        # A part of the vocabulary shows steps that mix scores, such as a softmax over all of them.
        parts = (slice(None), slice(1, 4))
        return all(torch.equal(self(outputs[:, part]), scores[:, part]) for part in parts)

    def scores(
        self, features: Tensor, head: Callable[..., Tensor], weights: Parameters = MappingProxyType({})
    ) -> Tensor:
        """Compute the scores of a model whose cores return the given features.

        Args:
            features: [n, t, d].
            head: replaces the head.
            weights: replace some of the model's weights, by key.

        Returns:
            [n, t, classes].
        """
        answers = [
            (core, features if answer is None else answer(last_hidden_state=features))
            for core, answer in self.cores
        ]
        forwards = [(core, lambda *_, answer=answer, **__: answer) for core, answer in answers]
        ids = torch.zeros(features.shape[:2], dtype=torch.long, device=features.device)
        inputs = {**dict.fromkeys(self.reads, ids), "use_cache": False, "return_dict": True}
        with replaced_forwards([*forwards, (self.head, head)]):
            scores: Tensor = call(self.whole, weights, (), inputs).logits
        return scores


def slope(after_head: AfterHead, width: int) -> float:
    """Return a bound on the change of scores per change of the head's output; NaN if unknown."""
    return float(followed(after_head, torch.zeros(1, width, dtype=torch.float64)))


def _pass(trace: ForwardTrace, head: nn.Module, example: Any) -> tuple[Tensor, AfterHead | None]:
    """Return the features that the head reads in one pass, and the steps after the head, if any."""
    whole = trace.whole
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    # Random outputs of the head, because equal ones would hide steps that depend on their order.
    numbers = torch.Generator().manual_seed(0)

    def score(features: Tensor) -> Tensor:
        shape = (*features.shape[:-1], head.out_features)
        inputs.append(features)
        outputs.append(torch.randn(shape, generator=numbers, dtype=torch.float64).to(features.device))
        return outputs[-1]

    blocks = {path: whole.get_submodule(path) for path in trace.paths}
    with replaced_forwards([(head, score)]), trace.watching():
        logits: Tensor = BlockRunner(whole, blocks).whole(example).logits
    cores = [(module, kind) for module, kind in trace.answers if module is not head]
    after_head = AfterHead(whole, tuple(cores), head)
    output, scores = outputs[-1][:, -1], logits[:, -1]
    if not after_head.computes(output, scores):
        raise not_causal(whole, NOT_ELEMENTWISE)
    is_same = scores.dtype == output.dtype and torch.equal(scores, output)
    return inputs[-1], None if is_same else after_head


@dataclass(eq=False)
class ForwardTrace:
    """The modules outside the blocks that return in one forward pass of a model.

    Attributes:
        whole: the model.
        paths: the paths of its blocks.
        steps: path, features read and output of each module, blocks included.
        answers: the outermost module that contains the blocks and those that run after it, with the class of the
            former's output.
        reads_last: True if the module of `final` reads the last block's output.
    """

    whole: Any
    paths: list[str]
    steps: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    answers: list[tuple[nn.Module, Any]] = field(default_factory=list)
    reads_last: bool = True

    @property
    def last(self) -> Tensor:
        """The output of the last block."""
        return next(output for path, _, output in self.steps if path == self.paths[-1])

    def final(self, read: Tensor) -> str:
        """Return the path of the one module after the last block whose output `read` is, or ""."""
        order = [path for path, *_ in self.steps]
        outputs = [step for step in self.steps if step[0] not in self.paths and is_view(read, step[2])]
        if outputs:
            path, entered, _ = outputs[0]
            self.reads_last = is_view(entered, self.last)
            is_after = order.index(path) > order.index(self.paths[-1])
            # With several streams, the final feature is computed from their mix.
            mixes = is_after and num_streams(self.whole.get_submodule(self.paths[-1])) > 1
            # A module that runs twice has no single output to stop at.
            if order.count(path) == 1 and (self.reads_last or mixes):
                return path
        self.reads_last = False
        return ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record the modules outside the blocks during a pass."""
        inside = tuple(f"{path}." for path in self.paths)

        def leave(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # The last module to return that contains the blocks is the outermost core; its answer replaces inner ones.
            if path and self.paths[0].startswith(f"{path}."):
                self.answers = [(module, type(output))]
            elif any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
                if self.answers and path:
                    self.answers.append((module, None))
                output = output[0] if isinstance(output, tuple | list) else output
                if isinstance(output, Tensor):
                    self.steps.append((path, find_features(path, args, kwargs)[1], output))

        with contextlib.ExitStack() as hooks:
            for path, module in self.whole.named_modules():
                if not path.startswith(inside):
                    watch = partial(leave, path)
                    hooks.callback(module.register_forward_hook(watch, with_kwargs=True).remove)
            yield
