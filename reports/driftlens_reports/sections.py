"""The sections of a report in order: charts, sentences and tables of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from driftlens.results.calibration_summary import (
    calibration_effect_tables,
    calibration_sentences,
    leaderboard_table,
)
from driftlens.results.checks import CheckReport, Status, run_self_checks
from driftlens.results.formatting import (
    Kind,
    Table,
    format_estimate,
    format_percent,
    format_setting,
    format_short,
)
from driftlens.results.measures import (
    COSINE,
    RELATIVE,
    common_measures,
    describe_change,
    mean_change,
    mean_on_tasks,
    value_on_task,
)
from driftlens.results.verdict import (
    final_drift_table,
    headline,
    hide_run_path,
    moe_routing_table,
    task_table,
    verdict,
)
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens.runs.tables import json_value
from driftlens.utils.errors import SpecError, did_you_mean, pluralize
from driftlens.utils.intervals import mean_over_tasks
from driftlens.utils.variants import control_variant, display_name, variant_kind
from driftlens_reports import facts
from driftlens_reports.charts.chart import Chart, charts, sort_by_rank
from driftlens_reports.content import CheckCounts, Figure, MeasureChange, ReportHeadline, ReportVerdict

# Every section in reading order.
TITLES = MappingProxyType(
    {
        "verdict": "Verdict",
        "setup": "Setup and provenance",
        "layers": "Layer curves",
        "decomposition": "Decomposition",
        "origins": "Where the final drift comes from",
        "cosine": "Expert cosine",
        "parameters": "Parameter alignment",
        "outputs": "Output drift",
        "calibration": "Calibration log",
        "checks": "Check results",
        "caveats": "Caveats",
        "glossary": "Glossary",
        "environment": "Environment",
    }
)

# The sections of each preset. Charts say themselves which presets they belong to; `full` has them all.
PRESETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "summary": ("verdict", "layers", "checks", "caveats"),
        "standard": tuple(TITLES),
        "calibration": (
            *("verdict", "setup", "layers", "cosine", "parameters", "outputs"),
            *("calibration", "checks", "caveats", "environment"),
        ),
        "full": tuple(TITLES),
    }
)

_UNKNOWN = "not recorded"
_ALWAYS = (
    "Means hide the worst case; the tables name every task.",
    "Drift and cosine compare features with the expert's. A gain in cosine does not explain a gain in accuracy.",
)
# A line per term, in the order in which a reader meets them: the term, its symbol, its meaning.
_TERMS = """
base | W_base | The model that every expert was fine-tuned from.
expert | W_i | The model fine-tuned on one task.
merged | W_mer | One model made from the weights of all experts.
calibrated | W_cal | The merged model after calibration.
anchor only | W_anc | The anchor of a calibration, uncalibrated; another merge if rho is not 1.
layer | l | One step of the model in forward order: 1 the stem, then the blocks, last the head.
drift | e | Feature after a layer minus the expert's, for the same sample.
final drift | e_L | Drift after the head.
relative drift |  | Norm of the drift relative to the expert's feature, sums over samples.
of base distance |  | Norm of the drift relative to the distance from base to expert.
local mismatch | m | The layer's own error: merged minus expert layer, on the expert's input.
propagation | p | Inherited error: merged layer, merged minus expert's input. e = m + p.
cross term |  | 2 <m, p> / |e|^2: positive where both add up, negative where they cancel.
amplification | |p| / |e_in| | Norm of the propagation relative to the incoming drift.
path-averaged Jacobian | A | The merged layer's Jacobian, averaged from expert to merged input; p = A e_in.
growth condition | gamma > eta | Amplification - 1 exceeds mismatch / incoming drift: drift must grow.
share of the final drift | P m_l | A layer's mismatch propagated to the end, along the final drift; signed.
remainder |  | Share of the final drift of no layer: quadrature error.
closure error |  | Difference from the drift of forward passes in the models' own library.
Jacobian error |  | |p - A e_in| / |p|, 0 in theory.
task vector | tau | Weights minus the base's.
margin | mu | The expert's best score minus its second best.
certified |  | A decision whose margin is too large for the drift to flip it.
flipped |  | A decision that differs from the expert's.
95 % interval |  | Wilson for shares, Student for means; over samples.
"""


def section_charts(section: str, preset: str) -> list[Chart]:
    """Return the charts of a report section under a preset, in display order."""
    shown = (chart for chart in charts.values() if preset in ("full", *chart.presets))
    return sort_by_rank(chart for chart in shown if chart.place.report == section)


def require_known_names(kind: str, names: Sequence[str], valid: Mapping[str, object]) -> None:
    """Raise SpecError if a name is unknown, or if no name is given."""
    unknown = [name for name in names if name not in valid]
    if unknown or not names:
        problem = f"a report has no {kind} {unknown[0]!r}" if unknown else f"no {kind} is chosen"
        raise SpecError(f"{problem}; there are {', '.join(valid)}", hint=did_you_mean("".join(unknown[:1]), valid))


def section_content(
    name: str, run: DriftRun, judged: ReportVerdict, checks: CheckReport | None, figures: Sequence[Figure]
) -> tuple[Iterable[str], Iterable[Table]]:
    """Return the sentences and tables of a report section."""
    parts: dict[str, Callable[[], tuple[Iterable[str], Iterable[Table]]]] = {
        "verdict": lambda: (judged.sentences, _verdict_tables(run, judged)),
        "setup": lambda: (_setup_sentences(run), _setup_tables(run)),
        "origins": lambda: ([f"{text}." for text in facts.drift_sources(run).values()], ()),
        "cosine": lambda: (_cosine_sentences(run), ()),
        "outputs": lambda: (facts.decision_sentences(run), [facts.accuracy_table(run)]),
        "calibration": lambda: (_calibration_sentences(run), calibration_tables(run)),
        "checks": lambda: _check_sentences_and_tables(run_self_checks(run), checks),
        "caveats": lambda: (
            _caveat_sentences(run, [figure.title for figure in figures if figure.missing]),
            (),
        ),
        "glossary": lambda: ((), [_glossary_table()]),
        "environment": lambda: ((), _environment_tables(run)),
    }
    return parts[name]() if name in parts else ((), ())


def _verdict_tables(run: DriftRun, judged: ReportVerdict) -> list[Table]:
    return [
        task_table(run, verdict(run)),
        _measure_means_table(judged),
        final_drift_table(run),
        moe_routing_table(run),
    ]


def _setup_sentences(run: DriftRun) -> Iterator[str]:
    manifest = run.manifest
    yield f"Run {run.id}, begun {manifest.created}, finished {manifest.finished or _UNKNOWN}."
    yield f"Spec digest {manifest.spec_digest or _UNKNOWN}; tables of schema {manifest.schema_version}."
    architecture = ", ".join(f"{name} {value}" for name, value in manifest.architecture.items())
    yield f"Architecture: {architecture or _UNKNOWN}. Inputs by: {manifest.preprocessing or _UNKNOWN}."
    seeds = ", ".join(f"{name} {seed}" for name, seed in manifest.seeds.items())
    yield (
        f"Computed on {manifest.device or _UNKNOWN} in {manifest.dtype or _UNKNOWN}; seeds: {seeds or _UNKNOWN}; "
        f"deterministic algorithms {'were' if manifest.deterministic else 'were not'} requested."
    )


def _setup_tables(run: DriftRun) -> Iterator[Table]:
    manifest = run.manifest
    models = [
        (display_name(name), name, info.parameters, info.digest[:16], info.source)
        for name, info in manifest.models.items()
    ]
    kinds: dict[str, Kind] = {"model": "text", "variant": "text", "parameters": "count"}
    yield Table.of("models", "Models", {**kinds, "digest (first 16)": "text", "source": "text"}, models)
    counts = {"classes": manifest.classes}
    counts |= {split: manifest.sample_ids.get(split, {}) for split in ("calibration", "diagnosis", "test")}
    samples = [
        (task, *(len(by_task[task]) if task in by_task else None for by_task in counts.values())) for task in run.tasks
    ]
    yield Table.of("samples", "Samples by task", {"task": "text", **dict.fromkeys(counts, "count")}, samples)
    layers = [(layer.index, layer.role, layer.path) for layer in manifest.layers]
    yield Table.of("layers", "Layers", {"layer": "count", "role": "text", "path": "text"}, layers)


def _environment_tables(run: DriftRun) -> Iterator[Table]:
    manifest = run.manifest
    groups = {
        **{"version": manifest.versions, "platform": manifest.platform},
        **{"variable": manifest.environment, "threads": manifest.threads},
    }
    values = [(group, name, str(value)) for group, entries in groups.items() for name, value in entries.items()]
    kinds: dict[str, Kind] = dict.fromkeys(("what", "name", "value"), "text")
    yield Table.of("environment", "Software and machine", kinds, values)
    rows = run.resources()
    memory = ["peak_rss_bytes", "peak_gpu_bytes"]
    rows[memory] = rows[memory].astype("Float64") / 2**30
    measured = ("seconds", "peak memory (GiB)", "peak GPU memory (GiB)", "energy (Wh)")
    note = "Peak memory: the process up to the end of the phase."
    kinds = {"phase": "text", **dict.fromkeys(measured, "number")}
    costs = [*rows.astype(object).itertuples(index=False)]
    yield Table.of("resources", "Time, memory and energy", kinds, costs, note)


def _glossary_table() -> Table:
    terms = [[part.strip() for part in line.split(" | ")] for line in _TERMS.strip().splitlines()]
    return Table.of("glossary", "Terms", dict.fromkeys(("term", "symbol", "meaning"), "text"), terms)


def _cosine_sentences(run: DriftRun) -> Iterator[str]:
    for variant in run.variants:
        rows = [row for task in run.tasks if (row := value_on_task(run, COSINE, task, variant)).is_measured]
        if rows:
            over, lowest = mean_over_tasks(rows), min(rows, key=lambda row: row.value)
            yield (
                f"{display_name(variant)}: mean cosine {format_estimate(over, 'number', counted=True)} over "
                f"{pluralize(len(rows), 'task')}, lowest on {lowest.task}, {format_estimate(lowest, 'number')}."
            )


def _calibration_sentences(run: DriftRun) -> Iterator[str]:
    if not run.manifest.calibrations and not any(variant_kind(name) == "calibrated" for name in run.variants):
        yield f"The run has no calibrated variant; `{CALIBRATE}` adds one."
    for name, info in run.manifest.calibrations.items():
        yield (
            f"{name}: {info.method} on {pluralize(sum(info.samples.values()), 'sample')} of "
            f"{pluralize(len(info.samples), 'task')}, {pluralize(len(info.layers), 'layer')} calibrated in "
            f"{format_short(info.seconds)} s."
        )
        yield from (f"{name}: {sentence}" for sentence in calibration_sentences(run, name))
        yield from (f"{name}: {notice}." for notice in info.notices)


def calibration_tables(run: DriftRun) -> Iterator[Table]:
    """Yield tables of every calibration: its settings and results."""
    calibrations = run.manifest.calibrations
    rows = [
        (name, key, format_setting(value))
        for name, info in calibrations.items()
        for key, value in info.settings.items()
    ]
    kinds: dict[str, Kind] = dict.fromkeys(("calibration", "setting", "value"), "text")
    yield Table.of("calibration-settings", "Settings", kinds, rows)
    if len(calibrations) > 1:
        yield leaderboard_table(run)
    for name in calibrations:
        yield from calibration_effect_tables(run, name)


def _caveat_sentences(run: DriftRun, missing: Sequence[str]) -> list[str]:
    """Return warnings, notices, statistical limitations and missing figures of a run."""
    warnings = (f"Warning: {text}" for text in run.manifest.warnings)
    notices = (f"Notice: {text}" for text in run.manifest.notices)
    unmeasured = [f"Not measured, so not shown: {'; '.join(missing)}"] if missing else []
    texts = (*warnings, *notices, *_limitation_sentences(run), *_ALWAYS, *unmeasured)
    return [f"{text.rstrip('.')}." for text in texts]


def _limitation_sentences(run: DriftRun) -> Iterator[str]:
    rows = run.layers()
    counts = rows["n"].dropna()
    if len(counts) and counts.min() < 30:
        yield f"Some rows rest on {pluralize(int(counts.min()), 'sample')} only"
    jacobian = rows[rows["jacobian_samples"].notna() & rows["n"].notna()]
    if len(jacobian) and (jacobian["jacobian_samples"] < jacobian["n"]).any():
        low, high = int(jacobian["jacobian_samples"].min()), int(jacobian["n"].max())
        yield f"Jacobians use as few as {low} of up to {pluralize(high, 'sample')}"
    remainder = rows["remainder_share"].astype(float).abs()
    if remainder.notna().any():
        # With NaN, argmax would return the first gap.
        worst = rows.iloc[int(remainder.fillna(0).to_numpy().argmax())]
        yield (
            f"Up to {format_percent(float(remainder.max()))} of a final drift belongs to no layer "
            f"({worst['task']}, {worst['variant']}): quadrature error"
        )
    references = rows["reference"].dropna().unique()
    if len(references):
        yield (
            f"Local mismatch uses the features of: {', '.join(references)}. The other split has other parts with the "
            "same sum"
        )
    if not run.accuracy()["value"].notna().any():
        yield "No accuracy was measured: the effect of the drift is unknown"
    if len(run.tasks) == 1:
        yield "One task says nothing about others"


def _measure_changes(run: DriftRun, compared: Sequence[str | None]) -> Iterator[MeasureChange]:
    """Yield the change by calibration of each measure that all compared variants have."""
    there = [name for name in compared if name is not None]
    for about, tasks in common_measures(run, there):
        means = {name: mean_on_tasks(run, about, tasks, name) for name in there}
        before, control, after = (means.get(name or "") for name in compared)
        # From first to last: the control in between is the anchor, not a result.
        change = mean_change(run, about, tasks, (there[0], there[-1])) if len(there) > 1 else None
        is_compared = change is not None and before is not None
        yield MeasureChange(
            measure=about.title,
            kind=about.kind,
            worse=about.worse,
            num_tasks=len(tasks),
            **{"before": before, "control": control, "after": after, "change": change},
            words=describe_change(about, before.value, change) if is_compared else "",
            relative_change=json_value(change.value / before.value) if is_compared and before.value else None,
        )


def report_verdict(run: DriftRun) -> ReportVerdict:
    """Return the verdict on the merged model and the shown calibration of a run."""
    judged = verdict(run)
    control = control_variant(judged.after.partition(":")[2]) if judged.after else None
    compared = judged.merged or None, control if control in run.variants else None, judged.after or None
    last = judged.after or judged.merged
    drifts = {task: drift for task in run.tasks if (drift := value_on_task(run, RELATIVE, task, last)).is_measured}
    furthest = max(drifts, key=lambda task: drifts[task].value, default=None)
    ends: dict[str, Status] = {"passed": "pass", "warned": "warn", "failed": "fail", "skipped": "skip"}
    return ReportVerdict(
        measure=judged.measure.title,
        tasks=judged.tasks,
        means=judged.means,
        gaps=judged.gaps,
        worst=judged.worst,
        bad_experts=judged.bad_experts,
        source=judged.source.name if judged.source else "",
        source_share=judged.source.share if judged.source else None,
        command=hide_run_path(run, judged.command),
        **dict(zip(("before", "control", "after"), compared, strict=True)),
        changes=tuple(_measure_changes(run, compared)),
        worst_task=furthest,
        worst_drift=drifts[furthest].value if furthest else None,
        self_checks=CheckCounts(**{name: run_self_checks(run).count(status) for name, status in ends.items()}),
        sentences=tuple(hide_run_path(run, text) for text in judged.sentences),
        headline=ReportHeadline.model_validate(headline(run)),
    )


def _measure_means_table(verdict: ReportVerdict) -> Table:
    """Return a table of measure means: one row per variant, the anchor-only control, and the change."""
    names = [display_name(name) if name else "" for name in (verdict.before, verdict.control, verdict.after)]
    rows = [
        (change.measure, model, mean.value, mean.low, mean.high, change.num_tasks, mean.n)
        for change in verdict.changes
        for model, mean in zip(
            (*names, "change"), (change.before, change.control, change.after, change.change), strict=True
        )
        if mean is not None
    ]
    kinds: dict[str, Kind] = {"measure": "text", "model": "text"}
    kinds |= dict.fromkeys(("mean", "95 % low", "95 % high"), "number")
    note = "Relative drift and accuracies are fractions. Intervals are over samples of these tasks."
    return Table.of("verdict", "Means over tasks", {**kinds, "tasks": "count", "samples": "count"}, rows, note)


def _check_counts_sentence(report: CheckReport, noun: str) -> str:
    if not report.executed:
        return f"No {noun} had the required numbers."
    parts = [f"{report.count('pass')} of {report.executed} {noun}s {'holds' if report.executed == 1 else 'hold'}"]
    ends = {"fail": "failed", "warn": "warned", "skip": "lack required numbers"}
    parts += [f"{count} {words}" for status, words in ends.items() if (count := report.count(status))]
    return f"{'; '.join(parts)}."


def _check_sentences_and_tables(self_checks: CheckReport, checks: CheckReport | None) -> tuple[list[str], list[Table]]:
    own = self_checks.table("self-checks", "Self-checks: claims that are exact in theory", "error")
    sentence = _check_counts_sentence(self_checks, "self-check")
    if checks is None:
        return [sentence], [own]
    return [sentence, _check_counts_sentence(checks, "check")], [own, checks.table("checks", "Requested checks")]
