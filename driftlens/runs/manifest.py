"""A run directory's file names, manifest (inputs, settings, phases), status and owner. See `read_manifest`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import psutil
import pydantic_core
from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

import driftlens
from driftlens.runs.schema import SCHEMA_VERSION, refuse_newer_schema
from driftlens.utils.errors import RunError, RunLockedError, wrap_library_error
from driftlens.utils.files import parse_json, regular_file, write_text_atomic
from driftlens.utils.registry import installed_plugins, package_and_version
from driftlens.utils.variants import ADAPTERS, EMBEDDINGS, safe_file_name

MANIFEST = "manifest.json"
SPEC = "spec.yaml"
COMPARISON = "merges.json"
# The folder of a run that holds a comparison of other merges of its experts, where one was made.
MERGES = "merges"
STATUS = "status.json"
# Tags and a note of the user, see `driftlens.runs.notes`.
NOTES = "notes.json"
EVENTS = "events.jsonl"
# The event of a candidate that `--auto` has tried: `name`, `part`, `share` and held-out `score`.
CANDIDATE = "candidate"
LOCK = "run.lock"
# Empty file that the operating system locks; `run.lock` names the owner.
GUARD = "run.lock.guard"

# State of an interrupted job, removed when the job is done.
SCRATCH = "scratch"

# Everything DriftLens puts directly into a run directory.
ENTRIES = (
    *(MANIFEST, SPEC, STATUS, EVENTS, LOCK, GUARD, SCRATCH, MERGES, NOTES, "tables", "features", "models"),
    *("projections", "calibrations", "thumbs", "figures", "reports", "logs"),
)

# Entries that the manifest does not list, because they change while results don't.
VOLATILE = (MANIFEST, STATUS, EVENTS, LOCK, GUARD, SCRATCH, "logs", MERGES, NOTES)

# Height and width of a sample's picture, in pixels.
THUMB_SIDE = 64

# Largest number of pictures of one task.
MOST_THUMBS = 2000

# Characters of a sample's text that a run keeps; longer texts are cut in the middle.
LONGEST_TEXT = 1000

T = TypeVar("T")
PhaseState = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True)
class LayerInfo:
    """Index, role and module path of one layer; layer 1 is the stem (embedding), the last one the head."""

    index: int
    role: str
    path: str


@dataclass(frozen=True)
class ModelInfo:
    """Digest, number of parameters and source of one model's weights."""

    digest: str
    parameters: int
    source: str = ""


@dataclass(frozen=True)
class PhaseInfo:
    """State, duration and start time (UTC) of one phase of a run."""

    state: PhaseState
    seconds: float
    started: str


@dataclass(frozen=True)
class FileInfo:
    """SHA-256 digest and size of one file of a run."""

    sha256: str
    bytes: int


class SelectionResult:
    """The result of selecting among calibrations and unchanged models by held-out score."""

    selection: Mapping[str, Any]
    interpolation: Mapping[str, Any]

    @property
    def kept(self) -> str:
        """The model that was kept unchanged (`merged`, `base` or `merge`, another merge); "" for a calibration."""
        return str(self.selection.get("kept") or "")

    @property
    def unchanged_text(self) -> str:
        """A description of the model that was kept because no calibration was better; "" for a calibration."""
        share = self.interpolation.get("share", 1)
        way = "" if share == 1 else f", at {share:g} of its way from the base"
        none = "no repair was clearly better" if not way else "no repair was nearer to the experts"
        merge_title = self.selection.get("merge", {}).get("title", "")
        return {
            "base": "the base, unchanged: don't use the merge",
            "merged": f"the merged model, {way.strip(', ') or 'unchanged'}: {none}",
            "merge": f"another merge of the same experts, by {merge_title}{way}: no repair was nearer to the experts",
        }.get(self.kept, "")

    @property
    def model_description(self) -> str:
        """A description of the selected model: base, merge or calibration, with its interpolation factor."""
        share = self.interpolation.get("share", 1)
        return self.unchanged_text or (f"a repair, at {share:g} of its way from the base" if share != 1 else "")


@dataclass(frozen=True)
class CalibrationInfo(SelectionResult):
    """The manifest entry of one calibration: method, settings, samples, duration and selection.

    Attributes:
        control: variant of the anchor alone; empty if the anchor is the merged model, or there is none.
        seconds: time without the analysis that follows.
        sample_digests: by task, of the ordered ids of the calibration samples; for live modules of their contents.
        automatic: True if settings were chosen on the calibration samples.
        preset: published setting that all settings equal; empty otherwise, and in older runs.
        sites: patterns for paths of calibrated modules; empty means linear and norm modules of `layers`.
        seed: of the sampling; None in older runs.
        selection: the choice of settings: `compared` with held-out scores and advantages over the merged model,
            `choice`, `kept`, `seconds`; empty without a choice.
        attached: number of added parameters, which require the task of an input; 0 if the weights are calibrated.
        out_dtype: requested number type of the saved weights; empty for the base's own.
        change: fields of `ModelChange` for the solved entries; empty if none were solved, and in older runs.
        interpolation: factor between base (0) and repair (1): as `asked` for and, if chosen automatically, the
            `curve` of held-out scores and drift over factors; empty without interpolation.
        found_out: share of test samples whose task was classified correctly, by task; empty if the task is known.
        views: augmented copies of the samples that were used in addition, such as crop:3, by task.
        adapter: the last LoRA adapters saved from it: rank, `kept` (share of the linear modules' change, by squared
            Frobenius norm), numbers of modules in `low_rank` and saved `whole`, bytes, and by task in `tasks` score and
            relative drift, next to those of the repair; empty without.
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
    # Older runs call it `shrink`.
    interpolation: Annotated[Mapping[str, Any], Field(validation_alias=AliasChoices("interpolation", "shrink"))] = (
        field(default_factory=dict)
    )
    found_out: Mapping[str, float] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The manifest of a run: inputs, settings, models, phases and files. Times are UTC.

    Attributes:
        id: the run's name and eight random hexadecimal digits.
        finished: empty until the run was finished.
        live: `settings` of a run of live modules, and as `contents` the identity of its data and heads; empty in older
            runs, whose spec.yaml has both.
        synthetic: True if data or models are generated by code.
        environment: environment variables that may change numbers.
        precision: largest relative error of the drift of a few samples against float64, by task, if measured.
        threads: thread counts by library; older runs also have those of phases.
        seeds: by purpose.
        drawn_by: further rule that decides which samples are taken; empty in older runs.
        unfinished: variants whose rows are still being written or removed; readers hide them.
        architecture: adapter, loader, source, and settings that weights don't show (activation, eps, heads); for
            language models also the tokenizer's digest and how rows are cut; `experts` if all are LoRA adapters.
        preprocessing: the code that made inputs of images or texts.
        models: by variant; experts as `expert:TASK`.
        changes: fields of `ModelChange` by expert; empty without a base, for live models and in older runs.
        merge: method, title, source (paper), reads, parameters; empty if the merged model was given, and in older runs.
        classes: class names by task, in the order of the head's rows.
        sample_ids: by split (calibration, diagnosis, test) and task, in the order of the rows.
        sample_id_digests: digest of each such list.
        sample_origins: digest of the data behind the ids, by split and task; empty in older runs.
        phases: by name, in the order of the work.
        files: by path relative to the run directory.
        rewriting: new entries of files that are being replaced; either entry may be valid.
        pinned: name of the calibration that headline, exhibits and cards show; empty for the best one.
        attached: scores measured by other tools: variant, file, its digest, tool, tasks; by variant and file.
        warnings: facts that may invalidate the numbers.
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
    pinned: str = ""
    attached: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    notices: Sequence[str] = ()

    @property
    def model_kinds(self) -> tuple[str, ...]:
        """The kinds of its models that presets of calibrators suit, the narrowest first: the loader is the last."""
        loader = str(self.architecture.get("loader", ""))
        embeds, adapted = "embedding" in self.architecture, self.architecture.get("experts") == ADAPTERS
        return (*[EMBEDDINGS] * embeds, *[f"{loader}, {ADAPTERS}"] * adapted, loader)


_PACKAGES = (
    *("torch", "torchvision", "numpy", "scipy", "pandas", "pyarrow", "safetensors"),
    *("scikit-learn", "transformers", "open_clip_torch", "peft", "datasets", "pillow", "plotly"),
    *("matplotlib", "umap-learn"),
)
# Environment variables that numbers or thread counts may depend on.
_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "HF_HUB_OFFLINE"),
)


def package_versions() -> dict[str, str]:
    """Return the versions of Python, of numerical packages and of plug-ins, without importing them."""
    packages = {package: version for package in _PACKAGES if (version := package_version(package))}
    own = {"driftlens": package_version("driftlens-merge") or driftlens.__version__}
    return {
        "python": platform.python_version(),
        **own,
        **packages,
        **dict(map(package_and_version, installed_plugins())),
    }


# It reads all metadata of a package.
@functools.cache
def package_version(package: str) -> str | None:
    """Return the version of an installed package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def new_manifest(name: str, spec_digest: str, live: Mapping[str, Any] | None = None) -> Manifest:
    """Create the manifest of a new run on this machine.

    Args:
        name: the run's name.
        spec_digest: digest of the spec.
        live: settings and contents of a run of live modules.
    """
    machine = {"system": platform.system(), "release": platform.release(), "machine": platform.machine()}
    # Ids become parts of file names and URLs.
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"
    return Manifest(
        id=f"{slug}-{secrets.token_hex(4)}",
        name=name,
        created=utc_now(),
        spec_digest=spec_digest,
        live=live or {},
        versions=package_versions(),
        platform={**machine, "processors": os.cpu_count() or 0},
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> None:
    """Write the manifest of a run atomically, with a digest of its content."""
    record = to_json_dict(manifest)
    # Written hundreds of times per run: Python's own encoder takes five times as long with indentation.
    text = to_json({**record, "digest": _record_digest(record)}, indent=2).decode()
    write_text_atomic(folder / MANIFEST, f"{text}\n")


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Read the manifest of the run in `folder`; raise a `RunError` if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        manifest = _parse_dataclass(Manifest, _read_run_file(path))
    except ValueError as error:
        # A newer schema explains the error better: it may use other types.
        refuse_newer_schema(str(_read_json_object(path).get("schema_version", "")), path)
        raise _damaged_file_error(path, str(error)) from error
    refuse_newer_schema(manifest.schema_version, path)
    return manifest


def manifest_is_intact(folder: pathlib.Path) -> bool:
    """Return True if the manifest matches its own digest."""
    record = _read_json_object(folder / MANIFEST)
    try:
        return bool(record.pop("digest", None) == _record_digest(record))
    except ValueError:
        # NaN or infinity.
        return False


def sample_ids_digest(ids: Sequence[str]) -> str:
    """Return the SHA-256 digest of an ordered list of sample ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def _record_digest(record: Mapping[str, Any]) -> str:
    # Sorted keys: reading and writing again must not change the digest.
    return hashlib.sha256(json.dumps(record, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _read_run_file(path: pathlib.Path) -> bytes:
    try:
        return regular_file(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        lacks = f"it has no {path.name}" if folder.is_dir() else "there is no such folder"
        raise RunError(
            f"{folder} is not a run: {'it is a file' if folder.is_file() else lacks}",
            hint="Give the folder that `driftlens analyze --out` or `driftlens demo` wrote.",
        ) from None
    except OSError as error:
        raise _damaged_file_error(path, str(error)) from error


def _read_json_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = parse_json(_read_run_file(path))
    except ValueError as error:
        raise _damaged_file_error(path, str(error)) from error
    if not isinstance(record, dict):
        raise _damaged_file_error(path, f"an object expected, got {type(record).__name__}")
    return record


def _damaged_file_error(path: pathlib.Path, reason: str) -> RunError:
    return RunError(f"{path} is damaged: {reason}", hint="Restore it from a copy, or run the analysis again.")


# Creating an adapter takes longer than reading a manifest.
_adapter_of: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def _parse_dataclass(kind: type[T], text: bytes) -> T:
    """Parse JSON strictly into a dataclass, except for unknown keys; raise a ValueError if it does not match."""
    # Fields of type Any would accept NaN, which can't be written again.
    pydantic_core.from_json(text, allow_inf_nan=False)
    try:
        return cast("T", _adapter_of(kind).validate_json(text, strict=True))
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        reason = "expected an object" if details["type"] == "dataclass_type" else details["msg"]
        problem = f"{reason[:1].lower()}{reason[1:]}, got {details['input']!r:.80}"
        raise ValueError(": ".join([*filter(None, [".".join(map(str, details["loc"]))]), problem])) from None


def to_json_dict(record: object) -> dict[str, Any]:
    """Convert a dataclass into a dict of JSON values."""
    return dict(_adapter_of(type(record)).dump_python(record, mode="json"))


def utc_now() -> str:
    """Return the current UTC time in ISO 8601 format with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Paths relative to the run directory.
def table_file(name: str) -> str:
    """Return the path of a table, relative to the run directory."""
    return f"tables/{name}.parquet"


def feature_file(task: str, variant: str, layer: int) -> str:
    """Return the path of the stored features of one task, variant and layer, relative to the run directory.

    Args:
        task: name of the task.
        variant: name of the variant, "expert" for the task's own.
        layer: index of the layer, 1 the stem.
    """
    return f"{feature_folder(task, variant)}/{layer:03d}.npy"


def feature_folder(task: str, variant: str) -> str:
    """Return the folder of the stored features of one task and variant, relative to the run directory."""
    return f"features/{safe_file_name(task)}/{safe_file_name(variant)}"


def thumbs_file(task: str) -> str:
    """Return the path of the thumbnails of a task's diagnosis samples, relative to the run directory."""
    return f"thumbs/{safe_file_name(task)}.npz"


def texts_file(task: str) -> str:
    """Return the path of the texts of a task's diagnosis samples, relative to the run directory."""
    return f"thumbs/{safe_file_name(task)}.json"


def calibration_folder(name: str) -> str:
    """Return the folder of a calibration, relative to the run directory."""
    return f"calibrations/{safe_file_name(name)}"


def calibrated_weights_file(name: str, *, control: bool = False) -> str:
    """Return the path of the calibrated weights, or of the control's weights, relative to the run directory."""
    return f"{calibration_folder(name)}/{'anchor' if control else 'weights'}.safetensors"


def corrections_file(name: str) -> str:
    """Return the path of the correction modules that a calibration adds, relative to the run directory."""
    return f"{calibration_folder(name)}/attachments.safetensors"


def calibration_marker(name: str) -> str:
    """Return the path of the settings file that exists while a calibration is unfinished."""
    return f"{SCRATCH}/calibrate-{safe_file_name(name)}/settings.json"


def sample_ids_file(task: str) -> str:
    """Return the path of the sample ids of a task's features, one id per row, relative to the run directory."""
    return f"features/{safe_file_name(task)}/sample_ids.json"


_FRESH_SECONDS = 60.0

# Largest difference in seconds between two readings of a start time, which the system derives from its boot
# time.
_CLOCK_TOLERANCE = 2.0


def _require_time_zone(moment: str) -> str:
    if moment and datetime.fromisoformat(moment).tzinfo is None:
        raise ValueError("a time without a time zone")
    return moment


_Moment = Annotated[str, AfterValidator(_require_time_zone)]

_Whole = Annotated[int, Field(lt=2**63)]


@dataclass(frozen=True)
class LockOwner:
    """The process that writes to a run (id, start time, host), with its last heartbeat (UTC)."""

    pid: Annotated[int, Field(gt=0, lt=2**31)]
    process_started: float | None
    host: str
    heartbeat: Annotated[_Moment, Field(min_length=1)]

    @classmethod
    def this_process(cls) -> LockOwner:
        """Describe the current process, with a fresh heartbeat."""
        return cls(os.getpid(), process_start_time(os.getpid()), platform.node(), utc_now())

    @property
    def is_alive(self) -> bool:
        """True if the process runs on this machine, or has a fresh heartbeat on another one."""
        if self.host != platform.node():
            # A process on another machine can't be looked up; only its heartbeat shows that it runs.
            silence = datetime.now(UTC) - datetime.fromisoformat(self.heartbeat)
            return silence.total_seconds() < _FRESH_SECONDS
        # The id alone does not identify a process: the system reuses ids.
        started = process_start_time(self.pid)
        if started is None or self.process_started is None:
            return False
        return abs(started - self.process_started) < _CLOCK_TOLERANCE

    def __str__(self) -> str:
        where = "" if self.host == platform.node() else f" on {self.host}"
        return f"process {self.pid}{where}"


def read_lock_owner(folder: pathlib.Path) -> LockOwner | None:
    """Read from the lock file which process writes to the run, dead or alive; None if the file is not valid."""
    try:
        return _parse_dataclass(LockOwner, regular_file(folder / LOCK).read_bytes())
    except (OSError, ValueError):
        return None


def live_lock_owner(folder: pathlib.Path) -> LockOwner | None:
    """Return the live process that writes to the run; None if there is none."""
    owner = read_lock_owner(folder)
    return owner if owner is not None and owner.is_alive else None


def require_unlocked(folder: pathlib.Path) -> None:
    """Raise a `RunLockedError` if a live process is writing to the run."""
    owner = live_lock_owner(folder)
    if owner is not None:
        raise run_locked_error(folder, owner)


def run_locked_error(folder: pathlib.Path, owner: LockOwner | None) -> RunLockedError:
    """Build the error that another process is writing to the run."""
    hint = "Try again when it has finished, or stop it."
    # The state of a process on another machine is unknown, and its clock may differ.
    if owner is not None and owner.host != platform.node():
        hint = (
            f"Wait for it, or stop it there. Last heartbeat, by its clock: {owner.heartbeat}. If the process has "
            f"ended, remove {folder / LOCK}."
        )
    return RunLockedError(
        f"{folder} is being written to by {owner or 'another process'}",
        hint=hint,
        pid=None if owner is None else owner.pid,
    )


def process_start_time(pid: int) -> float | None:
    """Return the start time of a process in seconds; None if the process does not exist."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        with contextlib.suppress(OSError, IndexError, ValueError):
            # From the boot of the machine, because setting the clock must not make it look like another process.
            # Field 22, counted from the end of the name, which may contain spaces and brackets.
            fields = pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return float(process.create_time())
    except psutil.Error:
        return None


State = Literal["queued", "running", "cancelling", "cancelled", "failed", "done"]


@dataclass(frozen=True)
class RunFailure:
    """The error that ended a run: type, message and hint."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    type: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> RunFailure:
        """Build the record of an exception."""
        described = wrap_library_error(error)
        message, hint = (described.message, described.hint) if described is not None else (str(error), "")
        return cls(type(error).__name__, message, hint)


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and the progress of its phase: `done` of `total` units (None: unknown) after `seconds`.

    It was written at `heartbeat` (UTC) by the process `pid`. Of `metrics`, those that are not finite are None.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"allow_inf_nan": False}

    state: State
    phase: str = ""
    done: _Whole = 0
    total: _Whole | None = None
    label: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    heartbeat: _Moment = ""
    pid: _Whole = 0
    error: RunFailure | None = None


def read_status(folder: pathlib.Path) -> RunStatus | None:
    """Read the status.json of a run; return None if there is none."""
    path = folder / STATUS
    try:
        return _parse_dataclass(RunStatus, regular_file(path).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} can't be read: {error}", hint="Remove it; the results do not depend on it.") from error
