"""Keys on disk: the folder of a ps-serve, with its own key and the list of admitted keys; and the file of a member.

    DIR/server.key          name, public, secret; 0600
    DIR/members/NAME.json   name, role, public; one for each admitted key
    DIR/NAME.key            the one file for NAME: name, role, public, secret, and the server's public key; 0600

Rules
- A secret that other users can read is refused.
- The server reads the list again when the folder changes, so `add` and `revoke` take effect within `LIST_S`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from narrows.protocols.config.run_name import NAME
from narrows.protocols.errors import UsageError
from narrows.protocols.gossip.relay_ticket import SECRET_BYTES
from narrows.protocols.runtime.network.curve_auth import HandshakeFailure, KeyPair, new_pair, public_of

LIST_S = 0.5  # the largest age of the list
ROLES = ("worker", "cluster")  # that a key is made for
RELAY = "relay"  # the role in the file of a relay's secret
SERVER = "server"  # the role of a server's own key: its shards have it
HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Identity:
    """The owner of an admitted key."""

    name: str
    role: str


@dataclass(frozen=True)
class SecretKeyFile:
    """A key file with a secret."""

    name: str
    role: str  # one of ROLES, or SERVER
    public: str
    secret: str
    server: str = ""  # public key of the server that a member dials; "" in the server's own file

    @property
    def pair(self) -> KeyPair:
        return KeyPair(self.public, self.secret)


def _write(path: Path, values: dict[str, str]) -> None:
    """Write a new file that only its owner can read. Raises UsageError if the file exists."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(json.dumps(values, indent=1) + "\n")
    except FileExistsError:
        raise UsageError(f"{path} exists already: remove it, or choose another name") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _read(path: Path, flag: str) -> SecretKeyFile:
    try:
        others = _others(path)
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
    if others:
        raise UsageError(f"{flag} {path}: others can read this secret; chmod 600 {path}")
    try:
        secret = SecretKeyFile(**json.loads(text))
        sound = all(isinstance(value, str) for value in asdict(secret).values())
        sound = sound and all(HEX.fullmatch(key) for key in (secret.public, secret.secret))
        if not sound or public_of(secret.secret) != secret.public:
            raise ValueError
    except (ValueError, TypeError):
        raise UsageError(f"{flag} {path}: this is no key; ps-serve keys makes them") from None
    return secret


def _others(path: Path) -> bool:
    """True if other users can read a secret file, and its owner can change that. Raises OSError.

    A manager mounts secrets for a group of the process (fsGroup of Kubernetes: 0440), on a read-only disk or as another
    user's file. Such a file is allowed.
    """
    found = path.stat()
    if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP):
        return True
    ours = found.st_uid == os.geteuid() and not os.statvfs(path).f_flag & os.ST_RDONLY
    return bool(found.st_mode & stat.S_IRGRP) and (ours or found.st_gid not in (os.getegid(), *os.getgroups()))


def member_key(path: str, flag: str) -> SecretKeyFile:
    """Read the file that `ps-serve keys add` made. Raises UsageError."""
    secret = _read(Path(path), flag)
    if secret.role not in ROLES or not HEX.fullmatch(secret.server):
        raise UsageError(f"{flag} {path}: this is the key of a server; give the file that ps-serve keys add printed")
    return secret


def server_key(folder: str) -> SecretKeyFile:
    """Read the key of the ps-serve that has this folder. Raises UsageError."""
    if not (Path(folder) / "server.key").exists():
        raise UsageError(f"--keys {folder}: there are no keys of a server; ps-serve keys init {folder} makes them")
    secret = _read(Path(folder) / "server.key", "--keys")
    if secret.role != SERVER:
        raise UsageError(f"--keys {folder}: server.key is the key of a {secret.role}, and no server can have it")
    return secret


def make_relay_key(path: str) -> None:
    """Make the file of the secret that a relay shares with servers. Raises UsageError."""
    _write(Path(path), {"role": RELAY, "secret": secrets.token_hex(SECRET_BYTES)})


def relay_secret(path: str, flag: str) -> str:
    """Return the secret in a file that `make_relay_key` made, in hex digits. Raises UsageError."""
    try:
        others = _others(Path(path))
        text = Path(path).read_text()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}; ps-serve relay --key made it, copy it from there") from None
    if others:
        raise UsageError(f"{flag} {path}: others can read this secret; chmod 600 {path}")
    try:
        values = json.loads(text)
        if values["role"] != RELAY or not HEX.fullmatch(values["secret"]):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise UsageError(
            f"{flag} {path}: this is no key of a relay; give the file that ps-serve relay --key made"
        ) from None
    return str(values["secret"])


def make(folder: str) -> Path:
    """Make the folder of a server, with its key. Raises UsageError."""
    members = Path(folder) / "members"
    try:
        members.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None
    pair = new_pair()
    path = Path(folder) / "server.key"
    _write(path, {"name": SERVER, "role": SERVER, "public": pair.public, "secret": pair.secret})
    return path


def add(folder: str, name: str, role: str) -> Path:
    """Make a key that the server of this folder admits. Returns the one file to hand over. Raises UsageError."""
    server = server_key(folder)
    if not NAME.fullmatch(name) or name == SERVER:
        raise UsageError(f"{name}: a name has letters, digits, '.', '-' and '_', begins with one of the first two, and is not "
                         f"'{SERVER}'")  # fmt: skip
    pair, path = new_pair(), Path(folder) / f"{name}.key"
    listed = Path(folder) / "members" / f"{name}.json"
    if listed.exists():
        raise UsageError(f"{name} is on the list already: ps-serve keys revoke {name} --keys {folder} takes it off")
    values = {"name": name, "role": role, "public": pair.public}
    _write(path, values | {"secret": pair.secret, "server": server.public})
    new = listed.with_suffix(".new")  # a running server must not read half of it
    new.unlink(missing_ok=True)
    _write(new, values)
    os.replace(new, listed)
    return path


def revoke(folder: str, name: str) -> None:
    """Take a key off the list. Raises UsageError."""
    server_key(folder)
    path = Path(folder) / "members" / f"{name}.json"
    if not NAME.fullmatch(name) or not path.exists():
        raise UsageError(f"{name} is not on the list of {folder}: it has {', '.join(listed(folder)) or 'nobody'}")
    own, file = public_key(folder, name), Path(folder) / f"{name}.key"
    path.unlink()
    with contextlib.suppress(UsageError):  # no such file, or another kind of file: leave it
        if _read(file, "keys").public == own:
            file.unlink()


def public_key(folder: str, name: str) -> str:
    """Return the public key of an admitted member. Raises UsageError."""
    try:
        return str(json.loads((Path(folder) / "members" / f"{name}.json").read_text())["public"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"--keys {folder}: it has no key of {name}; make it with ps-serve keys add {name} --keys {folder}, or go without "
            "keys by --insecure"
        ) from None


def listed(folder: str) -> list[str]:
    """Return the names of the admitted members."""
    return sorted(path.stem for path in (Path(folder) / "members").glob("*.json"))


class AdmittedKeys:
    """The keys that the server of a folder admits. Any thread may ask."""

    def __init__(self, folder: str) -> None:
        self.own = server_key(folder)
        self.folder = Path(folder) / "members"
        self.read_s, self.stamp = float("-inf"), -1
        self.members: dict[str, Identity] = {}

    def who(self, public: str) -> Identity | None:
        """Return the owner of a public key; None if the key is not admitted."""
        if public == self.own.public:
            return Identity(SERVER, SERVER)
        now = time.monotonic()
        if now - self.read_s > LIST_S or public not in self.members:
            self.read_s = now
            self._read_again()
        return self.members.get(public)

    def _read_again(self) -> None:
        """Read the list again if the folder has changed. A file that cannot be read admits no key and is tried again."""
        try:
            stamp = self.folder.stat().st_mtime_ns
        except OSError:
            return  # the list stays as it was
        if stamp == self.stamp:
            return
        found = {}
        for path in self.folder.glob("*.json"):
            try:
                values = json.loads(path.read_text())
                if values["role"] in ROLES and HEX.fullmatch(values["public"]):
                    found[values["public"]] = Identity(str(values["name"]), values["role"])
            except (OSError, ValueError, KeyError, TypeError):
                stamp = -1
        self.stamp, self.members = stamp, found


def keyed(address: str, own: SecretKeyFile | None) -> str:
    """Return an address as it is sent to peers, with the own public key if there is one."""
    return f"{address}/{own.public}" if own is not None else address


def refusal(why: HandshakeFailure, key: SecretKeyFile | None, flag: str) -> str:
    """Return a sentence for the user of a process that a server has refused; "" if the reason is not certain yet."""
    if why is HandshakeFailure.REFUSED and key is not None:
        return f"the server does not accept the key of {key.name}: its owner adds it with ps-serve keys add"
    if why is HandshakeFailure.KEYLESS and key is None:
        return f"the server accepts keys only: give {flag} FILE, which its owner makes with ps-serve keys add"
    if why is HandshakeFailure.KEYLESS:
        return f"the server has no keys: leave {flag} out if everyone on the way to it is trusted"
    return f"{flag} was made for another server: ask the owner of this one for a new file" if key else ""
