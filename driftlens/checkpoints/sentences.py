"""Folders of sentence-transformers: a transformer, possibly in its own folder, and modules that make embeddings."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from driftlens.checkpoints.weight_files import WEIGHT_FILES
from driftlens.utils.errors import CheckpointError, IncompatibleModelsError
from driftlens.utils.files import from_json, json_object, plain_file

MODULES = "modules.json"
_WHOLE = "config_sentence_transformers.json"
_SETTINGS = (MODULES, _WHOLE, "sentence_*_config.json")
# Supported modules after the transformer; saved folders keep them.
_FOLLOWED = ("Pooling", "Normalize", "Dense", "Dropout", "LayerNorm")
# Pooling modes by their settings before version 6, which concatenates several modes in this order.
_POOLS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Module(NamedTuple):
    """The class name of a module and its folder; empty for the root."""

    kind: str
    place: str


def modules_of(folder: pathlib.Path) -> tuple[Module, ...]:
    """List the modules of a folder of sentence-transformers; empty for other folders."""
    try:
        stated = from_json(plain_file(folder / MODULES).read_bytes())
        modules = tuple(Module(entry["type"].rpartition(".")[2], entry["path"]) for entry in stated)
        places = [(folder / module.place).resolve() for module in modules]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ()
    # The folder may come from an untrusted source.
    if not all(place.is_relative_to(folder.resolve()) for place in places):
        raise CheckpointError(f"{folder / MODULES} names an outside folder", hint="Don't use this folder.")
    return modules


def transformer_folder(folder: pathlib.Path) -> pathlib.Path:
    """Return the transformer's folder in a folder of sentence-transformers; other folders are returned unchanged."""
    leading = next(iter(modules_of(folder)), Module("", ""))
    return folder / leading.place if leading.kind == "Transformer" else folder


def sentence_folder(transformer: pathlib.Path | None) -> pathlib.Path | None:
    """Return the sentence-transformers folder that contains a transformer; None for other transformers."""
    places = () if transformer is None else (transformer, transformer.parent)
    return next(
        (root for root in places if modules_of(root) and transformer_folder(root) == transformer), None
    )


def embedding_folder(transformer: pathlib.Path | None) -> pathlib.Path | None:
    """Return the same for embedding models; None for a cross-encoder, whose transformer gives scores itself."""
    root = sentence_folder(transformer)
    if root is None or json_object(root, _WHOLE).get("model_type") == "CrossEncoder":
        return None
    # Older cross-encoders are known only by these settings.
    older = {"sentence_transformers", "sbert_ce_default_activation_function"}
    return root if older.isdisjoint(json_object(root, "config.json")) else None


class Pooling(NamedTuple):
    """The pooling of a text's tokens, in the library's terms."""

    modes: tuple[str, ...] = ("mean",)
    includes_prompt: bool = True

    @property
    def said(self) -> str:
        """The modes, for a reader."""
        return " and ".join(self.modes)


def pooling_of(folder: pathlib.Path) -> Pooling:
    """Read a folder's Pooling module; the default is the mean.

    Raises:
        IncompatibleModelsError: the library has no such mode.
    """
    place = next((module.place for module in modules_of(folder) if module.kind == "Pooling"), None)
    stated = {} if place is None else json_object(folder / place, "config.json")
    modes = stated.get("pooling_mode") or [mode for key, mode in _POOLS.items() if stated.get(key)] or "mean"
    modes = (modes,) if isinstance(modes, str) else tuple(map(str, modes))
    if odd := [mode for mode in modes if mode not in _POOLS.values()]:
        raise IncompatibleModelsError(
            f"{folder} pools by {odd[0]!r}; expected {', '.join(_POOLS.values())}",
            hint="Restore the original Pooling.",
        )
    return Pooling(modes, stated.get("include_prompt") is not False)


class Prompts(NamedTuple):
    """The prompts of a folder by name, the default one, and the similarity function."""

    by_name: Mapping[str, str] = {}
    default: str = ""
    similarity: str = "cosine"

    def before(self, *names: str) -> str:
        """Return the first of these prompts that exists, else the default."""
        return next((self.by_name[name] for name in names if name in self.by_name), self.default)


def prompts_of(folder: pathlib.Path) -> Prompts:
    """Read `config_sentence_transformers.json`."""
    settings = json_object(folder, _WHOLE)
    prompts, similarity = settings.get("prompts"), settings.get("similarity_fn_name") or "cosine"
    by_name = (
        {name: text for name, text in prompts.items() if isinstance(text, str)}
        if isinstance(prompts, dict)
        else {}
    )
    return Prompts(by_name, by_name.get(str(settings.get("default_prompt_name")), ""), str(similarity))


def require_followed(folder: pathlib.Path) -> None:
    """Refuse a folder in which other modules than a transformer and what reads its features make the sentence."""
    leading, *others = modules_of(folder)
    other = [leading.kind] * (leading.kind != "Transformer")
    other += [module.kind for module in others if module.kind not in _FOLLOWED]
    if other:
        raise IncompatibleModelsError(
            f"{folder} (sentence-transformers): unsupported module {other[0]}; expected Transformer, then "
            f"{', '.join(_FOLLOWED)}",
            hint=f"To merge only its transformer, copy that folder without {MODULES}.",
        )


def reading_notices(folder: pathlib.Path) -> Iterator[str]:
    """Yield notices about the modules that make embeddings and about the default prompt."""
    steps = [module.kind for module in modules_of(folder)[1:] if module.kind not in ("Pooling", "Dropout")]
    later = f", then by {', '.join(steps)}" if steps else ""
    yield (
        f"{folder} (sentence-transformers): the final feature is the text embedding, pooled by "
        f"{pooling_of(folder).said}{later}; these modules are saved unchanged"
    )
    if prompt := prompts_of(folder).default:
        yield f"{folder}: {prompt!r} precedes every text; a task's `prompt` replaces it"


def require_same_reading(base: pathlib.Path | None, other: pathlib.Path | None) -> str:
    """Refuse a model whose tokens become another embedding than the base's; what else differs is returned."""
    roots = [embedding_folder(folder) for folder in (base, other)]
    if roots[1] is None:
        return ""
    hint = f"Train it with the base's modules, or give its transformer without {MODULES}."
    of_base, later = ([] if root is None else _weights_behind(root) for root in roots)
    if later != of_base:
        place = (later or of_base)[0][0]
        raise IncompatibleModelsError(
            f"{roots[1]}: the weights of {place} differ from the base's, and only transformers are merged",
            hint=f"Freeze {place} in training, or give its transformer without {MODULES}.",
        )
    if roots[0] is None:
        return ""
    of_base_pool, pool = (pooling_of(root) for root in roots if root is not None)
    if pool[:2] != of_base_pool[:2]:
        prompt = "" if pool.modes != of_base_pool.modes else ", one without its prompt"
        raise IncompatibleModelsError(
            f"{roots[1]} pools by {pool.said}, the base by {of_base_pool.said}{prompt}",
            hint=hint,
        )
    ends = [[module.kind == "Normalize" for module in modules_of(root)].count(True) for root in roots if root]
    if ends[0] != ends[1]:
        return f"only one of {roots[1]} and the base normalizes embeddings; the base's setting is used"
    return ""


def sentence_files(folder: pathlib.Path | None) -> dict[str, pathlib.Path]:
    """List the files of sentence-transformers around a transformer, by their place in a saved folder."""
    root = sentence_folder(folder)
    if root is None or folder is None:
        return {}
    paths = {path.name: path for place in (folder, root) for name in _SETTINGS for path in place.glob(name)}
    for module in modules_of(root)[1:]:
        names = ("config.json", *WEIGHT_FILES) if module.place else ()
        paths |= {f"{module.place}/{name}": root / module.place / name for name in names}
    return {name: path for name, path in paths.items() if path.is_file()}


def flat(modules: Any) -> Any:
    """Return the content of `modules.json` for a folder that has the transformer in its root."""
    return [{**modules[0], "path": ""}, *modules[1:]]


def _weights_behind(folder: pathlib.Path) -> list[tuple[str, str, Any]]:
    """List folder name, digest of the weights and settings of every module with weights after the transformer."""
    from driftlens.checkpoints.tensor_sources import content_digest
    from driftlens.checkpoints.weight_files import open_folder

    places = [folder / module.place for module in modules_of(folder)[1:] if module.place]
    return [
        (place.name, content_digest(open_folder(place)), json_object(place, "config.json"))
        for place in places
        if any((place / name).is_file() for name in WEIGHT_FILES)
    ]
