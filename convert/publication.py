"""A directory that appears whole or not at all, however its writer ends."""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def published_directory(destination: Path, force: bool) -> Iterator[Path]:
    """Yields an empty directory that becomes `destination` when the block ends without an error.

    It is a sibling, `.NAME.partial`, locked while its writer lives; what a dead writer left in it
    is removed. With `force`, an existing destination stays in use until it is exchanged.

    Raises:
      FileExistsError: the destination exists and `force` is not given.
      BlockingIOError: another process is writing it.
    """
    _refuse_existing(destination, force)
    partial = destination.parent / f".{destination.name}.partial"
    with _locked(partial, destination):
        _refuse_existing(destination, force)
        try:
            _empty(partial)
            yield partial
            _sync(partial)
            _publish(partial, destination)
            _sync_one(destination.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _refuse_existing(destination: Path, force: bool) -> None:
    if not force and os.path.lexists(destination):
        raise FileExistsError(
            f"{destination} exists; give --force to replace it, or another destination with -o"
        )


@contextlib.contextmanager
def _locked(partial: Path, destination: Path) -> Iterator[None]:
    """Holds the lock on a directory, made if it is not there."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(
                    errno.EWOULDBLOCK,
                    "another process is writing it; wait for it",
                    str(destination),
                ) from None
            # Between opening and locking, its last owner may have published or removed it.
            if _is(handle, partial):
                yield
                return
        finally:
            os.close(handle)


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _empty(directory: Path) -> None:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _sync(directory: Path) -> None:
    """Makes everything below a directory durable."""
    for folder, _, files in os.walk(directory):
        for name in files:
            _sync_one(Path(folder, name))
        _sync_one(Path(folder))


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(partial: Path, destination: Path) -> None:
    if not os.path.lexists(destination):
        os.rename(partial, destination)
    elif not _exchange(partial, destination):
        # Where names cannot be exchanged, there is a moment without a destination.
        replaced = destination.parent / f".{destination.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(destination, replaced)
        os.rename(partial, destination)
        shutil.rmtree(replaced)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names at once; returns whether the system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return renameat2(*names, _RENAME_EXCHANGE) == 0
