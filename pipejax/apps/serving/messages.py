"""The source in a conversation: the text of the user's last message, as an encoder-decoder reads one text."""

from pipejax.apps.serving.refusals import Shown, unsuitable
from pipejax.config import Config
from pipejax.data.lines import Object, kind
from pipejax.inference.sources import template_of

ROLES = ("user", "system", "developer", "assistant", "tool", "function")
TEXTS = ("text", "input_text")  # types of the parts that are read


def last(given: Object, field: str, config: Config) -> tuple[list[object], bool]:
    """The source in `messages` or `input`, and whether there are messages or instructions that are not read."""
    messages = given.get(field)
    if field == "input" and isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        found = Shown("nothing") if messages is None else messages
        raise unsuitable(field, found, "a list of messages, of which at least one is a user's")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise unsuitable(f"{field} {i}", Shown(kind(message)), "an object with role and content")
        if "type" not in message and message.get("role") not in ROLES:
            raise unsuitable(f"{field} {i}", message.get("role"), f"a role: one of {', '.join(ROLES)}")
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        raise unsuitable(field, Shown("no message of a user"), "at least one: the last of them is the source")
    text = _text_of_parts(messages[users[-1]].get("content"), f"{field} {users[-1]}")
    # A template of one field is filled by the text. One of several cannot be, so the text is the whole source then.
    fields = {*template_of(config).fields}
    unread = len(messages) > 1 or bool(given.get("instructions"))
    return [{fields.pop(): text} if len(fields) == 1 else text], unread


def _text_of_parts(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise unsuitable(place, Shown(f"the content {kind(content)}"), "a text, or a list of parts that are text")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            found = part.get("type") if isinstance(part, dict) else part
            raise unsuitable(place, found, f"parts with a text, of the type {' or '.join(TEXTS)}: only text is read")
        texts.append(part["text"])
    return "\n".join(texts)
