"""The card that travels with a merged or calibrated model: what it was made from, how, and how well it does."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from huggingface_hub import metadata_load

from driftlens.base.files import plain_file
from driftlens.base.metrics import ACCURACY, ATTACHED, metric_called
from driftlens.base.variants import calibrated, part_of, task_of, title
from driftlens.base.words import counted
from driftlens.calibration.calibrator import calibrators
from driftlens.checkpoints.loading import is_hub_id, library_folder, repository_of
from driftlens.findings.before_after import calibration_sheets, compared_variants, selection_sentences
from driftlens.findings.reading import printable, setting_text
from driftlens.findings.table import Table
from driftlens.findings.verdict import shareable, task_sheet, verdict
from driftlens.runs.contents import attach
from driftlens.runs.layout import SPEC, calibration_attachments, calibration_folder
from driftlens.runs.manifest import CalibrationInfo, versions
from driftlens.runs.run import DriftRun
from driftlens.runs.standing import is_live
from driftlens.spec.yaml_text import from_yaml, to_yaml

_SPECIAL = re.compile(r"[\\`*_{}\[\]#|~<>&$@]|:(?=//)|(?<=www)\.")
"""What Markdown would read as more than text; the last two make links of bare addresses."""
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_LIBRARIES = {"open": "open_clip", "hf": "transformers", "timm": "timm"}
_SHOWN_VERSIONS = ("driftlens", "python", "torch", "open_clip_torch", "transformers", "safetensors")


def model_card(run: DriftRun, name: str, usage: str = "") -> str:
    """Markdown with the Hub's front matter of a calibrated model, from the run's tables and manifest.

    Names that a user chose are escaped, of local paths only the last part is shown. `usage` is Python that loads it.
    """
    compared_variants(run, name)  # says which calibrations there are when this is none
    manifest = run.manifest
    tasks = ", ".join(escaped(task) for task in run.tasks)
    method = manifest.calibrations[name].method
    is_trained = method in calibrators and not calibrators[method].takes_sites
    text = f"One model merged from {counted(len(run.tasks), 'expert')} ({tasks}) "
    if attached := manifest.calibrations[name].attached:
        text += (
            f"and, for every task, maps of its features that were fitted to that expert's: {attached:,} numbers beside "
            "the weights. Whoever uses them must know the task of an input; the scores below are with the maps."
        )
    else:
        by = "by gradients" if is_trained else "in closed form, layer by layer,"
        text += f"and calibrated {by} so that its features follow each expert's. Same architecture, no added modules."
    if manifest.synthetic:
        text += (
            "\n\n**Synthetic demo**: samples and models were made by DriftLens; the numbers are no benchmark."
        )
    text += f"\n\n## Verdict\n\n{_verdict(run, name)}"
    origins = {model: info.source for model, info in manifest.models.items() if _is_parent(model)}
    sections = {
        "How it was made": _recipe(run, name),
        "Models": _models(run, name),
        "Calibration data": _calibration_data(run, name),
        "Before and after": _results(run, name),
        "What to know": _to_know(_notices(run, name), origins, manifest.architecture),
        "Versions": _versions(manifest.versions),
    }
    tags = (manifest.calibrations[name].method,)
    front = _front_matter(manifest.architecture, origins, tags, run.name, _measured(run, name))
    return _text(front, f"{run.name}: {title(calibrated(name))}", text, usage, sections)


def renew_cards(run: DriftRun) -> None:
    """Write the cards that lie in a run again, as scores were attached to it since."""
    for name in run.manifest.calibrations:
        place = f"{calibration_folder(name)}/README.md"
        if (run.path / place).is_file():
            with attach(run.path, place) as file:
                file.write_text(model_card(run, name), encoding="utf-8")


def merge_card(
    merge: Mapping[str, Any],
    architecture: Mapping[str, Any],
    origins: Mapping[str, str],
    notices: Sequence[str],
    usage: str = "",
) -> str:
    """The same of a model that was merged and not measured."""
    origins = {model: origin for model, origin in origins.items() if part_of(model) in ("base", "expert")}
    tasks = [task for model in origins if (task := task_of(model)) is not None]
    name = f"{merge['title']} of {', '.join(tasks)}"
    about = f"One model merged from {counted(len(tasks), 'expert')}. Same architecture, no added modules."
    settings = [(escaped(key), escaped(setting_text(value))) for key, value in merge["parameters"].items()]
    recipe = [("Merge", escaped(merge["method"])), *settings, ("Source", escaped(merge["source"]))]
    if "samples" in merge:
        recipe.append(("Calibration samples", escaped(merge["samples"])))
    parents = [(escaped(model), escaped(_shown(origin))) for model, origin in origins.items()]
    unmeasured = "Nothing was measured of it; driftlens analyze says how far it drifts from its experts."
    sections = {
        "How it was made": _table(("Setting", "Value"), recipe),
        "Models": _table(("Model", "From"), parents),
        "What to know": _to_know([unmeasured, *notices], origins, architecture),
        "Versions": _versions(versions()),
    }
    return _text(_front_matter(architecture, origins, (), name, []), name, about, usage, sections)


def _text(front: Mapping[str, Any], heading: str, about: str, usage: str, sections: Mapping[str, str]) -> str:
    parts = [f"---\n{to_yaml(dict(front))}---", f"# {escaped(heading)}", about]
    if usage:
        parts.append(f"## How to use it\n\n```python\n{usage}```")
    parts += [f"## {section}\n\n{body}" for section, body in sections.items()]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown, and the HTML it may become, shows as it is, on one line."""
    return _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), printable(text))


def _front_matter(
    architecture: Mapping[str, Any],
    origins: Mapping[str, str],
    tags: Sequence[str],
    name: str,
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What the Hub reads of a model; it knows no other parents than its own models."""
    tags = ("merge", "model-merging", *(("feature-calibration", *tags) if tags else ()), "driftlens")
    values: dict[str, Any] = {"tags": list(dict.fromkeys(tags))}
    loader = str(architecture.get("loader"))
    library = _LIBRARIES.get(loader.partition("-")[0])
    if library is not None:
        values["library_name"] = library
    if loader in _PIPELINES:
        values["pipeline_tag"] = _PIPELINES[loader]
    values |= _licenses(origins)[0]
    hub = [known for origin in origins.values() if (known := _hub_id(origin))]
    if hub:
        values |= {"base_model": list(dict.fromkeys(hub)), "base_model_relation": "merge"}
    if results:
        values["model-index"] = [{"name": name, "results": list(results)}]
    return values


def _licenses(origins: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The base's license in the Hub's terms unless an expert states another one, and a sentence on those left out."""
    stated = {model: found for model, origin in origins.items() if (found := _license(origin))}
    base = stated.get("base", {})
    if all(found == base for found in stated.values()):
        return base, []
    listed = ", ".join(f"{model} {found['license']}" for model, found in stated.items())
    return {}, [f"No license is stated here: the models that it was made from state {listed}."]


def _license(origin: str) -> dict[str, str]:
    folder = library_folder(origin)
    card = None if folder is None else folder / "README.md"
    if card is None or not card.is_file():
        return {}
    try:
        found = metadata_load(card) or {}
    except Exception:  # somebody's file: whatever is wrong with it, it states no license
        return {}
    known = {key: found[key] for key in ("license", "license_name", "license_link") if key in found}
    return known if "license" in known and all(isinstance(said, str) for said in known.values()) else {}


def _measured(run: DriftRun, name: str) -> list[dict[str, Any]]:
    """Scores on test samples as the Hub lists results; none with attachments, which whoever loads the weights lacks."""
    if (run.path / calibration_attachments(name)).exists():
        return []
    data, architecture = _spec(run).get("data", {}), run.manifest.architecture
    kind = _TASKS.get(str(architecture.get("loader"))) or _TASKS.get(str(architecture.get("adapter")))
    # Older runs don't say what their models read.
    read = architecture.get("reads", "image" if run.manifest.preprocessing else "")
    kind = kind or {"image": "image-classification", "text": "text-classification"}.get(
        read, "classification"
    )
    rows = run.accuracy(variant=calibrated(name))
    return [
        {
            "task": {"type": kind},
            "dataset": {
                "type": _hub_id(str(data.get(row["task"], {}).get("path", ""))) or row["task"],
                "name": row["task"],
                "split": "test",
                **({} if pd.isna(row["n"]) else {"args": {"num_samples": int(row["n"])}}),
            },
            **({"source": {"name": "lm-evaluation-harness", "url": _HARNESS}} if metric.is_attached else {}),
            "metrics": [
                {
                    **{"type": metric.hub or metric.name, "value": float(row["value"])},
                    **({"name": metric.title} if metric != ACCURACY else {}),
                    **(
                        {}
                        if pd.isna(row["ci_low"])
                        else {
                            "args": {"confidence_interval_95": [float(row["ci_low"]), float(row["ci_high"])]}
                        }
                    ),
                }
            ],
        }
        for row in rows.to_dict("records")
        for metric in [metric_called(row["metric"])]
    ]


_TASKS = {
    **{"hf-t5": "text2text-generation", "hf_t5": "text2text-generation", "hf-decoder": "text-generation"},
    "hf-encoder": "text-classification",
}
"""What the Hub calls the tasks of models of text, by loader or adapter."""
_PIPELINES = {
    **_TASKS,
    **dict.fromkeys(("hf-clip", "open-clip"), "zero-shot-image-classification"),
    **dict.fromkeys(("hf-vit", "timm"), "image-classification"),
}
_HARNESS = "https://github.com/EleutherAI/lm-evaluation-harness"


def _recipe(run: DriftRun, name: str) -> str:
    info = run.manifest.calibrations[name]
    merge = _merge_of(run)
    layers = f"{escaped(info.method)} on layers {_ranges(info.layers)}" if info.layers else "none"
    rows = [("Merge", merge), ("Calibration", layers)]
    rows += _sites(run, name)
    rows.append(("Preset", escaped(info.preset or "none")))
    rows += [(escaped(key), escaped(setting_text(value))) for key, value in info.settings.items()]
    rows.append(("Time", f"{info.seconds:.1f} s on {escaped(run.manifest.device)}, without the analysis"))
    said = [escaped(text) for text in selection_sentences(run, name)]
    command = [] if is_live(run.manifest) else _command(name, info)
    return "\n\n".join([_table(("Setting", "Value"), rows), *said, *command])


def _sites(run: DriftRun, name: str) -> list[tuple[str, str]]:
    """Which modules of the layers were solved for; none where an older run does not say which were meant."""
    info = run.manifest.calibrations[name]
    if info.seed is None:
        return []
    solved = run.calibration(name)[["layer", "site", "kind"]].drop_duplicates(["layer", "site"])
    if solved.empty:  # a trained calibrator solves for none
        return []
    is_linear = solved["kind"] == "linear"
    kinds = [name for name, there in (("linear", is_linear.any()), ("norm", (~is_linear).any())) if there]
    meant = ", ".join(info.sites) or f"every {' and '.join(kinds)} module of these layers"
    return [("Sites", escaped(f"{meant} ({counted(len(solved), 'module')})")), *_repair(run, name)]


def _repair(run: DriftRun, name: str) -> list[tuple[str, str]]:
    """How much repair of what earlier modules left the data supported, layer by layer, where there was such repair."""
    rows = run.calibration(name)
    if "upstream_share" not in rows or rows["upstream_share"].isna().all():
        return []
    means = rows.groupby("layer")["upstream_share"].mean().dropna()
    by_layer = zip(means.index.tolist(), means.tolist(), strict=True)
    shares = ", ".join(f"{escaped(run.layer_name(layer))} {share:.2f}" for layer, share in by_layer)
    return [("Upstream repair supported", f"{shares} (mean share of the modules)")]


def _command(name: str, info: CalibrationInfo) -> list[str]:
    # Indented, not fenced: nothing in a pattern can end the block.
    told = f"To repeat it in a run of the same models and data (sample seed {info.seed}):"
    line = calibration_command(name, info)
    return [told, f"    {printable(line)}"] if line else []


def _spec(run: DriftRun) -> Mapping[str, Any]:
    found = from_yaml(plain_file(run.path / SPEC).read_text(encoding="utf-8"), SPEC)
    return found if isinstance(found, Mapping) else {}


def _merge_of(run: DriftRun) -> str:
    merge = _spec(run).get("merge")
    if not merge:
        return "a given checkpoint"
    parameters = ", ".join(f"{key} {setting_text(value)}" for key, value in merge.items() if key != "method")
    return escaped(f"{merge['method']}{f' ({parameters})' if parameters else ''}")


def _models(run: DriftRun, name: str) -> str:
    wanted = {model: info for model, info in run.manifest.models.items() if _is_parent(model)}
    wanted[calibrated(name)] = run.manifest.models[calibrated(name)]
    origins = {name: _shown(at.source) if _is_parent(name) else "this model" for name, at in wanted.items()}
    rows = [(escaped(model), escaped(origins[model]), f"`{at.digest}`") for model, at in wanted.items()]
    return _table(("Model", "From", "SHA-256 of the weights"), rows)


def _calibration_data(run: DriftRun, name: str) -> str:
    info, digests = run.manifest.calibrations[name], run.manifest.calibrations[name].sample_digests
    drawn = "" if info.seed is None else f" The samples were drawn with seed {info.seed}."
    rows = [(escaped(task), str(count), f"`{digests[task]}`") for task, count in info.samples.items()]
    # Of live objects nobody but their content knows; a notice says where they are test samples, too.
    apart, known_by = ("", "contents") if is_live(run.manifest) else (", and no test sample", "ids")
    text = _table(("Task", "Samples", f"SHA-256 of their {known_by}"), rows)
    return f"Inputs only: no label was used{apart}.{drawn}\n\n{text}"


def _results(run: DriftRun, name: str) -> str:
    """Every table of the calibration."""
    return "\n\n".join([*map(_sheet, calibration_sheets(run, name)), *_attached(run, name)])


def _verdict(run: DriftRun, name: str) -> str:
    found = verdict(run, name)
    lines = "\n".join(f"- {escaped(shareable(run, text))}" for text in found.sentences)
    return "\n\n".join([lines, *(_sheet(sheet) for sheet in [task_sheet(run, found)] if sheet.rows)])


def _attached(run: DriftRun, name: str) -> Iterator[str]:
    """What another tool has measured, of the models that the card is about."""
    rows = run.accuracy()
    rows = rows[
        rows["variant"].isin(["base", "merged", calibrated(name)]) & rows["metric"].str.startswith(ATTACHED)
    ]
    cells = [
        (row["task"], row["metric"].removeprefix(ATTACHED), title(row["variant"]), f"{row['value']:.3g}")
        for row in rows.sort_values(["task", "metric"], kind="stable").to_dict("records")
    ]
    if cells:
        yield "### Scores by other tools (lm-evaluation-harness)"
        yield _table(("Task", "Metric", "Model", "Score"), [tuple(map(escaped, row)) for row in cells])


def _sheet(sheet: Table) -> str:
    header, *rows = [[escaped(cell) for cell in row] for row in sheet.texts()]
    notes = [escaped(sheet.notes())] if sheet.notes() else []
    return "\n\n".join([f"### {escaped(sheet.title)}", _table(header, rows), *notes])


def _notices(run: DriftRun, name: str) -> list[str]:
    return [
        "Accuracy is measured on the run's test samples, drift on its diagnosis samples.",
        *run.manifest.warnings,
        *(said for said in run.manifest.notices if not said.startswith(calibrated(""))),
        *run.manifest.calibrations[name].notices,
    ]


def _to_know(lines: Sequence[str], origins: Mapping[str, str], architecture: Mapping[str, Any]) -> str:
    """Sentences, one on licenses among them, as a list; of paths only the last part is shown."""
    lines = [*lines, *_licenses(origins)[1]]
    places = {str(architecture.get("source", "")), *origins.values()}
    for place in sorted(places - {""}, key=len, reverse=True):
        lines = [line.replace(place, _shown(place)) for line in lines]
    return "\n".join(f"- {escaped(line)}" for line in lines)


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(escaped(f"{name} {found[name]}") for name in _SHOWN_VERSIONS if name in found)


def _is_parent(model: str) -> bool:
    return part_of(model) in ("base", "merged", "expert")


def _shown(origin: str) -> str:
    return _hub_id(origin) or pathlib.PurePath(origin).name


def _hub_id(origin: str) -> str:
    """The model of the Hub that `origin` is, or a copy of in the Hub's cache; empty where it is neither."""
    parts = pathlib.PurePath(origin).parts
    cached = next((part for part in parts if part.startswith("models--")), "")
    name = cached.removeprefix("models--").replace("--", "/", 1) or origin.removeprefix("hf-hub:")
    return repository_of(name)[0] if is_hub_id(name) else ""


def _ranges(layers: Sequence[int]) -> str:
    """Layer indices as 2 to 13, or listed where they are not consecutive."""
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


_FLAGS = ("lam", "rho", "alpha")


def calibration_command(name: str, info: CalibrationInfo) -> str:
    """`driftlens calibrate RUN ...` with every setting written out: no newer preset or spec changes the outcome."""
    if info.seed is None:
        return ""
    return shlex.join(["driftlens", "calibrate", "RUN", "--name", name, *_flags(info)])


def _flags(info: CalibrationInfo) -> Iterator[str]:
    yield from ("--method", info.method)
    for setting, value in info.settings.items():
        if setting in _FLAGS:
            yield from (f"--{setting}", f"{value}")
        else:
            yield from ("--set", f"{setting}={_as_yaml(value)}")
    yield from ("--layers", ",".join(map(str, info.layers)))
    for pattern in info.sites:
        yield from ("--sites", pattern)
    counts = set(info.samples.values())
    if len(counts) == 1:  # unequal ones are the spec's own
        yield from ("--samples", str(*counts))


def _as_yaml(value: Any) -> str:
    """The value as `--set` reads it back; words stand as they are where YAML takes them for nothing else."""
    is_word = isinstance(value, str) and value.isidentifier() and from_yaml(value, "--set") == value
    return value if is_word else json.dumps(value, separators=(",", ":"))
