"""mergekit's recipes, for the methods that both have: read, and merged tensor by tensor like any others.

Arithmetic is in float32. Methods of random masks are refused: mergekit's draws can't be repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftlens.access import Access
from driftlens.errors import SpecError, did_you_mean
from driftlens.files import PathLike
from driftlens.merging.method import MergeMethod, StateDict, merge_methods
from driftlens.merging.sparse import ranked
from driftlens.pipeline.study.companions import companions
from driftlens.pipeline.study.merging import save_merge
from driftlens.pipeline.study.opening import open_models, open_pool
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
METHODS: Mapping[str, tuple[str, Settings]] = {
    "linear": ("average", {"weight": None, "normalize": True}),
    "slerp": ("slerp", {"t": None}),
    "karcher": ("karcher", {"max_iter": 10, "tol": 1e-5}),
    "model_stock": ("model_stock", {"filter_wise": False}),
    "task_arithmetic": ("task_arithmetic", _SUM),
    "ties": ("ties", _SUM | {"normalize": True}),
    "breadcrumbs": ("breadcrumbs", _OUTLIERS),
    "breadcrumbs_ties": ("breadcrumbs", _OUTLIERS),
}
"""mergekit's name -> ours for what is nearest, and its parameters with defaults; None where one must be given."""
_OF_MODELS = ("weight", "density", "gamma")
_ALIKE = ("linear", "slerp", "karcher")
_KEYS = ("merge_method", "models", "base_model", "parameters", "dtype", "out_dtype")


class Recipe(NamedTuple):
    """mergekit's method, the base unless all models are alike, experts by task and what is set for each, and dtype."""

    method: str
    base: str | None
    experts: Mapping[str, str]
    settings: Mapping[str, Sequence[Settings]]
    dtype: str | None

    def merge(self, base: StateDict, experts: Mapping[str, StateDict], layers: int) -> dict[str, Tensor]:
        """What mergekit makes of tensors."""
        ours, defaults = METHODS[self.method]
        merged: dict[str, Tensor] = {}
        for key, start in base.items():
            number = re.search(r"\.(\d+)\.", key)
            along = 0.0 if number is None else int(number[1]) / (layers - 1) if layers > 1 else 1.0

            def value(name: str, task: str = "", key: str = key, along: float = along) -> Any:
                found = (_value(given.get(name), key, along) for given in self.settings[task])
                known = next((each for each in found if each is not None), defaults[name])
                if known is None:
                    raise _refused(
                        f"{name} is missing for {key}", f"{self.method} needs it for every tensor."
                    )
                return known

            shared = {name: value(name) for name in defaults if name not in _OF_MODELS}
            if self.method in ("slerp", "karcher", "model_stock"):
                own = {task: {key: expert[key]} for task, expert in experts.items()}
                merged |= merge_methods[ours].function({key: start}, own, **shared)
                continue
            weights = start.new_tensor([value("weight", task) for task in experts])
            weights = weights.view(-1, *(1 for _ in start.shape))
            given = torch.stack([expert[key] for expert in experts.values()])
            if self.method == "linear":
                total = (weights * given).sum(dim=0)
                merged[key] = total / weights.sum(dim=0) if shared["normalize"] else total
                continue
            for row, task in zip(given, experts, strict=True):
                chosen = {name: value(name, task) for name in defaults if name in _OF_MODELS}
                row.copy_(_sparse(row - start, ours, chosen, shared["rescale"]))
            given, same = weights * given, torch.ones_like(given)
            if self.method.endswith("ties"):
                same = (given.sign() == torch.where(given.sum(dim=0) >= 0, 1.0, -1.0)).to(given)
            step, divisor = (given * same).sum(dim=0), (weights * same).sum(dim=0)
            step = step / torch.where(divisor.abs() < 1e-8, 1.0, divisor) if shared["normalize"] else step
            merged[key] = start + shared["lambda"] * step
        return merged


def _sparse(vector: Tensor, kind: str, own: Settings, rescale: bool) -> Tensor:
    density, count, size = own["density"], vector.numel(), vector.abs().flatten()
    if density >= 1 or kind == "task_arithmetic":
        return vector
    target = int(density * count)
    if kind == "ties":
        keep = ranked(size, 0, max(1, target) if density > 0 else 0)
    else:
        keep = ranked(size, min(int(own["gamma"] * count), count - target), target)
    kept = torch.where(keep.view_as(vector), vector, 0)
    return kept * (size.sum() / kept.abs().sum()) if rescale and kept.abs().sum() > 1e-7 else kept


def read_recipe(file: PathLike) -> Recipe:
    """A recipe of mergekit.

    Raises:
        SpecError: the file can't be read, or asks for something that is not done here; says what.
    """
    raw = read_mapping(Path(file), "recipe", "It needs `merge_method` and `models`.")
    method, base, entries = str(raw.get("merge_method")), raw.get("base_model"), raw.get("models")
    if method not in METHODS:
        raise _refused(f"merge_method is {method!r}", f"There are {', '.join(METHODS)}.")
    if others := raw.keys() - set(_KEYS):
        raise _refused(f"{', '.join(sorted(others))} can't be followed", f"What is read: {', '.join(_KEYS)}.")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _refused(f"models is {entries!r}", "Write a list of `model: PATH` with `parameters`.")
    if base is not None and base not in [entry.get("model") for entry in entries]:
        entries = [*entries, {"model": base}]
    if base is None and method not in ("linear", "karcher"):
        raise _refused(f"{method} needs base_model", "Name the model that the others were trained from.")
    if method == "slerp":
        entries = sorted(entries, key=lambda entry: bool(entry.get("model") != base))
    wide, defaults = raw.get("parameters") or {}, METHODS[method][1]
    experts: dict[str, str] = {}
    settings: dict[str, list[Settings]] = {"": [wide]}
    for entry in entries:
        name, own, task = entry.get("model"), entry.get("parameters") or {}, f"model{len(experts):03d}"
        if not isinstance(name, str) or "+" in name:
            raise _refused(
                f"the model {name!r} is no path or Hub id", "Merge adapters into their base first."
            )
        for given in (wide, own):
            if not isinstance(given, dict) or (
                unknown := next((key for key in given if key not in defaults), None)
            ):
                hint = did_you_mean(unknown, defaults) or f"It takes {', '.join(defaults)}."
                raise _refused(f"{method} has no parameter {unknown!r}", hint)
        if method in _ALIKE or name != base:
            experts[task], settings[task] = name, [own, wide]
    return Recipe(
        method,
        None if method in _ALIKE else base,
        experts,
        settings,
        raw.get("out_dtype") or raw.get("dtype"),
    )


def merge_recipe(file: PathLike, path: PathLike, access: Access) -> list[str]:
    """Merge decoder-only language models as a recipe says, in the format of the base or first model; returns notices.

    Raises:
        SpecError: as for `read_recipe`, or it writes another dtype than the models have.
        DriftLensError: as for `open_models` and `save_merge`.
    """
    recipe = read_recipe(file)
    source = recipe.base or next(iter(recipe.experts.values()))
    described: dict[str, Any] = {"version": 1, "architecture": {"loader": "hf-decoder", "source": source}}
    described["experts"] = {task: {"weights": name} for task, name in recipe.experts.items()}
    described |= {"merge": {"method": "average"}} | ({"base": {"weights": source}} if recipe.base else {})
    spec = load_spec(described)
    models = open_models(spec, access)
    open_pool(spec, models, device="cpu")  # compares keys and shapes
    headers = next(iter(models.sources.values())).headers
    dtypes = {str(header.dtype).removeprefix("torch.") for header in headers.values()}
    if recipe.dtype is not None and dtypes != {recipe.dtype}:
        raise _refused(f"dtype is {recipe.dtype}, and the models are {', '.join(dtypes)}", "Leave dtype out.")
    layers = 1 + max((int(at[1]) for key in headers if (at := re.search(r"\.(\d+)\.", key))), default=0)

    def function(base: StateDict, experts: Mapping[str, StateDict], *, recipe_text: str) -> dict[str, Tensor]:
        return recipe.merge(base, experts, layers)

    known, title = merge_methods[METHODS[recipe.method][0]].source, f"{recipe.method} by mergekit's recipe"
    name, needs = f"mergekit:{recipe.method}", recipe.base is not None
    method = MergeMethod(name, title, known, frozenset(), function, reads="tensor", needs_base=needs)
    text = json.dumps([recipe.experts, recipe.settings], sort_keys=True)
    save_merge(models, method, {"recipe_text": text}, path)
    return [doubt.text for doubt in companions(models)]


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
