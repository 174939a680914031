"""Commented specs that `driftlens init` writes for the user to fill in."""

from __future__ import annotations

from importlib.resources import files

from driftlens.utils.errors import SpecError, did_you_mean


def _template_names() -> list[str]:
    return sorted(
        entry.name.removesuffix(".yaml") for entry in files(__name__).iterdir() if entry.name.endswith(".yaml")
    )


def spec_template(name: str = "generic") -> str:
    """Return the commented spec template called `name`.

    Raises:
        SpecError: there is no such template.
    """
    names = _template_names()
    if name not in names:
        hint = did_you_mean(name, names)
        raise SpecError(f"no template called {name!r}; there are {', '.join(names)}", hint=hint)
    return files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
