"""Calibration plans, resolved before anything is computed, and the saving of calibrated models.

Entry points: `plan_calibration`, `save_variants`, and `CalibrationExport` for a copy that the original library loads.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from driftlens.calibration.calibrator import Calibrator, calibrators, preset_settings
from driftlens.calibration.featcal import relative_change
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import (
    CastSource,
    InMemorySource,
    InterpolatedSource,
    LazyTensors,
    StateSource,
)
from driftlens.config.data import Views
from driftlens.config.requests import DEFAULT_METHOD, CalibrationRequest
from driftlens.data.altered import append_views
from driftlens.data.samples import SampleSet, select_samples, sort_by_length
from driftlens.engine.calibrating import CalibratedLayer, CalibrationContext, SiteReport
from driftlens.engine.pool import Attachment, Attachments, attachment_tensors, final_module_path
from driftlens.engine.sequential import StepwiseCalibrator
from driftlens.engine.sites import select_sites, sites_to_update
from driftlens.experiment.merging import merge_study
from driftlens.experiment.study import Study, model_info
from driftlens.experiment.study_loading import OpenModels, head_files
from driftlens.merging.method import merge_by_name
from driftlens.models.chain import LayerChain, ParameterKey, updated_tensors
from driftlens.models.saving import (
    PatchedSource,
    library_prefix,
    save_model,
    save_state_dict,
)
from driftlens.pipelines.analyze import read_attachments
from driftlens.runs.manifest import (
    CalibrationInfo,
    Manifest,
    SelectionResult,
    calibrated_weights_file,
    calibration_folder,
    corrections_file,
    package_versions,
    sample_ids_digest,
)
from driftlens.runs.run import open_run
from driftlens.runs.schema import CALIBRATION
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import CheckpointError, DataError, SpecError, pluralize, shorten_list
from driftlens.utils.registry import resolve_settings
from driftlens.utils.variants import (
    ModelChange,
    calibrated_variant,
    control_variant,
    expert_name,
    saving_loss_text,
)

if TYPE_CHECKING:
    from driftlens.config.spec import Calibration

# The file of adapters in a saved folder.
_ATTACHED_FILE = "attachments.safetensors"

_LOADER = """\
import torch
from safetensors.torch import load_file


def attach(model, task, file="{file}"):
    saved = {{tuple(key.split("/", 2)): value for key, value in load_file(file).items()}}
    for path in {{path for path, name, owner in saved if owner == task}}:
        def change(module, inputs, output, path=path):
            f = output[0] if isinstance(output, tuple) else output
            t = {{name: value.to(f) for (place, name, owner), value in saved.items() if (place, owner) == (path, task)}}
{code}
            return (f, *output[1:]) if isinstance(output, tuple) else f
        model.get_submodule(path).register_forward_hook(change)


"""


@dataclass(frozen=True)
class CalibrationPlan(SelectionResult):
    """A calibration with all settings resolved, before anything is solved.

    Attributes:
        control: variant of the anchor alone; empty without anchor, or if it is the merged model.
        selection: how `--auto` chose the settings.
        patterns: requested patterns of sites; empty means linear and norm modules inside blocks.
        boundaries: layers after which a trained calibrator attaches an adapter; it has no sites.
        out_dtype: dtype of the saved model; empty for the base's.
        interpolation: see `CalibrationInfo.interpolation`.
    """

    name: str
    method: str
    calibrator: Calibrator
    sites: Mapping[int, Sequence[str]]
    samples: Mapping[str, SampleSet]
    control: str
    automatic: bool = False
    selection: Mapping[str, Any] = field(default_factory=dict)
    patterns: Sequence[str] = ()
    seed: int = 0
    boundaries: Sequence[int] = ()
    out_dtype: str = ""
    interpolation: Mapping[str, Any] = field(default_factory=dict)

    def with_chosen_settings(
        self, calibrator: Calibrator, selection: Mapping[str, Any], study: Study
    ) -> CalibrationPlan:
        """Return the plan with the settings that `calibrate --auto` chose."""
        calibrator.check(has_base=study.has_base)
        interpolation = dict(self.interpolation)
        if "share" in selection:
            # The curve shows how a factor was chosen, so one that was requested or an existing calibration's has none.
            curve = {} if interpolation or "curve" not in selection else {"curve": selection["curve"]}
            interpolation |= {"share": selection["share"]} | curve
        plan = dataclasses.replace(self, automatic=True, selection=selection, interpolation=interpolation)
        if "merge" in selection:
            merge = merge_by_name(selection["merge"]["method"], selection["merge"]["parameters"])
            study.pool.add(plan.kept, merge_study(study.without_labels(self.samples), merge))
        # Nothing is solved, so there is no anchor to measure either.
        if plan.kept:
            return dataclasses.replace(plan, sites={}, control="")
        if "views" in selection:
            views = Views(**selection["views"])
            samples = {task: dataclasses.replace(drawn, views=views) for task, drawn in self.samples.items()}
            plan = dataclasses.replace(plan, samples=samples)
        sites = sites_to_update(study.pool.chain, self.sites, calibrator.update)
        method, control = registered_method(calibrator), _control_variant(self.name, calibrator, study)
        return dataclasses.replace(plan, method=method, sites=sites, calibrator=calibrator, control=control)

    @property
    def starting_point(self) -> dict[str, Any]:
        """The settings before an automatic choice, by which a finished calibration is recognized."""
        start = {"method": self.method, "settings": settings_as_json(self.calibrator), "layers": self.layers}
        return start | ({"views": self.views} if self.views else {})

    @property
    def phase(self) -> str:
        """The prefix of the names of the calibration's phases."""
        return f"calibrate:{self.name}"

    @property
    def variant(self) -> str:
        """The variant of the calibrated model."""
        return calibrated_variant(self.name)

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that the calibration adds: the control, then the calibrated model."""
        return (self.control, self.variant) if self.control else (self.variant,)

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that are calibrated or followed by an adapter."""
        return sorted({*self.sites, *self.boundaries})

    @property
    def views(self) -> dict[str, str]:
        """The requested augmentations of calibration samples, by task."""
        return {task: str(drawn.views) for task, drawn in self.samples.items() if drawn.views is not None}

    @property
    def num_copies(self) -> int:
        """The number of augmented copies of each calibration sample."""
        return max((drawn.views.count for drawn in self.samples.values() if drawn.views is not None), default=0)

    @property
    def manifest_entry(self) -> CalibrationInfo:
        """The calibration's entry in the manifest before anything is measured."""
        return CalibrationInfo(
            method=self.method,
            settings=settings_as_json(self.calibrator),
            control=self.control,
            seconds=0.0,
            samples={task: len(samples) for task, samples in self.samples.items()},
            sample_digests={task: sample_ids_digest(samples.unique_ids) for task, samples in self.samples.items()},
            layers=self.layers,
            automatic=self.automatic,
            preset=matching_preset(self.calibrator, self.num_copies),
            sites=tuple(self.patterns),
            seed=self.seed,
            selection=self.selection,
            out_dtype=self.out_dtype,
            views=self.views,
            interpolation=self.interpolation,
        )

    def solution_inputs(self, manifest: Manifest, study: Study) -> dict[str, Any]:
        """Return everything that the solution depends on, as plain values."""
        # By digests, so that moved files with equal weights are accepted.
        models = [*(["base"] if study.has_base else []), "merged", *map(expert_name, self.samples)]
        info = self.manifest_entry
        return {
            "method": self.method,
            "settings": info.settings,
            "automatic": self.automatic,
            "boundaries": list(self.boundaries),
            "sites": {str(layer): list(names) for layer, names in self.sites.items()},
            "samples": info.sample_digests,
            "models": {name: manifest.models[name].digest for name in models},
            "compute": f"{study.pool.device.type}, {str(study.pool.dtype).removeprefix('torch.')}",
            **({"out_dtype": self.out_dtype} if self.out_dtype else {}),
            **({"views": self.views} if self.views else {}),
            **({"interpolate": self.interpolation["asked"]} if "asked" in self.interpolation else {}),
        }


def plan_calibration(request: CalibrationRequest, section: Calibration | None, study: Study) -> CalibrationPlan:
    """Resolve a calibration request to a plan; the request overrides the run's spec.

    Args:
        request: the requested calibration.
        section: the `calibration` section of the run's spec; None without one.
        study: the opened models and samples.
    """
    calibrator = resolve_calibrator(request, section, has_views=study.has_views)
    calibrator.check(has_base=study.has_base)
    method, is_trained = _method_name(request, section), not calibrator.takes_sites
    samples = {task: _first_samples(data.calibration, request.samples, task) for task, data in study.tasks.items()}
    for task, drawn in samples.items():
        if drawn.views is not None:
            # Raises if the samples have no such views.
            append_views(drawn)
        if isinstance(calibrator, StepwiseCalibrator):
            calibrator.require_enough_samples(len(drawn), task)
    patterns, layers = request.sites, request.layers
    # A trained method has fixed layers, so the patterns of another method in the spec don't concern it.
    if patterns is None and section is not None and (section.method == method or not is_trained):
        patterns = section.sites
    if is_trained and (layers is not None or patterns is not None):
        raise SpecError(
            f"{method} takes no {'sites' if layers is None else 'layers'}: it is trained in fixed layers",
            hint="Leave them out, or choose a closed-form method, such as featcal.",
        )
    chain, update = study.pool.chain, calibrator.update
    sites = {} if is_trained else select_sites(chain, layers=layers, sites=patterns, update=update)
    if control_variant(request.name) in study.variants:
        raise SpecError(
            f"the control of {request.name!r} would be {control_variant(request.name)}, already a baseline of the run",
            hint="Choose another --name.",
        )
    alpha = request.interpolate
    if alpha is not None and not study.has_base:
        raise SpecError("--interpolate needs a base, but the run has none", hint="Leave it out.")
    if alpha is not None and is_trained:
        raise SpecError(
            f"{method} changes no weights, so --interpolate has no effect",
            hint="Leave it out, or choose a method that changes weights.",
        )
    return CalibrationPlan(
        request.name,
        method,
        calibrator,
        sites,
        samples,
        _control_variant(request.name, calibrator, study),
        patterns=tuple(patterns or ()),
        seed=study.seed,
        boundaries=(len(chain.layers),) if is_trained else (),
        out_dtype=request.out_dtype or "",
        interpolation={} if alpha is None else {"asked": alpha, "share": alpha},
    )


def calibration_context(
    study: Study, samples: Mapping[str, SampleSet], sites: Mapping[int, Sequence[str]], **options: Any
) -> CalibrationContext:
    """Return the context for calibrating a study's merged model; `options` set further fields of it."""
    return CalibrationContext(
        study.pool,
        {task: append_views(sort_by_length(drawn)) for task, drawn in samples.items()},
        sites,
        base="base" if study.has_base else None,
        feature_budget=study.settings.feature_budget,
        pooling=study.settings.pool,
        team=study.team,
        like=study.dtype_template,
        **options,
    )


def _control_variant(name: str, calibrator: Calibrator, study: Study) -> str:
    """Return the name of the control, the anchor without calibration; empty if it is the merged model."""
    return control_variant(name) if study.has_base and calibrator.anchor_rho != 1 else ""


def _first_samples(samples: SampleSet | None, count: int | None, task: str) -> SampleSet:
    """Return the first `count` samples, the same as if only `count` had been sampled."""
    if samples is None or len(samples) < (count or 1):
        available = 0 if samples is None else len(samples)
        raise DataError(
            f"task {task} has {available} calibration samples, but {count or 'some'} are requested",
            hint="Request fewer samples, or add samples.",
        )
    return samples if count is None else select_samples(samples, range(count))


def resolve_calibrator(
    request: CalibrationRequest, section: Calibration | None, *, has_views: bool = False
) -> Calibrator:
    """Return the calibrator with all settings: arguments override preset, spec and defaults.

    Args:
        request: the requested calibration.
        section: the `calibration` section of the run's spec; None without one.
        has_views: True if samples have views, for which calibrators may have other defaults.
    """
    method = _method_name(request, section)
    parameters = dict(calibrators[method].with_views) if has_views else {}
    # Another method has other settings.
    if section is not None and section.method == method:
        parameters |= preset_settings(method, section.preset, section.parameters)
    parameters |= preset_settings(method, request.preset, request.parameters)
    return calibrators[method](**resolve_settings(calibrators[method], parameters, method))


def views_of_preset(request: CalibrationRequest, section: Calibration | None) -> Views | None:
    """Return the augmentations that belong to the preset of a request, or of the run's spec; None without any."""
    method = _method_name(request, section)
    preset = request.preset or (section.preset if section is not None and section.method == method else None)
    copies = calibrators[method].preset_views.get(preset or "")
    return None if copies is None else Views(copies=copies)


def _method_name(request: CalibrationRequest, section: Calibration | None) -> str:
    return request.method or (DEFAULT_METHOD if section is None else section.method)


def registered_method(calibrator: Calibrator) -> str:
    """Return the name under which a calibrator's class, or its parent, is registered."""
    for name, kind in sorted(calibrators.items(), key=lambda entry: entry[1] is not type(calibrator)):
        if isinstance(calibrator, kind):
            return name
    raise SpecError(
        f"{calibrator!r} is not a registered calibrator",
        hint=f"Pass an instance, such as dl.FeatCal(), or a name: {', '.join(calibrators)}.",
    )


def settings_as_json(calibrator: Calibrator) -> dict[str, Any]:
    """Return all settings of a calibrator as JSON values."""
    settings = calibrator.get_params()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def matching_preset(calibrator: Calibrator, num_copies: int = 0) -> str:
    """Return the name of the preset with these settings and copies of each sample; empty if none matches."""
    settings, kind = calibrator.get_params(), type(calibrator)
    names = (name for name in kind.presets if kind.preset_views.get(name, 0) == num_copies)
    # Settings that a preset leaves out must have their defaults.
    return next((name for name in names if kind(**kind.presets[name]).get_params() == settings), "")


@dataclass
class CalibrationSolution:
    """The solved layers by index, adapters by task, and the total solving time in seconds."""

    layers: dict[int, CalibratedLayer] = field(default_factory=dict)
    attachments: dict[str, Attachment] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def site_reports(self) -> list[tuple[int, SiteReport]]:
        """The solver reports of all calibrated modules, with their layer indices."""
        return [(index, report) for index, layer in self.layers.items() for report in layer.reports]


@torch.no_grad()
def save_variants(
    writer: RunWriter,
    models: OpenModels,
    study: Study,
    plan: CalibrationPlan,
    solution: CalibrationSolution,
    info: CalibrationInfo,
    identity: Mapping[str, Any],
) -> None:
    """Save calibrated model, control, `config.yaml` and solver reports in the base's keys and dtypes."""
    import pandas as pd

    pool = study.pool
    merged = pool.source(plan.kept or "merged")
    keys = [(index, name) for index, layer in solution.layers.items() for name in layer.updates]
    # Read on demand: the solution of all layers together may exceed memory.
    updates = LazyTensors(dict.fromkeys(keys), lambda key: solution.layers[key[0]].updates[key[1]])
    # Of the saved weights: interpolation shortens what was solved.
    moves: dict[tuple[int, str], float | None] = {}
    for variant in plan.variants:
        is_control = variant == plan.control
        parameters: Mapping[ParameterKey, Tensor] = updates
        if is_control:
            reach = plan.calibrator.anchor_rho
            parameters = _anchor_parameters(pool.chain, merged, pool.source("base"), reach, updates)
        source = replace_parameters(pool.chain, merged, study.dtype_template, parameters)
        # The control stays the anchor itself.
        if not is_control and plan.interpolation:
            source = InterpolatedSource(pool.source("base"), source, plan.interpolation["share"])
            moves = _weight_changes(pool.chain, merged, source, solution)
        metadata = _weights_metadata(variant, info)
        with writer.file(calibrated_weights_file(plan.name, control=is_control)) as path:
            save_model(models.architecture, models.save_template, source, path, metadata=metadata)
    if solution.attachments:
        with writer.file(corrections_file(plan.name)) as path:
            attached = attachment_tensors(solution.attachments, len(pool.chain.layers))
            # Models that compute in float64 would double the size of adapters that were trained by gradients.
            save_state_dict(path, {key: tensor.float() for key, tensor in attached.items()})
    rows = [
        {"name": plan.name, "layer": layer}
        | {key: value for key, value in vars(report).items() if key in CALIBRATION.names}
        | ({"weight_change": moves[layer, report.site]} if (layer, report.site) in moves else {})
        for layer, report in solution.site_reports
    ]
    if rows:
        writer.append("calibration", pd.DataFrame(rows), replace=True)
    changes = [ModelChange(**report.change) for _, report in solution.site_reports if report.change]
    change = sum(changes, ModelChange("")) if changes else None
    config = {
        "name": plan.name,
        "variant": plan.variant,
        "control": plan.control or None,
        "selection": dict(plan.selection) or None,
        **identity,
        "num_samples": dict(info.samples),
        "seconds": round(info.seconds, 3),
        "change": {} if change is None else vars(change),
        "notices": [
            *info.notices,
            *([] if change is None else saving_loss_text(change, "the calibration", "the merged model's")),
            *_skipped_expert_notices(solution),
        ],
        "versions": package_versions(),
    }
    # Live modules are fitted without the library of yaml.
    from driftlens.config.types import to_yaml

    with writer.file(_calibration_config_file(plan.name)) as path:
        path.write_text(to_yaml(config), encoding="utf-8")


def _weight_changes(
    chain: LayerChain, merged: StateSource, saved: StateSource, solution: CalibrationSolution
) -> dict[tuple[int, str], float | None]:
    """Return |dW|_F / |W|_F of the saved against the merged weights, by layer index and solved module."""
    changes = {}
    for index, report in solution.site_reports:
        layer = chain.layers[index - 1]
        start = f"{layer.path}." if layer.role == "block" else ""
        own = {f"{start}{name}" if start else slot.key: slot for name, slot in layer.parameters.items()}
        parts = ("weight",) if report.kind == "linear" else ("weight", "bias")
        slots = [own[key] for part in parts if (key := f"{report.site}.{part}") in own]
        pairs = [[source.read(slot.key, slot.rows).double().flatten() for slot in slots] for source in (saved, merged)]
        if slots:
            changes[index, report.site] = relative_change(*(torch.cat(values) for values in pairs))
    return changes


def with_saved_results(info: CalibrationInfo, run: pathlib.Path, name: str) -> CalibrationInfo:
    """Add seconds, notices and weight changes from `config.yaml` to a calibration's manifest entry."""
    from driftlens.config.types import parse_yaml

    file = run / _calibration_config_file(name)
    saved = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    return dataclasses.replace(info, seconds=saved["seconds"], notices=tuple(saved["notices"]), change=saved["change"])


def _calibration_config_file(name: str) -> str:
    return f"{calibration_folder(name)}/config.yaml"


def _skipped_expert_notices(solution: CalibrationSolution) -> list[str]:
    """Return a notice on experts of mixtures that are not calibrated because they received too few tokens."""
    kept = [report for _, report in solution.site_reports if report.kind == "kept"]
    tokens = {report.site.rpartition(".")[0]: report.num_rows or 0 for report in kept}
    if not tokens:
        return []
    named = shorten_list([f"{expert} ({pluralize(count, 'token')})" for expert, count in tokens.items()])
    experts = pluralize(len(tokens), "expert")
    return [f"{experts} of mixtures received too few tokens and remain as merged: {named}. Use more samples"]


def _weights_metadata(variant: str, info: CalibrationInfo) -> dict[str, str]:
    """Return the metadata of a saved model: the settings that reproduce the calibration."""
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


def replace_parameters(
    chain: LayerChain, merged: StateSource, like: StateSource, parameters: Mapping[ParameterKey, Tensor]
) -> StateSource:
    """Return the merged model with some parameters replaced, in the dtypes of `like`.

    Args:
        chain: the layers of the model.
        merged: the merged model.
        like: the model with the dtypes of the result, usually the base.
        parameters: by layer index and name in the layer, in the layer's layout.
    """
    # A merged model stored in fewer bits must not round the solution.
    start = CastSource(merged, {key: header.dtype for key, header in like.headers.items()})
    return PatchedSource(start, updated_tensors(chain, parameters, start))


def _anchor_parameters(
    chain: LayerChain,
    merged: StateSource,
    base: StateSource,
    reach: float,
    keys: Collection[ParameterKey],
) -> LazyTensors[ParameterKey]:
    """Return the anchor of Eq. 11, base + reach * (merged - base), for some parameters, in float64."""

    # In float64, as the solve computes it; the difference of close models loses digits in float32.
    def _read_anchor(key: ParameterKey) -> Tensor:
        slot = chain.layers[key[0] - 1].parameters[key[1]]
        start, end = (source.read(slot.key, slot.rows).double() for source in (base, merged))
        return slot.to_layer_layout(reach * end + (1 - reach) * start)

    return LazyTensors(keys, _read_anchor)


@dataclass(frozen=True)
class CalibrationExport:
    """A stored calibrated model to be saved at `target` in the base's format, with a model card."""

    run: pathlib.Path
    name: str
    method: str
    models: OpenModels
    target: pathlib.Path

    def require_unchanged(self, manifest: Manifest) -> None:
        """Refuse to export weights that differ from the measured ones."""
        from driftlens.experiment.model_card import calibration_command

        info, measured = manifest.calibrations[self.name], manifest.models.get(calibrated_variant(self.name))
        stored = model_info(self.models.architecture.chain, self._stored_model, self._stored_attachments, "")
        if measured is not None and stored.digest != measured.digest:
            again = calibration_command(self.name, info, str(self.run), replace=True, save_weights=self.target)
            hint = f"Solve again: `{again}`" if again else "Choose again with --auto --replace."
            raise CheckpointError(f"{self._stored_model.name} has changed since it was measured", hint=hint)

    @torch.no_grad()
    def save(self, info: CalibrationInfo) -> None:
        """Write the model, its adapters and its model card."""
        from driftlens.experiment.model_card import model_card

        architecture, form, heads = (
            self.models.architecture,
            self.models.save_template,
            head_files(self.models),
        )
        card = _card_with_loading_code(partial(model_card, open_run(self.run), self.name), self._stored_attachments)
        metadata, prefix = _weights_metadata(calibrated_variant(self.name), info), ""
        is_file = self.target.suffix == ".safetensors"
        if self._stored_attachments:
            if not is_file:
                first_key = next(iter(architecture.chain.blocks[0].parameters.values())).key
                prefix = library_prefix(architecture, form, first_key)
            # By the paths of the library's modules.
            path = f"{prefix}{final_module_path(architecture.chain)}".rstrip(".")
            portable = attachment_tensors(self._stored_attachments, path)
            if is_file:
                save_state_dict(self.target.with_suffix(f".{_ATTACHED_FILE}"), portable, metadata)
            else:
                heads[_ATTACHED_FILE] = InMemorySource(_ATTACHED_FILE, portable)
        # A copy of the stored weights in the form of the base: the model is not computed again.
        save_model(architecture, form, self._stored_model, self.target, metadata=metadata, card=card, heads=heads)

    @cached_property
    def _stored_attachments(self) -> Attachments:
        return read_attachments(self.run, self.name, self.method)

    @cached_property
    def _stored_model(self) -> StateSource:
        stored = open_checkpoint(self.run / calibrated_weights_file(self.name))
        return self.models.architecture.align(stored)


def _card_with_loading_code(card: Callable[[str], str], attachments: Attachments) -> Callable[[str], str]:
    """Return a card whose Python example includes the code that attaches adapters, if the adapter defines it."""
    task, adapter = next(iter(attachments.items()), ("", None))
    code = str(getattr(adapter, "code", ""))
    if not code:
        return card
    loader = _LOADER.format(file=_ATTACHED_FILE, code=textwrap.indent(code, " " * 12))
    attach = f"attach(model, {task!r})  # the task of the inputs\n"

    def _extended_card(usage: str) -> str:
        return card(loader + re.sub(r"(?m)^model.*\n", lambda line: line[0] + attach, usage, count=1))

    return _extended_card
