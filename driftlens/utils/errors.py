"""Exceptions of DriftLens.

    DriftLensError                     exit code 1
    ├── SpecError (ValueError)                 2   the spec or a command's arguments
    ├── LayerNotFoundError (LookupError)       2   a layer or site pattern that matches nothing
    ├── ChecksFailedError (AssertionError)     3   numbers of a run that violate a check
    ├── CheckpointError (ValueError)           4   a file of weights that can't be read, or not safely
    ├── IncompatibleModelsError (ValueError)   4   models that are not fine-tuned from one base
    ├── DataError (ValueError)                 4   images, labels, class names, sample counts
    ├── ShapeError (ValueError)                4   tensors whose shapes disagree
    ├── NumericsError (ArithmeticError)        4   NaN or Inf in weights or features
    │   └── SingularGramError                  4   a linear system that can't be solved
    ├── RunError (OSError)                     4   a run directory that is missing or damaged
    │   ├── SchemaTooNewError                  4   a run written by a newer DriftLens
    │   └── RunLockedError                     5   another process is writing to the run
    └── Cancelled (InterruptedError)         130   the user asked to stop

Each has `message` (the problem), `hint` (the remedy) and `context` (names and numbers for programs). The command line,
reports and the dashboard show the same text.

Errors that libraries raise about their input pass through; `from_library` converts them for display.
"""

from __future__ import annotations

import difflib
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar


class DriftLensError(Exception):
    """Root of the tree; catch it to catch everything DriftLens raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, *, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(self, message: str, *, hint: str = "", **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context = context

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class SpecError(DriftLensError, ValueError, exit_code=2):
    """The spec, a command's arguments or a hyperparameter is wrong."""


class LayerNotFoundError(DriftLensError, LookupError, exit_code=2):
    """A layer or site pattern matches nothing; the nearest names are in the message."""


class ChecksFailedError(DriftLensError, AssertionError, exit_code=3):
    """A run's numbers violate its checks; the checks that failed are in the message."""


class CheckpointError(DriftLensError, ValueError, exit_code=4):
    """A file of weights is missing, truncated, of an unsupported kind, or unsafe to read."""


class IncompatibleModelsError(DriftLensError, ValueError, exit_code=4):
    """The models differ in architecture, parameter names, shapes or kinds of number."""


class NotDifferentiableError(IncompatibleModelsError, exit_code=4):
    """A layer has no derivative that torch can compute."""


class DataError(DriftLensError, ValueError, exit_code=4):
    """Images, labels or class names are missing, unreadable or contradict each other."""


class ShapeError(DriftLensError, ValueError, exit_code=4):
    """Tensors handed to a public function have shapes that disagree."""


class NumericsError(DriftLensError, ArithmeticError, exit_code=4):
    """NaN or Inf turned up in weights or features."""


class SingularGramError(NumericsError):
    """A Gram matrix can't be factored as asked; nothing was damped or pseudo-inverted instead."""


class RunError(DriftLensError, OSError, exit_code=4):
    """A run directory is missing, damaged or can't be written."""


class SchemaTooNewError(RunError):
    """The run was written by a newer DriftLens than this one."""


class RunLockedError(RunError, exit_code=5):
    """Another live process holds the run's lock."""


class Cancelled(DriftLensError, InterruptedError, exit_code=130):
    """Raised if the user asked to stop. No partial results remain."""


# Prefix of notes that `concerning` adds.
_IN = "in "
# Number of lines kept of a library's message.
_MOST_LINES = 8


@contextmanager
def concerning(subject: object) -> Iterator[None]:
    """Add to a library's error, raised in this block, which file or setting it is about."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, DriftLensError):
            error.add_note(f"{_IN}{subject}")
        raise


def from_library(error: BaseException) -> DriftLensError | None:
    """Convert a library's error about its input into a `DriftLensError`; return None for a defect of the code.

    An error is about the input if a library's code or C extension raised it, or if `concerning` names its subject.
    """
    if isinstance(error, DriftLensError):
        return error
    noted = [note.removeprefix(_IN) for note in getattr(error, "__notes__", ()) if note.startswith(_IN)]
    library = _library_that_raised(error)
    if not (library or noted):
        return None
    place = f"{noted[0]}: " if noted else ""
    problems = getattr(error, "errors", None)
    if library == "pydantic_core" and problems is not None:
        lines = [_format_validation_error(details) for details in problems(include_url=False)]
        text = "\n".join(lines[:_MOST_LINES])
        return SpecError(f"{place}{text}", hint="Correct these values.")
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    text = "\n".join([f"{place}{type(error).__name__}: {' '.join(lines[:1])}", *lines[1:_MOST_LINES]])
    subject = "it" if noted else "the files and settings concerned"
    hint = f"Raised by {library or 'a library'}: check {subject}. Else report the output of --debug."
    return RunError(text, hint=hint)


# Modules of the standard library whose own errors are about what they read.
_DATA_MODULES = {"json", "pickle", "_pickle", "zipfile", "tarfile", "zlib", "struct", "csv"}


def _library_that_raised(error: BaseException) -> str:
    """Return the package that raised an error about its input; "" for DriftLens itself."""
    package = type(error).__module__.partition(".")[0]
    if package in _DATA_MODULES:
        return package
    if isinstance(error, UnicodeError | EOFError):
        return "Python"
    # `builtins` is a module of the standard library, too.
    if package not in sys.stdlib_module_names:
        return "" if _is_driftlens_package(package) else package.removeprefix("_")
    # Built-in errors, such as ValueError, are raised by any code, so the innermost frame decides.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = str(frames[-1].f_globals.get("__name__")).partition(".")[0] if frames else ""
    return "" if package in sys.stdlib_module_names or _is_driftlens_package(package) else package


def _is_driftlens_package(package: str) -> bool:
    return package.startswith("driftlens") or package in ("", "__main__")


def _format_validation_error(details: Any) -> str:
    place = ".".join(map(str, details["loc"]))
    return f"{place}: {details['msg']}, got {details['input']!r:.80}".removeprefix(": ")


def did_you_mean(name: object, choices: Collection[object]) -> str:
    """Return the hint `Did you mean 'x'?`, or "" if no choice is similar; `x` is similar to `calibrated:x`."""
    others = [str(other) for other in choices]
    near = [other for other in others if other.endswith(f":{name}")] or difflib.get_close_matches(
        str(name), others
    )
    return f"Did you mean {near[0]!r}?" if near else ""


# Characters that control a terminal, reorder text, are invisible, or cannot be encoded.
_STEERING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def harmless(text: str, *, is_json: bool = False) -> str:
    """Replace control characters, in JSON by escapes, because names from files must not control the terminal."""
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}" if is_json else "\ufffd", text)


def counted(n: int, noun: str) -> str:
    """Format a count with its noun: "1 task", "2 tasks"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(names: Iterable[str]) -> str:
    """Join names: "lam, rho and alpha"."""
    return " and ".join(filter(None, ", ".join(names).rsplit(", ", 1)))


def some_of(names: Sequence[str], most: int = 3) -> str:
    """List the first names and how many more there are: "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
