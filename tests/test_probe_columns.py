"""Probe columns change no answer, and a drafter gets the tokens that the model generates from them."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding.drafters import Draft, Jacobi, Probes
from pipejax.inference.backends import XLA
from pipejax.inference.generator import Generator
from pipejax.kernels.backends import OwnKernel
from pipejax.testing import check_drafter
from support import oracle
from support.refusals import refuses
from support.tiny import IN_BLOCKS

pytestmark = pytest.mark.usefixtures("compiled_once")

EOS = 1


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The drafter of the page, saved as on the page."""
    text = (Path(__file__).parents[1] / "docs" / "drafting.md").read_text(encoding="utf-8")
    module = types.ModuleType("ahead")
    monkeypatch.setitem(sys.modules, "ahead", module)  # required by dataclasses
    exec(text.split("as `ahead.py`", 1)[1].split("```python\n", 1)[1].split("```", 1)[0], vars(module))
    return module


def guesses(params: Any, encoded: np.ndarray, written: list[int], token: int, count: int) -> list[int]:
    """The tokens that the model generates from probes after a row, by a recomputation in plain Python."""
    fed = [0, *written, *[token] * count]
    places = range(len(fed))
    visible = [[k <= q for k in places] for q in places]
    logits = oracle.decoder_logits(
        params, IN_BLOCKS, encoded, fed, visible, [[abs(q - k) for k in places] for q in places]
    )
    return [int(np.argmax(line)) for line in logits[-count:]]


@pytest.mark.parametrize(
    "native", [pytest.param(False, marks=pytest.mark.slow, id="XLA"), pytest.param(True, id="kernel")]
)
def test_a_drafter_gets_the_tokens_of_its_probes(native: bool, page: Any, request: pytest.FixtureRequest) -> None:
    """The next draft has exactly these tokens, computed without the drafts that were fed with the probes."""
    backend = OwnKernel("auto", request.getfixturevalue("kernel")) if native else XLA
    params = oracle.random_params(IN_BLOCKS, np.random.default_rng(4))
    config = Config(
        model=IN_BLOCKS,
        train=TrainConfig(method="sequential"),
        decode=DecodeConfig(max_length=12, draft_tokens=2, trace=True),
    )
    generator, rng, compared = Generator(config, params, None, backend=backend), np.random.default_rng(5), 0
    given = [[*rng.integers(2, 48, 9).tolist(), EOS] for _ in range(4)]
    drafter = page.Ahead(odds=(0.98,), token=7)
    plain = Generator(dataclasses.replace(config, decode=DecodeConfig(max_length=12)), params, None, backend=backend)
    records = generator.decode(given, drafter=drafter, batch_size=2)
    for ids, record, expected in zip(given, records, plain.decode(given, batch_size=2), strict=True):
        assert record["row_ids"] == expected["row_ids"] and record["calls"] <= expected["calls"]
        encoded, row, length, before = oracle.encode(params, IN_BLOCKS, ids), expected["row_ids"][0], 0, list[int]()
        for ((_, gained, _, drafted),) in record["trace"]:
            assert drafted == before[: len(drafted)]
            compared += len(drafted)
            before = guesses(params, encoded, row[:length], drafter.token, drafter.probes)[gained - 1 :]
            length += gained
    assert compared > 8


@pytest.mark.slow
def test_probes_leave_room_for_drafts_as_long_as_an_answer(page: Any) -> None:
    config = Config(
        model=IN_BLOCKS,
        train=TrainConfig(method="sequential"),
        decode=DecodeConfig(max_length=6, draft_tokens=6, trace=True),
    )
    generator = Generator(config, oracle.random_params(IN_BLOCKS, np.random.default_rng(4)), None)
    (record,) = generator.decode([[5, 9, 7, EOS]], drafter=page.Ahead(odds=(0.98,)))
    assert record["steps"] > 1
    assert any(drafted for ((_, _, _, drafted),) in record["trace"])


@dataclasses.dataclass(frozen=True)
class Everywhere(Jacobi):
    """Feeds probes in all rows, including rows that have not begun or have ended, at all places; drafts at random."""

    probes: int = 3
    wants: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def propose(self, state: Any, written: Any, most: int) -> Any:
        _, draft = super().propose(None, written, most)
        kind = jnp.arange(self.probes)
        place = jnp.where(kind == 0, 0, written.length[:, :, None] + kind * 5 - 7)
        tokens = jnp.where(written.probed.fed, written.probed.tokens, 0 * place)
        probes = Probes(tokens + (written.probed.hidden.sum(axis=3) > 0), place, (place + kind) % 4 != 3)
        return state, Draft(draft.tokens, draft.count, draft.trust, probes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("page", marks=pytest.mark.long), "everywhere"])
def test_probes_change_no_answer(kind: str, page: Any) -> None:
    """All delays and stops are tested, in batches, alone and in a running batch with changing sources."""
    assert "answers do not change" in check_drafter(page.Ahead() if kind == "page" else Everywhere(), sources=4)


def broken(change: Any) -> Any:
    """A drafter whose probes are changed."""

    def propose(self: Any, state: Any, written: Any, most: int) -> Any:
        state, draft = Everywhere.propose(self, state, written, most)
        return state, dataclasses.replace(draft, probes=change(draft.probes))

    frozen: Any = dataclasses.dataclass(frozen=True)
    return frozen(type("Broken", (Everywhere,), {"propose": propose}))()


@pytest.mark.parametrize(
    "drafter, place, found, expected",
    [
        (Everywhere(probes=-1), "Everywhere.probes", "-1", "a number of columns"),
        (broken(lambda probes: None), "Broken.propose: probes", "None", "the 3 probes of each row"),
        (
            broken(lambda probes: dataclasses.replace(probes, tokens=probes.tokens[:, :, :1])),
            "Broken.propose: probes: tokens",
            "int32[2, 4, 1]",
            "int32[2, 4, 3]",
        ),
    ],
)
def test_wrong_probes_raise_one_line(drafter: Any, place: str, found: str, expected: str) -> None:
    config = Config(model=IN_BLOCKS, grid=GridConfig(time_max=12, sub_max=4), train=TrainConfig(method="pipelined"))
    generator = Generator(config, oracle.random_params(IN_BLOCKS, np.random.default_rng(4)), None)
    with refuses(place, found=found, expected=expected):
        generator.decode([[5, 1]] * 2, drafter=drafter, batch_size=2)
