"""The journal of a simulated core: the production code with its own folder.

Its clock is the virtual time. The effects of one turn form one commit, as in the service.
"""

import shutil
import tempfile
from pathlib import Path

from checks.sim.world import World
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.journal.journal import Journal

_MAX_BYTES = 1 << 18
"""Small enough that segments are replaced, and large enough that no request is dropped."""


class JournalFolder:
    """A folder, and the journal in it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._path = Path(tempfile.mkdtemp(prefix="quire-sim-"))
        self._journal = self._open(self._path)

    def _open(self, path: Path) -> Journal:
        world = self._world
        return Journal(
            path,
            max_bytes=_MAX_BYTES,
            keep_s=world.scenario.config.resume_keep_s,
            clock_ms=lambda: int(1000 * world.now),
            reports=False,
        )

    def commit(self, effects: list[ef.Effect]) -> None:
        """Commit the effects of one turn."""
        for effect in effects:
            self._journal.note(effect)
        self._journal.commit()

    def recover(self) -> ev.LogsRestored:
        """Open the journal as the next process does; return the restored requests."""
        self._journal.close()
        self._journal = self._open(self._path)
        return self._journal.restored

    def peek(self) -> ev.LogsRestored:
        """Return the requests that the next process would restore if this one died now."""
        with tempfile.TemporaryDirectory(prefix="quire-sim-") as folder:
            shutil.copytree(self._path, folder, dirs_exist_ok=True)
            copy = self._open(Path(folder))
            copy.close()
            return copy.restored

    def empty(self) -> None:
        """Begin an empty journal."""
        self._journal.close()
        shutil.rmtree(self._path)
        self._journal = self._open(self._path)

    def close(self) -> None:
        """Delete the folder."""
        self._journal.close()
        shutil.rmtree(self._path)
