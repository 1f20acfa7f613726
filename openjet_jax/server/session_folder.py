"""Conversations on disk between two runs of a server."""

import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from openjet_jax.session import Session
from openjet_jax.session_format import SessionFileError

_NAME = re.compile(r"([0-9a-f]{64}|open)-\d+\.session")

type Kept = tuple[str, Session]
"""A scope and a conversation of it."""


class SessionFolder:
    """A directory of saved conversations, readable by its owner alone.

    A file's name tells its scope, so that a conversation only comes back to the key it belonged
    to.
    """

    def __init__(self, directory: Path):
        """Makes the directory.

        Raises:
          OSError: the system refuses.
        """
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def load(
        self, restore: Callable[[Path, str], Session], scopes: Collection[str], most: int
    ) -> list[Kept]:
        """Returns the conversations saved last, the oldest first; says which cannot be read.

        Args:
          restore: reads a file of a scope.
          scopes: those that may still ask; files of others stay where they are.
          most: how many to read.
        """
        kept: list[Kept] = []
        files = sorted(self._files(scopes), key=lambda file: file[0].stat().st_mtime_ns)
        for path, scope in files[-most:]:
            try:
                kept.append((scope, restore(path, scope)))
            except SessionFileError as error:
                print(f"openjet-jax: not restored: {error}", file=sys.stderr)
        return kept

    def save(self, kept: Sequence[Kept], scopes: Collection[str]) -> None:
        """Writes conversations, the oldest first, in place of all those of the same scopes.

        Raises:
          OSError: the system refuses, or the disk is full.
        """
        written = set()
        for number, (scope, session) in enumerate(kept):
            path = self.directory / f"{scope or 'open'}-{number}.session"
            session.save(path)
            written.add(path)
        for path, _ in self._files(scopes):
            if path not in written:
                path.unlink()

    def _files(self, scopes: Collection[str]) -> list[tuple[Path, str]]:
        found = []
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            scope = match[1].replace("open", "") if match else None
            if scope is not None and scope in scopes:
                found.append((path, scope))
        return found
