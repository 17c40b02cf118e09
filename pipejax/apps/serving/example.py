"""The example prompt on the server's page."""

from pipejax.config import Config
from pipejax.data import make_task
from pipejax.data.encoding import encode_source
from pipejax.inference.generator import Generator
from pipejax.inference.sources import template_of
from pipejax.system.errors import UserError

TEXT = (
    "Anna repaired the red bicycle. It had stood at the old bridge since Monday, with a broken chain and a flat tyre. "
    "A new chain cost 12 euros, and her neighbour lent her a pump."
)
IDS = 8  # tokens of an example without a tokenizer

Prompt = str | list[int] | dict[str, str]


def example_of(generator: Generator) -> Prompt | None:
    """Returns a prompt in the model's template that is not truncated; None if the tokenizer cannot read the prompt.

    The built-in tasks provide a document. Other models get as many words of a few sentences as fit into a prompt: all
    these words in the last field of the template, and the first sentence in the other fields. Without a tokenizer the
    prompt is a list of token ids.
    """
    config, architecture = generator.config, generator.architecture
    most = config.data.max_source
    if generator.tokenizer is None:
        special = {*architecture.end_token_ids, architecture.pad_token_id}
        ids = [i for i in range(architecture.vocab_size) if i not in special][: min(IDS, most - 1)]
        return [*ids, architecture.end_token_ids[0]]
    text, template = _text_of(config), template_of(config)
    fields, words = [*dict.fromkeys(template.fields)], text.split()
    first = len(text.partition(". ")[0].split())
    for count in range(len(words), 0, -1):
        short, long = (" ".join(words[:n]) for n in (min(first, count), count))
        record = dict.fromkeys(fields, short) | {fields[-1]: long}
        prompt: Prompt = long if template.text == "{source}" else record
        try:
            source = generator.source(prompt, "example", 0)
            if not encode_source(source.content, config.data, generator.tokenizer, architecture).left_out:
                return prompt
        except UserError:
            return None
    return None


def _text_of(config: Config) -> str:
    if config.data.task in ("demo", "demo_long"):
        return make_task(config.data, config.grid.row_names).examples("test")[0].source
    return TEXT
