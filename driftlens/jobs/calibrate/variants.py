"""The models that a calibration makes, written into the run and wherever else the user wants them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.sources import InDtypes, OnDemand, StateSource, TensorsSource
from driftlens.engine.attached import Attachment, Attachments, attachment_tensors, portable_tensors
from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import CalibratedLayer, SiteReport
from driftlens.jobs.calibrate.plan import CalibrationPlan
from driftlens.jobs.study.opening import OpenModels, head_files
from driftlens.jobs.study.study import Study
from driftlens.models.chain import LayerChain, ParameterKey, fused
from driftlens.models.saving import Patched, library_prefix, save_model, save_state_dict
from driftlens.runs.layout import calibration_attachments, calibration_folder
from driftlens.runs.manifest import CalibrationInfo, versions
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATION
from driftlens.runs.writer import RunWriter

ATTACHED_FILE = "attachments.safetensors"
"""Where a saved folder holds what is attached."""

_LOADER = """\
import torch
from safetensors.torch import load_file


def attach(model, task, file="{file}"):
    saved = {{tuple(key.split("/", 2)): value for key, value in load_file(file).items()}}
    for path in {{path for path, name, of in saved if of == task}}:
        def change(module, inputs, output, path=path):
            f = output[0] if isinstance(output, tuple) else output
            t = {{name: value.to(f) for (at, name, of), value in saved.items() if (at, of) == (path, task)}}
{code}
            return (f, *output[1:]) if isinstance(output, tuple) else f
        model.get_submodule(path).register_forward_hook(change)


"""


@dataclass
class Solution:
    """What a walk solved: layers by index, and (task, boundary) -> what a trained calibrator attaches there."""

    layers: dict[int, CalibratedLayer] = field(default_factory=dict)
    attachments: dict[tuple[str, int], Attachment] = field(default_factory=dict)

    @property
    def updates(self) -> OnDemand[ParameterKey]:
        """(layer index, own parameter name) -> calibrated value, in the layer's layout."""
        keys = [(index, name) for index, layer in self.layers.items() for name in layer.updates]
        return OnDemand(dict.fromkeys(keys), lambda key: self.layers[key[0]].updates[key[1]])

    @property
    def reports(self) -> list[tuple[int, SiteReport]]:
        """One per site, with its layer's index."""
        return [(index, report) for index, layer in self.layers.items() for report in layer.reports]


def history_rows(name: str, reports: Sequence[tuple[int, SiteReport]]) -> list[dict[str, Any]]:
    """Rows of the calibration table: one per site, layer index first."""
    known = CALIBRATION.names
    return [
        {"name": name, "layer": layer}
        | {key: value for key, value in dataclasses.asdict(report).items() if key in known}
        for layer, report in reports
    ]


@torch.no_grad()
def save_variants(
    writer: RunWriter,
    models: OpenModels,
    study: Study,
    plan: CalibrationPlan,
    solution: Solution,
    info: CalibrationInfo,
    identity: Mapping[str, Any],
) -> None:
    """Write the calibrated model, and its control where there is one, in the base's key names and dtypes.

    Beside them lie the history of every site and `config.yaml`, in which all settings are resolved.
    """
    import pandas as pd

    from driftlens.spec.yaml_text import to_yaml

    pool = study.pool
    merged = pool.source(plan.kept or "merged")
    for variant, relative in plan.weights.items():
        parameters: Mapping[ParameterKey, Tensor] = solution.updates
        if variant == plan.control:
            base, reach = pool.source("base"), plan.calibrator.anchor_reach
            parameters = anchors(pool.chain, merged, base, reach, solution.updates)
        source = with_parameters(pool.chain, merged, study.like, parameters)
        with writer.file(relative) as path:
            save_model(
                models.architecture, models.own_form, source, path, metadata=weights_metadata(variant, info)
            )

    if solution.attachments:
        with writer.file(calibration_attachments(plan.name)) as path:
            save_state_dict(path, attachment_tensors(solution.attachments))
    if solution.reports:
        writer.append("calibration", pd.DataFrame(history_rows(plan.name, solution.reports)), replace=True)
    config = {
        "name": plan.name,
        "variant": plan.variant,
        "control": plan.control or None,
        "selection": dict(plan.selection) or None,
        **identity,
        "num_samples": plan.counts,
        "seconds": round(info.seconds, 3),
        "notices": list(info.notices),
        "versions": versions(),
    }
    with writer.file(f"{calibration_folder(plan.name)}/config.yaml") as path:
        path.write_text(to_yaml(config), encoding="utf-8")


def weights_metadata(variant: str, info: CalibrationInfo) -> dict[str, str]:
    """What the header of a variant's weights says of it: all that repeating the calibration takes, but the models."""
    return {
        "variant": variant,
        "calibration_method": info.method,
        "calibration_parameters": json.dumps(dict(info.settings)),
        "calibration_preset": info.preset,
        "calibration_layers": json.dumps(list(info.layers)),
        "calibration_sites": json.dumps(list(info.sites)),
        "calibration_samples": json.dumps(dict(info.samples)),
        "calibration_sample_digests": json.dumps(dict(info.sample_digests)),
        "calibration_seed": json.dumps(info.seed),
    }


def with_parameters(
    chain: LayerChain, merged: StateSource, like: StateSource, parameters: Mapping[ParameterKey, Tensor]
) -> StateSource:
    """The merged model with some parameters, in the layers' own layout, replaced, in the dtypes of `like`.

    That is the base, or what stands for it: a merged model stored in fewer bits must not round the solution.
    """
    start = InDtypes(merged, {key: header.dtype for key, header in like.headers.items()})
    return Patched(start, fused(chain, parameters, start))


def anchors(
    chain: LayerChain, merged: StateSource, base: StateSource, reach: float, keys: Collection[ParameterKey]
) -> OnDemand[ParameterKey]:
    """Eq. 11, base + reach * (merged - base), for the given parameters, in float64: the control of a calibration."""

    def anchor(key: ParameterKey) -> Tensor:
        slot = chain.layers[key[0] - 1].parameters[key[1]]
        start, end = (source.read(slot.key, slot.rows).double() for source in (base, merged))
        return slot.own(reach * end + (1 - reach) * start)

    return OnDemand(keys, anchor)


def save_for_others(
    run: DriftRun, plan: CalibrationPlan, models: OpenModels, pool: ModelPool, target: pathlib.Path
) -> None:
    """Write the calibrated model as a folder or a file, and what is attached beside its weights."""
    from driftlens.jobs.study.card import model_card

    architecture, attached = models.architecture, pool.variant(plan.variant).attachments
    metadata = weights_metadata(plan.variant, run.manifest.calibrations[plan.name])
    model = architecture.align(open_checkpoint(run.path / plan.weights[plan.variant]))
    card: Callable[[str], str] = partial(model_card, run, plan.name)
    beside = head_files(models)
    if attached and target.suffix == ".safetensors":
        place = target.with_suffix(f".{ATTACHED_FILE}")
        save_state_dict(place, portable_tensors(architecture.skeleton, pool.chain, attached), metadata)
    elif attached:
        prefix = library_prefix(
            architecture, models.own_form, next(iter(pool.chain.blocks[0].parameters.values())).key
        )
        tensors = portable_tensors(architecture.skeleton, pool.chain, attached, prefix)
        beside[ATTACHED_FILE] = TensorsSource(ATTACHED_FILE, tensors)
        card = _with_loader(card, attached)
    save_model(architecture, models.own_form, model, target, metadata=metadata, card=card, heads=beside)


def _with_loader(card: Callable[[str], str], attachments: Attachments) -> Callable[[str], str]:
    """A card whose Python also hooks in what is attached for a task; the same card where nobody wrote how."""
    (task, _), first = next(iter(attachments.items()))
    code = str(getattr(first, "code", ""))
    if not code:
        return card
    loader = _LOADER.format(file=ATTACHED_FILE, code=textwrap.indent(code, " " * 12))

    def more(usage: str) -> str:
        lines = usage.splitlines(keepends=True)
        made = next((at for at, line in enumerate(lines) if line.startswith("model")), None)
        if made is None:
            return card(f"{usage}{loader}")
        lines.insert(made + 1, f"attach(model, {task!r})  # the task that the inputs are of\n")
        return card(f"{loader}{''.join(lines)}")

    return more
