"""Weights from the Hugging Face Hub, or from the local cache that its library keeps."""

from __future__ import annotations

import logging
import pathlib
import re

from driftlens.errors import CheckpointError

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
