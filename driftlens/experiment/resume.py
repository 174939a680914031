"""A run opened once more, or written to: whether all is still the same, in phases, by one process of several.

What a job has begun is kept in a folder of its own, so that one that was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import driftlens.config
from driftlens.calibration.calibrator import calibrators
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.data.samples import halving_batches
from driftlens.engine.pool import Attachments, attachments_from
from driftlens.experiment.loading import OpenModels, open_study
from driftlens.experiment.study import Study
from driftlens.models.saving import save_state_dict
from driftlens.runs import layout
from driftlens.runs.manifest import Manifest, PhaseInfo, read_manifest
from driftlens.runs.run_state import is_live
from driftlens.runs.status import RunLock
from driftlens.runs.writer import RunWriter
from driftlens.utils.access import Access, Context
from driftlens.utils.devices import (
    HOST,
    accelerator,
    answering,
    exact_products,
    peak_memory,
    reset_peak_memory,
)
from driftlens.utils.distributed import Team
from driftlens.utils.errors import Cancelled, CheckpointError, DataError, RunError, SpecError
from driftlens.utils.files import PathLike
from driftlens.utils.progress import Reporter
from driftlens.utils.variants import calibrated

if TYPE_CHECKING:
    from driftlens.config import RunSpec

MERGED_FILE = "models/merged.safetensors"
"""Where a run keeps the merged model it made itself, in the base's key names and dtypes."""


def reopened(
    path: PathLike,
    context: Context = Context(),
    *,
    num_calibration: int | None = None,
    with_calibrations: bool = True,
    with_jacobian: bool = False,
) -> tuple[Study, OpenModels]:
    """The study behind a run directory, the merged model included, and its checkpoints."""
    folder = pathlib.Path(path)
    manifest = read_manifest(folder)
    if context.live is None:
        require_spec(folder, manifest)
        study, models = _of_spec(folder, num_calibration, context.access, with_jacobian=with_jacobian)
    else:
        study, models = context.live(num_calibration)
    for name, info in manifest.calibrations.items() if with_calibrations else ():
        if info.attached and info.method not in calibrators:
            continue  # of an older version: what was measured stays, the maps can't be rebuilt
        add_calibration(study, models, folder, name, info.method, info.control)
    later = tuple(name for name in manifest.variants if name not in study.variants and name in study.pool)
    return dataclasses.replace(study, variants=(*study.variants, *later)), models


def _of_spec(
    folder: pathlib.Path, num_calibration: int | None, access: Access, *, with_jacobian: bool
) -> tuple[Study, OpenModels]:
    spec = driftlens.config.load_spec(folder / "spec.yaml")
    if num_calibration is not None:
        # Fewer are a beginning of those drawn, so that nothing else is drawn differently (`data.drawing.draw`).
        drawn = {task: entry.n or spec.data.defaults.n for task, entry in spec.data.tasks.items()}
        spec = redrawn(spec, {task: max(count, num_calibration) for task, count in drawn.items()})
    if with_jacobian and spec.metrics.jacobian is False:
        spec = driftlens.config.load_spec(spec, ["metrics.jacobian={}"])
    study, models = open_study(spec, access=access)
    if "merged" not in study.pool:
        study.pool.add("merged", models.architecture.align(open_checkpoint(folder / MERGED_FILE)))
    return study, models


def add_calibration(
    study: Study, models: OpenModels, folder: pathlib.Path, name: str, method: str, control: str
) -> None:
    """Put a calibrated variant, with what is attached to it, and its control into the study's pool."""
    weights = {calibrated(name): layout.calibration_weights(name)}
    if control:
        weights[control] = layout.calibration_weights(name, control=True)
    for variant, relative in weights.items():
        attached = None if variant == control else attached_by(folder, name, method)
        study.pool.add(variant, models.architecture.align(open_checkpoint(folder / relative)), attached)


def attached_by(run: pathlib.Path, name: str, method: str) -> Attachments:
    """What a finished calibration of a run attaches; nothing for closed forms."""
    file = run / layout.calibration_attachments(name)
    if not file.exists():
        return {}
    kind: Any = calibrators[method]
    source = open_checkpoint(file)
    return attachments_from(((key, source.read(key)) for key in source.headers), kind.attachment)


def require_spec(folder: pathlib.Path, manifest: Manifest) -> None:
    """Refuse a run of live modules where nobody hands them in again: no spec says how to get them back."""
    if is_live(manifest):
        raise SpecError(
            f"{folder} was made from live modules, which are not there any more: it can be read, not added to",
            hint="Hand them in again from Python, as `driftlens.open_run(...).calibrate(..., modules={...})`, or save "
            "them as checkpoints and analyze a spec that names these.",
        )


def redrawn(spec: RunSpec, counts: Mapping[str, int], seed: int | None = None) -> RunSpec:
    """The spec with other numbers of calibration samples by task, and perhaps another seed."""
    values = spec.as_dict()
    if seed is not None:
        values["data"]["defaults"]["seed"] = seed
    for task, count in counts.items():
        values["data"][task]["n"] = count
    return driftlens.config.load_spec(values)


def require_same_models(manifest: Manifest, study: Study, reporter: Reporter) -> None:
    """Refuse models that changed since the run looked at them; their files are read and hashed again."""
    names = [name for name in manifest.models if name in study.pool]
    for name in reporter.track(names, "check", lambda name: f"is {name} unchanged?"):
        recorded = manifest.models[name]
        if study.model_info(name).digest != recorded.digest:
            raise CheckpointError(
                f"{name} is not the model that the run was made with: {study.pool.source(name).name} has changed",
                hint="Bring that model back, or analyze the models of today into a run of their own.",
                model=name,
            )


def require_same_samples(manifest: Manifest, study: Study) -> None:
    """Refuse data that the run's rows are not about; live samples are numbered, so that a few are looked at, too."""
    for task, data in study.tasks.items():
        for split, samples in (("diagnosis", data.diagnosis), ("test", data.test)):
            recorded = manifest.sample_ids.get(split, {}).get(task)
            if recorded is None or samples is None:
                continue
            origin = manifest.sample_origins.get(split, {}).get(task)
            is_other = is_live(manifest) and origin is not None and origin != samples.origin()
            if is_other or list(recorded) != list(samples.ids):
                raise DataError(
                    f"the {split} samples of task {task} are not those of the run: the data has changed",
                    hint="Bring the data back, or analyze the data of today into a run of its own.",
                )


@contextmanager
def writing(team: Team, opened: Callable[[], RunWriter]) -> Iterator[RunWriter]:
    """The writer of a run, open for the length of the block; all processes enter it and leave it together."""
    team.barrier()  # what others still read before they come here must not change
    with ExitStack() as stack:
        writers: list[RunWriter] = []

        def begun() -> tuple[pathlib.Path, Manifest]:
            writers.append(stack.enter_context(opened()))
            return writers[0].folder, writers[0].manifest

        folder, manifest = team.once(begun)
        yield writers[0] if writers else Follower(folder, manifest)
    team.barrier()  # the run is finished now


@contextmanager
def resumable(how: Callable[[], str | Literal[False]]) -> Iterator[None]:
    """A block that, stopped by the user or by a full disk, says how to go on with what it has left behind."""
    try:
        yield
    except (Cancelled, RunError) as error:
        if found := how():
            told = f"What was finished is kept: {found}."
            error.hint = told if isinstance(error, Cancelled) else f"{error.hint} {told}".lstrip()
        raise


def lead(team: Team, writer: RunWriter, work: Callable[[], object]) -> None:
    """Work that the first process does alone, because it writes; the others know the manifest afterwards."""

    def done() -> Manifest:
        work()
        return writer.manifest

    writer.manifest = team.once(done)


class Follower(RunWriter):
    """Stands for the writer where nothing is written: what is said of the run is noted, and so what is done."""

    def __init__(self, folder: pathlib.Path, manifest: Manifest) -> None:
        """Of the run in a folder, whose manifest is this."""
        super().__init__(folder, manifest, RunLock(folder))
        self.progress = self._nothing

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Rows, columns and features are the first process's, and it alone tells of progress."""

    append = fill = drop = write_features = event = _nothing

    def warn(self, text: str) -> None:
        """Note it."""
        self.describe(warnings=[text])

    def notice(self, text: str) -> None:
        """Note it."""
        self.describe(notices=[text])

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """A block that does this process's share of a phase."""
        yield {}
        self._set_phase(name, PhaseInfo("done", 0.0, ""))

    @contextmanager
    def file(self, relative: str) -> Iterator[pathlib.Path]:
        """Refused: only what `lead` does writes files."""
        assert not relative, "files are the first process's"
        yield self.folder

    def _set_phase(self, name: str, phase: PhaseInfo) -> None:
        self.describe(phases={name: phase})

    def _save(self, **changes: Any) -> None:
        self.manifest = dataclasses.replace(self.manifest, **changes)


@dataclass(frozen=True)
class Phase:
    """One part of a job; `again` does it although it was done before, `sums` says that it sums up moments.

    Attributes:
        study: whose models it runs; None where it runs none.
    """

    name: str
    work: Callable[[], object]
    study: Study | None = None
    again: bool = False
    sums: bool = False


def run_phases(writer: RunWriter, phases: Iterable[Phase]) -> None:
    """Do the phases that are not done yet, one after the other, and record what each used.

    Where memory is too little, the phase begins anew with less of it, see `halving_batches`.
    """
    for phase in phases:
        if writer.done(phase.name) and not phase.again:
            continue
        device = (accelerator() or HOST) if phase.study is None else phase.study.pool.device
        answered = answering(device, f"{phase.name.partition(':')[0]} here")
        with exact_products(), writer.phase(phase.name) as usage, answered:
            reset_peak_memory(device)
            if phase.study is None:
                phase.work()
            else:
                of_tasks = phase.study.tasks.values()
                size = max((data.diagnosis.batch_size for data in of_tasks), default=1)
                work = partial(_from_its_first_layer, phase.study, phase.work)
                tell = partial(_tell_less, writer, phase, device)
                with halving_batches(size, tell, sums=phase.sums) as done:
                    # Several processes would have to begin anew together: there, too little memory ends the job.
                    done(work) if phase.study.team.size == 1 else work()
            if (peak := peak_memory(device)) is not None:
                usage["peak_gpu_bytes"] = peak


def _from_its_first_layer(study: Study, work: Callable[[], object]) -> None:
    study.pool.begin_anew()  # what another try expected would lie beside this one
    work()


def _tell_less(writer: RunWriter, phase: Phase, device: torch.device, goes_on_with: str) -> None:
    writer.notice(f"{device} has too little memory for {phase.name}: it goes on with {goes_on_with}")


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """A block in which torch prefers deterministic kernels, if wanted; the caller's choice comes back."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if wanted:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Kept:
    """Tensors by name, each name a file that is whole or absent."""

    def __init__(self, folder: pathlib.Path, require_there: Callable[[], None] = lambda: None) -> None:
        """Nothing is read or written yet; `require_there` is called before every write."""
        self._folder, self._require_there = folder, require_there

    def read(self, name: str) -> dict[str, Tensor]:
        """What is kept under a name; nothing where there is none, or what is there can't be read any more."""
        file = self._file(name)
        if not file.is_file():
            return {}
        try:
            source = open_checkpoint(file)
            return {key: source.read(key).clone() for key in source.headers}
        except CheckpointError:  # it is made once more, and takes that file's place
            return {}

    def write(self, name: str, tensors: Mapping[str, Tensor], seconds: float) -> None:
        """Keep tensors, with the time that all work took until then, over all sittings."""
        self._require_there()
        self._folder.mkdir(exist_ok=True)
        contiguous = {key: value.cpu().contiguous() for key, value in tensors.items()}
        save_state_dict(self._file(name), contiguous, {"seconds": repr(seconds)})

    @property
    def seconds(self) -> float:
        """What the work that is kept took, over all sittings."""
        return max(map(_seconds_of, self._files()), default=0.0)

    def _files(self) -> list[pathlib.Path]:
        return [*self._folder.glob("*.safetensors")]

    def _file(self, name: str) -> pathlib.Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"


def _seconds_of(file: pathlib.Path) -> float:
    try:
        with safe_open(file, framework="pt") as opened:
            return float(opened.metadata()["seconds"])
    except SafetensorError:  # as in `Kept.read`
        return 0.0


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first setting that has another value `now`, as "another lam: 1, now 2"; empty where none has."""
    flat_before, flat_now = _flat(before), _flat(now)
    for name in {**flat_now, **flat_before}:
        was, value = flat_before.get(name), flat_now.get(name)
        if was != value:
            return f"another {name}: {_shown(was)}, now {_shown(value)}"
    return ""


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names, so that a difference can be told where it is."""
    return {
        f"{name}.{part}" if part else name: value
        for name, inner in settings.items()
        for part, value in (_flat(inner) if isinstance(inner, Mapping) else {"": inner}).items()
    }


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
