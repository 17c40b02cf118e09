"""Settings of the test suite: eight emulated CPU devices, no network, and real data only if a variable names it."""

import gc
import importlib.metadata
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PIPEJAX_CACHE"] = "off"  # tests do not use the cache of the user
if "PIPEJAX_TEST_DEVICE" not in os.environ:  # otherwise JAX uses the device of the machine, for `lab.benchmarks.suite`
    os.environ["JAX_PLATFORMS"] = "cpu"  # for the commands that tests start, too
    # The number of XLA's threads, which would otherwise be the number of devices. Seven devices that wait in a
    # collective would then leave one thread to the eighth; if it needs another thread, XLA aborts the process.
    os.environ["NPROC"] = "16"
    # Threads of torch, which would otherwise spin while they wait for a core that the other worker uses.
    os.environ["OMP_NUM_THREADS"] = "1"
    # The suite compiles more than it computes, so LLVM optimises less. Each program is compiled by one thread, because
    # two workers already use both cores, and dividing a program takes time.
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later releases lack the flag
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"  # the older emitters compile in half the time

import jax
import pytest

from pipejax.kernels import cpu_kernel
from pipejax.system import compile_cache
from support.logged import logged

if TYPE_CHECKING:
    from pipejax.data.tokenizer import Tokenizer
    from pipejax.training.step import Trainer

if "PIPEJAX_TEST_DEVICE" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # before the first use of a device


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs from one run of the suite to the next, which halves its time.

    The small ones too: a thousand operations outside of any `jit` take longer to compile than to read.
    """
    cache = getattr(config, "cache", None)
    if cache is not None:  # absent under -p no:cacheprovider
        directory = cache.mkdir("jax")
        directory.chmod(0o700)  # files in it are executed
        settings = {"jax_compilation_cache_dir": str(directory), "jax_persistent_cache_min_compile_time_secs": 0.0}
        for name, value in settings.items():
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)  # for the commands that tests start


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the tests without garbage collection, and leaves what they hold out of the collections of all tests.

    What modules hold lives to the end; looking at it again and again takes a seventh of the time of the imports.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)


MEMORY_MAPS = 15_000  # mappings of a process; Linux allows 65,530 by default


# Files that take minutes are first, so that no worker is alone with one of them at the end.
SLOW = (
    *(
        "drafting",
        "backbones",
        "backbone_behaviour",
        "processes",
        "trainer",
        "training",
        "named_rows",
        "engine",
        "decoding",
    ),
    *("benchmarks", "records", "monitoring", "drafts", "lora", "kernels", "methods", "paper_configs"),
    *("step_decoder", "choice", "checkpoint", "faults", "tables", "unique_rows", "gpu", "python", "plan"),
    *("serving_process", "schemas"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow files first; all else stays in order."""
    place = {f"test_{name}": i for i, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(item.path.stem, len(SLOW)))


@pytest.fixture(autouse=True)
def few_memory_maps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frees compiled programs after a test if they have many memory maps: XLA crashes at the limit of a process.

    Only slow tests compile many programs, and counting maps takes milliseconds.
    """
    yield
    maps = Path("/proc/self/maps")
    if request.node.get_closest_marker("slow") and maps.exists() and maps.read_bytes().count(b"\n") > MEMORY_MAPS:
        if shared := sys.modules.get("support.compiled_once"):
            shared.free_programs()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def few_sampled_examples() -> Iterator[None]:
    """Padded shapes are chosen from the lengths of 400 examples: encoding 4,000 takes most of a second in each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipejax.data.batches.SAMPLE", 400)
        yield


@pytest.fixture(scope="session", autouse=True)
def few_query_counts() -> Iterator[None]:
    """A decoding program has a loop for each number of queries, and compiling them takes most of the suite's time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("inference.programs.QUERY_COUNTS", "decoding.drafting.QUERY_COUNTS"):
            patch.setattr(f"pipejax.{name}", (12,))
        patch.setattr("pipejax.decoding.drafting.DRAFTED_QUERY_COUNTS", (12,))
        yield


@pytest.fixture(scope="session")
def kernel_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels that tests compile: in a cache of the suite's own, from one of its runs to the next."""
    kept = getattr(request.config, "cache", None)  # absent under -p no:cacheprovider
    directory: Path = kept.mkdir("kernels") if kept else tmp_path_factory.mktemp("cache")
    directory.chmod(0o700)  # files in it are executed
    return directory


@pytest.fixture(scope="session")
def kernel(kernel_cache: Path) -> cpu_kernel.Level:
    """The kernel for this processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compile_cache.VARIABLE, str(kernel_cache))
        with logged() as lines:
            used = cpu_kernel.use()
        if not used:
            pytest.skip(f"no kernel here: {lines}")
    assert all(line.startswith("compiling a kernel") for line in lines)
    return used


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The lines that are logged during a test."""
    with logged() as lines:
        yield lines


@pytest.fixture(scope="module")
def compiled_once() -> "Iterator[dict[Any, Trainer]]":
    """Runs that a test module starts share what they compile; gives their trainers."""
    from support.compiled_once import compiled_once  # imported here, since it imports the training

    with compiled_once() as trainers:
        yield trainers


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory of real data sets and T5's tokenizer; without it the test is skipped."""
    directory = os.environ.get("PIPEJAX_DATA", "")
    if not Path(directory or "absent").is_dir():
        pytest.skip(f"no real data: PIPEJAX_DATA names no directory (found {directory!r})")
    return Path(directory)


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the embedded task's tokenizer. Nobody changes it."""
    from pipejax.apps import demo  # imported here, since it takes seconds, and not every test needs it

    directory = tmp_path_factory.mktemp("tokenizer")
    demo.build_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_files: Path) -> "Tokenizer":
    """The embedded task's."""
    from pipejax.data.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer_files)
