"""A study of live modules and in-memory data: the same analysis, and what is added to it, without any file to read."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from driftlens.checkpoints.tensor_sources import module_source
from driftlens.checkpoints.unsupported import is_causal, is_seq2seq
from driftlens.config.data import TextEntry
from driftlens.config.requests import AnalysisRequest, LiveSettings, Modules, refuse_unknown
from driftlens.config.types import checked
from driftlens.data.live import live_samples, live_texts
from driftlens.data.samples import cut
from driftlens.data.sources import Split
from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.pool import ModelPool, on_device
from driftlens.engine.sites import select_layers
from driftlens.experiment.loading import OpenModels, lm_head, task_samples
from driftlens.experiment.resume import (
    deterministic_algorithms,
    require_same_models,
    require_same_samples,
)
from driftlens.experiment.study import Settings, Study, TaskSamples
from driftlens.models.architecture import Architecture, architecture_of
from driftlens.models.architectures.causal import causal_chain
from driftlens.models.architectures.module_list import check_deterministic, sequential_chain
from driftlens.models.architectures.seq2seq import seq2seq_chain
from driftlens.models.architectures.vit import PIXELS
from driftlens.models.chain import IMAGE, LayerChain, Pool, pooled
from driftlens.models.heads import LmScores, ScoreMap, linear_head
from driftlens.models.preprocessing import Preprocess, text_preprocess
from driftlens.models.texts import Form, TextReader
from driftlens.models.tracing.block_call import Mask, raw_inputs, unmasked_padding
from driftlens.pipelines.analyze import Phases, describe
from driftlens.runs.layout import MANIFEST
from driftlens.runs.manifest import ids_digest, read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.access import Context
from driftlens.utils.devices import exact_products, require_dtype, resolve_device
from driftlens.utils.errors import DataError, IncompatibleModelsError, SpecError
from driftlens.utils.variants import baseline, expert_of, task_of

_LOADER = "live"
"""The manifest's name for the loader of modules that the caller has built."""
_FREE = ("n_calibration", "batch_size")
"""Settings on which no number of a run rests, so that they may be others when something is added to it."""
_SEEN_TWICE = 2
"""Samples that are run twice, to see that a model answers them in one way."""
_PROBES = 4
"""Features that a head scores to be known again."""
_ALIKE = 1e-4
"""How far apart scores of the same head may be on another machine, relative to their size."""


def live_study(built: Modules, settings: LiveSettings = LiveSettings()) -> Study:
    """Return a study of modules that the caller has built. They run in eval mode; nothing about them is changed."""
    merged, modules = built.merged, _by_variant(built)
    stated = {**{task: {} for task in built.experts or {}}, **(settings.texts or {})}
    _require_alike(built, {"data": built.data, "calibration data": built.calibration, "texts": stated})
    place = next(merged.parameters()).device if built.device is None else resolve_device(built.device)
    head_of = {
        task: linear_head(module_source(head, "head"), None) if isinstance(head, nn.Linear) else head
        for task, head in (built.heads or {}).items()
    }
    reads = _preprocess(merged, settings.tokenizer)
    if settings.texts and reads.texts is None:
        raise SpecError("texts= is given without tokenizer=", hint="Give the tokenizer of the models.")
    tasks = _tasks(built, head_of, settings) if reads.texts is None else {}

    floats = (parameter.dtype for parameter in merged.parameters() if parameter.is_floating_point())
    dtype = functools.reduce(torch.promote_types, floats, torch.float32)  # the widest, not half precision
    require_dtype(place, dtype)
    skeleton = _in_dtype(merged, dtype, place)
    example = (
        reads.example() if reads.texts is not None else next(tasks[min(tasks)].diagnosis.batches()).inputs
    )
    example = on_device(example, place, dtype)
    chain, lm = _chain(skeleton, example, reads, settings)
    pooling = settings.pool or chain.modality.pool
    marks = _marks(head_of, skeleton, chain, example, pooling)
    weights = {key: module_source(module, key) for key, module in modules.items()}
    in_place = {key: module for key, module in modules.items() if _is_in(module, dtype, place)}
    models = ModelPool(chain, skeleton, weights, device=place, dtype=dtype, modules=in_place)
    if chain.require_shared is not None:  # of models of one shape, which the pool has made sure of
        chain.require_shared(((key, _in_dtype(module, dtype)) for key, module in modules.items()), example)

    if reads.texts is not None:
        tasks = _text_tasks(built, stated, head_of, models, lm, reads.texts, settings)
    options = ("cka", "adjoint", "groups")
    return Study(
        name=settings.name,
        pool=models,
        variants=tuple(key for key in modules if task_of(key) is None),
        tasks=tasks,
        settings=Settings(
            pool=pooling,
            stored_layers=frozenset(select_layers([layer.path for layer in chain.layers], settings.layers)),
            options=frozenset(name for name in options if getattr(settings, name)),
            # A record says it as a mapping.
            jacobian=JacobianSettings(**how) if isinstance(how := settings.jacobian, Mapping) else how,
        ),
        seed=settings.seed,
        notices=tuple(_notices(tasks, merged, settings.mask, chain)),
        provenance={key: f"live {type(module).__name__}" for key, module in modules.items()},
        preprocessing=reads.backend,
        architecture={"loader": _LOADER, "source": type(merged).__name__, **reads.settings},
        head_marks=marks,
    )


def live_again(
    folder: pathlib.Path,
    given: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
    num_calibration: int | None,
) -> tuple[Study, OpenModels]:
    """Return the study of a run of live modules, which are handed in again with their samples, and its models.

    `given` are fields of `Modules` and `LiveSettings`; what is left out is the run's. Settings, samples, labels and
    heads are compared with the run's; to compare weights is up to the caller.
    """
    of_modules = {field.name: None for field in dataclasses.fields(Modules)}
    refuse_unknown("modules", given, {**of_modules, **LiveSettings.keywords()})
    handed = {name: value for name, value in given.items() if name in of_modules and value is not None}
    stated = {name: value for name, value in given.items() if name not in of_modules}
    stated |= {} if num_calibration is None else {"n_calibration": num_calibration}
    begun = read_manifest(folder).live or {}
    was = LiveSettings(**begun.get("settings", {}))
    _require_same_settings(was, LiveSettings(**stated))
    settings = was.changed(**stated)
    if calibration is not None:
        handed = {"data": calibration, **handed, "calibration": calibration}
    modules = Modules(**handed)
    _require_what_was_given(folder, modules, settings, begun.get("contents", {}))
    study = live_study(modules, settings)
    _require_same_contents(begun.get("contents", {}), study)
    tasks = {
        task: data if data.calibration else dataclasses.replace(data, calibration=data.diagnosis)
        for task, data in study.tasks.items()
    }
    study = dataclasses.replace(study, tasks=tasks)
    sources = {name: study.pool.source(name) for name in study.pool.names}
    architecture = Architecture(_LOADER, type(modules.merged).__name__, modules.merged, study.pool.chain)
    return study, OpenModels(architecture, sources, sources, study.provenance, form=sources["merged"])


def _require_what_was_given(
    folder: pathlib.Path, modules: Modules, settings: LiveSettings, contents: Mapping[str, Any]
) -> None:
    """Refuse to add to a run without a module, data, a function or a head that it was made with."""
    missing = modules.missing
    missing += [name for name in ("mask", "tokenizer") if getattr(settings, name) is True]
    manifest = read_manifest(folder)
    # Nothing is noted of heads that language models bring.
    with_head = [task for task in manifest.classes if contents.get(task, {}).get("head", True)]
    missing += [f"heads of {task}" for task in with_head if task not in (modules.heads or {})]
    missing += ["base"] if "base" in manifest.variants and modules.base is None else []
    if missing:
        raise SpecError(
            f"{folder} was made from live modules, and to add to it these are missing: {', '.join(missing)}",
            hint="Hand in what dl.analyze was given: "
            "modules={'base': ..., 'merged': ..., 'experts': {...}, 'data': {...}, 'heads': {...}}.",
        )


def analyze_study(
    study: Study, request: AnalysisRequest, settings: LiveSettings, context: Context = Context()
) -> DriftRun:
    """Measure the drift of a study of live modules and write a run directory, in which `settings` are written down."""
    out = request.out or pathlib.Path("runs", study.name)
    live = {"settings": _recorded(settings), "contents": _contents(study)}
    digest = hashlib.sha256(json.dumps(live["settings"], sort_keys=True).encode()).hexdigest()
    goes_on = request.resume and (out / MANIFEST).exists()
    if goes_on:
        manifest = read_manifest(out)
        begun = manifest.live or {}
        if _recorded(LiveSettings(**begun.get("settings", {}))) != live["settings"]:
            raise SpecError(
                f"{out} was begun with other settings", hint="Resume with the same, or choose another out."
            )
        require_same_samples(manifest, study)
        _require_same_contents(begun.get("contents", {}), study)
        require_same_models(manifest, study, context.reporter())
    described = "# made from live modules; it can be read, and added to where they are handed in again\n"
    text = f"{described}name: {json.dumps(study.name)}\n"
    about: dict[str, Any] = {"spec_yaml": text, "spec_digest": digest, "name": study.name, "live": live}
    with RunWriter.resume(out) if goes_on else RunWriter.create(out, **about, force=request.force) as writer:
        reporter = context.reporter(writer.progress)
        describe(writer, study, synthetic=False)
        with deterministic_algorithms(study.settings.deterministic):
            Phases(writer, study, reporter).analyze()
    return open_run(out)


def _recorded(settings: LiveSettings) -> dict[str, Any]:
    """Return the settings as JSON has them; functions and tokenizers stay with the caller."""
    return dict(json.loads(json.dumps(settings.model_dump(), default=lambda number: number.item())))


def _require_same_settings(was: LiveSettings, now: LiveSettings) -> None:
    """Refuse settings whose rows don't belong to those of the run."""
    old, new = _recorded(was), _recorded(now)
    for name in now.model_fields_set - {*_FREE}:
        if new[name] != old[name]:
            raise SpecError(
                f"modules has {name}={new[name]!r}, the run was made with {name}={old[name]!r}",
                hint="Leave it out: settings are those of the run. Analyze into another folder for other ones.",
            )


def _contents(study: Study) -> dict[str, dict[str, Any]]:
    """Return digests of each task's samples, labels and head."""
    return {
        task: {
            "samples": ids_digest(data.diagnosis.digests),
            "labels": ids_digest(data.diagnosis.labels or [text.target for text in data.diagnosis.all_texts]),
            "classes": ids_digest(data.head.classes if data.head is not None else ()),
            "head": list(study.head_marks.get(task, ())),
        }
        for task, data in study.tasks.items()
    }


def _require_same_contents(begun: Mapping[str, Any], study: Study) -> None:
    """Refuse other samples, labels or heads than the run's."""
    now = _contents(study)
    if begun and begun.keys() != now.keys():
        raise SpecError(f"the run was made with the tasks {', '.join(begun)}; given are {', '.join(now)}")
    for task, was in begun.items():
        for part in ("samples", "labels"):
            if was[part] != now[task][part]:
                raise DataError(
                    f"the diagnosis {part} of task {task} are not those of the run: the data has changed",
                    hint="Bring the data back, or analyze the data of today into a run of its own.",
                )
        begun_mark, mark = (torch.tensor(entry["head"], dtype=torch.float64) for entry in (was, now[task]))
        near = _ALIKE * float(begun_mark.abs().sum())
        is_alike = begun_mark.shape == mark.shape and torch.allclose(
            begun_mark, mark, rtol=0, atol=near, equal_nan=True
        )
        if was["classes"] != now[task]["classes"] or not is_alike:
            raise SpecError(
                f"the head of {task} is not the one that the run was made with",
                hint="Hand in that head, or analyze with the other one into a run of its own.",
            )


def _by_variant(built: Modules) -> dict[str, nn.Module]:
    """Return all models by their names in tables."""
    models = {} if built.base is None else {"base": built.base}
    models |= {expert_of(task): expert for task, expert in sorted((built.experts or {}).items())}
    models |= {"merged": built.merged}
    return models | {baseline(name): model for name, model in (built.baselines or {}).items()}


def _marks(
    head_of: Mapping[str, ScoreMap], skeleton: nn.Module, chain: LayerChain, example: Any, pooling: Pool
) -> dict[str, list[float]]:
    """Score fixed features with every head; one that does not fit is refused before a run is begun."""
    _, side = chain.start(example)  # refuses what it can't read before anything runs on it
    check_deterministic(skeleton, cut(example, slice(_SEEN_TWICE)), chain)
    if not head_of:
        return {}
    stream = chain.layers[-1].stream
    final = chain.library_states(skeleton, example)[-1][stream].detach()
    final = pooled(final, pooling, side.mask(stream))
    marks = {}
    for task, head in head_of.items():
        numbers = torch.Generator().manual_seed(0)
        probe = torch.randn(_PROBES, *final.shape[1:], generator=numbers).to(final)
        with exact_products():
            scores = head.scores(probe).detach().cpu().double().flatten(1)
        marks[task] = (scores @ torch.randn(scores.shape[1], generator=numbers).double()).tolist()
    return marks


def _chain(
    module: Any, example: Any, reads: Preprocess, settings: LiveSettings
) -> tuple[LayerChain, LmScores | None]:
    """Split the module into layers; of a decoder return its head, too."""
    form = None if reads.texts is None else reads.texts.form
    if form == "decoder":
        return causal_chain(module, example, settings.blocks)
    if settings.blocks is None and settings.mask is None:
        if form == "encoder-decoder":
            return seq2seq_chain(module, example)
        return architecture_of(module, example).chain, None
    return sequential_chain(module, example, blocks=settings.blocks, mask=settings.mask), None


def _preprocess(module: Any, tokenizer: Any) -> Preprocess:
    """Return the text preprocessing of a live model of transformers; refuse generators of other families."""
    if tokenizer is None:
        return Preprocess("by the caller", list)
    config, answers = getattr(module, "config", None), getattr(module, "can_generate", bool)()
    kind = getattr(config, "model_type", None)
    described = {"model_type": kind, "architectures": [type(module).__name__]}
    form: Form = "encoder"
    if answers and is_seq2seq(described):
        form = "encoder-decoder"
    elif answers and is_causal(described):
        form = "decoder"
    elif answers or kind is None:
        raise IncompatibleModelsError(
            f"the {type(module).__name__} is of type {kind}; of models of transformers that answer by text tokenizer= "
            "serves encoder-decoders and causal language models",
            hint="Leave it out and give batches of what the model reads: drift is measured, answers are not.",
        )
    generation: Any = getattr(module, "generation_config", None) or config
    stated = {key: value for key, value in generation.to_dict().items() if value is not None}
    return text_preprocess(copy.deepcopy(tokenizer), config, stated, form, type(module).__name__)


def _tasks(built: Modules, head_of: Mapping[str, ScoreMap], settings: LiveSettings) -> dict[str, TaskSamples]:
    """Draw the samples of tasks that are given as tensors."""
    tasks = {}
    drawn: dict[str, Any] = {"seed": settings.seed, "batch_size": settings.batch_size}
    for task, source in sorted((built.data or {}).items()):
        head, shown = head_of.get(task), None
        names = None if head is None else head.classes
        samples = live_samples(task, source, n=settings.n, split="diagnosis", class_names=names, **drawn)
        if built.calibration:
            # The labels of calibration samples are not read, so they need not fit the head.
            count = settings.n_calibration
            shown = live_samples(task, built.calibration[task], n=count, split="calibration", **drawn)
        tasks[task] = TaskSamples(
            samples, samples if samples.labels and head is not None else None, head, shown
        )
    return tasks


def _text_tasks(
    built: Modules,
    stated: Mapping[str, Mapping[str, Any]],
    head_of: Mapping[str, ScoreMap],
    pool: ModelPool,
    lm: LmScores | None,
    reader: TextReader,
    settings: LiveSettings,
) -> dict[str, TaskSamples]:
    """Draw texts, read as `stated` says, before given heads, whose rows are the classes, or the models' own."""
    tasks = dict[str, TaskSamples]()
    for task in sorted(stated):
        rules, head = stated[task], head_of.get(task)
        classes = {} if head is None or "words" in rules else {"classes": list(head.classes)}
        entry = checked(TextEntry, {"kind": "live", "input": "input", **classes, **rules}, f"texts[{task!r}]")
        rows: dict[Split, tuple[Any, int | None]] = {"diagnosis": ((built.data or {})[task], settings.n)}
        if built.calibration:
            rows["calibration"] = built.calibration[task], settings.n_calibration
        data = live_texts(
            task, rows, entry, reader=reader, seed=settings.seed, batch_size=settings.batch_size
        )
        if head is None and lm is not None:
            head = lm_head(data, pool.source(expert_of(task)), lm)
        samples = task_samples(task, data, head, entry.metric or (), pool)
        tasks[task] = samples if built.calibration else dataclasses.replace(samples, calibration=None)
    return tasks


def _in_dtype(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> nn.Module:
    """Return the module, or a copy where a parameter has another floating dtype or device."""
    return module if _is_in(module, dtype, device) else copy.deepcopy(module).to(device, dtype)


def _is_in(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> bool:
    return all(
        parameter.dtype == dtype and parameter.device == (device or parameter.device)
        for parameter in module.parameters()
        if parameter.is_floating_point()
    )


def _notices(
    tasks: Mapping[str, TaskSamples], module: nn.Module, mask: Mask, chain: LayerChain
) -> Iterator[str]:
    for data in tasks.values():
        yield from data.diagnosis.notices
    pad_token = getattr(getattr(module, "config", None), "pad_token_id", None)
    for task, data in tasks.items():
        inputs = raw_inputs(next(data.diagnosis.batches()).inputs)
        if chain.modality is IMAGE:
            unread = [str(entry) for entry in inputs.values if entry not in ("input", PIXELS)]
            if unread:
                yield f"task {task}: of its batches {', '.join(unread)} are not read: the image tower reads {PIXELS}"
            continue
        notice = unmasked_padding(inputs, pad_token) if mask is None else None
        if notice is not None and "attention_mask" not in inputs.values:
            yield f"task {task}: {notice}"
    if any(data.test is not None or data.head is not None for data in tasks.values()):
        yield "accuracy is measured on the diagnosis samples"


def _require_alike(built: Modules, by_task: Mapping[str, Mapping[str, Any] | None]) -> None:
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
            hint="Name a head as its task's expert; a task may have none.",
        )
    modules = _by_variant(built)
    if len({type(module) for module in modules.values()}) > 1:
        listed = ", ".join(f"{name} is a {type(module).__name__}" for name, module in modules.items())
        raise IncompatibleModelsError(
            f"the modules are of different classes: {listed}",
            hint="Hand in modules of one class; where one is wrapped, what is inside: `compiled._orig_mod`, "
            "`parallel.module`.",
        )
