"""Registries: entries are found by importing a package, and a package that is not whole is never taken for one."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from driftlens.utils.errors import SpecError
from driftlens.utils.registry import Registry
from tests.refusing import refusing

ENTRY = "from {package} import registry\nregistry.register('{name}')({value!r})\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package of one file per entry, called differently in every test: modules stay imported."""
    name = "rooms_of_" + re.sub(r"\W", "_", request.node.name)
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(
        f"from driftlens.utils.registry import Registry\nregistry = Registry('toy', '{name}', 'driftlens.{name}')\n"
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
    with refusing(SpecError, match="no toy called 'alfa'; there are alpha, zeta", hint="'alpha'"):
        found["alfa"]


LOOKUPS: dict[str, Callable[[Registry[int]], object]] = {
    "get": lambda found: found["alpha"],
    "list": list,
    "count": len,
    "ask": lambda found: "alpha" in found,
}


@pytest.mark.parametrize("again", LOOKUPS)
@pytest.mark.parametrize("first", LOOKUPS)
def test_a_file_that_fails_to_import_is_named_by_every_lookup(
    package: str, first: str, again: str, tmp_path: Path
) -> None:
    """The files before it in the alphabet have registered theirs by then."""
    (tmp_path / package / "middle.py").write_text("import nowhere_to_be_found\n")
    found = registry_of(package)
    for lookup in (first, again, again):
        with pytest.raises(SpecError, match=rf"{package}\.middle can't be imported .*nowhere_to_be_found"):
            LOOKUPS[lookup](found)


def installed(folder: Path, group: str, entry: str, source: str) -> str:
    """Lay a distribution of one module into `folder` as an installer does, and name the module."""
    module = f"outside_{group}_{entry}"
    about = folder / f"{module}-1.2.dist-info"
    about.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-toys\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(f"[driftlens.{group}]\n{entry} = {module}\n")
    return module


def test_what_is_installed_elsewhere_is_found_but_not_what_lies_in_the_current_folder(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` looks for modules in the current folder first, whoever filled it."""
    for folder, entry in (("site", "beta"), ("here", "gamma")):
        source = ENTRY.format(package=package, name=entry, value=7)
        installed(tmp_path / folder, package, entry, source)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    installed(tmp_path / "site" / "other", f"not_{package}", "delta", "raise SystemError('of another group')")
    monkeypatch.syspath_prepend(str(tmp_path / "site" / "other"))
    monkeypatch.chdir(tmp_path / "here")
    found = registry_of(package)
    assert list(found) == ["alpha", "beta", "zeta"] and found["beta"] == 7
    assert not [name for name in sys.modules if name.startswith("outside") and name.endswith("gamma")]


SPOILT: dict[str, tuple[str, str]] = {
    "not importable": ("import nowhere_to_be_found", "ModuleNotFoundError: .*nowhere_to_be_found"),
    "a taken name": (ENTRY.format(package="{package}", name="alpha", value=7), "toy 'alpha' is registered"),
    "another name": (
        ENTRY.format(package="{package}", name="omega", value=7),
        "does not register the toy 'beta'",
    ),
    "leaves": ("import sys\nsys.exit(3)", "SystemExit: 3"),
}


@pytest.mark.parametrize(("source", "words"), SPOILT.values(), ids=SPOILT)
def test_what_is_installed_and_does_not_register_itself_is_named_by_every_lookup(
    package: str, source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = installed(tmp_path / "site", package, "beta", source.format(package=package))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = registry_of(package)
    for lookup in LOOKUPS.values():
        with refusing(
            SpecError,
            match=rf"toys are incomplete.*{module} of some-toys 1\.2 .*{words}",
            hint="pip uninstall some-toys",
        ):
            lookup(found)


def test_a_cell_that_runs_again_replaces_what_cells_defined_and_nothing_else(package: str) -> None:
    def cell(called: str) -> type:
        return type(called, (), {"__module__": "__main__"})

    found: Registry[Any] = registry_of(package)
    # Before anything was looked up, a taken name is the cell's own fault, and no file's.
    with pytest.raises(ValueError, match="toy 'alpha' is registered twice; rename the new one"):
        found.register("alpha")(cell("Mine"))
    found.register("mine")(cell("Mine"))
    again = found.register("mine")(cell("Mine"))
    assert list(found) == ["alpha", "mine", "zeta"] and found["mine"] is again
