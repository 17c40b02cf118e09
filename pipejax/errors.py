"""The one exception that is meant for the person at the keyboard. Nothing else lives here."""


class UserError(Exception):
    """Bad input. The message is one line: where it is (file, line or key), what was found, what was expected."""
