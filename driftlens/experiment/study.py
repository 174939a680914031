"""The input of one analysis: models, samples, heads and settings. Entry point: `Study`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from driftlens.checkpoints.tensor_sources import InMemorySource, StateSource, cast_source, content_digest
from driftlens.data.samples import SampleSet
from driftlens.engine.pool import Attachments, ModelPool, ScoredSamples, attachment_tensors
from driftlens.models.chain import LayerChain, Pool
from driftlens.models.heads import ScoreMap
from driftlens.utils.distributed import ALONE, ProcessGroup
from driftlens.utils.registry import Diagnostic, enabled_diagnostics
from driftlens.utils.variants import expert_name, has_attribution

if TYPE_CHECKING:
    from driftlens.config.data import Views
    from driftlens.diagnostics.attribution import JacobianSettings
    from driftlens.runs.manifest import ModelInfo

T = TypeVar("T")


@dataclass(frozen=True)
class TaskSamples:
    """The samples and the classification head of one task.

    Attributes:
        test: samples for scores; None without labels or known classes.
        head: final features -> class scores.
        calibration: samples that a calibrator may read; None for the diagnosis samples.
        metrics: metrics of the test samples; empty chooses them by the kind of samples.
        choices: class -> the text that answers with it; empty without classes or texts.
    """

    diagnosis: SampleSet
    test: SampleSet | None = None
    head: ScoreMap | None = None
    calibration: SampleSet | None = None
    metrics: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AnalysisSettings:
    """Pooling, stored layers, optional diagnostics and Jacobian settings of an analysis.

    Attributes:
        stored_layers: layers whose rows and features are kept (stem and head always are).
        options: optional diagnostics that are switched on, by their names in the spec's `metrics`.
        feature_budget: bytes of features that may be cached at a boundary; more samples are processed in chunks.
        deterministic: True to prefer deterministic kernels.
    """

    pool: Pool
    stored_layers: frozenset[int]
    options: frozenset[str] = frozenset()
    jacobian: JacobianSettings | None = None
    feature_budget: int = 2 << 30
    deterministic: bool = False

    @functools.cached_property
    def active_diagnostics(self) -> tuple[Diagnostic, ...]:
        """The diagnostics that are computed while samples run through the layers."""
        return tuple(enabled_diagnostics(self.options))


@dataclass(frozen=True)
class Study:
    """Models, samples and settings of one analysis.

    Attributes:
        variants: compared with the expert, in the order of the tables.
        provenance: the origin of every model.
        preprocessing: the code that made the inputs.
        architecture: entries of the manifest in addition to the chain's settings.
        head_marks: numbers that identify a live head.
        out_dtype: dtype of saved tensors, if one was requested.
    """

    name: str
    pool: ModelPool
    variants: tuple[str, ...]
    tasks: Mapping[str, TaskSamples]
    settings: AnalysisSettings
    seed: int = 0
    notices: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    preprocessing: str = ""
    architecture: Mapping[str, Any] = field(default_factory=dict)
    head_marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    team: ProcessGroup = ALONE
    out_dtype: torch.dtype | None = None

    def run_on_task_owner(self, task: str, work: Callable[[], T]) -> T | None:
        """Run work on the process that owns a task; the result reaches the main process, others get None."""
        return self.team.run_on_rank(self.team.owner_ranks([*self.tasks])[task], work)

    def head(self, task: str, variant: str) -> ScoreMap | None:
        """Return the classification head of a variant for a task; None without one."""
        return self.pool.score_map(self.tasks[task].head, variant)

    def scored_samples(self, task: str) -> ScoredSamples:
        """Return a task's calibration samples with its expert's classification head."""
        samples, head = self.tasks[task].calibration, self.head(task, expert_name(task))
        assert samples is not None and head is not None
        return ScoredSamples(self.pool, samples, head, self.settings.pool)

    @property
    def calibration_sets(self) -> dict[str, SampleSet]:
        """The calibration samples by task, for tasks that have some."""
        return {task: data.calibration for task, data in self.tasks.items() if data.calibration is not None}

    @property
    def has_base(self) -> bool:
        """True if there is a base to compare with and to take task vectors from."""
        return "base" in self.variants

    @property
    def has_views(self) -> bool:
        """True if calibrations also read augmented copies of samples."""
        return any(samples.num_with_views > len(samples) for samples in self.calibration_sets.values())

    def with_views(self, views: Views | None, *, default: Views | None = None) -> Study:
        """Return the study with these augmentations of all calibration samples.

        Args:
            views: replaces the augmentations of all tasks; None keeps them.
            default: those of tasks that have none; None leaves them without.
        """
        tasks = {
            task: replace(data, calibration=replace(drawn, views=views or drawn.views or default)) if drawn else data
            for task, data in self.tasks.items()
            for drawn in (data.calibration,)
        }
        return replace(self, tasks=tasks)

    @property
    def dtype_template(self) -> StateSource:
        """The model that defines the dtypes of saved models: base or expert, cast if requested."""
        like = self.pool.source("base" if self.has_base else expert_name(next(iter(self.tasks))))
        return cast_source(like, self.out_dtype)

    @property
    def attributed_variants(self) -> tuple[str, ...]:
        """The variants whose drift is attributed to layers."""
        return tuple(filter(has_attribution, self.variants))

    def model_info(self, name: str) -> ModelInfo:
        """Return digest, parameter count and origin of a model with its correction modules."""
        variant, source = self.pool.variant(name), self.pool.source(name)
        return model_info(self.pool.chain, source, variant.attachments, self.provenance.get(name, source.name))

    def without_labels(self, samples: Mapping[str, SampleSet]) -> Study:
        """Return the study with only these calibration samples, without labels."""
        tasks = {}
        for task, data in self.tasks.items():
            shown = replace(samples[task], labels=None)
            tasks[task] = replace(data, diagnosis=shown, calibration=shown, test=None)
        return replace(self, tasks=tasks)


def model_info(chain: LayerChain, source: StateSource, attachments: Attachments, origin: str) -> ModelInfo:
    """Return digest, parameter count and origin of a model with its correction modules.

    Args:
        chain: the layers.
        source: the weights; all tensors are read once.
        attachments: maps added to the model.
        origin: the model's source, for the manifest.
    """
    # A calibration in memory writes no manifest.
    from driftlens.runs.manifest import ModelInfo

    keys = chain.parameter_keys()
    count = sum(torch.Size(source.headers[key].shape).numel() for key in keys)
    digest = content_digest(source, keys)
    if attachments:
        attached = attachment_tensors(attachments, len(chain.layers))
        combined = f"{digest} {content_digest(InMemorySource(source.name, attached))}"
        digest = hashlib.sha256(combined.encode()).hexdigest()
        count += sum(value.numel() for value in attached.values())
    return ModelInfo(digest, count, origin)
