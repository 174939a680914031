"""The explorer of samples as one offline HTML page. Entry point: `Explorer`.

Columns of `explorer_data` are lists over the samples of all tasks, in one order; large ones are base64 of
little-endian arrays, `[model, layer, sample]` where they depend on model and layer; NaN and -1 are missing.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

from driftlens.config.requests import ProjectionRequest, ViewRequest
from driftlens.results.formatting import keep_units_together, strip_control_chars, typeset_signs
from driftlens.results.measures import OUTCOMES, sample_outcomes
from driftlens.results.projection import (
    MOST_POINTS,
    ProjectionSettings,
    compute_layout,
    labels_by_sample,
    load_features,
    project,
    stratified_subset,
)
from driftlens.results.verdict import headline, shown_repair, verdict
from driftlens.runs.manifest import THUMB_SIDE
from driftlens.runs.run import DriftRun, current_state, open_run
from driftlens.runs.schema import CALIBRATE
from driftlens.utils.errors import DataError
from driftlens.utils.files import PathLike
from driftlens.utils.variants import display_name, is_control, variant_kind
from driftlens_reports.charts.theme import CLASSES, Palette, colour_role, palette, variant_style
from driftlens_reports.charts.words import split_overlap_notes
from driftlens_reports.content import ReportHeadline
from driftlens_reports.formats import save_files
from driftlens_reports.formats.page import STYLE, csp_hash, headline_html

_HERE = pathlib.Path(__file__).parent
_SLOT = re.compile(r"\{\{(\w+)\}\}")
_COMMAND = re.compile("[:;] `(driftlens [^`]+|--samples)`.*")
_UNSAFE = re.compile("[<>&\u2028\u2029]")


class Explorer:
    """An offline HTML page that compares each sample's features between models. Data is read on first use.

    Args:
        run: a run, or its folder.
        request: which tasks, how many samples, which layout.

    Raises:
        RunError: the run can't be read.
    """

    def __init__(self, run: DriftRun | PathLike, request: ViewRequest = ViewRequest()) -> None:
        self.run = run if isinstance(run, DriftRun) else open_run(run)
        self._request = request

    @functools.cached_property
    def page(self) -> bytes:
        """The HTML page as bytes, identical for the same run."""
        name, head = _escaped_run_name(self._page_data), ReportHeadline.model_validate(headline(self.run))
        header = f'<header><h1>{name}</h1>{headline_html(head)}<p id="verdict"></p></header>'
        return render_page(self._page_data, header)

    def embedded_page(self) -> bytes:
        """Return the page for an iframe in the dashboard, without run name, headline and commands.

        The frame's name is "driftlens " and JSON: `state` (the page's URL fragment), `dark`, `high` (pixels that map
        and controls fill), and `show` ("" for all, or "wall"). The page posts its `height` and its `state`; the host
        posts a changed theme or task: `{dark: true, task: "cars"}`.
        """
        return render_page(
            {**self._page_data, "notes": [_COMMAND.sub(".", text) for text in self._page_data["notes"]]}
        )

    @functools.cached_property
    def _page_data(self) -> dict[str, Any]:
        return explorer_data(self.run, self._request)

    def __repr__(self) -> str:
        return f"<Explorer of {self.run.id}; `save(path)` writes its page>"

    def _repr_html_(self) -> str:
        look = 'sandbox="allow-scripts allow-downloads" width="100%" height="860" style="border:0"'
        return f'<iframe srcdoc="{html.escape(self.page.decode())}" title="Samples of a run" {look}></iframe>'

    def save(self, path: PathLike | None = None) -> pathlib.Path:
        """Write the HTML page to `path`, or into the run's reports, and return its path.

        Raises:
            DataError: the run has no samples, or not the requested tasks.
            RunError: a table can't be read, or the file can't be written.
            RunLockedError: the page goes into the run, and another process is writing there.
        """
        target = pathlib.Path(path or "view.html")
        (saved,) = save_files(self.run, {target.name: self.page}, target.parent if path else None)
        return saved


def render_page(data: dict[str, Any], header: str = "") -> bytes:
    """Return the HTML page of the explorer with its data embedded as JSON below a trusted HTML header."""
    script, style = _read_asset("explorer.js"), _theme_colours_css() + STYLE + _read_asset("explorer.css")
    policy = (
        f"default-src 'none'; script-src '{csp_hash(script)}'; style-src '{csp_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    slots = {
        "title": _escaped_run_name(data),
        "policy": policy,
        "style": style,
        "script": script,
        "header": header,
        # Escaped so that no name ends the script element.
        "data": _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text),
    }
    # Names may hold lone surrogates, which UTF-8 cannot encode.
    return _SLOT.sub(lambda slot: slots[slot[1]], _read_asset("explorer.html")).encode("utf-8", "replace")


def _escaped_run_name(data: dict[str, Any]) -> str:
    return html.escape(strip_control_chars(data["run"]["name"]))


def _read_asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _theme_colours_css() -> str:
    """Return the colours of the light and the dark theme as CSS custom properties."""
    light, dark = (_css_properties(palette(is_dark), CLASSES[is_dark]) for is_dark in (False, True))
    by_system = f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}"
    by_host = f":root[data-theme=light] {{ color-scheme: light; }} :root[data-theme=dark] {{ {dark} }}"
    forced = ":root[data-theme=dark] { color-scheme: dark; }"
    return f":root {{ color-scheme: light dark; {light} }}\n{by_system}\n{by_host} {forced}\n"


def _css_properties(theme: Palette, classes: tuple[str, ...]) -> str:
    rules = {
        **{name: getattr(theme, name) for name in ("surface", "ink", "quiet", "grid", "gap")},
        **{"scale": ",".join(theme.sequential), "classes": ",".join(classes)},
        **theme.tones,
        **{f"role-{role}": colour for role, colour in theme.roles.items()},
        **{f"outcome-{name.replace(' ', '-')}": colour for name, colour in theme.outcomes.items()},
    }
    return " ".join(f"--{name}: {value};" for name, value in rules.items())


# Of one page, about 1.5 kB each.
_MOST_PICTURES = 2000
NEIGHBOURS = 8
# Samples of a task among which nearest neighbours are searched.
MOST_COMPARED = 20_000
# Features of a task and layer, of all its models, that one thread lays out faster than several.
_FEW_ROWS = 10_000
# Stages that samples move through, by the part that a model plays.
_ORDER = ("base", "merged", "baseline", "calibrated", "expert")
# Columns by model and layer, and their names in the table of samples.
_BY_LAYER = {
    "drift": "drift_l2",
    "mismatch": "mismatch_l2",
    "propagation": "propagation_l2",
    "share": "final_share",
}

Array = NDArray[Any]


@dataclass(frozen=True)
class _TaskSamples:
    """The shown samples of one task: their rows in the run, ids, and offset among all shown samples.

    `num_stored` also counts those that are not shown.
    """

    task: str
    rows: Array
    ids: tuple[str, ...]
    start: int
    num_stored: int

    @property
    def index_by_id(self) -> Mapping[str, int]:
        """The index of each sample id among the shown samples of all tasks."""
        return {name: self.start + place for place, name in enumerate(self.ids)}


def explorer_data(run: DriftRun, request: ViewRequest = ViewRequest()) -> dict[str, Any]:
    """Return the data of the explorer page as a JSON-serializable dict.

    Raises:
        DataError: the run has no such task, or no samples.
        RunError: a table or features can't be read.
    """
    tasks = [*(request.tasks or run.tasks)]
    stages = sorted(
        (name for name in (*run.variants, "expert") if not is_control(name)),
        key=lambda name: _ORDER.index(variant_kind(name)),
    )
    shown = [*_samples_to_show(run, tasks, request.samples)]
    if not shown:
        raise DataError(
            f"{run.path} has no samples to show",
            hint="`driftlens analyze` on its spec, with --resume, measures them.",
        )
    layers = [entry.index for entry in run.manifest.layers]
    rows = len(stages) * max(len(run.sample_ids(part.task)) for part in shown)
    # Small products take five times the CPU time with several threads.
    with threadpool_limits(1 if rows < _FEW_ROWS else None):
        planes = [_projections_by_layer(run, part, layers, stages, request) for part in shown]
    judged = verdict(run)
    columns, words = _sample_columns(run, shown, stages, layers)
    return {
        "run": {"id": run.id, "name": strip_control_chars(run.name), "state": current_state(run)},
        "sentences": [
            keep_units_together(typeset_signs(text))
            for text in judged.sentences
            if not judged.command or judged.command not in text
        ],
        "stages": [
            {
                **{"name": name, "title": strip_control_chars(display_name(name)), "part": variant_kind(name)},
                "role": colour_role(run.roles, name),
                "colours": [variant_style(run.roles, name, dark=dark).colour for dark in (False, True)],
            }
            for name in stages
        ],
        "layers": [run.layer_name(layer) for layer in layers],
        "tasks": [{"name": strip_control_chars(part.task), "start": part.start, "n": len(part.ids)} for part in shown],
        "outcomes": [[name, meaning] for name, meaning in OUTCOMES.items()],
        "ids": [name for part in shown for name in part.ids],
        "words": words,
        "texts": [text for part in shown for text in _sample_texts(run, part)],
        "pictures": _thumbnail_grid(run, shown, sum(len(part.ids) for part in shown)),
        "planes": planes,
        "neighbours": NEIGHBOURS,
        "columns": columns,
        "notes": [*_page_notes(run, shown, planes, request)],
    }


def _samples_to_show(run: DriftRun, tasks: Sequence[str], most: int) -> Iterator[_TaskSamples]:
    """Yield the samples of each task, subsampled evenly over classes if there are too many."""
    stored = run.manifest.sample_ids.get("diagnosis", {})
    total, start = sum(len(stored.get(task, ())) for task in tasks), 0
    for task in tasks:
        ids = stored.get(task, ())
        labels = labels_by_sample(run, task).reindex(ids).astype(object)
        frame = pd.DataFrame({"sample_id": [*ids], "label": labels.to_numpy()})
        limit = len(ids) if total <= most else max(1, most * len(ids) // total)
        rows = stratified_subset(frame, limit, ["label"]).index.to_numpy()
        if len(rows):
            yield _TaskSamples(task, rows, tuple(ids[row] for row in rows), start, len(ids))
        start += len(rows)


def _projections_by_layer(
    run: DriftRun,
    shown: _TaskSamples,
    layers: Sequence[int],
    stages: Sequence[str],
    request: ViewRequest,
) -> list[dict[str, Any] | None]:
    """Return 2-D coordinates and nearest neighbours by layer; None for layers without stored features.

    Layers are laid out one by one, then rotated or mirrored so that samples move little between them.
    """
    planes: list[dict[str, Any] | None] = []
    before: dict[str, Array] = {}
    # Backwards, as the last layer is shown first and the others are turned onto it.
    for layer in reversed(layers):
        there = [name for name in stages if _has_stored_features(run, shown.task, name, layer)]
        if "expert" not in there or len(there) < 2:
            planes.append(None)
            continue
        variants = tuple(name for name in there if name != "expert")
        most = len(there) * len(run.sample_ids(shown.task))
        points = load_features(run, ProjectionSettings(shown.task, layer, "pca", 0, variants, most))
        rows = {name: points.directions[name][shown.rows] for name in there}
        places, method = _joint_projection(run, shown, layer, rows, request)
        before = _align_projections(places, before)
        planes.append(
            {
                "stages": [stages.index(name) for name in there],
                "places": _base64_array(_quantized_coordinates(np.stack([before[name] for name in there])), "<i2"),
                # The time of a search grows with the square of the samples, so that 16 bits hold all numbers.
                "neighbours": _base64_array(np.stack([_nearest_neighbours(rows[name]) for name in there]), "<i2")
                if len(shown.ids) <= MOST_COMPARED
                else "",
                "method": method,
            }
        )
    return planes[::-1]


def _has_stored_features(run: DriftRun, task: str, variant: str, layer: int) -> bool:
    try:
        run.features(task, variant, layer)
    except DataError:
        return False
    return True


def _joint_projection(
    run: DriftRun, shown: _TaskSamples, layer: int, rows: Mapping[str, Array], request: ViewRequest
) -> tuple[dict[str, Array], str]:
    """Project the features of all models jointly to `[n, 2]`; return coordinates by model and the method."""
    if request.method == "pca":
        plane, how = compute_layout(np.concatenate([*rows.values()]), "pca", 0)
        return dict(zip(rows, np.split(plane, len(rows)), strict=True)), how["method"]
    variants = tuple(name for name in rows if name != "expert")
    most = min(MOST_POINTS, len(rows) * len(run.sample_ids(shown.task)))
    projection = ProjectionRequest(layer=layer, method=request.method, variants=variants, max_points=most)
    made = project(run, shown.task, projection)
    by_model = {name: part.set_index("sample_id")[["x", "y"]] for name, part in made.frame.groupby("variant")}
    return {name: by_model[name].reindex(shown.ids).to_numpy(dtype=float) for name in rows}, made.method


def _align_projections(places: dict[str, Array], target: Mapping[str, Array]) -> dict[str, Array]:
    """Align 2-D projections of one layer with those of another by Procrustes rotation."""
    middle = np.nanmean(np.concatenate([*places.values()]), axis=0)
    places = {name: points - middle for name, points in places.items()}
    both = [name for name in places if name in target]
    if not both:
        return places
    start, end = (np.nan_to_num(np.concatenate([by_model[name] for name in both])) for by_model in (places, target))
    # Reflections are allowed: the orientation of a layout is arbitrary.
    left, _, right = np.linalg.svd(start.T @ end)
    return {name: points @ (left @ right) for name, points in places.items()}


def _quantized_coordinates(places: Array) -> Array:
    """Quantize coordinates to 16-bit integers, the largest at 32,000; -32,768 marks missing ones."""
    most = np.nanmax(np.abs(places), initial=0.0) or 1.0
    return np.nan_to_num(np.round(places * (32_000 / most)), nan=-32_768)


def _nearest_neighbours(rows: Array) -> Array:
    """Return the indices of the nearest other samples by cosine, `[n, NEIGHBOURS]`; -1 where there are fewer."""
    from sklearn.neighbors import NearestNeighbors

    k = min(NEIGHBOURS, len(rows) - 1)
    nearest = np.full((len(rows), NEIGHBOURS), -1)
    if k > 0:
        nearest[:, :k] = NearestNeighbors(n_neighbors=k).fit(rows).kneighbors(return_distance=False)
    return nearest


def _sample_columns(
    run: DriftRun, shown: Sequence[_TaskSamples], stages: Sequence[str], layers: Sequence[int]
) -> tuple[dict[str, Any], list[str]]:
    """Return per-sample arrays (label, answer, confidence, margin, drift) and the class names that they index."""
    total = sum(len(part.ids) for part in shown)
    words: dict[str, int] = {}
    label = np.full(total, -1)
    answers, right = (np.full((len(stages), total), -1) for _ in range(2))
    confidence = np.full((len(stages), total), math.nan)
    margin = np.full(total, math.nan)
    by_layer = {name: np.full((len(stages), len(layers), total), math.nan) for name in _BY_LAYER}
    became = {stage: np.full(total, -1) for stage in _calibrated_variants(run, stages)}
    for part in shown:
        labels = labels_by_sample(run, part.task)
        _write_sample_values(
            label, part, labels.map(lambda name: words.setdefault(strip_control_chars(str(name)), len(words)))
        )
        outputs = run.outputs(part.task)
        for row, stage in enumerate(stages):
            of_expert = stage == "expert"
            rows = outputs if of_expert else outputs[outputs["variant"] == stage]
            rows = rows.drop_duplicates("sample_id").set_index("sample_id")
            predicted = rows["expert_pred" if of_expert else "pred"].dropna()
            _write_sample_values(
                answers[row],
                part,
                predicted.map(lambda name: words.setdefault(strip_control_chars(str(name)), len(words))),
            )
            labelled = predicted[predicted.index.isin(labels.index)]
            _write_sample_values(right[row], part, (labelled == labels.reindex(labelled.index)).astype(int))
            _write_sample_values(confidence[row], part, rows["confidence_expert" if of_expert else "confidence"])
            if of_expert:
                # The margin is the expert's and the same for every variant.
                _write_sample_values(margin, part, rows["margin"])
            else:
                _write_layer_values(by_layer, row, part, run.samples(part.task, stage), layers)
        for stage, column in became.items():
            outcome = sample_outcomes(run, part.task, verdict(run).merged or "merged", stage)["outcome"]
            _write_sample_values(column, part, outcome.map([*OUTCOMES].index))
    columns = {
        "label": _base64_array(label, "<i4"),
        "answers": _base64_array(answers, "<i4"),
        "right": _base64_array(right, "i1"),
        "confidence": _base64_array(confidence, "<f4"),
        "margin": _base64_array(margin, "<f4"),
        "outcome": {stage: _base64_array(column, "i1") for stage, column in became.items()},
        **{name: _base64_array(values, "<f4") for name, values in by_layer.items()},
    }
    return columns, [*words]


def _calibrated_variants(run: DriftRun, stages: Sequence[str]) -> list[str]:
    """Return the calibrated variants, the shown one first, then the newest; `[""]` for a run without any."""
    repairs = [name for name in reversed(stages) if variant_kind(name) == "calibrated"]
    return sorted(repairs, key=lambda name: name != shown_repair(run)) or [""]


def _write_sample_values(column: Array, shown: _TaskSamples, values: pd.Series[Any]) -> None:
    """Write values keyed by sample id into an array over the samples of all tasks."""
    places = shown.index_by_id
    values = values[values.index.isin(places) & values.notna()]
    column[[places[name] for name in values.index]] = values.to_numpy(dtype=float)


def _write_layer_values(
    by_layer: Mapping[str, Array],
    stage: int,
    shown: _TaskSamples,
    rows: pd.DataFrame,
    layers: Sequence[int],
) -> None:
    rows = rows[rows["sample_id"].isin(shown.index_by_id) & rows["layer"].isin(layers)]
    layer_places = rows["layer"].map({layer: place for place, layer in enumerate(layers)}).to_numpy(dtype=int)
    places = rows["sample_id"].map(shown.index_by_id).to_numpy(dtype=int)
    for name, column in _BY_LAYER.items():
        by_layer[name][stage, layer_places, places] = rows[column].to_numpy(dtype=float, na_value=math.nan)


def _base64_array(values: ArrayLike, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode()


def _sample_texts(run: DriftRun, shown: _TaskSamples) -> list[str]:
    texts = run.texts(shown.task)
    return ["\n".join(map(strip_control_chars, texts.get(name, "").splitlines())) for name in shown.ids]


def _thumbnail_grid(run: DriftRun, shown: Sequence[_TaskSamples], total: int) -> dict[str, Any]:
    """Return one image with all thumbnails in a grid, and the cell of each sample; -1 without a thumbnail."""
    # Every task gets the same number of pictures.
    share = _MOST_PICTURES // max(1, len(shown))
    places = np.full(total, -1)
    pictures: list[Array] = []
    for part in shown:
        stored = run.thumbs(part.task)
        if stored is not None:
            indices = np.flatnonzero(part.rows < len(stored))[:share]
            places[part.start + indices] = len(pictures) + np.arange(len(indices))
            pictures += [stored[row] for row in part.rows[indices]]
    if not pictures:
        return {"places": _base64_array(places, "<i4"), "columns": 1, "rows": 1, "image": ""}
    from PIL import Image

    columns = math.ceil(math.sqrt(len(pictures)))
    lines = math.ceil(len(pictures) / columns)
    grid = np.zeros((lines * columns, THUMB_SIDE, THUMB_SIDE, 3), dtype=np.uint8)
    grid[: len(pictures)] = pictures
    sheet = grid.reshape(lines, columns, THUMB_SIDE, THUMB_SIDE, 3).swapaxes(1, 2)
    target = io.BytesIO()
    Image.fromarray(sheet.reshape(lines * THUMB_SIDE, columns * THUMB_SIDE, 3)).save(target, "JPEG", quality=85)
    address = f"data:image/jpeg;base64,{base64.b64encode(target.getvalue()).decode()}"
    return {"places": _base64_array(places, "<i4"), "columns": columns, "rows": lines, "image": address}


def _page_notes(
    run: DriftRun, shown: Sequence[_TaskSamples], planes: Sequence[Sequence[Any]], request: ViewRequest
) -> Iterator[str]:
    every = sum(part.num_stored for part in shown)
    num_shown = sum(len(part.ids) for part in shown)
    if num_shown < every:
        yield f"{num_shown:,} of {every:,} samples are shown, evenly over classes; `--samples` shows more."
    if any(len(part.ids) > MOST_COMPARED for part in shown):
        yield f"Tasks with more than {MOST_COMPARED:,} samples have no nearest neighbours: fewer `--samples` have them."
    without = [part.task for part, by_layer in zip(shown, planes, strict=True) if not any(by_layer)]
    if without:
        yield (
            f"No features are stored for {', '.join(map(strip_control_chars, without))}, so nothing moves there. "
            "`layers.select` in the spec chooses layers to store."
        )
    elif any(plane is None for by_layer in planes for plane in by_layer):
        yield "Some layers have no stored features: `layers.select` in the spec chooses layers to store."
    if not any(variant_kind(name) == "calibrated" for name in run.variants):
        yield f"No repaired model yet: `{CALIBRATE}` adds one."
    if run.outputs().empty:
        yield "No class scores, so no answer is right or wrong: the spec names no heads."
    elif run.outputs()["label"].isna().all():
        yield "No labels, so no answer is right or wrong."
    if run.samples()["final_share"].isna().all():
        yield "No shares of the drift by layer: `driftlens analyze RUN` adds them."
    if request.method == "pca":
        yield (
            "Positions: first two principal components of L2-normalised features, fitted on all models together; "
            "distances are approximate. Neighbours: nearest by cosine of the features."
        )
    yield "Accuracies here: diagnosis samples; in the verdict: test samples."
    yield from split_overlap_notes(run)
