"""Experts that are adapters, as peft runs them: beside the base's weights, not merged into them."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch

from driftlens.checkpoints.lora import LoraSource
from driftlens.jobs.study.study import Study
from driftlens.models.chain import State


def unmerged_bytes(study: Study) -> int:
    """Of the module that `unmerged` loads beside a study; 0 where it loads none."""
    return study.pool.weight_bytes("base") if study.adapters and not no_room(study) else 0


def no_room(study: Study) -> str:
    """Why peft can't run adapters beside a study: it is not there, or the base exceeds the budget of features."""
    needed, budget = study.pool.weight_bytes("base") / 1e6, study.pool.budget / 1e6
    if importlib.util.find_spec("peft") is None:
        return "peft is not installed"
    return (
        ""
        if needed <= budget
        else f"{needed:,.1f} MB of the base don't fit compute.feature_budget, {budget:,.1f} MB"
    )


@torch.no_grad()
def unmerged(study: Study, adapters: LoraSource, inputs: Any) -> tuple[State, State] | str:
    """Final states of the base and of an expert's adapters on it, as peft runs them; else why nothing is claimed."""
    if reason := no_room(study):
        return reason
    pool = study.pool
    module = pool.copied("base")
    base = pool.chain.library_states(module, inputs)[-1]
    fitting = adapters.for_modules({name for name, _ in module.named_modules()})
    unlike = "peft can't put them on the modules as they are taken apart"
    if fitting is None:
        return unlike
    settings, tensors = fitting
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    # What it starts adapters from is drawn from the one generator of the process.
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        try:
            wrapped = PeftModel(module, LoraConfig(**settings)).eval()
            unexpected = set_peft_model_state_dict(wrapped, tensors).unexpected_keys
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # it has no such module
            return unlike
    return unlike if unexpected else (base, pool.chain.library_states(wrapped.base_model.model, inputs)[-1])
