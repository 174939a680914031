"""Causal language models whose blocks mix experts, small, and live models of them in float64."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import transformers

from tests.quick import paced
from tests.zoo.cases import Case, with_seed
from tests.zoo.decoders import MIXTURES, MORE


def mixtures(*fast: str, some: Collection[str] | None = None) -> list[Any]:
    """Their names as parameters of a test: all but `fast` ones slow, all but these and `some`, if given, `every`'s."""
    return [pytest.param(name, marks=[pytest.mark.family(name), *paced(name, fast, some)]) for name in MIXTURES]


def tokens(generator: torch.Generator, n: int) -> dict[str, torch.Tensor]:
    """Texts of 12 tokens, one of them padded, as their tokenizer makes them."""
    mask = torch.ones(n, 12, dtype=torch.long)
    mask[-1, 8:] = 0
    return {"input_ids": torch.randint(4, 40, (n, 12), generator=generator) * mask, "attention_mask": mask}


def case(name: str) -> Case:
    """A mixture, or another decoder, as a live model in float64; the chain is made of three texts."""
    from driftlens.models.architectures.language import causal_chain

    def built() -> Any:
        model = transformers.AutoModelForCausalLM.from_config((MORE | MIXTURES)[name]).double().eval()
        model.config._experts_implementation = "eager"  # the others know no float64
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.rand_like(parameter))
        return model

    example = tokens(torch.Generator().manual_seed(0), 3)
    return Case(with_seed(built), lambda module: causal_chain(module, example)[0], tokens)
