"""Weights and configurations in a folder, on the Hugging Face Hub or in the local cache that its library keeps."""

from __future__ import annotations

import json
import logging
import pathlib
import re
from typing import Any

from driftlens.errors import CheckpointError, SpecError

_FORMS = (["*.safetensors", "*.safetensors.index.json"], ["*.bin", "*.bin.index.json"])
"""Weight files to fetch, best form first: a repository often holds the same weights twice."""
_BESIDE = ["*.json", "*.txt", "*.model"]

log = logging.getLogger("driftlens")


def is_hub_id(text: str) -> bool:
    """Whether `text` reads like `organisation/name` (and not like the path of a file)."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None


def hub_folder(repository: str, *, offline: bool = False) -> pathlib.Path:
    """The folder in the local cache that holds a repository's weights and settings, downloaded if need be.

    A download is announced on the `driftlens` logger. With `offline`, or `HF_HUB_OFFLINE` in the environment,
    nothing is asked of the network.

    Args:
        repository: `organisation/name`.
        offline: whether only the cache may be looked at.

    Raises:
        CheckpointError: the repository is not in the cache and may not be downloaded, or the download failed.
    """
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        return _fetch(repository, _FORMS[0] + _FORMS[1], local=True)
    # A warning, so that it is seen where logging is not set up: the network is never used silently.
    log.warning("fetching the weights of %s from the Hugging Face Hub", repository)
    for patterns in _FORMS:
        folder = _fetch(repository, patterns, local=False)
        if any(folder.glob(patterns[0])):
            return folder
    raise CheckpointError(
        f"{repository} on the Hugging Face Hub holds neither safetensors nor PyTorch weights",
        hint="Convert the weights to safetensors and give the path of the file.",
    )


def _fetch(repository: str, patterns: list[str], *, local: bool) -> pathlib.Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repository, allow_patterns=patterns + _BESIDE, local_files_only=local)
    except (
        Exception
    ) as error:  # network, access, disk: the library raises its own and its HTTP client's errors
        reason = (
            "the network is not to be used" if local else f"{type(error).__name__}: {error}".splitlines()[0]
        )
        raise CheckpointError(
            f"there is no file or folder {repository!r}, and {repository} on the Hub can't be had ({reason})",
            hint=f"Check the path; or run once where there is a network: hf download {repository}",
            source=repository,
        ) from error
    return pathlib.Path(folder)


def read_config(source: str, file: str, *, offline: bool = False) -> dict[str, Any] | None:
    """The JSON object in `file` of a folder or Hub repository, or None when it has no such file.

    Args:
        source: folder or Hub id.
        file: name of the file in it.
        offline: whether only files that were downloaded before may be used.

    Raises:
        SpecError: `source` is neither a folder nor a Hub id.
        CheckpointError: the file can't be fetched, or holds something else.
    """
    folder = pathlib.Path(source).expanduser()
    if folder.is_dir():
        return read_json(folder / file) if (folder / file).is_file() else None
    if not is_hub_id(source):
        raise SpecError(
            f"{source!r} is neither a folder nor a Hub id",
            hint="Check `architecture.source`: a folder with a config, or owner/name as on the Hub.",
        )
    fetched = _fetched(source, file, offline)
    return None if fetched is None else read_json(fetched)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: the file can't be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} can't be read: {error}", hint="Restore it from the original."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object", hint="Restore it from the original.")
    return value


def _fetched(repository: str, file: str, offline: bool) -> pathlib.Path | None:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(repository, file)
    if offline or constants.HF_HUB_OFFLINE:
        return pathlib.Path(cached) if isinstance(cached, str) else None
    if not isinstance(cached, str):
        # A warning, so that it is seen where logging is not set up: the network is never used silently.
        log.warning("fetching %s of %s from the Hugging Face Hub", file, repository)
    try:
        return pathlib.Path(hf_hub_download(repository, file))
    except Exception as error:  # network, access, disk: the library's own errors and its HTTP client's
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise CheckpointError(
            f"{repository}: {file} can't be fetched from the Hub: {str(error).strip().splitlines()[0]}",
            hint="Check the id and the network, log in if the model is gated, or give the path of a folder.",
        ) from error
