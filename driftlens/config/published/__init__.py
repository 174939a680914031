"""The image classification tasks of the published CLIP suites: class names in label order, and templates.

One YAML file per task, named as the experts of the suite are (`tanganke/clip-vit-base-patch32_TASK`). They hold facts
about data sets, with the source named in each; a spec uses them by `heads.<task>: {suite: cars}`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib.resources import files

from driftlens.utils.errors import SpecError, did_you_mean

_ALSO = {"cars": "stanford-cars", "flowers102": "oxford_flowers102", "emnist": "emnist_letters"}
"""Further names in use, in plain form."""


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
    labels: tuple[str, ...] = field(default=())


def _published_names() -> list[str]:
    entries = (entry.name for entry in files(__name__).iterdir())
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


@functools.cache
def published_task(name: str) -> PublishedTask:
    """Return the published CLIP task of a name; `cars`, `Cars` and `stanford-cars` are the same.

    Raises:
        SpecError: there is no such task.
    """
    import yaml

    names = _published_names()
    plain = "".join(filter(str.isalnum, name.casefold()))
    found = {"".join(filter(str.isalnum, task)): task for task in names}.get(plain, _ALSO.get(plain))
    if found is None:
        raise SpecError(
            f"no published task is called {name!r}; there are {', '.join(names)}",
            hint=did_you_mean(name, [*names, *_ALSO]),
        )
    raw = yaml.safe_load(files(__name__).joinpath(f"{found}.yaml").read_text(encoding="utf-8"))
    lists = {key: tuple(raw.get(key, ())) for key in ("templates", "classes", "labels")}
    return PublishedTask(found, **{**raw, **lists})
