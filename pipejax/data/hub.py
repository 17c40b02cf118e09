"""Names on the Hugging Face hub (NAME or NAME@REVISION), and readable reasons for the hub's errors."""

import re
from pathlib import Path

from pipejax.system.errors import UserError, first_line
from pipejax.system.files import look
from pipejax.system.strict_json import JsonObject

LOG_IN = "`hf auth login` with a token that may"


def split_revision(source: str) -> tuple[str, JsonObject] | None:
    """Splits a hub id into the name and the client's arguments for its revision; returns None for other paths."""
    found = re.fullmatch(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@([^\s@]+))?", source)
    return found and (found[1], {"revision": found[2]} if found[2] else {})


def at(source: str | Path, revision: str) -> str:
    """Returns NAME@REVISION for a hub name with a revision, else the source unchanged.

    Raises:
      UserError: a local path has a revision.
    """
    if revision and look(source):
        raise UserError(
            source, found=f"a path with the revision {revision}", expected="a hub id, since only these have revisions"
        )
    return f"{source}@{revision}" if revision else str(source)


def reason(error: BaseException) -> str:
    """Returns the reason of the hub's error, with a remedy; for other errors the first line of the message."""
    from huggingface_hub import errors

    cause: BaseException | None = error
    while cause and not isinstance(cause, errors.HfHubHTTPError):  # transformers and the hub's client wrap it
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, errors.GatedRepoError):
        return f"a gated model: ask for access on its page, then {LOG_IN}"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"unknown or private: look at the spelling, or {LOG_IN}"
    if isinstance(cause, errors.RevisionNotFoundError):
        return "no such revision; its page lists branches, tags and commits"
    if isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code in (401, 403):
        return f"{cause.response.status_code}, no right to do so: {LOG_IN}"
    return first_line(error)
