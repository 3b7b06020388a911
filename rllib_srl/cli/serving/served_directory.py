"""The directory of a served model: its files, who may use it, and questions to the server that runs in it.

    DIR/  settings.json   model, rank, temperature, context: they hold for all versions
          token           of the HTTP interface
          server.json     address of the server that is running
          lock            held while it runs
          served.db  versions/0001/...  engine.log

    ask(served, "/status", 5)                                what its server says
    ask(served, "/rollback", 900, {"reason": "it is rude"})  what it did
    ask(address_in("http://127.0.0.1:8000/?token=..."), ...) the same without the directory
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import HttpUrl, ValidationError

from rllib_srl.cli.serving.job import FileError, JsonFile, ServedSettings
from rllib_srl.people.served_store import FILE, ServedStore

SETTINGS, TOKEN, LOCK, LOG = ServedSettings.name, "token", "lock", "engine.log"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the loopback is reached without a proxy
AGAIN = "try again in a minute"


class DirectoryError(ValueError):
    """The directory cannot be used; the message says why."""


class InUse(DirectoryError):
    """Another process holds the directory."""


class ServedDirectory:
    """The directory of one served model. Invariant: it is readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        return (self.path / SETTINGS).is_file()

    @property
    def log(self) -> Path:
        return self.path / LOG

    def version(self, number: int) -> Path:
        return self.path / "versions" / f"{number:04d}"

    def fix_settings(self, settings: ServedSettings) -> None:
        """Write the settings that hold for all versions, or check that they are those of before.

        Before the first answer nothing holds yet: what a start that failed has written, its scheme too, is replaced.
        """
        if not self.exists:
            if self.path.is_dir() and any(self.path.iterdir()):
                raise DirectoryError(f"--out {self.path} is not empty; expected a new directory, or one of srl serve")
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            settings.write(self.path)
        with self.locked():
            if not self._has_answered():
                for path in self.path.glob(f"{FILE}*"):
                    path.unlink()
                settings.write(self.path)
        for name, before in ServedSettings.read(self.path):
            if (value := getattr(settings, name)) != before:
                where = f"as --out {self.path} has been served before"
                raise DirectoryError(f"{name} = {value}; expected {before}, {where}")

    def _has_answered(self) -> bool:
        if not (self.path / FILE).exists():
            return False
        with ServedStore(self.path / FILE) as store:
            return bool(store.search("", None, 1)[0] or store.versions())

    def token(self) -> str:
        """Return the token, made when it is first asked for."""
        path = self.path / TOKEN
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        token = path.read_text().strip()
        if len(token) < 16:
            raise DirectoryError(f"{path} has {len(token)} characters; expected a token of at least 16")
        return token

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for one server or one command that changes it; InUse: another process holds it."""
        with open(os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InUse(f"{self.path} is in use by another srl serve; stop it first") from error
            yield


class Running(JsonFile):
    """The server that runs in a directory."""

    name: ClassVar[str] = "server.json"

    url: str  # with /v1
    pid: int


class Address(NamedTuple):
    """Where a server answers, and its token."""

    url: str  # with /v1
    token: str


def address_of(served: ServedDirectory) -> Address:
    """Return the address of the running server; DirectoryError: none is ready."""
    try:
        running = Running.read(served.path)
        os.kill(running.pid, 0)
        return Address(running.url, served.token())
    except (FileError, ProcessLookupError, PermissionError):  # no file, or one of a server that was killed
        raise DirectoryError(f"no server runs there, or it is still starting; {AGAIN}") from None


def address_in(text: str) -> Address:
    """Return the address that `srl serve` printed; without a token in it, that of SRL_TOKEN is used."""
    try:
        at = HttpUrl(text)
    except ValidationError:
        error = f"{text!r} is not an address"
    else:
        if token := dict(at.query_params()).get("token") or os.environ.get("SRL_TOKEN"):
            return Address(f"{at.scheme}://{at.host}:{at.port}/v1", token)
        error = "it has no token, and SRL_TOKEN is not set"
    like = "http://127.0.0.1:8000/?token=..."
    raise DirectoryError(f"--server: {error}; expected what srl serve printed, such as {like}")


def ask(
    where: ServedDirectory | Address,
    path: str,
    timeout_s: float,
    body: Mapping[str, Any] | None = None,
    method: str = "",
) -> dict[str, Any]:
    """Return the server's answer to a GET, or with a body to a POST, unless another `method` is given.

    Raises:
        DirectoryError: no server is ready, or it refuses, or does not answer; the message says why.
    """
    at = where if isinstance(where, Address) else address_of(where)
    url = at.url + path
    headers = {"Authorization": f"Bearer {at.token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method or None)
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        raise DirectoryError(_message_of(error)) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DirectoryError(f"the server at {url} did not answer as expected ({reason}); {AGAIN}") from error


def _message_of(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError, OSError):
            return f"the server answered with status {error.code}"
