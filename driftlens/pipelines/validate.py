"""Validation of a spec: checks of checkpoints, data and heads, and estimates of memory and disk. Entry: `preflight`.

Estimates come from headers, layer shapes and sample counts; only the stem runs, on one sample.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import psutil
import torch

from driftlens.calibration.calibrator import Calibrator
from driftlens.checkpoints.lora import LoraSource
from driftlens.checkpoints.tensor_sources import SMALL_FILE, StateSource
from driftlens.config.requests import CalibrationRequest, PreflightRequest
from driftlens.config.spec import RunSpec, TextHead
from driftlens.data.samples import random_subset
from driftlens.data.task_data import TaskData
from driftlens.engine.pool import require_same_parameters
from driftlens.engine.sites import parameter_coverage, select_layers, select_sites
from driftlens.engine.walk import sample_cache_bytes
from driftlens.experiment import study_loading
from driftlens.experiment.merging import PIECE, missing_heads_error, validated_merge
from driftlens.experiment.sanity_checks import (
    Finding,
    check_model_files,
    check_weights,
    error_finding,
    model_label,
)
from driftlens.experiment.study import Study
from driftlens.experiment.study_loading import OpenModels
from driftlens.linalg.gram import solve_bytes
from driftlens.merging.method import READS, MergeConfig, MergeMethod, merge_methods
from driftlens.models.architecture import Architecture
from driftlens.models.chain import Layer, LayerChain
from driftlens.models.heads import Head, LinearHead, ScoreMap
from driftlens.models.readouts import ExpertHead
from driftlens.pipelines.calibration_plan import resolve_calibrator
from driftlens.pipelines.evaluation import score_variants
from driftlens.results.formatting import format_bytes, format_estimate as with_interval
from driftlens.utils.devices import resolve_device
from driftlens.utils.distributed import Permissions, ProgressReporter
from driftlens.utils.errors import DataError, DriftLensError, wrap_library_error
from driftlens.utils.intervals import Interval
from driftlens.utils.variants import Metric, expert_name, metric_by_name

T = TypeVar("T")
# Bytes of numbers.
_FLOAT16, _FLOAT32, _FLOAT64 = 2, 4, 8


@dataclass
class PreflightReport:
    """The results of all checks of one spec; `needs` estimates memory and disk by job."""

    findings: list[Finding] = field(default_factory=list)
    needs: Mapping[str, ResourceNeeds] = field(default_factory=dict)

    def add_passed(self, subject: str, text: str, hint: str = "") -> None:
        """Record a passed check."""
        self.findings.append(Finding("ok", subject, text, hint))

    def add_notice(self, subject: str, *texts: str, hint: str = "") -> None:
        """Record a notice for the user to judge."""
        self.findings += [Finding("notice", subject, text, hint) for text in texts]

    def add_problem(self, subject: str, error: DriftLensError) -> None:
        """Record an error that must be fixed before a run."""
        self.findings.append(error_finding(subject, error))

    def run_check(self, subject: str, work: Callable[[], T], describe: Callable[[T], str] | None = None) -> T | None:
        """Run a check and record its outcome; return its result, or None after an error.

        Args:
            subject: name of the check.
            work: performs the check.
            describe: returns the text to record for a result.
        """
        try:
            result = work()
        except Exception as error:
            if (converted := wrap_library_error(error)) is None:
                raise
            self.add_problem(subject, converted)
            return None
        if describe is not None:
            self.add_passed(subject, describe(result))
        return result

    @property
    def problems(self) -> list[Finding]:
        """The errors that must be fixed first."""
        return [finding for finding in self.findings if finding.level == "problem"]

    @property
    def exit_code(self) -> int:
        """The highest exit code of all problems; 0 without any."""
        return max((finding.exit_code for finding in self.problems), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return {
            "ready": not self.problems,
            "exit_code": self.exit_code,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "needs": {job: needs.as_dict() for job, needs in self.needs.items()},
        }

    def text(self) -> str:
        """Return the results as aligned lines, with memory and disk needs and a final status."""
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = [line for finding in self.findings for line in _finding_lines(finding, width)]
        if self.needs:
            lines += ["", *(f"{job:<9}  {needs.text()}" for job, needs in self.needs.items())]
        count = len(self.problems)
        return "\n".join([*lines, f"{count} problem{'s' if count > 1 else ''}" if count else "ready"])


def _finding_lines(finding: Finding, width: int) -> list[str]:
    level = "PROBLEM" if finding.level == "problem" else finding.level
    headline, *others = [*finding.text.splitlines(), *finding.hint.splitlines()]
    start = f"{level:<7}  {finding.subject:<{width}}  "
    return [start + headline, *(" " * len(start) + line for line in others)]


def preflight(
    spec: RunSpec, request: PreflightRequest = PreflightRequest(), access: Permissions = Permissions()
) -> PreflightReport:
    """Check a spec, its checkpoints and its data, and estimate memory and disk; errors are collected.

    Only headers and a few matrices of checkpoints are read, unless experts are scored.

    Args:
        spec: the spec.
        request: whether to score experts, too (`deep`).
        access: device, network access and trust in code.
    """
    checks = PreflightReport()
    checks.run_check(
        "device",
        lambda: resolve_device(access.device or spec.compute.device),
        lambda device: f"{device}, {spec.compute.dtype}",
    )
    architecture = _check_architecture(spec, checks, access)
    models = None if architecture is None else _check_models(spec, architecture, checks, access)
    data = _check_data(spec, architecture, checks, access)
    heads: dict[str, ScoreMap] = {}
    if models is not None:
        heads = _check_heads(spec, models, data, checks)
        checks.findings += check_weights(models.architecture.chain, models.sources)
        checks.findings += check_model_files(models)
    # After heads and data, because some methods read calibration samples or scores.
    merge = _check_merge(spec, models, data, checks)
    calibration, calibrator = spec.calibration, None
    settings: Mapping[str, Any] | None = {}
    if calibration is not None:
        settings = checks.run_check(
            "calibration",
            lambda: study_loading.calibration_settings(spec) or {},
            lambda resolved: (
                f"{calibration.method}: " + ", ".join(f"{name} {value}" for name, value in resolved.items())
            ),
        )
    # A refused calibration has unknown sites; without one, those of the default are checked.
    if models is not None and models.sources and settings is not None:
        weights = next(iter(models.sources.values()))
        calibrator = _check_sites(spec, models.architecture.chain, weights, checks)
    checks.add_passed("metrics", ", ".join(sorted({"drift", *spec.metrics.enabled})))
    if models is not None and not checks.problems:
        study = checks.run_check("study", lambda: study_loading.build_study(spec, models, data, heads, access=access))
        if study is not None:
            method = None if merge is None else merge.method
            patterns = None if calibration is None else calibration.sites
            checks.needs = _estimate_needs(study, models, merge=method, calibrator=calibrator, patterns=patterns)
    if request.deep and checks.problems:
        checks.add_notice("experts", "not scored because of the problems above")
    elif request.deep:
        study = checks.run_check("experts", lambda: study_loading.open_study(spec, access=access)[0])
        if study is not None:
            _score_experts(study, checks)
    return checks


def _check_models(
    spec: RunSpec, architecture: Architecture, checks: PreflightReport, access: Permissions
) -> OpenModels:
    """Open the models and return those that fit the architecture; errors are recorded."""
    origins = study_loading.weight_paths(spec)

    def _check_model(name: str, opened: Callable[[], StateSource]) -> StateSource | None:
        def _open_and_compare() -> StateSource:
            source = opened()
            require_same_parameters(architecture.skeleton, architecture.chain, source)
            return source

        def _describe_weights(source: StateSource) -> str:
            headers = [source.headers[key] for key in architecture.chain.parameter_keys()]
            count = sum(header.nbytes // header.dtype.itemsize for header in headers)
            dtypes = " and ".join(sorted({str(header.dtype).removeprefix("torch.") for header in headers}))
            return f"{count:,} parameters in {len(headers)} tensors, {dtypes}, from {origins[name]}"

        return checks.run_check(model_label(name), _open_and_compare, _describe_weights)

    models = study_loading.open_models(spec, access, architecture=architecture, attempt=_check_model)
    checks.add_notice("models", *models.notices)
    checks.add_notice("dtypes", *study_loading.dtype_notices(models))
    return models


def _check_architecture(spec: RunSpec, checks: PreflightReport, access: Permissions) -> Architecture | None:
    opened = checks.run_check("architecture", lambda: study_loading.open_architecture(spec, access))
    if opened is None:
        return None
    paths = [layer.path for layer in opened.chain.layers]
    settings = ", ".join(f"{name} {value}" for name, value in opened.chain.settings.items())
    checks.add_passed(
        "architecture", f"{opened.adapter} with {len(paths)} layers: {settings}", _quick_gelu_hint(opened)
    )
    checks.add_notice("architecture", *opened.notices)
    _check_tied_weights(opened.chain, checks)
    checks.run_check(
        "layers",
        lambda: select_layers(paths, spec.layers.select),
        lambda stored: f"{len(stored)} of {len(paths)} are stored; all are measured",
    )
    return opened


def _quick_gelu_hint(architecture: Architecture) -> str:
    """Return a hint on QuickGELU, which OpenAI's CLIP models use and weights do not reveal."""
    if architecture.loader != "open-clip" or architecture.chain.settings.get("activation") != "gelu":
        return ""
    import open_clip

    twin = f"{architecture.source.replace('/', '-')}-quickgelu"
    if twin not in open_clip.list_models():
        return ""
    return f"Weights by OpenAI, and models fine-tuned from them, need {twin}."


def _check_merge(
    spec: RunSpec,
    models: OpenModels | None,
    data: Mapping[str, TaskData],
    checks: PreflightReport,
) -> MergeConfig | None:
    section = spec.merge
    if section is None:
        return None
    merge = checks.run_check("merge", lambda: validated_merge(spec, section.method, section.parameters))
    if merge is None:
        return None
    entry, settings = merge
    if models is not None and models.sources and entry.scores:
        scored = spec.tasks if models.architecture.lm is not None else study_loading.head_specs(spec, models)
        without = [task for task in spec.tasks if task not in scored]
        if without:
            checks.add_problem("merge", missing_heads_error(entry, without))
            return None
        lm, headers = models.architecture.lm, next(iter(models.sources.values())).headers
        rows = 1 if lm is None else headers[lm.key].shape[0]
        for task in data.values():
            classes = len(task.class_names or task.class_answers()) or rows
            if checks.run_check("merge", partial(entry.runs, settings, len(task.calibration), classes)) is None:
                return None
    parts = [f"{entry.title} ({entry.source})", *(f"{name} {value}" for name, value in settings.items())]
    text = f"{', '.join(parts)}; it reads {READS[entry.reads]}"
    if entry.is_per_module and entry.others != entry.name:
        text += f", and merges all other parameters by {merge_methods[entry.others].title}"
    checks.add_passed("merge", text)
    return merge


def _check_sites(spec: RunSpec, chain: LayerChain, weights: StateSource, checks: PreflightReport) -> Calibrator | None:
    """Report the share of parameters that the calibration would update; return its calibrator."""
    try:
        calibrator = resolve_calibrator(CalibrationRequest(name="preflight"), spec.calibration)
        # It is trained.
        if not calibrator.takes_sites:
            return calibrator
        patterns = None if spec.calibration is None else spec.calibration.sites
        sites = select_sites(chain, sites=patterns, update=calibrator.update)
    except DriftLensError as error:
        if spec.calibration is not None:
            checks.add_problem("sites", error)
        else:
            # An analysis needs none.
            checks.add_notice("sites", error.message, hint=error.hint)
        return None
    share, text = parameter_coverage(chain, weights, sites, calibrator.update)
    file = checks.add_passed if share == 1 or patterns is not None else checks.add_notice
    file("sites", text)
    return calibrator


def _check_data(
    spec: RunSpec, architecture: Architecture | None, checks: PreflightReport, access: Permissions
) -> dict[str, TaskData]:
    """Open the data of every task and return what could be opened; errors are recorded."""
    opened = {}
    for task in spec.tasks:

        def _open_and_read_sample(task: str = task) -> TaskData:
            data = study_loading.open_data(spec, task, architecture, access=access)
            # One sample, because a file may open and hold something unreadable.
            if architecture is not None:
                data.diagnosis.load([0])
            return data

        data = checks.run_check(f"data of {task}", _open_and_read_sample, _describe_task_data)
        if data is not None:
            opened[task] = data
            checks.add_notice(f"data of {task}", *data.notices)
            checks.run_check(f"data of {task}", partial(_read_images, data))
    # Test sets differ in size by nature.
    splits = {
        "calibration": {task: len(data.calibration) for task, data in opened.items()},
        "diagnosis": {task: len(data.diagnosis) for task, data in opened.items()},
    }
    for split, counts in splits.items():
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{task} {count}" for task, count in counts.items())
            checks.add_notice("data", f"tasks have different numbers of {split} samples: {listed}")
    return opened


def _read_images(data: TaskData) -> None:
    """Read all images of calibration and diagnosis samples; raise an error that counts the unreadable ones."""
    errors, count = [], 0
    for samples in (data.calibration, data.diagnosis):
        for position in range(len(samples)) if samples.picture is not None else ():
            assert samples.picture is not None
            count += 1
            try:
                samples.picture(position)
            except DataError as error:
                errors.append(error)
    if errors:
        lost = f"{len(errors)} of {count} sampled images can't be read, such as {errors[0].message}"
        raise DataError(lost, hint=errors[0].hint)


def _describe_task_data(data: TaskData) -> str:
    counts = f"{len(data.calibration)} calibration, {len(data.diagnosis)} diagnosis, {len(data.test)} test"
    classes = len(data.class_names or data.class_answers())
    labels = f"{classes} classes" if classes else "no labels" if data.test.texts is None else "no classes"
    return f"{counts} samples, {labels}"


def _check_heads(
    spec: RunSpec,
    models: OpenModels,
    data: Mapping[str, TaskData],
    checks: PreflightReport,
) -> dict[str, ScoreMap]:
    """Check the heads and return the valid ones; heads from prompts get random weights to save time."""
    valid: dict[str, ScoreMap] = {}
    width = _final_feature_width(models)
    named = {task: opened.class_names for task, opened in data.items()}
    base = models.base
    if base is not None and any(isinstance(entry, TextHead) for entry in spec.heads.values()):
        checks.run_check("text tower", lambda: models.architecture.text_tower(base))
    entries = study_loading.head_specs(spec, models)
    for task in spec.tasks:
        entry, subject = entries.get(task), f"head of {task}"
        if entry is None and models.architecture.lm is not None:
            checks.add_passed(subject, "the language model's own")
        elif entry is None and task in data and (texts := data[task].test.texts) and texts.compared:
            checks.add_passed(subject, "none: similarities of embeddings are scored")
        elif entry is None:
            checks.add_passed(subject, "none: no scores and no accuracy")
        elif entry.classes is None and task not in data:
            # The data would name the classes, and its problem is recorded already.
            continue
        elif isinstance(entry, TextHead) and spec.base is not None:
            names = checks.run_check(subject, partial(study_loading.head_classes, task, entry, named.get(task)))
            if names is not None:
                checks.add_passed(subject, f"{len(names)} class names in {len(entry.templates)} templates")
                # Only shapes matter to the estimate of memory, so prompts need not be encoded.
                valid[task] = Head(tuple(names), torch.randn(len(names), width or 1), 1.0)
        else:
            alone = spec.model_copy(update={"heads": {task: entry}})
            heads = checks.run_check(subject, partial(study_loading.open_heads, alone, models, named))
            if heads is not None:
                _check_head_width(task, heads[task], width, checks)
                valid |= heads
    return valid


def _final_feature_width(models: OpenModels) -> int | None:
    """Return the width of the final features; None if the last module has no weight."""
    head, source = models.architecture.chain.layers[-1], next(iter(models.sources.values()), None)
    slots = [head.parameters.get(f"{site.name}.weight") for site in head.sites]
    if source is None or not slots or slots[-1] is None:
        return None
    return slots[-1].layer_shape(source.headers[slots[-1].key].shape)[0]


def _check_head_width(task: str, head: Any, width: int | None, checks: PreflightReport) -> None:
    if isinstance(head, ExpertHead):
        checks.add_passed(
            f"head of {task}",
            f"the expert's own, of {len(head.weights)} tensors and {len(head.classes)} classes",
        )
        return
    noun = "classifier rows" if isinstance(head, LinearHead) else "class embeddings"
    rows, columns = (head.weight if isinstance(head, LinearHead) else head.embeddings).shape
    if width is None or columns == width:
        checks.add_passed(f"head of {task}", f"{rows} {noun} of {columns} entries")
        return
    error = DataError(
        f"the {noun} of {task} have {columns} entries, the models' features have {width}",
        hint=f"heads.{task} is of another model. Use the head of these models.",
    )
    checks.add_problem(f"head of {task}", error)


def _score_experts(study: Study, checks: PreflightReport) -> None:
    """Score every expert and the base on as many test samples as there are diagnosis samples."""
    # Few samples, because a validation should take seconds; the interval shows the uncertainty.
    scored = {
        task: dataclasses.replace(data, test=data.test and random_subset(data.test, len(data.diagnosis)))
        for task, data in study.tasks.items()
    }
    study = dataclasses.replace(study, tasks=scored)
    variants = ["expert", *(["base"] if study.has_base else [])]
    for task in study.tasks:
        subject = f"expert of {task}"
        work = partial(score_variants, study, task, variants, ProgressReporter())
        scores = checks.run_check(subject, partial(study.run_on_task_owner, task, work))
        if scores is None:
            continue
        scored_rows = scores.tables["accuracy"]
        rows = [row for row in scored_rows if row["metric"] == scored_rows[0]["metric"]]
        if not rows:
            reason = "; ".join(scores.notices) or f"{task} has no head, or no labels"
            checks.add_notice(subject, f"the {subject} is not scored: {reason}")
            continue
        metric, data = metric_by_name(str(rows[0]["metric"])), study.tasks[task]
        classes: dict[str, Any] = {"choices": data.choices, "head": data.head.classes if data.head else ()}
        _check_expert_score(
            checks,
            subject,
            {str(row["variant"]): row for row in rows},
            metric,
            len(classes.get(metric.needs, ())),
        )


def _check_expert_score(
    checks: PreflightReport,
    subject: str,
    rows: Mapping[str, Mapping[str, Any]],
    metric: Metric,
    num_classes: int,
) -> None:
    scores = {name: Interval(row["value"], row["ci_low"], row["ci_high"]) for name, row in rows.items()}
    shown = {name: with_interval(value, metric.kind) for name, value in scores.items()}
    expert, base, chance = scores["expert"], scores.get("base"), 1 / max(num_classes, 1)
    text = f"the {subject} scores {shown['expert']} in {metric.title} on {rows['expert']['n']} of its task's samples"
    if num_classes > 1 and expert.low <= chance:
        error = DataError(
            f"{text}, not clearly above chance for {num_classes} classes ({100 * chance:.1f} %)",
            hint="Check its file, the order of the head's rows, and the activation; or raise n_diagnosis.",
        )
        checks.add_problem(subject, error)
    elif num_classes > 1 and expert.high < (1 + chance) / 2:
        checks.add_notice(
            subject,
            f"{text}, nearer to chance ({100 * chance:.1f} %) than to 100 %",
            hint="Check prompt, class names and labels.",
        )
    elif base is None:
        checks.add_passed(subject, text)
    elif (expert.value - base.value) * (-1 if metric.worse == "higher" else 1) > 0:
        checks.add_passed(subject, f"{text}, the base {shown['base']}")
    else:
        checks.add_notice(
            subject, f"{text}, the base {shown['base']}: no better", hint="Was it fine-tuned on this task?"
        )


def _check_tied_weights(chain: LayerChain, checks: PreflightReport) -> None:
    """Report tied weights that a calibration would solve: solving one of them changes the others."""
    sites = {(layer.index, site.name) for layer in chain.layers for site in layer.sites}
    places: defaultdict[tuple[str, tuple[int, int] | None], list[str]] = defaultdict(list)
    solved = set[tuple[str, tuple[int, int] | None]]()
    for layer in chain.layers:
        for name, slot in layer.parameters.items():
            places[slot.key, slot.rows].append(f"{name} of layer {layer.index}")
            if (layer.index, name.rpartition(".")[0]) in sites:
                solved.add((slot.key, slot.rows))
    tied = {slot[0]: names for slot, names in places.items() if len(names) > 1 and slot in solved}
    for key, names in tied.items():
        checks.add_notice("ties", f"{key} is {' and '.join(names)}", hint="Calibrating one changes all.")
    if not tied:
        checks.add_passed("ties", "none: no weight is used in two places")


@dataclass(frozen=True)
class ResourceNeeds:
    """Estimated bytes of a job by purpose: peak `memory`, and `disk` added to the run."""

    memory: Mapping[str, int]
    disk: Mapping[str, int]

    @property
    def memory_bytes(self) -> int:
        """The peak memory in bytes."""
        return sum(self.memory.values())

    @property
    def disk_bytes(self) -> int:
        """The bytes added to the run directory."""
        return sum(self.disk.values())

    def as_dict(self) -> dict[str, object]:
        """Return totals and parts as JSON values."""
        totals = {"memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes}
        return {**totals, "memory": dict(self.memory), "disk": dict(self.disk)}

    def text(self) -> str:
        """Return totals and parts in one line."""
        return f"{_format_byte_counts(self.memory)} in memory; {_format_byte_counts(self.disk)} on disk"


def _format_byte_counts(parts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
    return f"about {format_bytes(sum(parts.values()))} ({listed})"


class _NeedsEstimator:
    """Estimates memory and disk of jobs from headers, layer shapes and sample counts; only the stem runs."""

    def __init__(self, study: Study) -> None:
        self._study, self._pool, self._chain = study, study.pool, study.pool.chain
        task, data = next(iter(study.tasks.items()))
        self._headers = study.pool.source(study.pool.names[0]).headers
        sample, expert, first = data.diagnosis.load([0]), expert_name(task), self._chain.layers[0]
        self._boundary = sample_cache_bytes(study.pool, expert, sample)
        state, side = study.pool.initial_state(sample)
        out = study.pool.layer_map(expert, first, "")(state, side)
        self._num_pooled = first.pool_state(out, side, study.settings.pool).shape[-1]
        entries = [
            sum(math.prod(slot.layer_shape(self._headers[slot.key].shape)) for slot in layer.parameters.values())
            # A batch reads few rows of the stem's table.
            for layer in self._chain.layers[1:]
        ]
        self._largest_layer = max(entries) * study.pool.dtype.itemsize
        outputs = [0]
        for block in self._chain.blocks:
            shapes = self._linear_shapes(block)
            # A token passes few experts of a mixture, so only the first counts.
            outputs.append(
                sum(shapes[site.name][0] for site in block.sites if site.name in shapes and not site.expert)
            )
        self._batch = data.diagnosis.batch_size
        self._activations = self._batch * self._boundary * max(outputs) // max(1, self._num_pooled)
        read = sum(samples.num_with_views for samples in study.calibration_sets.values())
        # Of expert and merged model at one boundary.
        self._calibration_features = 2 * self._boundary * read

    def drift_memory(self, num_variants: int) -> dict[str, int]:
        """Return the bytes in memory while the drift of some variants of a task is measured."""
        models, num_layers = 1 + num_variants, len(self._chain.layers)
        samples = max(len(data.diagnosis) for data in self._study.tasks.values())
        budget, at_boundary = self._study.settings.feature_budget, models * self._boundary
        # One batch at all boundaries.
        checked = at_boundary * min(samples, self._batch) * num_layers
        pooled = models * num_layers * samples * self._num_pooled * _FLOAT32
        return {
            "layers": models * self._largest_layer,
            "features": min(budget, at_boundary * samples) + min(budget, checked) + pooled,
            "activations": self._activations,
        }

    def calibration_memory(
        self, calibrator: Calibrator, sites: Mapping[int, Collection[str]]
    ) -> tuple[dict[str, int], int]:
        """Return the bytes in memory while a calibration is solved, and the bytes of features beyond the budget."""
        budget, largest = self._study.settings.feature_budget, 0
        features = self._calibration_features
        features += len(self._study.tasks) * calibrator.extra_cache_bytes(self._pool, sites)
        for layer in self._chain.layers:
            shapes = self._linear_shapes(layer)
            # Modules with one input share a Gram matrix.
            rows = Counter[tuple[str, int | None, int]]()
            for site in layer.sites:
                if site.name in sites.get(layer.index, ()) and site.name in shapes:
                    rows[site.input, site.expert, shapes[site.name][1]] += shapes[site.name][0]
            sums = [(expert, solve_bytes(count, width)) for (_, expert, width), count in rows.items()]
            dense = sum(count for expert, count in sums if expert is None)
            of_experts = sum(count for expert, count in sums if expert is not None)
            largest = max(largest, dense + min(budget, of_experts))
        memory = {
            # The layer of the expert, the merged model, the base and the result.
            "layers": 4 * self._largest_layer,
            "features": min(budget, features),
            "statistics": largest,
            "activations": self._activations,
        }
        return memory, max(0, features - budget)

    def merge_memory(self, method: MergeMethod) -> int:
        """Return the bytes that a merge method needs, without the merged model."""
        num_tasks = len(self._study.tasks)
        entries = [math.prod(header.shape) for header in self._headers.values()]
        # Float32 tensors at the same time: base, experts, result, and one temporary.
        largest = min(max(entries), PIECE) if method.reads == "entry" else max(entries)
        needed = _FLOAT32 * ((num_tasks + 3) * largest + method.held(num_tasks) * sum(entries))
        if method.needs_moments:
            squares = []
            for layer in self._chain.layers:
                shapes = self._linear_shapes(layer)
                widths = {site.input: shapes[site.name][1] for site in layer.sites if site.name in shapes}
                squares.append(sum(width**2 for width in widths.values()))
            needed += _FLOAT64 * num_tasks * max(squares) + self._calibration_features
        return needed

    def stored_features(self, num_models: int) -> int:
        """Return the bytes of the pooled float16 features that a run stores for some models."""
        samples = sum(len(data.diagnosis) for data in self._study.tasks.values())
        stored = len(self._study.settings.stored_layers | {1, len(self._chain.layers)})
        return num_models * stored * samples * self._num_pooled * _FLOAT16

    def _linear_shapes(self, layer: Layer) -> dict[str, tuple[int, ...]]:
        """Return rows and columns of a layer's linear modules by name."""
        weights = {site.name: f"{site.name}.weight" for site in layer.sites if site.kind == "linear"}
        slots = {name: layer.parameters[key] for name, key in weights.items() if key in layer.parameters}
        return {name: slot.layer_shape(self._headers[slot.key].shape) for name, slot in slots.items()}


def _estimate_needs(
    study: Study,
    models: OpenModels,
    *,
    merge: MergeMethod | None = None,
    calibrator: Calibrator | None = None,
    patterns: Sequence[str] | None = None,
) -> dict[str, ResourceNeeds]:
    """Estimate memory and disk of `analyze` and, if there is a calibrator, of `calibrate`."""
    estimator, pool, num_variants = _NeedsEstimator(study), study.pool, len(study.variants)
    # Larger files are memory-mapped only while a tensor is read.
    files = [
        sum(header.nbytes for header in pool.source(name).headers.values())
        for name in pool.names
        if not isinstance(models.stored.get(name), LoraSource)
    ]
    resident = {
        "libraries": psutil.Process().memory_info().rss,
        "small files": sum(count for count in files if count <= SMALL_FILE),
    }
    model_bytes = sum(header.nbytes for header in models.save_template.headers.values())
    disk = {"features": estimator.stored_features(1 + num_variants), "weights": 0}
    merging = {}
    if merge is not None:
        merging = {"merging": model_bytes + estimator.merge_memory(merge)}
        resident["small files"] += model_bytes if model_bytes <= SMALL_FILE else 0
        disk["weights"] = model_bytes
    needs = {"analyze": ResourceNeeds(resident | _larger_phase(merging, estimator.drift_memory(num_variants)), disk)}
    if calibrator is None or len(study.calibration_sets) < len(study.tasks):
        return needs
    sites: Mapping[int, Collection[str]] = {}
    if calibrator.takes_sites:
        sites = select_sites(pool.chain, sites=patterns, update=calibrator.update)
    solving, spilled = estimator.calibration_memory(calibrator, sites)
    # The control of an anchor is a second variant with its own weights and features.
    made = 1 if calibrator.anchor_rho == 1 or not study.has_base else 2
    needs["calibrate"] = ResourceNeeds(
        resident | _larger_phase(solving, estimator.drift_memory(num_variants + made)),
        {
            "features": estimator.stored_features(made),
            "weights": made * model_bytes,
            "features while it runs": spilled,
        },
    )
    return needs


def _larger_phase(phase: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the phase that needs more bytes; phases run one after the other."""
    return dict(phase if sum(phase.values()) > sum(other.values()) else other)
