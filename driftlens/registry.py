"""Registries that find their entries by importing every module of one package on first use."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from driftlens.errors import SpecError, did_you_mean

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Names to entries. Adding an entry means adding one file to `package`; no second file is edited.

    Where one of the files can't be imported, every lookup says so: a list without its entries would pass for whole.

    Args:
        kind: what an entry is called in messages, for example "merge method".
        package: dotted name of the package whose modules register themselves.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._entries: dict[str, T] = {}
        self._discovered = False
        self._broken: tuple[str, Exception] | None = None

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files an entry under `name` and returns it unchanged."""

        def file(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
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
        """The entry called `name`.

        Raises:
            SpecError: no such entry; the message names those there are and the nearest one.
        """
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
        """Import every file of the package, once.

        Raises:
            SpecError: one of them can't be imported.
        """
        if self._broken is not None:
            name, error = self._broken
            raise SpecError(
                f"the {self.kind}s are not all there: {name} can't be imported ({type(error).__name__}: {error})",
                hint="Mend that file, or take it out of its folder.",
            ) from error
        if self._discovered:
            return
        # At once, for files that look something up while they are imported.
        self._discovered = True
        name = self.package
        try:
            for module in pkgutil.iter_modules(importlib.import_module(name).__path__):
                name = f"{self.package}.{module.name}"
                importlib.import_module(name)
        except Exception as error:
            self._broken = name, error
            self._discover()
        except BaseException:  # the user stopped it; the next lookup begins afresh
            self._discovered = False
            raise
