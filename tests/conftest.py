"""Fixtures of a session. The fork server of the test worlds starts with it: it imports megatron
while tests run.
"""

import gc
import os
import sys

import pytest


def pytest_configure(config):
    """Keep caches of runs out of the home. Keep a process that wakes from preempting the one that
    runs, here and in all that tests start: gloo's threads ask again and again for a lock of a
    thread that they preempted, which took a fifth of the time of worlds.
    """
    os.environ.setdefault("MCA_LITE_CACHE", str(config.cache.mkdir("mca_lite")))
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture(scope="session", autouse=True)
def collector():
    """The collector leaves alone the modules of all tests, which live until the end."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Started in the first test, what ranks print is captured; none for tests without worlds."""
    world = sys.modules.get("tests.shared.world")
    if world:
        world.start_server()
