"""The table of compiled programs, with functions that count instead of compiling."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipejax.system.compiled import CompiledPrograms


def test_program_is_compiled_once_by_many_threads() -> None:
    table, made, go_on = CompiledPrograms(), list[str](), threading.Event()

    def make() -> str:
        go_on.wait(20)
        made.append("program")
        return f"number {len(made)}"

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(table.find, "key", make) for _ in range(8)]
        assert table.find("other", lambda: "another") == "another"  # the second program is not blocked by the first
        go_on.set()
        assert {one.result() for one in found} == {"number 1"}
    assert table == {"key": "number 1", "other": "another"}


def test_waiting_thread_compiles_itself_if_the_other_failed() -> None:
    table, begun, go_on = CompiledPrograms(), threading.Event(), threading.Event()

    def fail() -> str:
        begun.set()
        go_on.wait(20)
        raise MemoryError("little")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(table.find, "key", fail)
        begun.wait(20)
        second = pool.submit(table.find, "key", lambda: "program")
        go_on.set()
        assert second.result() == "program"
        with pytest.raises(MemoryError, match="little"):
            first.result()
    assert table == {"key": "program"}


def test_compile_function_may_find_other_programs() -> None:
    table = CompiledPrograms()
    assert table.find("both", lambda: (table.find("a", lambda: 1), table.find("b", lambda: 2))) == (1, 2)
    assert table == {"a": 1, "b": 2, "both": (1, 2)}
    assert table.find("a", lambda: 1 / 0) == 1
