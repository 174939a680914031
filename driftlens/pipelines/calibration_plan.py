"""What one calibration will do to one run, decided before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.calibration.automatic import folds_of
from driftlens.calibration.calibrator import Calibrator, calibrators, over_preset
from driftlens.config.data import Views
from driftlens.config.requests import DEFAULT_METHOD, CalibrationRequest
from driftlens.data.samples import SampleSet, part_of
from driftlens.data.views import viewed
from driftlens.engine.pool import ModelPool
from driftlens.engine.sequential import Stepwise
from driftlens.engine.sites import select_sites, updated_sites
from driftlens.experiment.merging import merged_within
from driftlens.experiment.resume import Kept
from driftlens.experiment.study import Study
from driftlens.merging.method import merge_called
from driftlens.pipelines.evaluation import final_features
from driftlens.runs.layout import calibration_weights
from driftlens.runs.manifest import CalibrationInfo, Chosen, Manifest, ids_digest
from driftlens.runs.run import DriftRun
from driftlens.utils.devices import wide
from driftlens.utils.errors import DataError, SpecError
from driftlens.utils.intervals import standard_error, student
from driftlens.utils.progress import Reporter
from driftlens.utils.registry import resolve
from driftlens.utils.variants import calibrated, control_of, expert_of, task_of

if TYPE_CHECKING:
    from driftlens.config.run import Calibration, RunSpec


_SURE = 200
"""Diagnosis samples of a task that are asked how sure its expert is."""


Choice = Callable[
    [Study, Calibrator, Mapping[int, Sequence[str]], Reporter, Kept], tuple[Calibrator, Mapping[str, Any]]
]
"""Chooses hyperparameters: (study, calibrator to start from, sites, reporter, where to keep trials) -> calibrator
with the hyperparameters chosen, and how they were. It sees calibration samples and nothing else. Where the record says
`kept`, the calibration's variant is that model, `merged` or `base`, as it is."""


@dataclass(frozen=True)
class CalibrationPlan(Chosen):
    """A calibration with everything resolved; `sites` are names by layer, `selection` how settings were chosen.

    Attributes:
        control: variant of the anchor alone; empty where the anchor is the merged model, or there is none.
        patterns: that the sites' paths match; none means linear and norm modules inside blocks.
        boundaries: layers that a trained calibrator changes or attaches something to; it solves for no site.
        out_dtype: what is saved in; empty for the base's own.
        shrink: see `CalibrationInfo.shrink`.
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
    shrink: Mapping[str, Any] = field(default_factory=dict)

    def require_choosable(self) -> None:
        """Refuse a choice for a trained calibrator, or with too few samples to hold some out."""
        if not self.calibrator.takes_sites:
            raise SpecError(f"{self.method} has no closed form to choose", hint="Leave out --auto.")
        for task, count in self.counts.items():
            folds_of(count, task)

    def settled(self, calibrator: Calibrator, study: Study) -> CalibrationPlan:
        """The plan with this calibrator, and the control that its anchor wants."""
        control = control_of(self.name) if study.has_base and calibrator.anchor_reach != 1 else ""
        return dataclasses.replace(self, calibrator=calibrator, control=control)

    def chosen(
        self, choose: Choice, study: Study, reporter: Reporter, begun: Mapping[str, Any], kept: Kept
    ) -> CalibrationPlan:
        """The plan with hyperparameters that `choose` finds on its samples, or found before: what had `begun`."""
        selection = begun.get("selection") or {}
        if selection.get("asked") == self.asked:
            kind = calibrators[begun["method"]]
            calibrator: Calibrator = kind(**resolve(kind, begun["settings"], begun["method"]))
        else:
            shown = study.blinded(self.samples)
            calibrator, record = choose(shown, self.calibrator, self.sites, reporter, kept)
            selection = {**record, "preset": preset_of(self.calibrator), "asked": self.asked}
        calibrator.check(has_base=study.has_base)
        plan = dataclasses.replace(self, automatic=True, selection=selection)
        if "share" in selection:
            # A share that was asked for is none that the curve speaks for.
            curve = {} if "share" in self.shrink else {"curve": selection["curve"]}
            plan = dataclasses.replace(plan, shrink={**self.shrink, "share": selection["share"], **curve})
        if "merge" in selection:
            merge = merge_called(selection["merge"]["method"], selection["merge"]["parameters"])
            study.pool.add(plan.kept, merged_within(study.blinded(self.samples), merge))
        if plan.kept:
            return dataclasses.replace(plan, sites={}, control="")
        if "views" in selection:
            views = Views(**selection["views"])
            samples = {task: dataclasses.replace(drawn, views=views) for task, drawn in self.samples.items()}
            plan = dataclasses.replace(plan, samples=samples)
        if type(calibrator) is not type(self.calibrator):
            sites = updated_sites(study.pool.chain, self.sites, calibrator.update)
            plan = dataclasses.replace(plan, method=method_called(calibrator), sites=sites)
        return plan.settled(calibrator, study)

    @property
    def asked(self) -> dict[str, Any]:
        """What a choice begins with, as plain values: a finished calibration is known again by it."""
        start = {"method": self.method, "settings": self.hyperparameters, "layers": self.layers}
        return start | ({"views": self.views} if self.views else {})

    @property
    def variant(self) -> str:
        """The variant that it makes."""
        return calibrated(self.name)

    @property
    def variants(self) -> tuple[str, ...]:
        """All variants that it makes, the control first."""
        return (self.control, self.variant) if self.control else (self.variant,)

    @property
    def phase(self) -> str:
        """What the run calls its phases."""
        return f"calibrate:{self.name}"

    @property
    def weights(self) -> dict[str, str]:
        """Where the weights of each variant go, relative to the run."""
        return {
            variant: calibration_weights(self.name, control=variant == self.control)
            for variant in self.variants
        }

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """All hyperparameters as plain values."""
        return plain_settings(self.calibrator)

    @property
    def parameters(self) -> frozenset[tuple[int, str]]:
        """Layer index and own name of every parameter of the chosen sites."""
        return frozenset(
            (layer, f"{site}.{part}")
            for layer, sites in self.sites.items()
            for site in sites
            for part in ("weight", "bias")
        )

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that are calibrated, or have something attached behind them."""
        return sorted({*self.sites, *self.boundaries})

    @property
    def counts(self) -> dict[str, int]:
        """Calibration samples by task."""
        return {task: len(samples) for task, samples in self.samples.items()}

    @property
    def sample_digests(self) -> dict[str, str]:
        """Digest of the calibration samples' ids, or of their contents where a caller has handed them in, by task."""
        return {task: ids_digest(samples.identities) for task, samples in self.samples.items()}

    @property
    def views(self) -> dict[str, str]:
        """Which copies of samples are read beside them, as was asked for, by task."""
        by_task = {task: samples.views for task, samples in self.samples.items()}
        return {task: str(views) for task, views in by_task.items() if views is not None}

    def info(
        self,
        seconds: float,
        notices: Sequence[str],
        attached: int = 0,
        change: Mapping[str, Any] = MappingProxyType({}),
    ) -> CalibrationInfo:
        """The entry of the manifest."""
        return CalibrationInfo(
            method=self.method,
            settings=self.hyperparameters,
            control=self.control,
            seconds=seconds,
            samples=self.counts,
            sample_digests=self.sample_digests,
            layers=self.layers,
            automatic=self.automatic,
            notices=tuple(notices),
            preset=preset_of(self.calibrator),
            sites=tuple(self.patterns),
            seed=self.seed,
            selection=self.selection,
            attached=attached,
            out_dtype=self.out_dtype,
            change=dict(change),
            views=self.views,
            shrink=self.shrink,
        )

    def identity(self, manifest: Manifest, study: Study) -> dict[str, Any]:
        """Everything that the solution depends on, as plain values."""
        models = [*(["base"] if study.has_base else []), "merged", *map(expert_of, self.samples)]
        return {
            "method": self.method,
            "settings": self.hyperparameters,
            "automatic": self.automatic,
            "boundaries": list(self.boundaries),
            "sites": {str(layer): list(names) for layer, names in self.sites.items()},
            "samples": self.sample_digests,
            "models": {name: manifest.models[name].digest for name in models},
            "compute": f"{study.pool.device.type}, {str(study.pool.dtype).removeprefix('torch.')}",
            **({"out_dtype": self.out_dtype} if self.out_dtype else {}),
            **({"views": self.views} if self.views else {}),
            **({"shrink": self.shrink["asked"]} if "asked" in self.shrink else {}),
        }


def plan_calibration(
    request: CalibrationRequest, run: DriftRun, spec: RunSpec | None, study: Study
) -> CalibrationPlan:
    """The plan of a request; where it says nothing, the `calibration` section of the run's spec counts."""
    section = None if spec is None else spec.calibration
    calibrator = calibrator_of(request, section, has_views=study.has_views)
    calibrator.check(has_base=study.has_base)
    method, chooses_itself = method_of(request, section), not calibrator.takes_sites
    samples = {
        task: _beginning(at_hand.calibration, request.samples, task) for task, at_hand in study.tasks.items()
    }
    for task, drawn in samples.items():
        viewed(drawn)  # refuses views that can't be made
        if isinstance(calibrator, Stepwise):
            calibrator.require_samples(len(drawn), task)
    patterns = request.sites
    if patterns is None and section is not None and (section.method == method or not chooses_itself):
        patterns = section.sites
    layers = request.layers
    if chooses_itself and (layers is not None or patterns is not None):
        raise SpecError(
            f"{method} was given {'sites' if layers is None else 'layers'}, and it is trained in layers of its own",
            hint="Leave them out, or choose a method that solves for modules, for example featcal.",
        )
    chain = study.pool.chain
    update = calibrator.update
    sites = {} if chooses_itself else select_sites(chain, layers=layers, sites=patterns, update=update)
    control = control_of(request.name)
    if control in study.variants:
        raise SpecError(
            f"{control} is a baseline of the run and would be the control of {request.name!r}",
            hint="Choose another --name.",
        )
    if request.shrink is not None:
        _require_way(method, calibrator, study)
    plan = CalibrationPlan(
        request.name,
        method,
        calibrator,
        sites,
        samples,
        control,
        patterns=tuple(patterns or ()),
        seed=study.seed,
        boundaries=(len(chain.layers),) if chooses_itself else (),
        out_dtype=request.out_dtype or "",
        shrink={} if request.shrink is None else {"asked": request.shrink, "share": request.shrink},
    )
    return plan.settled(calibrator, study)


def _require_way(method: str, calibrator: Calibrator, study: Study) -> None:
    """Refuse to shrink where there is no base, or nothing but what is attached."""
    if not study.has_base:
        raise SpecError("shrink goes towards the base, and the run has none", hint="Leave shrink out.")
    if not calibrator.takes_sites:
        raise SpecError(
            f"{method} attaches maps and leaves the weights alone, so that nothing can be shrunk towards the base",
            hint="Leave shrink out, or choose a method that changes weights.",
        )


def plain_settings(calibrator: Calibrator) -> dict[str, Any]:
    """All hyperparameters as JSON would give them back."""
    settings = calibrator.get_params()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def preset_of(calibrator: Calibrator) -> str:
    """The published setting whose values all of a calibrator's have; empty without."""
    settings, kind = calibrator.get_params(), type(calibrator)
    # What a preset leaves out has to be the calibrator's default, too.
    return next((name for name in kind.presets if kind(**kind.presets[name]).get_params() == settings), "")


def _beginning(samples: SampleSet | None, count: int | None, task: str) -> SampleSet:
    """The first `count` samples, as drawing fewer would have given, or all."""
    if samples is None or len(samples) < (count or 1):
        available = 0 if samples is None else len(samples)
        raise DataError(f"task {task} has {available} calibration samples, {count or 'some'} are asked for")
    return samples if count is None else part_of(samples, range(count))


def untouched_but_moved(pool: ModelPool, calibrated: Collection[tuple[int, str]]) -> list[str]:
    """One notice per layer outside the blocks that differs between base and experts but was not calibrated."""
    experts = [name for name in pool.names if task_of(name) is not None]
    first, *others = [*(["base"] if "base" in pool else []), *experts]

    def differs(key: str) -> bool:
        start = pool.source(first).read(key).double()
        return any(not torch.equal(start, pool.source(other).read(key).double()) for other in others)

    notices = []
    for layer in (pool.chain.layers[0], pool.chain.layers[-1]):
        slots = pool.chain.owned(layer).items()
        keys = {slot.key for name, slot in slots if (layer.index, name) not in calibrated}
        if moved := ", ".join(filter(differs, sorted(keys))):
            notices.append(
                f"the {layer.role} ({moved}) differs between {'base and ' * (first == 'base')}experts and was not "
                "calibrated: it stays as in the merged model"
            )
    return notices


def diagnosed_too(samples: Mapping[str, SampleSet], study: Study) -> list[str]:
    """One notice per task some of whose diagnosis samples are among these calibration samples, by their content."""
    notices = []
    for task, drawn in samples.items():
        solved_on, measured_on = set(drawn.digests), study.tasks[task].diagnosis.digests
        count = sum(sample in solved_on for sample in measured_on)
        if count:
            notices.append(
                f"{count} of the {len(measured_on)} diagnosis samples of task {task} are among its calibration "
                "samples, so drift and accuracy after the calibration flatter it: pass other samples to calibrate on"
            )
    return notices


@torch.no_grad()
def trained_on(samples: Mapping[str, SampleSet], study: Study) -> list[str]:
    """One notice where experts were probably trained on these samples, by no label: they are surer of them.

    The mean probability of the class that each expert chooses is compared with that on diagnosis samples: Welch's t,
    one-sided, at 1 %, for the mean over tasks. On two image suites (docs/benchmarks.md) it warned of 50 to 100 % of
    draws of 64 samples that experts were trained on, and of 0.6 to 1.6 % of others.
    """
    means, groups = list[tuple[float, float]](), list[NDArray[np.float64]]()
    for task, drawn in samples.items():
        model, head = expert_of(task), study.head(task, expert_of(task))
        diagnosed = part_of(study.tasks[task].diagnosis, range(min(_SURE, len(study.tasks[task].diagnosis))))
        if head is None or min(len(drawn), len(diagnosed)) < 2:
            continue
        sure = []
        for part in (replace(drawn, views=None), diagnosed):
            features = final_features(study.pool, model, task, part, study.settings.pool)
            sure.append(wide(head.scores(features)).softmax(dim=1).amax(dim=1).cpu().numpy())
        means.append((float(sure[0].mean()), float(sure[1].mean())))
        groups += sure
    if not means:
        return []
    error, freedom = standard_error([part / len(means) for part in groups])
    on_drawn, on_diagnosed = np.mean(means, axis=0)
    if not on_drawn - on_diagnosed > student(freedom, 0.98) * error:
        return []
    return [
        f"experts were probably trained on the calibration samples: they are surer of them ({100 * on_drawn:.1f} % on "
        f"average) than of the diagnosis samples ({100 * on_diagnosed:.1f} %). What is chosen on such samples "
        "misleads; bring others"
    ]


def method_of(request: CalibrationRequest, section: Calibration | None) -> str:
    """Name of the calibrator: the request's, the spec's, or FeatCal."""
    if request.method is not None:
        return request.method
    return section.method if section is not None else DEFAULT_METHOD


def method_called(calibrator: Calibrator) -> str:
    """The name under which the calibrator's class, or the one it extends, is registered."""
    for name, kind in sorted(calibrators.items(), key=lambda entry: entry[1] is not type(calibrator)):
        if isinstance(calibrator, kind):
            return name
    raise SpecError(
        f"{calibrator!r} is no registered calibrator",
        hint="Give an instance, such as dl.FeatCal(), or a name, as dl.calibrate(run, method='featcal', name=...); "
        f"there are {', '.join(calibrators)}.",
    )


def calibrator_of(
    request: CalibrationRequest, section: Calibration | None, *, has_views: bool = False
) -> Calibrator:
    """The calibrator with all hyperparameters resolved: parameters over preset over spec over defaults."""
    method = method_of(request, section)
    parameters = dict(calibrators[method].with_views) if has_views else {}
    if section is not None and section.method == method:  # else its settings are another method's
        parameters |= over_preset(method, section.preset, section.parameters)
    parameters |= over_preset(method, request.preset, request.parameters)
    return calibrators[method](**resolve(calibrators[method], parameters, method))
