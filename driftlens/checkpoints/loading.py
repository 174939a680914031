"""Weights, configurations and tokenizers in files, in folders, on the Hugging Face Hub or in its local cache.

Checkpoints are opened without reading them, and no code in them is run. Entry point: `open_checkpoint`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from driftlens.checkpoints.unsupported import (
    ADAPTER,
    conversion,
    require_unquantised,
    wrong_family,
)
from driftlens.utils.errors import CheckpointError, IncompatibleModelsError, SpecError, concerning, some_of
from driftlens.utils.files import expanded, from_json, json_object, plain_file

# Torch is imported only to open a file, so that missing files are refused sooner.
if TYPE_CHECKING:
    from driftlens.checkpoints.tensor_sources import StateSource

_READABLE = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_PICKLES = (".pkl", ".pickle")
_OTHERS = (".npz", ".gguf", ".onnx", ".msgpack", ".h5")
# Extensions of weights in formats that are never written.
NEVER_WRITTEN = (*_READABLE[1:], *_PICKLES, *_OTHERS)
# Weight files of a folder in order of preference: safetensors can be read without building objects.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# Weight files to download, best format first: a repository often holds the same weights twice.
_FORMS = (["*.safetensors", "*.safetensors.index.json"], ["*.bin", "*.bin.index.json"])
_BESIDE = [
    *("*.json", "*.txt", "*.model", "*.jinja", "*.codes", "*.tiktoken", "*.tokenizer"),
    *("README.md", "LICENSE*", "NOTICE"),
]
# Files used with a model in addition to weights and configuration. Code is never copied.
_COMPANIONS = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("merges.txt", "*.model", "chat_template.json", "chat_template.jinja", "generation_config.json"),
    *("*processor_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"),
    *("additional_chat_templates/*.jinja", "*vocab*.json", "bpe.codes", "dict.txt", "emoji.json"),
    *("byte_maps.json", "normalizer.json", "word_*.json", "tekken.json", "*.tiktoken", "*.tokenizer"),
)
# Tokenizers of transformers need one of these files.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_CONFIGS = ("config.json", "open_clip_config.json")

# Limits of a configuration. The deepest published models have some 130 layers (Llama 3.1 405B: 126), and
# ImageNet-21k has 21,841 classes.
MOST_LAYERS, MOST_LABELS = 1000, 1_000_000
_MOST = {
    "layers": (MOST_LAYERS, re.compile(r"(layers?|depth)$")),
    "labels": (MOST_LABELS, re.compile(r"(labels|classes)$")),
}

log = logging.getLogger("driftlens")


def open_checkpoint(
    path: str | os.PathLike[str], *, offline: bool = False, base: StateSource | None = None
) -> StateSource:
    """Open the weights at a path for reading tensor by tensor. Only headers are read.

    Args:
        path: a `.safetensors`, `.pt`, `.pth`, `.bin` or `.ckpt` file; a folder of `save_pretrained`, open_clip or the
            Hub, possibly in shards; or a Hub id (`organisation/name`), optionally with a revision
            (`organisation/name@v1.0`).
        offline: True to use only the Hub's local cache.
        base: the model that LoRA adapters are added to, for a folder of adapters.

    Raises:
        CheckpointError: the file is missing, incomplete, of a kind that can't be read safely, or holds no tensors.
    """
    place = pathlib.Path(fetched(path, offline=offline) if isinstance(path, str) else path)
    try:
        # A folder's real name may contain `~` or `$`.
        place = place if place.exists() else expanded(place)
        with concerning(place):
            if place.is_dir():
                return _open_weights_or_adapters(place, base)
            _require_weights_file(place)
            from driftlens.checkpoints.tensor_sources import open_file

            return open_file(place)
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read: {error.strerror}", hint="Check the path and its permissions."
        ) from error


def fetched(path: str, *, offline: bool = False) -> str:
    """Return the local cache folder of a Hub id; other paths are returned unchanged."""
    place = expanded(path)
    # A local path wins over a Hub id of the same form; `folder/model.pt` has that form, too.
    if place.exists() or not is_hub_id(path) or place.suffix in _READABLE:
        return path
    return str(_hub_cache_folder(path, offline=offline))


def _open_weights_or_adapters(folder: pathlib.Path, base: StateSource | None) -> StateSource:
    if not is_lora_folder(folder):
        folder = _transformer_folder(folder)
        _require_readable_weights(folder)
        return open_folder(folder)
    if base is None:
        raise CheckpointError(
            f"{folder} holds LoRA adapters, not a whole model",
            hint="Give it as an expert together with its base, or merge and save it.",
        )
    from driftlens.checkpoints.lora import LoraSource

    return LoraSource(base, folder)


def _require_readable_weights(folder: pathlib.Path) -> None:
    """Refuse a folder whose weights are quantised, or only there in a form that can't be read."""
    # Loaders that need the configuration report damage.
    with contextlib.suppress(CheckpointError):
        config = folder / "config.json"
        require_unquantised(read_json(config) if config.is_file() else {}, str(folder))
    suffixes = (*_READABLE, *_OTHERS, *_PICKLES)
    files = sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in suffixes)
    if files and not any(file.suffix.lower() in _READABLE for file in files):
        _require_weights_file(files[0])


def _require_weights_file(path: pathlib.Path) -> None:
    if not path.exists():
        raise CheckpointError(
            f"there is no file {path}", hint="Check the path; paths in a spec are relative to its folder."
        )
    if path.suffix.lower() not in _READABLE:
        hint = "Save the weights as safetensors, or give their folder."
        raise CheckpointError(
            f"{path}: expected a file of type {', '.join(_READABLE)}",
            hint=conversion(path) if path.suffix.lower() in _PICKLES else hint,
        )


def is_lora_folder(folder: pathlib.Path) -> bool:
    """Return True if a folder contains peft adapters instead of a whole model."""
    return (folder / ADAPTER).is_file()


def open_folder(folder: pathlib.Path) -> StateSource:
    """Open the weights in a folder of `save_pretrained`, open_clip or the Hub."""
    from driftlens.checkpoints.tensor_sources import open_file

    path = _find_weights_file(folder)
    return _open_shards(path) if path.suffix == ".json" else open_file(path)


def _find_weights_file(folder: pathlib.Path) -> pathlib.Path:
    """Return the path of a folder's weights file, or of the index of its shards."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
        # Copies of a Hub cache contain links to its blobs.
        if (folder / name).is_symlink():
            raise CheckpointError(
                f"{folder / name} is a broken link to {(folder / name).readlink()}",
                hint="Copy or download the folder again, following links (cp -rL).",
            )
    there = some_of(sorted(entry.name for entry in folder.iterdir())) or "nothing"
    raise CheckpointError(
        f"{folder} holds no weights; found {there}",
        hint=f"Expected one of {', '.join(WEIGHT_FILES)}; give other files by path.",
    )


def _open_shards(index: pathlib.Path) -> StateSource:
    from driftlens.checkpoints.tensor_sources import Composed, open_file

    listed = _read_weight_map(index)
    sources = {shard: open_file(path) for shard, path in _needed_shard_files(index, listed).items()}
    there = {
        key: (sources[shard], key)
        for key, shard in listed.items()
        if shard in sources and key in sources[shard].headers
    }
    # A few tensors that only the index lists are left out, and code that needs one reports it; with most of
    # them missing, the files belong to another model.
    if 2 * len(there) < len(listed):
        missing = next(key for key in listed if key not in there)
        raise CheckpointError(
            f"{index} lists {missing!r} in {listed[missing]}, which lacks it",
            hint="Index and shards do not match; download or save the folder again.",
        )
    return Composed(str(index.parent), there)


def _read_weight_map(index: pathlib.Path) -> Mapping[str, str]:
    """Read the file name of each tensor's shard from an index."""
    try:
        shards = from_json(plain_file(index).read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        shards = None
    if (
        not isinstance(shards, dict)
        or not shards
        or not all(isinstance(name, str) for name in shards.values())
    ):
        raise CheckpointError(
            f"{index} is not an index of shards",
            hint="Expected JSON with a `weight_map` from tensor names to files; download it again.",
        )
    return shards


def _needed_shard_files(index: pathlib.Path, listed: Mapping[str, str]) -> dict[str, pathlib.Path]:
    """Return the files that an index lists, by name, without those that the model does not need."""
    files = {name: index.parent / name for name in sorted({*listed.values()})}
    there = {key.partition(".")[0] for key, name in listed.items() if files[name].is_file()}
    # Published folders may leave out shards of parts that only training uses. A missing head is never one of
    # these: the model could not answer without it.
    needed = {name for key, name in listed.items() if key.partition(".")[0] in there or "head" in key}
    files = {name: path for name, path in files.items() if not there or name in needed}
    for name, path in files.items():
        # An untrusted index must not point out of its folder.
        if path.name != name:
            raise CheckpointError(
                f"{index} names a shard outside its folder: {name}", hint="Don't use this folder."
            )
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, but {index.name} lists it", hint="Download or copy the missing shard."
            )
    return files


def shards_of(source: StateSource) -> Mapping[str, str]:
    """Return the file name of each tensor's shard for a source that `open_folder` made; empty for others."""
    folder = pathlib.Path(source.name)
    index = next((path for name in WEIGHT_FILES if (path := folder / name).is_file()), None)
    return _read_weight_map(index) if index is not None and index.suffix == ".json" else {}


def folder_notices(source: StateSource) -> list[str]:
    """Report adapters next to a whole model, and tensors that only the index lists."""
    place = pathlib.Path(source.name)
    folder = place.parent if place.name in WEIGHT_FILES else place
    if is_lora_folder(folder):
        whole = [name for name in WEIGHT_FILES if (folder / name).is_file()]
        return [f"{folder} holds adapters and {whole[0]}; the adapters are used"] if whole else []
    ghosts = [key for key in shards_of(source) if key not in source.headers]
    named = some_of([*map(repr, ghosts)], 1)
    return [f"{folder}: its index lists {named}, missing from all files and unused"] if ghosts else []


def is_hub_id(text: str) -> bool:
    """Return True if `text` looks like `organisation/name` or `organisation/name@revision`, not like a file."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?", text) is not None


def _hub_cache_folder(repository: str, *, offline: bool = False) -> pathlib.Path:
    """Return the cache folder of a repository's weights and settings; download it, with a log entry, if necessary."""
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        return _fetch_hub_snapshot(repository, _FORMS[0] + _FORMS[1], local=True)
    # A warning, so that it is seen where logging is not set up: the network is never used silently.
    log.warning("downloading weights of %s from the Hugging Face Hub", repository)
    for patterns in _FORMS:
        folder = _fetch_hub_snapshot(repository, patterns, local=False)
        if any(folder.glob(patterns[0])):
            return folder
    raise CheckpointError(
        f"{repository} on the Hub has neither safetensors nor PyTorch weights",
        hint="Convert the weights to safetensors and give their path.",
    )


def files_beside_weights(place: str, *, offline: bool = False) -> pathlib.Path | None:
    """Return the folder with settings and tokenizer of a folder or Hub repository; None without.

    Files that are not cached are downloaded, with a log entry.
    """
    from huggingface_hub import constants

    folder = expanded(place)
    if folder.is_dir() or not is_hub_id(place):
        return _transformer_folder(folder) if folder.is_dir() else None
    cached = None
    with contextlib.suppress(CheckpointError):
        cached = _fetch_hub_snapshot(place, [], local=True)
    if offline or constants.HF_HUB_OFFLINE:
        return cached and _transformer_folder(cached)
    if cached is None:
        log.warning("downloading configuration of %s from the Hugging Face Hub", place)
    return _transformer_folder(_fetch_hub_snapshot(place, [], local=False))


def _fetch_hub_snapshot(place: str, patterns: list[str], *, local: bool) -> pathlib.Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, _, revision = place.partition("@")
    try:
        folder = snapshot_download(
            name, revision=revision or None, allow_patterns=patterns + _BESIDE, local_files_only=local
        )
    except Exception as error:  # network, access, disk: the library's own errors and its HTTP client's
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        # The library raises this for any failure to reach the Hub.
        if isinstance(error, LocalEntryNotFoundError):
            cause = "it is unreachable"
        flag = f" --revision {revision}" if revision else ""
        raise CheckpointError(
            f"no file or folder {place!r}, and the Hub can't provide it "
            f"({'offline, and not cached' if local else cause})",
            hint=f"Check the path, or run once online: hf download {name}{flag}",
        ) from error
    return pathlib.Path(folder)


def library_folder(place: str) -> pathlib.Path | None:
    """Return the folder with a configuration that `place` is, is in, or names in the Hub's cache; None without."""
    name = place.removeprefix("hf-hub:").removeprefix("local-dir:")
    path = expanded(name)
    if not path.exists() and is_hub_id(name):
        path = files_beside_weights(name, offline=True) or path
    folder = _transformer_folder(path) if path.is_dir() else path.parent
    is_there = name and path.exists() and any((folder / config).is_file() for config in _CONFIGS)
    return folder if is_there else None


def companion_files(folder: pathlib.Path | None) -> dict[str, pathlib.Path]:
    """List the tokenizer, processor, generation and license files of a library's folder by name; never code.

    For sentence-transformers, this includes the files of other modules at their place in a saved folder, which has
    the transformer in its root.
    """
    if folder is None:
        return {}
    # Links out of the folder are skipped: the files are copied next to saved models, which may be published.
    inside = [(_sentence_transformers_folder(folder) or folder).resolve()]
    # Files in the Hub's cache are links to the repository's blobs.
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parents[1] / "blobs")
    beside = [path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()]
    paths = {path.relative_to(folder).as_posix(): path for path in beside} | _sentence_transformers_files(
        folder
    )
    return {
        name: paths[name] for name in sorted(paths) if any(map(paths[name].resolve().is_relative_to, inside))
    }


def image_processor_config(source: str, *, offline: bool = False) -> dict[str, Any] | None:
    """Return the image processor's configuration of a folder or Hub repository of transformers; None without."""
    # Version 5 writes processor_config.json and prefers it to preprocessor_config.json of older versions.
    nested = (read_config(source, "processor_config.json", offline=offline) or {}).get("image_processor")
    if isinstance(nested, dict):
        return nested
    return read_config(source, "preprocessor_config.json", offline=offline)


def read_config(source: str, file: str, *, offline: bool = False) -> dict[str, Any] | None:
    """Read the JSON object in a file of a folder or Hub repository; None if there is no such file."""
    folder = files_beside_weights(source, offline=offline)
    if folder is None and not is_hub_id(source):
        raise SpecError(
            f"{source!r} is neither a folder nor a Hub id",
            hint="Set `architecture.source` to a folder with a config, or to owner/name on the Hub.",
        )
    if folder is None or not (folder / file).is_file():
        return None
    return _require_plausible_config(read_json(folder / file), source)


def _require_plausible_config(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Refuse a configuration with NaN, or with sizes so large that building the model would not end."""
    for key, value in config.items():
        if value == {"__float__": "NaN"} or (isinstance(value, float) and math.isnan(value)):
            hint = "Restore the original configuration."
            raise IncompatibleModelsError(f"{source}: the configuration has NaN for {key}", hint=hint)
        if isinstance(value, dict):
            _require_plausible_config(value, source)
        for kind, (most, names) in _MOST.items():
            if isinstance(value, int) and value > most and names.search(key):
                raise IncompatibleModelsError(
                    f"{source} asks for {value:,} {kind} ({key})",
                    hint=f"At most {most:,} are supported; restore the original configuration.",
                )
    return config


def needed_config(source: str, file: str, expected: str, *, offline: bool, hint: str) -> dict[str, Any]:
    """Read the configuration file that a loader needs; refuse a source without it and name its family.

    Args:
        source: the folder or Hub id.
        file: the file's name.
        expected: the expected family, for messages.
        offline: True to use only the local cache.
        hint: the remedy in messages.
    """
    config = read_config(source, file, offline=offline)
    if config is not None:
        return config
    for other in _CONFIGS:
        if other != file and (stated := read_config(source, other, offline=True)) is not None:
            raise wrong_family(stated, source, expected)
    if (folder := expanded(source)).is_dir():
        _require_readable_weights(folder)
    is_cached = offline and not folder.exists()
    raise SpecError(f"{source} has no {file}{' in the local cache' if is_cached else ''}", hint=hint)


def with_floats(config: Any) -> Any:
    """Convert {"__float__": "Infinity"}, which transformers 5 writes, to floats."""
    if isinstance(config, Mapping):
        tag = config.get("__float__")
        if len(config) == 1 and tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {key: with_floats(value) for key, value in config.items()}
    return [with_floats(value) for value in config] if isinstance(config, list) else config


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    try:
        value = from_json(plain_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", hint="Restore the original file.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object", hint="Restore the original file.")
    return value


def tokenizer_in(source: str, *, offline: bool, kind: str = "AutoTokenizer") -> Any:
    """Load the tokenizer of a folder or Hub repository by a class of transformers; None if missing or damaged."""
    folder = files_beside_weights(source, offline=offline)
    if folder is None:
        return None
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception:  # a missing or broken file: the tokenizers library raises nothing more precise
        return None


# Folders of sentence-transformers: a transformer, possibly in its own folder, and modules that make embeddings.
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


class _Module(NamedTuple):
    """The class name of a module and its folder; empty for the root."""

    kind: str
    place: str


def modules_of(folder: pathlib.Path) -> tuple[_Module, ...]:
    """List the modules of a folder of sentence-transformers; empty for other folders."""
    try:
        stated = from_json(plain_file(folder / MODULES).read_bytes())
        modules = tuple(_Module(entry["type"].rpartition(".")[2], entry["path"]) for entry in stated)
        places = [(folder / module.place).resolve() for module in modules]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ()
    # The folder may come from an untrusted source.
    if not all(place.is_relative_to(folder.resolve()) for place in places):
        raise CheckpointError(f"{folder / MODULES} names an outside folder", hint="Don't use this folder.")
    return modules


def _transformer_folder(folder: pathlib.Path) -> pathlib.Path:
    """Return the transformer's folder in a folder of sentence-transformers; other folders are returned unchanged."""
    leading = next(iter(modules_of(folder)), _Module("", ""))
    return folder / leading.place if leading.kind == "Transformer" else folder


def _sentence_transformers_folder(transformer: pathlib.Path | None) -> pathlib.Path | None:
    """Return the sentence-transformers folder that contains a transformer; None for other transformers."""
    places = () if transformer is None else (transformer, transformer.parent)
    return next(
        (root for root in places if modules_of(root) and _transformer_folder(root) == transformer), None
    )


def embedding_folder(transformer: pathlib.Path | None) -> pathlib.Path | None:
    """Return the same for embedding models; None for a cross-encoder, whose transformer gives scores itself."""
    root = _sentence_transformers_folder(transformer)
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
    """Read a folder's Pooling module; the default is the mean. Refuse modes that the library does not have."""
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
    named = prompts.items() if isinstance(prompts, dict) else ()
    by_name = {name: text for name, text in named if isinstance(text, str)}
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
    """Refuse a model whose tokens become another embedding than the base's; return a notice on other differences."""
    home, root = embedding_folder(base), embedding_folder(other)
    if root is None:
        return ""
    of_base, later = ([] if place is None else _modules_after_transformer(place) for place in (home, root))
    if later != of_base:
        place = (later or of_base)[0][0]
        raise IncompatibleModelsError(
            f"{root}: the weights of {place} differ from the base's, and only transformers are merged",
            hint=f"Freeze {place} in training, or give its transformer without {MODULES}.",
        )
    if home is None:
        return ""
    of_base_pool, pool = pooling_of(home), pooling_of(root)
    if pool != of_base_pool:
        prompt = "" if pool.modes != of_base_pool.modes else ", one without its prompt"
        raise IncompatibleModelsError(
            f"{root} pools by {pool.said}, the base by {of_base_pool.said}{prompt}",
            hint=f"Train it with the base's modules, or give its transformer without {MODULES}.",
        )
    ends = [[module.kind for module in modules_of(place)].count("Normalize") for place in (home, root)]
    if ends[0] != ends[1]:
        return f"only one of {root} and the base normalizes embeddings; the base's setting is used"
    return ""


def _sentence_transformers_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """List the files of sentence-transformers around a transformer, by their place in a saved folder."""
    root = _sentence_transformers_folder(folder)
    if root is None:
        return {}
    paths = {path.name: path for place in (folder, root) for name in _SETTINGS for path in place.glob(name)}
    for module in modules_of(root)[1:]:
        names = ("config.json", *WEIGHT_FILES) if module.place else ()
        paths |= {f"{module.place}/{name}": root / module.place / name for name in names}
    return {name: path for name, path in paths.items() if path.is_file()}


def flat(modules: Any) -> Any:
    """Return the content of `modules.json` for a folder that has the transformer in its root."""
    return [{**modules[0], "path": ""}, *modules[1:]]


def _modules_after_transformer(folder: pathlib.Path) -> list[tuple[str, str, Any]]:
    """List folder name, digest of the weights and settings of every module with weights after the transformer."""
    from driftlens.checkpoints.tensor_sources import content_digest

    places = [folder / module.place for module in modules_of(folder)[1:] if module.place]
    return [
        (place.name, content_digest(open_folder(place)), json_object(place, "config.json"))
        for place in places
        if any((place / name).is_file() for name in WEIGHT_FILES)
    ]
