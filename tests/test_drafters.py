"""Drafters of a user: named in a config, with parameters and the encoder's outputs, and checked where they enter."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax
from pipejax import checkpoint, decoding
from pipejax import config as config_lib
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding import Pipelined, drafters
from pipejax.decoding.drafters import Draft, FromSource, Jacobi, Setting
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.drafter_parameters import OpenDrafter
from pipejax.inference.generator import Generator
from pipejax.inference.programs import Reading, encode_batch, peak_bytes
from pipejax.kernels import cpu_kernel
from pipejax.kernels.backends import OwnKernel
from pipejax.testing import check_drafter
from support import oracle
from support.batches import padded, sources
from support.foreign_drafters import Ranked, RankedOnce
from support.refusals import refuses
from support.tiny import IN_BLOCKS, MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")

NAME = "support.foreign_drafters"
ROOT = Path(__file__).parents[1]


def vector(width: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(width).astype(np.float32)


def check_outputs(backend: Any) -> None:
    """Compares the encoder's outputs for sources of several lengths with NumPy."""
    rng = np.random.default_rng(2)
    params, texts = oracle.random_params(IN_BLOCKS, rng), sources(rng, 5, IN_BLOCKS.vocab_size)
    model, given = IN_BLOCKS.module(), [jnp.asarray(x) for x in padded(texts)]
    ready = backend.prepare(model, jax.tree.map(jnp.asarray, params))
    memory: Any = encode_batch(model, ready.encoding, *given, backend=backend, outputs=True)
    assert memory.encoded.shape == (5, 16, IN_BLOCKS.d_model)
    for text, found in zip(texts, memory.encoded, strict=True):
        np.testing.assert_allclose(found[: len(text)], oracle.encode(params, IN_BLOCKS, text), atol=2e-5)
    assert encode_batch(model, ready.encoding, *given, backend=backend).encoded is None


@pytest.mark.parametrize("backend", [XLA, Backend()], ids=["XLA", "layers"])
def test_outputs_of_the_encoder_equal_numpy(backend: Any) -> None:
    check_outputs(backend)


def test_outputs_of_the_encoder_in_the_kernel_equal_numpy(kernel: cpu_kernel.Level) -> None:
    check_outputs(OwnKernel("auto", kernel))


def opened(drafter: Any, **decode: Any) -> Generator:
    """A generator of random weights with the drafter."""
    config = Config(
        model=MORE_WORDS,
        grid=GridConfig(delay=1, time_max=14, sub_max=4),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(max_length=14, draft_tokens=3, **decode),
    )
    params = oracle.random_params(MORE_WORDS, np.random.default_rng(4))
    own = {"vector": jnp.asarray(vector(MORE_WORDS.d_model))}
    return Generator(config, params, None, drafter=drafter and OpenDrafter(drafter, params=own))


def count_drafts(given: list[list[int]], records: Sequence[Any]) -> int:
    """Checks that drafts are the tokens in the order of their scores, computed in NumPy; returns their number."""
    params = oracle.random_params(MORE_WORDS, np.random.default_rng(4))
    seen = 0
    for text, record in zip(given, records, strict=True):
        scores = oracle.encode(params, MORE_WORDS, text) @ vector(MORE_WORDS.d_model)
        best = [text[i] for i in np.argsort(-scores)]
        tokens = [best[i % len(best)] for i in range(8)]
        length = [0] * 4
        for call in record["trace"]:
            for row, written, _, drafted in call:
                assert drafted == [tokens[(row + length[row] + k) % 8] for k in range(len(drafted))]
                length[row] += written
                seen += len(drafted)
    return seen


def test_a_drafter_reads_parameters_and_outputs_of_the_encoder() -> None:
    drafting = opened(Ranked(), trace=True)
    rng = np.random.default_rng(5)
    given = [[*rng.permutation(np.arange(2, 12))[: rng.integers(3, 9)].tolist(), 1] for _ in range(6)]
    assert count_drafts(given, drafting.decode(given, drafter=Ranked(odds=(0.98,)), batch_size=1)) > 20


@pytest.mark.slow
def test_new_weights_keep_the_parameters_of_the_drafter() -> None:
    """Evaluations in a training change the weights, and free them in between."""
    drafting, given = opened(Ranked(), draft=f"{NAME}:Ranked", draft_checkpoint="given"), [[5, 9, 4, 1], [7, 2, 11, 1]]
    before = drafting.decode(given)
    drafting.programs.forget_params()
    drafting.programs.set_params(oracle.random_params(MORE_WORDS, np.random.default_rng(4)))
    assert drafting.decode(given) == before


@dataclasses.dataclass(frozen=True)
class Whole(Ranked):
    """A `Ranked` with a number for each token of the source."""

    def read(self, source: Any) -> jax.Array:
        """i32 [B, L], the ids of the source."""
        return source.ids

    def widen(self, source: Any, slots: int) -> jax.Array:
        """Pads the ids."""
        return jnp.pad(source.memory, ((0, 0), (0, slots - source.memory.shape[1])))

    def init(self, source: Any, rows: int) -> Any:
        """No state."""
        return ()

    def propose(self, state: Any, written: Any, most: int) -> Any:
        """The first tokens of the source."""
        tokens = jnp.broadcast_to(written.source.memory[:, None, :most], (*written.length.shape, most))
        return state, Draft(tokens, jnp.full_like(written.length, most), jnp.zeros_like(written.length))


@pytest.mark.slow
def test_input_of_a_drafter_has_the_length_of_the_memory() -> None:
    """Sources of 40 and 60 tokens are padded to other lengths, and their memories to the same length."""
    drafting, plain = opened(Whole(), draft=f"{__name__}:Whole", draft_checkpoint="given"), opened(None)
    rng = np.random.default_rng(5)
    given = [[*rng.integers(2, 12, length).tolist(), 1] for length in (40, 60, 100)]
    expected = [record["row_ids"] for record in plain.decode(given, batch_size=1)]
    streamed: list[Any] = [list(drafting.stream_rows(ids))[-1] for ids in given]
    for answers in (streamed, drafting.decode(given, batch_size=1)):
        assert [record["row_ids"] for record in answers] == expected


@pytest.mark.slow
def test_a_drafter_that_reads_the_encoder_is_warmed_up() -> None:
    """The warm-up has a length below the length of its memory."""
    drafting = opened(Ranked(), draft=f"{NAME}:Ranked", draft_checkpoint="given")
    drafting.warm_up([40], batch_sizes=(1,))
    compiled = len(drafting.programs._compiled)
    drafting.decode([[*[5, 9] * 19, 1]])
    assert len(drafting.programs._compiled) == compiled > 1


@dataclasses.dataclass(frozen=True)
class Again(Jacobi):
    """Drafts the token with the highest logit by the decoder's outputs, which is the newest token."""

    odds: tuple[float, ...] = (0.98,)
    wants: ClassVar[frozenset[str]] = frozenset({"parameters", "hidden"})

    def propose(self, state: Any, written: Any, most: int) -> Any:
        newest = (written.hidden @ written.source.parameters["head"]).argmax(axis=2).astype(jnp.int32)
        tokens = jnp.broadcast_to(newest[:, :, None], (*newest.shape, most))
        return state, Draft(tokens, jnp.where(written.length > 0, 1, 0), jnp.zeros_like(newest))


def check_hidden(backend: Any) -> None:
    """Checks in a batch, after accepted and rejected drafts, that the drafted token is the newest token of its row."""
    config = Config(
        model=IN_BLOCKS,
        grid=GridConfig(delay=1, time_max=12, sub_max=3),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(draft_tokens=2, trace=True),
    )
    params = oracle.random_params(IN_BLOCKS, np.random.default_rng(4))
    head = params["shared"]["embedding"].T if IN_BLOCKS.tied_head else params["lm_head"]["kernel"]
    drafter = OpenDrafter(Again(), params={"head": jnp.asarray(head)})
    generator = Generator(config, params, None, backend=backend, drafter=drafter)
    rng = np.random.default_rng(5)
    given = [[*rng.integers(2, 48, 9).tolist(), 1] for _ in range(4)]
    plain = Generator(config, params, None, backend=backend)
    plain.config = dataclasses.replace(config, decode=DecodeConfig())
    expected = plain.decode(given, batch_size=2)
    seen = 0
    for record, other in zip(generator.decode(given, drafter=Again(), batch_size=2), expected, strict=True):
        assert record["row_ids"] == other["row_ids"]
        rows, length = [[*ids, 1] for ids in record["row_ids"]], dict[int, int]()
        for call in record["trace"]:
            for row, written, _, drafted in call:
                if drafted:
                    assert drafted == [rows[row][length[row] - 1]]
                    seen += 1
                length[row] = length.get(row, 0) + written
    assert seen > 10


@pytest.mark.parametrize("backend", [XLA, pytest.param(Backend(), marks=pytest.mark.slow)], ids=["XLA", "layers"])
def test_decoder_outputs_of_a_drafter_belong_to_the_newest_tokens(backend: Any) -> None:
    check_hidden(backend)


@pytest.mark.slow
def test_decoder_outputs_of_the_kernel_belong_to_the_newest_tokens(kernel: cpu_kernel.Level) -> None:
    check_hidden(OwnKernel("auto", kernel))


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [pytest.param(Ranked(), marks=pytest.mark.long, id="init"), pytest.param(RankedOnce(), id="read")],
)
def test_check_drafter_accepts_drafters_with_parameters(drafter: Any) -> None:
    """It decodes offline, in batches, and in a running batch with changing sources."""
    line = check_drafter(drafter, parameters={"vector": jnp.asarray(vector(16))}, sources=4)
    assert re.fullmatch(rf"{type(drafter).__name__}: \d+ answers do not change; \d+ calls for \d+ steps", line)


@dataclasses.dataclass(frozen=True)
class Wild(Jacobi):
    """Drafts numbers that are no token ids, in any number and with any trust."""

    def propose(self, state: Any, written: Any, most: int) -> Any:
        state, draft = super().propose(state, written, most)
        places = jnp.arange(most) + written.length[:, :, None]
        tokens = jnp.where(places % 3 == 1, 10**6, jnp.where(places % 3 == 2, -7, draft.tokens))
        return state, Draft(tokens, draft.count * 9 - 5, draft.trust + written.length % 3 - 1)


@pytest.mark.slow
def test_drafts_outside_the_vocabulary_change_no_answer() -> None:
    check_drafter(Wild(), sources=4)


def broken(**members: Any) -> Any:
    """A drafter with other members than `FromSource`."""
    kind: Any = dataclasses.dataclass(frozen=True)(type("Broken", (FromSource,), members))
    return kind()


replaced: Any = dataclasses.replace


def proposes(change: Any) -> Any:
    """A drafter whose draft is changed."""

    def propose(self: Any, state: Any, written: Any, most: int) -> Any:
        return change(*FromSource.propose(self, state, written, most))

    return broken(propose=propose)


@pytest.mark.parametrize(
    "drafter, place, found, expected",
    [
        (FromSource, "drafter", "FromSource", "an object of a frozen dataclass"),
        (object(), "drafter", "object", "an object of a frozen dataclass"),
        (broken(init=None), "Broken.init", "no such method", "Drafter"),
        (FromSource(odds=0.5), "FromSource.odds", "0.5", "a tuple of probabilities"),  # type: ignore[arg-type]
        (FromSource(odds=()), "FromSource.odds", "()", "a tuple of probabilities"),
        (FromSource(odds=(1.5,)), "FromSource.odds", "1.5", "between 0 and 1"),
        (broken(wants="encoded"), "Broken.wants", "'encoded'", "a set"),
        (broken(wants={"memory"}), "Broken.wants", "'memory'", "some of parameters, encoded"),
        (proposes(lambda state, draft: (state, draft.tokens)), "Broken.propose", "second result", "a Draft"),
        (
            proposes(lambda state, draft: (state, replaced(draft, tokens=draft.tokens[:, :, :1]))),
            "Broken.propose: tokens",
            "int32[8, 20, 1]",
            "int32[8, 20, 3]",
        ),
        (
            proposes(lambda state, draft: (state, replaced(draft, count=draft.count * 1.0))),
            "Broken.propose: count",
            "float32[8, 20]",
            "int32[8, 20]",
        ),
        (
            proposes(lambda state, draft: (state, replaced(draft, trust=draft.trust[:, 0]))),
            "Broken.propose: trust",
            "int32[8]",
            "int32[8, 20]",
        ),
        (
            proposes(lambda state, draft: (replaced(state, length=state.length.astype(float)), draft)),
            "Broken.propose: .length",
            "float32[8, 20]",
            "int32[8, 20], as before",
        ),
        (
            broken(init=lambda self, source, rows: replaced(FromSource.init(self, source, rows), length=jnp.int32(0))),
            "Broken.init: .length",
            "int32[]",
            "[8] as the first axis, the batch",
        ),
        (broken(read=lambda self, source: jnp.zeros(3)), "Broken.read: ", "float32[3]", "[8] as the first axis"),
    ],
)
def test_drafter_that_breaks_a_rule_raises_one_line(drafter: Any, place: str, found: str, expected: str) -> None:
    config = Config(model=MORE_WORDS, train=TrainConfig(method="pipelined"), decode=DecodeConfig(draft_tokens=3))
    generator = Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)
    with refuses(place, found=found, expected=expected):
        generator.decode([[5, 1]] * 8, drafter=drafter, batch_size=8)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint of random weights, and a directory with a vector."""
    config = Config(
        model=MORE_WORDS,
        grid=GridConfig(delay=2, time_max=14, sub_max=4),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(draft_tokens=3),
    )
    params = oracle.random_params(MORE_WORDS, np.random.default_rng(4))
    checkpoint.save_params(tmp_path / "run", config, params)
    np.save(tmp_path / "vector.npy", vector(MORE_WORDS.d_model))
    return tmp_path / "run"


def test_a_named_drafter_reads_its_checkpoint(run: Path) -> None:
    named = {"decode.draft": f"{NAME}:Ranked", "decode.draft_checkpoint": str(run.parent), "decode.trace": True}
    given = [[5, 9, 4, 1], [7, 2, 11, 1]]
    assert count_drafts(given, pipejax.load(run, overrides=named).decode(given)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Ranked", "RankedOnce"])
def test_a_named_drafter_is_opened_with_a_checkpoint(run: Path, kind: str) -> None:
    """Its parameters are read; records and streams equal those without drafts, and take fewer calls."""
    named = {"decode.draft": f"{NAME}:{kind}", "decode.draft_checkpoint": str(run.parent)}
    plain, drafting = pipejax.load(run), pipejax.load(run, overrides=named)
    rng = np.random.default_rng(8)
    given = [[*rng.integers(2, 12, rng.choice([3, 11])).tolist(), 1] for _ in range(4)]
    expected, found = plain.decode(given), drafting.decode(given)
    assert [{**record, "calls": 0} for record in found] == [{**record, "calls": 0} for record in expected]
    assert all(a["calls"] <= b["calls"] for a, b in zip(found, expected, strict=True))
    events, others = list(drafting.stream_rows(given[0])), list(plain.stream_rows(given[0]))
    assert events[:-1] == others[:-1]
    last: list[Any] = [events[-1], others[-1]]
    assert [{**record, "calls": 0} for record in last] == [{**expected[0], "calls": 0}] * 2
    other = drafting.decode(given, draft="source")
    assert [record["row_ids"] for record in other] == [record["row_ids"] for record in expected]


@pytest.mark.slow
def test_memory_of_drafted_programs_includes_the_encoder(run: Path) -> None:
    """The largest program of each kind is found in XLA's own analysis; programs of other strategies are left out."""
    named = {"decode.draft": f"{NAME}:RankedOnce", "decode.draft_checkpoint": str(run.parent)}
    generator = pipejax.load(run, overrides=named)
    long = [[*([5, 9] * 300), 1]]  # a source for which the encoder needs more memory than the decoder
    generator.decode(long)
    compiled: dict[Any, Any] = dict(generator.programs._compiled)
    needed = {key[0]: needs(program) for key, program in compiled.items()}
    assert "encoder with outputs" in needed and any(isinstance(part, Reading) for part in needed) and len(needed) == 3
    assert max(needed, key=needed.__getitem__) == "encoder with outputs"
    strategy = generator.make_strategy(generator.default_method)
    assert peak_bytes(generator.programs, strategy) == needed["encoder with outputs"]


def needs(program: Any) -> int:
    """The bytes of a compiled program."""
    sizes = program.memory_analysis()
    own = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return int(own - sizes.alias_size_in_bytes)


def test_names_of_drafters_that_cannot_be_used_raise_one_line(run: Path) -> None:
    def load(name: str, **more: Any) -> Any:
        return pipejax.load(run, overrides={"decode.draft": name, **more})

    with refuses("decode.draft", found="'souce'", expected="one of none, source, jacobi, model, spans or MODULE:CLASS"):
        load("souce")
    with refuses("decode.draft", found="cannot be imported", expected="MODULE:CLASS"):
        load("absent_module:Drafter")
    with refuses("decode.draft", found="not a Drafter that is a dataclass"):
        load(f"{NAME}:Written")
    with refuses("decode.draft", "vector.npy"):
        load(f"{NAME}:Ranked", **{"decode.draft_checkpoint": str(run)})
    with refuses("decode.draft", found="the drafter Ranked, which needs parameters", expected=f"{NAME}:Ranked when"):
        pipejax.load(run).decode([[5, 1]], drafter=Ranked())


@pytest.fixture
def named(run: Path) -> Path:
    """A run whose config names a drafter, with its module in the same folder."""
    config = config_lib.load(run / "config.json")
    config = dataclasses.replace(config, decode=dataclasses.replace(config.decode, draft="user_drafter:AsSource"))
    checkpoint.save_params(run.parent / "named", config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)))
    (run.parent / "user_drafter.py").write_text(
        "from pipejax.decoding.drafters import FromSource\n\n\nclass AsSource(FromSource):\n    pass\n"
    )
    return run.parent / "named"


def test_opening_a_run_does_not_import_the_drafter_that_it_names(named: Path) -> None:
    """The caller must import its module or name it."""
    with refuses("decode.draft", found="user_drafter:AsSource", expected="--set decode.draft=user_drafter:AsSource"):
        pipejax.load(named)
    assert "user_drafter" not in sys.modules


@pytest.mark.slow
def test_a_program_names_the_drafter_of_a_run_to_import_it(named: Path) -> None:
    program = (
        "import sys, pipejax\n"
        "t5 = pipejax.load('named', overrides=['decode.draft=user_drafter:AsSource'])\n"
        "print(t5.decode([[5, 6, 1]])[0]['calls'] > 0, pipejax.load('named').config.decode.draft)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=named.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == "True user_drafter:AsSource\n", found.stderr


@pytest.mark.slow
def test_drafters_of_the_page_are_opened_by_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are saved as files, as on the page, and change no answer."""
    page = (ROOT / "docs" / "drafting.md").read_text()
    codes = re.findall(r"^```python\n(import dataclasses\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rng = np.random.default_rng(1)
    given = [[*rng.integers(2, 12, 9).tolist(), 1] for _ in range(4)]
    expected = pipejax.load(run).decode(given)
    modules = {"as_above": "AsAbove", "ahead": "Ahead", "scored": "Scored"}
    names = [re.search(r"^class (\w+):", code, re.MULTILINE) for code in codes]
    assert [name and name[1] for name in names] == [*modules.values()]
    for (module, name), code in zip(modules.items(), codes, strict=True):
        (run.parent / f"{module}.py").write_text(code)
        overrides = {"decode.draft": f"{module}:{name}", "decode.draft_checkpoint": str(run.parent)}
        found = pipejax.load(run, overrides=overrides).decode(given)
        assert [record["row_ids"] for record in found] == [record["row_ids"] for record in expected]
        assert all(f'"{what}"' in page for what in drafters.WANTS)
        monkeypatch.delitem(sys.modules, module)


def test_former_name_of_query_counts_works() -> None:
    setting = Setting(Pipelined(delay=1, time_max=4, sub_max=2), 3, (2, 5))
    with pytest.warns(DeprecationWarning, match=r"Setting\.queries is now query_counts"):
        assert setting.queries == (2, 5)  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"decoding\.QUERIES is now pipejax\.decoding\.QUERY_COUNTS"):
        assert decoding.QUERIES is decoding.QUERY_COUNTS
