"""A saved run, opened read-only: tables as tidy frames, features memory-mapped, without torch."""

from __future__ import annotations

import difflib
import functools
import pathlib
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.runs import layout, schema
from driftlens.runs.layout import STATUS, begun_calibration
from driftlens.runs.manifest import LATER, CalibrationInfo, Manifest, is_phase_of, read_manifest
from driftlens.runs.status import Status, living_owner_of, read_status
from driftlens.runs.tables import DAMAGED, empty, read_table, stored_table
from driftlens.utils.diagnostic import Column
from driftlens.utils.errors import DataError, LayerNotFoundError, RunError, concerning, did_you_mean, some_of
from driftlens.utils.files import PathLike, from_json, plain_file
from driftlens.utils.variants import calibrated, calibration_of

P = ParamSpec("P")
T = TypeVar("T")


def remembered(work: Callable[Concatenate[DriftRun, P], T]) -> Callable[Concatenate[DriftRun, P], T]:
    """The function, its answers kept with the run they are of, as an opened run doesn't change.

    Its arguments must be hashable; nobody may modify its answers.
    """

    @functools.wraps(work)
    def answer(run: DriftRun, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (work, args, *kwargs.items())
        if key not in run._answers:
            run._answers[key] = work(run, *args, **kwargs)
        cached: T = run._answers[key]
        return cached

    return answer


def open_run(path: PathLike) -> DriftRun:
    """The run in the directory `path`. Nothing but its manifest is read until it is asked for.

    Raises:
        RunError: there is no run, or its manifest is damaged.
        SchemaTooNewError: a newer DriftLens wrote it.
    """
    return DriftRun.at(path)


_LONG_NAME = 22
"""Characters of a name in a representation: three of them fit on a line of a notebook."""


class _Units(dict[str, str]):
    """Units by column, which nobody changes: pandas copies a frame's attributes deeply with every piece it takes."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


class DriftRun:
    """One run directory, read-only. Tables are read once, when first asked for; frames are copies.

    Attributes:
        path: the run directory.
        manifest: what the run says about itself, as of when it was opened.
    """

    def __init__(self, path: pathlib.Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._frames: dict[str, pd.DataFrame] = {}
        self._places: dict[str, Mapping[Any, Any]] = {}
        self._answers: dict[Hashable, Any] = {}

    @classmethod
    def at(cls, path: PathLike) -> Self:
        """The run in a directory; errors as for `open_run`."""
        folder = pathlib.Path(path)
        return cls(folder, read_manifest(folder))

    @property
    def id(self) -> str:
        """Short name of the run's own."""
        return self.manifest.id

    @property
    def name(self) -> str:
        """What the user called the run."""
        return self.manifest.name

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks, in the order of the run."""
        return tuple(self.manifest.tasks)

    @property
    def variants(self) -> tuple[str, ...]:
        """Variants, in the order in which they were added."""
        return tuple(self.manifest.variants)

    @property
    def status(self) -> Status | None:
        """Where the run stands now, or None when it does not say; a RunError where status.json is damaged."""
        return read_status(self.path)

    def layers(
        self, task: str | None = None, variant: str | None = None, layer: int | str | None = None
    ) -> pd.DataFrame:
        """Rows of the layer table: drift at the boundary a layer writes, and the layer's own part in it.

        Args:
            task: only this task.
            variant: only this variant.
            layer: only this layer: its index (1 the stem), "final", or its module path.

        Raises:
            DataError: the run has no such task or variant; those it has are named.
            LayerNotFoundError: it has no such layer; the nearest are named.
            RunError: the table can't be read.
        """
        return self._rows(schema.LAYERS, task=task, variant=variant, layer=layer)

    def samples(
        self, task: str | None = None, variant: str | None = None, layer: int | str | None = None
    ) -> pd.DataFrame:
        """Rows of the sample table: one sample's drift at one layer. Arguments as for `layers`."""
        return self._rows(schema.SAMPLES, task=task, variant=variant, layer=layer)

    def outputs(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Rows of the output table: one sample's scores and decision. Arguments as for `layers`."""
        return self._rows(schema.OUTPUTS, task=task, variant=variant)

    def adjoint(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Rows of the adjoint table: what each layer adds to a sample's change of loss, margin or feature.

        Empty unless the run was asked for it (`metrics.adjoint`). Arguments and errors as for `layers`.
        """
        return self._rows(schema.ADJOINT, task=task, variant=variant)

    def group_contributions(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Rows of the table of module groups' shares in mismatch and final drift (`metrics.groups`), as `layers`."""
        return self._rows(schema.GROUP_CONTRIBUTIONS, task=task, variant=variant)

    def routing(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Rows of the table of mixtures: how many tokens go to every expert. Arguments as for `layers`."""
        return self._rows(schema.ROUTING, task=task, variant=variant)

    def params(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Rows of the parameter table: task vectors compared. Arguments as for `layers`."""
        return self._rows(schema.PARAMS, task=task, variant=variant)

    def accuracy(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Rows of the accuracy table, scores with intervals. Arguments as for `layers`."""
        return self._rows(schema.ACCURACY, task=task, variant=variant)

    def scores(self, task: str | None = None, variant: str | None = None) -> pd.DataFrame:
        """Rows of the table of single results: one test sample's, by metric. Arguments as for `layers`."""
        return self._rows(schema.SCORES, task=task, variant=variant)

    def calibration(self, name: str | None = None) -> pd.DataFrame:
        """Rows of the calibration log, one per calibrated site, of all or of the calibration `name`; as `layers`."""
        return self._rows(schema.CALIBRATION, name=name)

    def calibration_info(self, name: str) -> CalibrationInfo:
        """What the manifest says of a finished calibration; a DataError where there is none of that name."""
        self._check("calibration", name, self.manifest.calibrations)
        return self.manifest.calibrations[name]

    def sweeps(self) -> pd.DataFrame:
        """Rows of the sweep table: one calibration per point and seed, one row per task. Errors as for `layers`."""
        return self._rows(schema.SWEEPS)

    def resources(self) -> pd.DataFrame:
        """Time, memory and energy by phase. Errors as for `layers`."""
        return self._rows(schema.RESOURCES)

    def value(self, column: str, *, task: str, variant: str = "merged", layer: int | str = "final") -> float:
        """One number of the layer table; NaN where it was not measured. Errors as for `layers`, also without a row."""
        numbers = [entry.name for entry in schema.LAYERS.columns if entry.dtype in ("int", "float")]
        if column not in numbers:
            raise DataError(
                f"the layer table has no number called {column!r}", hint=did_you_mean(column, numbers)
            )
        rows = self.layers(task, variant, layer)
        if rows.empty:
            raise DataError(
                f"the layer table has no row for task {task!r}, variant {variant!r}, layer {layer!r}",
                hint="The expert has no rows, and `layers.select` in the spec decides which blocks have.",
            )
        return float(rows[column].astype("float64").iloc[0])

    def features(self, task: str, variant: str, layer: int | str) -> NDArray[np.floating[Any]]:
        """Features [n, d] of one task, variant ("expert" for the task's own) and layer, memory-mapped.

        Rows are the samples of `sample_ids(task, "diagnosis")`; float16, or float32 where that overflows. Errors as for
        `layers`, a DataError where these features are not stored.
        """
        self._check("task", task)
        self._check("variant", variant)
        relative = layout.feature_file(task, variant, self.layer_index(layer))
        path = self.path / relative
        if not path.exists() and relative not in self.manifest.files:
            raise DataError(
                f"features of task {task!r}, variant {variant!r}, layer {layer!r} are not stored",
                hint="Choose the layers to store with `layers.select` in the spec.",
            )
        try:
            array: NDArray[np.floating[Any]] = np.load(plain_file(path), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise RunError(f"{path} can't be read: {error}", hint=DAMAGED) from error
        return array

    def thumbs(self, task: str) -> NDArray[np.uint8] | None:
        """Pictures [n, side, side, 3] of a task's first diagnosis samples, in order; None where there are none."""
        path = self.path / layout.thumbs_file(task)
        if not path.is_file():
            return None
        side = layout.THUMB_SIDE
        with concerning(path), np.load(path, allow_pickle=False) as stored:
            pictures: NDArray[np.uint8] = stored["pictures"].reshape(-1, side, side, 3)
        return pictures

    def texts(self, task: str) -> dict[str, str]:
        """What a task's first diagnosis samples ask, by sample id; empty where they are no texts."""
        path = self.path / layout.texts_file(task)
        if not path.is_file():
            return {}
        with concerning(path):
            content = from_json(path.read_text(encoding="utf-8"))
            return {str(name): str(text) for name, text in content.items()}

    def sample_ids(self, task: str, split: str = "diagnosis") -> tuple[str, ...]:
        """Ids of a task's samples in a split (calibration, diagnosis or test), in the order of the rows."""
        self._check("task", task)
        splits = [name for name, tasks in self.manifest.sample_ids.items() if task in tasks]
        if split not in splits:
            recorded = ", ".join(splits) or "none"
            raise DataError(
                f"no {split!r} samples of task {task!r} are recorded; recorded splits: {recorded}"
            )
        return tuple(self.manifest.sample_ids[split][task])

    def layer_index(self, layer: int | str) -> int:
        """Index of the layer that `layer` names: an index, "final" for the last one, or a module path."""
        indices = {entry.path: entry.index for entry in self.manifest.layers}
        last = max(indices.values(), default=0)
        if layer == "final" and last:
            return last
        if isinstance(layer, str) and layer in indices:
            return indices[layer]
        if not isinstance(layer, str) and 1 <= layer <= last:
            return int(layer)
        near = difflib.get_close_matches(str(layer), indices, n=3, cutoff=0.0)
        raise LayerNotFoundError(
            f"the run has no layer {layer!r}; it has 1 (stem) to {last} (head)",
            hint=f"Nearest module paths: {', '.join(near)}." if near else "It lists no layers yet.",
        )

    @remembered
    def layer_name(self, layer: int) -> str:
        """What words call a layer: `block 5 (layer 7 of 8)`, with its path where it is no numbered block."""
        paths = {entry.index: entry.path for entry in self.manifest.layers}
        blocks = [entry.path for entry in self.manifest.layers if entry.role == "block"]
        path = paths.get(layer, "")
        if path in blocks and path.rpartition(".")[2] == str(blocks.index(path)):
            path = f"block {blocks.index(path)}"
        return f"{path} (layer {layer} of {len(paths)})"

    def frame(self, table: str) -> pd.DataFrame:
        """A whole table by its name, for plotting: tasks, variants and paths of layers are ordered categories.

        Their order is the run's. `attrs["units"]` has every column's unit, as in all frames of a run. Tables are those
        of `driftlens.runs.schema.TABLES`.
        """
        if table not in schema.TABLES:
            raise DataError(f"a run has no table {table!r}", hint=did_you_mean(table, schema.TABLES))
        rows = self._rows(schema.TABLES[table])
        paths = [entry.path for entry in sorted(self.manifest.layers, key=lambda entry: entry.index)]
        ranks = {"task": self.tasks, "variant": ("base", "expert", *self.variants), "path": paths}
        for name in rows.columns.intersection([*ranks]):
            order = dict.fromkeys([*ranks[name], *rows[name].dropna()])
            rows[name] = pd.Categorical(rows[name], [*order], ordered=True)
        return rows

    def __repr__(self) -> str:
        tasks, variants = (
            some_of(
                [repr(name if len(name) <= _LONG_NAME else f"{name[: _LONG_NAME - 4]} ...") for name in names]
            )
            for names in (self.tasks, self.variants)
        )
        return f"<DriftRun {str(self.path)!r}:\n  tasks {tasks};\n  variants {variants}>"

    def columns(self, table: str) -> tuple[Column, ...]:
        """What the columns of a table are: those of the schema, then what diagnostics added to this run's file."""
        return stored_table(self.path / layout.table_file(table), schema.TABLES[table]).columns

    def _rows(self, table: schema.Table, **wanted: Any) -> pd.DataFrame:
        frame = self._frame(table)
        wanted = {column: value for column, value in wanted.items() if value is not None}
        places = np.arange(len(frame))
        if {"task", "variant"} <= set(wanted) and len(frame):
            both = wanted.pop("task"), wanted.pop("variant")
            for column, value in zip(("task", "variant"), both, strict=True):
                self._check(column, value)
            # Comparing text in every row, for every task and variant anew, would take most of a report's time.
            if table.name not in self._places:
                self._places[table.name] = frame.groupby(["task", "variant"], sort=False).indices
            places = self._places[table.name].get(both, places[:0])
        for column, value in wanted.items():
            if column == "layer":
                value = self.layer_index(value)
            elif column == "name":
                self._check("calibration", value, [*self.manifest.calibrations, *frame["name"]])
            else:
                self._check(column, value)
            places = places[(frame[column].take(places) == value).to_numpy(dtype=bool)]
        return (frame.take(places) if len(places) < len(frame) else frame).reset_index(drop=True)

    def _frame(self, table: schema.Table) -> pd.DataFrame:
        if table.name not in self._frames:
            relative = layout.table_file(table.name)
            # A table that was written is listed; one that is neither listed nor there was never computed.
            is_absent = relative not in self.manifest.files and not (self.path / relative).exists()
            rows = empty(table) if is_absent else read_table(self.path / relative, table)
            # A copy has the columns of one type in one block, of which rows are taken in half the time.
            rows = self._finished_rows(rows).copy()
            rows.attrs["units"] = _Units({column.name: column.unit for column in self.columns(table.name)})
            self._frames[table.name] = rows
        return self._frames[table.name]

    def _finished_rows(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows without those of variants that are still being written or removed."""
        hidden = list(self.manifest.unfinished)
        if not hidden:
            return rows
        if "variant" in rows:
            rows = rows[~rows["variant"].isin(hidden)]
        elif {"name", "site"} <= set(rows):
            rows = rows[~rows["name"].map(calibrated).isin(hidden)]
        return rows.reset_index(drop=True)

    def _check(self, kind: str, name: str, known: Iterable[str] | None = None) -> None:
        if known is None:
            known = self.tasks if kind == "task" else (*self.variants, "expert")
        names = list(dict.fromkeys(known))
        if name not in names:
            there = ", ".join(names) or "none"
            raise DataError(f"the run has no {kind} {name!r}; it has {there}", hint=did_you_mean(name, names))


COMMAND = "command"
"""In what a calibration begins with: the options of its command line."""

_EXPLAIN = ":explain:"
"""In the names of phases that attribute the drift, behind `calibrate:NAME` or at the beginning."""


def current_state(run: DriftRun) -> str:
    """The state of the run itself: "done" once its analysis is, however a calibration or sweep of it ended.

    While somebody works on it the state is "running". What became of the last work is `last_work`.
    """
    state, _ = last_work(run)
    ended_early = state in ("cancelled", "failed", "stopped", "unknown")
    return "done" if ended_early and is_analyzed(run.manifest) else state


def last_work(run: DriftRun) -> tuple[str, str]:
    """The state of the run's status, and what is wrong with its status.json and what to do; empty where nothing is.

    The state is "stopped" when it is unfinished and the process behind it is gone, "unknown" where nobody is at work
    and the run does not say. The damage is told without the folder's path: a report tells it to others.
    """
    return _standing(run)[1:]


def left_undone(run: DriftRun) -> tuple[str, ...]:
    """What became of work on a finished run that ended early, and how to go on, in sentences; while it lasts, none.

    Where its status.json is damaged, that takes the place of what became of the work; where it was removed, no work
    is said to have ended early.
    """
    status, state, damage = _standing(run)
    if damage:
        return (damage,)
    if state in ("running", "cancelling") or not is_analyzed(run.manifest):
        return ()
    begun = _begun(run)
    if begun or state in ("done", "unknown"):
        ends = {name: _end_of(run.manifest, name) for name in begun}
        return tuple(f"{end}; {how_to_resume(run.path, name, run.manifest)}" for name, end in ends.items())
    failure = status.error if status is not None else None
    reason = f": {failure.message}" if failure is not None and failure.message != state else ""
    lacking = [
        f":{name}".partition(_EXPLAIN)[2]
        for name, phase in run.manifest.phases.items()
        if _EXPLAIN in f":{name}" and phase.state != "done"
    ]
    # Of an optional diagnostic, or several of one walk, the phase tells before its task.
    add = dict.fromkeys(name for of in lacking for group in of.split(":")[:-1] for name in group.split("+"))
    more = f"; {how_to_explain(run.path, *add)}" if lacking and not is_live(run.manifest) else ""
    return (f"the last work on it ended early ({state}{reason}); what the run held before stands{more}",)


def is_analyzed(manifest: Manifest) -> bool:
    """Whether the run was finished once, and nothing of its own analysis has been begun again since.

    The attribution, which may be left out or done later, does not count.
    """
    phases = [phase for name, phase in manifest.phases.items() if not name.startswith((*LATER, "explain:"))]
    return bool(manifest.finished) and all(phase.state == "done" for phase in phases)


def unanalyzed(manifest: Manifest, *, scored: bool = False) -> list[str]:
    """The phases in which a task is analyzed that are still to be done; until then nothing can be added to the run.

    Those in which it is `scored` count where the run was never finished: who goes on calls it done.
    """
    kinds = ("analyze", "evaluate") if scored and not manifest.finished else ("analyze",)
    phases = [f"{kind}:{task}" for kind in kinds for task in manifest.tasks]
    return [name for name in phases if name not in manifest.phases or manifest.phases[name].state != "done"]


def require_analyzed(folder: pathlib.Path, *, scored: bool = False) -> None:
    """Refuse a run whose analysis was interrupted: to finish here would call it done. See `unanalyzed`."""
    manifest = read_manifest(folder)
    missing = unanalyzed(manifest, scored=scored)
    if missing and living_owner_of(folder) is None:  # else taking the lock will say who is at it
        raise RunError(
            f"{folder} is unfinished; still to be done: {', '.join(missing)}",
            hint=f"`{command_to_resume(folder, manifest)}` goes on, accuracy included.",
        )


def _begun(run: DriftRun) -> list[str]:
    """Calibrations that were begun and not finished, those among them whose settings were still being chosen."""
    phases = (name.split(":") for name in run.manifest.phases if name.startswith("calibrate:"))
    names = [*map(calibration_of, run.manifest.unfinished), *(parts[1] for parts in phases)]
    is_variant = set(run.manifest.unfinished)
    return [
        name
        for name in dict.fromkeys(filter(None, names))
        if calibrated(name) in is_variant or (run.path / begun_calibration(name)).is_file()
    ]


def how_to_resume(folder: pathlib.Path, name: str, manifest: Manifest) -> str:
    """What to do about a calibration that was begun and not finished, perhaps to take the place of one of its name."""
    is_replacing = name in manifest.calibrations
    if is_live(manifest):
        both = f"name={name!r}, {'replace=True, ' if is_replacing else ''}resume=True"
        return f"`run.calibrate(..., {both})` with the same modules and settings goes on"
    words = _words_of(folder / begun_calibration(name))
    flags = [*(words or ()), *["--replace"] * is_replacing, "--resume"]
    command = shlex.join(["driftlens", "calibrate", str(folder), "--name", name, *flags])
    same = " with the same settings" if words is None else ""
    return f"`{command}`{same} goes on, without --resume it begins afresh"


def how_to_save(folder: pathlib.Path, name: str, manifest: Manifest, *words: str) -> str:
    """What to do for the model of a finished calibration in the form of its base; `words` are further options."""
    if is_live(manifest):
        return f"`run.calibrate(..., name={name!r}, save_weights=...)` with the same settings saves it"
    command = shlex.join(["driftlens", "calibrate", str(folder), "--name", name, *words, "--save-weights"])
    return f"`{command} FOLDER` saves it for its own library"


def _words_of(begun: pathlib.Path) -> list[str] | None:
    """The options with which a calibration was begun; None where nobody can tell."""
    try:
        return [str(word) for word in from_json(begun.read_bytes())[COMMAND]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_live(manifest: Manifest) -> bool:
    """Whether the run was made from live modules, so that no command can open its models again."""
    return bool(manifest.architecture.get("loader") == "live")


def command_to_resume(folder: pathlib.Path, manifest: Manifest | None = None) -> str:
    """The command that goes on with an analysis; of live modules, which `manifest` tells, the call."""
    if manifest is not None and is_live(manifest):
        return "dl.analyze(..., resume=True)"
    folder_name = shlex.quote(str(folder))
    return f"driftlens analyze {folder_name}/spec.yaml --out {folder_name} --resume"


def how_to_explain(folder: pathlib.Path, *add: str) -> str:
    """What to do about variants whose drift is measured and not attributed, or lacks the diagnostics `add`."""
    command = shlex.join(["driftlens", "analyze", str(folder), *(["--add", ",".join(add)] if add else ())])
    return f"`{command}` adds {'what' if add else 'the attribution that'} is missing"


def _standing(run: DriftRun) -> tuple[Status | None, str, str]:
    """The run's status, None where it can't be read or is not there; the state and the damage of `last_work`."""
    status, damage = None, ""
    try:
        status = run.status
    except RunError as error:
        damage = f"{error.message.replace(str(run.path / STATUS), STATUS)}. {error.hint}"
    if status is not None and status.state not in ("running", "cancelling"):
        return status, status.state, damage
    is_alive = living_owner_of(run.path) is not None
    if status is None:
        return None, "running" if is_alive else "unknown", damage
    return status, status.state if is_alive else "stopped", damage


def _end_of(manifest: Manifest, name: str) -> str:
    ends = {"cancelled": "was cancelled", "failed": "failed"}
    states = [phase.state for key, phase in manifest.phases.items() if is_phase_of(name, key)]
    return f"calibration {name!r} {next((ends[s] for s in states if s in ends), 'was interrupted')}"
