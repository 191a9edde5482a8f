"""Test that docs/server.md names the fields that each path takes, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvant.server.embeddings_api import OllamaEmbedRequest, OpenAIEmbeddingRequest
from kvant.server.messages_api import MessagesRequest, OutputConfig, ThinkingOptions
from kvant.server.ollama_api import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from kvant.server.protocol import ChatRequest, CompletionRequest
from kvant.server.responses_api import ResponsesRequest

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
ROWS = {
    cells[0]: {name.split(".")[-1] for name in re.findall(r"`([a-z0-9_.]+)`", cells[1] + cells[2])}
    for cells in re.findall(r"^\| (`/.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text("utf-8"), re.M)
}
COMPLETION = ROWS["`/v1/completions`"]
# Fields that take only the value that stands for none.
REFUSED = {
    *("store", "modalities", "reasoning_effort", "verbosity", "prompt_cache_retention"),
    *("prediction", "audio", "web_search_options", "functions", "function_call"),
    *("mcp_servers", "container", "diagnostics", "suffix", "template", "images"),
    *("mirostat", "repeat_last_n", "typical_p", "tfs_z", "vocab_only"),
    *("background", "previous_response_id", "conversation", "truncation", "reasoning"),
    "max_tool_calls",
}
NOT_FIELDS = {"enable_thinking"}


@pytest.mark.parametrize(
    ("documented", "models"),
    [
        (COMPLETION, [CompletionRequest]),
        (
            (ROWS["`/v1/chat/completions`"] | COMPLETION) - {"strict", "prompt"},
            [ChatRequest],
        ),
        (
            (ROWS["`/v1/responses`"] | {"text"}) - {"format", "store"},
            [ResponsesRequest],
        ),
        (
            ROWS["`/v1/messages`"] | {"thinking", "output_config"},
            [MessagesRequest, ThinkingOptions, OutputConfig],
        ),
        (
            ROWS["`/api/chat`, `/api/generate`"] | {"options"},
            [OllamaChatRequest, OllamaGenerateRequest, OllamaOptions],
        ),
        (ROWS["`/v1/embeddings`"], [OpenAIEmbeddingRequest]),
        (ROWS["`/api/embed`"], [OllamaEmbedRequest]),
    ],
)
def test_fields_are_documented(documented: set[str], models: list[Any]) -> None:
    fields = {name for model in models for name in model.model_fields}
    if ResponsesRequest in models:
        fields -= {"prompt", "top_logprobs"}  # null
    assert documented - NOT_FIELDS == fields - REFUSED
