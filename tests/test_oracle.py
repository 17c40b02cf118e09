"""The oracle is compared with facts by hand and with an independent T5."""

import types
from typing import Any

import numpy as np
import pytest

from support import oracle

A, B, C, D, E = 2, 3, 4, 5, 6
FIGURE_2 = [[A, B, C], [D, E]]


def scripted(targets: list[list[int]], **settings: Any) -> oracle.GridResult:
    arguments: dict[str, Any] = {"delay": 1, "time_max": 50, "sub_max": 20, "stop": "empty_row"} | settings
    return oracle.algorithm1(oracle.scripted_next_tokens(targets), **arguments)


def tiny_config(**changes: Any) -> types.SimpleNamespace:
    values = {
        "vocab_size": 11,
        "d_model": 12,
        "d_kv": 5,
        "d_ff": 20,
        "num_heads": 3,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "layer_norm_epsilon": 1e-6,
        "feed_forward": "relu",
        "tied_head": True,
        "scale_head": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    return types.SimpleNamespace(**(values | changes))


# Algorithm 1.


@pytest.mark.parametrize("stop", ["empty_row", "literal"])
def test_figure_2_step_by_step(stop: str) -> None:
    said: list[list[int]] = []
    script = oracle.scripted_next_tokens(FIGURE_2)

    def recorded(rows: list[list[int]]) -> list[int]:
        said.append(script(rows))
        return said[-1]

    result = oracle.algorithm1(recorded, delay=1, time_max=50, sub_max=20, stop=stop)
    # Step 4 is all eos. The literal rule starts one more (empty) row at that step.
    last = [1, 1, 1] if stop == "empty_row" else [1, 1, 1, 1]
    assert said == [[A], [B, D], [C, E, 1], last]
    assert result.rows == FIGURE_2
    assert result.all_rows == [[0, A, B, C, 1], [0, D, E, 1]] + [[0, 1]] * (len(last) - 2)
    assert (result.steps, result.calls, result.truncated) == (4, 4, None)


def test_a_row_that_starts_after_all_others_ended() -> None:
    # times: A 1, eos 2 | B 4, C 5, eos 6 | the empty row's eos 7. No row is open at step 3.
    result = scripted([[A], [B, C]], delay=3)
    assert result.rows == [[A], [B, C]]
    assert (result.steps, result.calls, result.truncated) == (7, 6, None)
    result = scripted([[A], [B, C]], delay=3, stop="literal")
    assert result.rows == [[A]]
    assert (result.steps, result.calls, result.truncated) == (2, 2, None)


@pytest.mark.parametrize(
    ("targets", "settings", "rows", "steps", "truncated"),
    [
        # A row is open at time_max, whether or not an empty row was seen (it is, at step 3).
        (FIGURE_2, {"time_max": 3}, [[A, B, C], [D, E]], 3, "time_max"),
        (FIGURE_2, {"time_max": 2}, [[A, B], [D]], 2, "time_max"),
        (FIGURE_2, {"time_max": 2, "sub_max": 1}, [[A, B]], 2, "time_max"),
        (FIGURE_2, {"time_max": 4}, FIGURE_2, 4, None),
        # sub_max rows without an empty row; then with a place for the empty row.
        (FIGURE_2, {"sub_max": 2}, FIGURE_2, 4, "sub_max"),
        (FIGURE_2, {"sub_max": 2, "stop": "literal"}, FIGURE_2, 4, "sub_max"),
        (FIGURE_2, {"sub_max": 1}, [[A, B, C]], 4, "sub_max"),
        (FIGURE_2, {"sub_max": 3}, FIGURE_2, 4, None),
        ([[A]], {"sub_max": 1, "delay": 5}, [[A]], 2, "sub_max"),
        # The second row would start at step 6, after time_max: time runs out, and the number of lost rows is unknown.
        ([[A]], {"delay": 5, "time_max": 4}, [[A]], 4, "time_max"),
        ([[A]], {"delay": 5, "time_max": 4, "stop": "literal"}, [[A]], 2, None),
        ([[A]], {"delay": 5, "time_max": 6}, [[A]], 6, None),
        # No row at all.
        ([], {}, [], 1, None),
        ([], {"sub_max": 1, "time_max": 1}, [], 1, None),
        # Only the literal mode has rows after an empty row, and the empty row itself.
        ([[A, B, C], [], [D]], {}, [[A, B, C]], 4, None),
        ([[A, B, C], [], [D]], {"stop": "literal"}, [[A, B, C], [D]], 4, None),
        ([[A, B, C], [], [D]], {"stop": "literal", "sub_max": 3}, [[A, B, C], [D]], 4, None),
        # The literal rule never ends if each step starts a row that does not end immediately.
        ([[A]] * 9, {"stop": "literal", "time_max": 3}, [[A], [A], [A]], 3, "time_max"),
        # Unique rows: a repeated row is left out, and the answer continues.
        ([[A], [A], [B], [A], [C]], {"unique": True}, [[A], [B], [C]], 6, None),
        ([[A, B], [A], [A, B, C]], {"unique": True}, [[A, B], [A], [A, B, C]], 6, None),
        # Two repeated rows in succession: the second ends at step 4 after four rows started, and at step 8 after three.
        ([[A]] * 3 + [[B], [C]], {"unique": True}, [[A], [B]], 5, None),
        ([[A]] * 9, {"unique": True}, [[A]], 5, None),
        ([[A]] * 9, {"unique": True, "delay": 3}, [[A]], 8, None),
        ([[A], [B]] * 9, {"unique": True, "delay": 2}, [[A], [B]], 8, None),
        # The upper of the two ends last, at step 6: the two rows C that have begun by then end at 6 and 7.
        ([[A], [B, B, B], [B, B, B], [A], *[[C]] * 9], {"unique": True}, [[A], [B, B, B], [C]], 7, None),
        # Bounds that truncate, and ends: at sub_max two repeated rows in succession are an end, one is not.
        ([[A]] * 3, {"unique": True, "sub_max": 3}, [[A]], 4, None),
        ([[A]] * 3, {"unique": True, "sub_max": 2}, [[A]], 3, "sub_max"),
        ([[A]] * 9, {"unique": True, "time_max": 4}, [[A]], 4, "time_max"),
        ([[A, B]] * 9, {"unique": True, "time_max": 3}, [[A, B], [A]], 3, "time_max"),
        ([[A]] * 9, {"unique": True, "delay": 3, "time_max": 7}, [[A]], 7, "time_max"),
        # The literal rule continues to start rows; with a delay of 0 all have begun.
        ([[A]] * 9, {"unique": True, "stop": "literal", "sub_max": 9}, [[A]], 10, "sub_max"),
        ([[A]] * 9, {"unique": True, "delay": 0, "sub_max": 4}, [[A]], 2, None),
        # bos is an ordinary id inside a row.
        ([[0], [A, 0, 0]], {}, [[0], [A, 0, 0]], 5, None),
    ],
)
def test_stop_rules_and_truncation_equal_hand_computed_results(
    targets: list[list[int]], settings: dict[str, Any], rows: list[list[int]], steps: int, truncated: str | None
) -> None:
    result = scripted(targets, **settings)
    assert (result.rows, result.steps, result.truncated) == (rows, steps, truncated)


def test_formula_of_steps_equals_algorithm_1() -> None:
    assert oracle.pipelined_steps([3, 2], 1, 20, 50) == 4
    assert oracle.pipelined_steps([1, 2], 3, 20, 50) == 7
    assert oracle.pipelined_steps([1, 1], 3, 2, 50) == 5  # no empty row any more
    assert oracle.pipelined_steps([], 2, 20, 50) == 1
    assert oracle.pipelined_steps([9, 2], 1, 20, 6) == 6
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = rng.integers(1, 6, rng.integers(0, 6)).tolist()
        delay, time_max, sub_max = (int(rng.integers(1, high)) for high in (5, 25, 8))
        result = scripted([[A] * n for n in lengths], delay=delay, time_max=time_max, sub_max=sub_max)
        assert result.steps == oracle.pipelined_steps(lengths, delay, sub_max, time_max)


# The grid.


def test_figure_3b_mask_and_distances() -> None:
    rows = [["bos1", "A", "B", "C"], ["bos2", "D", "E"], ["bosF"]]
    cells = oracle.coordinates([[0] * len(row) for row in rows], delay=1)
    names = [name for row in rows for name in row]
    assert dict(zip(names, cells, strict=True)) == {
        "bos1": (0, 0),
        "A": (0, 1),
        "B": (0, 2),
        "C": (0, 3),
        "bos2": (1, 1),
        "D": (1, 2),
        "E": (1, 3),
        "bosF": (2, 2),
    }
    visible, distance = oracle.visibility(cells), oracle.distances(cells)
    table = {
        query: {key: distance[q][k] for k, key in enumerate(names) if visible[q][k]} for q, query in enumerate(names)
    }
    assert table == {
        "bos1": {"bos1": 0},
        "A": {"bos1": 1, "A": 0},
        "B": {"bos1": 2, "A": 1, "B": 0},
        "C": {"bos1": 3, "A": 2, "B": 1, "C": 0},
        "bos2": {"bos1": 2, "A": 1, "bos2": 0},  # predicts D
        "D": {"bos1": 3, "A": 2, "B": 1, "bos2": 1, "D": 0},
        "E": {"bos1": 4, "A": 3, "B": 2, "C": 1, "bos2": 2, "D": 1, "E": 0},
        "bosF": {"bos1": 4, "A": 3, "B": 2, "bos2": 2, "D": 1, "bosF": 0},
    }


def test_times_of_rows_follow_the_delay() -> None:
    cells = oracle.coordinates([[0, A, 1], [0, B]], delay=3)
    assert cells == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]
    assert oracle.visibility(cells)[3] == [True, True, True, True, False]  # the eos of the ended row is a key
    assert oracle.distances(cells)[4] == [5, 4, 3, 1, 0]


def test_teacher_forcing_follows_decoding() -> None:
    """Each greedily decoded token is the most likely token under teacher forcing."""
    config = tiny_config()
    checked = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        params = oracle.random_params(config, rng)
        encoded = oracle.encode(params, config, rng.integers(2, config.vocab_size, 5).tolist())
        delay = 1 + seed % 3
        choose = oracle.grid_next_tokens(params, config, encoded, delay)
        result = oracle.algorithm1(choose, delay=delay, time_max=20, sub_max=6, stop="empty_row")
        logits = oracle.grid_logits(params, config, encoded, result.all_rows, delay)
        for row, row_logits in zip(result.all_rows, logits, strict=True):
            assert row[1:] == row_logits.argmax(axis=-1)[: len(row) - 1].tolist()
            checked += len(row) - 1
    assert checked > 500


def test_loss_counts_every_row_and_its_eos() -> None:
    config = tiny_config()
    params = oracle.random_params(config, np.random.default_rng(0))
    source, rows = [5, 7, 1], [[A, B], [C]]
    layout = [[0, A, B, 1], [0, C, 1], [0, 1]]
    logits = oracle.grid_logits(params, config, oracle.encode(params, config, source), layout, 1)
    probabilities = [np.exp(row) / np.exp(row).sum(axis=-1, keepdims=True) for row in logits]
    picked = [
        probabilities[0][0, A],
        probabilities[0][1, B],
        probabilities[0][2, 1],
        probabilities[1][0, C],
        probabilities[1][1, 1],
        probabilities[2][0, 1],
    ]
    whole = oracle.teacher_forced_loss(params, config, source, rows, 1)
    assert whole == pytest.approx(-np.mean(np.log(picked)))
    cut = oracle.teacher_forced_loss(params, config, source, rows, 1, empty_row=False)
    assert cut == pytest.approx(-np.mean(np.log(picked[:5])))


def test_one_row_is_the_sequential_decoder() -> None:
    config = tiny_config()
    lengths = set()
    for seed in range(20):
        params = oracle.random_params(config, np.random.default_rng(seed))
        encoded = oracle.encode(params, config, [3, 4, 5])
        choose = oracle.grid_next_tokens(params, config, encoded, 2)
        one_row = oracle.algorithm1(choose, delay=2, time_max=12, sub_max=1, stop="literal")
        expected = oracle.sequential(params, config, encoded, 12)
        assert one_row.all_rows[0] == [0, *expected.tokens] + [1] * (expected.truncated is None)
        assert one_row.steps == expected.steps == len(expected.tokens) + (expected.truncated is None)
        assert (one_row.truncated == "time_max") == (expected.truncated == "max_length")
        lengths.add(len(expected.tokens))
    assert len(lengths) >= 5


def test_random_models_vary() -> None:
    """The suite's comparisons mean little if random models repeat one token or write nothing."""
    truncated, lengths, said, constant, long = set(), [], set(), 0, 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        feed_forward = ("relu", "gated-gelu", "gated-silu")[seed % 3]
        config = tiny_config(tied_head=seed % 2 == 0, feed_forward=feed_forward)
        params = oracle.random_params(config, rng)
        encoded = oracle.encode(params, config, rng.integers(2, config.vocab_size, 6).tolist())
        choose = oracle.grid_next_tokens(params, config, encoded, 1)
        result = oracle.algorithm1(choose, delay=1, time_max=12, sub_max=6, stop="empty_row")
        truncated.add(result.truncated)
        said.add(str(result.rows))
        lengths += [len(row) for row in result.rows]
        long += sum(len(row) > 2 for row in result.rows)
        constant += sum(len(row) > 2 and len(set(row)) == 1 for row in result.rows)
    assert truncated == {None, "time_max", "sub_max"}
    assert len(said) > 45
    assert constant < 0.15 * long
    assert {1, 2, 3, 4, 5} <= set(lengths)


# The T5.


def test_distance_buckets_equal_hand_made_values() -> None:
    # 4 of 8 buckets are exact; 4 more from 4 to 32, a factor of 8 ** (1 / 4) each: edges 4, 6.7, 11.3, 19.03.
    buckets = [oracle.distance_bucket(d, 8, 32) for d in (0, 1, 2, 3, 4, 6, 7, 11, 12, 19, 20, 31, 32, 1000)]
    assert buckets == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7]
    # An edge that is a whole number: 4 * 2 = 8.
    assert [oracle.distance_bucket(d, 8, 64) for d in (7, 8, 15, 16, 31, 32)] == [4, 5, 5, 6, 6, 7]
    assert [oracle.encoder_bucket(5, k, 8, 20) for k in (0, 3, 4, 5, 6, 7, 10)] == [2, 2, 1, 0, 5, 6, 6]


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (16, 64)])
def test_buckets_equal_torch(buckets: int, max_distance: int) -> None:
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = torch.arange(-300, 301)  # key minus query
    torch_bucket: Any = T5Attention._relative_position_bucket
    both = torch_bucket(relative, True, buckets, max_distance)
    assert both.tolist() == [oracle.encoder_bucket(0, int(r), buckets, max_distance) for r in relative]
    left = torch_bucket(-torch.arange(301), False, buckets, max_distance)
    assert left.tolist() == [oracle.distance_bucket(d, buckets, max_distance) for d in range(301)]


def torch_state(params: oracle.Params, config: Any) -> dict[str, np.ndarray]:
    """Our parameters under Hugging Face's names, with transposed kernels."""
    projections = {"q": "query", "k": "key", "v": "value", "o": "output"}
    sublayers = {
        "encoder": {"SelfAttention": "attention", "DenseReluDense": "feed_forward"},
        "decoder": {
            "SelfAttention": "self_attention",
            "EncDecAttention": "cross_attention",
            "DenseReluDense": "feed_forward",
        },
    }
    embedding = params["shared"]["embedding"]
    head = embedding if config.tied_head else params["lm_head"]["kernel"].T
    state = {"shared.weight": embedding, "lm_head.weight": head}
    for stack, layers in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
        bias_name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        state[bias_name] = params[stack]["relative_bias"]["embedding"]
        state[f"{stack}.embed_tokens.weight"] = embedding
        state[f"{stack}.final_layer_norm.weight"] = params[stack]["norm"]["scale"]
        for i in range(layers):
            for j, (theirs, ours) in enumerate(sublayers[stack].items()):
                layer, prefix = params[stack][f"layers_{i}"][ours], f"{stack}.block.{i}.layer.{j}"
                state[f"{prefix}.layer_norm.weight"] = layer["norm"]["scale"]
                names = projections if "Attention" in theirs else {n: n for n in layer if n != "norm"}
                for short, name in names.items():
                    state[f"{prefix}.{theirs}.{short}.weight"] = layer[name]["kernel"].T
    return state


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="v1.0"),
        pytest.param(
            {
                "feed_forward": "gated-gelu",
                "tied_head": False,
                "scale_head": False,
                "num_layers": 3,
                "num_decoder_layers": 1,
                "relative_attention_num_buckets": 32,
                "relative_attention_max_distance": 128,
            },
            id="v1.1",
        ),
        pytest.param({"feed_forward": "gated-silu", "tied_head": False}, id="gated-silu"),
    ],
)
@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_logits_equal_torch(changes: dict[str, Any], double: bool) -> None:
    import torch
    import transformers

    config = tiny_config(**changes)
    rng = np.random.default_rng(7)
    params = oracle.random_params(config, rng)
    source, tokens = [3, 9, 0, 4, 6, 6, 1], [0, 5, 7, 0, 2, 10, 1, *rng.integers(0, 11, 20).tolist()]
    positions = range(len(tokens))
    ours = oracle.decoder_logits(
        params,
        config,
        oracle.encode(params, config, source),
        tokens,
        [[k <= q for k in positions] for q in positions],
        [[abs(q - k) for k in positions] for q in positions],
    )

    renamed = ("feed_forward", "tied_head", "scale_head")
    values: dict[str, Any] = {name: value for name, value in vars(config).items() if name not in renamed}
    hf_config = transformers.T5Config(feed_forward_proj=config.feed_forward, **values)
    model: Any = transformers.T5ForConditionalGeneration(hf_config).eval()
    # Built from a config and not loaded from a file, a T5 is tied and scaled whatever the config asks for.
    model.config.scale_decoder_outputs = config.scale_head
    if not config.tied_head:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    state = {name: torch.tensor(value) for name, value in torch_state(params, config).items()}
    model.load_state_dict(state, strict=True)
    if double:
        model = model.double()
    with torch.no_grad():
        theirs = model(
            input_ids=torch.tensor([source]),
            attention_mask=torch.ones(1, len(source)),
            decoder_input_ids=torch.tensor([tokens]),
        ).logits[0]
    assert np.ptp(ours) > 1.0
    tolerance = 1e-5 if double else 1e-5 * np.abs(ours).max()
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=0, atol=tolerance)
