"""The forms a training row may have, and what makes one malformed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from zenflow.cli.errors import UsageError

Form = Literal["text", "prompt-completion", "messages"]

_COLUMNS: dict[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
}
_LEGAL = '"text", or "prompt" and "completion", or "messages"'


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one form, each with that form's columns only."""

    form: Form
    rows: list[dict[str, Any]]
    num_empty: int = 0
    """Rows left out because they have no text."""


def check_rows(source: str, placed_rows: Iterable[tuple[str, object]]) -> Rows:
    """Check rows one by one; the first decides the form.

    Args:
        source: the data's name, for messages.
        placed_rows: each row with its place (``file:line``).

    Raises:
        UsageError: naming the place of the first malformed row, or if no row is left.
    """
    form: Form | None = None
    rows: list[dict[str, Any]] = []
    num_empty = 0
    for place, row in placed_rows:
        if not isinstance(row, dict):
            raise UsageError(f"{place}: expected an object with {_LEGAL}, found {_kind(row)}")
        form = form or _form_of(place, row)
        missing = [column for column in _COLUMNS[form] if column not in row]
        if missing:
            raise UsageError(f'{place}: no "{missing[0]}"; the rows before it have the {form} form')
        kept = {column: row[column] for column in _COLUMNS[form]}
        if _check_row(place, form, kept):
            rows.append(kept)
        else:
            num_empty += 1
    if form is None or not rows:
        raise UsageError(f"{source}: no {'text' if num_empty else 'data'} in it")
    return Rows(form, rows, num_empty)


def _form_of(place: str, row: dict[str, Any]) -> Form:
    for form, columns in _COLUMNS.items():
        if all(column in row for column in columns):
            return form
    names = ", ".join(f'"{name}"' for name in row) or "nothing"
    raise UsageError(f"{place}: expected {_LEGAL}, found {names}")


def _check_row(place: str, form: Form, row: dict[str, Any]) -> bool:
    """Whether there is something to learn in a row."""
    if form == "text":
        return bool(_check_text(place, "text", row["text"]).strip())
    if form == "messages":
        return _check_messages(place, "messages", row["messages"])
    if isinstance(row["prompt"], list) != isinstance(row["completion"], list):
        raise UsageError(f'{place}: "prompt" and "completion" must both be text or both messages')
    if isinstance(row["prompt"], list):
        prompt = _check_messages(place, "prompt", row["prompt"])
        return _check_messages(place, "completion", row["completion"]) and prompt
    _check_text(place, "prompt", row["prompt"])
    return bool(_check_text(place, "completion", row["completion"]).strip())


def _check_text(place: str, column: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f'{place}: "{column}" must be text, found {_kind(value)}')
    return value


def _check_messages(place: str, column: str, messages: object) -> bool:
    if not isinstance(messages, list):
        raise UsageError(f'{place}: "{column}" must be a list of messages, found {_kind(messages)}')
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, dict) else None
            if not isinstance(value, str):
                raise UsageError(
                    f'{place}: message {number} of "{column}" needs "role" and "content" as text'
                )
    return len(messages) > 0


def _kind(value: object) -> str:
    names = {str: "text", dict: "an object", list: "a list", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "other data")
