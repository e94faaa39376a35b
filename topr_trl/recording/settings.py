"""Settings of `topr record`."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from topr_trl.recording.redaction import Redactor
from topr_trl.settings.checks import check_choice, check_types

TOKEN_VARIABLE = "TOPR_RECORD_TOKEN"
KEY_VARIABLE = "TOPR_UPSTREAM_KEY"
REFUSE, PASS = "refuse", "pass"  # values of `on_full`
AUTO, ALWAYS, NEVER = "auto", "always", "never"  # values of `token_ids`


@dataclass
class RecordArguments:
    """Settings of `topr record`."""

    upstream: str = field(
        metadata={"help": "URL of the OpenAI-compatible server, with /v1, such as http://127.0.0.1:8000/v1."}
    )
    output_dir: str = field(metadata={"help": "Folder for the recording. The recorder adds to an existing one."})
    host: str = field(
        default="127.0.0.1",
        metadata={"help": f"Address to listen on. Addresses for other machines need a token in {TOKEN_VARIABLE}."},
    )
    port: int = field(default=9000, metadata={"help": "Port to listen on. 0 chooses a free port."})
    model_revision: str | None = field(
        default=None, metadata={"help": "Revision of the weights that the server uses. Each row names it."}
    )
    token_ids: str = field(
        default=AUTO,
        metadata={
            "help": "Whether to request token ids and log-probabilities from the server, and to hide them from the "
            "client: always, never, or auto, which asks vLLM only."
        },
    )
    redact: list[str] | None = field(
        default=None,
        metadata={"help": "Regular expressions, or emails, phones and keys. Their matches are not stored."},
    )
    on_full: str = field(
        default=REFUSE,
        metadata={
            "help": "Whether to refuse calls if the disk is full (refuse), or to pass them on unrecorded (pass)."
        },
    )
    max_body_mb: int = field(default=32, metadata={"help": "Maximum size of a request, in MiB."})
    max_answer_mb: int = field(default=256, metadata={"help": "Maximum size of an answer, in MiB."})
    client_timeout: float = field(
        default=60.0,
        metadata={"help": "Maximum time for a client to send a request, or to read a part of an answer, in seconds."},
    )
    upstream_timeout: float = field(
        default=600.0, metadata={"help": "Maximum time without data from the server, in seconds."}
    )

    def __post_init__(self) -> None:
        check_types(self, RecordArguments)
        check_choice(self, token_ids=(AUTO, ALWAYS, NEVER), on_full=(REFUSE, PASS))
        Redactor(self.redact or ())  # The constructor checks the patterns.
        parts = urlsplit(self.upstream)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            # The message does not repeat the value, because the value can have a password.
            raise ValueError("upstream must be a URL with http:// or https://, such as http://127.0.0.1:8000/v1.")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "upstream must be a URL without user, password, query or fragment. Put the API key of the server in "
                f"the variable {KEY_VARIABLE}."
            )
        self.upstream = self.upstream.rstrip("/")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be between 0 and 65535, not {self.port}.")
        for name in ("max_body_mb", "max_answer_mb", "client_timeout", "upstream_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name):g}.")
        if not is_loopback(self.host) and not self.token:
            raise ValueError(
                f"host {self.host} can be reached from other machines, so it needs a token. Set the variable "
                f"{TOKEN_VARIABLE} to a long random text, or remove host."
            )

    @property
    def folder(self) -> Path:
        """Folder of the recording."""
        return Path(self.output_dir)

    @property
    def token(self) -> str | None:
        """Token that clients must send, from the environment. None if clients need no token."""
        return os.environ.get(TOKEN_VARIABLE) or None

    @property
    def upstream_key(self) -> str | None:
        """API key for the server, from the environment, or None.

        If neither this key nor `token` is set, the server gets the client's key.
        """
        return os.environ.get(KEY_VARIABLE) or None


def is_loopback(host: str) -> bool:
    """Return whether a name or an address of a host is this machine itself."""
    with suppress(ValueError):
        return host == "localhost" or ip_address(host).is_loopback
    return False
