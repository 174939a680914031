"""Doubts about models that fit each other in shape: equal weights, another base, a merge of something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from driftlens.errors import NumericsError
from driftlens.models.chain import LayerChain
from driftlens.models.sources import StateSource
from driftlens.pipeline.findings import Finding, problem
from driftlens.pipeline.sampled_weights import (
    SampledWeights,
    check_sampled,
    fit_merge,
    sample_weights,
    sampled_slots,
)

FOREIGN = 0.5
"""Relative distance between weights from which on they hardly come from one base.

Matrices trained apart are uncorrelated, hence at least 1 apart, and sqrt(2) at equal norms. Fine-tuning moves
weights by a few percent; by 10 to 16 % where it was long and the model small.
"""
EXPLAINED, UNEXPLAINED = 0.01, 0.5
"""Share of a merge that task vectors leave: up to the first it is rounding, above the second most is something else."""


def suspicions(chain: LayerChain, sources: Mapping[str, StateSource]) -> list[Finding]:
    """What is odd, or reassuring, about models that have the same parameters; reads a few matrices of each.

    Args:
        chain: of the architecture.
        sources: weights by their name in the pool, under the skeleton's key names.
    """
    findings = [_same(*pair) for pair in equal_pairs(chain, sources)]
    slots = sampled_slots(chain, next(iter(sources.values()))) if sources else []
    sound = {}
    for name, source in sources.items():
        try:
            check_sampled(source, slots)
            sound[name] = source
        except NumericsError as error:
            findings.append(problem(label(name), error))
    if not slots or not sound:
        return findings
    sampled = sample_weights(sound, slots)
    findings += _distances(sampled)
    # A lone expert without a base spans nothing that a merge could be compared with.
    if sampled.experts and ("base" in sampled.names or len(sampled.experts) > 1):
        findings += [_plausibility(sampled, name) for name in sampled.names if is_merge(name)]
    return findings


def label(name: str) -> str:
    """What messages call a model, given its name in the pool."""
    kind, _, which = name.partition(":")
    if which:
        return f"{kind} {which}" if kind == "baseline" else f"{kind} of {which}"
    return "merged model" if name == "merged" else name


def is_merge(name: str) -> bool:
    """Whether a name in the pool is that of a merged model or a baseline."""
    return name == "merged" or name.startswith("baseline:")


def equal_pairs(chain: LayerChain, sources: Mapping[str, StateSource]) -> list[tuple[str, str]]:
    """Models with the same weights, each with the first such model; reading ends once all are known to differ.

    Models stored in different dtypes are compared in the narrower one.
    """
    groups = [list(sources)]
    for key in chain.parameter_keys():
        groups = [part for group in groups for part in _split(group, key, sources) if len(part) > 1]
        if not groups:
            break
    return [(group[0], other) for group in groups for other in group[1:]]


def _split(group: Sequence[str], key: str, sources: Mapping[str, StateSource]) -> list[list[str]]:
    parts: list[tuple[Tensor, list[str]]] = []
    for name in group:
        tensor = sources[name].read(key)
        part = next((names for first, names in parts if _equal(first, tensor)), None)
        if part is None:
            parts.append((tensor, [name]))
        else:
            part.append(name)
    return [names for _, names in parts]


def _equal(first: Tensor, second: Tensor) -> bool:
    narrow = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(first.to(narrow), second.to(narrow))


def _same(first: str, second: str) -> Finding:
    untouched = "It was not fine-tuned, or the wrong file is named."
    hint = untouched if first == "base" and not is_merge(second) else "Check that the right files are named."
    return Finding(
        "notice", label(second), f"the {label(second)} has the same weights as the {label(first)}", hint
    )


def _distances(sampled: SampledWeights) -> list[Finding]:
    """How far every model is from the base, or without one from the expert next to it."""
    near = {name: found for name in sampled.names if (found := _nearest(sampled, name)) is not None}
    findings = []
    close = [found for name, (found, _) in near.items() if name in sampled.experts and found <= FOREIGN]
    if close:
        anchor = "the base" if "base" in sampled.names else "the next expert"
        text = f"the experts' weights are {_span(close)} away from {anchor}, relative to its size"
        findings.append(Finding("ok", "shared base", text))
    return findings + [_foreign(name, *found) for name, found in near.items() if found[0] > FOREIGN]


def _nearest(sampled: SampledWeights, name: str) -> tuple[float, str] | None:
    if name == "base":
        return None
    others = ["base"] if "base" in sampled.names else [expert for expert in sampled.experts if expert != name]
    return min(((sampled.distance(name, other), other) for other in others), default=None)


def _foreign(name: str, distance: float, anchor: str) -> Finding:
    return Finding(
        "notice",
        label(name),
        f"the weights of the {label(name)} are {distance:.2f} away from the {label(anchor)}, relative to its size; "
        f"models of one base stay far below {FOREIGN}",
        "It seems to come from another base, and averages across bases mean nothing; check the file.",
    )


def _plausibility(sampled: SampledWeights, name: str) -> Finding:
    """Whether a merged model is a combination of the experts, by least squares."""
    model, fits = label(name), fit_merge(sampled, name)
    origin = "the base" if "base" in sampled.names else "the experts' mean"
    if fits is None:
        return Finding("ok", model, f"the {model} is {origin}, up to rounding")
    shared, own = fits
    if shared.residual <= EXPLAINED:
        text = f"is {origin} plus task vectors, coefficients {_span(shared.coefficients)}"
        return Finding("ok", model, f"the {model} {text}; {shared.residual:.2%} is left")
    if own.residual <= EXPLAINED:
        text = (
            f"is {origin} plus task vectors, coefficients {_span(own.coefficients)}, others in every matrix"
        )
        return Finding("ok", model, f"the {model} {text}; {own.residual:.2%} is left")
    text = f"task vectors from {origin} leave {shared.residual:.0%} of the {model} unexplained"
    if shared.residual <= UNEXPLAINED:
        return Finding("ok", model, text, "Methods that trim, rescale or train the merge leave as much.")
    hint = "Methods that trim and rescale (TIES, DARE) leave much, but check that its own experts are named."
    return Finding("notice", model, text, hint)


def _span(values: Sequence[float] | Tensor) -> str:
    numbers = torch.as_tensor(values, dtype=torch.float64)
    low, high = f"{float(numbers.min()):.2f}", f"{float(numbers.max()):.2f}"
    return low if low == high else f"{low} to {high}"
