"""The server's counters, in the text format of Prometheus."""

from collections.abc import Callable

from pipejax.system.extras import extra

with extra("serve", "pipejax serve"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
CONTENT_TYPE: str = CONTENT_TYPE_LATEST


class Counters:
    """The counters of one server; all names begin with pipejax_."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, said: str, *labels: str) -> Counter:
            return Counter(f"pipejax_{name}", said, labels, registry=registry)

        def histogram(name: str, said: str) -> Histogram:
            return Histogram(f"pipejax_{name}", said, buckets=SECONDS, registry=registry)

        self.requests = counter("requests", "Finished requests for answers, by HTTP status", "status")
        self.answers = counter("answers", "Answers, by reason of their end: stop, length, cancelled, error", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were read")
        self.tokens = counter("generated_tokens", "Tokens that were generated, without end tokens of rows")
        self.seconds = histogram("request_seconds", "From the request to the end of its answer")
        self.first = histogram("first_token_seconds", "From the request to the first token of its answer")

    def watch(self, name: str, said: str, measure: Callable[[], float]) -> None:
        """Adds a gauge whose value is measured when the gauge is read."""
        Gauge(f"pipejax_{name}", said, registry=self._registry).set_function(measure)

    def text(self) -> bytes:
        """Returns all counters in the text format of Prometheus."""
        return generate_latest(self._registry)
