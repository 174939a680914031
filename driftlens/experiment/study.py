"""The input of one analysis: models, samples, heads and settings. Entry point: `Study`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from driftlens.checkpoints.tensor_sources import StateSource, TensorsSource, content_digest, in_dtype
from driftlens.data.samples import SampleSet
from driftlens.engine.pool import Attachments, ModelPool, ScoredSamples, attachment_tensors
from driftlens.models.chain import LayerChain, Pool
from driftlens.models.heads import ScoreMap
from driftlens.utils.distributed import ALONE, Team
from driftlens.utils.registry import Diagnostic, chosen
from driftlens.utils.variants import expert_of, is_explained

if TYPE_CHECKING:
    from driftlens.config.data import Views
    from driftlens.diagnostics.attribution import JacobianSettings
    from driftlens.runs.manifest import ModelInfo

T = TypeVar("T")


@dataclass(frozen=True)
class TaskSamples:
    """The samples and score map of one task.

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
    """The settings of an analysis.

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
    def measured(self) -> tuple[Diagnostic, ...]:
        """The diagnostics that are measured during the walk."""
        return tuple(chosen(self.options))


@dataclass(frozen=True)
class Study:
    """Models and samples of one analysis.

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
    team: Team = ALONE
    out_dtype: torch.dtype | None = None

    def of_task(self, task: str, work: Callable[[], T]) -> T | None:
        """Run work in the process that owns the task; return the result in the main process, None elsewhere."""
        return self.team.run_on(self.team.owners([*self.tasks])[task], work)

    def head(self, task: str, variant: str) -> ScoreMap | None:
        """Return the score map of a variant for a task; None without a head."""
        return self.pool.score_map(self.tasks[task].head, variant)

    def asked(self, task: str) -> ScoredSamples:
        """Return a task's calibration samples with its expert's score map, which it must have."""
        samples, head = self.tasks[task].calibration, self.head(task, expert_of(task))
        assert samples is not None and head is not None
        return ScoredSamples(self.pool, samples, head, self.settings.pool)

    @property
    def calibration_sets(self) -> dict[str, SampleSet]:
        """The calibration samples of every task that has some."""
        return {task: data.calibration for task, data in self.tasks.items() if data.calibration is not None}

    @property
    def has_base(self) -> bool:
        """True if there is a base to compare with and to take task vectors from."""
        return "base" in self.variants

    @property
    def has_views(self) -> bool:
        """True if calibrations also read augmented copies of samples."""
        return any(samples.num_read > len(samples) for samples in self.calibration_sets.values())

    def viewing(self, views: Views | None) -> Study:
        """Return the study with these views for all calibration samples; None keeps the present ones."""
        if views is None:
            return self
        tasks = {
            task: replace(data, calibration=data.calibration and replace(data.calibration, views=views))
            for task, data in self.tasks.items()
        }
        return replace(self, tasks=tasks)

    @property
    def like(self) -> StateSource:
        """The model that defines the dtypes of saved models: the base or an expert, in the requested dtype."""
        like = self.pool.source("base" if self.has_base else expert_of(next(iter(self.tasks))))
        return in_dtype(like, self.out_dtype)

    @property
    def explained_variants(self) -> tuple[str, ...]:
        """The variants whose drift is attributed to layers."""
        return tuple(filter(is_explained, self.variants))

    def model_info(self, name: str) -> ModelInfo:
        """Return digest, size and origin of a model with its attachments; all tensors are read once."""
        variant, source = self.pool.variant(name), self.pool.source(name)
        return model_info(
            self.pool.chain, source, variant.attachments, self.provenance.get(name, source.name)
        )

    def blinded(self, samples: Mapping[str, SampleSet]) -> Study:
        """Return the study as methods see it: these calibration samples only, without labels."""
        tasks = {}
        for task, data in self.tasks.items():
            shown = replace(samples[task], labels=None)
            tasks[task] = replace(data, diagnosis=shown, calibration=shown, test=None)
        return replace(self, tasks=tasks)


def model_info(chain: LayerChain, source: StateSource, attachments: Attachments, origin: str) -> ModelInfo:
    """Return digest, number of parameters and origin of a model with its attachments.

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
        combined = f"{digest} {content_digest(TensorsSource(source.name, attached))}"
        digest = hashlib.sha256(combined.encode()).hexdigest()
        count += sum(value.numel() for value in attached.values())
    return ModelInfo(digest, count, origin)
