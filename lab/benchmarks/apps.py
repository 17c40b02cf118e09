"""The servers that `lab.benchmarks.serve` compares: `python -m lab.benchmarks.apps NAME DIR --answer NxM` starts one.

"pipejax" is `pipejax serve` itself, with one strategy that is forced to rows of these lengths; further arguments are
passed to it. The other servers are written as a first version of such a service often is, a FastAPI application that
calls the library. They answer one request at a time, or, with "-batch" in the name, up to `BATCH` waiting requests
together.
"""

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lab.benchmarks.decode import rows_of
from lab.benchmarks.forced import Fixed
from lab.benchmarks.peers.ct2 import CTranslate2
from lab.benchmarks.peers.hugging_face import HuggingFace
from lab.benchmarks.peers.process import torch_device
from pipejax.apps.serving import serve_command
from pipejax.config import GridConfig
from pipejax.grid import sequential_steps
from pipejax.inference.generator import Generator
from pipejax.system import cli

PEERS = tuple(f"{name}{how}" for name in ("hf", "ct2-fp32", "ct2-int8") for how in ("", "-batch"))
BATCH = 8  # requests that are decoded together, as many as `pipejax serve` has places
Answers = Callable[[list[list[int]]], list[list[Any]]]  # answers sources of one length, as token ids


def main(argv: Sequence[str]) -> int:
    """Serves until a signal ends the process."""
    parser = cli.Parser(prog="python -m lab.benchmarks.apps", description=__doc__)
    parser.add_argument("name", choices=("pipejax", *PEERS))
    parser.add_argument("directory", metavar="DIR", help="a checkpoint, or a Hugging Face model for the other servers")
    parser.add_argument("--answer", required=True, metavar="NxM", help="rows and tokens of each answer")
    parser.add_argument("--sub-max", type=cli.whole_number(1), default=20, metavar="S", help="rows of pipejax's grid")
    parser.add_argument(
        "--time-max", type=cli.whole_number(1), default=64, metavar="T", help="time-steps of pipejax's grid"
    )
    parser.add_argument("--threads", type=cli.whole_number(1), default=2, metavar="N")
    flags, more = parser.parse_known_args(argv)
    rows = rows_of(flags.answer)
    if flags.name == "pipejax":
        force(Generator, rows, GridConfig(delay=1, time_max=flags.time_max, sub_max=flags.sub_max))
        return serve_command.main(["--checkpoint", flags.directory, "--port", "0", *more])
    kind, _, together = flags.name.partition("-batch")
    answers = of_peer(kind, Path(flags.directory), sequential_steps(rows), threads=flags.threads)
    serve(flags.name, answers, BATCH if together else 1)
    return 0


def force(generator: type[Generator] | Generator, rows: Sequence[int], grid: GridConfig) -> None:
    """Makes a generator, or all generators, write answers with rows of these lengths, independent of the weights."""
    fixed = Fixed(grid.delay, grid.time_max, grid.sub_max, lengths=tuple(rows))
    setattr(generator, "make_strategy", lambda *given, **more: fixed)  # noqa: B010  (mypy takes no assignment to a method)


def of_peer(name: str, directory: Path, length: int, *, threads: int) -> Answers:
    """A function by which another library answers each source with `length` tokens."""
    if name.startswith("hf"):
        hugging_face = HuggingFace(name, directory, threads=threads, device=torch_device())
        torch = hugging_face.torch

        def generated(sources: list[list[int]]) -> list[list[Any]]:
            with torch.inference_mode():
                ids = torch.tensor(sources, dtype=torch.long)
                given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                return hugging_face.generate([length] * len(sources), **given)

        return generated
    translator = CTranslate2(name, directory, threads=threads)
    return lambda sources: translator.generate([[f"t{i}" for i in ids] for ids in sources], length)


def serve(name: str, answers: Answers, size: int) -> None:
    """Serves POST /v1/completions, which answers a prompt of token ids with tokens; a separate thread decodes."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Asked(BaseModel):
        prompt: list[int]

    waiting: queue.SimpleQueue[tuple[list[int], Future[list[Any]]]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            taken = [waiting.get()]
            while len(taken) < size and not waiting.empty():
                taken.append(waiting.get())
            try:
                found = answers([ids for ids, _ in taken])
            except Exception as error:  # without an answer the clients would wait forever
                for _, future in taken:
                    future.set_exception(error)
                continue
            for (_, future), tokens in zip(taken, found, strict=True):
                future.set_result(tokens)

    threading.Thread(target=work, daemon=True).start()
    app = FastAPI()

    def complete(asked: Asked) -> dict[str, list[Any]]:
        future: Future[list[Any]] = Future()
        waiting.put((asked.prompt, future))
        return {"tokens": future.result()}

    app.add_api_route("/v1/completions", complete, methods=["POST"])
    listener = serve_command.listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))

    async def run() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not (serving.done() or server.started):
            await asyncio.sleep(0.01)
        cli.note(f"serving {name} at http://127.0.0.1:{listener.getsockname()[1]}")
        await serving

    asyncio.run(run())


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
