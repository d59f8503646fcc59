"""Where --model and --data point: a local path, a hub id, or nothing (built in)."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from zenflow.cli.errors import UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_DATA_SUFFIXES = (".txt", ".jsonl", ".json", ".parquet", ".csv")


@dataclass(frozen=True, slots=True)
class Source:
    """One input: `local` if it is on this machine; else `value` is a hub id, or None: built in."""

    flag: str
    value: str | None
    local: Path | None


def find_data(flag: str, value: str | None) -> Source:
    """The data file or hub dataset that a flag names.

    Raises:
        UsageError: if it names neither.
    """
    source = _find(flag, value, path_like=bool(value and value.lower().endswith(_DATA_SUFFIXES)))
    if source.local is not None and not source.local.is_file():
        raise UsageError(f"{flag} {value} is not a file; give one .txt, .jsonl or .parquet file")
    return source


def find_model(value: str | None) -> Source:
    """The model directory or hub model that --model names.

    Raises:
        UsageError: if it names neither.
    """
    source = _find("--model", value, path_like=False)
    if source.local is not None and not (source.local / "config.json").is_file():
        raise UsageError(f"--model {value} is no model directory: it has no config.json")
    return source


def go_offline_if_possible(*sources: Source) -> None:
    """Keep the Hugging Face libraries off the network unless an input lies there and it is up.

    Without a network a hub input may still be in the local cache, which is found at once then; the
    libraries themselves would try the network for a minute first. Works before their import; a
    setting of the user's own is left alone.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    local = all(source.value is None or source.local is not None for source in sources)
    if local or not _hub_is_known():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _hub_is_known() -> bool:
    """Whether the hub's name can be resolved; a proxy, if there is one, is believed to do it."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _find(flag: str, value: str | None, *, path_like: bool) -> Source:
    if value is None:
        return Source(flag, None, None)
    path = Path(value).expanduser()
    if path.exists():
        return Source(flag, value, path)
    if path_like or not _HUB_ID.fullmatch(value):
        raise UsageError(f"{flag} {value}: no such file or directory")
    return Source(flag, value, None)
