"""Makes and rotates the keys with which the processes of a service know each other over TCP.

`create` makes a folder with one folder per role: the scheduler's lists who is let in, the others hold the scheduler's
public key. Start every process with --keys and its own folder, or all on one machine with the folder of all. `add`
makes one more worker or front end with a key of its own; `rotate` gives one a new key, and both are let in until
`revoke --old`; `revoke` shuts one out. The scheduler notices by itself. `token` makes a bearer token for clients and
its hash.
"""

import hashlib
import os
import secrets
import shutil
from pathlib import Path

import zmq.auth

from quire.cli._parser import Namespace, OneLineParser
from shared.config import ConfigError
from shared.curve import ALLOWED, DOMAINS, FRONTEND, OWN, ROLES, SCHEDULER, SERVER, WORKER

EXAMPLES = """
  quire keys create keys                       scheduler, worker and front end
  quire scheduler --keys keys/scheduler --worker-address tcp://0.0.0.0:5702
  quire worker --keys keys/worker --worker-address tcp://scheduler:5702
  quire keys add keys gpu-7 --role worker      a worker with a key of its own, in keys/gpu-7
  quire keys rotate keys gpu-7                 a new key; the old one is let in until it is revoked
  quire keys revoke keys gpu-7 --old           the old one no longer
  quire keys revoke keys gpu-7                 shut out
  quire keys token                             a token for a client, and its hash for --principals
"""
_PREVIOUS = "@previous"


def configure(parser: OneLineParser) -> None:
    """Adds what to do, where, and with whom."""
    parser.add_argument("action", choices=("create", "add", "rotate", "revoke", "token"))
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="", help="where all keys lie")
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="whose key")
    parser.add_argument("--role", choices=(WORKER, FRONTEND), default=WORKER, help="of NAME (default: worker)")
    parser.add_argument("--old", action="store_true", help="revoke: only the key before the last rotation")


def run(options: Namespace) -> int:
    """Does it."""
    if options.action == "token":
        # The token is for the client, its hash for the file of principals; nobody keeps both.
        token = secrets.token_urlsafe(32)
        print(f"token  {token}\nsha256 {hashlib.sha256(token.encode()).hexdigest()}")
        return 0
    if not options.folder:
        raise ConfigError("folder: missing; say where the keys lie")
    folder, name = Path(options.folder), options.name
    if options.action == "create":
        if name:
            raise ConfigError("name: create takes none; use add")
        create(folder)
        return 0
    if not name or Path(name).name != name or name == SCHEDULER:
        raise ConfigError(f"name: {name!r} is no name of a worker or front end")
    match options.action:
        case "add":
            add(folder, name, options.role)
        case "rotate":
            rotate(folder, name)
        case "revoke":
            revoke(folder, name, only_old=options.old)
    return 0


def create(folder: Path) -> None:
    """A folder of keys for a scheduler, a worker and a front end.

    Raises:
        ConfigError: there are keys already.
    """
    own = folder / SCHEDULER
    if own.exists():
        raise ConfigError(f"folder: {own} exists already; use add or rotate")
    for domain in DOMAINS.values():
        (own / ALLOWED / domain).mkdir(parents=True)
    _new_pair(own)
    for role in ROLES:
        if role != SCHEDULER:
            add(folder, role, role)


def add(folder: Path, name: str, role: str) -> None:
    """One more process that is let in.

    Raises:
        ConfigError: there is one of that name, or no scheduler.
    """
    if not (folder / SCHEDULER / f"{OWN}.key").exists():
        raise ConfigError(f"folder: {folder} has no scheduler's key; quire keys create makes it")
    if (folder / name).exists():
        raise ConfigError(f"name: {folder / name} exists already; use rotate")
    (folder / name).mkdir()
    shutil.copy(folder / SCHEDULER / f"{OWN}.key", folder / name / f"{SERVER}.key")
    _new_pair(folder / name)
    shutil.copy(folder / name / f"{OWN}.key", _allowed(folder, role) / f"{name}.key")


def rotate(folder: Path, name: str) -> None:
    """A new key for a process; the one before is let in until it is revoked.

    Raises:
        ConfigError: there is no such process.
    """
    allowed = _entry(folder, name)
    allowed.replace(allowed.with_name(f"{name}{_PREVIOUS}.key"))
    _new_pair(folder / name)
    shutil.copy(folder / name / f"{OWN}.key", allowed)


def revoke(folder: Path, name: str, *, only_old: bool) -> None:
    """Shuts a process out, or its key before the last rotation.

    Raises:
        ConfigError: there is no such process.
    """
    allowed = _entry(folder, name)
    allowed.with_name(f"{name}{_PREVIOUS}.key").unlink(missing_ok=True)
    if not only_old:
        allowed.unlink()


def _allowed(folder: Path, role: str) -> Path:
    return folder / SCHEDULER / ALLOWED / DOMAINS[role]


def _entry(folder: Path, name: str) -> Path:
    for role in DOMAINS:
        path = _allowed(folder, role) / f"{name}.key"
        if path.exists():
            return path
    raise ConfigError(f"name: nobody called {name} is let in; there is no {name}.key under {folder / SCHEDULER}")


def _new_pair(folder: Path) -> None:
    """Writes own.key and own.key_secret, the latter readable by nobody else at any time."""
    mask = os.umask(0o077)
    try:
        zmq.auth.create_certificates(folder, OWN)
    finally:
        os.umask(mask)
