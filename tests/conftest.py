"""Fixtures of a session. The fork server of the test worlds starts with it: it imports megatron
while tests run.
"""

import gc
import sys

import pytest


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
