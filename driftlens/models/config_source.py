"""Small configuration files of a model, from a local folder or the Hugging Face Hub, and modules built from them."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

from torch import nn

from driftlens.errors import CheckpointError, IncompatibleModelsError, SpecError
from driftlens.models.hub import is_hub_id

log = logging.getLogger("driftlens")


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


def weightless(build: Callable[[], nn.Module], source: str) -> Any:
    """The module that `build` returns, parameters on meta, buffers real, in eval mode and without gradients.

    Args:
        build: constructs the library's module from a configuration.
        source: where the configuration came from, for the message.

    Raises:
        IncompatibleModelsError: the library can't build what the configuration describes.
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            module = build()
    except Exception as error:  # whatever a constructor makes of values in somebody's file
        raise IncompatibleModelsError(
            f"the model that {source} describes can't be built: {type(error).__name__}: {error}",
            hint="Check its configuration file, and that the library is recent enough for it.",
        ) from error
    return module.eval().requires_grad_(False)
