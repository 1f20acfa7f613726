"""A small load leaves nothing behind; `bench.serving` measures a large one."""

import asyncio
import os
import time

from bench.clients import load, places, programs, settled
from bench.serving import open_files
from tests.server.conftest import running


def test_a_load_leaves_no_place_taken_no_connection_open_and_compiles_nothing(ready_model):
    with running(ready_model, agents=3) as address:
        before = asyncio.run(settled(address))
        files = open_files(os.getpid())
        statuses = asyncio.run(load(address, 30, clients=6, seed=3, longest=30))
        after = asyncio.run(settled(address))
        assert sum(statuses.values()) == 30 and {0, 200, 400} <= set(statuses)
        assert programs(after) == programs(before) and places(after, "idle") <= 3
        deadline = time.monotonic() + 10  # a closed connection is noticed a little later
        while open_files(os.getpid()) > files and time.monotonic() < deadline:
            time.sleep(0.1)
        assert open_files(os.getpid()) <= files
