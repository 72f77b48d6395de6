"""The fork server of the test worlds starts with the session: it imports megatron while
tests run.
"""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Started in the first test, what ranks print is captured; none for tests without worlds."""
    world = sys.modules.get("tests.shared.world")
    if world:
        world.start_server()
