"""Live modules: opens models and samples that the caller has built, without reading any file.

Entry point: `open_modules`, for analyses of live modules and for `FeatCal.fit`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from driftlens.checkpoints.tensor_sources import module_source
from driftlens.checkpoints.unsupported import is_causal_lm, is_seq2seq
from driftlens.config.data import TextEntry
from driftlens.config.requests import LiveSettings, Modules
from driftlens.config.types import validate_section
from driftlens.data.live import sample_live_data, sample_live_texts
from driftlens.data.samples import slice_rows
from driftlens.engine.pool import ModelPool, inputs_to_device
from driftlens.experiment.study import TaskSamples
from driftlens.models.architecture import architecture_of
from driftlens.models.architectures.clip import PIXELS
from driftlens.models.architectures.language import causal_chain, seq2seq_chain
from driftlens.models.architectures.module_list import check_deterministic, sequential_chain
from driftlens.models.chain import IMAGE, LayerChain, Pool, pool_features
from driftlens.models.heads import LmHeadSpec, ScoreMap, linear_head
from driftlens.models.preprocessing import Preprocess, text_preprocess
from driftlens.models.texts import Form, TextProcessor
from driftlens.models.tracing.block_call import Mask, missing_mask_warning, raw_inputs
from driftlens.utils.devices import full_precision_matmul, require_dtype, resolve_device
from driftlens.utils.errors import IncompatibleModelsError, SpecError
from driftlens.utils.variants import baseline_variant, expert_name

if TYPE_CHECKING:
    from driftlens.data.sources import Split

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
    check_deterministic(skeleton, slice_rows(example, slice(_SEEN_TWICE)), chain)
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
        return architecture_of(module, example).chain, None
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
    from driftlens.experiment.loading import answer_head, build_task_samples

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
