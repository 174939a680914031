"""What a recipe is refused for before torch is imported: models that are missing, or unlike, by what files state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path

from driftlens.base.access import Access
from driftlens.base.files import PathLike, expanded, require_free
from driftlens.base.words import some_of
from driftlens.checkpoints.loading import (
    TOKENIZERS,
    fetched,
    files_beside_weights,
    is_hub_id,
    read_config,
    require_plain_folder,
)
from driftlens.checkpoints.refusals import foreign_code, may_have_lm_head
from driftlens.checkpoints.sentences import transformer_folder
from driftlens.checkpoints.stated import ADAPTER, is_lora_folder, stated_shapes
from driftlens.models.language.tokenizer_files import json_object, require_same_tokenizer, token_ids
from driftlens.spec.mergekit import Recipe, layer_of, refused

Shapes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"\.\d+\.")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What configurations call the number of layers."""
ALIKE = "All models have one architecture, and one vocabulary."
_OTHERS = (
    "Recipes merge causal language models of transformers; for others write a spec, and merge by `--method`."
)


def require_foreseeable(recipe: Recipe, path: PathLike, access: Access) -> None:
    """Refuse what recipe, configurations and headers of files show; what they leave open, opening the models shows.

    Raises:
        DriftLensError: `path` is taken, a model is missing or has another shape than the first, slices end elsewhere
            than the models, a parameter is missing.
    """
    require_free(path)
    folders = {name: _folder(name, access) for name in recipe.models}
    first = recipe.home
    home = folders[first]
    if home is not None and not (home / "config.json").is_file():
        raise refused(
            f"{first} has no config.json",
            "What is saved has the form of the base, or of the first model: name the folder of "
            "save_pretrained that holds configuration and weights.",
        )
    if home is not None and (code := foreign_code(read_config(str(home), "config.json", offline=True) or {})):
        raise refused(f"{first} needs code of its own, which is never run ({code})", _OTHERS)
    require_tokenizer(recipe, access)
    shapes: dict[str, Shapes] = {}
    for name, folder in folders.items():
        if folder is None or not folder.is_dir():
            continue
        _require_decoder(name, folder, first, home)
        if not is_lora_folder(folder):
            require_plain_folder(folder)
            shapes[name] = stated_shapes(folder)
        if home is not None:
            require_tokens(recipe, name, folder, home)
    depths = {name: depth for name, folder in folders.items() if (depth := _layers(folder)) is not None}
    layers = depths.get(first)
    if layers is None or not shapes.get(first):
        return
    if other := next((name for name, depth in depths.items() if depth != layers), None):
        raise refused(f"{other} has {depths[other]} layers, and {first} {layers}", ALIKE)
    shared = set.intersection(*(set(stated) for stated in shapes.values() if stated))
    keys = [key for key in shapes[first] if key in shared and (layer_of(key) or 0) < layers]
    require_settings(recipe, keys, layers)
    for name, stated in shapes.items():
        _require_all(first, shapes[first], name, stated)
        _require_no_more(first, shapes[first], name, stated, layers)
        _require_no_more(name, stated, first, shapes[first], layers)
        _require_same_shapes(recipe, first, shapes[first], name, stated, keys)


def _require_decoder(name: str, folder: Path, first: str, home: Path | None) -> None:
    """Refuse what its configuration says to be no causal language model, or another than the first model."""
    config, theirs = (read_config(str(place), "config.json", offline=True) or {} for place in (folder, home))
    kind, home_kind = config.get("model_type"), theirs.get("model_type")
    is_nested = (
        "text_config" in config or "text_config" in theirs
    )  # of images and texts, whose decoder may be meant
    if not is_nested and not may_have_lm_head(config):
        described = f"{kind} model ({config['architectures'][0]})"
        raise refused(f"{name} is a {described}, no causal language model", _OTHERS)
    if not is_nested and kind and home_kind not in (None, kind):
        raise refused(f"{name} is a {kind} model, and {first} a {home_kind} model", ALIKE)


def require_settings(recipe: Recipe, keys: Iterable[str], layers: int) -> None:
    """Refuse slices that end elsewhere than models of so many layers, and parameters that a tensor of `keys` lacks."""
    if recipe.slices[-1].end not in (None, layers):
        raise refused(
            f"its slices end before or behind layer {layers}", "They take all layers of the models."
        )
    for key in keys:
        recipe.values(key, layers)


def require_tokenizer(recipe: Recipe, access: Access) -> Path | None:
    """The folder of the tokenizer that is asked for; None where none is. Refuses one that isn't there."""
    if recipe.tokenizer is None:
        return None
    name = recipe.home.partition("+")[0] if recipe.tokenizer in ("base", "union") else recipe.tokenizer
    folder = files_beside_weights(name, offline=access.offline)
    if folder is None or not any((folder / file).is_file() for file in TOKENIZERS):
        raise refused(
            f"the tokenizer of {name} is asked for, and there is none", "Name a model that has one."
        )
    if (home := files_beside_weights(recipe.home.partition("+")[0], offline=access.offline)) is not None:
        require_tokens(recipe, name, folder, home)
    return folder


def require_tokens(recipe: Recipe, name: str, folder: Path, home: Path) -> None:
    """Refuse a model whose tokens have other ids than in `home`, or that has more where the vocabulary were to grow.

    And one that lacks a token which the recipe has a source for: in all others that changes nothing.
    """
    if recipe.tokenizer is None:
        return
    require_same_tokenizer(home, folder)
    ids, home_ids = (token_ids(json_object(place, "tokenizer.json")) for place in (folder, home))
    more = [token for token in ids if token not in home_ids]
    if more and recipe.tokenizer in ("union", name):
        raise refused(
            f"{name} has {some_of([*map(repr, more)])}, which {recipe.home} lacks, and the tokenizer that is asked for "
            f"({recipe.tokenizer}) would have them",
            "Experts and merge must have one vocabulary for their features to be compared: write `base` to leave the "
            "rows of such tokens out, or add them to every model first.",
        )
    if lacking := [token for token in recipe.tokens if token not in ids]:
        raise refused(
            f"tokenizer.tokens has a source for {some_of([*map(repr, lacking)])}, which {name} lacks",
            "Experts and merge must have one vocabulary for their features to be compared: add the tokens to every "
            "model first, or take them out of the recipe.",
        )


def _folder(name: str, access: Access) -> Path | None:
    """The folder or file of a model, that of its adapter seen to be there; None where it would be downloaded."""
    model, *adapter = [name] if expanded(name).exists() else name.split("+")
    for part in adapter:
        if (place := _place(part, access)) is not None and not is_lora_folder(place):
            raise refused(
                f"{part} holds no adapter ({ADAPTER})", "Behind a `+` stands one that peft has saved."
            )
    place = _place(model, access)
    return transformer_folder(place) if place is not None and place.is_dir() else place


def _place(part: str, access: Access) -> Path | None:
    place = expanded(part)
    if place.exists():
        return place
    if not is_hub_id(part):
        raise refused(
            f"there is no model {part}",
            "Write a folder, as seen from where the command runs, or a Hub id (OWNER/NAME).",
        )
    return Path(fetched(part, offline=True)) if access.offline else None


def _layers(folder: Path | None) -> int | None:
    """How many layers the configuration of a model states; None where it doesn't."""
    if folder is None or not folder.is_dir():
        return None
    stated = read_config(str(folder), "config.json", offline=True) or {}
    nested = stated.get("text_config")
    counts = [part.get(key) for part in (stated, nested) if isinstance(part, dict) for key in _DEPTHS]
    return next((count for count in counts if type(count) is int), None)


def _require_all(first: str, reference: Shapes, name: str, shapes: Shapes) -> None:
    """Refuse a model that lacks in one layer what it has in others, as the first model has it in all."""
    kinds = {_LAYER.sub(".*.", key, count=1) for key in shapes}
    lacking = [key for key in reference if key not in shapes and _LAYER.sub(".*.", key, count=1) in kinds]
    if lacking:
        raise refused(f"{name} lacks {some_of([*map(repr, lacking)])}, which {first} has", ALIKE)


def _require_no_more(first: str, reference: Shapes, name: str, shapes: Shapes, layers: int) -> None:
    """Refuse a model that has all the weights of another in its layers, and more; buffers are none."""

    def kinds(stated: Shapes) -> dict[str, str]:
        inside = (key for key in stated if (number := layer_of(key)) is not None and number < layers)
        return {_LAYER.sub(".*.", key, count=1): key for key in inside if key.endswith((".weight", ".bias"))}

    theirs, own = kinds(reference), kinds(shapes)
    lists = {kind.partition("*")[0] for kind in theirs}
    owners = {kind.rpartition(".")[0] for kind in theirs}
    parents = {end for owner in owners for end in accumulate(owner.split("."), "{}.{}".format)} - owners
    further = [
        key
        for kind, key in own.items()
        if kind not in theirs and kind.partition("*")[0] in lists and kind.rpartition(".")[0] not in parents
    ]
    if theirs.keys() <= own.keys() and further:
        raise refused(f"{name} has {some_of([*map(repr, further)])}, which {first} lacks", ALIKE)


def _require_same_shapes(
    recipe: Recipe, first: str, reference: Shapes, name: str, shapes: Shapes, keys: Iterable[str]
) -> None:
    unlike = [key for key in keys if key in shapes and shapes[key] != reference[key]]
    tables = [key for key in unlike if layer_of(key) is None and shapes[key][1:] == reference[key][1:]]
    if recipe.tokenizer is not None:  # rows of tokens are then those of the base
        unlike = [key for key in unlike if key not in tables]
    if unlike:
        key = unlike[0]
        further = " With `tokenizer_source: base` rows of further tokens are left out."
        raise refused(
            f"{some_of([*map(repr, unlike)])} of {name} and of {first} differ in shape: {list(shapes[key])} for "
            f"{list(reference[key])}",
            ALIKE + further * (unlike == tables),
        )
