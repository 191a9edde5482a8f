"""OpenAI's own client against replicas: all that holds of one server."""

import pytest

from server.test_openai import *  # noqa: F403

pytestmark = pytest.mark.xdist_group("ray")
