"""The running batches of a server, by lane, and the requests that have a place in a batch."""

from typing import NamedTuple

from pipejax.apps.serving.answer import Kind, Running
from pipejax.inference.answer_format import AnswerFormat
from pipejax.inference.decoding_options import constraints_of
from pipejax.inference.encodings import Encodings
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import RunningBatch, Switch
from pipejax.inference.sources import Source
from pipejax.system.compiled import CompiledPrograms


class Lane(NamedTuple):
    """The key of a running batch. A single request gets a lane with one place, whose steps are faster."""

    kind: Kind
    places: int
    answer_format: AnswerFormat | None  # the format of all answers of the lane


class Lanes:
    """Creates, reuses and frees the running batches of all lanes.

    Only one thread may change the lanes; all threads may call `running_with` and `new_batch`, and read `running`.
    """

    def __init__(self, generator: Generator, switch: Switch, encodings: Encodings, compiled: CompiledPrograms) -> None:
        """Creates no batch yet.

        Args:
          generator: the model and its settings.
          switch: pauses the loops of all batches while it is set.
          encodings: the cache of encoded sources of all batches.
          compiled: the programs of all batches, filled by another thread.
        """
        self._generator, self._switch, self._encodings, self._compiled = generator, switch, encodings, compiled
        self.batches: dict[Lane, RunningBatch] = {}
        self.requests: dict[Lane, dict[int, Running]] = {}  # the request at each place of each lane

    @property
    def running(self) -> int:
        """The number of requests with a place."""
        return sum(map(len, [*self.requests.values()]))

    def running_with(self, kind: Kind) -> int:
        """Returns the number of running requests of a kind."""
        requests = [*self.requests.items()]  # a copy, as the engine's thread may add a lane
        return sum(len(places) for lane, places in requests if lane.kind == kind)

    def in_use(self) -> list[Lane]:
        """Returns the lanes with a running request."""
        return [lane for lane, places in self.requests.items() if places]

    def batch(self, lane: Lane, source: Source) -> RunningBatch:
        """Returns the batch of a lane, created if necessary.

        Args:
          lane: the lane.
          source: the source of any request of the lane, since all requests of a lane have the same row prefixes.
        """
        if lane not in self.batches:
            kin = [one for one in self.batches if one[:2] == lane[:2]]
            if idle := next((one for one in kin if not self.requests[one]), None):  # the batch's memory is reused
                batch = self.batches.pop(idle)
                del self.requests[idle]
            elif kin:
                batch = self.batches[kin[0]].empty_copy()
            else:
                batch = self._create(lane.kind, lane.places)
            self.batches[lane], self.requests[lane] = self._constrain(batch, lane.kind, source), {}
        return self.batches[lane]

    def new_batch(self, kind: Kind, places: int, source: Source) -> RunningBatch:
        """Returns a batch that belongs to no lane, to determine which programs the batches of a lane need.

        `source` is as for `batch`.
        """
        return self._constrain(self._create(kind, places), kind, source)

    def _create(self, kind: Kind, places: int) -> RunningBatch:
        programs = self._generator.programs
        return RunningBatch(programs, kind.strategy, places, self._switch, self._encodings, self._compiled)

    def _constrain(self, batch: RunningBatch, kind: Kind, source: Source) -> RunningBatch:
        """Gives a batch the forced tokens and the answer format of its requests."""
        tokenizer = self._generator.tokenizer
        batch.give(constraints_of(source, kind.method, kind.strategy, settings=kind.rules, tokenizer=tokenizer))
        return batch

    def remove(self, lane: Lane, place: int) -> Running:
        """Frees the place of a request, and returns the request."""
        one = self.requests[lane].pop(place)
        self.batches[lane].drop(place)
        return one

    def free_unused(self) -> None:
        """Frees the memory of the batches without a running request."""
        for lane in [lane for lane, places in self.requests.items() if not places]:
            del self.batches[lane], self.requests[lane]

    def clear(self) -> list[Running]:
        """Frees all batches, and returns the requests that had a place."""
        lost = [one for places in self.requests.values() for one in places.values()]
        self.batches.clear()
        self.requests.clear()
        return lost
