"""Registries that find their entries on first use: in every module of one package, then in what is installed for them.

Another distribution adds an entry by an entry point, whose name is the entry's and whose value the module that
registers it as a module of the package would; `examples/driftlens-example` has two:

    [project.entry-points."driftlens.merge_methods"]
    median = "driftlens_example.merging"
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, distributions
from typing import Generic, TypeVar

from driftlens.utils.errors import SpecError, did_you_mean

T = TypeVar("T")


def installed(group: str = "") -> list[EntryPoint]:
    """What distributions offer under an entry point group, or all of `driftlens.*`, by name; nothing is imported.

    The folder that one happens to work in is no installation, although `python -m` looks for modules there.
    """
    entries = _installed(tuple(folder for folder in sys.path if not _is_here(folder)))
    return [entry for entry in entries if group in ("", entry.group)]


@functools.cache
def _installed(folders: tuple[str, ...]) -> list[EntryPoint]:
    entries = (entry for each in distributions(path=list(folders)) for entry in each.entry_points)
    ours = {
        entry: None for entry in entries if entry.group.startswith("driftlens.")
    }  # once, wherever else it lies
    return sorted(ours, key=lambda entry: (entry.group, entry.name))


def _is_here(folder: str) -> bool:
    try:
        return os.path.samefile(folder or ".", ".")  # noqa: PTH121
    except OSError:
        return False


def origin(entry: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that an entry point is of."""
    return (entry.dist.name, entry.dist.version) if entry.dist else ("", "")


def _place(entry: object) -> tuple[str, str]:
    """Module and name of what was defined, a class or a function."""
    return getattr(entry, "__module__", ""), getattr(entry, "__qualname__", "")


class Registry(Mapping[str, T], Generic[T]):
    """Names to entries. Adding an entry means adding one file to `package`; no second file is edited.

    Where one of the files can't be imported, every lookup says so: a list without its entries would pass for whole.
    Other distributions add entries under the entry point `group`, if there is one; `kind` is what messages say.
    """

    def __init__(self, kind: str, package: str, group: str = "") -> None:
        self.kind = kind
        self.package = package
        self.group = group
        self._entries: dict[str, T] = {}
        self._discovered = False
        self._broken: tuple[str, str, BaseException] | None = None

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files an entry under `name` and returns it unchanged.

        In a notebook, whose cells run again, an entry takes the place of the one that it defines anew.
        """

        def file(entry: T) -> T:
            if is_by_hand := _place(entry)[0] == "__main__":
                self._discover()  # else a name that is taken would be found out at the file that has it
            if name in self._entries and not (is_by_hand and _place(entry) == _place(self._entries[name])):
                raise ValueError(f"{self.kind} {name!r} is registered twice; the new one needs another name")
            self._entries[name] = entry
            return entry

        return file

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """A block at whose end the entries registered inside are taken out again, as tests and plugins want."""
        before = dict(self)
        try:
            yield
        finally:
            self._entries.clear()
            self._entries.update(before)

    def __getitem__(self, name: str) -> T:
        """The entry called `name`; a `SpecError` names those there are and the nearest one."""
        self._discover()
        try:
            return self._entries[name]
        except KeyError:
            raise SpecError(
                f"no {self.kind} called {name!r}; there are {', '.join(self)}",
                hint=did_you_mean(name, self._entries),
            ) from None

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._discover()
        return len(self._entries)

    def _discover(self) -> None:
        """Import every file of the package, then what is installed for it, once."""
        if self._broken is not None:
            name, hint, error = self._broken
            raise SpecError(
                f"the {self.kind}s are not all there: {name} can't be imported ({type(error).__name__}: {error})",
                hint=hint,
            ) from error
        if self._discovered:
            return
        # At once, for files that look something up while they are imported.
        self._discovered = True
        name, hint = self.package, "Mend that file, or take it out of its folder."
        try:
            for module in pkgutil.iter_modules(importlib.import_module(name).__path__):
                name = f"{self.package}.{module.name}"
                importlib.import_module(name)
            for entry in installed(self.group) if self.group else ():
                distribution, version = origin(entry)
                name = f"{entry.value} of {distribution} {version}"
                hint = (
                    f"Install another version of {distribution}, or take it out: pip uninstall {distribution}"
                )
                entry.load()
                if entry.name not in self._entries:
                    raise LookupError(f"it registers no {self.kind} called {entry.name!r}")
        except (Exception, SystemExit) as error:
            self._broken = name, hint, error
            self._discover()
        except BaseException:  # the user stopped it; the next lookup begins afresh
            self._discovered = False
            raise
