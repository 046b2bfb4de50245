"""Creates, rotates and revokes the keys that authenticate the processes of a service over TCP.

`create` creates a folder with one folder per role. The scheduler's folder lists the allowed public keys; the others
contain the scheduler's public key. Start every process with --keys and its own folder, or all processes on one machine
with the whole folder. `add` adds a worker or front end with its own key. `rotate` gives one a new key; both keys are
valid until `revoke --old`. `revoke` removes all its keys. The scheduler reloads the list by itself. `token` generates a
bearer token for clients, and its hash. `principal` adds a caller with a new token to the file of principals.
"""

import hashlib
import os
import re
import secrets
import shutil
import tomllib
from pathlib import Path

import zmq.auth

from quire_server.cli._parser import Namespace, OneLineParser
from shared.config import ConfigError
from shared.curve import ALLOWED, DOMAINS, FRONTEND, OWN, ROLES, SCHEDULER, SERVER, STANDBY_DOMAIN, WORKER

EXAMPLES = """
  quire keys create keys                       scheduler, worker and front end
  quire scheduler --keys keys/scheduler --worker-address tcp://0.0.0.0:5702
  quire worker --keys keys/worker --worker-address tcp://scheduler:5702
  quire keys add keys gpu-7 --role worker      a worker with a key of its own, in keys/gpu-7
  quire keys rotate keys gpu-7                 a new key; the old one stays valid until it is revoked
  quire keys revoke keys gpu-7 --old           revoke the old key
  quire keys revoke keys gpu-7                 revoke all keys of gpu-7
  quire keys token                             a token for a client, and its hash for --principals
  quire keys principal principals.toml operator --admin     a caller with a new token in the file for --principals
"""
_PREVIOUS = "@previous"
_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Keys that TOML accepts without quotation marks."""


def configure(parser: OneLineParser) -> None:
    """Add the arguments."""
    parser.add_argument("action", choices=("create", "add", "rotate", "revoke", "token", "principal"))
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="", help="folder with all keys; with principal: the file"
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", default="", help="name of the worker or front end; with principal: its name"
    )
    parser.add_argument("--role", choices=(WORKER, FRONTEND), default=WORKER, help="role of NAME (default: worker)")
    parser.add_argument(
        "--old", action="store_true", help="revoke only the key that was valid before the last rotation"
    )
    parser.add_argument("--admin", action="store_true", help="the new principal may use the operator API")


def run(options: Namespace) -> int:
    """Run the action."""
    if options.action == "token":
        # The client gets the token; the principals file gets its hash.
        token = secrets.token_urlsafe(32)
        print(f"token  {token}\nsha256 {_digest(token)}")
        return 0
    if options.action == "principal":
        # Print only the token, for `TOKEN=$(quire keys principal …)`.
        print(add_principal(Path(options.folder), options.name, is_admin=options.admin))
        return 0
    if not options.folder:
        raise ConfigError("folder: missing; add the folder of the keys")
    folder, name = Path(options.folder), options.name
    if options.action == "create":
        if name:
            raise ConfigError("name: not allowed with create; use add")
        create(folder)
        return 0
    if not name or Path(name).name != name or name == SCHEDULER:
        raise ConfigError(f"name: {name!r} is not a valid name of a worker or front end; use a plain file name")
    match options.action:
        case "add":
            add(folder, name, options.role)
        case "rotate":
            rotate(folder, name)
        case "revoke":
            revoke(folder, name, only_old=options.old)
    return 0


def create(folder: Path) -> None:
    """Create a folder of keys for a scheduler, a worker and a front end.

    Raises:
        ConfigError: keys already exist.
    """
    own = folder / SCHEDULER
    if own.exists():
        raise ConfigError(f"folder: {own} already exists; use add or rotate")
    for domain in DOMAINS.values():
        (own / ALLOWED / domain).mkdir(parents=True)
    _new_pair(own)
    (own / ALLOWED / STANDBY_DOMAIN).mkdir()
    shutil.copy(own / f"{OWN}.key", own / ALLOWED / STANDBY_DOMAIN / f"{SCHEDULER}.key")
    for role in ROLES:
        if role != SCHEDULER:
            add(folder, role, role)


def add(folder: Path, name: str, role: str) -> None:
    """Add an allowed process with a key of its own.

    Raises:
        ConfigError: the name is in use, or the folder has no scheduler key.
    """
    if not (folder / SCHEDULER / f"{OWN}.key").exists():
        raise ConfigError(f"folder: {folder} contains no scheduler key; create it with quire keys create")
    if (folder / name).exists():
        raise ConfigError(f"name: {folder / name} already exists; use rotate")
    (folder / name).mkdir()
    shutil.copy(folder / SCHEDULER / f"{OWN}.key", folder / name / f"{SERVER}.key")
    _new_pair(folder / name)
    shutil.copy(folder / name / f"{OWN}.key", _allowed(folder, role) / f"{name}.key")


def rotate(folder: Path, name: str) -> None:
    """Give a process a new key. The previous key stays valid until it is revoked.

    Raises:
        ConfigError: no allowed key has this name.
    """
    allowed = _entry(folder, name)
    allowed.replace(allowed.with_name(f"{name}{_PREVIOUS}.key"))
    _new_pair(folder / name)
    shutil.copy(folder / name / f"{OWN}.key", allowed)


def revoke(folder: Path, name: str, *, only_old: bool) -> None:
    """Revoke all keys of a process, or only the one before the last rotation.

    Raises:
        ConfigError: no allowed key has this name.
    """
    allowed = _entry(folder, name)
    allowed.with_name(f"{name}{_PREVIOUS}.key").unlink(missing_ok=True)
    if not only_old:
        allowed.unlink()


def add_principal(path: Path, name: str, *, is_admin: bool) -> str:
    """Append a principal with access to every tenant and cache scope to a principals file; return the new token.

    Args:
        path: the file; created if it does not exist.
        name: name of the principal.
        is_admin: whether it may use the operator API.

    Raises:
        ConfigError: the name is not usable or in use, or the file cannot be read or written.
    """
    if not _NAME.fullmatch(name) or name == "anonymous":
        raise ConfigError(
            f"name: {name!r} is not the name of a principal; use letters, digits, '-' and '_', but not 'anonymous'"
        )
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        there = tomllib.loads(text).get("principals", {})
    except (OSError, ValueError) as error:
        raise ConfigError(f"file: {path} cannot be read as a file of principals ({error})") from None
    if name in there:
        raise ConfigError(f"name: {path} already has a principal {name}; add another token with quire keys token")
    token = secrets.token_urlsafe(32)
    lines = [f"[principals.{name}]", f'tokens = ["{_digest(token)}"]', 'tenants = ["*"]', 'cache_scopes = ["*"]']
    lines += ["admin = true"] if is_admin else []
    try:
        path.write_text("\n".join([*([text.rstrip(), ""] if text.strip() else []), *lines, ""]), "utf-8")
    except OSError as error:
        raise ConfigError(f"file: {path} cannot be written ({error.strerror})") from None
    return token


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _allowed(folder: Path, role: str) -> Path:
    return folder / SCHEDULER / ALLOWED / DOMAINS[role]


def _entry(folder: Path, name: str) -> Path:
    for role in DOMAINS:
        path = _allowed(folder, role) / f"{name}.key"
        if path.exists():
            return path
    raise ConfigError(f"name: no allowed key is named {name}; there is no {name}.key under {folder / SCHEDULER}")


def _new_pair(folder: Path) -> None:
    """Write own.key and own.key_secret; the latter is never readable by other users."""
    mask = os.umask(0o077)
    try:
        zmq.auth.create_certificates(folder, OWN)
    finally:
        os.umask(mask)
