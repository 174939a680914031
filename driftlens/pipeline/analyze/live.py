"""A study of live modules and in-memory data: the same analysis without any file to read."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from driftlens.data.live import live_samples
from driftlens.data.samples import SampleSet
from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import on_device
from driftlens.errors import IncompatibleModelsError, SpecError
from driftlens.files import PathLike
from driftlens.layers import select_layers
from driftlens.models.architecture import architecture_of
from driftlens.models.chain import LayerChain, Pool, ScoreMap
from driftlens.models.frames import Mask, raw_inputs, unmasked_padding
from driftlens.models.sequential import check_deterministic, sequential_chain
from driftlens.models.sources import module_source
from driftlens.pipeline.analyze.phases import all_of, describe, run_phases
from driftlens.pipeline.study.study import Settings, Study, TaskSamples
from driftlens.progress import CancelToken, ProgressSink, Reporter
from driftlens.records.run import DriftRun, open_run
from driftlens.records.writer import RunWriter
from driftlens.variants import expert_of


def live_study(
    *,
    merged: nn.Module,
    experts: Mapping[str, nn.Module],
    data: Mapping[str, Any],
    base: nn.Module | None = None,
    heads: Mapping[str, ScoreMap] | None = None,
    layers: str | Sequence[str | int] = "blocks",
    blocks: str | None = None,
    mask: Mask = None,
    pool: Pool | None = None,
    n: int | None = 256,
    batch_size: int = 32,
    cka: bool = False,
    jacobian: JacobianSettings | None = None,
    adjoint: bool = False,
    device: str | torch.device | None = None,
    seed: int = 0,
    name: str = "live",
) -> Study:
    """A study of modules that the caller has built. They run in eval mode; nothing about them is changed.

    Args:
        merged: the merged model.
        experts: one per task, of the same class and shape.
        data: per task: a tensor, a Dataset, a DataLoader or an iterable of batches, with labels or without.
        base: the common base, if there is one.
        heads: score maps per task; with labels they give accuracy.
        layers: which layers' rows and features are kept: `blocks`, a glob on module paths, or a list.
        blocks: path of the list of blocks, where it can't be found by itself (generic modules only).
        mask: which tokens count, for generic modules: the name of a batch's entry, a function that makes a mask [n, t]
            of a batch, or False where nothing is padded; `attention_mask` is found by itself.
        pool: how one vector per sample is taken; None takes what suits the models' modality.
        n: samples per task, drawn at random; None takes all.
        batch_size: samples per forward pass.
        cka: whether linear CKA is computed.
        jacobian: settings of path-averaged Jacobians; None leaves them out.
        adjoint: whether changes of loss and margin are traced back to layers; needs `jacobian`.
        device: where it is computed; the merged model's own device by default.
        seed: of the samples drawn and of random directions.
        name: of the run.

    Raises:
        SpecError: tasks of `experts` and `data` differ, or blocks pass on more than features.
        IncompatibleModelsError: the modules differ in class, parameters or shapes, or in what they give their blocks
            beside features.
        NumericsError: a module gives two outputs for one batch in eval mode.
        DataError: the data doesn't repeat, or its batches don't fit together.
    """
    if not experts or set(experts) != set(data):
        raise SpecError(
            f"experts are given for {sorted(experts)}, data for {sorted(data)}",
            hint="Name each task in both.",
        )
    modules = {expert_of(task): experts[task] for task in sorted(experts)} | {"merged": merged}
    modules = ({"base": base} if base is not None else {}) | modules
    _require_one_class(modules)
    head_of = dict(heads or {})
    diagnosis = {
        task: live_samples(
            task,
            data[task],
            n=n,
            seed=seed,
            batch_size=batch_size,
            class_names=head_of[task].classes if task in head_of else None,
        )
        for task in sorted(data)
    }
    first = next(merged.parameters())
    place, dtype = torch.device(device) if device is not None else first.device, _computed_in(merged)
    skeleton = _in_dtype(merged, dtype)
    example = on_device(next(next(iter(diagnosis.values())).batches()).inputs, first.device, dtype)
    chain = _chain(skeleton, example, blocks, mask)
    check_deterministic(skeleton, example)
    if chain.require_shared is not None:
        chain.require_shared(((key, _in_dtype(module, dtype)) for key, module in modules.items()), example)
    return Study(
        name=name,
        pool=ModelPool(
            chain,
            skeleton,
            {key: module_source(module, key) for key, module in modules.items()},
            device=place,
            dtype=dtype,
            modules={key: module for key, module in modules.items() if _is_in(module, dtype, place)},
        ),
        variants=(*(["base"] if base is not None else []), "merged"),
        tasks={task: _task(samples, head_of.get(task)) for task, samples in diagnosis.items()},
        settings=Settings(
            pool=pool or chain.modality.pool,
            stored_layers=frozenset(select_layers([layer.path for layer in chain.layers], layers)),
            options=frozenset(name for name, on in {"cka": cka, "adjoint": adjoint}.items() if on),
            jacobian=jacobian,
        ),
        seed=seed,
        notices=(
            *(notice for samples in diagnosis.values() for notice in samples.notices),
            *_padding_notices(diagnosis, merged, mask),
            *(["accuracy is measured on the diagnosis samples"] if head_of else []),
        ),
        provenance={key: f"live {type(module).__name__}" for key, module in modules.items()},
        preprocessing="by the caller",
        architecture={"loader": "live", "source": type(merged).__name__},
    )


def analyze_study(
    study: Study,
    *,
    out: PathLike,
    force: bool = False,
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> DriftRun:
    """Measure the drift of a study of live modules and write a run directory.

    Raises:
        DriftLensError: as for `driftlens.pipeline.analyze.job.analyze`.
    """
    described = f"# made from live modules; it can be read, not repeated\nname: {json.dumps(study.name)}\n"
    digest = hashlib.sha256(described.encode()).hexdigest()
    with RunWriter.create(
        out, spec_yaml=described, spec_digest=digest, name=study.name, force=force
    ) as writer:
        reporter = Reporter(all_of(writer.progress, on_progress), cancel)
        describe(writer, study, synthetic=False)
        run_phases(writer, study, reporter)
    return open_run(out)


def _chain(module: nn.Module, example: Any, blocks: str | None, mask: Mask) -> LayerChain:
    if blocks is None and mask is None:
        return architecture_of(module, example).chain
    return sequential_chain(module, example, blocks=blocks, mask=mask)


def _computed_in(module: nn.Module) -> torch.dtype:
    """The widest dtype among a module's parameters; float32 for those in half precision."""
    found = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    return functools.reduce(torch.promote_types, found, torch.float32)


def _in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module itself, or a copy of it where a parameter has another floating dtype."""
    return module if _is_in(module, dtype) else copy.deepcopy(module).to(dtype)


def _is_in(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> bool:
    return all(
        parameter.dtype == dtype and parameter.device == (device or parameter.device)
        for parameter in module.parameters()
        if parameter.is_floating_point()
    )


def _padding_notices(data: Mapping[str, SampleSet], module: nn.Module, mask: Mask) -> Iterator[str]:
    pad_token = getattr(getattr(module, "config", None), "pad_token_id", None)
    for task, samples in data.items():
        inputs = raw_inputs(next(samples.batches()).inputs)
        notice = unmasked_padding(inputs, pad_token) if mask is None else None
        if notice is not None and "attention_mask" not in inputs.values:
            yield f"task {task}: {notice}"


def _task(samples: Any, head: ScoreMap | None) -> TaskSamples:
    return TaskSamples(samples, samples if samples.labels is not None and head is not None else None, head)


def _require_one_class(modules: Mapping[str, nn.Module]) -> None:
    kinds = {type(module) for module in modules.values()}
    if len(kinds) > 1:
        listed = ", ".join(f"{name} is a {type(module).__name__}" for name, module in modules.items())
        raise IncompatibleModelsError(f"the modules are of different classes: {listed}")
