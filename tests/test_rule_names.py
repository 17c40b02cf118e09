"""Rules of users: named by `decode.rules`, and checked by `pipejax.testing.check_rule`."""

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax
from pipejax import checkpoint, testing
from pipejax import config as config_lib
from pipejax.apps.export.programs_as_files import export
from pipejax.apps.serving.answer import Request
from pipejax.apps.serving.engine import Engine
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding import FORBIDDEN, Queries, Rule
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source
from pipejax.offline.decode_command import main as decode
from pipejax.system.errors import UserError
from support import oracle
from support.tiny import MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")
slow = pytest.mark.slow
HERE = __name__
EOS = 1


@flax.struct.dataclass
class Growing(Rule):
    """Allows only tokens that are not lower than the last token of the row, and end tokens."""

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        """See `Rule`."""
        known = jnp.arange(queries.prefix.shape[1]) < queries.length[:, None]
        last = jnp.where(known, queries.prefix, 0).max(axis=1)
        ids = jnp.arange(logits.shape[0])[:, None]
        return jnp.where((ids >= last) | (ids == EOS), logits, FORBIDDEN)


@flax.struct.dataclass
class Table(Rule):
    """Adds a constant for each token, which depends on the tokenizer and the end token."""

    shared: ClassVar[tuple[str, ...]] = ("bonus",)
    bonus: Any
    scale: float = 2.0

    @classmethod
    def create(cls, strategy: Any, tokenizer: Any) -> "Table":
        """See `Rule`."""
        word = tokenizer.encode("the")[0]
        return cls(np.where(np.arange(64) == strategy.eos, -1.0, (np.arange(64) + word) % 7).astype(np.float32))

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        """See `Rule`."""
        return logits + self.scale * self.bonus[: logits.shape[0], None]


@flax.struct.dataclass
class Counting(Rule):
    """Lowers the logit of an end token by the number of odd tokens of the row, which is its state."""

    def init(self, batch: int, rows: int) -> Any:
        """See `Rule`."""
        return jnp.zeros((batch, rows), jnp.int32)

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        """See `Rule`."""
        return logits.at[EOS].add(-1.0 * queries.pick(state))

    def follow(self, state: Any, tokens: jax.Array, queries: Queries) -> Any:
        """See `Rule`."""
        return queries.put(state, queries.pick(state) + tokens % 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=slow) for kind in (Growing, Table)), Counting])
def test_a_rule_that_follows_the_interface_passes(kind: type[Rule]) -> None:
    line = testing.check_rule(kind, sources=4)
    assert re.fullmatch(rf"{kind.__name__}: \d+ answers agree with recomputation", line)


@flax.struct.dataclass
class Wrong(Rule):
    """Breaks one part of the interface, which a subclass names."""

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        """See `Rule`."""
        changed: jax.Array = self.wrong(logits, queries)
        return changed

    def wrong(self, logits: jax.Array, queries: Queries) -> Any:
        """The wrong logits."""
        raise NotImplementedError


CALLS = list[int]()


def counted(logits: jax.Array) -> jax.Array:
    CALLS.append(1)
    return logits + 0.1 * len(CALLS)


def wrong(change: Any) -> type[Rule]:
    made: Any = flax.struct.dataclass(type("Broken", (Wrong,), {"wrong": lambda self, x, queries: change(x, queries)}))
    found: type[Rule] = made
    return found


@pytest.mark.parametrize(
    "change, line",
    [
        (
            lambda x, q: x.T,
            r"Broken.apply: found float32\[24, 64\]; expected float32\[64, 24\], the logits that it was",
        ),
        (lambda x, q: x.astype(jnp.bfloat16), r"Broken.apply: found bfloat16\[64, 24\]; expected float32\[64, 24\]"),
        (lambda x, q: x.at[3].set(jnp.nan), "Broken.apply: found NaN or infinity; expected numbers, or FORBIDDEN"),
        (lambda x, q: x.at[3].set(jnp.inf), "Broken.apply: found NaN or infinity; expected numbers, or FORBIDDEN"),
        (
            lambda x, q: jnp.full_like(x, FORBIDDEN),
            "Broken.apply: found no allowed token for a query; expected at least",
        ),
        (lambda x, q: counted(x), "Broken.apply: found other logits in a second call; expected the same logits"),
        (lambda x, q: x + np.random.default_rng().random(), "Broken.apply: found other logits in a second call"),
        (lambda x, q: x + q.prefix.sum(axis=1), "Broken.apply: found other logits with tokens that no query sees"),
        (lambda x, q: x + q.above.sum(axis=(1, 2)), "Broken.apply: found other logits with tokens that no query sees"),
        (lambda x, q: x + q.example, "Broken.apply: found other logits for other numbers of the examples"),
        (lambda x, q: x + q.prefix[0, 0], "Broken.apply: found other logits in another order of the queries"),
        (lambda x, q: x - x.max(), "Broken.apply: found other logits beside other queries; expected the same logits"),
        (lambda x, q: jnp.asarray(np.asarray(x)), "Broken.apply: found TracerArrayConversionError under jax.jit: "),
    ],
)
def test_a_rule_that_breaks_the_interface_is_refused(change: Any, line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        testing.check_rule(wrong(change), sources=1)
    assert "\n" not in str(error.value)


@flax.struct.dataclass
class PerExample(Rule):
    """Has an array that all examples share, and does not say so."""

    scale: Any = dataclasses.field(default_factory=lambda: np.ones(3))


class NoTree(Rule):
    """Is not a pytree of arrays."""


@pytest.mark.parametrize(
    "kind, line",
    [
        (
            PerExample,
            "PerExample.scale: found an array without an entry for each example; expected a",
        ),
        (
            NoTree,
            "rule: found NoTree, which is not a pytree of arrays; expected a subclass of pipejax.decoding.Rule that",
        ),
        (dict, "rule: found <class 'dict'>; expected a subclass of pipejax.decoding.Rule that is a flax.struct"),
    ],
)
def test_a_class_that_is_no_rule_is_refused(kind: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        testing.check_rule(kind)


# By name.


def generator(**decode: Any) -> Generator:
    params = oracle.random_params(MORE_WORDS, np.random.default_rng(4), eos_scale=1.1)
    settings = DecodeConfig(max_length=12, **decode)
    config = Config(model=MORE_WORDS, grid=GridConfig(time_max=10, sub_max=4), decode=settings)
    return Generator(config, params, None)


SOURCES = [[5, 6, 7, 1], [2, 9, 4, 4, 1], [11, 3, 1], [8, 8, 2, 1]]
GROWS = f"{HERE}:Growing"


def grows(rows: list[list[int]]) -> bool:
    return all(row == sorted(row) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sequential", pytest.param("pipelined", marks=slow)])
def test_a_named_rule_changes_all_ways_of_decoding(strategy: str) -> None:
    made = generator()
    free, ruled = (made.decode(SOURCES, method=strategy, rules=names) for names in ("", GROWS))
    assert all(grows(one["row_ids"]) for one in ruled) and not all(grows(one["row_ids"]) for one in free)
    drafted = made.decode(SOURCES, method=strategy, rules=[GROWS, GROWS], draft="source")
    assert [one["row_ids"] for one in drafted] == [one["row_ids"] for one in ruled]
    *_, last = made.stream_rows(SOURCES[0], method=strategy, rules=GROWS)
    assert isinstance(last, dict) and last["row_ids"] == ruled[0]["row_ids"]
    sampled = made.decode(SOURCES, method=strategy, rules=GROWS, temperature=2.0, no_repeat_ngram_size=1, samples=3)
    assert all(grows(one["row_ids"]) and len({*row}) == len(row) for one in sampled for row in one["row_ids"])


def test_a_server_follows_the_rules_of_its_start() -> None:
    served = generator(rules=GROWS)
    engine = Engine(served, places=2, queue=9)
    answers = [engine.submit(Request(Source(i, ids), "pipelined")) for i, ids in enumerate(SOURCES)]
    found: list[Any] = [[*answer.events()][-1] for answer in answers]
    engine.close(drain=True, seconds=60)
    expected = served.decode(SOURCES, method="pipelined")
    assert [one["row_ids"] for one in found] == [one["row_ids"] for one in expected]
    assert all(grows(one["row_ids"]) for one in found)


def test_a_rule_with_a_state_is_refused_with_drafts() -> None:
    with pytest.raises(
        UserError, match=r"Counting\.init: found a state, and several queries of a row in a step; expected no drafts"
    ):
        generator(rules=f"{HERE}:Counting").decode(SOURCES[:1], method="pipelined", draft="source")


@pytest.mark.parametrize(
    "name, line",
    [
        ("nowhere_at_all:X", r"decode.rules: found 'nowhere_at_all:X', which cannot be imported \(ModuleNotFoundError"),
        (f"{HERE}:Nothing", r"decode.rules: found '.*:Nothing', which cannot be imported \(AttributeError"),
        (
            "pipejax.config:GridConfig",
            "decode.rules: found 'pipejax.config:GridConfig', which is not a subclass of Rule",
        ),
        ("pipejax.decoding:Allowed", r"decode.rules: found Allowed, which cannot be created \(TypeError: "),
    ],
)
def test_wrong_name_raises_one_line(name: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        generator().decode(SOURCES[:1], rules=name)
    assert "\n" not in str(error.value)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The rule of the page, in a module that is not imported yet."""
    text = (Path(__file__).parent.parent / "docs" / "methods.md").read_text()
    code = next(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "OtherBeginnings" in code)
    (tmp_path / "beginnings.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "beginnings", raising=False)
    importlib.invalidate_caches()
    return "beginnings:OtherBeginnings"


@slow
def test_the_rule_of_the_page_passes_its_check(page: str) -> None:
    module, _, name = page.partition(":")
    assert "agree" in testing.check_rule(getattr(importlib.import_module(module), name), sources=4)


def test_the_rule_of_the_page_changes_answers(page: str) -> None:
    made = generator()
    free, ruled = (made.decode(SOURCES, method="pipelined", rules=names) for names in ("", page))
    assert [one["row_ids"] for one in free] != [one["row_ids"] for one in ruled]


def test_opening_a_run_imports_no_rule(page: str, tmp_path: Path) -> None:
    """The rule is imported if the command names it; otherwise decoding refuses the run."""
    config = dataclasses.replace(generator().config, train=TrainConfig(method="pipelined"))
    named = dataclasses.replace(config, decode=dataclasses.replace(config.decode, rules=page))
    params = oracle.random_params(MORE_WORDS, np.random.default_rng(4), eos_scale=1.1)
    checkpoint.save_params(tmp_path / "run", named, params)
    run = pipejax.load(tmp_path / "run")
    with pytest.raises(UserError, match=f"^decode.rules: found {page}, which the config of this checkpoint names; "):
        run.decode(SOURCES[:1])
    assert "beginnings" not in sys.modules
    left_out = pipejax.load(tmp_path / "run", overrides={"decode.rules": ""}).decode(SOURCES)
    assert "beginnings" not in sys.modules
    with pytest.raises(UserError, match=f"^decode.rules: found {page}; expected none, the only value that an export"):
        export(tmp_path / "run", tmp_path / "exported", platforms=["cpu"])
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"source_ids": ids}) + "\n" for ids in SOURCES))
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert decode(["--checkpoint", str(tmp_path / "run"), *files, "--set", f"decode.rules={page}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = generator().decode(SOURCES, method="pipelined", rules=page)
    assert [one["row_ids"] for one in lines] == [one["row_ids"] for one in expected]
    assert [one["row_ids"] for one in lines] != [one["row_ids"] for one in left_out]


def test_a_config_file_names_rules(page: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"from pipejax.config import *\nconfig = Config(decode=DecodeConfig(rules=('{page}',)))\n")
    found = config_lib.load(file)
    assert found.decode.rule_names == (page,) and "beginnings" in sys.modules
    assert config_lib.override(Config(), [f"decode.rules={page}, {page}"]).decode.rule_names == (page, page)
