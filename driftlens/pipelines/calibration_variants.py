"""The models that a calibration makes, written into the run and wherever else the user wants them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import (
    Between,
    InDtypes,
    OnDemand,
    StateSource,
    TensorsSource,
    content_digest,
)
from driftlens.engine.pool import Attachment, Attachments, attachment_tensors, portable_tensors
from driftlens.engine.solver_types import CalibratedLayer, SiteReport
from driftlens.experiment.loading import OpenModels, head_files
from driftlens.experiment.resume import attached_by
from driftlens.experiment.study import Study, model_info
from driftlens.models.architecture import Architecture
from driftlens.models.chain import LayerChain, ParameterKey, fused
from driftlens.models.saving import (
    Patched,
    library_prefix,
    require_target,
    save_card,
    save_model,
    save_state_dict,
)
from driftlens.pipelines.calibration_plan import CalibrationPlan
from driftlens.runs.layout import calibration_attachments, calibration_folder, calibration_weights
from driftlens.runs.manifest import CalibrationInfo, Manifest, versions
from driftlens.runs.run import open_run
from driftlens.runs.schema import CALIBRATION
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import CheckpointError, DriftLensError, counted, some_of
from driftlens.utils.rounding import Change, saved_words
from driftlens.utils.variants import calibrated

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
    """What a walk solved: layers by index, and by task what a trained calibrator attaches to the last layer."""

    layers: dict[int, CalibratedLayer] = field(default_factory=dict)
    attachments: dict[str, Attachment] = field(default_factory=dict)

    @property
    def updates(self) -> OnDemand[ParameterKey]:
        """(layer index, own parameter name) -> calibrated value, in the layer's layout."""
        keys = [(index, name) for index, layer in self.layers.items() for name in layer.updates]
        return OnDemand(dict.fromkeys(keys), lambda key: self.layers[key[0]].updates[key[1]])

    @property
    def change(self) -> dict[str, Any]:
        """What the number types that are saved in leave of all that was solved for; empty where nothing was."""
        counted = [Change(**report.change) for _, report in self.reports if report.change]
        return vars(sum(counted, Change(""))) if counted else {}

    @property
    def reports(self) -> list[tuple[int, SiteReport]]:
        """One per site, with its layer's index."""
        return [(index, report) for index, layer in self.layers.items() for report in layer.reports]


def unreached(solution: Solution) -> list[str]:
    """Return a notice on experts of mixtures that stay as merged because too few tokens came to them."""
    kept = [report for _, report in solution.reports if report.kind == "kept"]
    tokens = {report.site.rpartition(".")[0]: report.num_rows or 0 for report in kept}
    if not tokens:
        return []
    named = some_of([f"{expert} ({counted(count, 'token')})" for expert, count in tokens.items()])
    experts = counted(len(tokens), "expert")
    return [
        f"too few tokens came to {experts} of mixtures, which stay as merged: {named}; more samples reach more of them"
    ]


def history_rows(name: str, reports: Sequence[tuple[int, SiteReport]]) -> list[dict[str, Any]]:
    """Rows of the calibration table: one per site, layer index first."""
    columns = CALIBRATION.names
    return [
        {"name": name, "layer": layer}
        | {key: value for key, value in dataclasses.asdict(report).items() if key in columns}
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

    pool = study.pool
    merged = pool.source(plan.kept or "merged")
    for variant, relative in plan.weights.items():
        parameters: Mapping[ParameterKey, Tensor] = solution.updates
        if variant == plan.control:
            base, reach = pool.source("base"), plan.calibrator.anchor_reach
            parameters = anchors(pool.chain, merged, base, reach, solution.updates)
        source = with_parameters(pool.chain, merged, study.like, parameters)
        if variant == plan.variant and plan.shrink:
            source = Between(pool.source("base"), source, plan.shrink["share"])
        with writer.file(relative) as path:
            save_model(
                models.architecture, models.own_form, source, path, metadata=weights_metadata(variant, info)
            )

    if solution.attachments:
        with writer.file(calibration_attachments(plan.name)) as path:
            save_state_dict(path, attachment_tensors(solution.attachments, len(pool.chain.layers)))
    if solution.reports:
        writer.append("calibration", pd.DataFrame(history_rows(plan.name, solution.reports)), replace=True)
    change = solution.change
    config = {
        "name": plan.name,
        "variant": plan.variant,
        "control": plan.control or None,
        "selection": dict(plan.selection) or None,
        **identity,
        "num_samples": plan.counts,
        "seconds": round(info.seconds, 3),
        "change": change,
        "notices": [*info.notices, *lost_of(change), *unreached(solution)],
        "versions": versions(),
    }
    from driftlens.config.yaml_text import to_yaml  # live modules are fitted without the library of yaml

    with writer.file(f"{calibration_folder(plan.name)}/config.yaml") as path:
        path.write_text(to_yaml(config), encoding="utf-8")


def kept_change(run: pathlib.Path, name: str) -> dict[str, Any]:
    """What `save_variants` has counted of a calibration; empty where nothing was solved for."""
    from driftlens.config.yaml_text import from_yaml

    place = run / calibration_folder(name) / "config.yaml"
    return dict(from_yaml(place.read_text(encoding="utf-8"), place.name).get("change") or {})


def lost_of(change: Mapping[str, Any]) -> list[str]:
    """What is said of that; empty where next to nothing is lost."""
    return saved_words(Change(**change), "the calibration", "the merged model's") if change else []


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


@dataclass
class Export:
    """A calibrated model that a run keeps, to be saved in the form of the base at `target`, with its card.

    What an earlier sitting has saved is not written again, but for its card; `require_place` sets `is_saved`. One that
    `is_new` has no earlier sitting.
    """

    run: pathlib.Path
    name: str
    method: str
    models: OpenModels
    target: pathlib.Path
    is_new: bool = False
    is_saved: bool = False

    def require_kept(self, manifest: Manifest) -> None:
        """Refuse weights that are not those which were measured."""
        from driftlens.experiment.model_card import calibration_command

        info, weights = manifest.calibrations[self.name], self._weights
        again = calibration_command(self.name, info, str(self.run), replace=True, save_weights=self.target)
        hint = (
            f"`{again}` solves for them once more."
            if again
            else "Choose once more, with --auto and --replace."
        )
        measured = manifest.models.get(calibrated(self.name))
        stored = model_info(self._architecture.chain, self._model(weights), self._attached, "")
        if measured is not None and stored.digest != measured.digest:
            raise CheckpointError(f"{weights} is not the model that was measured: it has changed", hint=hint)

    def require_place(self) -> None:
        """Refuse a place that can't be written to, and is not taken by this very model."""
        try:
            is_there = not self.is_new and self.target.exists() and self._weights.is_file()
            self.is_saved = is_there and self._is_same()
        except DriftLensError:  # it is something else
            self.is_saved = False
        if not self.is_saved:
            require_target(self._architecture, self.target)

    @torch.no_grad()
    def save(self, info: CalibrationInfo) -> None:
        """Write the model, and what is attached beside its weights; of one that is there the card alone."""
        from driftlens.experiment.model_card import model_card

        run, heads = open_run(self.run), head_files(self.models)
        card = _with_loader(lambda usage: model_card(run, self.name, usage), self._attached)
        if self._attached and not self._is_file:
            heads[ATTACHED_FILE] = TensorsSource(ATTACHED_FILE, self._portable)
        if self.is_saved:
            if not self._is_file:
                save_card(self._architecture, self.models.own_form, self.target, card, heads)
            return
        metadata = weights_metadata(calibrated(self.name), info)
        if self._attached and self._is_file:
            save_state_dict(self._attached_file, self._portable, metadata)
        model, form = self._model(self._weights), self.models.own_form
        save_model(self._architecture, form, model, self.target, metadata=metadata, card=card, heads=heads)

    @property
    def _architecture(self) -> Architecture:
        return self.models.architecture

    @cached_property
    def _attached(self) -> Attachments:
        return attached_by(self.run, self.name, self.method)

    @property
    def _weights(self) -> pathlib.Path:
        return self.run / calibration_weights(self.name)

    @property
    def _is_file(self) -> bool:
        return self.target.suffix == ".safetensors"

    @property
    def _attached_file(self) -> pathlib.Path:
        return self.target.with_suffix(f".{ATTACHED_FILE}") if self._is_file else self.target / ATTACHED_FILE

    def _model(self, place: pathlib.Path) -> StateSource:
        return self._architecture.align(open_checkpoint(place))

    def _is_same(self) -> bool:
        keys, attached = self._architecture.chain.parameter_keys(), self._attached_file
        kept, saved = (content_digest(self._model(place), keys) for place in (self._weights, self.target))
        if kept != saved or attached.exists() != bool(self._attached):
            return False
        portable = TensorsSource(ATTACHED_FILE, self._portable)
        return not self._attached or content_digest(open_checkpoint(attached)) == content_digest(portable)

    @property
    def _portable(self) -> dict[str, Tensor]:
        """What is attached by the paths of the library's own modules."""
        architecture, prefix = self._architecture, ""
        if not self._is_file:
            first = next(iter(architecture.chain.blocks[0].parameters.values())).key
            prefix = library_prefix(architecture, self.models.own_form, first)
        return portable_tensors(architecture.chain, self._attached, prefix)


def _with_loader(card: Callable[[str], str], attachments: Attachments) -> Callable[[str], str]:
    """A card whose Python also hooks in what is attached for a task; the same card where nobody wrote how."""
    task, first = next(iter(attachments.items()), ("", None))
    code = str(getattr(first, "code", ""))
    if not code:
        return card
    loader = _LOADER.format(file=ATTACHED_FILE, code=textwrap.indent(code, " " * 12))

    def extended(usage: str) -> str:
        lines = usage.splitlines(keepends=True)
        model_line = next((index for index, line in enumerate(lines) if line.startswith("model")), None)
        if model_line is None:
            return card(f"{usage}{loader}")
        lines.insert(model_line + 1, f"attach(model, {task!r})  # the task that the inputs are of\n")
        return card(f"{loader}{''.join(lines)}")

    return extended
