"""Adjoint attribution of one task: which layer moved a sample's loss, decided its flip, made its final drift."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from driftlens.data.samples import SampleSet
from driftlens.diagnostics.adjoint import (
    Step,
    Target,
    adjoint_parts,
    drift_target,
    loss_target,
    margin_target,
)
from driftlens.diagnostics.output import class_rows
from driftlens.engine.walk import LayerView, decompose, walk
from driftlens.linalg.state import State
from driftlens.models.chain import Layer
from driftlens.pipeline.study import Study, TaskSamples

BATCH = 8
"""Samples whose states at every boundary are kept for the way back."""


@torch.no_grad()
def adjoint_columns(
    study: Study, task: str, variant: str, nodes: Mapping[int, int]
) -> Iterator[dict[str, Any]]:
    """Columns of the `adjoint` table, for one target and one layer at a time.

    Args:
        study: models and samples.
        task: the task.
        variant: the variant.
        nodes: quadrature nodes per layer, as the forward pass found them sufficient.

    Raises:
        NumericsError: weights or features are NaN or infinite.
    """
    settings = study.settings.jacobian
    assert settings is not None
    at_hand = study.tasks[task]
    samples = dataclasses.replace(at_hand.diagnosis, batch_size=BATCH)
    views: dict[int, list[LayerView]] = defaultdict(list)
    for view in walk(study.pool, task, [variant], samples.batches(0, min(settings.samples, len(samples)))):
        # The view's own layer function holds the layer's parameters; they are read again on the way back.
        views[view.start].append(dataclasses.replace(view, crossed_layer=_forgotten))
    for seen in views.values():
        steps = [_step(study, variant, view, nodes.get(view.layer.index, settings.nodes)) for view in seen]
        last = seen[-1]
        for name, target in _targets(at_hand, samples, last).items():
            parts = adjoint_parts(steps, {last.layer.stream: target.covector})
            ids = list(samples.ids[last.start : last.stop])
            remainder = target.change - parts.sum(dim=0)
            for view, part in zip(seen, parts, strict=True):
                is_head = view is last
                yield {
                    "task": task,
                    "variant": variant,
                    "target": name,
                    "layer": view.layer.index,
                    "sample_id": ids,
                    "part": part.double().cpu().numpy(),
                    "change": target.change.double().cpu().numpy(),
                    **({"remainder": remainder.double().cpu().numpy()} if is_head else {}),
                }


def _forgotten(state: State) -> State:
    raise AssertionError("the layer's parameters are read again")


def _step(study: Study, variant: str, view: LayerView, nodes: int) -> Step:
    return Step(
        call=_layer(study, variant, view.layer, view),
        expert_in=view.expert_in,
        merged_in=view.merged_in,
        local_mismatch=decompose(view).local_mismatch,
        nodes=nodes,
    )


def _layer(study: Study, variant: str, layer: Layer, view: LayerView) -> Callable[[State], State]:
    return lambda state: layer.call(study.pool.parameters(variant, layer), state, view.side)


def _targets(at_hand: TaskSamples, samples: SampleSet, last: LayerView) -> dict[str, Target]:
    expert, variant = (state[last.layer.stream] for state in (last.expert_out, last.merged_out))
    targets = {"final_drift": drift_target(expert, variant)}
    if at_hand.head is None:
        return targets
    targets["margin"] = margin_target(at_hand.head, expert, variant)
    if samples.labels is not None:
        labels = class_rows(at_hand.head, samples.labels[last.start : last.stop]).to(expert.device)
        targets["loss"] = loss_target(at_hand.head, expert, variant, labels)
    return targets
