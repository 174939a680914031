"""The manifest of a run: what was computed, from what, with what, and which files hold it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import to_json

import driftlens
from driftlens.runs.layout import MANIFEST
from driftlens.runs.schema import SCHEMA_VERSION, refuse_newer
from driftlens.runs.status import as_declared, as_plain, utc_now
from driftlens.utils.errors import RunError
from driftlens.utils.files import from_json, plain_file, write_text_atomic
from driftlens.utils.registry import installed, origin

PhaseState = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True)
class LayerInfo:
    """One layer of the chain: 1 the stem, L the head; `path` in the library's own names."""

    index: int
    role: str
    path: str


@dataclass(frozen=True)
class ModelInfo:
    """One set of weights: digest of its content, number of parameters, and where it came from."""

    digest: str
    parameters: int
    source: str = ""


@dataclass(frozen=True)
class PhaseInfo:
    """One phase of the work; `started` is UTC."""

    state: PhaseState
    seconds: float
    started: str


@dataclass(frozen=True)
class FileInfo:
    """One file of the run; `rows` of a table or an array, None for other files."""

    sha256: str
    bytes: int
    rows: int | None = None


class Chosen:
    """What came of a choice among repairs and models as they are, by the record of it."""

    selection: Mapping[str, Any]
    shrink: Mapping[str, Any]

    @property
    def kept(self) -> str:
        """Which model the choice left as it is: `merged`, `base`, or `merge`, another merge; empty if it calibrates."""
        return str(self.selection.get("kept") or "")

    @property
    def unchanged(self) -> str:
        """What that model is, for a reader; empty where something is calibrated."""
        share = self.shrink.get("share", 1)
        way = "" if share == 1 else f", at {share:g} of its way from the base"
        none = "no repair was clearly better" if not way else "no repair was nearer to the experts"
        merge_title = self.selection.get("merge", {}).get("title", "")
        return {
            "base": "the base, unchanged: don't use the merge",
            "merged": f"the merged model, {way.strip(', ') or 'unchanged'}: {none}",
            "merge": f"another merge of the same experts, by {merge_title}{way}: no repair was nearer to the experts",
        }.get(self.kept, "")

    @property
    def is_what(self) -> str:
        """What the model is, in words: base, merge or repair, with its share of the way from the base."""
        share = self.shrink.get("share", 1)
        return self.unchanged or (f"a repair, at {share:g} of its way from the base" if share != 1 else "")


@dataclass(frozen=True)
class CalibrationInfo(Chosen):
    """One calibration, as far as a reader without torch is concerned; its folder holds `config.yaml` with the rest.

    Attributes:
        settings: hyperparameters of `method`, all resolved.
        control: variant of the anchor by itself; empty where the anchor is the merged model, or there is none.
        seconds: what calibrating took, without the analysis behind it.
        sample_digests: of the ids of the calibration samples, in order, by task; of contents where modules are live.
        automatic: whether hyperparameters were chosen from the calibration samples.
        preset: published setting whose values all hyperparameters have; empty without, as in older runs.
        sites: patterns that the calibrated modules' paths match; none means linear and norm modules of `layers`.
        seed: with which the calibration samples were drawn; None in older runs.
        selection: how hyperparameters were chosen: what was `compared`, with held-out scores and advantages over the
            merged model, which is the `choice`, what was `kept`, `seconds`; empty where nothing was chosen.
        attached: how many numbers are attached to the merged model, over all tasks; then the task of an input must be
            known. 0 where weights themselves are calibrated.
        out_dtype: the number type that was asked for to save in; empty where it is the base's own.
        change: of the entries that were solved for, how many differ from the merged model's, and what the number type
            left of that (see `driftlens.utils.rounding.Change`); empty where none was, and in older runs.
        shrink: which share of the way from the base is kept, as it was `asked` for, and with `auto` the `curve` of
            held-out scores and drift by share, from which it was chosen; empty where nobody asked.
        found_out: by task the share of test samples whose task was found out, where nobody tells it and scores are so;
            empty where the task is known, or not asked for.
        views: which copies of the samples were read beside them, such as crop:3, by task; empty where none were asked.
    """

    method: str
    settings: Mapping[str, Any]
    control: str
    seconds: float
    samples: Mapping[str, int]
    sample_digests: Mapping[str, str] = field(default_factory=dict)
    layers: Sequence[int] = ()
    automatic: bool = False
    notices: Sequence[str] = ()
    preset: str = ""
    sites: Sequence[str] = ()
    seed: int | None = None
    selection: Mapping[str, Any] = field(default_factory=dict)
    attached: int = 0
    out_dtype: str = ""
    change: Mapping[str, Any] = field(default_factory=dict)
    views: Mapping[str, str] = field(default_factory=dict)
    shrink: Mapping[str, Any] = field(default_factory=dict)
    found_out: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """What a run says about itself; times are UTC.

    Attributes:
        id: the run's name and eight random hexadecimal digits.
        finished: empty until the run was finished.
        live: of a run of live modules its `settings`, and as `contents` what tells its data and heads from others;
            empty in runs from before, whose spec.yaml has both.
        synthetic: whether the data or models are drawn by code, so that the numbers are no benchmark.
        environment: environment variables that may change numbers.
        precision: largest relative error of the drift of a few samples against float64, by task, where measured.
        threads: thread counts by library; older runs also have those of phases.
        seeds: every seed, by what it draws.
        drawn_by: what else decides which samples are drawn; empty in older runs, where it was the same.
        deterministic: whether deterministic algorithms were asked for.
        unfinished: variants whose rows are still being written or removed; readers don't show them.
        calibrations: by name; the variant is `calibrated:NAME`.
        layers: of the chain, in forward order.
        architecture: adapter, loader, source, and settings that weights don't show (activation, eps, heads); of
            language models the tokenizer's digest and how rows are cut.
        preprocessing: which code made inputs of images or texts.
        models: by variant; experts as `expert:TASK`.
        changes: by expert, what it changes of the base, counted in entries (see `driftlens.utils.rounding.Change`);
            empty without a base, of live models and in older runs.
        merge: how the run made its merged model: method, title, source (paper), reads, parameters; empty where it was
            given, and in older runs.
        classes: class names by task, in the order of the head's rows.
        sample_ids: by split (calibration, diagnosis, test) and task, in the order of the rows.
        sample_id_digests: digest of each such list.
        sample_origins: what these are ids of: digest of the data behind them, by split and task; older runs have none.
        phases: by name, in the order of the work.
        files: by path relative to the run directory.
        rewriting: what those of the files that are just being replaced will be; until a writer has looked, they may
            be either.
        attached: scores that another tool has measured: variant, file, its digest, tool, tasks; by variant and file.
        warnings: what may spoil the numbers.
        notices: what a reader should know.
    """

    id: str
    name: str
    created: str
    finished: str = ""
    schema_version: str = SCHEMA_VERSION
    spec_digest: str = ""
    live: Mapping[str, Any] = field(default_factory=dict)
    synthetic: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    platform: Mapping[str, str | int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    dtype: str = ""
    precision: Mapping[str, float] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    drawn_by: str = ""
    deterministic: bool = False
    tasks: Sequence[str] = ()
    variants: Sequence[str] = ()
    unfinished: Sequence[str] = ()
    calibrations: Mapping[str, CalibrationInfo] = field(default_factory=dict)
    layers: Sequence[LayerInfo] = ()
    architecture: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: str = ""
    models: Mapping[str, ModelInfo] = field(default_factory=dict)
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    merge: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sample_ids: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    sample_id_digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sample_origins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    phases: Mapping[str, PhaseInfo] = field(default_factory=dict)
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    rewriting: Mapping[str, FileInfo] = field(default_factory=dict)
    attached: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    notices: Sequence[str] = ()


_PACKAGES = (
    *("torch", "torchvision", "numpy", "scipy", "pandas", "pyarrow", "safetensors"),
    *("scikit-learn", "transformers", "open_clip_torch", "peft", "datasets", "pillow", "plotly"),
    *("matplotlib", "umap-learn"),
)
_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "HF_HUB_OFFLINE"),
)
"""What numbers or thread counts may depend on besides a run's inputs."""


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that compute, write or add to DriftLens; nothing is imported."""
    packages = {package: version for package in _PACKAGES if (version := version_of(package))}
    own = {"driftlens": driftlens.__version__}
    return {"python": platform.python_version(), **own, **packages, **dict(map(origin, installed()))}


@functools.cache  # a package's metadata are read whole for it
def version_of(package: str) -> str | None:
    """The version of an installed package, which is not imported; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def new_manifest(name: str, spec_digest: str, live: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of a run that begins now on this machine."""
    machine = {"system": platform.system(), "release": platform.release(), "machine": platform.machine()}
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"
    return Manifest(
        id=f"{slug}-{secrets.token_hex(4)}",
        name=name,
        created=utc_now(),
        spec_digest=spec_digest,
        live=live or {},
        versions=versions(),
        platform={**machine, "processors": os.cpu_count() or 0},
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> None:
    """Replace the run's manifest, whole or not at all; it ends with a digest of itself."""
    record = as_plain(manifest)
    # Written hundreds of times a run: Python's own encoder takes five times as long where lines are to be indented.
    text = to_json({**record, "digest": _digest(record)}, indent=2).decode()
    write_text_atomic(folder / MANIFEST, f"{text}\n")


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest of the run in `folder`."""
    path = folder / MANIFEST
    try:
        manifest = as_declared(Manifest, _text(path))
    except ValueError as error:
        # First of all whether it is newer: what a later version writes may be of other kinds.
        refuse_newer(str(_record(path).get("schema_version", "")), path)
        raise _damaged(path, str(error)) from error
    refuse_newer(manifest.schema_version, path)
    return manifest


def manifest_is_intact(folder: pathlib.Path) -> bool:
    """Whether the manifest still has the digest it was written with."""
    record = _record(folder / MANIFEST)
    try:
        return bool(record.pop("digest", None) == _digest(record))
    except ValueError:  # a number that is none
        return False


LATER = ("calibrate:", "sweep:")
"""How phases begin that are no part of a run's own analysis."""


def is_phase_of(name: str, phase: str) -> bool:
    """Whether a phase of the run belongs to the calibration `name`."""
    return phase == f"calibrate:{name}" or phase.startswith(f"calibrate:{name}:")


def ids_digest(ids: Sequence[str]) -> str:
    """Digest of sample ids in their order, in hexadecimal."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _text(path: pathlib.Path) -> bytes:
    try:
        return plain_file(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        lacks = f"it has no {path.name}" if folder.is_dir() else "there is no such folder"
        raise RunError(
            f"{folder} is not a run: {'it is a file' if folder.is_file() else lacks}",
            hint="Give the folder that `driftlens analyze --out` or `driftlens demo` wrote.",
        ) from None
    except OSError as error:
        raise _damaged(path, str(error)) from error


def _record(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = from_json(_text(path))
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(record, dict):
        raise _damaged(path, f"an object expected, got {type(record).__name__}")
    return record


def _damaged(path: pathlib.Path, reason: str) -> RunError:
    return RunError(f"{path} is damaged: {reason}", hint="Restore it from a copy, or run the analysis again.")
