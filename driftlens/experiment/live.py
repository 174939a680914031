"""Live modules: opens models and samples (tensors, torch data sets, loaders) that the caller has built.

Entry point: `open_modules`, for analyses of live modules and for `FeatCal.fit`. No file is read.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from driftlens.checkpoints.tensor_sources import module_source
from driftlens.checkpoints.unsupported import is_causal_lm, is_seq2seq
from driftlens.config.data import TextEntry
from driftlens.config.requests import LiveSettings, Modules
from driftlens.config.types import validate_section
from driftlens.data.rows import related_text_columns, text_split_view
from driftlens.data.samples import SampleSet, map_tensors, mask_for_input, random_order, sample_positions
from driftlens.data.sources import Split, find_class_names, label_to_class
from driftlens.data.task_data import TaskData, build_sample_set, require_same_classes, to_text_samples
from driftlens.engine.pool import ModelPool, inputs_to_device
from driftlens.experiment.study import TaskSamples
from driftlens.models.architectures.clip import PIXELS
from driftlens.models.architectures.language import causal_chain, seq2seq_chain
from driftlens.models.architectures.module_list import chain_of_module, check_deterministic, sequential_chain
from driftlens.models.chain import IMAGE, LayerChain, Pool, pool_features
from driftlens.models.heads import LmHeadSpec, ScoreMap, linear_head
from driftlens.models.preprocessing import Preprocess, text_preprocess
from driftlens.models.texts import Form, TextProcessor
from driftlens.models.tracing.block_call import Mask, missing_mask_warning, raw_inputs
from driftlens.utils.devices import full_precision_matmul, require_dtype, resolve_device
from driftlens.utils.errors import DataError, IncompatibleModelsError, SpecError
from driftlens.utils.variants import baseline_variant, expert_name

Inputs = dict[str, Tensor]
# Samples run twice to check that a model is deterministic.
_SEEN_TWICE = 2
# Random features scored by a head, to recognize it when the run is extended.
_PROBES = 4


@dataclass(frozen=True)
class _LiveModels:
    """Modules in memory as a model pool, with their samples.

    Attributes:
        pool: the models, by their names in tables.
        tasks: samples and score map of every task.
        pooling: how one vector per sample is taken.
        reads: the conversion of samples to inputs.
        head_marks: numbers that identify each task's head.
        notices: for readers of the results.
    """

    pool: ModelPool
    tasks: Mapping[str, TaskSamples]
    pooling: Pool
    reads: Preprocess
    head_marks: Mapping[str, list[float]]
    notices: tuple[str, ...]


def open_modules(built: Modules, settings: LiveSettings) -> _LiveModels:
    """Open modules in memory and sample their data; they run in eval mode and are not changed."""
    merged, modules = built.merged, _modules_by_variant(built)
    stated = {**{task: {} for task in built.experts or {}}, **(settings.texts or {})}
    _require_matching_modules(built, {"data": built.data, "calibration data": built.calibration, "texts": stated})
    place = next(merged.parameters()).device if built.device is None else resolve_device(built.device)
    head_of = {
        task: linear_head(module_source(head, "head"), None) if isinstance(head, nn.Linear) else head
        for task, head in (built.heads or {}).items()
    }
    reads = _preprocess_of_module(merged, settings.tokenizer)
    if settings.texts and reads.texts is None:
        raise SpecError("texts= is given without tokenizer=", hint="Give the models' tokenizer.")
    tasks = _sample_tensor_tasks(built, head_of, settings) if reads.texts is None else {}

    floats = (parameter.dtype for parameter in merged.parameters() if parameter.is_floating_point())
    # Use the widest dtype, at least float32.
    dtype = functools.reduce(torch.promote_types, floats, torch.float32)
    require_dtype(place, dtype)
    skeleton = _module_in_dtype(merged, dtype, place)
    example = reads.example() if reads.texts is not None else next(tasks[min(tasks)].diagnosis.batches()).inputs
    example = inputs_to_device(example, place, dtype)
    chain, lm = _layer_chain_and_head(skeleton, example, reads, settings)
    pooling = settings.pool or chain.modality.pool
    marks = _head_fingerprints(head_of, skeleton, chain, example, pooling)
    weights = {key: module_source(module, key) for key, module in modules.items()}
    in_place = {key: module for key, module in modules.items() if _has_dtype_and_device(module, dtype, place)}
    models = ModelPool(chain, skeleton, weights, device=place, dtype=dtype, modules=in_place)
    # The pool has checked that all shapes agree.
    if chain.require_shared is not None:
        chain.require_shared(((key, _module_in_dtype(module, dtype)) for key, module in modules.items()), example)

    if reads.texts is not None:
        tasks = _sample_text_tasks(built, stated, head_of, models, lm, reads.texts, settings)
    return _LiveModels(models, tasks, pooling, reads, marks, tuple(_live_notices(tasks, merged, settings.mask, chain)))


def _modules_by_variant(built: Modules) -> dict[str, nn.Module]:
    models = {} if built.base is None else {"base": built.base}
    models |= {expert_name(task): expert for task, expert in sorted((built.experts or {}).items())}
    models |= {"merged": built.merged}
    return models | {baseline_variant(name): model for name, model in (built.baselines or {}).items()}


def _head_fingerprints(
    head_of: Mapping[str, ScoreMap],
    skeleton: nn.Module,
    chain: LayerChain,
    example: Any,
    pooling: Pool,
) -> dict[str, list[float]]:
    """Return each head's scores of fixed features, which identify the head; refuse a wrong width."""
    # Refuse unreadable inputs before any model runs.
    _, side = chain.start(example)
    check_deterministic(skeleton, map_tensors(lambda tensor: tensor[:_SEEN_TWICE], example), chain)
    if not head_of:
        return {}
    stream = chain.layers[-1].stream
    final = chain.library_states(skeleton, example)[-1][stream].detach()
    final = pool_features(final, pooling, side.mask(stream))
    marks = {}
    for task, head in head_of.items():
        # A fixed seed: the numbers are compared with those of a saved run.
        numbers = torch.Generator().manual_seed(0)
        probe = torch.randn(_PROBES, *final.shape[1:], generator=numbers).to(final)
        with full_precision_matmul():
            scores = head.scores(probe).detach().cpu().double().flatten(1)
        marks[task] = (scores @ torch.randn(scores.shape[1], generator=numbers).double()).tolist()
    return marks


def _layer_chain_and_head(
    module: Any, example: Any, reads: Preprocess, settings: LiveSettings
) -> tuple[LayerChain, LmHeadSpec | None]:
    """Split the module into layers; of a decoder also return its head."""
    form = None if reads.texts is None else reads.texts.form
    if form == "decoder":
        return causal_chain(module, example, settings.blocks)
    if settings.blocks is None and settings.mask is None:
        if form == "encoder-decoder":
            return seq2seq_chain(module, example)
        return chain_of_module(module, example), None
    return sequential_chain(module, example, blocks=settings.blocks, mask=settings.mask), None


def _preprocess_of_module(module: Any, tokenizer: Any) -> Preprocess:
    """Return the text preprocessing of a transformers model in memory; refuse other generators."""
    if tokenizer is None:
        return Preprocess("by the caller", list)
    config, answers = getattr(module, "config", None), getattr(module, "can_generate", bool)()
    kind = getattr(config, "model_type", None)
    described = {"model_type": kind, "architectures": [type(module).__name__]}
    form: Form = "encoder"
    if answers and is_seq2seq(described):
        form = "encoder-decoder"
    elif answers and is_causal_lm(described):
        form = "decoder"
    elif answers or kind is None:
        raise IncompatibleModelsError(
            f"the {type(module).__name__} has type {kind}; among generating models, tokenizer= supports "
            "encoder-decoders and causal language models of transformers",
            hint="Remove tokenizer= and pass batches of model inputs; answers are then not scored.",
        )
    generation: Any = getattr(module, "generation_config", None) or config
    stated = {key: value for key, value in generation.to_dict().items() if value is not None}
    return text_preprocess(copy.deepcopy(tokenizer), config, stated, form, type(module).__name__)


def _sample_tensor_tasks(
    built: Modules, head_of: Mapping[str, ScoreMap], settings: LiveSettings
) -> dict[str, TaskSamples]:
    tasks = {}
    drawn: dict[str, Any] = {"seed": settings.seed, "batch_size": settings.batch_size}
    for task, source in sorted((built.data or {}).items()):
        head, shown = head_of.get(task), None
        names = None if head is None else head.classes
        samples = sample_live_data(task, source, n=settings.n, split="diagnosis", class_names=names, **drawn)
        if built.calibration:
            # The labels of calibration samples are not read, so they need not fit the head.
            count = settings.n_calibration
            shown = sample_live_data(task, built.calibration[task], n=count, split="calibration", **drawn)
        tasks[task] = TaskSamples(samples, samples if samples.labels and head is not None else None, head, shown)
    return tasks


def _sample_text_tasks(
    built: Modules,
    stated: Mapping[str, Mapping[str, Any]],
    head_of: Mapping[str, ScoreMap],
    pool: ModelPool,
    lm: LmHeadSpec | None,
    reader: TextProcessor,
    settings: LiveSettings,
) -> dict[str, TaskSamples]:
    """Sample tasks of texts, with the given heads or the models' own."""
    # Import here: only texts need the modules that open files.
    from driftlens.experiment.study_loading import answer_head, build_task_samples

    tasks = dict[str, TaskSamples]()
    for task in sorted(stated):
        rules, head = stated[task], head_of.get(task)
        classes = {} if head is None or "words" in rules else {"classes": list(head.classes)}
        entry = validate_section(TextEntry, {"kind": "live", "input": "input", **classes, **rules}, f"texts[{task!r}]")
        rows: dict[Split, tuple[Any, int | None]] = {"diagnosis": ((built.data or {})[task], settings.n)}
        if built.calibration:
            rows["calibration"] = built.calibration[task], settings.n_calibration
        data = sample_live_texts(task, rows, entry, reader=reader, seed=settings.seed, batch_size=settings.batch_size)
        if head is None and lm is not None:
            head = answer_head(data, pool.source(expert_name(task)), lm)
        samples = build_task_samples(task, data, head, entry.metric or (), pool)
        tasks[task] = samples if built.calibration else dataclasses.replace(samples, calibration=None)
    return tasks


def _module_in_dtype(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> nn.Module:
    """Return the module, or a copy if its parameters have another dtype or device."""
    return module if _has_dtype_and_device(module, dtype, device) else copy.deepcopy(module).to(device, dtype)


def _has_dtype_and_device(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> bool:
    return all(
        parameter.dtype == dtype and parameter.device == (device or parameter.device)
        for parameter in module.parameters()
        if parameter.is_floating_point()
    )


def _live_notices(tasks: Mapping[str, TaskSamples], module: nn.Module, mask: Mask, chain: LayerChain) -> Iterator[str]:
    for data in tasks.values():
        yield from data.diagnosis.notices
    pad_token = getattr(getattr(module, "config", None), "pad_token_id", None)
    for task, data in tasks.items():
        inputs = raw_inputs(next(data.diagnosis.batches()).inputs)
        if chain.modality is IMAGE:
            unread = [str(entry) for entry in inputs.values if entry not in ("input", PIXELS)]
            if unread:
                yield f"task {task}: inputs {', '.join(unread)} are ignored; the image tower reads {PIXELS}"
            continue
        notice = missing_mask_warning(inputs, pad_token) if mask is None else None
        if notice is not None and "attention_mask" not in inputs.values:
            yield f"task {task}: {notice}"
    if any(data.test is not None or data.head is not None for data in tasks.values()):
        yield "accuracy is measured on the diagnosis samples"


def _require_matching_modules(built: Modules, by_task: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Refuse tasks without experts, experts without tasks, and modules of different classes."""
    experts = set(built.experts or ())
    for label, entries in by_task.items():
        if not experts or (entries is not None and experts != set(entries)):
            raise SpecError(
                f"experts are given for {sorted(experts)}, {label} for {sorted(entries or ())}",
                hint="Name each task in both.",
            )
    if unknown := sorted({*(built.heads or {})} - experts):
        raise SpecError(
            f"experts are given for {sorted(experts)}, heads for {unknown} too",
            hint="Name heads like their experts; they are optional.",
        )
    modules = _modules_by_variant(built)
    if len({type(module) for module in modules.values()}) > 1:
        listed = ", ".join(f"{name} is a {type(module).__name__}" for name, module in modules.items())
        raise IncompatibleModelsError(
            f"the modules have different classes: {listed}",
            hint="Pass modules of one class, unwrapped (`compiled._orig_mod`, `parallel.module`).",
        )


# Key of the inputs of a batch that is a single tensor.
_ONLY = ""
# Entries of a mapping that hold labels; the others are inputs.
_LABELS = ("labels", "label")


@dataclass(frozen=True)
class _LiveBatch:
    """A batch of data in memory: inputs by name (`_ONLY` for a single tensor), labels, names of dropped entries."""

    inputs: Inputs
    labels: tuple[int | str, ...] | None
    dropped: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def select_samples(self, rows: Sequence[int]) -> _LiveBatch:
        index = torch.as_tensor(list(rows), dtype=torch.long)
        labels = None if self.labels is None else tuple(self.labels[row] for row in rows)
        inputs = {name: tensor[index] for name, tensor in self.inputs.items()}
        return _LiveBatch(inputs, labels, self.dropped)


@dataclass(frozen=True)
class _LiveSource:
    """Data in memory that can be read repeatedly: `start` yields batches of the samples at positions, or of all.

    `total` is their number, if known before the end, and `class_names` the meaning of numeric labels, if there is any.
    """

    start: Callable[[Sequence[int] | None], Iterator[_LiveBatch]]
    total: int | None
    notices: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None


def sample_live_data(
    task: str,
    source: Any,
    *,
    n: int | None = None,
    seed: int = 0,
    split: Split = "diagnosis",
    batch_size: int = 32,
    class_names: Sequence[str] | None = None,
) -> SampleSet:
    """Sample `n` samples of a tensor, data set or loader and copy them to memory; ids are positions in it.

    Of iterables of unknown length, the first `n` samples are taken. Sequences of different lengths are padded at the
    end if there is an attention mask. Notices report this and all dropped entries.

    Args:
        task: with `seed` and `split`, determines the random samples.
        source: a tensor [n, ...]; a torch Dataset or DataLoader; a Hugging Face Dataset; or an iterable of batches. A
            batch is a tensor, a mapping to tensors, or a tuple of one of these, labels [n] (integers or names) and
            other values, which are dropped. Entries `labels` and `label` of a mapping are labels; text is dropped.
        n: number of samples; None keeps all, in their order.
        seed: see `task`.
        split: see `task`.
        batch_size: samples per batch of the result.
        class_names: the rows of the head. Labels match them by name: their own, or the data set's name of their
            number; other numbers index the rows.
    """
    where = f"data[{task!r}]"
    opened = _open_live_source(source, batch_size, where)
    positions, notices = None, list(opened.notices)
    if n is not None and opened.total is not None and n < opened.total:
        positions = random_order(opened.total, seed, task=task, split=split)[:n]
        notices.append(f"{n} of {opened.total} samples were sampled with seed {seed}")
    whole = _concatenate_batches(list(_read_batches(opened, positions, n, where)), where)
    count, inputs = len(whole), whole.inputs
    if opened.total is None and count == n:
        notices.append(f"the first {n} samples are used; give a Dataset to sample at random")
    notices += [f"ignored in every batch: {entry}" for entry in sorted(whole.dropped)]
    labels = None
    if whole.labels is not None:
        labels, remarks = _label_class_names(whole.labels, opened.class_names, class_names, where)
        notices += remarks

    def load_batch(rows: Sequence[int]) -> Any:
        picked = _LiveBatch(inputs, None).select_samples(rows).inputs
        return picked.get(_ONLY, picked)

    return SampleSet(
        task,
        split,
        tuple(str(position) for position in (range(count) if positions is None else positions)),
        labels,
        load_batch,
        batch_size,
        notices=tuple(f"task {task}: {notice}" for notice in notices),
    )


def sample_live_texts(
    task: str,
    sources: Mapping[Split, tuple[Any, int | None]],
    entry: TextEntry,
    reader: TextProcessor,
    seed: int,
    batch_size: int,
) -> TaskData:
    """Sample rows of text in memory; they are read and validated like rows of files.

    Args:
        task: the task's name.
        sources: per split (diagnosis, perhaps calibration) the rows and how many to keep (None: all). A row maps
            columns to values, or is a question, or a pair of question and answer.
        entry: the rules of a spec entry.
        reader: the tokenizer and its rules.
        seed: of the sampling.
        batch_size: samples per batch.
    """
    if related := related_text_columns(entry):
        raise SpecError(
            f"texts[{task!r}]: {next(iter(related))} is not supported for rows in memory",
            hint="Write them to a JSON lines file, and name it in a spec.",
        )
    sets, where, names = dict[str, SampleSet](), f"data[{task!r}]", (entry.input or "input", entry.answer_column)
    for split, (rows, n) in sources.items():
        pairs = [[row] if isinstance(row, str) else row for row in rows]
        values = [row if isinstance(row, Mapping) else dict(zip(names, row, strict=False)) for row in pairs]
        class_names = getattr((getattr(rows, "features", None) or {}).get(entry.answer_column), "names", None)
        columns, ids = dict.fromkeys(itertools.chain(*values)), [*map(str, range(len(values)))]
        view = text_split_view(
            entry, split, ids, columns, values.__getitem__, where=where, origin=where, names=class_names
        )
        drawn = sample_positions(view, "all" if n is None or n >= len(ids) else n, seed, task=task, split=split)
        sample_texts = build_sample_set(task, split, view, drawn, view.class_names, list, batch_size)
        texts = [view.read(position) for position in drawn]
        sets[split] = dataclasses.replace(to_text_samples(sample_texts, texts, entry, reader), source=None)
    notices = tuple(dict.fromkeys(notice for samples in sets.values() for notice in samples.notices))
    shown = dataclasses.replace(sets["diagnosis"], notices=notices)
    kept = (sets.get("calibration", shown), shown, shown)
    return TaskData(task, view.class_names, (), *kept, {})


def _label_class_names(
    labels: Sequence[int | str], names_of_data: tuple[str, ...] | None, rows: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], list[str]]:
    """Return the class name of every label, matched to the head's classes (`rows`) if there is a head, and notices."""
    plain = tuple(map(str, labels))
    names = plain if names_of_data is None else tuple(label_to_class(label, names_of_data, where) for label in labels)
    if rows is None:
        return names, []
    chosen = next((candidate for candidate in (names, plain) if {*candidate} <= {*rows}), None)
    if chosen is None:
        if names_of_data is not None or any(isinstance(label, str) for label in labels):
            require_same_classes(names, rows, where=where, all_of_head=False)
        chosen = tuple(label_to_class(label, rows, where) for label in labels)
        return chosen, [f"numeric labels index the head's classes: {labels[0]} is {chosen[0]!r}"]
    place = {name: row for row, name in enumerate(rows)}
    apart = [label for label, name in zip(labels, chosen, strict=True) if label not in (name, place[name])]
    if not apart or chosen is not plain:
        return chosen, []
    return chosen, [f"labels are used as names: {apart[0]} is row {place[str(apart[0])]} of the head"]


def _open_live_source(source: Any, batch_size: int, where: str) -> _LiveSource:
    if isinstance(source, Tensor):
        return _in_memory_source([source], where)
    if _is_datasets_instance(source, "iterable_dataset", "IterableDataset"):
        rows = source.with_format("torch")
        return _LiveSource(lambda _: (_parse_batch(batch, where) for batch in rows.iter(batch_size)), None)
    is_dataset = isinstance(source, Dataset) and not isinstance(source, IterableDataset)
    if _is_datasets_instance(source, "arrow_dataset", "Dataset"):
        source, is_dataset = _with_tensor_format(source, where), True
    if is_dataset:
        source = DataLoader(source, batch_size=batch_size)
    if isinstance(source, DataLoader) and source.batch_size is not None:
        # By exact type: a subclass may choose samples, so its order is part of the data.
        if type(source.sampler) is RandomSampler:
            return _dataset_source(source, where, "the loader shuffles; its data set is read in order instead")
        if type(source.sampler) is SequentialSampler:
            return _dataset_source(source, where)
    if isinstance(source, list | tuple):
        return _in_memory_source([source] if _is_labelled_batch(source) else source, where)
    if isinstance(source, Iterator):
        raise DataError(
            f"{where}: a {type(source).__name__} is read only once",
            hint="Give list(batches) or a DataLoader.",
        )
    return _LiveSource(lambda _: (_parse_batch(batch, where) for batch in source), None)


def _is_labelled_batch(source: Sequence[Any]) -> bool:
    """Return True if a pair is one batch of inputs with labels, False if it is two batches."""
    if not isinstance(source, tuple) or len(source) != 2:
        return False
    inputs, labels = source
    # A pair of label-like vectors is ambiguous; it counts as two batches.
    is_line = getattr(inputs, "ndim", 0) == 1
    return not is_line and getattr(labels, "ndim", 1) == 1 and bool(_class_labels_or_none(labels))


def _is_datasets_instance(value: Any, file: str, name: str) -> bool:
    """Return True if a value is of this class of `datasets`; the library is not imported."""
    # A module called `datasets` may be the user's own file, without such a submodule.
    return isinstance(value, getattr(sys.modules.get(f"datasets.{file}"), name, ()))


def _with_tensor_format(rows: Any, where: str) -> Any:
    """Set a Hugging Face data set's format to torch tensors, unless a format is set."""
    if rows.format["type"] is not None:
        return rows
    columns = rows.features.items()
    pictures = [name for name, feature in columns if _is_datasets_instance(feature, "features.image", "Image")]
    if pictures:
        raise DataError(
            f"{where}: column {pictures[0]!r} holds images, expected model inputs",
            hint="Preprocess them: data.with_transform(lambda rows: {**processor(rows["
            f'"{pictures[0]}"], return_tensors="pt"), "label": rows["label"]}}).',
        )
    return rows.with_format("torch")


def _in_memory_source(batches: Sequence[Any], where: str) -> _LiveSource:
    whole = [_concatenate_batches([_parse_batch(batch, where) for batch in batches], where)] if batches else []
    return _LiveSource(
        lambda chosen: (part if chosen is None else part.select_samples(chosen) for part in whole),
        sum(map(len, whole)),
    )


def _dataset_source(loader: DataLoader[Any], where: str, *notices: str) -> _LiveSource:
    """Read a DataLoader's data set in its stored order, with the loader's `collate_fn`."""
    dataset: Any = loader.dataset
    collate = loader.collate_fn
    if collate is default_collate:
        collate = functools.partial(_collate_padded, where=where)

    def iterate_batches(positions: Sequence[int] | None) -> Iterator[_LiveBatch]:
        again: DataLoader[Any] = DataLoader(
            dataset if positions is None else Subset(dataset, list(positions)),
            batch_size=loader.batch_size,
            drop_last=loader.drop_last and positions is None,
            collate_fn=collate,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            # A separate generator, because starting a loader draws from the global one.
            generator=torch.Generator(),
        )
        return (_parse_batch(batch, where) for batch in again)

    return _LiveSource(iterate_batches, len(dataset), notices, _dataset_class_names(dataset))


def _collate_padded(rows: Sequence[Any], where: str) -> _LiveBatch:
    """Collate rows as torch does, but pad sequences of different lengths."""
    return _concatenate_batches([_parse_batch(default_collate([row]), where) for row in rows], where)


def _dataset_class_names(dataset: Any) -> tuple[str, ...] | None:
    features = getattr(dataset, "features", None)
    of_labels = [features[key] for key in _LABELS if isinstance(features, Mapping) and key in features]
    names = next((feature.names for feature in of_labels if hasattr(feature, "names")), find_class_names(dataset))
    are_names = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return tuple(names) if names and are_names else None


def _read_batches(
    source: _LiveSource, positions: Sequence[int] | None, n: int | None, where: str
) -> Iterator[_LiveBatch]:
    """Yield batches up to `n` samples; the first batch is read twice to check that data do not change."""
    probe = next(source.start(positions), None)
    if probe is None:
        raise DataError(f"{where}: no batches", hint="Give at least one sample.")
    left = n
    for index, part in enumerate(source.start(positions)):
        if index == 0 and not _is_equal_batch(probe.inputs, part.inputs):
            raise DataError(
                f"{where}: the first batch differs when read again",
                hint="Every model must see the same samples: remove random augmentation, and shuffle only "
                "in a DataLoader.",
            )
        yield part if left is None else part.select_samples(range(min(left, len(part))))
        left = None if left is None else left - len(part)
        if left is not None and left <= 0:
            return


def _is_equal_batch(one: Inputs, other: Inputs) -> bool:
    forms = [{name: (value.shape, value.dtype) for name, value in batch.items()} for batch in (one, other)]
    return forms[0] == forms[1] and all(
        torch.allclose(one[name], other[name], rtol=0, atol=0, equal_nan=True) for name in one
    )


def _parse_batch(batch: Any, where: str) -> _LiveBatch:
    if isinstance(batch, _LiveBatch):
        return batch
    values, labels, dropped = batch, None, set[str]()
    if isinstance(batch, tuple | list) and batch:
        values, *rest = batch
        second = rest[0] if rest else None
        labels = _class_labels_or_none(second)
        if second is not None and labels is None:
            raise DataError(
                f"{where}: the second entry of a batch is {getattr(second, 'dtype', type(second).__name__)}, "
                "expected integer labels [n]",
                hint="Put several inputs into a dict of tensors.",
            )
        dropped |= {"what follows the labels"} if rest[1:] else set()
    inputs = dict(values) if isinstance(values, Mapping) else {_ONLY: values}
    nothing = "no inputs" if inputs else "an empty dict"
    for name in [name for name in _LABELS if name in inputs]:
        classes = _class_labels_or_none(inputs.pop(name))
        dropped |= {name} if classes is None or labels is not None else set()
        labels = classes if labels is None else labels
    lists = {name: value for name, value in inputs.items() if isinstance(value, list | tuple) and value}
    texts = {name for name, value in lists.items() if all(isinstance(entry, str) for entry in value)}
    inputs = {str(name): value for name, value in inputs.items() if name not in texts}
    odd = [value for value in inputs.values() if not isinstance(value, Tensor) or value.dim() == 0]
    if odd or not inputs:
        raise DataError(
            f"{where}: a batch holds {type(odd[0]).__name__ if odd else nothing}, expected tensors [n, ...]",
            hint="Give a tensor, a dict of tensors, or one of these with labels: (inputs, labels).",
        )
    lengths = sorted({len(entry) for entry in (*inputs.values(), labels) if entry is not None})
    if len(lengths) > 1 or 0 in lengths:
        raise DataError(f"{where}: a batch has lengths {lengths}", hint="Give one row per sample, at least one.")
    on_cpu = {name: tensor.detach().cpu() for name, tensor in inputs.items()}
    return _LiveBatch(on_cpu, labels, frozenset(dropped | texts))


def _class_labels_or_none(value: Any) -> tuple[int | str, ...] | None:
    classes = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(classes, list | tuple) and all(isinstance(label, int | str) for label in classes):
        return tuple(classes)
    return None


def _concatenate_batches(parts: Sequence[_LiveBatch], where: str) -> _LiveBatch:
    if any(
        part.inputs.keys() != parts[0].inputs.keys() or (part.labels is None) != (parts[0].labels is None)
        for part in parts
    ):
        raise DataError(f"{where}: batches have different entries", hint="Give every batch the same entries.")
    inputs = {name: torch.cat(_pad_to_one_length(name, parts)) for name in parts[0].inputs}
    labels = [label for part in parts for label in part.labels or ()]
    dropped = frozenset().union(*(part.dropped for part in parts))
    return _LiveBatch(inputs, None if parts[0].labels is None else tuple(labels), dropped)


def _pad_to_one_length(name: str, parts: Sequence[_LiveBatch]) -> list[Tensor]:
    """Return the batches' tensors of one input, with masked sequences padded to the longest."""
    tensors = [part.inputs[name] for part in parts]
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) == 1:
        return tensors
    masks = [mask_for_input(part.inputs, name) for part in parts]
    pairs = list(zip(tensors, masks, strict=True))
    # Only a sequence as long as its mask may grow: padding anything else would change its meaning.
    are_masked = all(mask is not None and tensor.shape[:2] == mask.shape for tensor, mask in pairs)
    if not are_masked or len({shape[1:] for shape in shapes}) > 1:
        return tensors
    longest = max(shape[0] for shape in shapes)
    # At the end, where padding moves no other token and, masked, changes none.
    return [F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, longest - tensor.shape[1])) for tensor in tensors]
