"""Test OpenAI's client against replicas: every test of a single server."""

import pytest

from server.test_openai import *  # noqa: F403

pytestmark = pytest.mark.xdist_group("ray")
