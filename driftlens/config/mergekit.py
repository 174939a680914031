"""mergekit recipes: the models of a recipe and the nearest registered merge method. Entry point: `recipe_of`.

Only models, method and weights are read; mergekit itself uses the other settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from driftlens.utils.errors import SpecError

Settings = Mapping[str, Any]
# Methods that merge two models, one of which is `base_model`: there it is an expert and not a base.
_PAIRWISE = ("slerp", "nuslerp", "nearswap", "arcee_fusion")
# Methods that merge weights instead of task vectors.
_WEIGHT_METHODS = ("linear", "nuslerp", "multislerp", "karcher", "passthrough")


@dataclass(frozen=True)
class Recipe:
    """The models of a recipe, each as `MODEL` or `MODEL+ADAPTER`, and the nearest `merge` section of a spec."""

    method: str
    base: str | None
    experts: tuple[str, ...]
    merge: Settings


def recipe_of(content: Settings) -> Recipe:
    """Read a recipe of mergekit."""
    method = content.get("merge_method")
    if not isinstance(method, str):
        raise _refused(f"merge_method is {method!r}", "Recipes for mergekit-yaml need a `merge_method`.")
    parts = [*_parts(content)]
    base = next((part["base_model"] for part in parts if part.get("base_model") is not None), None)
    entries = [entry for part in parts for entry in _listed(part, "models") + _listed(part, "sources")]
    listed = {_model(entry.get("model")): _mapping(entry.get("parameters")) for entry in entries}
    base = None if base is None else _model(base)
    names = [*dict.fromkeys([*listed, *([base] if base else [])])]
    if base is not None and not (method in _PAIRWISE and len(names) == 2):
        names.remove(base)
    else:
        base = None
    if not names:
        raise _refused("it names no models besides the base", "Write `models` or `slices` with `sources`.")
    shared: dict[str, Any] = {}
    for part in parts:
        shared |= _mapping(part.get("parameters"))
    own = [{**shared, **listed.get(name, {})} for name in names]
    return Recipe(method, base, tuple(names), _nearest(method, own, has_base=base is not None))


def _parts(content: Settings) -> Iterator[Settings]:
    """Yield the recipe, its modules and their slices: all mappings that may name models."""
    yield content
    modules = [entry for entry in _mapping(content.get("modules")).values() if isinstance(entry, Mapping)]
    yield from modules
    for part in (content, *modules):
        yield from _listed(part, "slices")


def _listed(part: Settings, key: str) -> list[Settings]:
    entries = part.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise _refused(f"{key} is {str(entries)[:80]!r}", "Write a list of mappings.")
    return entries


def _mapping(value: Any) -> Settings:
    return value if isinstance(value, Mapping) else {}


def _model(name: Any) -> str:
    """Return `MODEL` or `MODEL+ADAPTER` of a model that may be spelled out as a mapping."""
    if isinstance(name, Mapping) and "model" in name:
        name = "+".join(_path(part) for part in (name["model"], name.get("lora")) if part)
    if not isinstance(name, str) or not all(name.split("+")):
        raise _refused(f"the model {str(name)[:80]!r} is no path or Hub id", "Write PATH, or PATH+ADAPTER.")
    return name


def _path(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    return f"{part.get('path')}@{part['revision']}" if part.get("revision") else str(part.get("path"))


def _nearest(method: str, own: list[dict[str, Any]], *, has_base: bool) -> dict[str, Any]:
    """Return the `merge` section that is nearest, with the settings that all experts share."""

    def common(name: str, default: float) -> float:
        values = [settings.get(name, default) for settings in own]
        return float(values[0]) if _is_number(values[0]) and values == values[:1] * len(values) else default

    # Spec methods have one value for all experts, so settings that differ keep their default.
    scaling, drop = common("lambda", 1.0), round(1 - common("density", 1.0), 6)
    if method == "slerp" and len(own) == 2:
        return {"method": "slerp"}
    if not has_base or method in _WEIGHT_METHODS:
        return {"method": "average"}
    if method == "model_stock":
        return {"method": "model_stock"}
    if method == "ties":
        return {
            "method": "ties",
            "scaling": scaling,
            "density": common("density", 1.0),
            "trim_scope": "per_tensor",
        }
    scaling *= common("weight", 1.0)
    if method == "dare_ties":
        return {"method": "ties", "scaling": scaling, "density": 1.0, "merge_func": "sum", "drop_rate": drop}
    if method == "dare_linear":
        return {"method": "dare", "scaling": scaling, "drop_rate": drop}
    return {"method": "task_arithmetic"} | ({"scaling": scaling} if method == "task_arithmetic" else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(what: str, hint: str) -> SpecError:
    return SpecError(f"mergekit recipe: {what}", hint=hint)
