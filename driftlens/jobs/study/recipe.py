"""mergekit's recipes, for the methods that both have: read, and merged tensor by tensor like any others.

Arithmetic is in float32 unless the recipe says another; random masks are of the same law, not mergekit's own draws.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftlens.base.access import Access
from driftlens.base.errors import SpecError, did_you_mean
from driftlens.base.files import PathLike
from driftlens.base.settings import settings_of
from driftlens.checkpoints.sources import InDtypes, StateSource
from driftlens.jobs.study.merging import merged_source, save_merge
from driftlens.jobs.study.opening import OpenModels, open_models, open_pool
from driftlens.jobs.study.suspicion import companions
from driftlens.merging.method import MergeMethod, StateDict, merge_methods
from driftlens.merging.sparse import keep_chances, keep_mask, ranked
from driftlens.merging.spherical import karcher
from driftlens.models.saving import require_target
from driftlens.spec import load_spec
from driftlens.spec.yaml_text import read_mapping

Settings = Mapping[str, Any]
_SUM = {
    "normalize": False,
    "rescale": False,
    "int8_mask": False,
    "lambda": 1.0,
    "weight": None,
    "density": 1.0,
}
_OUTLIERS = _SUM | {"gamma": 0.01}
_DARE = _SUM | {"rescale": True}
_DELLA = _DARE | {"epsilon": 0.15}
METHODS: Mapping[str, tuple[str, Settings]] = {
    "linear": ("average", {"weight": None, "normalize": True}),
    "slerp": ("slerp", {"t": None}),
    "karcher": ("karcher", {"max_iter": 10, "tol": 1e-5}),
    "model_stock": ("model_stock", {"filter_wise": False}),
    "task_arithmetic": ("task_arithmetic", _SUM),
    "ties": ("ties", _SUM | {"normalize": True}),
    "breadcrumbs": ("breadcrumbs", _OUTLIERS),
    "breadcrumbs_ties": ("breadcrumbs", _OUTLIERS),
    "dare_linear": ("dare", _DARE),
    "dare_ties": ("dare", _DARE),
    "della": ("della", _DELLA | {"normalize": True}),
    "della_linear": ("della", _DELLA),
}
"""mergekit's name -> ours for what is nearest, and its parameters with defaults; None where one must be given."""
_OF_MODELS = ("weight", "density", "gamma", "epsilon")
_ELECTED = ("ties", "breadcrumbs_ties", "dare_ties", "della")
_ALIKE = ("linear", "slerp", "karcher")
_LARGEST = 2.0**63
"""Beyond this no setting means anything, and what lies between two of a list would overflow."""
_DTYPES = ("float16", "bfloat16", "float32")
_KEYS = ("merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype")


class Recipe(NamedTuple):
    """mergekit's method, the base unless all are alike, experts by task, and by layers what is set for each.

    `dtype` is what tensors are cast to before they are merged, `out_dtype` what is written; None is as they are stored.
    """

    method: str
    base: str | None
    experts: Mapping[str, str]
    settings: Sequence[tuple[int, int | None, Mapping[str, Sequence[Settings]]]]
    dtype: torch.dtype | None
    out_dtype: torch.dtype | None

    def merge(self, base: StateDict, experts: Mapping[str, StateDict], layers: int) -> dict[str, Tensor]:
        """What mergekit makes of tensors."""
        found = dict[str, Tensor]()
        for key, start in base.items():
            own = {task: expert[key] for task, expert in experts.items()}
            value = self._values(key, layers)
            shared = {name: value(name) for name in METHODS[self.method][1] if name not in _OF_MODELS}
            if self.method in ("slerp", "karcher", "model_stock"):
                function = merge_methods[METHODS[self.method][0]].function
                found |= function({key: start}, {task: {key: at} for task, at in own.items()}, **shared)
            else:
                found[key] = self._summed(key, start, own, value, shared)
        return found

    def _values(self, key: str, layers: int) -> Callable[..., Any]:
        """Name of a setting and task -> what is set for a tensor; without a task what is set for all."""
        number = re.search(r"\.(\d+)\.", key)
        at = int(number[1]) if number else 0 if "embed" in key else layers - 1
        first, end, settings = next(each for each in self.settings if at < (each[1] or layers))
        last = (end or layers) - first - 1
        along = 0.0 if number is None else (at - first) / last if last else 1.0

        def value(name: str, task: str = "") -> Any:
            found = (_value(given.get(name), key, along) for given in settings[task])
            known = next((each for each in found if each is not None), METHODS[self.method][1][name])
            if known is None:
                raise _refused(f"{name} is missing for {key}", f"{self.method} needs it for every tensor.")
            return known

        return value

    def _summed(
        self,
        key: str,
        start: Tensor,
        experts: Mapping[str, Tensor],
        value: Callable[..., Any],
        shared: Settings,
    ) -> Tensor:
        """A weighted sum of tensors, or of what is left of their steps from the base."""
        ours, defaults = METHODS[self.method]
        weights = start.new_tensor([value("weight", task) for task in experts])
        weights = weights.view(-1, *(1 for _ in start.shape))
        given = torch.stack(list(experts.values()))
        if self.method == "linear":
            total = (weights * given).sum(dim=0)
            return total / weights.sum(dim=0) if shared["normalize"] else total
        for row, task in zip(given, experts, strict=True):
            chosen = {name: value(name, task) for name in defaults if name in _OF_MODELS}
            row.copy_(_sparse(row - start, ours, chosen, shared["rescale"], task, key))
        given, same = weights * given, torch.ones_like(given)
        if self.method in _ELECTED:
            same = (given.sign() == torch.where(given.sum(dim=0) >= 0, 1.0, -1.0)).to(given)
        step, divisor = (given * same).sum(dim=0), (weights * same).sum(dim=0)
        step = step / torch.where(divisor.abs() < 1e-8, 1.0, divisor) if shared["normalize"] else step
        return start + shared["lambda"] * step


def _sparse(vector: Tensor, kind: str, own: Settings, rescale: bool, task: str, key: str) -> Tensor:
    density, count, size = own["density"], vector.numel(), vector.abs().flatten()
    if density >= 1 or kind == "task_arithmetic":
        return vector
    target = int(density * count)
    if kind in ("dare", "della"):
        spread = own.get("epsilon", 0.0) if density > 0 else 0.0
        if density - spread < 0 or density + spread > 1:
            raise _refused(
                f"epsilon is {spread}", "density - epsilon and density + epsilon lie between 0 and 1."
            )
        keep = keep_mask(keep_chances(vector, 1 - density, 2 * spread), 0, task, key)
    elif kind == "ties":
        keep = ranked(size, 0, max(1, target) if density > 0 else 0)
    else:
        keep = ranked(size, min(int(own["gamma"] * count), count - target), target)
    kept = torch.where(keep.view_as(vector), vector, 0)
    return kept * (size.sum() / kept.abs().sum()) if rescale and kept.abs().sum() > 1e-7 else kept


def read_recipe(file: PathLike) -> Recipe:
    """A recipe of mergekit."""
    raw = read_mapping(Path(file), "recipe", "It needs `merge_method` and `models`.")
    method, base = _method(raw)
    slices = raw["slices"] if "slices" in raw else [{"sources": raw.get("models")}]
    wide, experts, end = raw.get("parameters") or {}, dict[str, str](), 0
    settings: list[tuple[int, int | None, Mapping[str, Sequence[Settings]]]] = []
    for part in slices if isinstance(slices, list) and slices else [slices]:
        entries = _models(part)
        ranges = [entry.get("layer_range") for entry in entries]
        first, (end, given) = end, _slice(part, ranges, end) if "slices" in raw else (0, {})
        if base is not None and base not in [entry.get("model") for entry in entries]:
            entries = [*entries, {"model": base}]
        if method == "slerp":
            entries = sorted(entries, key=lambda entry: bool(entry.get("model") != base))
        found = _entries(method, base, entries, [given, wide])
        if settings and found[0] != experts:
            raise _refused("slices have different models", "Name the same ones, in the same order, in each.")
        experts = found[0]
        settings.append((first, end or None, found[1]))
    return Recipe(method, None if method in _ALIKE else base, experts, settings, *_dtypes(raw))


def _method(raw: Settings) -> tuple[str, Any]:
    """mergekit's method, and the base if one is named."""
    method, base = str(raw.get("merge_method")), raw.get("base_model")
    if method not in METHODS:
        raise _refused(f"merge_method is {method!r}", f"There are {', '.join(METHODS)}.")
    if others := raw.keys() - (set(_KEYS) - ({"slices"} if "models" in raw else set())):
        raise _refused(
            f"{', '.join(sorted(map(str, others)))} can't be followed", f"What is read: {', '.join(_KEYS)}."
        )
    if base is None and method not in ("linear", "karcher"):
        raise _refused(f"{method} needs base_model", "Name the model that the others were trained from.")
    return method, base


def _models(part: Any) -> list[dict[str, Any]]:
    """The models of a slice, or of all layers, with what is set for each."""
    entries = part.get("sources") if isinstance(part, dict) else part
    if (
        not isinstance(part, dict)
        or not isinstance(entries, list)
        or not entries
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise _refused(f"models is {entries!r}", "Write a list of `model: PATH` with `parameters`.")
    return entries


def _dtypes(raw: Settings) -> tuple[torch.dtype | None, torch.dtype | None]:
    """What is computed in, and what is written: where the recipe says nothing of the latter, the former."""
    found: list[torch.dtype | None] = []
    for key in ("dtype", "out_dtype"):
        name = str(raw.get(key) or "").removeprefix("torch.")
        if name and name not in _DTYPES:
            raise _refused(f"{key} is {raw[key]!r}", f"There are {', '.join(_DTYPES)}.")
        found.append(getattr(torch, name) if name else None)
    return found[0], found[1] or found[0]


def _floats_in(source: StateSource, dtype: torch.dtype) -> StateSource:
    floats = (key for key, header in source.headers.items() if header.dtype.is_floating_point)
    return InDtypes(source, dict.fromkeys(floats, dtype))


def _slice(part: Any, ranges: Sequence[Any], start: int) -> tuple[int, Settings]:
    """Where a slice ends, and what is set for all of it."""
    span = ranges[0] if ranges else None
    is_next = isinstance(span, list) and [*map(type, span)] == [int, int] and span[0] == start < span[1]
    if (
        span is None
        or not is_next
        or any(each != span for each in ranges)
        or part.keys() - {"sources", "parameters"}
    ):
        hint = "Layers stay where they are: each slice takes all models' next ones, `sources` and `parameters` alone."
        raise _refused(f"a slice takes the layers {ranges}", hint)
    return span[1], part.get("parameters") or {}


def _entries(
    method: str, base: str | None, entries: Sequence[Settings], shared: Sequence[Settings]
) -> tuple[dict[str, str], dict[str, Sequence[Settings]]]:
    """Experts by task, and what is set for each; under no name what is set for all."""
    defaults, experts = METHODS[method][1], dict[str, str]()
    settings: dict[str, Sequence[Settings]] = {"": shared}
    for entry in entries:
        name, own, task = entry.get("model"), entry.get("parameters") or {}, f"model{len(experts):03d}"
        if not isinstance(name, str) or not name or "+" in name:
            raise _refused(
                f"the model {name!r} is no path or Hub id", "Merge adapters into their base first."
            )
        for given in (*shared, own):
            if not isinstance(given, dict):
                raise _refused(f"parameters is {given!r}", f"Write a mapping of {', '.join(defaults)}.")
            if unknown := [key for key in given if key not in defaults]:
                hint = did_you_mean(unknown[0], defaults) or f"It takes {', '.join(defaults)}."
                raise _refused(f"{method} has no parameter {unknown[0]!r}", hint)
            for key, value in given.items():
                _require_setting(method, key, value)
        if method in _ALIKE or name != base:
            experts[task], settings[task] = name, [own, *shared]
    return experts, settings


def _require_setting(method: str, name: str, value: Any) -> None:
    """Refuse what `_value` can't read: it takes a number, numbers along the layers, or either behind filters."""
    entries = value if isinstance(value, list) else [value]
    given = [entry for entry in entries if isinstance(entry, dict)]
    values = [entry.get("value") for entry in given] if given else [value]
    are_apart = len(given) in (0, len(entries)) and entries
    if not are_apart or not all(isinstance(entry.get("filter"), str | None) for entry in given):
        raise _refused(
            f"{name} is {value!r}",
            "Write a number, a list of numbers from the first layer to the last, or a list of `filter` and `value`.",
        )
    own = {setting.name: setting for setting in settings_of(karcher)} if method == "karcher" else {}
    for found in values:
        numbers = found if isinstance(found, list) and found else [found]
        for number in numbers:
            is_number = isinstance(number, int | float) and abs(number) <= _LARGEST
            if not is_number and found is not None:
                raise _refused(f"{name} is {number!r}", "Every value is a finite number, or true or false.")
        if name in own and found is not None:
            try:
                for number in [found] if own[name].kind == "integer" else numbers:
                    own[name].read(number)
            except SpecError as error:
                raise _refused(error.message, error.hint) from None


def merge_recipe(file: PathLike, path: PathLike, access: Access) -> list[str]:
    """Merge decoder-only language models as a recipe says, in the form of the base or first model; returns notices."""
    recipe = read_recipe(file)
    source = recipe.base or next(iter(recipe.experts.values()))
    described: dict[str, Any] = {"version": 1, "architecture": {"loader": "hf-decoder", "source": source}}
    described["experts"] = {task: {"weights": name} for task, name in recipe.experts.items()}
    described |= {"merge": {"method": "average"}} | ({"base": {"weights": source}} if recipe.base else {})
    spec = load_spec(described)
    models = open_models(spec, access)
    open_pool(spec, models, device="cpu")  # compares keys and shapes
    headers = next(iter(models.sources.values())).headers
    layers = 1 + max((int(at[1]) for key in headers if (at := re.search(r"\.(\d+)\.", key))), default=0)
    if recipe.settings[-1][1] not in (None, layers):
        raise _refused(
            f"its slices end before or behind layer {layers}", "They take all layers of the models."
        )

    def function(base: StateDict, experts: Mapping[str, StateDict], *, recipe_text: str) -> dict[str, Tensor]:
        def cast(tensors: StateDict) -> dict[str, Tensor]:
            return {key: value.to(recipe.dtype or value.dtype) for key, value in tensors.items()}

        return recipe.merge(cast(base), {task: cast(own) for task, own in experts.items()}, layers)

    known, title = merge_methods[METHODS[recipe.method][0]].source, f"{recipe.method} by mergekit's recipe"
    name, needs = f"mergekit:{recipe.method}", recipe.base is not None
    method = MergeMethod(name, title, known, frozenset(), function, reads="file", needs_base=needs)
    text = json.dumps([recipe.experts, recipe.settings], sort_keys=True)
    merge, merged = method.with_settings({"recipe_text": text}), None
    if recipe.out_dtype is not None:
        # Merged in float32, which rounds nothing, and rounded once, when it is written.
        wide = {name: _floats_in(at, torch.float32) for name, at in models.sources.items()}
        require_target(models.architecture, path)
        merged = merged_source(replace(models, sources=wide), merge, beside=path)
        models = _written_in(models, recipe.out_dtype)
    save_merge(models, merge, path, source=merged)
    return [doubt.text for doubt in companions(models)]


def _written_in(models: OpenModels, dtype: torch.dtype) -> OpenModels:
    """The models with a form of their own in which what is saved has this dtype."""
    folder = models.architecture.folder
    assert folder is not None  # that of decoders
    name, configs = str(dtype).removeprefix("torch."), dict(folder.configs)
    config: Any = configs["config.json"]
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    configs["config.json"] = config | dict.fromkeys(keys, name)
    architecture = replace(models.architecture, folder=replace(folder, configs=configs))
    return replace(models, architecture=architecture, form=_floats_in(models.own_form, dtype))


def _value(setting: Any, key: str, along: float) -> Any:
    """A setting for one tensor: of filters the first that fits, of a list over layers what lies between its entries."""
    entries = setting if isinstance(setting, list) else [setting]
    if any(isinstance(entry, Mapping) for entry in entries):
        fit = (entry for entry in entries if entry.get("filter") in (None, "*") or entry["filter"] in key)
        return next((_value(entry.get("value"), key, along) for entry in fit), None)
    place = along * (len(entries) - 1)
    low, high = entries[int(place)], entries[min(len(entries) - 1, int(place) + 1)]
    is_discrete = not isinstance(low, int | float) or isinstance(low, bool)
    return low if is_discrete or low == high else low + (place - int(place)) * (high - low)


def _refused(what: str, hint: str) -> SpecError:
    return SpecError(f"mergekit recipe: {what}", hint=hint)
