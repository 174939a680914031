"""The `heads` section: how a task's features become class scores."""

from __future__ import annotations

from os import PathLike
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from driftlens.spec.types import LocalPath, Number, Part, Text, problem, repeated


def _class_names(given: Any) -> Any:
    if given is None or (isinstance(given, str | PathLike) and given):
        return given
    if not isinstance(given, list | tuple) or not given:
        raise problem(f"expected a list of class names or a JSON file that holds one; got {given!r}")
    odd = [name for name in given if not isinstance(name, str) or not name]
    if odd:
        raise problem(f"the class name {odd[0]!r} is not text", f'Write it in quotes: "{odd[0]}".')
    if twice := repeated(given):
        raise problem(
            f"class names occur more than once: {', '.join(twice)}", "Each row needs a name of its own."
        )
    return given


ClassNames = Annotated[tuple[Text, ...] | LocalPath | None, BeforeValidator(_class_names)]
"""Class names in the order of the rows, or a JSON file of them; None leaves naming to the data source."""


def _with_placeholder(template: str) -> str:
    if "{}" not in template:
        raise problem(f"the template {template!r} has no place for the class name", "Write {} where it goes.")
    return template


class TextHead(Part):
    """Class embeddings made by the base's text tower from class names and prompt templates."""

    templates: Annotated[tuple[Annotated[str, AfterValidator(_with_placeholder)], ...], Field(min_length=1)]
    classes: ClassNames = None


class FileHead(Part):
    """Class embeddings [classes, d] of unit norm, computed beforehand and stored as one tensor of a file."""

    file: LocalPath
    tensor: Text
    logit_scale: Annotated[Number, Field(gt=0)]
    classes: ClassNames = None


def _head_kind(given: Any) -> str:
    is_file = "file" in given if isinstance(given, dict) else isinstance(given, FileHead)
    return "file head" if is_file else "text head"


Head = Annotated[
    Annotated[TextHead, Tag("text head")] | Annotated[FileHead, Tag("file head")],
    Discriminator(_head_kind),
]
