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
    conversion_hint,
    require_unquantised,
    require_unquantised_keys,
    wrong_family_error,
)
from driftlens.utils.errors import CheckpointError, IncompatibleModelsError, SpecError, add_error_context, shorten_list
from driftlens.utils.files import expand_home, parse_json, read_json_object, regular_file

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
    """Open the weights at a path for reading tensor by tensor.

    Args:
        path: a `.safetensors`, `.pt`, `.pth`, `.bin` or `.ckpt` file; a folder of `save_pretrained`, open_clip or the
            Hub, possibly in shards; or a Hub id (`organisation/name`, `organisation/name@revision`).
        offline: True to use only the Hub's local cache.
        base: the model that LoRA adapters are added to, for a folder of adapters.
    """
    place = pathlib.Path(fetch_if_hub_id(path, offline=offline) if isinstance(path, str) else path)
    try:
        # A folder's real name may contain `~` or `$`.
        place = _resolve_cache_root(place if place.exists() else expand_home(place))
        with add_error_context(place):
            if place.is_dir():
                opened = _open_weights_or_adapters(place, base)
            else:
                _require_weights_file(place)
                from driftlens.checkpoints.tensor_sources import open_weights_file

                opened = open_weights_file(place)
            require_unquantised_keys(opened.headers, str(path))
            return opened
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read: {error.strerror}", hint="Check the path and its permissions."
        ) from error


def _resolve_cache_root(folder: pathlib.Path) -> pathlib.Path:
    """Return the snapshot of `main` in a model's folder of the Hub cache; return other paths unchanged."""
    reference = folder / "refs" / "main"
    if not (folder / "snapshots").is_dir() or not reference.is_file():
        return folder
    snapshot = folder / "snapshots" / regular_file(reference).read_text(encoding="utf-8").strip()
    # The reference may come from an untrusted source.
    return snapshot if snapshot.is_dir() and snapshot.parent == folder / "snapshots" else folder


def fetch_if_hub_id(path: str, *, offline: bool = False) -> str:
    """Return the folder of a Hub id, downloaded if necessary, or of a model's cache; return other paths unchanged."""
    place = expand_home(path)
    # A local path wins over a Hub id of the same form; `folder/model.pt` has that form, too.
    if place.exists() or not is_hub_id(path) or place.suffix in _READABLE:
        snapshot = _resolve_cache_root(place)
        return path if snapshot == place else str(snapshot)
    return str(_fetch_hub_weights(path, offline=offline))


def _open_weights_or_adapters(folder: pathlib.Path, base: StateSource | None) -> StateSource:
    if not is_lora_folder(folder):
        folder = _transformer_folder(folder)
        _require_readable_weights(folder)
        return open_model_folder(folder)
    if base is None:
        raise CheckpointError(
            f"{folder} holds LoRA adapters, not a whole model",
            hint="Give it as an expert together with its base, or merge and save it.",
        )
    from driftlens.checkpoints.lora import LoraSource

    return LoraSource(base, folder)


def _require_readable_weights(folder: pathlib.Path) -> None:
    """Refuse a folder whose weights are quantized or in an unsupported file format."""
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
            hint=conversion_hint(path) if path.suffix.lower() in (*_PICKLES, ".gguf") else hint,
        )


def is_lora_folder(folder: pathlib.Path) -> bool:
    """Return True if a folder contains peft adapters instead of a whole model."""
    return (folder / ADAPTER).is_file()


def open_model_folder(folder: pathlib.Path) -> StateSource:
    """Open the weights in a folder saved by `save_pretrained` or open_clip, or downloaded from the Hub."""
    from driftlens.checkpoints.tensor_sources import open_weights_file

    path = _find_weights_file(folder)
    return _open_shards(path) if path.suffix == ".json" else open_weights_file(path)


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
    there = shorten_list(sorted(entry.name for entry in folder.iterdir())) or "nothing"
    raise CheckpointError(
        f"{folder} holds no weights; found {there}",
        hint=f"Expected one of {', '.join(WEIGHT_FILES)}. If the file has another name, give its path.",
    )


def _open_shards(index: pathlib.Path) -> StateSource:
    from driftlens.checkpoints.tensor_sources import CompositeSource, open_weights_file

    listed = _read_weight_map(index)
    sources = {shard: open_weights_file(path) for shard, path in _needed_shard_files(index, listed).items()}
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
    return CompositeSource(str(index.parent), there)


def _read_weight_map(index: pathlib.Path) -> Mapping[str, str]:
    """Read the map from tensor names to shard files in a shard index."""
    try:
        shards = parse_json(regular_file(index).read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        shards = None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(
            f"{index} is not an index of shards",
            hint="Expected JSON with a `weight_map` from tensor names to files; download it again.",
        )
    return shards


def _needed_shard_files(index: pathlib.Path, listed: Mapping[str, str]) -> dict[str, pathlib.Path]:
    """Map the shard file names in an index to paths, without shards that only training needs."""
    files = {name: index.parent / name for name in sorted({*listed.values()})}
    there = {key.partition(".")[0] for key, name in listed.items() if files[name].is_file()}
    # Published folders may leave out shards of parts that only training uses. A missing head is never one of
    # these: the model could not answer without it.
    needed = {name for key, name in listed.items() if key.partition(".")[0] in there or "head" in key}
    files = {name: path for name, path in files.items() if not there or name in needed}
    for name, path in files.items():
        # An untrusted index must not point out of its folder.
        if path.name != name:
            raise CheckpointError(f"{index} names a shard outside its folder: {name}", hint="Don't use this folder.")
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, but {index.name} lists it", hint="Download or copy the missing shard."
            )
    return files


def shard_by_tensor(source: StateSource) -> Mapping[str, str]:
    """Map tensor names to shard file names for a source from `open_model_folder`; empty if it is not sharded."""
    folder = pathlib.Path(source.name)
    index = next((path for name in WEIGHT_FILES if (path := folder / name).is_file()), None)
    return _read_weight_map(index) if index is not None and index.suffix == ".json" else {}


def weights_notices(source: StateSource) -> list[str]:
    """Return notices on adapters next to a whole model and on indexed tensors that all shards lack."""
    place = pathlib.Path(source.name)
    folder = place.parent if place.name in WEIGHT_FILES else place
    if is_lora_folder(folder):
        whole = [name for name in WEIGHT_FILES if (folder / name).is_file()]
        return [f"{folder} holds adapters and {whole[0]}; the adapters are used"] if whole else []
    ghosts = [key for key in shard_by_tensor(source) if key not in source.headers]
    named = shorten_list([*map(repr, ghosts)], 1)
    return [f"{folder}: its index lists {named}, missing from all files and unused"] if ghosts else []


def is_hub_id(text: str) -> bool:
    """Return True if `text` looks like `organisation/name` or `organisation/name@revision`, not like a file."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?", text) is not None


def _fetch_hub_weights(repository: str, *, offline: bool = False) -> pathlib.Path:
    """Download a Hub repository's weights and configuration, unless cached, and return the cache folder."""
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


def fetch_config_folder(place: str, *, offline: bool = False) -> pathlib.Path | None:
    """Return the folder with configuration and tokenizer of a model folder or Hub id; None for other paths.

    Files that are not cached are downloaded, with a log entry.
    """
    from huggingface_hub import constants

    folder = _resolve_cache_root(expand_home(place))
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


def find_config_folder(place: str) -> pathlib.Path | None:
    """Find the local or cached folder with the configuration of a file, folder or Hub id; None without one."""
    name = place.removeprefix("hf-hub:").removeprefix("local-dir:")
    path = _resolve_cache_root(expand_home(name))
    if not path.exists() and is_hub_id(name):
        path = fetch_config_folder(name, offline=True) or path
    folder = _transformer_folder(path) if path.is_dir() else path.parent
    is_there = name and path.exists() and any((folder / config).is_file() for config in _CONFIGS)
    return folder if is_there else None


def companion_files(folder: pathlib.Path | None) -> dict[str, pathlib.Path]:
    """Map names to paths of a folder's tokenizer, processor, generation and license files; code is never included.

    For sentence-transformers, this includes the files of other modules.
    """
    if folder is None:
        return {}
    # Links out of the folder are skipped: the files are copied next to saved models, which may be published.
    inside = [(_sentence_transformers_folder(folder) or folder).resolve()]
    # Files in the Hub's cache are links to the repository's blobs.
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parents[1] / "blobs")
    beside = [path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()]
    paths = {path.relative_to(folder).as_posix(): path for path in beside} | _sentence_transformers_files(folder)
    return {name: paths[name] for name in sorted(paths) if any(map(paths[name].resolve().is_relative_to, inside))}


def image_processor_config(source: str, *, offline: bool = False) -> dict[str, Any] | None:
    """Read the image processor's configuration of a transformers folder or Hub id; None if there is none."""
    # Version 5 writes processor_config.json and prefers it to preprocessor_config.json of older versions.
    nested = (read_config(source, "processor_config.json", offline=offline) or {}).get("image_processor")
    if isinstance(nested, dict):
        return nested
    return read_config(source, "preprocessor_config.json", offline=offline)


def read_config(source: str, file: str, *, offline: bool = False) -> dict[str, Any] | None:
    """Read the JSON object in a file of a folder or Hub repository; None if there is no such file."""
    folder = fetch_config_folder(source, offline=offline)
    if folder is None and not is_hub_id(source):
        raise SpecError(
            f"{source!r} is neither a folder nor a Hub id",
            hint="Set `architecture.source` to a folder with a config, or to owner/name on the Hub.",
        )
    if folder is None or not (folder / file).is_file():
        return None
    return _require_plausible_config(read_json(folder / file), source)


def _require_plausible_config(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Refuse a configuration with NaN, or with so many layers or labels that the model cannot be built."""
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


def require_config(source: str, file: str, expected: str, *, offline: bool, hint: str) -> dict[str, Any]:
    """Read the configuration file that a loader needs; raise an error that names the model family if it is missing.

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
            raise wrong_family_error(stated, source, expected)
    if (folder := expand_home(source)).is_dir():
        _require_readable_weights(folder)
    is_cached = offline and not folder.exists()
    raise SpecError(f"{source} has no {file}{' in the local cache' if is_cached else ''}", hint=hint)


def decode_json_floats(config: Any) -> Any:
    """Convert infinity and NaN as transformers 5 writes them, such as {"__float__": "Infinity"}, to floats."""
    if isinstance(config, Mapping):
        tag = config.get("__float__")
        if len(config) == 1 and tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {key: decode_json_floats(value) for key, value in config.items()}
    return [decode_json_floats(value) for value in config] if isinstance(config, list) else config


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    try:
        value = parse_json(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", hint="Restore the original file.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object", hint="Restore the original file.")
    return value


def load_tokenizer(source: str, *, offline: bool, kind: str = "AutoTokenizer") -> Any:
    """Load the tokenizer of a folder or Hub id with a transformers class; None if it is missing or damaged."""
    folder = fetch_config_folder(source, offline=offline)
    if folder is None:
        return None
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
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


class _ModuleEntry(NamedTuple):
    """One module of a sentence-transformers model: its class name and its folder, empty for the root."""

    kind: str
    place: str


def sentence_modules(folder: pathlib.Path) -> tuple[_ModuleEntry, ...]:
    """List the modules of a sentence-transformers folder; empty for other folders."""
    try:
        stated = parse_json(regular_file(folder / MODULES).read_bytes())
        modules = tuple(_ModuleEntry(entry["type"].rpartition(".")[2], entry["path"]) for entry in stated)
        places = [(folder / module.place).resolve() for module in modules]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ()
    # The folder may come from an untrusted source.
    if not all(place.is_relative_to(folder.resolve()) for place in places):
        raise CheckpointError(f"{folder / MODULES} names an outside folder", hint="Don't use this folder.")
    return modules


def _transformer_folder(folder: pathlib.Path) -> pathlib.Path:
    """Return the transformer's folder in a folder of sentence-transformers; other folders are returned unchanged."""
    leading = next(iter(sentence_modules(folder)), _ModuleEntry("", ""))
    return folder / leading.place if leading.kind == "Transformer" else folder


def _sentence_transformers_folder(transformer: pathlib.Path | None) -> pathlib.Path | None:
    """Return the sentence-transformers folder that contains a transformer; None for other transformers."""
    places = () if transformer is None else (transformer, transformer.parent)
    return next((root for root in places if sentence_modules(root) and _transformer_folder(root) == transformer), None)


def embedding_folder(transformer: pathlib.Path | None) -> pathlib.Path | None:
    """Return a transformer's sentence-transformers folder; None if there is none or it is a cross-encoder."""
    root = _sentence_transformers_folder(transformer)
    if root is None or read_json_object(root, _WHOLE).get("model_type") == "CrossEncoder":
        return None
    # Older cross-encoders are known only by these settings.
    older = {"sentence_transformers", "sbert_ce_default_activation_function"}
    return root if older.isdisjoint(read_json_object(root, "config.json")) else None


class Pooling(NamedTuple):
    """The pooling of token features to one embedding, as sentence-transformers defines it."""

    modes: tuple[str, ...] = ("mean",)
    includes_prompt: bool = True

    @property
    def description(self) -> str:
        """The pooling modes as text for messages."""
        return " and ".join(self.modes)


def read_pooling(folder: pathlib.Path) -> Pooling:
    """Read the pooling of a sentence-transformers folder, by default the mean; refuse unknown modes."""
    place = next((module.place for module in sentence_modules(folder) if module.kind == "Pooling"), None)
    stated = {} if place is None else read_json_object(folder / place, "config.json")
    modes = stated.get("pooling_mode") or [mode for key, mode in _POOLS.items() if stated.get(key)] or "mean"
    modes = (modes,) if isinstance(modes, str) else tuple(map(str, modes))
    if odd := [mode for mode in modes if mode not in _POOLS.values()]:
        raise IncompatibleModelsError(
            f"{folder} pools by {odd[0]!r}; expected {', '.join(_POOLS.values())}",
            hint="Restore the original Pooling.",
        )
    return Pooling(modes, stated.get("include_prompt") is not False)


class Prompts(NamedTuple):
    """The prompts of a sentence-transformers folder by name, the default prompt, and the similarity function."""

    by_name: Mapping[str, str] = {}
    default: str = ""
    similarity: str = "cosine"

    def find_by_name(self, *names: str) -> str:
        """Return the prompt of the first of these names that exists, else the default prompt."""
        return next((self.by_name[name] for name in names if name in self.by_name), self.default)


def read_prompts(folder: pathlib.Path) -> Prompts:
    """Read prompts and similarity function from `config_sentence_transformers.json`."""
    settings = read_json_object(folder, _WHOLE)
    prompts, similarity = settings.get("prompts"), settings.get("similarity_fn_name") or "cosine"
    named = prompts.items() if isinstance(prompts, dict) else ()
    by_name = {name: text for name, text in named if isinstance(text, str)}
    return Prompts(by_name, by_name.get(str(settings.get("default_prompt_name")), ""), str(similarity))


def require_known_modules(folder: pathlib.Path) -> None:
    """Refuse a sentence-transformers folder with unsupported modules, or whose first module is no transformer."""
    leading, *others = sentence_modules(folder)
    other = [leading.kind] * (leading.kind != "Transformer")
    other += [module.kind for module in others if module.kind not in _FOLLOWED]
    if other:
        raise IncompatibleModelsError(
            f"{folder} (sentence-transformers): unsupported module {other[0]}; expected Transformer, then "
            f"{', '.join(_FOLLOWED)}",
            hint=f"To merge only its transformer, copy that folder without {MODULES}.",
        )


def embedding_notices(folder: pathlib.Path) -> Iterator[str]:
    """Yield notices on the modules that turn features into embeddings and on the default prompt."""
    steps = [module.kind for module in sentence_modules(folder)[1:] if module.kind not in ("Pooling", "Dropout")]
    later = f", then by {', '.join(steps)}" if steps else ""
    yield (
        f"{folder} (sentence-transformers): the final feature is the text embedding, pooled by "
        f"{read_pooling(folder).description}{later}; these modules are saved unchanged"
    )
    if prompt := read_prompts(folder).default:
        yield f"{folder}: {prompt!r} precedes every text; a task's `prompt` replaces it"


def require_same_pooling(base: pathlib.Path | None, other: pathlib.Path | None) -> str:
    """Refuse a model whose pooling or later modules differ from the base's; return a notice on normalization."""
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
    of_base_pool, pool = read_pooling(home), read_pooling(root)
    if pool != of_base_pool:
        prompt = "" if pool.modes != of_base_pool.modes else ", one without its prompt"
        raise IncompatibleModelsError(
            f"{root} pools by {pool.description}, the base by {of_base_pool.description}{prompt}",
            hint=f"Train it with the base's modules, or give its transformer without {MODULES}.",
        )
    ends = [[module.kind for module in sentence_modules(place)].count("Normalize") for place in (home, root)]
    if ends[0] != ends[1]:
        return f"only one of {root} and the base normalizes embeddings; the base's setting is used"
    return ""


def _sentence_transformers_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Map file names in a saved folder to the settings and module files of a sentence-transformers folder."""
    root = _sentence_transformers_folder(folder)
    if root is None:
        return {}
    paths = {path.name: path for place in (folder, root) for name in _SETTINGS for path in place.glob(name)}
    for module in sentence_modules(root)[1:]:
        names = ("config.json", *WEIGHT_FILES) if module.place else ()
        paths |= {f"{module.place}/{name}": root / module.place / name for name in names}
    return {name: path for name, path in paths.items() if path.is_file()}


def flat_modules_json(modules: Any) -> Any:
    """Return the content of `modules.json` with the transformer in the root folder."""
    return [{**modules[0], "path": ""}, *modules[1:]]


def _modules_after_transformer(folder: pathlib.Path) -> list[tuple[str, str, Any]]:
    """List folder name, weights digest and settings of every module with weights after the transformer."""
    from driftlens.checkpoints.tensor_sources import content_digest

    places = [folder / module.place for module in sentence_modules(folder)[1:] if module.place]
    return [
        (place.name, content_digest(open_model_folder(place)), read_json_object(place, "config.json"))
        for place in places
        if any((place / name).is_file() for name in WEIGHT_FILES)
    ]
