"""Error responses: OpenAI's error object, with an HTTP status that tells the client's errors from the server's."""

from collections.abc import Mapping

from pipejax.system.errors import UserError
from pipejax.system.fields import named, shown_value

LONGEST = 1000  # the most characters of a message; a longer message is shortened in the middle
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """An error response to a client."""

    def __init__(
        self,
        status: int,
        error: UserError | str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Creates an error response.

        Args:
          status: the HTTP status.
          error: the message for the client, or a UserError, whose parts the response also contains. The message must
            not reveal anything about this machine.
          field: the field of the body that causes the error.
          code: OpenAI's code of the error.
          headers: additional headers.
        """
        message = _cut(str(error))
        self.details = (
            {name: _cut(text) for name, text in error.fields().items()} if isinstance(error, UserError) else {}
        )
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.field = None if field is None else named(field)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """Returns OpenAI's error object."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        known = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": known | self.details}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def unsuitable(place: str, found: object, expected: str, *, status: int = 400, code: str | None = None) -> Refused:
    """Returns the error response for an invalid field of the body."""
    said, field = found if isinstance(found, Shown) else shown_value(found), place.partition(" ")[0]
    return Refused(status, UserError(named(place), found=said, expected=expected), field=field, code=code)


class Shown(str):
    """A description of an invalid value, shown in place of the value."""
