"""Model cards of merged and calibrated models: sources, settings and scores.

Entry points: `model_card` for a calibration, `merge_card` for a merge that was not measured.
"""

from __future__ import annotations

import functools
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData
from markupsafe import Markup

from driftlens.calibration.calibrator import calibrators
from driftlens.checkpoints.loading import is_hub_id
from driftlens.config.requests import CalibrationRequest
from driftlens.config.types import parse_yaml
from driftlens.models.readouts import EMBEDDED
from driftlens.results.formatting import format_setting, strip_control_chars, typeset_signs
from driftlens.runs.manifest import SPEC, CalibrationInfo, package_versions
from driftlens.runs.run import has_live_modules
from driftlens.utils.errors import pluralize
from driftlens.utils.files import regular_file
from driftlens.utils.variants import calibrated_variant, display_name, task_of_expert, variant_kind

if TYPE_CHECKING:
    import jinja2

    from driftlens.runs.run import DriftRun

# Rows of a table, its heading first.
Rows = list[tuple[object, ...]]
# Characters with a meaning in Markdown; the last two turn bare addresses into links.
_SPECIAL = re.compile(r"[\\`*_{}\[\]#|~<>&$@]|:(?=//)|(?<=www)\.")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_PARENTS = ("base", "merged", "expert")
_LIBRARIES = {"open": "open_clip", "hf": "transformers", "timm": "timm"}
_SHOWN_VERSIONS = ("driftlens", "python", "torch", "open_clip_torch", "transformers", "safetensors")


def model_card(run: DriftRun, name: str, usage: str = "") -> str:
    """Render the Markdown model card of a calibration with Hub metadata; `usage` is the loading code."""
    # Merging needs none of the tables, which pandas reads.
    from driftlens.results.calibration_summary import (
        calibration_effect_tables,
        calibration_sentences,
        variants_in_table,
    )
    from driftlens.results.verdict import headline, headline_sentence, hide_run_path, task_table, verdict

    # Raises for an unknown calibration and lists the existing ones.
    variants_in_table(run, name)
    manifest, info, variant = run.manifest, run.manifest.calibrations[name], calibrated_variant(name)
    judgement = verdict(run, name)
    tasks = task_table(run, judgement)
    parents = {model: entry for model, entry in manifest.models.items() if variant_kind(model) in _PARENTS}
    models = [(model, _short_origin(entry.source), Markup(f"`{entry.digest}`")) for model, entry in parents.items()]
    models.append((variant, "this model", Markup(f"`{manifest.models[variant].digest}`")))
    digests = info.sample_digests
    samples = [(task, count, Markup(f"`{digests[task]}`")) for task, count in info.samples.items()]
    # Ids of live samples are positions, which identify nothing.
    known_by = "contents" if has_live_modules(manifest) else "ids"
    notices = [
        "Accuracy is measured on the run's test samples, drift on its diagnosis samples.",
        *manifest.warnings,
        *(notice for notice in manifest.notices if not notice.startswith(calibrated_variant(""))),
        *info.notices,
    ]
    command = "" if has_live_modules(manifest) else strip_control_chars(calibration_command(name, info))
    return _render_card(
        manifest.architecture,
        {model: entry.source for model, entry in parents.items()},
        notices,
        tags=() if info.kept else ("feature-calibration", info.method),
        is_merge=info.kept != "base",
        heading=f"{run.name}: {display_name(variant)}",
        about=_model_description(run, info),
        is_synthetic=manifest.synthetic,
        headline=typeset_signs(headline_sentence(headline(run, name))),
        sentences=[typeset_signs(hide_run_path(run, text)) for text in judgement.sentences],
        verdict_sheets=[tasks] if tasks.rows else [],
        usage=Markup(usage),
        settings=[("Setting", "Value"), *_merge_and_calibration_rows(run, name)],
        chosen=calibration_sentences(run, name),
        command=Markup(command),
        seed=info.seed,
        models=[("Model", "From", "SHA-256 of the weights"), *models],
        samples=[("Task", "Samples", f"SHA-256 of their {known_by}"), *samples],
        is_live=has_live_modules(manifest),
        sheets=calibration_effect_tables(run, name),
        versions=_version_line(manifest.versions),
    )


def merge_card(
    merge: Mapping[str, Any],
    architecture: Mapping[str, Any],
    origins: Mapping[str, str],
    notices: Sequence[str],
    usage: str = "",
) -> str:
    """Render the Markdown model card of a merged model, without measurements.

    Args:
        merge: the manifest's record of the merge.
        architecture: the manifest's description of the architecture.
        origins: the place of each model in the pool.
        notices: sentences for the card.
        usage: Python code that loads the model.
    """
    parents = {model: origin for model, origin in origins.items() if variant_kind(model) in ("base", "expert")}
    tasks = [task for model in parents if (task := task_of_expert(model)) is not None]
    name = f"{merge['title']} of {', '.join(tasks)}"
    settings: Rows = [("Setting", "Value"), ("Merge", merge["method"]), *_setting_rows(merge["parameters"])]
    settings.append(("Source", merge["source"]))
    if "samples" in merge:
        settings.append(("Calibration samples", merge["samples"]))
    return _render_card(
        architecture,
        parents,
        ["Not measured; `driftlens analyze` measures its drift.", *notices],
        heading=name,
        about=f"One model merged from {pluralize(len(tasks), 'expert')}. Same architecture, no added modules.",
        usage=Markup(usage),
        settings=settings,
        models=[("Model", "From"), *((model, _short_origin(origin)) for model, origin in parents.items())],
        versions=_version_line(package_versions()),
    )


def escape_markdown(text: str) -> str:
    """Return text escaped for Markdown and HTML, on one line."""
    return _SPECIAL.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), strip_control_chars(text))


def calibration_command(name: str, info: CalibrationInfo, run: str = "RUN", **more: Any) -> str:
    """Return the `driftlens calibrate` command that reproduces a calibration, with all settings.

    Empty if an older run did not record its sites, or if no layer was calibrated.

    Args:
        name: of the calibration.
        info: its record in the manifest.
        run: the run's path in the command.
        more: further fields of the request.
    """
    if info.seed is None or not info.layers:
        return ""
    counts = set(info.samples.values())
    views = set(info.views.values()) if len(info.views) == len(info.samples) else set()
    chooses_itself = info.method in calibrators and not calibrators[info.method].takes_sites
    request = CalibrationRequest(
        name=name,
        method=info.method,
        parameters=dict(info.settings),
        # Unequal counts come from the spec.
        samples=counts.pop() if len(counts) == 1 else None,
        layers=None if chooses_itself else tuple(info.layers),
        sites=tuple(info.sites) or None,
        interpolate=info.interpolation.get("share"),
        **{"out_dtype": info.out_dtype or None, "views": views.pop() if len(views) == 1 else None, **more},
    )
    return shlex.join(["driftlens", "calibrate", run, *request.to_cli_args()])


@functools.cache
def _load_card_template() -> jinja2.Template:
    """Load the Jinja template of a model card; values are escaped unless they are `Markup`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(escape_markdown(str(value))),
    )
    environment.filters["typeset"] = lambda rows: [[*map(typeset_signs, cells)] for cells in rows]
    return environment.get_template("model_card.md.jinja")


def _render_card(
    architecture: Mapping[str, Any],
    origins: Mapping[str, str],
    notices: Sequence[str],
    tags: Sequence[str] = (),
    is_merge: bool = True,
    **shown: Any,
) -> str:
    """Render a model card; only Hub models are listed as parents, local paths are shortened."""
    loader = str(architecture.get("loader")).partition("-")[0]
    hub = list(dict.fromkeys(filter(None, map(_hub_id, origins.values()))))
    front = ModelCardData(
        tags=[*(["merge", "model-merging"] if is_merge else []), *tags, "driftlens"],
        library_name="sentence-transformers" if EMBEDDED in architecture else _LIBRARIES.get(loader),
        base_model=hub or None,
        base_model_relation="merge" if hub and is_merge else None,
    )
    # The longest first: one path may begin with another.
    for place in sorted({str(architecture.get("source", "")), *origins.values()} - {""}, key=len, reverse=True):
        notices = [line.replace(place, _short_origin(place)) for line in notices]
    return _load_card_template().render(front=Markup(front.to_yaml()), notices=notices, **shown) + "\n"


def _model_description(run: DriftRun, info: CalibrationInfo) -> str:
    text = f"One model merged from {pluralize(len(run.tasks), 'expert')} ({', '.join(run.tasks)})"
    if info.kept == "base":
        return f"This is {info.unchanged_text}."
    if info.kept:
        return f"{text}. This is {info.unchanged_text}. Same architecture, no added modules."
    text += " and"
    if info.attached:
        return (
            f"{text}, for every task, feature maps fitted to its expert: {info.attached:,} additional numbers. "
            "They need the task of an input; the scores below include them."
        )
    is_trained = info.method in calibrators and not calibrators[info.method].takes_sites
    how = "by gradients" if is_trained else "in closed form, layer by layer,"
    return f"{text} calibrated {how} to the experts' features. Same architecture, no added modules."


def _merge_and_calibration_rows(run: DriftRun, name: str) -> Iterator[tuple[object, ...]]:
    info, merge = run.manifest.calibrations[name], _read_run_spec(run).get("merge") or {}
    parameters = ", ".join(f"{key} {text}" for key, text in _setting_rows(merge) if key != "method")
    merged = f"{merge['method']}{f' ({parameters})' if parameters else ''}" if merge else "a given checkpoint"
    yield "Merge", merged
    if info.kept:
        yield "Calibration", f"none; this is {info.unchanged_text}"
        return
    yield (
        "Calibration",
        f"{info.method} on layers {_format_layer_indices(info.layers)}" if info.layers else "none",
    )
    solved = run.calibration(name)[["layer", "site", "kind"]].drop_duplicates(["layer", "site"])
    # An older run does not say which sites were meant, and a trained calibrator solves for none.
    if info.seed is not None and not solved.empty:
        kinds = sorted({"linear" if kind == "linear" else "norm" for kind in solved["kind"]})
        sites = ", ".join(info.sites) or f"every {' and '.join(kinds)} module of these layers"
        yield "Sites", f"{sites} ({pluralize(len(solved), 'module')})"
    yield from [("Saved in", info.out_dtype)] if info.out_dtype else []
    if info.interpolation:
        how = ", chosen on held-out samples" if "curve" in info.interpolation else ""
        yield "Interpolated", f"to {info.interpolation['share']:g} of the way from the base{how}"
    yield from [("Views of samples", ", ".join(sorted({*info.views.values()})))] if info.views else []
    yield "Preset", info.preset or "none"
    yield from _setting_rows(info.settings)
    yield "Time", f"{info.seconds:.1f} s on {run.manifest.device}, without the analysis"


def _read_run_spec(run: DriftRun) -> Mapping[str, Any]:
    spec = parse_yaml(regular_file(run.path / SPEC).read_text(encoding="utf-8"), SPEC)
    return spec if isinstance(spec, Mapping) else {}


def _version_line(installed: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {installed[name]}" for name in _SHOWN_VERSIONS if name in installed)


def _setting_rows(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, format_setting(value)) for key, value in settings.items()]


def _short_origin(origin: str) -> str:
    return _hub_id(origin) or pathlib.PurePath(origin).name


def _hub_id(origin: str) -> str:
    """Return the Hub id of a model from its id or its path in the Hub cache; else empty."""
    parts = pathlib.PurePath(origin).parts
    cached = next((part for part in parts if part.startswith("models--")), "")
    name = cached.removeprefix("models--").replace("--", "/", 1) or origin.removeprefix("hf-hub:")
    return name.partition("@")[0] if is_hub_id(name) else ""


def _format_layer_indices(layers: Sequence[int]) -> str:
    """Format layer indices as a range ("2 to 13"), or as a list if not consecutive."""
    is_range = len(layers) > 2 and [*layers] == [*range(layers[0], layers[-1] + 1)]
    return f"{layers[0]} to {layers[-1]}" if is_range else ", ".join(map(str, layers))
