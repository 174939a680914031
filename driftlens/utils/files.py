"""Atomic writes: every file that DriftLens writes is complete or absent. Entry points: `atomic_path`, `atomic_folder`.

A file is written in a scratch folder `.partial-*` next to its place and moved there once complete and flushed. The next
process that writes there removes scratch folders of killed processes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import platform
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Self

from driftlens.utils.errors import RunError, SpecError

PathLike = str | os.PathLike[str]

# Pattern of scratch folders; the name continues with machine and process.
PARTIAL = ".partial-*"

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
# Error numbers of file systems without locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}
_ASIDE = ".replaced"
_HERE = f"{zlib.crc32(platform.node().encode()):08x}"
# Folders whose stale scratch folders this process has removed.
_swept: set[tuple[int, pathlib.Path]] = set()
# Undo functions of unfinished steps, because an interrupt may arrive while a block is ending. Keys hold the
# process id: a fork inherits its parent's entries, but must not run them.
_unfinished: dict[tuple[int, object], Callable[[], None]] = {}


@contextlib.contextmanager
def atomic_path(path: PathLike, *, need: int | None = None, is_lasting: bool = True) -> Iterator[pathlib.Path]:
    """Yield a temporary path to write to; it is renamed to `path` on success and discarded on failure.

    Args:
        path: the final place.
        need: number of bytes to be written; refused if the disk has less.
        is_lasting: True to flush to disk, so that the file survives a power failure.
    """
    target = pathlib.Path(path)
    with scratch_folder(target, need) as scratch:
        written = scratch / target.name
        yield written
        if is_lasting:
            _flush_to_disk(written)
        # Atomic only within one file system, so the scratch folder is next to the target.
        written.replace(target)


@contextlib.contextmanager
def atomic_folder(path: PathLike, *, replace: bool = False) -> Iterator[pathlib.Path]:
    """Yield a temporary folder to fill; it is renamed to `path` on success and discarded on failure."""
    target = pathlib.Path(path)
    if not (replace and target.is_dir()):
        require_unused_path(target)
    with scratch_folder(target, None) as scratch:
        filled = scratch / target.name
        filled.mkdir()
        yield filled
        for file in filled.rglob("*"):
            if file.is_file():
                _flush_to_disk(file)
        _replace_folder(filled, target, aside=scratch / _ASIDE)


def require_unused_path(path: PathLike) -> None:
    """Raise a `RunError` if the path already holds a file or a folder that is not empty."""
    target = pathlib.Path(path)
    if target.is_dir() and target.suffix == ".safetensors":
        raise RunError(f"{target} is a folder", hint="Give the path of a file, or omit the suffix.")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise RunError(f"{target} exists already", hint="Choose another path, or remove it.")


def write_text_atomic(path: PathLike, text: str, *, is_lasting: bool = True) -> None:
    """Write a UTF-8 text file atomically, with Unix line ends.

    Args:
        path: the file.
        text: its content.
        is_lasting: as for `atomic_path`.
    """
    data = text.encode()
    with atomic_path(path, need=len(data), is_lasting=is_lasting) as written:
        written.write_bytes(data)


def write_json_atomic(path: PathLike, value: object, *, allow_nan: bool = False, is_lasting: bool = True) -> None:
    """Write a value as indented JSON atomically; keys keep their order.

    Args:
        path: the file.
        value: its content.
        allow_nan: True to write infinite numbers as Python's JSON reader accepts them.
        is_lasting: as for `atomic_path`.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=allow_nan)
    write_text_atomic(path, f"{text}\n", is_lasting=is_lasting)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from an untrusted source."""
    try:
        return json.loads(text)
    # Python's parser recurses, so nested brackets in an untrusted file exhaust the stack.
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def regular_file(path: PathLike) -> pathlib.Path:
    """Return the path of an untrusted file; raise an OSError for a device, pipe or socket."""
    file = pathlib.Path(path)
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file", str(file))
    return file


def read_json_object(folder: PathLike | None, file: str) -> dict[str, Any]:
    """Read a JSON object from an untrusted file; return an empty dict if it is missing or damaged."""
    try:
        value = {} if folder is None else parse_json(regular_file(pathlib.Path(folder, file)).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def file_sha256(path: PathLike) -> str:
    """Return the SHA-256 digest of a file in hexadecimal."""
    with regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expand_home(path: PathLike) -> pathlib.Path:
    """Replace `~` in a path by the home folder."""
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        raise SpecError(
            f"{path}: the home folder does not exist",
            hint="Give the full path; write ./ before a name that starts with ~.",
        ) from None


def free_bytes(path: PathLike) -> int:
    """Return the free disk space at `path`, in bytes; the path need not exist."""
    folder = pathlib.Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def scratch_folder(target: pathlib.Path, need: int | None) -> Iterator[pathlib.Path]:
    """Yield a temporary folder next to `target` and remove it afterwards; a full disk raises a `RunError`."""
    folder = target.parent / f".partial-{_HERE}-{os.getpid()}-{secrets.token_hex(4)}"
    missing = [parent for parent in (target.parent, *target.parent.parents) if not parent.exists()]
    try:
        # One by one: a parent that was removed meanwhile must not be recreated.
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
        if (os.getpid(), target.parent) not in _swept:
            _swept.add((os.getpid(), target.parent))
            remove_stale_scratch(target.parent.glob(PARTIAL))
        register_undo(folder, lambda: _remove_scratch_folder(folder))
        folder.mkdir(mode=0o700)
    except OSError as error:
        _remove_scratch_folder(folder)
        raise _write_error(target, error, need) from error
    try:
        yield folder
    except BaseException as error:
        _remove_scratch_folder(folder)
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise _write_error(target, error, need) from error
        raise
    finally:
        _remove_scratch_folder(folder)


def temporary_folder() -> contextlib.AbstractContextManager[pathlib.Path]:
    """Yield a folder in the system's temporary directory and remove it afterwards."""
    return scratch_folder(pathlib.Path(tempfile.gettempdir(), "driftlens"), None)


def remove_stale_scratch(scratch: Iterable[pathlib.Path], *, others: bool = False) -> None:
    """Remove scratch folders of ended processes of this machine; with `others`, also those of unknown origin."""
    import psutil  # rarely needed, and slow to import

    for folder in scratch:
        machine, _, rest = folder.name.removeprefix(".partial-").partition("-")
        number = rest.partition("-")[0]
        is_known = machine == _HERE and number.isdecimal() and len(number) < 10
        is_mine = is_known and int(number) == os.getpid()
        # This process is alive by definition; its registered undo steps show which folders it still fills.
        is_filled = (os.getpid(), folder) in _unfinished
        is_live = is_filled if is_mine else is_known and psutil.pid_exists(int(number))
        if (is_known or others) and not is_live:
            with contextlib.suppress(OSError):
                _finish_replacing_folder(folder)
            _remove_scratch_folder(folder)


def register_undo(key: object, undo: Callable[[], None]) -> None:
    """Register a function that `undo_unfinished_steps` calls if the process is interrupted in this step."""
    _unfinished[os.getpid(), key] = undo


def unregister_undo(key: object) -> None:
    """Unregister the undo function of a step that has ended."""
    _unfinished.pop((os.getpid(), key), None)


def undo_unfinished_steps() -> None:
    """Call the registered undo functions of this process, the latest first, and ignore their errors."""
    for key in reversed([key for key in _unfinished if key[0] == os.getpid()]):
        undo = _unfinished.pop(key, None)
        if undo is not None:
            with contextlib.suppress(Exception):
                undo()


class LockFile:
    """A file lock that one process holds at a time; without effect on file systems that have no locks."""

    def __init__(self, file: PathLike, timeout: float = 0.0) -> None:
        from filelock import FileLock

        self._file = pathlib.Path(file)
        # No soft lock, which is the presence of a file: it would outlive a killed process and be copied with its
        # folder.
        self._lock = FileLock(self._file, timeout, fallback_to_soft=False)
        self._open: IO[bytes] | None = None

    @property
    def is_held(self) -> bool:
        """True if the lock was acquired and not released."""
        return self._lock.is_locked or self._open is not None

    def acquire(self) -> None:
        """Acquire the lock; raise a TimeoutError if another process still holds it after the timeout."""
        try:
            self._lock.acquire()
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._open = self._file.open("ab")

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        self._lock.release()
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def list_folder(folder: pathlib.Path) -> list[pathlib.Path]:
    """List the entries of a folder; return an empty list if it cannot be read."""
    try:
        return [*folder.iterdir()]
    except OSError:
        # Removed meanwhile, or not readable.
        return []


def _remove_scratch_folder(folder: pathlib.Path) -> None:
    try:
        # Empty once its content has moved to the target.
        folder.rmdir()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
    unregister_undo(folder)


def _write_error(target: pathlib.Path, error: OSError, need: int | None) -> RunError:
    reason = error.strerror or str(error)
    if error.errno not in _DISK_FULL:
        return RunError(f"can't write {target}: {reason}", hint="Choose a folder with write permission.")
    free = free_bytes(target.parent)
    needed = "" if need is None else f" of the {_format_bytes(need)} needed"
    hint = f"{_format_bytes(free)}{needed} are free there. Free some space, or choose another disk."
    return RunError(f"can't write {target}: {reason}", hint=hint, free=free, need=need)


def _format_bytes(count: int) -> str:
    # Small files would read as 0.0 MB.
    return f"{count:,} bytes" if count < 1e5 else f"{count / 1e6:,.1f} MB"


def _flush_to_disk(path: pathlib.Path) -> None:
    """Flush a file to disk, so that a crash after the following rename cannot leave it empty."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _replace_folder(filled: pathlib.Path, target: pathlib.Path, aside: pathlib.Path) -> None:
    """Move `filled` to `target`; restore the existing `target` if the move fails."""
    try:
        if target.exists():
            # A folder can't be renamed over one that has content.
            target.rename(aside)
        filled.rename(target)
    except BaseException:
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise


def _finish_replacing_folder(scratch: pathlib.Path) -> None:
    """Complete a folder replacement that was interrupted because its process was killed."""
    if (scratch / _ASIDE).exists():
        for filled in scratch.iterdir():
            if filled.name != _ASIDE and not (target := scratch.parent / filled.name).exists():
                filled.rename(target)
