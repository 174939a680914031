"""Base classes of calibrators, and their registry: one file each in this package.

A calibrator owns its settings: the parameters of its constructor, with types, defaults, bounds and help in their
annotations (see `driftlens.utils.registry`). Spec, command line, dashboard and model card read them there.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.engine.calibrating import (
    EXPERT,
    MERGED,
    CalibratedLayer,
    CalibrationContext,
    CalibrationProgress,
    LayerwiseCalibrator,
)
from driftlens.engine.pool import Attachment, ModelPool
from driftlens.engine.walk import FeatureStream, OnStep
from driftlens.models.chain import Layer
from driftlens.utils.devices import to_device
from driftlens.utils.errors import IncompatibleModelsError, SpecError, did_you_mean
from driftlens.utils.registry import Registry, resolve_settings, settings_model
from driftlens.utils.variants import expert_name, suited_preset


class Calibrator:
    """Base class of calibrators; the constructor stores settings as in scikit-learn, `check` validates them.

    Attributes:
        title: the name in reports.
        source: the paper.
        presets: tried settings by name; missing settings keep their defaults.
        preset_views: preset -> augmented copies of each calibration sample that it reads, unless spec or user say
            otherwise.
        suited: kind of models (`Manifest.model_kinds`) -> the preset for it; that of `""` is for all others.
        candidates: settings that `--auto` compares with the current ones.
        with_views: defaults of settings if calibration samples have views.
        swept: setting -> factors of its published value that a sweep tries, within its bounds.
        of_base: settings among these that need a base.
        effort: CPU time of a calibration relative to FeatCal's.
        update: kinds of parameters that it changes; empty if it only attaches corrections.
        takes_sites: True if it solves for modules, which a user may choose. Otherwise it attaches a map per task, so
            the task of an input must be known.
    """

    title: ClassVar[str] = ""
    source: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    preset_views: ClassVar[Mapping[str, int]] = {}
    suited: ClassVar[Mapping[str, str]] = {}
    candidates: ClassVar[Sequence[Mapping[str, Any]]] = ()
    with_views: ClassVar[Mapping[str, Any]] = {}
    swept: ClassVar[Mapping[str, Sequence[float]]] = {}
    of_base: ClassVar[Collection[str]] = ()
    effort: ClassVar[float] = 1.0
    takes_sites: ClassVar[bool] = True
    update: Sequence[str] = ()

    @classmethod
    def preset_for(cls, model_kinds: Sequence[str]) -> str | None:
        """Return the preset for models of these kinds, of which the first counts most; None for the defaults."""
        return suited_preset(cls.suited, model_kinds)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's arguments and their values; `deep` has no effect."""
        return {name: getattr(self, name) for name in settings_model(type(self)).model_fields}

    def changed(self, **settings: Any) -> Self:
        """Return a copy with some settings changed."""
        return type(self)(**self.get_params() | settings)

    def calibrate(self, context: CalibrationContext) -> Iterator[CalibratedLayer]:
        """Check the settings, then yield calibrated layers in forward order, or one correction per task.

        Raises:
            SpecError: a setting is invalid.
            DataError: a task has no samples, or too few.
            NumericsError: weights or features are NaN or infinite; names layer, task and sample.
            SingularGramError: a site's system is singular; names it.
        """
        self.check(has_base=context.base is not None)
        return self.calibrated_layers(context)

    def calibrated_layers(self, context: CalibrationContext) -> Iterator[CalibratedLayer]:
        """Yield calibrated layers or corrections from checked settings; see `calibrate`."""
        raise NotImplementedError

    def extra_cache_bytes(self, pool: ModelPool, sites: Mapping[int, Collection[str]]) -> int:
        """Return the bytes per task that calibration of these sites caches in addition to features."""
        return 0

    @property
    def anchor_rho(self) -> float:
        """The position rho of the anchor base + rho * (merged - base); 1 for the merged model."""
        return 1.0

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        changed = [f"{name}={value!r}" for name, value in self.get_params().items() if value != defaults[name].default]
        return f"{type(self).__name__}({', '.join(changed)})"

    def check(self, *, has_base: bool = True) -> None:
        """Raise a `SpecError` if a setting is invalid, with its value and what was expected."""
        resolve_settings(type(self), self.get_params())


class ClosedFormBase(LayerwiseCalibrator, Calibrator):
    """A calibrator in closed form from moments of the features; a subclass adds `solve`."""


@dataclass(frozen=True)
class FinalFeatures:
    """Final features of a task's calibration samples in the merged model and the expert.

    `mask` is [n, t], False at padding, or None without padding.
    """

    layer: Layer
    task: str
    merged: Tensor
    expert: Tensor
    mask: Tensor | None = None

    def rows(self, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the merged model's and the expert's feature vectors of every unmasked token, [T, d] each.

        `chosen` are positions of samples, [m]; None takes all. Channels before space, as in convolutions, are refused.
        """
        # A map of tokens has no meaning for channels of a convolution.
        if self.merged.dim() > 3:
            raise IncompatibleModelsError(
                f"{self.layer.path} returns features {list(self.merged.shape)}, channels before space; expected "
                "tokens for a map of the final feature",
                hint="Choose a method that changes weights.",
            )
        places = slice(None) if chosen is None else to_device(chosen, self.merged.device)
        mask = None if self.mask is None else self.mask[places]
        return _unmasked_token_rows(self.merged[places], mask), _unmasked_token_rows(self.expert[places], mask)


def _unmasked_token_rows(features: Tensor, mask: Tensor | None) -> Tensor:
    """Return the feature vectors of unmasked tokens, [T, d]; a mask of another shape is ignored."""
    is_masked = mask is not None and features.dim() == 3 and mask.shape == features.shape[:2]
    return features[mask.bool()] if mask is not None and is_masked else features.flatten(0, -2)


@torch.no_grad()
def _final_features(context: CalibrationContext, task: str, on_step: OnStep) -> FinalFeatures:
    """Run the merged model and the task's expert on the calibration samples; pad shorter texts to the longest."""
    pool = context.pool
    with context.store() as store:
        stream = FeatureStream(pool, {task: context.parts[task]}, (EXPERT, MERGED), store, on_step)
        for layer in pool.chain.layers:
            expert_map, merged_map = (pool.layer_map(model, layer, task) for model in (expert_name(task), MERGED))
            for batch in stream.batches(layer, task):
                stream.take(layer, batch, EXPERT, expert_map, named="the expert model")
                stream.take(layer, batch, MERGED, merged_map, named="the merged model")
        stream.check()
        layer, batches = pool.chain.layers[-1], stream.cached[task]
        merged, expert = ([batch.get(model)[layer.stream] for batch in batches] for model in (MERGED, EXPERT))
        masks = [batch.side.mask(layer.stream) for batch in batches]
    # One vector per sample has no padding.
    if merged[0].dim() != 3:
        return FinalFeatures(layer, task, torch.cat(merged), torch.cat(expert))
    longest, mask = max(part.shape[1] for part in merged), None
    if any(part.shape[1] < longest for part in merged) or any(counts is not None for counts in masks):
        counts = [
            part.new_ones(part.shape[:2]) if own_mask is None else own_mask
            for part, own_mask in zip(merged, masks, strict=True)
        ]
        mask = _pad_and_concatenate(counts, longest).bool()
    return FinalFeatures(
        layer, task, _pad_and_concatenate(merged, longest), _pad_and_concatenate(expert, longest), mask
    )


def _pad_and_concatenate(parts: Sequence[Tensor], length: int) -> Tensor:
    return torch.cat([F.pad(x, [0, 0] * (x.dim() - 2) + [0, length - x.shape[1]]) for x in parts])


@dataclass(frozen=True)
class TrainingContext:
    """The random generator and the progress callback of one training."""

    generator: torch.Generator
    told: Callable[[int, int, float], None]


class TrainedCalibrator(Calibrator):
    """A calibrator that trains a correction of the final feature for each task, on that task's samples.

    The weights stay as they are. A subclass adds `train` and `attachment`.
    """

    takes_sites = False

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor]) -> Attachment:
        """Build a correction from its saved tensors, as `Attachment.tensors` returned them."""
        raise NotImplementedError

    def train(self, features: FinalFeatures, course: TrainingContext) -> Attachment:
        """Train the correction of one task, and report every step to `course`."""
        raise NotImplementedError

    def calibrated_layers(self, context: CalibrationContext) -> Iterator[CalibratedLayer]:
        """Train and yield the correction of every task; each task is trained by one process."""
        team, last = context.team, len(context.pool.chain.layers)
        # One task per process and round, so that results arrive in the order of tasks.
        rounds = range(0, len(context.tasks), team.size)
        for done, start in enumerate(rounds):
            tasks, tensors = context.tasks[start : start + team.size], dict[str, Tensor]()
            if team.rank < len(tasks):
                trained = self._train_task_correction(context, tasks[team.rank], done, len(rounds))
                tensors = {name: value.detach().cpu() for name, value in trained.tensors().items()}
            # The last round may have fewer tasks than processes.
            for task, of_task in zip(tasks, team.gather(tensors), strict=False):
                yield CalibratedLayer(last, attachments={task: self.attachment(of_task)})
        context.on_step(CalibrationProgress(0, "", len(rounds), len(rounds), ""))

    def _train_task_correction(self, context: CalibrationContext, task: str, done: int, total: int) -> Attachment:
        last = len(context.pool.chain.layers)

        def report_layer(layer: int, task: str) -> None:
            context.on_step(CalibrationProgress(layer, task, done, total, f"layer {layer}, task {task}"))

        def report_training_step(step: int, steps: int, loss: float) -> None:
            label = f"layer {last}, task {task}: step {step} of {steps}"
            progress = (done, total) if total > 1 else (step, steps)
            context.on_step(CalibrationProgress(last, task, *progress, label, loss))

        features = _final_features(context, task, report_layer)
        # A seed per task, so that the result doesn't depend on the number of processes.
        seed = context.seed + zlib.crc32(f"{last} {task}".encode())
        # The caller computes without gradients.
        with torch.enable_grad():
            return self.train(features, TrainingContext(torch.Generator().manual_seed(seed), report_training_step))


def preset_settings(method: str, preset: str | None, settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings of one of a method's presets, overridden by `settings`.

    Args:
        method: the name of a calibrator.
        preset: the name of a preset; None for none.
        settings: the settings, which override the preset's.
    """
    kind = calibrators[method]
    if preset is not None and preset not in kind.presets:
        raise SpecError(
            f"no preset is called {preset!r}; there are {', '.join(kind.presets) or 'none'}",
            hint=did_you_mean(preset, kind.presets),
        )
    return {**(kind.presets[preset] if preset is not None else {}), **settings}


def require_task_id(task_id: str, method: str) -> None:
    """Raise a `SpecError` if a method has one correction per task, but the task of inputs is unknown."""
    if task_id == "unknown" and not calibrators[method].takes_sites:
        raise SpecError(
            f"{method} has one map per task, but task_id is unknown",
            hint="Choose featcal or residual, which change weights, or set task_id: known.",
        )


calibrators: Registry[type[Calibrator]] = Registry("calibrator", "driftlens.calibration", "driftlens.calibrators")
"""Calibrator classes by name."""
