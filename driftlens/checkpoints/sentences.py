"""Folders of sentence-transformers: a transformer, perhaps in a folder of its own, and the modules that read it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from driftlens.base.errors import CheckpointError, IncompatibleModelsError
from driftlens.base.files import from_json, plain_file
from driftlens.checkpoints.sources import content_digest
from driftlens.checkpoints.weight_files import WEIGHT_FILES, open_folder

MODULES = "modules.json"
_SETTINGS = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json")
_FOLLOWED = ("Pooling", "Normalize", "Dense", "Dropout", "LayerNorm")
"""Modules behind a transformer that saved folders keep."""
_POOLS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Ways of pooling by the settings of versions before 6, in the order in which these concatenate them."""


class Module(NamedTuple):
    """What a module is, and its folder; empty for the root."""

    kind: str
    place: str


def modules_of(folder: pathlib.Path) -> tuple[Module, ...]:
    """The modules of a folder of sentence-transformers; none where it is no such folder."""
    try:
        stated = from_json(plain_file(folder / MODULES).read_bytes())
        modules = tuple(Module(entry["type"].rpartition(".")[2], entry["path"]) for entry in stated)
        places = [(folder / module.place).resolve() for module in modules]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ()
    if not all(place.is_relative_to(folder.resolve()) for place in places):
        raise CheckpointError(
            f"{folder / MODULES} names a folder outside its own", hint="Don't use this folder."
        )
    return modules


def transformer_folder(folder: pathlib.Path) -> pathlib.Path:
    """Where a folder of sentence-transformers has its transformer; any other folder as it is."""
    first = next(iter(modules_of(folder)), Module("", ""))
    return folder / first.place if first.kind == "Transformer" else folder


def sentence_folder(transformer: pathlib.Path | None) -> pathlib.Path | None:
    """The folder of sentence-transformers that has its transformer in a folder; None where that is of no such one."""
    places = () if transformer is None else (transformer, transformer.parent)
    return next(
        (root for root in places if modules_of(root) and transformer_folder(root) == transformer), None
    )


def pooling_of(folder: pathlib.Path) -> str:
    """How one vector is made of a text's tokens, in the library's own words; `mean` where nothing is said."""
    pooling = next((module.place for module in modules_of(folder) if module.kind == "Pooling"), None)
    stated = {} if pooling is None else _object(folder / pooling / "config.json")
    modes = stated.get("pooling_mode") or [mode for key, mode in _POOLS.items() if stated.get(key)] or "mean"
    return modes if isinstance(modes, str) else " and ".join(map(str, modes))


def require_followed(folder: pathlib.Path) -> None:
    """Refuse a folder in which other modules than a transformer and what reads its features make the sentence."""
    first, *others = modules_of(folder)
    other = [first.kind] * (first.kind != "Transformer")
    other += [module.kind for module in others if module.kind not in _FOLLOWED]
    if other:
        raise IncompatibleModelsError(
            f"{folder} is of sentence-transformers, and its {other[0]} can't be followed; after a Transformer may come "
            f"{', '.join(_FOLLOWED)}",
            hint=f"To merge its transformer alone, give a copy of that one's folder without {MODULES}.",
        )


def reading_notices(folder: pathlib.Path, pool: str | None) -> Iterator[str]:
    """What a folder has behind its transformer; `pool` is how features are pooled, None where that is not as there."""
    names = [module.place or module.kind for module in modules_of(folder)[1:] if module.kind != "Pooling"]
    behind = f"; behind it stand, unmeasured and kept in saved folders, {', '.join(names)}" if names else ""
    mode = pooling_of(folder)
    linear = (
        ""
        if pool
        else ", which is no linear map of them and not followed: here it is their mean, or layers.pool"
    )
    yield f"{folder} is of sentence-transformers: a text's feature is pooled from its tokens by {mode}{linear}{behind}"
    settings = _object(folder / "config_sentence_transformers.json")
    prompts, default = settings.get("prompts"), settings.get("default_prompt_name")
    if isinstance(prompts, dict) and prompts.get(default):
        yield (
            f"{folder}: its library puts {prompts[default]!r} before every text; here a task's `prompt` has to say so"
        )


def require_same_reading(base: pathlib.Path | None, other: pathlib.Path | None) -> str:
    """Refuse a model with other weights behind its transformer than the base has; what else differs is returned."""
    roots = [sentence_folder(folder) for folder in (base, other)]
    if roots[1] is None:
        return ""
    of_base, own = ([] if root is None else _weights_behind(root) for root in roots)
    if own != of_base:
        place = (own or of_base)[0][0]
        raise IncompatibleModelsError(
            f"{roots[1]}: what reads its transformer ({place}) has other weights than the base's, and only "
            "transformers are merged",
            hint=f"Train it with the base's {place} frozen; or give its transformer's folder without {MODULES}.",
        )
    modes = [pooling_of(root) for root in roots if root is not None]
    if len(set(modes)) < 2:
        return ""
    return f"{roots[1]} pools the tokens of a text by {modes[1]}, the base by {modes[0]}, as is done here"


def sentence_files(folder: pathlib.Path | None) -> dict[str, pathlib.Path]:
    """The files that make a transformer in a folder one of sentence-transformers, by their place in a saved folder."""
    root = sentence_folder(folder)
    if root is None or folder is None:
        return {}
    paths = {path.name: path for place in (folder, root) for name in _SETTINGS for path in place.glob(name)}
    for module in modules_of(root)[1:]:
        names = ("config.json", *WEIGHT_FILES) if module.place else ()
        paths |= {f"{module.place}/{name}": root / module.place / name for name in names}
    return {name: path for name, path in paths.items() if path.is_file()}


def flat(modules: Any) -> Any:
    """The content of `modules.json` for a folder that has the transformer in its root."""
    return [{**modules[0], "path": ""}, *modules[1:]]


def _weights_behind(folder: pathlib.Path) -> list[tuple[str, str, Any]]:
    """Place, digest of the weights and settings of every module behind the transformer that has weights."""
    places = [folder / module.place for module in modules_of(folder)[1:] if module.place]
    return [
        (place.name, content_digest(open_folder(place)), _object(place / "config.json"))
        for place in places
        if any((place / name).is_file() for name in WEIGHT_FILES)
    ]


def _object(file: pathlib.Path) -> dict[str, Any]:
    try:
        stated = from_json(plain_file(file).read_bytes())
    except (OSError, ValueError):
        return {}
    return stated if isinstance(stated, dict) else {}
