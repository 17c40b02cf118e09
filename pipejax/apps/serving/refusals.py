"""The server's answer when it does not do what is asked: OpenAI's error object with the status that says who errs."""

from collections.abc import Mapping

from pipejax.system.errors import UserError
from pipejax.system.fields import named, shown_value

LONGEST = 1000  # the most characters of a message; longer ones are shortened in the middle
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    def __init__(
        self,
        status: int,
        error: UserError | str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`error` goes to the client, so it may tell nothing about the machine; the fields of a UserError go along."""
        message = _cut(str(error))
        self.details = (
            {name: _cut(text) for name, text in error.fields().items()} if isinstance(error, UserError) else {}
        )
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.field = None if field is None else named(field)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        known = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": known | self.details}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def unsuitable(place: str, found: object, expected: str, *, status: int = 400, code: str | None = None) -> Refused:
    """The refusal of a field of the body that holds something else than it must."""
    said, field = found if isinstance(found, Shown) else shown_value(found), place.partition(" ")[0]
    return Refused(status, UserError(named(place), found=said, expected=expected), field=field, code=code)


class Shown(str):
    """Words about what was found, instead of the value itself."""
