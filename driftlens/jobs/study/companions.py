"""Doubts about what comes with the weights: text towers, tokenizers, the base that adapters were trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath

from driftlens.checkpoints.lora import is_lora_folder, named_base
from driftlens.checkpoints.refusals import foreign_code
from driftlens.checkpoints.sources import StateSource
from driftlens.jobs.study.opening import OpenModels, model_folder
from driftlens.jobs.study.suspicion import Finding, is_equal, label
from driftlens.models.language.vocabularies import (
    changed_ends,
    changed_files,
    changed_special_tokens,
    json_object,
)

MOST_READ = 1 << 16
"""Entries read of each tensor of a text tower: fine-tuning changes nearly all of them."""


def companions(models: OpenModels) -> list[Finding]:
    """What is odd about what comes with the weights of a spec's models; of text towers a few rows are read."""
    found: list[Finding] = []
    folders = {name: model_folder(models.origins[name], source) for name, source in models.stored.items()}
    for name, source in models.stored.items():
        found += _code(name, folders[name])
        if models.base is not None and name != "base":
            found += _text_tower(models, models.base, name, source)
            found += _adapter(models, folders["base"], name, folders[name])
            found += _tokenizer(folders["base"] or Path(models.architecture.source), name, folders[name])
    return found


def _code(name: str, folder: Path | None) -> Iterator[Finding]:
    if code := foreign_code(json_object(folder, "config.json"), needed=False):
        text = f"the {label(name)} brings code of its own ({code}), which is not run: the library's own model is used"
        yield Finding("notice", label(name), text, "Check that they compute the same.")


def _text_tower(models: OpenModels, base: StateSource, name: str, source: StateSource) -> Iterator[Finding]:
    layout = models.architecture.layout
    if layout is None:
        return
    wanted, own = (layout.beside_tower(model.headers, model.name) for model in (base, source))
    shared = sorted(wanted.keys() & own.keys(), key=lambda key: (base.headers[wanted[key]].nbytes, key))
    changed = list(islice((key for key in shared if _differs(base, wanted[key], source, own[key])), 2))
    if not changed:
        return
    what = "a logit scale of its own" if changed == ["logit_scale"] else "a fine-tuned text tower"
    heads = (
        "" if models.architecture.open_text is None else "heads that are made of prompts are the base's, and "
    )
    yield Finding(
        "notice",
        label(name),
        f"the {label(name)} has {what}, which is not used: {heads}saved models hold "
        f"the base's ({', '.join(changed)} differ{'s' * (len(changed) == 1)})",
        "Where that matters, give heads that its own text tower made in `heads.<task>.file`.",
    )


def _differs(base: StateSource, key: str, source: StateSource, own: str) -> bool:
    start, header = base.headers[key], source.headers[own]
    if start.shape != header.shape:
        return True
    if not start.dtype.is_floating_point:
        return False  # an index
    width = max(1, start.nbytes // start.dtype.itemsize // max(1, start.shape[0] if start.shape else 1))
    rows = (0, min(start.shape[0], max(1, MOST_READ // width))) if start.shape else None
    return not is_equal(base.read(key, rows), source.read(own, rows))


def _adapter(
    models: OpenModels, base_folder: Path | None, name: str, folder: Path | None
) -> Iterator[Finding]:
    if folder is None or not is_lora_folder(folder):
        return
    (stated, revision), base = named_base(folder), models.origins["base"]
    places = [
        base,
        base_folder,
        models.architecture.source,
        json_object(base_folder, "config.json").get("_name_or_path"),
    ]
    names = {part for place in places for part in _names(str(place or ""))}
    told = ""
    if stated and names.isdisjoint(_names(stated)):
        told = f"{stated!r}, and the base is {base!r}"
    elif revision not in ("", "main") and not any(revision in str(place) for place in places):
        told = f"revision {revision!r} of {stated!r}, and nothing says which one {base!r} is"
    if told:
        yield Finding(
            "notice",
            label(name),
            f"the adapters of the {label(name)} were trained on {told}",
            "They mean something on their own base alone: name that, unless these are the same weights.",
        )


def _names(place: str) -> set[str]:
    """What a path or Hub id calls a model: its last part, or that of the repository in a cache, in lower case."""
    path = PurePosixPath(place.replace("\\", "/").casefold())
    cached = [found[1] for part in path.parts if (found := re.fullmatch(r"models--(?:.*--)?(.+)", part))]
    is_file = path.suffix in (".safetensors", ".bin", ".pt", ".pth")
    return {
        name for name in ({path.stem, path.parent.name} if is_file else {path.name}) | set(cached) if name
    }


def _tokenizer(base: Path, name: str, folder: Path | None) -> Iterator[Finding]:
    changed = (
        []
        if folder is None
        else [
            *changed_files(base, folder),
            *changed_special_tokens(base, folder).values(),
            *changed_ends(base, folder),
        ]
    )
    if changed:
        yield Finding(
            "notice",
            label(name),
            f"the tokenizer of the {label(name)} differs from the base's: {', '.join(changed)}",
            "The base's reads and ends everything; where ids mean other words, features are those of other words.",
        )
