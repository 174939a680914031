"""mergekit's recipes, followed: every tensor is merged when it is written, in the dtypes that mergekit has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from driftlens.base.access import Access
from driftlens.base.errors import IncompatibleModelsError, NumericsError, SpecError
from driftlens.base.files import PathLike, plain_file
from driftlens.base.rounding import Change
from driftlens.base.threads import computing_with
from driftlens.checkpoints.loading import library_folder
from driftlens.checkpoints.rounding import written
from driftlens.checkpoints.sources import (
    InDtypes,
    StateSource,
    TensorHeader,
    check_finite,
    floats_in,
    promoted,
)
from driftlens.jobs.study.foreseen import ALIKE, require_settings, require_tokenizer, require_tokens
from driftlens.jobs.study.merging import pieces, save_merge
from driftlens.jobs.study.opening import OpenModels, open_models, open_pool, saved_in
from driftlens.jobs.study.suspicion import companions
from driftlens.merging.mergekit import KERNELS, Group, by_entry
from driftlens.merging.method import Merge, MergeMethod, merge_methods
from driftlens.models.language.tokenizer_files import json_object
from driftlens.models.language.vocabularies import vocabulary_keys
from driftlens.models.saving import require_target
from driftlens.spec import load_spec
from driftlens.spec.mergekit import Recipe, Slice, layer_of

PIECE = 2**20
"""Entries that are merged at a time, of methods that can: they fit into a processor's cache."""


class Followed:
    """The models of a recipe as one source: a tensor is merged whenever it is read, and never kept.

    Args:
        recipe: what to do.
        models: by their name in the recipe, all with the same keys and shapes.
        layers: how many there are.
        tokens: of tensors with a row per token those that a token has, where a tokenizer is asked for. mergekit cuts
            off what is behind; here it stays the base's or the first model's, so that experts and merge have one shape.
        threads: merge, while one tensor is written, those that come after it in the files; None merges none before it
            is read.
    """

    def __init__(
        self,
        recipe: Recipe,
        models: Mapping[str, StateSource],
        layers: int,
        tokens: Mapping[str, int] = MappingProxyType({}),
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        self.name = f"{recipe.method} of {', '.join(models)}"
        self._recipe, self._models, self._layers, self._tokens = recipe, models, layers, tokens
        self.change = Change("")
        first = next(iter(models.values()))
        self.headers: Mapping[str, TensorHeader] = {
            key: TensorHeader(header.shape, self._out_dtype(key)) for key, header in first.headers.items()
        }
        self._threads, self._order = threads, list(self.headers)
        self._places = {key: place for place, key in enumerate(self._order)}
        self._largest = max((header.nbytes for header in self.headers.values()), default=0)
        self._begun = set[str]()
        self._coming: dict[str, Future[tuple[Tensor, Change]]] = {}

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The merged tensor in the dtype that is written.

        Raises:
            NumericsError: a model's tensor is NaN or infinite; names the file.
            SpecError: the recipe lacks a parameter for it.
        """
        if self._threads is not None and (key in self._coming or key not in self._begun):
            self._begin(self._threads, key)
        coming = self._coming.pop(key, None)
        merged, change = self._merged(key) if coming is None else coming.result()
        self.change += change
        return merged if rows is None else merged[slice(*rows)]

    def _begin(self, threads: ThreadPoolExecutor, key: str) -> None:
        """Begin a tensor and those after it, as many as have together no more entries than the largest has."""
        room = self._largest - sum(self.headers[name].nbytes for name in self._coming)
        for place in range(self._places[key], len(self._order)):
            name = self._order[place]
            if name in self._coming:
                continue
            room -= self.headers[name].nbytes
            if name != key and (room < 0 or name in self._begun):
                break
            self._begun.add(name)
            self._coming[name] = threads.submit(self._merged, name)

    @torch.no_grad()
    def _merged(self, key: str) -> tuple[Tensor, Change]:
        """A merged tensor, and what its rounding loses."""
        recipe, header = self._recipe, self.headers[key]
        part, _ = recipe.slice_of(key, self._layers)
        names = [source.model for source in part.sources]
        start = part.base if part.base in names else names[0]
        if not header.dtype.is_floating_point:
            return self._models[names[0]].read(key), Change("")
        values, shape = recipe.values(key, self._layers), header.shape
        shape = (self._tokens[key], *shape[1:]) if key in self._tokens else shape
        places = [
            slot.rows for slot in pieces(key, shape, PIECE if by_entry(recipe.method, values) else None)
        ]
        if len(places) == 1 and shape == header.shape:
            return self._rounded(key, self._piece(key, part, None, values))
        merged, change = torch.empty(header.shape, dtype=header.dtype), Change("")
        for rows in places:
            rows = rows or (0, shape[0])
            merged[slice(*rows)], lost = self._rounded(key, self._piece(key, part, rows, values), rows)
            change += lost
        if shape != header.shape:
            merged[shape[0] :] = self._models[start].read(key, (shape[0], header.shape[0]))
        return merged, change

    def _rounded(self, key: str, value: Tensor, rows: tuple[int, int] | None = None) -> tuple[Tensor, Change]:
        """A merged piece in the dtype that is written, and what that loses."""
        base, dtype = self._recipe.base, self.headers[key].dtype
        if base is None or value.dtype == dtype:
            return value.to(dtype), Change("")
        return value.to(dtype), written(self._models[base], key, value, dtype, rows)

    def _piece(
        self, key: str, part: Slice, rows: tuple[int, int] | None, values: Mapping[str, Any]
    ) -> Tensor:
        """What the method makes of some rows; models are read one after the other, as it asks for them."""
        base, computed = part.base, self._computed(key)
        names = [source.model for source in part.sources]

        def read(name: str) -> Tensor:
            source = self._models[name]
            tensor = source.read(key, rows)
            try:
                check_finite(source.name, key, tensor)
            except NumericsError:
                check_finite(source.name, key, source.read(key))  # counts entries of the whole tensor
                raise
            return tensor.to(computed)

        group = Group(
            read(base) if base is not None and base in names else None,
            _LazyTensors(read, [name for name in names if name != base]),
            _LazyTensors(read, names),
            key,
        )
        # Sums are parted among threads, and rounded by their parts: with one thread a merge is the same everywhere.
        with computing_with(1):
            return KERNELS[self._recipe.method](group, **values)

    def _computed(self, key: str) -> torch.dtype:
        """What is computed in: the recipe's, or the widest of what is stored."""
        stored = [model.headers[key].dtype for model in self._models.values()]
        if self._recipe.dtype is None or not stored[0].is_floating_point:
            return promoted(*stored)
        return getattr(torch, self._recipe.dtype)

    def _out_dtype(self, key: str) -> torch.dtype:
        computed, name = self._computed(key), self._recipe.out_dtype
        return computed if name is None or not computed.is_floating_point else getattr(torch, name)


class _LazyTensors(Sequence[Tensor]):
    """Tensors that are read when they are asked for, and not kept."""

    def __init__(self, read: Callable[[str], Tensor], names: Sequence[str]) -> None:
        self._read, self._names = read, names

    def __getitem__(self, place: Any) -> Any:
        return self._read(self._names[place])

    def __len__(self) -> int:
        return len(self._names)


def merge_recipe(recipe: Recipe, path: PathLike, access: Access) -> list[str]:
    """Merge decoder-only language models as a recipe says, in the format of the base or first model; returns notices.

    Raises:
        SpecError: its slices end elsewhere than the models, or a parameter is missing.
        DriftLensError: as for `open_models` and `save_merge`.
    """
    models, by_name = _opened(recipe, access)
    headers = next(iter(by_name.values())).headers
    numbers = (layer_of(key) for key in headers)
    layers = 1 + max((number for number in numbers if number is not None), default=0)
    require_target(models.architecture, path)
    folders = {name: library_folder(name.partition("+")[0]) for name in by_name}
    for name, folder in folders.items():
        if folder is not None and (home := folders[recipe.home]) is not None:
            require_tokens(recipe, name, folder, home)
    require_settings(recipe, headers, layers)
    tokenizer, tokens = require_tokenizer(recipe, access), _tokens(recipe, models)
    near = merge_methods[recipe.known.near]
    method = MergeMethod(
        f"mergekit:{recipe.method}",
        f"{recipe.method} by mergekit's recipe",
        near.source,
        frozenset(),
        KERNELS[recipe.method],
        reads="file",
        needs_base=recipe.base is not None,
    )
    merge = Merge(method, {"recipe": recipe.text})
    doubts = [doubt.text for doubt in companions(models)]
    notices = [*models.notices, *doubts]
    # As many tensors at a time as there are threads, each with one.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads, computing_with(1):
        merged = Followed(recipe, by_name, layers, tokens, threads)
        models = _written_as(models, recipe, merged, tokenizer)
        return [*recipe.notices, *save_merge(models, merge, path, source=merged, notices=notices)[1]]


def _opened(recipe: Recipe, access: Access) -> tuple[OpenModels, dict[str, StateSource]]:
    """The models of a recipe, compared, and by the names that the recipe has for them."""
    names = recipe.models
    base = recipe.home
    tasks = {_task(name, number): name for number, name in enumerate(names) if name != base}
    described: dict[str, Any] = {
        "version": 1,
        "architecture": {"loader": "hf-decoder", "source": base.partition("+")[0]},
        "base": {"weights": base},
        "experts": {task: {"weights": name} for task, name in tasks.items()} or {"model": {"weights": base}},
        "merge": {"method": "average"},
    }
    # Without a tokenizer mergekit reads none: rows of vocabularies are merged by their numbers.
    is_unread = recipe.tokenizer is None
    described["architecture"] |= {} if is_unread else {"vocab": {"rows": "base"}}
    spec = load_spec(described)
    try:
        models = open_models(spec, access, unread=is_unread, by_number=is_unread)
        open_pool(spec, models, device="cpu")  # compares keys and shapes
    except (SpecError, IncompatibleModelsError) as error:
        if not re.search("architecture|loader", error.hint):
            raise
        raise type(error)(error.message, hint=ALIKE) from error  # a recipe has no such keys
    by_name = {base: models.sources["base"]}
    by_name |= {name: models.sources[f"expert:{task}"] for task, name in tasks.items()}
    return models, {name: _as_merged(by_name[name]) if "+" in name else by_name[name] for name in names}


def _task(name: str, number: int) -> str:
    """What notices call a model: by the ends of its paths, and its place in the recipe."""
    ends = "_".join(Path(part).name for part in name.split("+"))
    return re.sub(r"\W", "_", f"{ends}_{number}")


def _as_merged(source: StateSource) -> StateSource:
    """A model with adapters as mergekit saves it before it merges models: in the one dtype of the model."""
    floats = [header.dtype for header in source.headers.values() if header.dtype.is_floating_point]
    return InDtypes(source, floats_in(source, min(floats, key=lambda dtype: dtype.itemsize)))


def _tokens(recipe: Recipe, models: OpenModels) -> dict[str, int]:
    """Rows that a token has, of every tensor with a row per token, where the recipe asks for a tokenizer."""
    architecture = models.architecture
    if recipe.tokenizer is None or architecture.preprocess is None or architecture.preprocess.texts is None:
        return {}
    count = len(architecture.preprocess.texts.tokenizer.get_vocab())
    return {key: count for key, rows in vocabulary_keys(architecture.skeleton).items() if count < rows}


def _written_as(
    models: OpenModels, recipe: Recipe, merged: StateSource, tokenizer: Path | None
) -> OpenModels:
    """The models with a form of their own: the dtypes, tokenizer and chat template that the recipe has saved."""
    models = saved_in(models, _by_stored_key(models, merged))
    architecture, folder = models.architecture, models.architecture.folder
    assert folder is not None  # that of decoders
    configs: dict[str, Any] = dict(folder.configs)
    home = tokenizer or library_folder(architecture.source)
    texts = dict[str, str]()
    template = _template(recipe.models) if recipe.chat_template == "auto" else recipe.chat_template
    if template is not None:
        texts["chat_template.jinja"] = template
        stated = json_object(home, "tokenizer_config.json")
        configs["tokenizer_config.json"] = {
            key: value for key, value in stated.items() if key != "chat_template"
        }
    architecture = replace(
        architecture,
        source=architecture.source if home is None else str(home),
        folder=replace(folder, configs=configs, texts=texts),
    )
    return replace(models, architecture=architecture)


def _by_stored_key(models: OpenModels, merged: StateSource) -> dict[str, torch.dtype]:
    """The dtype of every tensor by the base's own key; floats that are not merged go with the others."""
    floats = [header.dtype for header in merged.headers.values() if header.dtype.is_floating_point]
    layout = models.architecture.layout
    assert layout is not None  # that of decoders
    form = models.own_form
    stored = layout.key_map(form.headers, models.architecture.keys, form.name)
    dtypes = {key: floats[0] for key, header in form.headers.items() if header.dtype.is_floating_point}
    return dtypes | {stored[key]: header.dtype for key, header in merged.headers.items() if key in stored}


def _template(names: Iterable[str]) -> str | None:
    """The chat template that most models have, of equally many the first; None where none has one."""
    templates = []
    for name in names:
        folder = library_folder(name.partition("+")[0])
        if folder is None:
            continue
        file = folder / "chat_template.jinja"
        stated = json_object(folder, "tokenizer_config.json").get("chat_template")
        text = plain_file(file).read_text(encoding="utf-8") if file.is_file() else stated
        if isinstance(text, str) and text.strip():
            templates.append(text.strip())
    return Counter(templates).most_common(1)[0][0] if templates else None
