"""Vision models, and fixtures of servers and of the command line."""

import pytest

from cli.conftest import call
from server.conftest import bundled_model, running
from vision.tiny import FAMILIES, TinyVision

__all__ = ["bundled_model", "call", "running"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> TinyVision:
    return FAMILIES[request.param]()


@pytest.fixture(scope="module")
def llava() -> TinyVision:
    return FAMILIES["llava"]()
