"""A server under load, of clients in another process: nothing is lost, and its memory stays."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import statistics
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from raw_http import asked, completion, flood, load
from server_cases import idle, listening, tiny_service, until

COUNT, PARTS, AT_ONCE = 1200, 12, 24
REFUSED = "jshadow:requests_refused_total", "429"


def held_bytes():
    """The bytes of memory that this process has, after what it does not need was given back."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def running():
    """A process for clients, whose memory is not the server's, and a service with its server."""
    with (
        multiprocessing.get_context("spawn").Pool(1) as pool,
        tiny_service(waiting=64) as service,
        listening(service) as server,
    ):
        asked(server.address, completion())  # compiles
        yield pool, service, server


@pytest.mark.slow
@pytest.mark.process
def test_memory_is_flat_and_no_row_is_lost_under_many_requests(running):
    """The figures of memory are medians of thirds of the run. The first third warms up."""
    pool, service, server = running
    until(lambda: idle(service))
    first, sizes, total = service.engine.report().counts.finished, [], Counter()
    for part in range(PARTS):
        seeds = range(part * COUNT // PARTS, (part + 1) * COUNT // PARTS)
        total += pool.apply(load, (server.address, seeds, AT_ONCE))
        until(lambda: idle(service))
        sizes.append(held_bytes())
    report, third = service.engine.report(), PARTS // 3
    assert statistics.median(sizes[2 * third :]) < 1.05 * statistics.median(sizes[third : 2 * third]), sizes
    assert report.rows_in_use == report.waiting == report.counts.failed == 0
    assert total.total() == COUNT
    assert {status for _, status in total} <= {0, 200, 429}
    families = text_string_to_metric_families(service.metrics.text().decode())
    samples = [sample for family in families for sample in family.samples]
    refused = [one.value for one in samples if (one.name, one.labels.get("status")) == REFUSED]
    ended = report.counts.finished - first + report.counts.cancelled
    left = sum(number for (_, status), number in total.items() if status == 0)  # perhaps before they arrived whole
    assert COUNT - left <= ended + sum(refused) <= COUNT + left
    assert total["leave", 0] == total["slow", 200] == COUNT // 5


@pytest.mark.slow
@pytest.mark.process
def test_3000_requests_over_1000_connections_are_all_answered(running):
    pool, service, server = running
    found = pool.apply(flood, (server.address, 3000, 1000))
    until(lambda: idle(service))
    assert found.total() == 3000
    assert set(found) <= {(200, None), (429, "queue_full")}
    assert found[200, None] >= 64  # as many may wait
    assert found[429, "queue_full"]
    assert service.engine.report().counts.finished == found[200, None] + 1
    assert asked(server.address, completion())[0] == 200
