"""Registries: entries are found by importing a package, and a package that is not whole is never taken for one."""

from __future__ import annotations

import importlib
import pathlib
import re
from collections.abc import Callable

import pytest

from driftlens.errors import SpecError
from driftlens.registry import Registry

ENTRY = "from {package} import registry\nregistry.register('{name}')({value!r})\n"


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package of one file per entry, called differently in every test: modules stay imported."""
    name = "rooms_of_" + re.sub(r"\W", "_", request.node.name)
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(
        f"from driftlens.registry import Registry\nregistry = Registry('toy', '{name}')\n"
    )
    for value, entry in enumerate(("alpha", "zeta")):
        (folder / f"{entry}.py").write_text(ENTRY.format(package=name, name=entry, value=value))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def registry_of(package: str) -> Registry[int]:
    found: Registry[int] = importlib.import_module(package).registry
    return found


def test_every_file_of_the_package_is_found(package: str) -> None:
    found = registry_of(package)
    assert list(found) == ["alpha", "zeta"] and len(found) == 2 and found["zeta"] == 1 and "alpha" in found
    with pytest.raises(SpecError, match="no toy called 'alfa'; there are alpha, zeta") as caught:
        found["alfa"]
    assert "'alpha'" in caught.value.hint


LOOKUPS: dict[str, Callable[[Registry[int]], object]] = {
    "get": lambda found: found["alpha"],
    "list": list,
    "count": len,
    "ask": lambda found: "alpha" in found,
}


@pytest.mark.parametrize("again", LOOKUPS)
@pytest.mark.parametrize("first", LOOKUPS)
def test_a_file_that_fails_to_import_is_named_by_every_lookup(
    package: str, first: str, again: str, tmp_path: pathlib.Path
) -> None:
    """The files before it in the alphabet have registered theirs by then."""
    (tmp_path / package / "middle.py").write_text("import nowhere_to_be_found\n")
    found = registry_of(package)
    for lookup in (first, again, again):
        with pytest.raises(SpecError, match=rf"{package}\.middle can't be imported .*nowhere_to_be_found"):
            LOOKUPS[lookup](found)
