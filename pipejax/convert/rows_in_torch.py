"""Pipelined decoding for transformers: `model.generate(..., custom_generate=DIRECTORY, trust_remote_code=True)`.

Algorithm 1 of Huang et al., "Pipelined Decoder for Efficient Context-Aware Text Generation" (arXiv 2506.23431) writes
the rows of an answer in parallel. A new row starts every DELAY time-steps, and each step writes one token of each open
row. A token attends to the tokens of its row and of earlier rows up to its time. T5's relative distance between two
tokens is the difference of their positions, row + time.

This file needs only torch and transformers. `generate` returns the rows joined by SEPARATOR; with
`return_dict_in_generate=True` an object with `sequences`, `rows`, `steps` and `truncated`. Each setting below may also
be passed to `generate`, in lower case.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

DELAY = 1  # time-steps between the starts of two rows; 0: all of ROW_NAMES start at once
TIME_MAX = 50  # the most time-steps
SUB_MAX = 20  # the most rows
LITERAL = False  # the paper's stopping rule: stop as soon as all rows that have started have ended
UNIQUE = False  # drop a row that repeats an earlier one; two repeated rows in succession end the answer
ROW_NAMES: list[list[int]] = []  # token ids with which each row begins, in order; empty: rows are free
SEPARATOR: list[int] = []  # token ids between two rows in `sequences`

# Arguments of transformers' `generate`, with the values that have no effect here; other values are refused.
NEUTRAL = {
    **dict.fromkeys(("do_sample", "early_stopping", "output_scores", "output_logits", "output_attentions"), False),
    **dict.fromkeys(("output_hidden_states", "remove_invalid_values", "renormalize_logits", "synced_gpus"), False),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "temperature", "top_p", "typical_p"), 1),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("top_k",), 50),
}
USED = (  # arguments used here, or by transformers to find this file
    *("inputs", "input_ids", "attention_mask", "encoder_outputs", "generation_config", "return_dict_in_generate"),
    *("custom_generate", "trust_remote_code", "revision", "code_revision", "token", "cache_dir", "force_download"),
    *("local_files_only", "proxies", "subfolder", "use_cache", "transformers_version", "_from_model_config"),
    "labels",  # Seq2SeqTrainer passes on the labels of a batch; they do not affect answers
    # Settings of an `assistant_model`, which is not supported; Seq2SeqTrainer writes their defaults to
    # `generation_config`.
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind"),
)
OWN = ("max_length", "max_new_tokens", "bos_token_id")  # may have the model's values, which are for sequential decoding
IDS = ("decoder_start_token_id", "eos_token_id", "pad_token_id")


@dataclass
class PipelinedOutput(ModelOutput):  # type: ignore[misc]
    """The answers of a batch."""

    sequences: torch.Tensor | None = None  # i64 [B, N]: start, rows joined by the separator, the first end, padding
    rows: list[list[list[int]]] | None = None  # token ids of each row of each answer
    steps: list[int] | None = None  # time-steps of Algorithm 1
    truncated: list[str | None] | None = None  # the bound that cut an answer: "time_max" or "sub_max"


class Settings(NamedTuple):
    """The settings above; `generate` may get other values."""

    delay: int = DELAY
    time_max: int = TIME_MAX
    sub_max: int = SUB_MAX
    literal: bool = LITERAL
    unique: bool = UNIQUE
    row_names: list[list[int]] = ROW_NAMES
    separator: list[int] = SEPARATOR


class AnswerRows:
    """The rows of one answer. Row i starts at time i * delay with bos; its j-th token has the time i * delay + j."""

    def __init__(self, settings: Settings, bos: int, ends: list[int]) -> None:
        self.delay, self.time_max, self.sub_max, self.literal, self.unique, self.names, _ = settings
        self.bos, self.ends = bos, ends
        self.rows: list[list[int]] = []  # tokens; the last one is an end token if the row has ended
        self.open: list[int] = []  # the rows that the last query covered
        self.end_fed: set[int] = set()
        self.time = self.steps = 0
        self.complete = self.done = False  # complete: no further row starts

    def is_open(self, i: int) -> bool:
        """Returns whether a row has not ended."""
        return not self.rows[i] or self.rows[i][-1] not in self.ends

    def query(self) -> list[tuple[int, int, int]]:
        """Starts rows (lines 5-7), and returns row, time and token of each query of this step (line 8).

        The end token of a row is fed once, at its own time, together with the next token of a later row.
        """
        may_start = len(self.rows) < self.sub_max and (self.literal or not self.complete)
        if self.delay == 0 and not self.rows:
            self.rows = [[] for _ in self.names]
        elif self.delay and self.time % self.delay == 0 and may_start:
            self.rows.append([])
        self.open = [i for i in range(len(self.rows)) if self.is_open(i)]
        ended = [i for i in range(max(self.open)) if i not in self.open and i not in self.end_fed]
        self.end_fed.update(ended)
        open_ones = [(i, self.time, self.rows[i][-1] if self.rows[i] else self.bos) for i in self.open]
        return open_ones + [(i, i * self.delay + len(self.rows[i]), self.rows[i][-1]) for i in ended]

    def advance(self, tokens: list[int]) -> None:
        """Adds a token to each open row (lines 9-11), and checks whether the answer is complete (lines 12-13)."""
        for i, token in zip(self.open, tokens, strict=False):
            row, name = self.rows[i], self.names[i] if i < len(self.names) else []
            if len(row) < len(name):
                token = name[len(row)]
            elif self.names and i >= len(self.names):
                token = self.ends[0]  # all named rows exist
            row.append(token)
        self.time += 1
        is_empty = any(len(row) == 1 and row[0] in self.ends for row in self.rows)
        self.complete |= is_empty or (self.unique and not self.literal and self.runs_in_circles())
        may_go_on = not (self.literal or self.complete or self.delay == 0 or len(self.rows) == self.sub_max)
        is_open = any(map(self.is_open, range(len(self.rows))))
        self.done = not is_open and not may_go_on
        if not is_open and not self.done:  # the time skips to the next start: no decoder is needed without an open row
            self.time = min(-(-self.time // self.delay) * self.delay, self.time_max)
        self.steps, self.done = self.time, self.done or self.time == self.time_max

    def runs_in_circles(self) -> bool:
        """Returns whether two successive rows have ended, each with the same tokens as an earlier row."""
        ended = [None if self.is_open(i) else row[:-1] for i, row in enumerate(self.rows)]
        repeated = [row is not None and row in ended[:i] for i, row in enumerate(ended)]
        return any(first and second for first, second in itertools.pairwise(repeated))

    def result(self) -> list[list[int]]:
        """Returns the rows without end tokens (line 14), without empty rows and, if `unique`, without repeated rows."""
        rows = [[token for token in row if token not in self.ends] for row in self.rows]
        return [row for i, row in enumerate(rows) if row and not (self.unique and row in rows[:i])]

    def truncated(self) -> str | None:
        """Returns the limit that cut the answer, or None."""
        if any(map(self.is_open, range(len(self.rows)))):
            return "time_max"
        if self.complete or self.delay == 0:
            return None
        if len(self.rows) == self.sub_max:
            return "sub_max"
        return None if self.literal else "time_max"


class CachedDecoder:
    """T5's decoder with a cache of keys and values; each token that is fed occupies one slot."""

    def __init__(self, model: PreTrainedModel, memory: torch.Tensor, memory_mask: torch.Tensor) -> None:
        self.model, self.blocks = model, model.get_decoder().block
        self.memory_bias = torch.where(memory_mask.bool(), 0.0, -math.inf)[:, None, None]
        crosses = [block.layer[1].EncDecAttention for block in self.blocks]
        self.memories = [(self._heads(x.k(memory), x), self._heads(x.v(memory), x)) for x in crosses]
        self.caches: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(self.blocks)
        none = torch.zeros(len(memory), 0, dtype=torch.long, device=memory.device)
        self.row, self.time = none, none  # row and time of each slot

    def __call__(self, asked: list[list[tuple[int, int, int]]]) -> torch.Tensor:
        """Feeds rows, times and tokens of each example; returns the most likely next tokens, i64 [B, Q]."""
        width = max(map(len, asked))
        # Row -1 is padding, which no token attends to.
        padded = [queries + [(-1, -1, 0)] * (width - len(queries)) for queries in asked]
        row, time, tokens = torch.tensor(padded, device=self.row.device).unbind(-1)
        self.row, self.time = torch.cat([self.row, row], 1), torch.cat([self.time, time], 1)
        key_row, key_time = self.row[:, None], self.time[:, None]
        visible = (key_row <= row[..., None]) & (key_time <= time[..., None]) & ((key_row >= 0) | (row < 0)[..., None])
        distance = ((row + time)[..., None] - (key_row + key_time)).clamp(min=0)
        x = self.model.get_input_embeddings()(tokens)
        for i, block in enumerate(self.blocks):
            attention, norm = block.layer[0].SelfAttention, block.layer[0].layer_norm
            if hasattr(attention, "relative_attention_bias"):  # T5 has it in the first layer only, UMT5 in each layer
                bias = self._bias(attention, distance).masked_fill(~visible[:, None], -math.inf)
            y = norm(x)
            new = self._heads(attention.k(y), attention), self._heads(attention.v(y), attention)
            if (old := self.caches[i]) is not None:
                new = torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)
            self.caches[i] = new
            x = clamp(x + self._attend(attention, y, *new, bias))
            cross = block.layer[1].EncDecAttention
            x = clamp(x + self._attend(cross, block.layer[1].layer_norm(x), *self.memories[i], self.memory_bias))
            x = clamp(block.layer[2](x))
        x = self.model.get_decoder().final_layer_norm(x)
        config = self.model.config
        if getattr(config, "scale_decoder_outputs", config.tie_word_embeddings):
            x = x * config.d_model**-0.5
        return self.model.lm_head(x).argmax(-1)

    @staticmethod
    def _heads(x: torch.Tensor, attention: torch.nn.Module) -> torch.Tensor:
        """Returns x [B, N, H * K] as [B, H, N, K]."""
        return x.unflatten(-1, (attention.n_heads, -1)).transpose(1, 2)

    def _attend(
        self, attention: torch.nn.Module, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """Returns the attended values of the states x [B, Q, D] over keys and values [B, H, C, K]."""
        # T5 does not divide the scores by the square root of the head size.
        scores = self._heads(attention.q(x), attention) @ keys.transpose(2, 3) + bias
        weights = scores.float().softmax(-1).to(values.dtype)
        return attention.o((weights @ values).transpose(1, 2).flatten(2))

    def _bias(self, attention: torch.nn.Module, distance: torch.Tensor) -> torch.Tensor:
        """Returns T5's learned bias of each distance backwards, [B, H, Q, C]; large distances share a bucket."""
        buckets = attention.relative_attention_num_buckets
        exact, most = buckets // 2, attention.relative_attention_max_distance
        share = torch.log(distance.clamp(min=1).float() / exact) / math.log(most / exact)
        far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
        found = torch.where(distance < exact, distance, far)
        return attention.relative_attention_bias(found).permute(0, 3, 1, 2)


def clamp(x: torch.Tensor) -> torch.Tensor:
    """Limits float16 values, in which T5 overflows; transformers does the same."""
    most = torch.finfo(x.dtype).max - 1000
    return x.clamp(-most, most) if x.dtype == torch.float16 else x


def asked_settings(model: PreTrainedModel, given: dict[str, Any]) -> tuple[Settings, dict[str, Any], bool]:
    """Returns the settings, the special ids, and `return_dict_in_generate`.

    Arguments take precedence over `generation_config`, which takes precedence over the model's own config.

    Raises:
      ValueError: an argument asks for something that is not supported here.
    """
    known, own, config = GenerationConfig().to_dict(), model.generation_config.to_dict(), given.get("generation_config")
    ids = {key: ids_of(key, getattr(model.config, key) if own.get(key) is None else own[key]) for key in IDS}
    asked = {key: value for key, value in own.items() if key in known}
    for more in (config.to_dict() if config else {}, given):
        asked |= {key: value for key, value in more.items() if value is not None}
    for key in [key for key in asked if key not in USED]:
        if key in Settings._fields:
            check_setting(key, asked[key])
            continue
        if key == "decoder_attention_mask" and "labels" in asked:  # the mask belongs to the labels
            continue
        if key == "decoder_input_ids" and is_start(asked[key], ids["decoder_start_token_id"]):
            continue
        value, neutral = ids_of(key, asked[key]) if key in IDS else asked[key], NEUTRAL | ids
        if isinstance(value, list) and isinstance(ids.get(key), list) and {*value} == {*ids[key]}:
            continue
        plain = [x for x in (neutral.get(key), known.get(key), own.get(key) if key in OWN else None) if x is not None]
        is_nothing = value is None or (isinstance(value, list | tuple | dict) and not value)
        # The pair distinguishes True from 1.
        is_plain = isinstance(value, bool | int | float | str) and [isinstance(value, bool), value]
        if not is_nothing and is_plain not in [[isinstance(x, bool), x] for x in plain]:
            expected = repr(plain[0]) if plain else f"nothing; the settings are {', '.join(Settings._fields)}"
            raise ValueError(
                f"{key}: found {value!r:.60}; expected {expected}: rows are written greedily, by Algorithm 1"
            )
    settings = Settings(**{key: asked[key] for key in Settings._fields if key in asked})
    if settings.delay == 0 and not settings.row_names:
        raise ValueError(
            "delay: found 0 without row_names; without them rows that start together cannot be distinguished"
        )
    return settings, ids, bool(asked.get("return_dict_in_generate"))


def ids_of(key: str, value: Any) -> Any:
    """Returns the id, or the single id of a list; for `eos_token_id` a list of several ids is returned unchanged.

    Raises:
      ValueError: the list does not have a single id.
    """
    if not isinstance(value, list) or (key == "eos_token_id" and len(value) > 1):
        return value
    if len(value) != 1:
        raise ValueError(f"{key}: found {value}; expected a single id")
    return value[0]


def is_start(tokens: Any, start: Any) -> bool:
    """Returns whether the tokens [B, N] are only the start token."""
    return torch.is_tensor(tokens) and tokens.shape[1:] == (1,) and bool((tokens == start).all())


def check_setting(key: str, value: Any) -> None:
    """Raises a ValueError unless the value of a setting has the right type and range."""
    kind, least = type(Settings._field_defaults[key]), int(key.endswith("_max"))
    fits = type(value) is kind and (kind is list or value >= least)
    if kind is list and fits:
        lists = value if key == "row_names" else [value]
        fits = all(isinstance(x, list) and all(type(i) is int for i in x) for x in lists)
    if not fits:
        expected = {bool: "True or False", int: f"a whole number from {least} on", list: "token ids in lists"}[kind]
        raise ValueError(f"{key}: found {value!r:.60}; expected {expected}")


@torch.no_grad()  # type: ignore[untyped-decorator]
def generate(
    model: PreTrainedModel, inputs: torch.Tensor | None = None, **given: Any
) -> torch.Tensor | PipelinedOutput:
    """Decodes the rows of each source greedily, by Algorithm 1.

    Args:
      model: a T5 or UMT5 of transformers.
      inputs: the source ids, i64 [B, L]; None: in `input_ids`.
      **given: arguments of transformers' `generate`, and the settings above in lower case.

    Returns:
      i64 [B, N], or a PipelinedOutput with `return_dict_in_generate=True`.

    Raises:
      ValueError: an argument is not supported.
    """
    settings, special, in_parts = asked_settings(model, given)
    bos, eos, pad = (special[key] for key in IDS)
    ends = eos if isinstance(eos, list) else [eos]
    ids, mask, encoded = given.get("input_ids"), given.get("attention_mask"), given.get("encoder_outputs")
    if (inputs is None) == (ids is None) and (encoded is None or ids is not None):
        raise ValueError("input_ids: found it twice or not at all; expected inputs, input_ids or encoder_outputs")
    ids = ids if inputs is None else inputs
    if mask is None and ids is not None and pad is not None and pad not in ends:  # as transformers infers the mask
        mask = ids != pad
    memory = model.get_encoder()(input_ids=ids, attention_mask=mask)[0] if encoded is None else encoded[0]
    mask = torch.ones(memory.shape[:2], device=memory.device) if mask is None else mask
    answers = [AnswerRows(settings, bos, ends) for _ in memory]
    decoder = CachedDecoder(model, memory, mask)
    while any(not answer.done for answer in answers):
        asked = [[] if answer.done else answer.query() for answer in answers]
        for answer, tokens in zip(answers, decoder(asked).tolist(), strict=True):
            if not answer.done:
                answer.advance(tokens)
    rows = [answer.result() for answer in answers]
    joined = [[bos, *join_rows(of_answer, settings.separator), ends[0]] for of_answer in rows]
    longest = max(map(len, joined))
    sequences = torch.tensor([x + [pad or 0] * (longest - len(x)) for x in joined], device=memory.device)
    if not in_parts:
        return sequences
    return PipelinedOutput(sequences, rows, [x.steps for x in answers], [x.truncated() for x in answers])


def join_rows(rows: list[list[int]], separator: list[int]) -> list[int]:
    """Returns the tokens of all rows, with the separator between rows."""
    return [token for i, row in enumerate(rows) for token in (separator if i else []) + row]
