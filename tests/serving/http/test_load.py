"""A server under load, of clients in another process: nothing is lost, and its memory stays."""

import asyncio
import multiprocessing
import statistics

import pytest
from load_cases import held_bytes, run
from prometheus_client.parser import text_string_to_metric_families
from raw_http import ask, completion
from server_cases import tiny_service
from socket_cases import idle, listening, until

pytestmark = [pytest.mark.slow, pytest.mark.process]

COUNT, PARTS, AT_ONCE = 1200, 12, 24


@pytest.fixture(scope="module")
def clients():
    """A process that runs functions of load_cases, so that its memory is not the server's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield lambda *args: pool.apply(run, args)


def metric(service, name):
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(service.metrics.text().decode())
        for sample in family.samples
        if sample.name == name
    }


def test_memory_is_flat_and_no_row_is_lost_under_many_requests(clients):
    """The figures of memory are medians of thirds of the run. The first third warms up."""
    with tiny_service(waiting=64) as service, listening(service) as server:
        asyncio.run(ask(server.address, completion()))  # compiles
        until(lambda: idle(service))
        first = service.engine.report().counts.finished
        sizes, found = [], []
        for part in range(PARTS):
            count = COUNT // PARTS
            found.append(clients("mixed", server.address, range(part * count, (part + 1) * count), AT_ONCE))
            until(lambda: idle(service))
            sizes.append(held_bytes())
        counts, report = service.engine.report().counts, service.engine.report()
        third = PARTS // 3
        second, last = statistics.median(sizes[third : 2 * third]), statistics.median(sizes[2 * third :])
        print([size >> 20 for size in sizes], sum(found, start=type(found[0])()))
        assert last < 1.05 * second
        assert report.rows_in_use == report.waiting == 0
        assert not counts.failed
        total = sum(found, start=type(found[0])())
        assert total.total() == COUNT
        assert {status for _, status in total} <= {0, 200, 429}
        refused = metric(service, "jshadow:requests_refused_total").get((("status", "429"),), 0)
        ended = counts.finished - first + counts.cancelled
        # A client may leave before its request has arrived whole.
        left = sum(number for (_, status), number in total.items() if status == 0)
        assert COUNT - left <= ended + refused <= COUNT + left
        assert total["leave", 0] == total["slow", 200] == COUNT // 5


def test_3000_requests_over_1000_connections_are_all_answered(clients):
    with tiny_service(waiting=64) as service, listening(service) as server:
        asyncio.run(ask(server.address, completion()))  # compiles
        found = clients("flood", server.address, 3000, 1000)
        until(lambda: idle(service))
        print(found)
        assert found.total() == 3000
        assert set(found) <= {(200, None), (429, "queue_full")}
        assert min(found.values()) > 100
        assert service.engine.report().counts.finished == found[200, None] + 1
        assert metric(service, "jshadow:requests_refused_total") == {(("status", "429"),): found[429, "queue_full"]}
        assert asyncio.run(ask(server.address, completion()))[0] == 200
