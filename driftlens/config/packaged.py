"""YAML files of the package: spec templates, and the image classification tasks of the published CLIP suites.

A published task is named as the experts of its suite are (`tanganke/clip-vit-base-patch32_TASK`); a spec uses it by
`heads.<task>: {suite: cars}`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.resources import files

from driftlens.utils.errors import SpecError, did_you_mean

# Further names in use, in plain form.
_ALSO = {"cars": "stanford-cars", "flowers102": "oxford_flowers102", "emnist": "emnist_letters"}


def packaged_names(folder: str) -> list[str]:
    """List the YAML files in a folder of this package, without extension."""
    return sorted(entry.name.removesuffix(".yaml") for entry in files(__package__).joinpath(folder).iterdir())


def _read_packaged_file(folder: str, name: str) -> str:
    return files(__package__).joinpath(folder, f"{name}.yaml").read_text(encoding="utf-8")


def spec_template(name: str = "generic") -> str:
    """Return the commented spec that `driftlens init --template` writes."""
    names = packaged_names("templates")
    if name not in names:
        raise SpecError(f"no template called {name!r}; there are {', '.join(names)}", hint=did_you_mean(name, names))
    return _read_packaged_file("templates", name)


@dataclass(frozen=True)
class PublishedTask:
    """An image classification task of the published CLIP suites: its classes and prompt templates.

    Attributes:
        name: the name in the suite's experts.
        title: the data set's name in papers.
        source: origin of class names and templates.
        templates: prompts in which `{}` is replaced by the class.
        classes: class names in prompts, in label order.
        labels: class names of the data set itself, if they differ.
    """

    name: str
    title: str
    source: str
    templates: tuple[str, ...]
    classes: tuple[str, ...]
    labels: tuple[str, ...] = ()


@functools.cache
def published_task(name: str) -> PublishedTask:
    """Return the published CLIP task of a name; `cars`, `Cars` and `stanford-cars` are the same."""
    import yaml

    names = packaged_names("published")
    plain = "".join(filter(str.isalnum, name.casefold()))
    found = {"".join(filter(str.isalnum, task)): task for task in names}.get(plain, _ALSO.get(plain))
    if found is None:
        raise SpecError(
            f"no published task is called {name!r}; there are {', '.join(names)}",
            hint=did_you_mean(name, [*names, *_ALSO]),
        )
    raw = yaml.safe_load(_read_packaged_file("published", found))
    lists = {key: tuple(raw.get(key, ())) for key in ("templates", "classes", "labels")}
    return PublishedTask(found, **{**raw, **lists})
