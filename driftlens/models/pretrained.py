"""Weights by the tag that open_clip publishes them under: `pretrained:openai`, for the architecture at hand."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

from driftlens.base.errors import CheckpointError, IncompatibleModelsError, SpecError, did_you_mean
from driftlens.models.architecture import Architecture

SCHEME = "pretrained:"

log = logging.getLogger("driftlens")


def resolve_pretrained(place: str, architecture: Architecture, *, offline: bool = False) -> str:
    """The file of a `pretrained:TAG`, fetched by open_clip's own helper if need be; other places as they are.

    A download is announced on the `driftlens` logger. With `offline`, or `HF_HUB_OFFLINE` in the environment, only
    the caches of open_clip and the Hub are looked into.

    Raises:
        SpecError: the architecture is not one that open_clip knows by name, or has no such tag.
        IncompatibleModelsError: the weights were trained with another activation or preprocessing.
        CheckpointError: they can't be had.
    """
    if not place.startswith(SCHEME):
        return place
    import open_clip

    model = architecture.source.replace("/", "-")
    if architecture.loader != "open-clip" or model not in open_clip.list_models():
        raise SpecError(
            f"{place} needs an architecture that open_clip knows by name, not {architecture.source}",
            hint="Write architecture: {loader: open-clip, source: ViT-B-32-quickgelu}, or give a file of weights.",
        )
    tag, tags = place.removeprefix(SCHEME), open_clip.list_pretrained_tags_by_model(model)
    config = open_clip.get_pretrained_cfg(model, tag)
    if not config:
        raise SpecError(
            f"open_clip has no weights {tag!r} for {model}; there are {', '.join(tags) or 'none'}",
            hint=did_you_mean(tag, tags),
        )
    _require_fit(place, model, config, architecture)
    return _cached(config) or _fetched(place, model, config, offline)


def _require_fit(place: str, model: str, config: dict[str, Any], architecture: Architecture) -> None:
    """open_clip itself warns of an activation and adopts the preprocessing; here both stand in the architecture."""
    import open_clip

    wanted = bool(config.get("quick_gelu", False))
    if wanted != bool(open_clip.get_model_config(model).get("quick_gelu", False)):
        other = f"{model}-quickgelu" if wanted else model.removesuffix("-quickgelu")
        raise IncompatibleModelsError(
            f"{place} was trained with {'QuickGELU' if wanted else 'GELU'}, {model} computes with the other",
            hint=f"Write architecture.source: {other}.",
        )
    settings = {} if architecture.preprocess is None else architecture.preprocess.settings
    differing = [
        f"{key} {config[key]} (here {settings[key]})"
        for key in ("mean", "std", "interpolation", "resize_mode")
        if key in config and key in settings and config[key] != settings[key]
    ]
    if differing:
        raise IncompatibleModelsError(
            f"{place} was trained on images prepared otherwise: {', '.join(differing)}",
            hint="Download the file; give its path as weights, and as source an open_clip_config.json with this "
            "preprocess_cfg.",
        )


def _cached(config: dict[str, Any]) -> str | None:
    """The file, where it was fetched before."""
    from huggingface_hub import try_to_load_from_cache
    from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME

    repository, _, name = config.get("hf_hub", "").rpartition("/")
    if repository:
        given = name or HF_WEIGHTS_NAME
        safe = HF_SAFE_WEIGHTS_NAME if given == HF_WEIGHTS_NAME else f"{given.rpartition('.')[0]}.safetensors"
        paths = (try_to_load_from_cache(repository, each) for each in (safe, given))
        return next((path for path in paths if isinstance(path, str)), None)
    file = pathlib.Path("~/.cache/clip").expanduser() / config.get("url", "").rpartition("/")[2]
    return str(file) if file.is_file() else None


def _fetched(place: str, model: str, config: dict[str, Any], offline: bool) -> str:
    import open_clip
    from huggingface_hub import constants

    origin = config.get("hf_hub") or config.get("url")
    reason = "the network is not to be used"
    if not (offline or constants.HF_HUB_OFFLINE):
        # A warning, so that it is seen where logging is not set up: the network is never used silently.
        log.warning("fetching the weights %s of %s from %s", place, model, origin)
        try:
            return str(open_clip.download_pretrained(config))
        except Exception as error:  # network, disk, checksum: the helper's own errors and its HTTP client's
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    raise CheckpointError(
        f"{place} of {model} ({origin}) can't be had: {reason}",
        hint="Run once where there is a network and without --offline, or give the path of the weights.",
        source=place,
    )
