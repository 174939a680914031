"""One merge, saved: by a method, as a spec says itself, or as a recipe of mergekit's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from driftlens.base.access import Access, Context
from driftlens.base.errors import SpecError
from driftlens.spec import load_spec
from driftlens.spec.mergekit import Recipe, is_recipe, recipe_of
from driftlens.spec.requests import MergeRequest
from driftlens.spec.run import RunSpec
from driftlens.spec.yaml_text import read_mapping


def save_one(
    source: Path | str | Mapping[str, Any] | RunSpec,
    request: MergeRequest,
    access: Access,
    context: Callable[[], AbstractContextManager[Context]],
) -> tuple[str, list[str]]:
    """Make the merge that is asked for, and save it; returns the method and notices.

    Without a method it is the spec's own, or that of the recipe which `source` is instead.

    Raises:
        SpecError: there is no place to save it, settings have no method, or a spec names a merged model instead.
        DriftLensError: as for `merge_experts` and `merge_recipe`.
    """
    method, parameters, out = request.method, request.parameters, request.out
    if out is None:
        raise SpecError(
            "a merge is saved to a file or folder", hint="Give `--out merged.safetensors` or `--out FOLDER`."
        )
    if method is None and parameters:
        raise SpecError("--set belongs to --method", hint="`driftlens doctor --methods` lists the methods.")
    if method is None and (recipe := _recipe_in(source)) is not None:
        recipe = dataclasses.replace(recipe, out_dtype=request.out_dtype or recipe.out_dtype)
        return recipe.method, save_recipe(recipe, out, access)
    spec = load_spec(source)
    if method is None:
        if spec.merge is None:
            raise SpecError(
                f"the spec of {spec.name!r} names a merged model, and no merge to make",
                hint="Say which with --method, or add `merge:`.",
            )
        method, parameters = spec.merge.method, spec.merge.parameters
    from driftlens.jobs.study.merging import merge_experts

    with context() as opened:
        return method, merge_experts(spec, method, parameters, out, opened, request.out_dtype)


def save_recipe(recipe: Recipe, out: Path, access: Access) -> list[str]:
    """Merge as a recipe says, and save it; returns notices, errors as for `merge_recipe`."""
    from driftlens.jobs.study.foreseen import require_foreseeable

    require_foreseeable(recipe, out, access)  # before torch is imported, which takes a second
    from driftlens.jobs.study.recipe import merge_recipe

    return merge_recipe(recipe, out, access)


def _recipe_in(source: object) -> Recipe | None:
    if isinstance(source, Path | str):
        start = "`driftlens init` writes a spec; mergekit's recipes are read, too."
        source = read_mapping(Path(source), "spec or recipe", start)
    return recipe_of(source) if isinstance(source, Mapping) and is_recipe(source) else None
