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
def published_directory(destination: Path, *, force: bool, wait: bool) -> Iterator[Path]:
    """Yields an empty directory that becomes `destination` when the block ends without an error.

    It is a sibling, `.NAME.partial`, locked while its writer lives; what a dead writer left in it
    is removed. With `force`, an existing destination stays in use until both are exchanged.

    Raises:
      FileExistsError: the destination exists and `force` is not given.
      BlockingIOError: another process is writing it and `wait` is not given.
    """
    _refuse_existing(destination, force)
    partial = destination.parent / f".{destination.name}.partial"
    partial.parent.mkdir(parents=True, exist_ok=True)
    locks = [_lock(partial, destination, wait)]
    try:
        # The process that was waited for may have made it.
        _refuse_existing(destination, force)
        _clear(partial)
        yield partial
        _sync(partial)
        if force and destination.is_dir():
            # It takes the other's name, under which it must not pass for a dead writer's.
            locks.append(os.open(destination, os.O_RDONLY | os.O_DIRECTORY))
            fcntl.flock(locks[-1], fcntl.LOCK_EX)
        _publish(partial, destination)
        _sync(destination.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for lock in locks:
            os.close(lock)


def _refuse_existing(destination: Path, force: bool) -> None:
    if not force and os.path.lexists(destination):
        raise FileExistsError(
            f"{destination} exists; give --force to replace it, or another destination with -o"
        )


def _lock(partial: Path, destination: Path, wait: bool) -> int:
    """Returns the open handle of a directory, made if it is not there, and locked.

    The system drops the lock when the process ends, in whatever way.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            partial.mkdir()
        try:
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Its last owner may have renamed or removed it since it was opened.
            if os.path.samestat(os.fstat(handle), os.stat(partial)):
                return handle
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(handle)
            reason = "another process is writing it; wait until it has ended"
            raise BlockingIOError(errno.EWOULDBLOCK, reason, str(destination)) from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _clear(directory: Path) -> None:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _sync(directory: Path) -> None:
    """Makes all that was written durable, in one request: one a file takes longer than writing."""
    syncfs = getattr(ctypes.CDLL(None), "syncfs", None)
    if syncfs is None:
        os.sync()
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        if syncfs(handle) != 0:
            raise OSError(f"{directory}: what was written did not reach the disk")
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
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return renameat2(*names, _RENAME_EXCHANGE) == 0
