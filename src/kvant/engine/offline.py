"""Generate for a list of prompts with a temporary engine, and return results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Semaphore
from typing import Any, Unpack

from kvant.engine.engine import Engine
from kvant.engine.stream import Result, Stream
from kvant.errors import CapacityError, EngineError
from kvant.generation.conversation import Prompt
from kvant.generation.settings import SamplingOptions, make_sampling
from kvant.platform.terminal import ProgressBar
from kvant.recipes import AnySpec

QUEUE_FACTOR = 8  # limit on unfinished requests, as a multiple of `max_concurrent`


def generate_many(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    kv_cache: AnySpec = "affine8",
    max_bytes: int | str | None = None,
    max_sequences: int = 16,
    max_context: int | None = None,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    ignore_end: bool = False,
    backend: str | None = None,
    draft: Any = None,
    quiet: bool = False,
    **options: Unpack[SamplingOptions],
) -> list[Result]:
    """Return the continuation of each prompt, in order; `max_sequences` run at a time.

    The `options` are fields of `Sampling`; `sampling=` passes a whole one, whose fields the other
    options replace. With a seed, prompt i is sampled with seed + i. `draft` is as in
    `Engine`. Unless `quiet`, a terminal shows a progress bar.

    >>> prompts = ["import ", "def ", "class "]
    >>> results = kvant.generate_many(model, tokenizer, prompts, max_new_tokens=4, quiet=True)
    >>> len(results)
    3
    """
    if isinstance(prompts, str):
        raise TypeError("prompts is one text: pass a list of prompts")
    sampling = make_sampling(options)
    engine = Engine(
        model,
        tokenizer,
        kv_cache,
        max_bytes=max_bytes,
        max_sequences=max_sequences,
        max_context=max_context,
        backend=backend,
        draft=draft,
    )

    def submit(index: int) -> Stream:
        return engine.submit(
            prompts[index],
            max_new_tokens=max_new_tokens,
            stop=stop,
            ignore_end=ignore_end,
            sampling=sampling.derive_choice(index),
        )

    with engine, ProgressBar("prompts", quiet=quiet) as bar:
        results: list[Result] = []
        submits = [partial(submit, index) for index in range(len(prompts))]
        for result in iterate_results(submits, max_sequences):
            if isinstance(result, Exception):
                raise result
            results.append(result)
            bar.update(len(results), len(prompts))
    return results


def iterate_results(
    submits: Sequence[Callable[[], Stream]], max_concurrent: int
) -> Iterator[Result | Exception]:
    """Submit requests, and yield their results or errors in order.

    The engine serves `max_concurrent` requests at a time. At most `QUEUE_FACTOR * max_concurrent`
    requests are unfinished; the next one is submitted when one of them ends.
    """
    streams: deque[Stream | Exception] = deque()
    open_requests = Semaphore(QUEUE_FACTOR * max_concurrent)
    for submit in submits:
        open_requests.acquire()
        try:
            stream = submit()
            stream.add_done_callback(open_requests.release)
            streams.append(stream)
        except (CapacityError, TypeError, ValueError) as error:  # concerns this request alone
            open_requests.release()
            streams.append(error)
        while streams and (isinstance(streams[0], Exception) or streams[0].done):
            yield _get_result(streams.popleft())
    while streams:
        yield _get_result(streams.popleft())


def _get_result(stream: Stream | Exception) -> Result | Exception:
    if isinstance(stream, Exception):
        return stream
    try:
        return stream.result()
    except EngineError:  # concerns every request
        raise
    except Exception as error:
        return error
