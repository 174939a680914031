"""Exceptions of DriftLens: `message` (the problem), `hint` (the remedy), `context` (names and numbers), exit code.

The command line, reports and the dashboard show the same text. Errors that libraries raise about their input pass
through; `wrap_library_error` converts them for display.
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
    """Base class of all errors that DriftLens raises on purpose."""

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
    """Raised for an invalid spec, command-line argument or hyperparameter."""


class LayerNotFoundError(DriftLensError, LookupError, exit_code=2):
    """Raised if a layer or site pattern matches nothing; the message lists the most similar names."""


class ChecksFailedError(DriftLensError, AssertionError, exit_code=3):
    """Raised if numbers of a run violate its checks; the message lists the failed checks."""


class CheckpointError(DriftLensError, ValueError, exit_code=4):
    """Raised if a checkpoint is missing, truncated, of an unsupported format, or unsafe to load."""


class IncompatibleModelsError(DriftLensError, ValueError, exit_code=4):
    """Raised if models differ in architecture, parameter names, shapes or kinds of dtype."""


class NotDifferentiableError(IncompatibleModelsError, exit_code=4):
    """Raised if torch cannot differentiate a layer."""


class DataError(DriftLensError, ValueError, exit_code=4):
    """Raised if images, labels or class names are missing, unreadable or contradict each other."""


class ShapeError(DriftLensError, ValueError, exit_code=4):
    """Raised if tensors passed to a public function have inconsistent shapes."""


class NumericsError(DriftLensError, ArithmeticError, exit_code=4):
    """Raised for NaN or infinity in weights or features."""


class SingularGramError(NumericsError):
    """Raised if a Gram matrix is singular; no damping or pseudo-inverse is applied instead."""


class RunError(DriftLensError, OSError, exit_code=4):
    """Raised if a run directory is missing, damaged or not writable."""


class SchemaTooNewError(RunError):
    """Raised if a run was written by a newer version of DriftLens."""


class RunLockedError(RunError, exit_code=5):
    """Raised if another live process is writing to the run."""


class Cancelled(DriftLensError, InterruptedError, exit_code=130):
    """Raised if the user cancelled the job. No partial results remain."""


# Prefix of notes that `add_error_context` adds.
_IN = "in "
# Number of lines kept of a library's message.
_MOST_LINES = 8


@contextmanager
def add_error_context(subject: object) -> Iterator[None]:
    """Add a note to any library error raised in this block: the file or setting that was being read."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, DriftLensError):
            error.add_note(f"{_IN}{subject}")
        raise


def wrap_library_error(error: BaseException) -> DriftLensError | None:
    """Convert a library's error about its input into a `DriftLensError`; return None for a bug in the code."""
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
    """Return the name of the package that raised an error about its input; "" for DriftLens itself."""
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
    """Return the hint "Did you mean 'x'?" for a misspelt name, or "" if no choice is similar."""
    others = [str(other) for other in choices]
    near = [other for other in others if other.endswith(f":{name}")] or difflib.get_close_matches(str(name), others)
    return f"Did you mean {near[0]!r}?" if near else ""


# Characters that control a terminal, reorder text, are invisible, or cannot be encoded.
_STEERING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def sanitize_text(text: str, *, is_json: bool = False) -> str:
    """Replace control characters in a text, so that names from untrusted files cannot control the terminal."""
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}" if is_json else "\ufffd", text)


def pluralize(n: int, noun: str) -> str:
    """Format a count with its noun: "1 task", "2 tasks"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def start_sentence(text: str) -> str:
    """Begin a text with a capital letter, unless its second one is a capital, as in nDCG."""
    return text if text[1:2].isupper() else text[:1].upper() + text[1:]


def join_names(names: Iterable[str]) -> str:
    """Join names as in "lam, rho and alpha"."""
    *others, last = [*names] or [""]
    return " and ".join(filter(None, [", ".join(others), last]))


def shorten_list(names: Sequence[str], most: int = 3) -> str:
    """Join the first names and the number of the others: "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
