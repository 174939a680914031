"""From a spec to a study: open and compare checkpoints, draw samples, make heads. No weights are read yet.

Entry points: `open_study`, or `open_models` for the checkpoints alone.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from driftlens.calibration.calibrator import calibrators, preset_settings, require_task_id
from driftlens.checkpoints.alignment import KeyLayout, RegroupedSource
from driftlens.checkpoints.loading import (
    fetch_config_folder,
    fetch_if_hub_id,
    find_config_folder,
    is_lora_folder,
    open_checkpoint,
    require_same_pooling,
)
from driftlens.checkpoints.lora import LoraSource, lora_base_model
from driftlens.checkpoints.tensor_sources import CompositeSource, StateSource, cast_source
from driftlens.config.packaged import PublishedTask, published_task
from driftlens.config.spec import FileHead, Head, LinearHeadSpec
from driftlens.data.samples import SampleSet, unequal_count_notice
from driftlens.data.task_data import TaskData, normalize_name, open_task_data, require_same_classes
from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_layers
from driftlens.experiment.study import AnalysisSettings, Study, TaskSamples
from driftlens.models.architecture import CAUSAL, HEADS, Architecture, load_architecture
from driftlens.models.chain import LayerChain
from driftlens.models.heads import (
    LmHead,
    LmHeadSpec,
    ScoreMap,
    TextTower,
    class_names,
    config_class_names,
    has_one_score,
    head_from_file,
    is_vocabulary_head,
    linear_head,
    zero_shot_head,
)
from driftlens.models.readouts import EMBEDDED, ExpertHead
from driftlens.models.texts import ImageTextProcessor, generate
from driftlens.models.tracing.block_call import move_to_device
from driftlens.models.vocabularies import (
    align_head,
    align_vocabulary,
    require_same_tokenizer,
    untied_head_key,
    vocabulary_row_counts,
)
from driftlens.utils.devices import require_dtype, resolve_device
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import CheckpointError, DataError, DriftLensError, SpecError
from driftlens.utils.files import expand_home
from driftlens.utils.registry import resolve_settings
from driftlens.utils.variants import ADAPTERS, METRICS, baseline_variant, expert_name, safe_file_name, task_of_expert

if TYPE_CHECKING:
    from driftlens.config.spec import RunSpec


@dataclass(frozen=True)
class OpenModels:
    """The opened checkpoints of a spec by name; only their headers are read.

    Attributes:
        stored: the checkpoints under their own key names, with text towers and classifiers.
        sources: the checkpoints under the skeleton's key names.
        form: headers of saved models, if neither the base's nor an expert's.
        out_dtype: the dtype of saved floating-point tensors, if one was requested.
    """

    architecture: Architecture
    stored: Mapping[str, StateSource]
    sources: Mapping[str, StateSource]
    origins: Mapping[str, str]
    form: StateSource | None = None
    notices: tuple[str, ...] = ()
    out_dtype: torch.dtype | None = None

    @property
    def base(self) -> StateSource | None:
        """The base under its own key names; None without one."""
        return self.stored.get("base")

    def have_adapters(self, tasks: Iterable[str]) -> bool:
        """Return True if the experts of all tasks are LoRA adapters."""
        return all(isinstance(self.stored.get(expert_name(task)), LoraSource) for task in tasks)

    @property
    def save_template(self) -> StateSource:
        """The checkpoint whose keys, dtypes and text tower saved models get: base or first expert."""
        experts = sorted(name for name in self.sources if task_of_expert(name) is not None)
        return self.form or self.base or self.sources[experts[0]]


def open_study(spec: RunSpec, *, access: Permissions = Permissions()) -> tuple[Study, OpenModels]:
    """Open and validate all models, data and heads of a spec; its merge is not computed yet."""
    models = open_models(spec, access)
    data = {task: open_data(spec, task, models.architecture, access=access) for task in spec.tasks}
    heads = open_heads(spec, models, {task: opened.class_names for task, opened in data.items()})
    return build_study(spec, models, data, heads, access=access), models


def build_study(
    spec: RunSpec,
    models: OpenModels,
    data: Mapping[str, TaskData],
    heads: Mapping[str, ScoreMap],
    *,
    access: Permissions = Permissions(),
) -> Study:
    """Build a study from opened models, samples and heads.

    Args:
        spec: the settings.
        models: the opened checkpoints.
        data: samples by task.
        heads: score maps by task.
        access: permissions, device and processes.
    """
    access.team.warn_idle([*data])
    pool = open_pool(spec, models, device=access.device)
    preprocess = models.architecture.preprocess
    if (lm := models.architecture.lm) is not None:
        own = {task: answer_head(opened, models.sources[expert_name(task)], lm) for task, opened in data.items()}
        heads = {**own, **heads}
    settings = analysis_settings(spec, pool.chain, heads)
    return Study(
        name=spec.name,
        pool=pool,
        variants=(
            *(["base"] if spec.base is not None else []),
            "merged",
            *map(baseline_variant, spec.baselines),
        ),
        tasks={
            task: build_task_samples(task, opened, heads.get(task), spec.data.tasks[task].metric or (), pool)
            for task, opened in data.items()
        },
        settings=settings,
        seed=spec.data.defaults.seed,
        notices=tuple(dict.fromkeys(_study_notices(spec, models, data, heads))),
        provenance=models.origins,
        architecture={
            **models.architecture.source_info,
            **({"experts": ADAPTERS} if models.have_adapters(data) else {}),
            **({} if preprocess is None or preprocess.texts is None else preprocess.settings),
        },
        preprocessing="" if preprocess is None else preprocess.backend,
        team=access.team,
    )


# Maximum number of tokens of an expert's answer in calibration.
NEW_TOKENS = 64

# (name in the pool, opens the model) -> the model, or None to leave it out.
_Attempt = Callable[[str, Callable[[], StateSource]], StateSource | None]


def open_models(
    spec: RunSpec,
    access: Permissions = Permissions(),
    *,
    architecture: Architecture | None = None,
    attempt: _Attempt = lambda name, opened: opened(),
    unread: bool = False,
) -> OpenModels:
    """Open all checkpoints of a spec, the base first.

    Args:
        spec: names the models.
        access: permissions, device and processes.
        architecture: the architecture, if it is open already.
        attempt: opens one model, and may leave a broken one out.
        unread: True if no sample will be read, so that a decoder's tokenizer stays closed.
    """
    shared, origins = architecture or open_architecture(spec, access, unread=unread), weight_paths(spec)
    stored: dict[str, StateSource] = {}
    sources: dict[str, StateSource] = {}
    notices: list[str | None] = []
    preprocess = shared.preprocess
    reads_texts = shared.lm is not None or (preprocess is not None and preprocess.texts is not None)
    rows, home = (
        vocabulary_row_counts(shared.skeleton) if reads_texts else {},
        find_config_folder(shared.source),
    )

    def _open_model(name: str) -> StateSource:
        stored[name] = open_model_or_adapter(origins[name], stored.get("base"), shared, offline=access.offline)
        source = shared.align(stored[name], fallback=sources.get("base"))
        if not reads_texts:
            return source
        folder, align = model_folder(origins[name], stored[name]), spec.architecture.vocab is not None
        if folder is not None and home is not None:
            require_same_tokenizer(home, folder)
        notices.append(require_same_pooling(home, folder))
        source, notice = align_vocabulary(source, rows, sources.get("base"), folder, align=align)
        notices.append(notice)
        if shared.lm is None:
            return source
        table = next(key for key in rows if key != shared.lm.key or len(rows) == 1)
        # Adapters share the base's configuration.
        if isinstance(stored[name], LoraSource) and "base" in stored:
            folder = model_folder(origins["base"], stored["base"])
        source, notice = align_head(source, stored[name], folder, shared.lm, table)
        notices.append(notice)
        return source

    for name in origins:
        if (source := attempt(name, partial(_open_model, name))) is not None:
            sources[name] = source
    sound = {name: stored[name] for name in sources}
    places = {name: origins[name] for name in sources}
    form, texts = _headers_with_separate_head(shared, sound, sources), tuple(filter(None, notices))
    return OpenModels(shared, sound, sources, places, form, texts)


def _headers_with_separate_head(
    architecture: Architecture, stored: Mapping[str, StateSource], sources: Mapping[str, StateSource]
) -> StateSource | None:
    """Return headers that include an untied LM head if only the merged model has one; else None."""
    base, layout, lm = stored.get("base"), architecture.layout, architecture.lm
    if base is None or layout is None or lm is None or not lm.is_untied:
        return None
    # The head may have another spelling.
    if lm.head in layout.key_map(base.headers, architecture.keys, base.name):
        return None
    parts = {key: (base, key) for key in base.headers}
    parts[layout.wrapper_prefix(base.headers, base.name) + lm.head] = (sources["base"], lm.key)
    return CompositeSource(base.name, parts)


def open_model_or_adapter(
    place: str,
    base: StateSource | None,
    architecture: Architecture | None = None,
    *,
    offline: bool = False,
    above: tuple[str, ...] = (),
) -> StateSource:
    """Open a checkpoint under its own key names; LoRA adapters are added to their base, which may have adapters, too.

    Args:
        place: path or Hub id, or MODEL+ADAPTER.
        base: the model that adapters are added to.
        architecture: the architecture of all models; None to leave names and adapters unchecked.
        offline: True to use only the Hub's local cache.
        above: the adapters that were trained on `place`.
    """
    *whole, file = (fetch_if_hub_id(part, offline=offline) for part in split_adapter(place))
    if whole:
        model = open_checkpoint(whole[0], offline=offline)
        # Two sources of one file would read it twice.
        base = base if base is not None and base.name == model.name else model
    if base is not None and is_lora_folder(expand_home(file)):
        lower = find_lower_adapter(file)
        if lower in (file, *above):
            raise CheckpointError(
                f"{file} and {lower} name each other as their base", hint="Correct base_model_name_or_path."
            )
        # A model given together with an adapter may contain the lower one.
        if lower and (not whole or lora_base_model(pathlib.Path(lower))[0] == split_adapter(place)[0]):
            base = open_model_or_adapter(lower, base, architecture, offline=offline, above=(file, *above))
        if architecture is not None:
            base = architecture.lora_base(base.whole if isinstance(base, RegroupedSource) else base, file)
    opened = open_checkpoint(file, base=base, offline=offline)
    if architecture is None:
        return opened
    if isinstance(opened, LoraSource):
        opened.require_complete(architecture.skeleton)
    return architecture.layout.regroup(opened) if isinstance(architecture.layout, KeyLayout) else opened


def split_adapter(place: str) -> list[str]:
    """Return the model and the adapters of MODEL+ADAPTER, or the place alone."""
    model, _, adapter = place.partition("+")
    return [model, adapter] if model and adapter and not expand_home(place).exists() else [place]


def find_lower_adapter(folder: str | pathlib.Path) -> str:
    """Return the local or cached adapters on which the adapters in `folder` were trained; "" without any."""
    folder = expand_home(str(folder))
    stated = lora_base_model(folder)[0] if is_lora_folder(folder) else ""
    place = fetch_config_folder(stated, offline=True) if stated else None
    return str(place) if place is not None and is_lora_folder(place) else ""


def model_folder(origin: str, source: StateSource) -> pathlib.Path | None:
    """Return the folder with a model's configuration; None for a file."""
    stored = pathlib.Path(source.name)
    return None if expand_home(origin).is_file() else stored if stored.is_dir() else stored.parent


def open_architecture(spec: RunSpec, access: Permissions, *, unread: bool = False) -> Architecture:
    """Load a spec's architecture; untie a language model's head if any checkpoint has a separate one.

    Args:
        spec: the settings.
        access: permissions, device and processes.
        unread: True if no sample will be read.
    """
    entry = spec.architecture
    load = partial(
        load_architecture,
        entry.loader,
        entry.source or "",
        blocks=entry.blocks,
        access=access,
        unread=unread,
        pictured=any(getattr(task, "image_column", None) for task in spec.data.tasks.values()),
    )
    architecture = load()
    if architecture.loader not in CAUSAL or architecture.lm is None or architecture.lm.is_untied:
        return architecture
    base = None
    for name, place in weight_paths(spec).items():
        # `open_models` reports errors of checkpoints.
        with contextlib.suppress(DriftLensError):
            stored = open_model_or_adapter(place, base, architecture, offline=access.offline)
            base = stored if name == "base" else base
            if untied_head_key(stored, architecture.align(stored, fallback=None), architecture.lm) is not None:
                return load(untied=True)
    return architecture


def weight_paths(spec: RunSpec) -> dict[str, str]:
    """Return the path or Hub id of every model's weights, by model name, the base first."""
    experts = {expert_name(task): entry for task, entry in spec.experts.items()}
    baselines = {baseline_variant(name): entry for name, entry in spec.baselines.items()}
    named = {"base": spec.base, **experts, **baselines, "merged": spec.merged}
    return {name: entry.weights for name, entry in named.items() if entry is not None}


def open_pool(spec: RunSpec, models: OpenModels, *, device: str | None = None) -> ModelPool:
    """Build the pool of models after comparing keys, shapes and dtypes.

    Args:
        spec: the settings.
        models: the checkpoints.
        device: overrides the spec's device.
    """
    place, dtype = resolve_device(device or spec.compute.device), getattr(torch, spec.compute.dtype)
    require_dtype(place, dtype)
    # Modules that run as they are bring tensors of their own, such as positions.
    move_to_device(models.architecture.skeleton, place)
    return ModelPool(
        models.architecture.chain,
        models.architecture.skeleton,
        models.sources,
        device=place,
        dtype=dtype,
        budget=spec.compute.feature_budget,
    )


def open_heads(spec: RunSpec, models: OpenModels, data: Mapping[str, tuple[str, ...] | None]) -> dict[str, ScoreMap]:
    """Open the classification head of each task: the spec's, else its expert's own.

    Args:
        spec: the settings.
        models: the checkpoints.
        data: class names by task, if the data has any.
    """
    # The text tower is read once, and only if a task needs it.
    tower: TextTower | None = None
    heads: dict[str, ScoreMap] = {}
    for task, entry in head_specs(spec, models).items():
        named = data.get(task) or (_expert_class_names(spec, task, models) if _is_expert_classifier(entry) else None)
        classes = head_classes(task, entry, named)
        if isinstance(entry, LinearHeadSpec):
            heads[task] = _open_linear_head(task, entry, classes, models)
        elif isinstance(entry, FileHead):
            heads[task] = head_from_file(entry.file, entry.tensor, entry.logit_scale, classes)
        elif models.base is None:
            raise SpecError(
                f"heads.{task}: templates need the base's text tower, but there is no base",
                hint="Add a base, or give embeddings: {file, tensor, logit_scale, classes}.",
            )
        else:
            tower = tower or models.architecture.text_tower(models.base)
            words = None if entry.suite is None else published_task(entry.suite).classes
            heads[task] = zero_shot_head(tower, classes, entry.templates, words)
    return heads


def head_specs(spec: RunSpec, models: OpenModels) -> dict[str, Head]:
    """Return the spec's heads, and entries for tasks whose expert has its own classifier."""
    own = {
        task: LinearHeadSpec(linear="own")
        for task in spec.tasks
        if task not in spec.heads
        and (stored := models.stored.get(expert_name(task))) is not None
        and models.architecture.classifier_keys(stored) is not None
    }
    return own | spec.heads


def answer_head(data: TaskData, source: StateSource, lm: LmHeadSpec) -> LmHead:
    """Return an LM head restricted to the first tokens of a task's answers, or the whole vocabulary."""
    reader = None if data.test.texts is None else data.test.texts.reader
    assert reader is not None
    first_tokens = {name: reader.answer_tokens(answer)[:1] for name, answer in data.class_answers().items()}
    if first_tokens and all(first_tokens.values()) and len(set(first_tokens.values())) == len(first_tokens):
        return LmHead(tuple(first_tokens), source, lm, tuple(token for (token,) in first_tokens.values()))
    tokens = reader.tokenizer.convert_ids_to_tokens(list(range(len(reader.tokenizer))))
    names = [token.translate(_SPACES) for token in tokens]
    size = source.headers[lm.key].shape[0]
    return LmHead((*names, *(f"<row {row}>" for row in range(len(names), size)))[:size], source, lm)


# Byte-level and SentencePiece symbols of spaces and line ends -> readable ones.
_SPACES = str.maketrans("Ġ▁Ċ", "␣␣␤")


def _open_linear_head(task: str, entry: LinearHeadSpec, classes: tuple[str, ...], models: OpenModels) -> ScoreMap:
    if entry.linear != "own":
        source, weight, bias = open_checkpoint(entry.linear), entry.weight, entry.bias
        return linear_head(source, classes, weight=weight, bias=bias, normalize=entry.normalize)
    stored = models.stored[expert_name(task)]
    keys = (entry.weight,) if entry.weight else models.architecture.classifier_keys(stored)
    if keys is None:
        raise CheckpointError(
            f"heads.{task}: {stored.name} holds no classifier",
            hint=f"Set heads.{task}.weight to its key, or give another head.",
        )
    form = models.architecture.own_head
    if form is not None and not entry.weight:
        if entry.normalize:
            raise SpecError(
                f"heads.{task}: the expert's own head has {len(keys)} weights and fixes its normalization",
                hint="Remove `normalize`.",
            )
        return form.load_head(stored, keys, classes)
    return linear_head(stored, classes, weight=keys[0], bias=entry.bias, normalize=entry.normalize)


def _is_expert_classifier(entry: Head) -> TypeGuard[LinearHeadSpec]:
    return isinstance(entry, LinearHeadSpec) and entry.linear == "own"


def _expert_class_names(spec: RunSpec, task: str, models: OpenModels) -> tuple[str, ...] | None:
    """Return the class names of an expert's classifier from its configuration, or row numbers."""
    if (named := config_class_names(spec.experts[task].weights)) is not None:
        return named
    stored = models.stored[expert_name(task)]
    shapes = [stored.headers[key].shape for key in models.architecture.classifier_keys(stored) or ()]
    rows = [shape[0] for shape in shapes if len(shape) == 2]
    count = rows[-1] if rows else 0
    return ("score",) if count == 1 else tuple(map(str, range(count))) or None


def head_classes(task: str, entry: Head, named: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the class names of a head's rows: its own, or those of the data.

    Args:
        task: the task's name.
        entry: the spec's head.
        named: class names of the data.
    """
    named = class_names(entry.classes) if entry.classes is not None else named
    if entry.suite is not None:
        return _published_class_names(published_task(entry.suite), named)
    if named is None:
        raise SpecError(
            f"heads.{task}: no class names, neither here nor in data.{task}",
            hint=f"Add heads.{task}.classes: a list or JSON file in row order.",
        )
    return class_names(named)


def _published_class_names(task: PublishedTask, named: Sequence[str] | None) -> tuple[str, ...]:
    """Return the classes of a benchmark task in label order, spelled as in the data.

    These may be the words of prompts, the data set's labels in any case and punctuation, or label numbers.
    """
    if named is None:
        return task.classes
    theirs = {str(int(name)) if name.isdecimal() else normalize_name(name): name for name in named}
    numbers = tuple(map(str, range(len(task.classes))))
    if len(theirs) == len(named) == len(task.classes):
        for spelt in (task.classes, task.labels, numbers):
            if theirs.keys() == {normalize_name(name) for name in spelt}:
                return tuple(theirs[normalize_name(name)] for name in spelt)
    require_same_classes(named, task.classes, where=f"the suite's {task.title}")
    raise DataError(f"the suite's {task.title}: class names occur more than once")


def _study_notices(
    spec: RunSpec, models: OpenModels, data: Mapping[str, TaskData], heads: Mapping[str, ScoreMap]
) -> Iterator[str]:
    yield from (*models.architecture.notices, *models.notices)
    for opened in data.values():
        yield from opened.notices
    for task, entry in head_specs(spec, models).items():
        is_unnamed = _is_expert_classifier(entry) and entry.classes is None
        if is_unnamed and data[task].class_names and config_class_names(spec.experts[task].weights) is None:
            yield (
                f"{task}: the expert's classifier names no classes, so the data's order is used for its rows; set "
                "`heads.TASK.classes` if it differs"
            )
    for task, opened in data.items():
        if opened.class_names and is_vocabulary_head(heads.get(task)):
            yield (
                f"{task}: answers of two classes share their first token, so scores cover the whole vocabulary, "
                "and answers are chosen by likelihood"
            )
    texts = ((task, opened.test.texts) for task, opened in data.items())
    sees = {task for task, text in texts if text is not None and isinstance(text.reader, ImageTextProcessor)}
    if sees and (blind := sorted(data.keys() - sees)):
        yield (
            f"{', '.join(blind)}: samples have no images, so the vision tower shows no drift; it and its projector "
            f"are calibrated from {', '.join(sorted(sees))} alone"
        )
    yield from (*head_notices(models), *dtype_notices(models))
    yield from unequal_count_notice({task: len(opened.calibration) for task, opened in data.items()}, "calibration")
    yield from unequal_count_notice({task: len(opened.diagnosis) for task, opened in data.items()}, "diagnosis")


def open_data(spec: RunSpec, task: str, architecture: Architecture | None, *, access: Permissions) -> TaskData:
    """Sample one task's data.

    Args:
        spec: the settings.
        task: the task's name.
        architecture: None if it is unknown; samples can then be listed but not read.
        access: permissions.
    """
    entry, head = spec.data.tasks.get(task), spec.heads.get(task)
    if entry is None:
        kind = next((source.kind for source in spec.data.tasks.values()), "imagefolder")
        raise SpecError(f"no data for {task}", hint=f"Add data.{task}: {{kind: {kind}, ...}}.")
    named = None if head is None or head.classes is None else class_names(head.classes)
    ends_in_classes = architecture is not None and architecture.has_classifier
    if named is None and ends_in_classes and (head is None or _is_expert_classifier(head)):
        named = config_class_names(spec.experts[task].weights)
    preprocess = None if architecture is None else architecture.preprocess
    reader = None if preprocess is None else preprocess.texts
    if isinstance(reader, ImageTextProcessor) and getattr(entry, "image_column", None) is None:
        reader = reader.text_only
    return open_task_data(
        task,
        entry,
        spec.data.defaults,
        preprocess or list,
        reads=None if architecture is None else architecture.chain.modality.name,
        reader=reader,
        head_classes=named,
        access=access,
    )


def with_expert_answers(samples: SampleSet, pool: ModelPool) -> SampleSet:
    """Replace target answers by the expert's greedy ones if the task requests it; generated lazily."""
    texts = samples.texts
    if texts is None or texts.reader is None or texts.shown != "expert":
        return samples
    reader, space = texts.reader, " " if texts.answer.startswith(" ") else ""

    def _generate_answers(rows: Sequence[Any]) -> list[str]:
        questions = [*map(reader.question_of, rows)]
        with pool.load_module(expert_name(samples.task)) as module:
            generated = generate(module, reader, questions, NEW_TOKENS, batch_size=samples.safe_batch_size)
        return [space + answer if answer else "" for answer in generated]

    # Generated on the first read and once: a calibration reads its samples for every layer.
    shown = functools.cache(lambda: samples.with_answers(_generate_answers(samples.all_texts)))
    answered = replace(texts, answers=_generate_answers)
    return replace(samples, load=lambda positions: shown().load(positions), texts=answered)


def build_task_samples(
    task: str, data: TaskData, head: ScoreMap | None, metrics: Sequence[str], pool: ModelPool
) -> TaskSamples:
    """Build a task's samples with its head; refuse metrics that task or model can't support.

    Args:
        task: the task's name.
        data: its samples.
        head: its score map, if it has one.
        metrics: names of the requested metrics.
        pool: the models.
    """
    test, diagnosis, texts = data.test, data.diagnosis, data.test.texts
    choices = {} if test.labels is None else data.class_answers()
    reader = None if texts is None else texts.reader
    answers = reader is not None and reader.form != "encoder"
    compared = None if texts is None else texts.compared
    shows = texts is not None and compared is None and bool(test.text(0).target)
    if compared is not None and has_one_score(head):
        raise SpecError(
            f"data.{task}: texts are compared by embeddings, but the models give scores",
            hint="Give embedding models without a classifier; rerankers are not supported.",
        )
    has = {"head": head is not None and test.labels is not None and not is_vocabulary_head(head)}
    has |= {"choices": answers and bool(choices), "target": answers and shows}
    has |= {"pair": shows and has_one_score(head)}
    has |= {"passages": compared is not None and compared.passages is not None}
    has |= {"number": has["target"] or has["pair"] if compared is None else not has["passages"]}
    for name in metrics:
        need = METRICS[name].needs
        if not has[need or "target"]:
            raise SpecError(f"data.{task}.metric: {name} {_LACKING[need or 'target']}", hint="Name another metric.")
    if is_vocabulary_head(head) and diagnosis.labels is not None:
        # The head's rows are tokens, not class names.
        diagnosis = replace(diagnosis, labels=None)
    return TaskSamples(
        diagnosis=diagnosis,
        test=test if test.labels is not None or has["number"] or compared is not None else None,
        head=head,
        calibration=with_expert_answers(data.calibration, pool),
        metrics=tuple(metrics),
        choices=choices,
    )


_LACKING = {
    "head": "needs labels and a head with their classes",
    "choices": "needs answer classes and a model that generates text",
    "target": "needs test samples with targets and a model that generates text",
    "number": "needs test samples with numeric targets, and text pairs or a model that generates text or a score",
    "passages": "needs queries with a column of positives",
    "pair": "needs test samples with targets (texts that should score less) and a model that gives one score",
}


# Poolings and their names in sentence-transformers.
_LIBRARY_POOLS = {"mean": "mean", "cls": "cls", "last": "lasttoken"}


def analysis_settings(
    spec: RunSpec, chain: LayerChain, heads: Mapping[str, ScoreMap] | None = None
) -> AnalysisSettings:
    """Return the analysis settings of a spec; the default pooling follows the experts' heads.

    Args:
        spec: the settings as written.
        chain: the layers.
        heads: score maps by task.
    """
    pool = spec.layers.pool
    for task, head in (heads or {}).items():
        if isinstance(head, ExpertHead) and (pool := pool or head.form.pool) != head.form.pool:
            raise SpecError(
                f"layers.pool is {pool!r}, but the classifier of {task}'s expert pools by {head.form.pool!r}",
                hint=f"Remove `pool`, or give heads.{task} with this pooling.",
            )
    stated = chain.settings.get(EMBEDDED, pool)
    if pool in _LIBRARY_POOLS and stated in _LIBRARY_POOLS.values() and stated != _LIBRARY_POOLS[pool]:
        raise SpecError(
            f"layers.pool is {pool!r}, but the base (sentence-transformers) pools by {stated}",
            hint="Remove `pool` to use the folder's embedding.",
        )
    metrics = spec.metrics
    more = {"contributions": metrics.contributions, "prefix": metrics.prefix}
    jacobian = metrics.jacobian and JacobianSettings(
        **metrics.jacobian.model_dump(), **more, seed=spec.data.defaults.seed
    )
    return AnalysisSettings(
        pool=pool or chain.modality.pool,
        stored_layers=frozenset(select_layers([layer.path for layer in chain.layers], spec.layers.select)),
        options=metrics.enabled,
        jacobian=jacobian or None,
        feature_budget=spec.compute.feature_budget,
        deterministic=spec.compute.deterministic,
    )


def calibration_settings(spec: RunSpec) -> dict[str, Any] | None:
    """Return all settings of the spec's calibration; None without one."""
    section = spec.calibration
    if section is None:
        return None
    require_task_id(spec.task_id, section.method)
    parameters = preset_settings(section.method, section.preset, section.parameters)
    return resolve_settings(calibrators[section.method], parameters, f"calibration: {section.method}")


_POOLED = {"cls": "that of its first token", "mean": "the mean over its tokens", "last": "its last token's"}


def head_notices(models: OpenModels) -> list[str]:
    """Report experts' heads that a merged model can't hold, or how features are pooled without heads."""
    form, bring = models.architecture.own_head, [expert_name(task) for task in _expert_heads_by_task(models)]
    if form is None:
        return []
    if not bring:
        feature = _POOLED.get(models.architecture.chain.modality.pool)
        text = f"no expert has a classifier: a sample's final feature is {feature}"
        return [text] if feature else []
    modules = ", ".join(dict.fromkeys(key.rpartition(".")[0] for key in form.names.values()))
    text = f"{', '.join(bring)}: the modules after the token features ({modules}) are task-specific; saved models"
    return [f"{text} keep the base's, saved folders the experts' in {HEADS}/"]


def head_files(models: OpenModels) -> dict[str, StateSource]:
    """Return the files of the experts' own heads by their paths in a saved folder."""
    return {
        f"{HEADS}/{safe_file_name(task)}.safetensors": head for task, head in _expert_heads_by_task(models).items()
    }


def _expert_heads_by_task(models: OpenModels) -> dict[str, StateSource]:
    experts = {task: stored for name, stored in models.stored.items() if (task := task_of_expert(name)) is not None}
    heads = {task: models.architecture.classifier_source(stored) for task, stored in experts.items()}
    return {task: head for task, head in heads.items() if head is not None}


def with_save_dtype(models: OpenModels, name: str | None) -> OpenModels:
    """Return the models set to save floating-point tensors in a dtype; None changes nothing."""
    if not name:
        return models
    dtype: torch.dtype = getattr(torch, name)
    architecture, folder = models.architecture, models.architecture.folder
    if folder is not None:
        configs = dict(folder.configs)
        config = configs.get("config.json")
        if isinstance(config, Mapping) and "model_type" in config:
            keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
            configs["config.json"] = {**config, **dict.fromkeys(keys, name)}
        architecture = replace(architecture, folder=replace(folder, configs=configs))
    return replace(models, architecture=architecture, form=cast_source(models.save_template, dtype), out_dtype=dtype)


def dtype_notices(models: OpenModels) -> list[str]:
    """Report checkpoints that are stored in different dtypes."""
    keys, by_dtype = models.architecture.chain.parameter_keys(), defaultdict[str, list[str]](list)
    for name, source in models.sources.items():
        # Adapters are stored as the base, with sums that are not rounded.
        is_adapter = isinstance(models.stored[name], LoraSource)
        for dtype in {source.headers[key].dtype for key in keys} if not is_adapter else ():
            by_dtype[str(dtype).removeprefix("torch.")].append(name)
    if len(by_dtype) < 2:
        return []
    listed = "; ".join(f"{dtype}: {', '.join(names)}" for dtype, names in sorted(by_dtype.items()))
    return [f"checkpoints have different dtypes ({listed}); computations use one"]
