"""The card that travels with a calibrated model: what it was made from, how, on which data, and how well it does."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from driftlens.records.before_after import (
    calibration_sentences,
    calibration_sheets,
    compared_variants,
    selection_sentences,
)
from driftlens.records.layout import SPEC
from driftlens.records.manifest import CalibrationInfo, ModelInfo
from driftlens.records.reading import Sheet, printable, setting_text
from driftlens.records.run import DriftRun
from driftlens.spec.yaml_text import from_yaml, to_yaml
from driftlens.variants import calibrated, part_of, title

_SPECIAL = re.compile(r"[\\`*_{}\[\]#|~<>&$@]|:(?=//)|(?<=www)\.")
"""What Markdown would read as more than text; the last two make links of bare addresses."""
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_LIBRARIES = {"open-clip": "open_clip", "hf-clip": "transformers"}
_SHOWN_VERSIONS = ("driftlens", "python", "torch", "open_clip_torch", "transformers", "safetensors")


def model_card(run: DriftRun, name: str) -> str:
    """Markdown with the Hub's front matter, made from the run's tables and manifest alone.

    Names that a user chose are escaped, and of local paths only the last part is shown.

    Args:
        run: with the finished calibration.
        name: of the calibration.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    compared_variants(run, name)  # says which calibrations there are when this is none
    parts = [
        _front_matter(run),
        f"# {escaped(run.name)}: {escaped(title(calibrated(name)))}",
        _introduction(run),
        "## How it was made\n\n" + _recipe(run, name),
        "## Models\n\n" + _models(run, name),
        "## Calibration data\n\n" + _calibration_data(run, name),
        "## Before and after\n\n" + _results(run, name),
        "## What to know\n\n" + _notices(run, name),
        "## Versions\n\n" + ", ".join(_versions(run)),
    ]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown, and the HTML it may become, shows as it is, on one line."""
    return _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), printable(text))


def _front_matter(run: DriftRun) -> str:
    values: dict[str, Any] = {"tags": ["model-merging", "feature-calibration", "driftlens"]}
    library = _LIBRARIES.get(str(run.manifest.architecture.get("loader")))
    if library is not None:
        values["library_name"] = library
    origins = [info.source for model, info in run.manifest.models.items() if _is_parent(model)]
    hub = [origin for origin in origins if _is_hub_id(origin)]
    if hub:
        values |= {"base_model": hub, "base_model_relation": "merge"}
    return f"---\n{to_yaml(values)}---"


def _introduction(run: DriftRun) -> str:
    tasks = ", ".join(escaped(task) for task in run.tasks)
    text = (
        f"One model merged from {len(run.tasks)} experts ({tasks}) and calibrated in closed form, layer by layer, "
        "so that its features follow each expert's. Same architecture, no added modules."
    )
    if run.manifest.synthetic:
        text += "\n\n**Synthetic demo**: images and models were made by DriftLens itself; the numbers are no benchmark."
    return text


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
    return "\n\n".join([_table(("Setting", "Value"), rows), *said, *_command(name, info)])


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
    return [("Sites", escaped(f"{meant} ({len(solved)} modules)"))]


def _command(name: str, info: CalibrationInfo) -> list[str]:
    line = calibration_command(name, info)
    if not line:
        return []
    # Indented, not fenced: nothing in a pattern can end the block.
    return [
        f"To repeat it in a run of the same models and data (sample seed {info.seed}):",
        f"    {printable(line)}",
    ]


def _merge_of(run: DriftRun) -> str:
    spec = from_yaml((run.path / SPEC).read_text(encoding="utf-8"), SPEC)
    merge = spec.get("merge") if isinstance(spec, Mapping) else None
    if not merge:
        return "a given checkpoint"
    parameters = ", ".join(f"{key} {setting_text(value)}" for key, value in merge.items() if key != "method")
    return escaped(f"{merge['method']}{f' ({parameters})' if parameters else ''}")


def _models(run: DriftRun, name: str) -> str:
    wanted = {model: info for model, info in run.manifest.models.items() if _is_parent(model)}
    wanted[calibrated(name)] = run.manifest.models[calibrated(name)]
    rows = [
        (escaped(model), escaped(_origin(model, info)), f"`{info.digest}`") for model, info in wanted.items()
    ]
    return _table(("Model", "From", "SHA-256 of the weights"), rows)


def _calibration_data(run: DriftRun, name: str) -> str:
    info, digests = run.manifest.calibrations[name], run.manifest.calibrations[name].sample_digests
    drawn = "" if info.seed is None else f" The samples were drawn with seed {info.seed}."
    rows = [(escaped(task), str(count), f"`{digests[task]}`") for task, count in info.samples.items()]
    text = _table(("Task", "Samples", "SHA-256 of their ids"), rows)
    return f"Inputs only: no label was used, and no test sample.{drawn}\n\n{text}"


def _results(run: DriftRun, name: str) -> str:
    """The sentences, then every table of the calibration; the first stands directly below the heading."""
    first, *others = (_sheet(sheet) for sheet in calibration_sheets(run, name))
    lines = [escaped(text) for text in calibration_sentences(run, name)]
    return "\n\n".join(["\n".join(f"- {line}" for line in lines), first, *others])


def _sheet(sheet: Sheet) -> str:
    header, *rows = [[escaped(cell) for cell in row] for row in sheet.texts()]
    notes = [escaped(sheet.notes())] if sheet.notes() else []
    return "\n\n".join([f"### {escaped(sheet.title)}", _table(header, rows), *notes])


def _notices(run: DriftRun, name: str) -> str:
    lines = [
        "Accuracy is measured on the run's test samples, drift on its diagnosis samples.",
        *run.manifest.warnings,
        *run.manifest.calibrations[name].notices,
    ]
    return "\n".join(f"- {escaped(line)}" for line in lines)


def _versions(run: DriftRun) -> list[str]:
    versions = run.manifest.versions
    return [escaped(f"{name} {versions[name]}") for name in _SHOWN_VERSIONS if name in versions]


def _is_parent(model: str) -> bool:
    return part_of(model) in ("base", "merged", "expert")


def _origin(model: str, info: ModelInfo) -> str:
    if not _is_parent(model):
        return "this model"
    return info.source if _is_hub_id(info.source) else pathlib.PurePath(info.source).name


def _is_hub_id(origin: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", origin))


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
    """`driftlens calibrate RUN ...` with every setting written out, for a run of the same spec.

    No preset is used and nothing is chosen again, so that neither a newer preset nor the spec's own section can change
    the outcome.

    Args:
        name: of the calibration.
        info: what the manifest says; `seed` is None where an older DriftLens did not record which sites were meant.

    Returns:
        One line for a POSIX shell; empty where the calibration can't be repeated from `info` alone.
    """
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
