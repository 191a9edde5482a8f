"""The laws hold for a codec that is not kvant's own, too."""

import pytest


@pytest.fixture(autouse=True)
def every_format(foreign_codec: None) -> None:
    """Register the codec of `laws.cases.FOREIGN`."""
