"""Shared by all tests: one server with the default model, for all who only ask it questions."""

from collections.abc import Iterator

import pytest

from tests.server import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The service with its defaults. Tests that load, break or end a server start their own with `serving`."""
    with serving(tmp_path_factory.mktemp("server") / "log") as running:
        yield running
