"""Upload a model directory to the Hugging Face hub, with checks before any work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0  # of each connection, read and write
HINTS: dict[int | None, str] = {  # by HTTP status
    401: "; expected a valid token: run `hf auth login`",
    403: "; expected a token with write access",
}


class PushError(ValueError):
    """A model cannot be uploaded; the message contains the reason and the remedy."""


class Hub:
    """The hub as one repository's owner. Invariant: the token was accepted."""

    def __init__(self, repo: str, endpoint: str | None = None) -> None:
        """Check the name of the repository, the token and the connection.

        Args:
            repo: "owner/name".
            endpoint: URL of the hub; None: that of HF_ENDPOINT, else the public one.

        Raises:
            PushError: the name is invalid, there is no valid token, or the hub cannot be reached.
        """
        from huggingface_hub import HfApi, constants, get_token, set_client_factory
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils._validators import validate_repo_id

        try:
            validate_repo_id(repo)
        except HFValidationError as error:
            raise PushError(f"--push {repo}; expected owner/name ({_first_line(error)})") from None
        if constants.HF_HUB_OFFLINE:
            raise PushError(f"--push {repo} needs the network, but HF_HUB_OFFLINE is set; unset it")
        if get_token() is None:
            raise PushError(f"--push {repo} needs a token: run `hf auth login`, or set HF_TOKEN")
        set_client_factory(_client_with_timeout)
        self._repo, self._api = repo, HfApi(endpoint=endpoint)
        self._call("whoami")

    def push(self, directory: Path, is_public: bool) -> str:
        """Upload a directory in one commit; return the URL of the repository.

        Args:
            directory: all files in it are uploaded.
            is_public: a new repository is public, not private; one that exists stays as it is.

        Raises:
            PushError: the upload failed; the message has the command that repeats it.
        """
        try:
            url = self._call("create_repo", repo_id=self._repo, private=not is_public, exist_ok=True)
            message = "Upload a model trained with rllib_srl"
            self._call("upload_folder", repo_id=self._repo, folder_path=directory, commit_message=message)
        except PushError as error:
            error.add_note(f"the model is in {directory}; upload it with: hf upload {self._repo} {directory}")
            raise
        return str(url)

    def _call(self, name: str, **arguments: Any) -> Any:
        # HTTPError is that of the client library, httpx or httpx2.
        from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

        try:
            return getattr(self._api, name)(**arguments)
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", None)
            raise PushError(f"--push {self._repo}: {_first_line(error)}{HINTS.get(status, '')}") from error
        except (HTTPError, OSError) as error:
            raise PushError(f"--push {self._repo}: the hub cannot be reached ({_first_line(error)})") from error


def _client_with_timeout() -> Any:
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = TIMEOUT_S
    return client


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
