"""Merging of checkpoints in float32, as much at a time as the method reads; results are saved in the base's format.

Entry points: `merge_and_save` for a request, `save_merge` for open models, `merge_to_files` for a model in memory.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from driftlens.checkpoints.tensor_sources import (
    InMemorySource,
    LazyTensors,
    StateSource,
    cast_source,
    check_finite,
    require_key,
    stored_change,
)
from driftlens.config.requests import MergeRequest
from driftlens.config.spec import load_spec
from driftlens.data.altered import append_views
from driftlens.data.samples import SampleSet
from driftlens.engine.pool import LayerMap
from driftlens.engine.sites import parameter_roles, record_activations, row_weights
from driftlens.engine.walk import FeatureStream
from driftlens.experiment import study_loading
from driftlens.experiment.sanity_checks import check_model_files
from driftlens.experiment.study import Study
from driftlens.experiment.study_loading import OpenModels
from driftlens.linalg.gram import GramSum
from driftlens.merging.method import MergeConfig, MergeMethod, merge_by_name
from driftlens.models.architecture import Architecture
from driftlens.models.chain import Layer, LayerChain, SideInputs, Site, State, WeightSlot
from driftlens.models.saving import check_save_path, save_model
from driftlens.utils.devices import full_precision_matmul, override_num_threads, to_float64
from driftlens.utils.distributed import JobContext, ProgressReporter
from driftlens.utils.errors import ShapeError, SpecError
from driftlens.utils.files import PathLike, scratch_folder
from driftlens.utils.variants import ModelChange, expert_name, saving_loss_text, task_of_expert

if TYPE_CHECKING:
    from driftlens.config.spec import RunSpec

PHASE = "merge"
# Elements passed to an `entry` method at a time: the largest tensors of twenty experts may not fit into
# memory.
PIECE = 2**22


def merge_and_save(
    source: Path | str | Mapping[str, Any] | RunSpec,
    request: MergeRequest,
    context: Callable[[], AbstractContextManager[JobContext]],
) -> tuple[str, list[str]]:
    """Compute the requested merge, or the spec's own, and save it; return the method and notices.

    Args:
        source: the spec, or its path.
        request: method, settings and output path.
        context: opens device and progress.
    """
    method, parameters, out = request.method, request.parameters, request.out
    if out is None:
        raise SpecError("no output path is set", hint="Give `--out merged.safetensors` or `--out FOLDER`.")
    if method is None and parameters:
        raise SpecError("--set needs --method", hint="`driftlens doctor --methods` lists the methods.")
    spec = load_spec(source)
    if method is None:
        if spec.merge is None:
            raise SpecError(
                f"the spec {spec.name!r} names a merged model, so there is nothing to merge",
                hint="Pass --method, or replace `merged:` by `merge:`.",
            )
        method, parameters = spec.merge.method, spec.merge.parameters
    with context() as opened:
        return method, merge_experts(spec, method, parameters, out, opened, request.out_dtype)


def merge_experts(
    spec: RunSpec,
    method: str,
    parameters: Mapping[str, object],
    path: PathLike,
    context: JobContext = JobContext(),
    out_dtype: str | None = None,
) -> list[str]:
    """Open the models that a method reads, merge them, and save the result in the base's format.

    Args:
        spec: the settings.
        method: name of the merge method.
        parameters: its settings.
        path: the output file or folder.
        context: device and progress.
        out_dtype: dtype of saved floating-point tensors; None keeps the base's.
    """
    merge, study = validated_merge(spec, method, parameters), None
    if merge.method.needs_samples:
        study, models = study_loading.open_study(spec, access=context.access)
    else:
        models = study_loading.open_models(spec, context.access, unread=True)
        # Compare keys and shapes before anything is merged.
        study_loading.open_pool(spec, models, device="cpu")
    doubts = [doubt.text for doubt in check_model_files(models)]
    models = study_loading.with_save_dtype(models, out_dtype)
    return save_merge(models, merge, path, study, context.reporter(), notices=doubts)[1]


def validated_merge(spec: RunSpec, method: str, parameters: Mapping[str, object]) -> MergeConfig:
    """Return the merge method for a spec after checking its requirements; no file is opened."""
    merge = merge_by_name(method, parameters)
    without = [task for task in spec.tasks if task not in spec.data.tasks]
    merge.require_inputs(has_base=spec.base is not None, without=without)
    return merge


@full_precision_matmul()
def save_merge(
    models: OpenModels,
    merge: MergeConfig,
    path: PathLike,
    study: Study | None = None,
    reporter: ProgressReporter | None = None,
    *,
    notices: Sequence[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Merge open models and save the result in the base's format; a folder gets a model card.

    Args:
        models: the checkpoints.
        merge: the method and its settings.
        path: the output file or folder.
        study: models and samples for methods that run models.
        reporter: shows progress.
        notices: for the card.

    Returns:
        The manifest's record of the merge, and the notices with those about rounding.
    """
    architecture, chain = models.architecture, models.architecture.chain
    check_save_path(architecture, path)
    source: StateSource
    if merge.method.needs_samples or merge.method.reads == "model":
        source = merge_to_files(models, merge, study, beside=path, reporter=reporter)
    else:
        source = _StreamedMerge(models, merge, reporter or ProgressReporter())
    record = merge.record
    if merge.method.needs_samples and study is not None:
        counts = [f"{len(samples)} of {task}" for task, samples in study.calibration_sets.items()]
        record["samples"] = f"{', '.join(counts)}, without labels, sampled with seed {study.seed}"
    settings = ", ".join(f"{name}={value}" for name, value in record["parameters"].items())
    metadata = {f"merge_{name}": value for name, value in (record | {"parameters": settings}).items()}

    def _notices_with_rounding() -> list[str]:
        # The change is known once everything is written.
        change: ModelChange | None = getattr(source, "change", None)
        record.update({} if change is None else {"change": vars(change)})
        return [*notices, *([] if change is None else saving_loss_text(change, "the merge"))]

    def render_card(usage: str) -> str:
        # Import here: live modules don't need the card's libraries.
        from driftlens.experiment.model_card import merge_card

        texts = [*architecture.notices, *study_loading.head_notices(models), *study_loading.dtype_notices(models)]
        described = {**chain.settings, **architecture.source_info, "reads": chain.modality.name}
        return merge_card(record, described, models.origins, [*texts, *_notices_with_rounding()], usage)

    heads = study_loading.head_files(models)
    save_model(architecture, models.save_template, source, path, metadata=metadata, card=render_card, heads=heads)
    return record, _notices_with_rounding()


class MergedModel(InMemorySource):
    """A merged model and its change from the base; the change is None without a base."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], change: ModelChange | None) -> None:
        super().__init__(name, tensors)
        self.change = change


def merge_to_files(
    models: OpenModels,
    merge: MergeConfig,
    study: Study | None = None,
    *,
    beside: PathLike | None = None,
    reporter: ProgressReporter | None = None,
) -> MergedModel:
    """Merge the experts of a spec into memory-mapped files.

    Args:
        models: the checkpoints.
        merge: the method and its settings.
        study: models and samples for methods that run models.
        beside: a path on the disk where the files are created; the temporary folder if None.
        reporter: shows progress.
    """
    reporter = reporter or ProgressReporter()
    inputs = _checked_merge_inputs(models, merge, study, reporter)
    tensors = _create_file_backed_tensors(inputs.start, beside, models.out_dtype)
    change = ModelChange("") if "base" in models.sources else None
    missing = {key: tensors[key].numel() for key in inputs.base}
    total = len(missing)
    reporter.step(PHASE, 0, total)

    # Methods that read the merged prefix get the merged weights as they are stored, rounded.
    def _view_of_slot(slot: WeightSlot) -> Tensor:
        return tensors[slot.key] if slot.rows is None else tensors[slot.key][slice(*slot.rows)]

    # Threads split products, sums and decompositions, and rounding depends on the parts: with one thread a merge is
    # the same on every number of cores.
    with torch.set_grad_enabled(merge.method.reads == "samples"), override_num_threads(1):
        for slot, value in inputs.iterate_merged_slots(_view_of_slot):
            require_key(inputs.start, slot.key)
            count, change = _store_merged_slot(inputs, slot, value, _view_of_slot(slot), change)
            missing[slot.key] -= count
            reporter.step(PHASE, total - sum(map(bool, missing.values())), total, slot.key)
    for key, count in missing.items():
        _require_complete_tensor(inputs, key, count)
    return MergedModel(inputs.name, tensors, change)


def merge_study(study: Study, merge: MergeConfig) -> MergedModel:
    """Merge the experts of a study in the dtype of saved models; calibration samples are available."""
    sources = {name: study.pool.source(name) for name in study.pool.names}
    # Merging reads only the chain of the architecture.
    bare = Architecture("", "", torch.nn.Identity(), study.pool.chain)
    return merge_to_files(OpenModels(bare, sources, sources, {}, out_dtype=study.out_dtype), merge, study)


class _StreamedMerge:
    """A merge computed tensor by tensor whenever it is read; results are not stored."""

    def __init__(self, models: OpenModels, merge: MergeConfig, reporter: ProgressReporter) -> None:
        self._inputs, self._reporter = _checked_merge_inputs(models, merge, None, reporter), reporter
        self.name = self._inputs.name
        self.headers = cast_source(self._inputs.start, models.out_dtype).headers
        self.change = ModelChange("") if "base" in models.sources else None
        self._parts = defaultdict[str, list[_MethodCall]](list)
        for part in self._inputs._independent_method_calls():
            for key in dict.fromkeys(slot.key for slot in part.slots.values()):
                self._parts[key].append(part)
        self._waiting: dict[tuple[str, int], list[tuple[WeightSlot, Tensor]]] = {}
        self._done = set[str]()

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return a merged tensor, or rows [start, stop) of it."""
        require_key(self, key)
        header, inputs = self.headers[key], self._inputs
        if key not in inputs.base:
            return inputs.start.read(key, rows)
        # Count a tensor that is read twice only once.
        change = None if key in self._done else self.change
        merged, missing = torch.empty(header.shape, dtype=header.dtype), math.prod(header.shape)
        for slot, value in self._merged_slots_of_tensor(key):
            place = merged if slot.rows is None else merged[slice(*slot.rows)]
            count, change = _store_merged_slot(inputs, slot, value, place, change)
            missing -= count
        _require_complete_tensor(inputs, key, missing)
        self._done.add(key)
        self.change = change or self.change
        self._reporter.step(PHASE, len(self._done), len(inputs.base), key)
        return merged if rows is None else merged[slice(*rows)]

    @torch.no_grad()
    def _merged_slots_of_tensor(self, key: str) -> Iterator[tuple[WeightSlot, Tensor]]:
        """Yield the merged parts of a tensor; results for other tensors are cached until read."""
        for part in self._parts[key]:
            pairs = self._waiting.pop((key, id(part)), None)
            if pairs is None:
                by_key = defaultdict[str, list[tuple[WeightSlot, Tensor]]](list)
                with override_num_threads(1):
                    for slot, value in self._inputs._run_method_call(part):
                        by_key[slot.key].append((slot, value))
                pairs = by_key.pop(key, [])
                self._waiting |= {(name, id(part)): slots for name, slots in by_key.items() if name not in self._done}
            yield from pairs


class _FloatTensors(LazyTensors[str]):
    """Float32 view of a checkpoint's floating-point tensors, read and checked on access."""

    def __init__(self, source: StateSource, named: Mapping[str, WeightSlot] | None = None) -> None:
        floats = (key for key, header in source.headers.items() if header.dtype.is_floating_point)
        slots = {key: WeightSlot(key) for key in floats} if named is None else named
        super().__init__(slots, lambda name: self.read_slot(slots[name]))
        self.source = source

    def read_slot(self, slot: WeightSlot) -> Tensor:
        """Read a tensor, or a block of its rows, in the layout of the layer."""
        tensor = self.source.read(slot.key, slot.rows)
        check_finite(self.source.name, slot.key, tensor)
        return slot.to_layer_layout(tensor.float())


@dataclasses.dataclass(frozen=True)
class _MergeInputs:
    """The inputs of a merge: base, experts, method; `start` supplies key names and integer tensors."""

    start: StateSource
    base: _FloatTensors
    experts: Mapping[str, _FloatTensors]
    merge: MergeConfig
    chain: LayerChain
    study: Study | None

    @property
    def name(self) -> str:
        """Description of the merge for messages."""
        return f"{self.merge.method.title} of {', '.join(self.experts)}"

    def iterate_merged_slots(self, place_of: Callable[[WeightSlot], Tensor]) -> Iterator[tuple[WeightSlot, Tensor]]:
        """Yield tensors, or blocks of their rows, with merged values."""
        entry, settings = self.merge
        function = entry.function
        if entry.reads == "samples":
            for key, value in function(self.base, self.experts, self.study, **settings):
                yield WeightSlot(key), value
        elif entry.reads == "model":
            named = _slots_by_name(self.chain, self.base)
            experts = {task: _FloatTensors(expert.source, named) for task, expert in self.experts.items()}
            for name, value in function(_FloatTensors(self.base.source, named), experts, **settings):
                yield named.get(name, WeightSlot(name)), value
        else:
            for part in self._independent_method_calls(place_of):
                yield from self._run_method_call(part)

    def _independent_method_calls(
        self, place_of: Callable[[WeightSlot], Tensor] | None = None
    ) -> Iterator[_MethodCall]:
        """Yield calls of a merge method for tensors that can be merged independently."""
        entry = self.merge.method
        if entry.is_per_module:
            yield from self._method_calls_by_site(place_of)
        elif entry.reads == "tensor":
            for name, slot in _slots_by_name(self.chain, self.base).items():
                yield _MethodCall(self.merge, {name: slot})
        else:
            most = PIECE if entry.reads == "entry" else None
            for key in self.base:
                for slot in split_into_row_slots(key, self.start.headers[key].shape, most):
                    yield _MethodCall(self.merge, {key: slot})

    def _method_calls_by_site(self, place_of: Callable[[WeightSlot], Tensor] | None) -> Iterator[_MethodCall]:
        """Yield calls of a merge method per module, layer by layer, then for all other tensors."""
        entry, rest = self.merge.method, self.merge.rest
        extra_of_rest: tuple[Mapping[str, Tensor], ...] = ()
        walk: Iterator[tuple[Layer, Mapping[str, Any] | None]] = ((layer, None) for layer in self.chain.layers)
        if self.study is not None and entry.needs_moments:
            merged = place_of if entry.reads == "prefix" else None
            walk = _site_moments(self.study, merged=merged)
            extra_of_rest = ({},) if entry.others == entry.name else ()
        for layer, moments in walk:
            # Two sites may share a weight, which is merged once.
            names = {slot: name for name, slot in self.chain.own_parameters(layer).items()}
            owned = {name: slot for slot, name in names.items()}
            for site in layer.sites:
                parts = {part: f"{site.name}.{part}" for part in ("weight", "bias")}
                is_known = moments is None or site.name in moments
                if not is_known or parts["weight"] not in owned or site.kind != "linear":
                    continue
                slots = {part: owned.pop(name) for part, name in parts.items() if name in owned}
                extra = () if moments is None else (moments[site.name],)
                yield _MethodCall(self.merge, slots, extra)
            for slot in owned.values():
                yield _MethodCall(rest, {slot.key: slot}, extra_of_rest)
        layer_keys = set(self.chain.parameter_keys())
        for key in self.base:
            if key not in layer_keys:
                yield _MethodCall(rest, {key: WeightSlot(key)}, extra_of_rest)

    def _run_method_call(self, part: _MethodCall) -> Iterator[tuple[WeightSlot, Tensor]]:
        """Merge one set of tensors; return the values in the layout of the files."""
        merge, slots, extra = part
        base = {name: self.base.read_slot(slot) for name, slot in slots.items()}
        experts = {
            task: {name: expert.read_slot(slot) for name, slot in slots.items()}
            for task, expert in self.experts.items()
        }
        merged: Mapping[str, Tensor] = merge.method.function(base, experts, *extra, **merge.settings)
        return ((slot, merged[name]) for name, slot in slots.items() if name in merged)


class _MethodCall(NamedTuple):
    """The arguments of one call of a merge method: tensors by name, and extra arguments."""

    merge: MergeConfig
    slots: Mapping[str, WeightSlot]
    extra: tuple[object, ...] = ()


def _store_merged_slot(
    inputs: _MergeInputs, slot: WeightSlot, value: Tensor, place: Tensor, change: ModelChange | None
) -> tuple[int, ModelChange | None]:
    """Store merged values; return the number of entries and the change with rounding."""
    value = slot.to_stored_layout(value).detach()
    if value.shape != place.shape:
        raise ShapeError(f"{inputs.name}: {slot.key!r} came as {list(value.shape)}, not {list(place.shape)}")
    if change is not None:
        change += stored_change(inputs.start, slot.key, value, place.dtype, slot.rows)
    place.copy_(value)
    return value.numel(), change


def _require_complete_tensor(inputs: _MergeInputs, key: str, missing: int) -> None:
    if missing:
        raise ShapeError(f"{inputs.name}: {key!r} came {'twice' if missing < 0 else 'not, or not as a whole'}")


def _checked_merge_inputs(
    models: OpenModels, merge: MergeConfig, study: Study | None, reporter: ProgressReporter
) -> _MergeInputs:
    experts = {task: source for name, source in models.sources.items() if (task := task_of_expert(name)) is not None}
    tasks, entry = {} if study is None else study.tasks, merge.method
    without = [task for task in sorted(experts) if task not in tasks or not tasks[task].calibration]
    merge.require_inputs(has_base="base" in models.sources, without=without)
    if study is not None and entry.scores:
        headless = [task for task in tasks if study.head(task, expert_name(task)) is None]
        if headless:
            raise missing_heads_error(entry, headless)
    if study is not None and entry.reads == "samples":
        study = _study_without_labels(study, merge, reporter)
    start = models.sources.get("base", next(iter(experts.values())))
    weights = {task: _FloatTensors(experts[task]) for task in sorted(experts)}
    return _MergeInputs(start, _FloatTensors(start), weights, merge, models.architecture.chain, study)


def _study_without_labels(study: Study, merge: MergeConfig, reporter: ProgressReporter) -> Study:
    """Return the study without labels and scored answers, for merge methods that read samples."""
    (entry, settings), total, done = merge, 0, 0

    def hide_answers_and_count_reads(samples: SampleSet) -> SampleSet:
        is_read = entry.scores and samples.texts is not None and samples.texts.reader is not None
        samples = samples.with_answers([""] * len(samples)) if is_read else samples

        def load_and_report(positions: Sequence[int]) -> Any:
            nonlocal done
            reporter.step("ask", done, total or None, "samples")
            done += len(positions)
            return samples.load(positions)

        return dataclasses.replace(samples, load=load_and_report)

    sets = {task: hide_answers_and_count_reads(samples) for task, samples in study.calibration_sets.items()}
    for task, samples in sets.items() if entry.scores else ():
        head = study.head(task, expert_name(task))
        entry.runs(settings, len(samples), 0 if head is None else len(head.classes))
        total += entry.runs(settings, len(samples), 1)
    return study.without_labels(sets)


def _create_file_backed_tensors(
    start: StateSource, beside: PathLike | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Create tensors like those of `start` in unlinked files; integers are copied from it."""
    headers = cast_source(start, dtype).headers
    tensors, need = dict[str, Tensor](), sum(header.nbytes for header in headers.values())
    with scratch_folder(Path(beside or Path(tempfile.gettempdir(), "merged")), need) as folder:
        for number, (key, header) in enumerate(headers.items()):
            if not start.headers[key].dtype.is_floating_point:
                tensors[key] = start.read(key)
            elif not header.nbytes:
                tensors[key] = torch.empty(header.shape, dtype=header.dtype)
            else:
                file, count = folder / f"{number}", torch.Size(header.shape).numel()
                # Written before it is mapped: a full disk is an error here, and would be a crash later.
                file.write_bytes(bytes(header.nbytes))
                mapped = torch.from_file(str(file), shared=True, size=count, dtype=header.dtype)
                tensors[key] = mapped.reshape(header.shape)
    return tensors


def missing_heads_error(entry: MergeMethod, tasks: Sequence[str]) -> SpecError:
    """Build the error for a merge method that needs a classification head for every task."""
    return SpecError(
        f"merge method {entry.name!r} needs a classification head for every task; missing: {', '.join(tasks)}",
        hint=f"Add heads.{tasks[0]}, or use a method without scores.",
    )


def _slots_by_name(chain: LayerChain, keys: Collection[str]) -> dict[str, WeightSlot]:
    """Return every parameter under a name that does not depend on the file format."""
    named, seen = dict[str, WeightSlot](), set[WeightSlot]()
    for layer in chain.layers:
        groups, numbers = parameter_roles(layer), Counter[str]()
        for name, slot in chain.own_parameters(layer).items():
            if slot not in seen:
                seen.add(slot)
                named[f"{layer.index}.{groups[name]}.{numbers[groups[name]]}"] = slot
                numbers[groups[name]] += 1
    layer_keys = set(chain.parameter_keys())
    return named | {key: WeightSlot(key) for key in keys if key not in layer_keys}


def split_into_row_slots(key: str, shape: tuple[int, ...], most: int | None) -> list[WeightSlot]:
    """Split a tensor into blocks of rows.

    Args:
        key: the tensor's name.
        shape: its shape.
        most: entries per slot, but at least one row; None keeps the tensor whole.
    """
    rows = max(1, (most or sys.maxsize) // max(1, math.prod(shape[1:])))
    if not shape or shape[0] <= rows:
        return [WeightSlot(key)]
    return [WeightSlot(key, rows=(start, min(start + rows, shape[0]))) for start in range(0, shape[0], rows)]


@torch.no_grad()
def _site_moments(
    study: Study, *, merged: Callable[[WeightSlot], Tensor] | None = None
) -> Iterator[tuple[Layer, dict[str, dict[str, Tensor]]]]:
    """Yield, layer by layer, E[x x'] [k, k] of each module's inputs in each task's expert.

    The mean, in float64 on the CPU, is over the tokens of the calibration samples by the sites' token weights; masked
    tokens and sites that run twice are left out. With `merged`, which returns a merged parameter, an expert's layer
    reads the features of the merged layers before it.
    """
    pool = study.pool
    sets = {task: append_views(samples) for task, samples in study.calibration_sets.items()}
    stream = FeatureStream(pool, sets, [_WALKER])
    for layer in pool.chain.layers:
        sites = [site for site in layer.sites if site.kind == "linear" and site.runs == 1]
        # Sites with the same input and weights share moments.
        readers = {(site.input, site.token_weights): site for site in sites}
        moments: dict[str, dict[str, Tensor]] = {site.name: {} for site in sites}
        for task in sets:
            means = _input_moments(stream, layer, task, [*readers.values()], merged is not None)
            for site in sites:
                moments[site.name][task] = means[readers[site.input, site.token_weights].name]
        yield layer, moments
        if merged is not None and layer.role != "head":
            parameters = {
                name: slot.to_layer_layout(merged(slot).to(pool.device, pool.dtype))
                for name, slot in layer.parameters.items()
            }
            for task in sets:
                for batch in stream.batches(layer, task):
                    stream.take(layer, batch, _WALKER, LayerMap(layer, parameters), named="the merged model")
            stream.check()


_WALKER = "walker"


def _input_moments(
    stream: FeatureStream, layer: Layer, task: str, readers: Sequence[Site], keeps_features: bool
) -> dict[str, Tensor]:
    """Compute E[x x'] of module inputs in a task's expert; `keeps_features` does not advance the layer."""
    pool, expert = stream.pool, expert_name(task)
    parameters, names = pool.parameters(expert, layer), [site.name for site in readers]
    grams, totals = dict[str, GramSum](), defaultdict[str, list[float]](list)

    def _run_and_add_moments(state: State, side: SideInputs) -> State:
        rows, output = record_activations(layer, parameters, state, side, names)
        for site in readers:
            x = rows.inputs[site.name]
            weights = row_weights(pool.chain, layer, site, x, state, rows.side)
            # In float32, rounding would fill the null space that few tokens leave.
            x = to_float64(x.flatten(0, -2))
            if site.name not in grams:
                grams[site.name] = GramSum(x.shape[-1], torch.float64, x.device)
            if weights is not None:
                weights = weights.to(x.device)
                # On both sides of the Gram matrix the root gives the weight.
                x = x * weights.sqrt()[:, None]
            totals[site.name].append(len(x) if weights is None else weights.sum(dtype=torch.float64).item())
            grams[site.name].add_rows(x)
        return output

    for batch in stream.batches(layer, task):
        if keeps_features:
            left = _run_and_add_moments(batch.get(_WALKER), batch.side)
            stream.record_sums(layer, batch, expert, left)
        else:
            stream.take(layer, batch, _WALKER, _run_and_add_moments, named=expert)
    stream.check()
    return {name: gram.full_matrix().div_(sum(totals[name])).cpu() for name, gram in grams.items()}
