"""Run llama.cpp's server from the package `xllamacpp` (`pip install xllamacpp`), to compare with.

`python tools/llama_server.py --model FILE.gguf --name NAME --port 8080` serves one sequence at a
time. Other settings are llama.cpp's defaults.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--name", required=True, help="Name of the model for clients")
    parser.add_argument("--port", type=int, required=True, help="Port on this machine")
    parser.add_argument("--threads", type=int, default=2, help="Threads of forwards")
    parser.add_argument("--context", type=int, default=20480, help="Tokens")
    options = parser.parse_args()
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {options.name}
    params.hostnames, params.port = ["127.0.0.1"], options.port
    params.n_ctx, params.n_parallel = options.context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(params)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()
