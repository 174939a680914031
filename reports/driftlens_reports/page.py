"""A saved run as one HTML file: no script, no request, every name escaped."""

from __future__ import annotations

import base64
import hashlib
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from driftlens.files import PathLike, write_text_atomic
from driftlens.records.listing import current_state
from driftlens.records.run import DriftRun
from driftlens_reports import facts, wording
from driftlens_reports.curves import HEIGHT, WIDTH, Curve, curves

_TEMPLATE = pathlib.Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class LayerRow:
    """One line of a task's table: a layer and its mean drift by variant."""

    layer: int
    path: str
    drift: tuple[float, ...]


@dataclass(frozen=True)
class TaskCurves:
    """Mean L2 drift by layer on one task, as a chart and as the table behind it."""

    task: str
    variants: tuple[str, ...]
    rows: tuple[LayerRow, ...]
    curves: tuple[Curve, ...]


def write_page(run: DriftRun, path: PathLike) -> None:
    """Write the run's report page to `path`, whole or not at all.

    Raises:
        RunError: a table can't be read, or the page can't be written.
    """
    write_text_atomic(path, render_page(run))


def render_page(run: DriftRun) -> str:
    """The run's report page: drift, accuracy, curves by layer, self-checks, provenance.

    Raises:
        RunError: a table can't be read.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=wording.number, percent=wording.percent, is_measured=facts.is_measured, csp_hash=_csp_hash
    )
    source = _TEMPLATE.read_text(encoding="utf-8")
    found = facts.accuracies(run)
    return environment.from_string(source).render(
        manifest=run.manifest,
        state=current_state(run),
        stamps=facts.stamps(run),
        final=facts.final_drift(run),
        accuracies=found,
        accuracy_variants=facts.accuracy_variants(found),
        tasks=[task_curves(run, task) for task in run.tasks],
        origins=[wording.origin_sentence(entry) for entry in facts.origins(run)],
        checks=[wording.check_sentence(check) for check in facts.self_checks(run)],
        width=WIDTH,
        height=HEIGHT,
    )


def task_curves(run: DriftRun, task: str) -> TaskCurves:
    """Mean L2 drift by layer of every variant on one task.

    Raises:
        RunError: the layer table can't be read.
    """
    rows = run.layers(task=task)
    variants = tuple(variant for variant in run.variants if (rows["variant"] == variant).any())
    paths = dict(sorted(zip(rows["layer"], rows["path"], strict=True)))
    drift = rows.set_index(["variant", "layer"])["drift_l2_mean"]
    table = tuple(
        LayerRow(layer, path, tuple(float(drift.get((variant, layer), float("nan"))) for variant in variants))
        for layer, path in paths.items()
    )
    columns = {variant: _column(table, position) for position, variant in enumerate(variants)}
    return TaskCurves(task, variants, table, tuple(curves(list(paths), columns)))


def _column(rows: Sequence[LayerRow], position: int) -> list[float]:
    return [row.drift[position] for row in rows]


def _csp_hash(style: str) -> str:
    """The hash by which the page's security policy allows its one style sheet."""
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
