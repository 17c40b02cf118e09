"""Counts of operations, bytes and buffers in a hand-written compiled program, and rules for decoding programs."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from lab.benchmarks import instructions, programs, random_programs
from lab.benchmarks.hlo import Program, elements, size
from lab.benchmarks.programs import Buffers, absent, cases, count_thunks, report, troubles
from lab.benchmarks.systems import SIZES
from pipejax.apps.plan.targets import TARGETS, GpuTarget
from pipejax.decoding import Pipelined, Sequential
from pipejax.inference import programs as inference_programs
from pipejax.training.memory import longest_batch

# A loop in a loop, then a loop in a branch: two steps, the second with a sort and a transfer to the host.
BY_HAND = """\
HloModule by_hand

%update (p0: f32[8,4], p1: f32[1,4], p2: s32[]) -> f32[8,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[1,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %dus = f32[8,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

%lookup (p0: bf16[100,4], p1: s32[]) -> bf16[1,4] {
  %p0 = bf16[100,4]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %row = bf16[1,4]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,4}
}

%product (p0: f32[8,4], p1: f32[4,4]) -> f32[8,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[4,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%first_step (t: (f32[8,4], s32[])) -> (f32[8,4], s32[]) {
  %t = (f32[8,4]{1,0}, s32[]) parameter(0)
  %cache = f32[8,4]{1,0} get-tuple-element(%t), index=0
  %i = s32[] get-tuple-element(%t), index=1
  %table = bf16[100,4]{1,0} constant({...})
  %weights = f32[4,4]{1,0} constant({...})
  %row = bf16[1,4]{1,0} fusion(%table, %i), kind=kLoop, calls=%lookup
  %wide = f32[1,4]{1,0} convert(%row)
  %new = f32[8,4]{1,0} fusion(%cache, %wide, %i), kind=kLoop, calls=%update
  %y = f32[8,4]{1,0} fusion(%new, %weights), kind=kOutput, calls=%product
  %moved = f32[8,4]{1,0} copy(%y)
  ROOT %r = (f32[8,4]{1,0}, s32[]) tuple(%moved, %i)
}

%second_step (t: (f32[8,4], s32[])) -> (f32[8,4], s32[]) {
  %t = (f32[8,4]{1,0}, s32[]) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%t), index=0
  %i = s32[] get-tuple-element(%t), index=1
  %sorted = f32[8,4]{1,0} sort(%x), dimensions={0}, to_apply=%less
  %told = () custom-call(%sorted), custom_call_target="xla_ffi_python_callback"
  ROOT %r = (f32[8,4]{1,0}, s32[]) tuple(%sorted, %i)
}

%outer (t: (f32[8,4], s32[])) -> (f32[8,4], s32[]) {
  %t = (f32[8,4]{1,0}, s32[]) parameter(0)
  ROOT %w = (f32[8,4]{1,0}, s32[]) while(%t), condition=%going, body=%first_step
}

%branch (t: (f32[8,4], s32[])) -> (f32[8,4], s32[]) {
  %t = (f32[8,4]{1,0}, s32[]) parameter(0)
  ROOT %w = (f32[8,4]{1,0}, s32[]) while(%t), condition=%going, body=%second_step
}

%skip (t: (f32[8,4], s32[])) -> (f32[8,4], s32[]) {
  ROOT %t = (f32[8,4]{1,0}, s32[]) parameter(0)
}

ENTRY %main (a: f32[8,4], n: s32[]) -> (f32[8,4], s32[]) {
  %a = f32[8,4]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %t = (f32[8,4]{1,0}, s32[]) tuple(%a, %n)
  %w = (f32[8,4]{1,0}, s32[]) while(%t), condition=%going, body=%outer
  %more = pred[] constant(true)
  ROOT %c = (f32[8,4]{1,0}, s32[]) conditional(%more, %w, %w), branch_computations={%skip, %branch}
}
"""


# A step of a TPU: weights are copied to memory on the chip, whole and by a slice, before use; a cache is there, too.
ON_CHIP = """\
HloModule on_chip

%product (p0: f32[8,4], p1: f32[4,4]) -> f32[8,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[4,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%step (t: (f32[8,4], f32[4,4], f32[8,4])) -> (f32[8,4], f32[4,4], f32[8,4]) {
  %t = (f32[8,4]{1,0:T(8,128)}, f32[4,4]{1,0:T(8,128)}, f32[8,4]{1,0:T(8,128)S(1)}) parameter(0)
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%t), index=0
  %weights = f32[4,4]{1,0:T(8,128)} get-tuple-element(%t), index=1
  %cache = f32[8,4]{1,0:T(8,128)S(1)} get-tuple-element(%t), index=2
  %whole = (f32[4,4]{1,0:T(8,128)S(1)}, f32[4,4]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%weights)
  %near = f32[4,4]{1,0:T(8,128)S(1)} copy-done(%whole)
  %part = ((f32[8,4]{1,0:T(8,128)}), f32[2,4]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:2], [0:4]}
  %there = f32[2,4]{1,0:T(8,128)S(1)} slice-done(%part)
  %back = (f32[8,4]{1,0:T(8,128)}, f32[8,4]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%cache)
  %far = f32[8,4]{1,0:T(8,128)} copy-done(%back)
  %y = f32[8,4]{1,0:T(8,128)S(1)} fusion(%far, %near), kind=kOutput, calls=%product
  ROOT %r = (f32[8,4]{1,0:T(8,128)}, f32[4,4]{1,0:T(8,128)}, f32[8,4]{1,0:T(8,128)S(1)}) tuple(%far, %weights, %y)
}

ENTRY %main (a: f32[8,4], w: f32[4,4], c: f32[8,4]) -> (f32[8,4], f32[4,4], f32[8,4]) {
  %a = f32[8,4]{1,0} parameter(0)
  %w = f32[4,4]{1,0} parameter(1)
  %c = f32[8,4]{1,0} parameter(2)
  %t = (f32[8,4]{1,0}, f32[4,4]{1,0}, f32[8,4]{1,0}) tuple(%a, %w, %c)
  ROOT %l = (f32[8,4]{1,0}, f32[4,4]{1,0}, f32[8,4]{1,0}) while(%t), condition=%going, body=%step
}
"""


def test_bytes_on_the_chip_do_not_count() -> None:
    program = Program(ON_CHIP)
    # The weights are read once (64), so are two rows of x (32); the cache is written back and read (128 each).
    assert program.bytes("step") == 64 + 32 + 128 + 128
    assert program.kernels("step") == {"prefetch": 3, "product": 1}
    assert program.largest_copy("step") == 32  # elements: a copy to the chip is no copy of a cache


def test_loops_are_in_the_order_of_execution() -> None:
    program = Program(BY_HAND)
    assert program.loops(least=1) == ["first_step", "second_step"]
    assert program.loops(least=3) == ["first_step"]


def test_kernels_by_kind() -> None:
    program = Program(BY_HAND)
    assert program.kernels("first_step") == {"elementwise": 2, "convert": 1, "product": 1, "copy": 1}
    assert program.kernels("second_step") == {"sort": 1, "custom call xla_ffi_python_callback": 1}


def test_bytes_moved_by_each_operation() -> None:
    # lookup: a row of 8 bytes and its place (4), 8 written; convert 8 + 16; update: 16 + 4 read, 16 written;
    # product: 128 + 64 + 128; copy 128 + 128.
    assert Program(BY_HAND).bytes("first_step") == (8 + 4 + 8) + (8 + 16) + (16 + 4 + 16) + (128 + 64 + 128) + 256


NOTHING = SimpleNamespace(**{f"{kind}_size_in_bytes": 0 for kind in ("argument", "output", "temp", "alias")})


def test_starts_of_a_whole_run() -> None:
    """A loop runs as often as the compiler knows, or once; of a conditional, the branch that moves more bytes runs."""
    known = BY_HAND.replace("body=%outer", 'body=%outer, backend_config={"known_trip_count":{"n":"3"}}')
    starts = [(start.kernel.name, start.times) for start in Program(known).starts()]
    assert starts == [*((name, 3) for name in ("row", "wide", "new", "y", "moved")), ("sorted", 1), ("told", 1)]
    counts = report(known, NOTHING)
    assert (counts["starts"], counts["small_starts"]) == (17, 17)
    assert counts["kinds"]["product"] == {"starts": 3, "bytes": 3 * (128 + 64 + 128)}
    assert sum(kind["bytes"] for kind in counts["kinds"].values()) == counts["moved"] == Program(known).moved()


# Two kernels of attention, the first in two places of the program, as XLA prints them.
ATTENTION = """\
HloModule attention

ENTRY %main (a: bf16[2,4,1,8], b: s32[2,4]) -> bf16[2,4,1,8] {
  %a = bf16[2,4,1,8]{3,2,1,0} parameter(0)
  %b = s32[2,4]{1,0} parameter(1)
  %x = (bf16[2,4,1,8]{3,2,1,0}, f32[2,1,4]{2,1,0}) custom-call(%a, %b), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="f/jvp(T5.hidden)/encoder/x"}, backend_config={name = "_attend", num_warps = 4 : i32}
  %y = (bf16[2,4,1,8]{3,2,1,0}, f32[2,1,4]{2,1,0}) custom-call(%a, %b), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="f/transpose(jvp(T5.hidden))/encoder/x"}, backend_config={name = "_attend", num_warps = 4 : i32}
  %z = bf16[2,4,1,8]{3,2,1,0} custom-call(%a, %b), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/decoder/cross_attention.attend"}, backend_config={name = "_attend", num_warps = 4 : i32}
  ROOT %r = bf16[2,4,1,8]{3,2,1,0} copy(%z)
}
"""
SASS = """\
.text._attend:
        /*0000*/  MOV R1, c[0x0] ;
.L_x_1:
        /*0010*/  HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4] ;
        /*0020*/  FADD R1, R1, R2 ;
        /*0030*/  @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/  FADD R1, R1, R2 ;
        /*0050*/  @P0 BRA `(.L_x_2) ;
"""


def test_attention_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are found by name and number of arguments and results; loops without a product do not count."""
    assert instructions.loops(SASS) == [3]
    counted = {
        "first": [instructions.Count("_attend", 4, 100, 0, [64, 96])],
        "second": [instructions.Count("_attend", 3, 90, 8, [32])],
    }
    monkeypatch.setattr(instructions, "tools", lambda: (None, None))
    monkeypatch.setattr(instructions, "counts", lambda ptx, *_: counted[ptx])
    facts = {"kernel": "_attend", "spilled_bytes": 0}
    assert instructions.of_program(ATTENTION, ["first", "second"]) == [
        {"attention": "encoder", "starts": 2, **facts, "by_loop": [2.0, 3.0], "registers": 100},
        {"attention": "cross", "starts": 1, **facts, "by_loop": [1.0], "registers": 90, "spilled_bytes": 8},
    ]


def test_troubles_are_found() -> None:
    program = Program(BY_HAND)
    assert (program.largest("sort"), program.largest("scatter"), program.host_transfers()) == (32, 0, 1)


def test_moved_bytes_count_loop_trips_and_fusion_results_are_no_buffers() -> None:
    step = Program(BY_HAND).bytes("first_step")
    second = Program(BY_HAND).bytes("second_step")
    assert Program(BY_HAND).moved() == step + second  # each loop counts one iteration
    often = BY_HAND.replace("body=%outer", 'body=%outer, backend_config={"known_trip_count":{"n":"12"}}')
    assert Program(often).moved() == 12 * step + second
    shapes = set(Program(BY_HAND).buffers())
    assert "bf16[1,4]{1,0}" in shapes and "f32[1,4]{1,0}" in shapes and "bf16[100,4]{1,0}" in shapes
    assert "s32[]" in shapes and not [one for one in shapes if one == "f32[9,9]{1,0}"]


IN_PLACE = """\
ENTRY %main (a: f32[8,4], b: f32[2]) -> (f32[2], f32[8,4]) {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[2]{0} parameter(1)
  ROOT %k = (f32[2]{0}, f32[8,4]{1,0}) custom-call(%a, %b), custom_call_target="NAME", output_to_operand_aliasing=ALIAS
}
"""


def test_an_array_that_a_kernel_completes_counts_once() -> None:
    """The custom call of a product with a summand reads and writes the whole array."""
    for target, alias, size_in_bytes in (
        ("__gpu$xla.gpu.triton", "{{1}: (0, {})}", 128 + 8 + 8),
        ("__gpu$xla.gpu.triton", "{{0}: (1, {})}", 128 + 8 + 128),
        ("__gpu$xla.gpu.triton", "{{0}: (1, {}), {1}: (0, {})}", 128 + 8),
        ("__cublas$gemm", "{{1}: (0, {})}", 128 + 8 + 128 + 8),
    ):
        assert Program(IN_PLACE.replace("NAME", target).replace("ALIAS", alias)).moved() == size_in_bytes


def test_an_array_of_queries_by_keys_is_trouble() -> None:
    whole = programs.TRAININGS["paper"]._replace(model=SIZES["base"]).config
    (_, length), (_, slots) = (longest_batch(whole)[name] for name in ("source", "inputs"))
    made = {
        name: BY_HAND.replace("f32[8,4]", f"f32[{name}]") for name in (f"12,{slots},{3 * length}", f"6,{length},768")
    }
    assert [programs.squares(text, whole) for text in made.values()] == [[f"[12, {slots}, {3 * length}]"], []]
    assert programs.squares(BY_HAND.replace("f32[8,4]", f"bf16[2,12,{length},{length}]"), whole)


def test_step_above_its_memory_limit_is_trouble() -> None:
    sizes = {"argument": 5, "output": 5, "temp": 4, "alias": 5}
    memory = SimpleNamespace(**{f"{kind}_size_in_bytes": int(x * 1e9) for kind, x in sizes.items()})
    result = {"program": "train, paper"} | report(ON_CHIP, memory)
    assert not troubles(result | {"most": 9e9, "most_temporary": 4e9})
    assert troubles(result | {"most": 8.9e9, "most_temporary": 3.9e9}) == [
        "9.0 GB, over most 8.9",
        "4.0 GB, over most temporary 3.9",
    ]


@pytest.mark.parametrize(("name", "copies"), [("pipelined, batch 1, 9 slots", True), ("train, batch 24", False)])
def test_troubles_are_listed_and_copies_count_for_caches_only(
    name: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only copies of a cache are trouble; small copies and small sorts are none."""
    memory = SimpleNamespace(**{f"{kind}_size_in_bytes": 0 for kind in ("argument", "output", "temp", "alias")})
    monkeypatch.setattr(Program, "loops", lambda self: ["first_step", "second_step"])
    result = {"program": name} | report(BY_HAND, memory)
    assert troubles(result) == ["1 host transfers", "1 conditionals"]
    monkeypatch.setattr(programs, "MATTERS", 32)
    monkeypatch.setattr(programs, "COPIED", 32)
    found = ["1 host transfers", "1 conditionals", "a sort of 0.00 M elements"]
    assert troubles(result) == found + ["a copy of 0.00 M elements"] * copies


@pytest.mark.parametrize(
    ("shape", "count", "bytes_"), [("bf16[3,5]{1,0}", 15, 30), ("(f32[2], pred[])", 3, 9), ("f8e4m3fn[7]", 7, 7)]
)
def test_elements_and_bytes_of_shapes_are_counted(shape: str, count: int, bytes_: int) -> None:
    assert (elements(shape), size(shape)) == (count, bytes_)


def test_a_gpu_is_described_by_its_figures() -> None:
    card = TARGETS["rtx4090"]
    assert isinstance(card, GpuTarget)
    said = card.description()
    assert "major: 8 minor: 9" in said and "device_memory_size: 25393692672" in said
    assert said.count("{") == said.count("}")


THUNKS = """\
000: kCommandBuffer [source       | next=015 (1)]
    001: kCopy         [source       | sink        ] kCopy
    005: kCustomKernel [source       | next=006 (1)] fusion grid: [1, 1, 1]
015: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    016: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    017: kWhile [prev=017 (1) | sink        ]
condition:
        019: kCustomKernel [source | sink] loop_compare_fusion
      body:
        000: kCommandBuffer [source | sink]
            020: kWhile [source | sink]
condition:
                021: kCustomKernel [source | sink] loop_compare_fusion
022: kCopy [source | sink] kCopy
"""


def test_starts_by_the_host_are_counted() -> None:
    """A loop in a CUDA graph, and the kernels in this loop, are started with the graph."""
    assert count_thunks(THUNKS) == Buffers(graphs=2, loops=2, others=3)
    assert count_thunks("000: kCommandBuffer [source | sink]\n    001: kWhile\ncondition:\n        002: kCopy\n") == (
        1,
        0,
        0,
    )


@pytest.mark.slow
def test_decoding_programs_neither_sort_nor_call_the_host_nor_copy_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config, both = SIZES["tiny"], (Sequential(512), Pipelined(1, 64, 20))
    monkeypatch.setattr(inference_programs, "SLOTS", (448,))
    monkeypatch.setattr(inference_programs, "QUERY_COUNTS", ())
    made = absent(config, jnp.dtype("float32"), jax.devices()[0])
    cache = f"f32[{2 * config.num_heads},{config.d_kv},"  # the shape of keys in `step_decoder.Cache`
    seen = []
    for case in cases(made, both, 2, 64):
        compiled = case.compile()
        text = compiled.as_text()
        assert text
        found = report(text, compiled.memory_analysis())
        assert (found["largest_sort"], found["host_transfers"], found["collectives"]) == (0, 0, 0), case.name
        seen.append(case.name)
        program = Program(text)
        if case.name != "encode, batch 2":
            assert found["per_step"], case.name
            steps = [one for body in program.loops() for one in program.computations[body]]
            assert any(one.shape.startswith(cache) for one in steps), case.name
            assert not [one for one in steps if one.kind == "copy" and one.shape.startswith(cache)], case.name
    decoders = [f"{name}, batch 2" for name in ("sequential", "pipelined") for _ in range(2)]
    assert [name.rpartition(", ")[0] if "slots" in name else name for name in seen] == ["encode, batch 2", *decoders]


@pytest.mark.slow
@pytest.mark.skipif(
    "PIPEJAX_TEST_NEWEST" not in os.environ and not (Path(sys.prefix) / "programs").is_dir(),
    reason="compilers for GPUs are not installed: make venv-programs",
)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_training_step_is_counted(tmp_path: Path) -> None:
    """In the step of a small T5 for an H100, each attention kernel is found, with its loops and without spills."""
    out = tmp_path / "found.json"
    assert programs.main(["--model", "tiny", "--batches", "0", "--train", "--json", str(out)]) == 0
    (result,) = json.loads(out.read_text())["results"]
    of_kinds = {("encoder", 3), ("cross", 3), ("decoder", 4)}  # a decoder has a kernel for its buckets
    counted = Counter(own["attention"] for own in result["attention"])
    assert {*counted.items()} == of_kinds
    for own in result["attention"]:
        assert len(own["by_loop"]) == (1 if own["kernel"] == "_backward_buckets" else 2), own
        assert min(own["by_loop"]) > 5 and own["spilled_bytes"] == 0 and own["starts"] % 4 == 0  # four parts
    assert result["starts"] > result["small_starts"] > 0
    assert sum(kind["starts"] for kind in result["kinds"].values()) == result["starts"]


def test_random_programs_of_an_earlier_command_are_not_compiled_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An incomplete last line does not count."""
    output = tmp_path / "found.jsonl"
    tasks = [random_programs.Task("decode", n, target, 3) for n, target in enumerate(("h100", "rtx4090"))]
    times = {"seconds": 1.5, "processor_seconds": 2.0}
    lines = [json.dumps({**task._asdict(), "why": why, **times}) for task, why in zip(tasks, ("", "no"), strict=True)]
    output.write_text("\n".join([*lines, lines[0][:40]]))
    given = ["--output", str(output), "--decodes", "2", "--steps", "0", "--seed", "3"]
    assert random_programs.main(given) == 1
    assert output.read_text() == "\n".join([*lines, ""])
    said = capsys.readouterr().out
    assert said.startswith(f"2 programs are in {output}, 0 are left\n")
    assert "decode, h100: 1 compiled, 1 failed; " in said and said.endswith("all programs 4 s of a processor\n")
