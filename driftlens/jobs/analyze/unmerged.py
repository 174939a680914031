"""Experts that are adapters, as peft runs them: beside the base's weights, not merged into them."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch

from driftlens.base.errors import DriftLensError
from driftlens.checkpoints.lora import LoraSource
from driftlens.jobs.study.study import Study
from driftlens.models.chain import State


def unmerged_bytes(study: Study) -> int:
    """Of the module that `unmerged` loads beside a study; 0 where it loads none."""
    if not study.adapters or importlib.util.find_spec("peft") is None:
        return 0
    needed = study.pool.weight_bytes("base")
    return needed if needed <= study.pool.budget else 0


@torch.no_grad()
def unmerged(study: Study, adapters: LoraSource, inputs: Any) -> tuple[State, State] | None:
    """Final states of the base and of an expert's adapters on it, as peft runs them.

    None where peft is not installed or can't run it on the architecture's module, or that
    takes more than the budget of features: nothing can be claimed then.
    """
    pool = study.pool
    if importlib.util.find_spec("peft") is None:
        return None
    try:
        module = pool.copied("base")
    except DriftLensError:  # no room
        return None
    base = pool.chain.library_states(module, inputs)[-1]
    given = adapters.for_modules({name for name, _ in module.named_modules()})
    if given is None:
        return None
    settings, tensors = given
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    # What it starts adapters from is drawn from the one generator of the process.
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        try:
            wrapped = PeftModel(module, LoraConfig(**settings)).eval()
            left = set_peft_model_state_dict(wrapped, tensors).unexpected_keys
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # it has no such module
            return None
    return None if left else (base, pool.chain.library_states(wrapped.base_model.model, inputs)[-1])
