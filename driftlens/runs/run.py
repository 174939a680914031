"""Saved runs, read-only: tables as tidy frames, features memory-mapped, without torch. Entry point: `open_run`."""

from __future__ import annotations

import difflib
import functools
import pathlib
import shlex
import tokenize
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.runs import schema
from driftlens.runs.manifest import (
    STATUS,
    THUMB_SIDE,
    CalibrationInfo,
    Manifest,
    RunStatus,
    calibration_marker,
    feature_file,
    live_lock_owner,
    read_manifest,
    read_status,
    table_file,
    texts_file,
    thumbs_file,
)
from driftlens.runs.tables import DAMAGED, empty_frame, read_table, stored_columns
from driftlens.utils.errors import (
    DataError,
    LayerNotFoundError,
    RunError,
    add_error_context,
    did_you_mean,
    shorten_list,
)
from driftlens.utils.files import PathLike, parse_json, regular_file
from driftlens.utils.registry import ColumnSchema
from driftlens.utils.variants import calibrated_variant, calibration_name, variant_kind

P = ParamSpec("P")
T = TypeVar("T")


def cache_on_run(work: Callable[Concatenate[DriftRun, P], T]) -> Callable[Concatenate[DriftRun, P], T]:
    """Cache the results of a function on the run that is its first argument; arguments must be hashable."""

    @functools.wraps(work)
    def _cached_result(run: DriftRun, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (work, args, *kwargs.items())
        if key not in run._answers:
            run._answers[key] = work(run, *args, **kwargs)
        return cast("T", run._answers[key])

    return _cached_result


def open_run(path: PathLike) -> DriftRun:
    """Open the run in the directory `path`, read-only; tables are loaded on first use.

    Raises:
        RunError: there is no run, or its manifest is damaged.
        SchemaTooNewError: a newer DriftLens wrote it.
    """
    return DriftRun.at(path)


class _ColumnUnits(dict[str, str]):
    """Units by column; not copied, because pandas deep-copies the attributes of a frame with every slice."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


class DriftRun:
    """A saved run, read-only. Tables are loaded on first use; returned frames are copies.

    Attributes:
        path: the run directory.
        manifest: the run's manifest, as of when the run was opened.
    """

    def __init__(self, path: pathlib.Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._frames: dict[str, pd.DataFrame] = {}
        self._places: dict[str, Mapping[Any, Any]] = {}
        self._answers: dict[Hashable, Any] = {}

    @classmethod
    def at(cls, path: PathLike) -> Self:
        """Open the run in a directory; raise the errors of `open_run`."""
        folder = pathlib.Path(path)
        return cls(folder, read_manifest(folder))

    @property
    def id(self) -> str:
        """The run's unique id."""
        return self.manifest.id

    @property
    def name(self) -> str:
        """The name of the run, given by the user."""
        return self.manifest.name

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of the run, in order."""
        return tuple(self.manifest.tasks)

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants of the run, in the order in which they were added."""
        return tuple(self.manifest.variants)

    @property
    def roles(self) -> dict[str, str]:
        """The role of every variant, in the order of `variants`: the method of a calibration, or the variant's kind."""
        calibrated = {
            calibrated_variant(name): info.method for name, info in self.manifest.calibrations.items() if not info.kept
        }
        return {variant: calibrated.get(variant, variant_kind(variant)) for variant in self.variants}

    @property
    def status(self) -> RunStatus | None:
        """The current status of the run, from status.json; None if there is no such file."""
        return read_status(self.path)

    def layers(
        self, task: str | None = None, variant: str | None = None, layer: int | str | None = None
    ) -> pd.DataFrame:
        """Return rows of the layer table: drift, local mismatch and propagation after each layer.

        Args:
            task: only this task.
            variant: only this variant.
            layer: only this layer: its index (1 the stem), "final", or its module path.

        Raises:
            DataError: the run has no such task or variant; the message lists those it has.
            LayerNotFoundError: it has no such layer; the message lists the nearest.
            RunError: the table can't be read.
        """
        return self._select_rows(schema.LAYERS, task=task, variant=variant, layer=layer)

    def samples(
        self, task: str | None = None, variant: str | None = None, layer: int | str | None = None
    ) -> pd.DataFrame:
        """Return rows of the sample table: drift of single samples by layer.

        Args:
            task: only this task.
            variant: only this variant.
            layer: only this layer, as for `layers`.
        """
        return self._select_rows(schema.SAMPLES, task=task, variant=variant, layer=layer)

    def outputs(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Return rows of the output table: scores and prediction of single samples. Arguments as for `layers`."""
        return self._select_rows(schema.OUTPUTS, task=task, variant=variant)

    def adjoint(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Return rows of the adjoint table: each layer's share of a sample's change of loss, margin or feature.

        Empty unless the run measured them (`metrics.adjoint`). Arguments and errors as for `layers`.
        """
        return self._select_rows(schema.ADJOINT, task=task, variant=variant)

    def routing(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Return rows of the routing table: tokens per expert of a mixture of experts. Arguments as for `layers`."""
        return self._select_rows(schema.ROUTING, task=task, variant=variant)

    def params(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Return rows of the parameter table: similarity of task vectors. Arguments as for `layers`."""
        return self._select_rows(schema.PARAMS, task=task, variant=variant)

    def accuracy(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Return rows of the accuracy table: scores with intervals. Arguments as for `layers`."""
        return self._select_rows(schema.ACCURACY, task=task, variant=variant)

    def scores(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Return rows of the score table: the score of each test sample, by metric. Arguments as for `layers`."""
        return self._select_rows(schema.SCORES, task=task, variant=variant)

    def calibration(self, name: str | None = None) -> pd.DataFrame:
        """Return the calibration log, one row per calibrated module, of all calibrations or of `name`."""
        rows = self._select_rows(schema.CALIBRATION)
        if name is None:
            return rows
        self._require_known_name("calibration", name, [*self.manifest.calibrations, *rows["name"]])
        return rows[rows["name"] == name].reset_index(drop=True)

    def calibration_info(self, name: str) -> CalibrationInfo:
        """Return the manifest entry of a finished calibration; raise a `DataError` if there is none of that name."""
        self._require_known_name("calibration", name, self.manifest.calibrations)
        return self.manifest.calibrations[name]

    def sweeps(self) -> pd.DataFrame:
        """Return the sweep table: one row per setting, seed and task."""
        return self._select_rows(schema.SWEEPS)

    def resources(self) -> pd.DataFrame:
        """Return time, memory and energy of each phase of the run."""
        return self._select_rows(schema.RESOURCES)

    def value(self, column: str, *, task: str, variant: str = "merged", layer: int | str = "final") -> float:
        """Return one number of the layer table by column, task, variant and layer; NaN if it was not measured.

        Args:
            column: name of a numeric column.
            task: the row's task.
            variant: the row's variant.
            layer: the row's layer, as for `layers`.

        Raises:
            DataError: the table has no such column or row.
        """
        numbers = [entry.name for entry in schema.LAYERS.columns if entry.dtype in ("int", "float")]
        if column not in numbers:
            hint = did_you_mean(column, numbers)
            raise DataError(f"the layer table has no number called {column!r}", hint=hint)
        rows = self.layers(task, variant, layer)
        if rows.empty:
            raise DataError(
                f"the layer table has no row for task {task!r}, variant {variant!r}, layer {layer!r}",
                hint="The expert has no rows; `layers.select` in the spec selects blocks.",
            )
        # NA of a nullable integer can't become a float; cast first, it is NaN.
        return float(rows[column].astype("float64").iloc[0])

    def features(self, task: str, variant: str, layer: int | str) -> NDArray[np.floating[Any]]:
        """Return features `[n, d]` of one task, variant and layer, memory-mapped.

        Rows are the samples of `sample_ids(task, "diagnosis")`; float16, or float32 if that overflows.

        Args:
            task: the samples' task.
            variant: the model, "expert" for the task's own.
            layer: index, "final" or module path, as for `layers`.

        Raises:
            DataError: these features are not stored.
            RunError: the file can't be read.
        """
        self._require_known_name("task", task)
        self._require_known_name("variant", variant)
        relative = feature_file(task, variant, self.layer_index(layer))
        path = self.path / relative
        if not path.exists() and relative not in self.manifest.files:
            raise DataError(
                f"features of task {task!r}, variant {variant!r}, layer {layer!r} are not stored",
                hint="Choose the layers to store with `layers.select` in the spec.",
            )
        try:
            # Without pickle: unpickling an array of an untrusted run could execute code.
            return cast("NDArray[Any]", np.load(regular_file(path), mmap_mode="r", allow_pickle=False))
        # numpy splits a header into Python's tokens.
        except (OSError, ValueError, EOFError, tokenize.TokenError) as error:
            raise RunError(f"{path} can't be read: {error}", hint=DAMAGED) from error

    def thumbs(self, task: str) -> NDArray[np.uint8] | None:
        """Return thumbnails `[n, side, side, 3]` of a task's diagnosis samples; None if the inputs are no images."""
        path = self.path / thumbs_file(task)
        if not path.is_file():
            return None
        side = THUMB_SIDE
        with add_error_context(path), np.load(path, allow_pickle=False) as stored:
            pictures: NDArray[np.uint8] = stored["pictures"].reshape(-1, side, side, 3)
        return pictures

    def texts(self, task: str) -> dict[str, str]:
        """Return the input texts of a task's diagnosis samples by sample id; empty if the inputs are no texts."""
        path = self.path / texts_file(task)
        if not path.is_file():
            return {}
        with add_error_context(path):
            content = parse_json(path.read_text(encoding="utf-8"))
            return {str(name): str(text) for name, text in content.items()}

    def sample_ids(self, task: str, split: str = "diagnosis") -> tuple[str, ...]:
        """Return the ids of a task's samples in a split (calibration, diagnosis or test), in stored order."""
        self._require_known_name("task", task)
        splits = [name for name, tasks in self.manifest.sample_ids.items() if task in tasks]
        if split not in splits:
            recorded = f"recorded splits: {', '.join(splits) or 'none'}"
            raise DataError(f"no {split!r} samples of task {task!r} are recorded; {recorded}")
        return tuple(self.manifest.sample_ids[split][task])

    def layer_index(self, layer: int | str) -> int:
        """Return the index of a layer given as index, "final" or module path."""
        indices = {entry.path: entry.index for entry in self.manifest.layers}
        last = max(indices.values(), default=0)
        if layer == "final" and last:
            return last
        # Module paths come before indices, because a path may consist of digits.
        if isinstance(layer, str) and layer in indices:
            return indices[layer]
        if not isinstance(layer, str) and 1 <= layer <= last:
            return int(layer)
        near = difflib.get_close_matches(str(layer), indices, n=3, cutoff=0.0)
        raise LayerNotFoundError(
            f"the run has no layer {layer!r}; it has 1 (stem) to {last} (head)",
            hint=f"Nearest module paths: {', '.join(near)}." if near else "It lists no layers yet.",
        )

    @cache_on_run
    def layer_name(self, layer: int) -> str:
        """Return the display name of a layer, such as "block 5 (layer 7 of 8)"."""
        paths = {entry.index: entry.path for entry in self.manifest.layers}
        blocks = [entry.path for entry in self.manifest.layers if entry.role == "block"]
        path = paths.get(layer, "")
        if path in blocks and path.rpartition(".")[2] == str(blocks.index(path)):
            path = f"block {blocks.index(path)}"
        return f"{path} (layer {layer} of {len(paths)})"

    def frame(self, table: str) -> pd.DataFrame:
        """Return a whole table by name, for plotting: tasks, variants and paths are categories in the run's order."""
        if table not in schema.TABLES:
            raise DataError(f"a run has no table {table!r}", hint=did_you_mean(table, schema.TABLES))
        rows = self._select_rows(schema.TABLES[table])
        paths = [entry.path for entry in sorted(self.manifest.layers, key=lambda entry: entry.index)]
        ranks = {"task": self.tasks, "variant": ("base", "expert", *self.variants), "path": paths}
        for name in rows.columns.intersection([*ranks]):
            order = dict.fromkeys([*ranks[name], *rows[name].dropna()])
            rows[name] = pd.Categorical(rows[name], [*order], ordered=True)
        return rows

    def __repr__(self) -> str:
        tasks, variants = (shorten_list([f"{name!r:.24}" for name in names]) for names in (self.tasks, self.variants))
        return f"<DriftRun {str(self.path)!r}:\n  tasks {tasks};\n  variants {variants}>"

    def columns(self, table: str) -> tuple[ColumnSchema, ...]:
        """Return the column schemas of a table, including columns that diagnostics added to this run."""
        declared = schema.TABLES[table]
        return declared.with_columns(stored_columns(self.path / table_file(table), declared)).columns

    def _select_rows(self, table: schema.TableSchema, **filters: Any) -> pd.DataFrame:
        frame = self._load_table(table)
        filters = {column: value for column, value in filters.items() if value is not None}
        places = np.arange(len(frame))
        if {"task", "variant"} <= set(filters) and len(frame):
            both = filters.pop("task"), filters.pop("variant")
            # Checked here, because a pair without rows is no error, while a misspelt name is.
            for column, value in zip(("task", "variant"), both, strict=True):
                self._require_known_name(column, value)
            # Comparing text in every row for each query would take most of a report's time.
            if table.name not in self._places:
                self._places[table.name] = frame.groupby(["task", "variant"], sort=False).indices
            places = self._places[table.name].get(both, places[:0])
        for column, value in filters.items():
            if column == "layer":
                value = self.layer_index(value)
            else:
                self._require_known_name(column, value)
            places = places[(frame[column].take(places) == value).to_numpy(dtype=bool)]
        return (frame.take(places) if len(places) < len(frame) else frame).reset_index(drop=True)

    def _load_table(self, table: schema.TableSchema) -> pd.DataFrame:
        if table.name not in self._frames:
            relative = table_file(table.name)
            # Written tables are listed, so one that is neither listed nor present was never computed.
            is_absent = relative not in self.manifest.files and not (self.path / relative).exists()
            rows = empty_frame(table) if is_absent else read_table(self.path / relative, table)
            # A copy stores columns of one type in one block, which halves the time of taking rows.
            rows = rows.copy()
            # Variants that are still being written or removed.
            hidden = list(self.manifest.unfinished)
            if "variant" in rows:
                rows = rows[~rows["variant"].isin(hidden)].reset_index(drop=True)
            elif table is schema.CALIBRATION:
                rows = rows[~rows["name"].map(calibrated_variant).isin(hidden)].reset_index(drop=True)
            rows.attrs["units"] = _ColumnUnits({column.name: column.unit for column in self.columns(table.name)})
            self._frames[table.name] = rows
        return self._frames[table.name]

    def _require_known_name(self, kind: str, name: str, allowed: Iterable[str] | None = None) -> None:
        if allowed is None:
            allowed = self.tasks if kind == "task" else (*self.variants, "expert")
        names = list(dict.fromkeys(allowed))
        if name not in names:
            available = f"it has {', '.join(names) or 'none'}"
            raise DataError(f"the run has no {kind} {name!r}; {available}", hint=did_you_mean(name, names))


# Key of the command line's options in the settings file of an unfinished calibration.
COMMAND = "command"


def current_state(run: DriftRun) -> str:
    """Return the state of a run: "done" if its analysis is finished, "running" while a process works on it."""
    state, _ = last_job_state(run)
    ended_early = state in ("cancelled", "failed", "stopped", "unknown")
    return "done" if ended_early and is_analyzed(run.manifest) else state


def last_job_state(run: DriftRun) -> tuple[str, str]:
    """Return the state of the last job on the run, and the reason if its status.json is damaged, else "".

    The state is "stopped" if the job is unfinished and its process is gone, "unknown" without status and process.
    """
    return _status_and_state(run)[1:]


def unfinished_work(run: DriftRun) -> tuple[str, ...]:
    """Describe jobs on a finished run that ended early, and how to resume them, one sentence each."""
    status, state, damage = _status_and_state(run)
    if damage:
        return (damage,)
    if state in ("running", "cancelling") or not is_analyzed(run.manifest):
        return ()
    begun = _unfinished_calibrations(run)
    if begun or state in ("done", "unknown"):
        ways = {name: resume_hint(run.path, name, run.manifest) for name in begun}
        return tuple(f"calibration {name!r} is unfinished; {way}" for name, way in ways.items())
    failure = status.error if status is not None else None
    reason = f": {failure.message}" if failure is not None and failure.message != state else ""
    return (f"the last job on it ended early ({state}{reason}); earlier results are complete",)


# Phases that come after the analysis of a run.
_LATER = ("calibrate:", "sweep:", "explain:")


def is_analyzed(manifest: Manifest) -> bool:
    """Return True if the analysis of the run is finished; attribution may be missing."""
    phases = [phase for name, phase in manifest.phases.items() if not name.startswith(_LATER)]
    return bool(manifest.finished) and all(phase.state == "done" for phase in phases)


def unfinished_phases(manifest: Manifest) -> list[str]:
    """List the unfinished phases of the analysis, and of the evaluation unless the run was finished without it."""
    kinds = ("analyze",) if manifest.finished else ("analyze", "evaluate")
    phases = [f"{kind}:{task}" for kind in kinds for task in manifest.tasks]
    return [name for name in phases if name not in manifest.phases or manifest.phases[name].state != "done"]


def require_analyzed(folder: pathlib.Path) -> None:
    """Raise a `RunError` if the analysis of the run is unfinished."""
    manifest = read_manifest(folder)
    missing = unfinished_phases(manifest)
    # Else taking the lock reports the owner.
    if missing and live_lock_owner(folder) is None:
        raise RunError(
            f"{folder} is unfinished; missing: {', '.join(missing)}",
            hint=f"`{resume_command(folder, manifest)}` resumes it, including accuracy.",
        )


def _unfinished_calibrations(run: DriftRun) -> list[str]:
    """List the calibrations that were started but not finished."""
    unfinished = [*filter(None, map(calibration_name, run.manifest.unfinished))]
    started = [name.split(":")[1] for name in run.manifest.phases if name.startswith("calibrate:")]
    chosen = [name for name in started if (run.path / calibration_marker(name)).is_file()]
    return [*dict.fromkeys([*unfinished, *chosen])]


def resume_hint(folder: pathlib.Path, name: str, manifest: Manifest) -> str:
    """Return a sentence that says how to resume an unfinished calibration.

    Args:
        folder: the run's folder.
        name: name of the calibration, which may replace a finished one.
        manifest: the run's manifest.
    """
    is_replacing = name in manifest.calibrations
    if has_live_modules(manifest):
        both = f"name={name!r}, {'replace=True, ' if is_replacing else ''}resume=True"
        return f"`run.calibrate(..., {both})` with the same modules and settings resumes it"
    words = _recorded_options(folder / calibration_marker(name))
    flags = [*(words or ()), *["--replace"] * is_replacing, "--resume"]
    command = shlex.join(["driftlens", "calibrate", str(folder), "--name", name, *flags])
    same = " with the same settings" if words is None else ""
    return f"`{command}`{same} resumes it, without --resume it starts again"


def save_hint(folder: pathlib.Path, name: str, manifest: Manifest, *words: str) -> str:
    """Return a sentence that says how to save a calibrated model as a checkpoint in the format of its base.

    Args:
        folder: the run's folder.
        name: name of the calibration.
        manifest: the run's manifest.
        words: further options of the command.
    """
    if has_live_modules(manifest):
        return f"`run.calibrate(..., name={name!r}, save_weights=...)` with the same settings saves it"
    command = shlex.join(["driftlens", "calibrate", str(folder), "--name", name, *words, "--save-weights"])
    return f"`{command} FOLDER` saves it for its own library"


def _recorded_options(begun: pathlib.Path) -> list[str] | None:
    """Return the command-line options of an unfinished calibration; None if they were not recorded."""
    try:
        return [str(word) for word in parse_json(begun.read_bytes())[COMMAND]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def has_live_modules(manifest: Manifest) -> bool:
    """Return True if the run was made from modules in memory, which no command can load again."""
    return bool(manifest.architecture.get("loader") == "live")


def resume_command(folder: pathlib.Path, manifest: Manifest | None = None) -> str:
    """Return the command, or for modules in memory the call, that resumes an unfinished analysis."""
    if manifest is not None and has_live_modules(manifest):
        return "dl.analyze(..., resume=True)"
    folder_name = shlex.quote(str(folder))
    return f"driftlens analyze {folder_name}/spec.yaml --out {folder_name} --resume"


def _status_and_state(run: DriftRun) -> tuple[RunStatus | None, str, str]:
    """Return the status of a run, its state, and a description of damage to status.json."""
    status, damage = None, ""
    try:
        status = run.status
    except RunError as error:
        damage = f"{error.message.replace(str(run.path / STATUS), STATUS)}. {error.hint}"
    if status is not None and status.state not in ("running", "cancelling"):
        return status, status.state, damage
    is_alive = live_lock_owner(run.path) is not None
    if status is None:
        return None, "running" if is_alive else "unknown", damage
    return status, status.state if is_alive else "stopped", damage
