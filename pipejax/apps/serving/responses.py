"""OpenAI's objects for a request's answers: completions, chats and responses.

`whole` returns the object of completed answers. For a stream, `begin` returns the events before the first piece, `add`
returns the events for new pieces of choices, `end` returns the events after completion, and `fail` returns the event
that ends the stream after an error. An event is the text that is sent, without the blank line that ends an event.
"""

import json
import secrets
import time
from collections.abc import Sequence

from pipejax.apps.serving.answering import Choice, Completion
from pipejax.apps.serving.refusals import Refused
from pipejax.apps.serving.row_text import Piece

Json = dict[str, object]
LEAST_LOG_PROB = -9999.0  # replaces -inf, which JSON does not have


class Completions:
    """Completion objects, and the chunks of a stream: one per piece, and one at the end of a choice."""

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, completion: Completion, *, model: str, fingerprint: object) -> None:
        self._completion, self._model, self._fingerprint = completion, model, fingerprint
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._offsets = [0] * len(completion.choices)  # characters sent with log-probabilities, by choice

    def whole(self) -> Json:
        """Returns the object of completed answers."""
        choices = [
            self._choice(choice, self._completion.text_of(choice), choice.pieces) | self._completion.record_of(choice)
            for choice in self._completion.choices
        ]
        return self._object(self.kind, choices) | {"usage": self._completion.usage()}

    def begin(self) -> list[str]:
        """Returns the events before the first piece: none."""
        return []

    def add(self, added: Sequence[tuple[Choice, list[Piece]]]) -> list[str]:
        """Returns the chunks for new pieces of choices."""
        found = []
        for choice, pieces in added:
            for piece in pieces:
                more = {"finish_reason": None, "row": piece.row, "token": piece.token}
                found.append(self._chunk(self._part(choice, piece) | more))
            if choice.reason is not None:
                found.append(self._chunk(self._part(choice, None) | self._completion.record_of(choice)))
        return found

    def end(self) -> list[str]:
        """Returns the chunks at the end of a stream: the usage, if requested, and "[DONE]"."""
        last = self._object(self.kind_of_chunk, []) | {"usage": self._completion.usage()}
        return [*([event(last)] if self._completion.asked.include_usage else []), "data: [DONE]"]

    def fail(self, error: Refused) -> list[str]:
        """Returns the event of an error, which ends the stream."""
        return [event(error.body())]

    def _chunk(self, choice: Json) -> str:
        usage = {"usage": None} if self._completion.asked.include_usage else {}
        return event(self._object(self.kind_of_chunk, [choice]) | usage)

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _choice(self, choice: Choice, text: str, pieces: list[Piece]) -> Json:
        scored = self._completion.asked.logprobs is not None and pieces
        log_probs = self._log_probs(choice, pieces) if scored else None
        return {"index": choice.index, "text": text, "logprobs": log_probs, "finish_reason": choice.reason}

    def _part(self, choice: Choice, piece: Piece | None) -> Json:
        return self._choice(choice, piece.text if piece else "", [piece] if piece else [])

    def _log_probs(self, choice: Choice, pieces: list[Piece]) -> Json:
        """Returns the log-probabilities of pieces in the form of completions.

        Text that belongs to no token is appended to the text of the previous token.
        """
        tokens, values, offsets = list[str](), list[float](), list[int]()
        for piece in pieces:
            if piece.token is None and tokens:
                tokens[-1] += piece.text
            elif piece.token is not None:
                tokens.append(piece.text)
                values.append(max(piece.log_prob, LEAST_LOG_PROB))
                offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(piece.text)
        is_best = self._completion.asked.logprobs == 1
        top = [{text: value} for text, value in zip(tokens, values, strict=True)] if is_best else None
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


class Chats(Completions):
    """Chat completions: the answer is a message of the assistant; a stream begins with the role."""

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self) -> list[str]:
        """Returns a chunk with the role for each choice."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk({"index": choice.index, **role}) for choice in self._completion.choices]

    def _choice(self, choice: Choice, text: str, pieces: list[Piece]) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        return {"index": choice.index, "message": message, "logprobs": None, "finish_reason": choice.reason}

    def _part(self, choice: Choice, piece: Piece | None) -> Json:
        delta = {"content": piece.text} if piece else {}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": choice.reason}


class Responses:
    """Response objects with one answer, which is the only part of the only output message."""

    def __init__(self, completion: Completion, *, model: str, fingerprint: object) -> None:
        self._completion, self._model = completion, model
        self._id, self._item_id = f"resp_{secrets.token_hex(24)}", f"msg_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._number = 0  # the number of the next event

    def whole(self) -> Json:
        """Returns the response object in its current state; `output` is empty until the answer is complete."""
        (choice,), asked = self._completion.choices, self._completion.asked
        is_over, usage = choice.reason is not None, self._completion.usage()
        is_cut = choice.reason == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if is_over and not is_cut else None,
            "status": self._status(),
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": None,
            "metadata": {},
            "model": self._model,
            "output": [self._item()] if is_over else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": asked.sampling.temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": asked.sampling.top_p,
            **asked.echoed,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
                **{name: count for name, count in usage.items() if name == "cut_tokens"},
            }
            if is_over
            else None,
        }

    def begin(self) -> list[str]:
        """Returns the events that create the response and its message."""
        item = self._item() | {"status": "in_progress", "content": []}
        return [
            self._event("response.created", response=self.whole()),
            self._event("response.in_progress", response=self.whole()),
            self._event("response.output_item.added", output_index=0, item=item),
            self._part("response.content_part.added", part=self._text("")),
        ]

    def add(self, added: Sequence[tuple[Choice, list[Piece]]]) -> list[str]:
        """Returns the events for new pieces; pieces without text have no event."""
        texts = [piece.text for _, pieces in added for piece in pieces if piece.text]
        return [self._part("response.output_text.delta", delta=text, logprobs=[]) for text in texts]

    def end(self) -> list[str]:
        """Returns the events that complete the text, the message and the response."""
        text = self._completion.text_of(self._completion.choices[0])
        return [
            self._part("response.output_text.done", text=text, logprobs=[]),
            self._part("response.content_part.done", part=self._text(text)),
            self._event("response.output_item.done", output_index=0, item=self._item()),
            self._event(f"response.{self._status()}", response=self.whole()),
        ]

    def fail(self, error: Refused) -> list[str]:
        """Returns the error event.

        The event has the error twice, because some clients read the event's fields, and others read `error`.
        """
        found = error.body()["error"]
        return [self._event("error", code=error.code, message=error.message, param=error.field, error=found)]

    def _status(self) -> str:
        reason = self._completion.choices[0].reason
        return "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"

    def _item(self) -> Json:
        content = [self._text(self._completion.text_of(self._completion.choices[0]))]
        item: Json = {"id": self._item_id, "type": "message", "role": "assistant"}
        return item | {"status": self._status(), "content": content}

    def _text(self, text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _part(self, kind: str, **more: object) -> str:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: object) -> str:
        number, self._number = self._number, self._number + 1
        return f"event: {kind}\n" + event({"type": kind, "sequence_number": number, **more})


Objects = Completions | Responses


def event(content: object) -> str:
    """Returns a server-sent event with JSON data."""
    return f"data: {dump(content)}"


def dump(content: object) -> str:
    """Returns JSON in one line.

    Raises:
      ValueError: a number is not finite.
    """
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
