"""Test conversations: no token is prefilled twice, and a rewind restores the earlier state."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvant
from generation.speakers import DEMO, Numbers, model_of, prompt_of, tokenizer_of
from hf.zoo import valid_spec
from kvant import demo
from kvant.cache import files
from kvant.generation import Session, TransformersDecoder
from kvant.prefixes.tree import count_shared_prefix

TURN = {"message": "", "reply": "", "shared": 0, "tokens": [5] * 9, "begin": 3}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECS = ["raw", "affine4", "affine8,window=16,sinks=2"]
FAMILIES = [DEMO, "llama", "gemma3", "falcon_h1", "qwen3_next", "mamba2", "mamba", "jamba"]


def session_of(name: str, spec: str = "raw", **options: Any) -> Session:
    return Session(model_of(name), tokenizer_of(name), spec, **options)


def send_and_collect(
    session: Session, message: str | list[int], count: int = 6, **options: Any
) -> list[int]:
    steps = session.send(message, max_new_tokens=count, ignore_end=True, **options)
    return [step.token for step in steps]


def send_three_turns(session: Session, name: str) -> list[list[int]]:
    """Send three turns."""
    first = list(prompt_of(name))
    return [send_and_collect(session, message) for message in (first, first[3:9], first[1:4])]


@pytest.fixture
def chat_tokenizer() -> Any:
    """Return a tokenizer with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_turn_equals_one_concatenated_prompt(name: str) -> None:
    session = session_of(name, "raw")
    replies = send_three_turns(session, name)
    last = session.turns[-1]
    once = session_of(name, "raw")
    assert send_and_collect(once, session.tokens[: last.begin]) == replies[-1]


@pytest.mark.parametrize("spec", ["affine8,prefill=stored", "affine4,prefill=stored"])
def test_compressed_turn_equals_one_prompt_if_prefill_is_stored(spec: str) -> None:
    session = session_of(DEMO, spec)
    first = list(prompt_of(DEMO)) * 5
    send_and_collect(session, first, 70)
    reply = send_and_collect(session, first, 20)
    once = session_of(DEMO, spec)
    assert send_and_collect(once, session.tokens[: session.turns[-1].begin], 20) == reply


@pytest.mark.parametrize("name", FAMILIES)
def test_only_new_tokens_are_prefilled(name: str) -> None:
    session = session_of(name)
    read: list[tuple[int, int]] = []
    send_and_collect(session, list(prompt_of(name)))
    for message in ([5, 6, 7], [9], [4, 4]):
        cached_tokens = session.cache.length
        assert cached_tokens == len(session.tokens) - 1
        next(session.send(message, progress=lambda *counts: read.append(counts)))
        session.stats()  # completes the reply
        assert session.stats()["tokens_reused"] >= cached_tokens
    assert session.stats()["hit_rate"] > 0.5


def test_at_least_one_token_is_recomputed() -> None:
    session = session_of("llama")
    send_and_collect(session, [5, 6, 7])
    session.rewind(4)
    fresh = session_of("llama")
    reply = send_and_collect(fresh, session.tokens)
    assert send_and_collect(session, []) == reply


@pytest.mark.parametrize("name", FAMILIES)
def test_rewind_leaves_no_trace(name: str) -> None:
    spec = valid_spec(name, "affine8")
    session, other = session_of(name, spec), session_of(name, spec)
    send_three_turns(session, name)
    session.rewind(session.turns[0].end)
    send_and_collect(other, list(prompt_of(name)))
    assert session.tokens == other.tokens
    assert send_and_collect(session, [5, 6]) == send_and_collect(other, [5, 6])
    assert session.turns == other.turns


def test_a_reply_can_be_cut_short() -> None:
    session = session_of(DEMO)
    send_and_collect(session, "import os\n", 8)
    begin, tokens = session.turns[0].begin, session.tokens
    session.rewind(begin + 3)
    assert session.turns[0].reply == session.tokenizer.decode(tokens[begin : begin + 3])
    assert session.tokens == tokens[: begin + 3]
    assert send_and_collect(session, "", 5) == tokens[begin + 3 :]


def test_message_is_rewound_whole() -> None:
    session = session_of(DEMO)
    send_and_collect(session, "import os\n")
    send_and_collect(session, "class A:\n")
    before, inside = session.turns[0].end, session.turns[1].begin
    tokens = session.tokens
    for wrong in (before + 1, inside, -1, len(tokens) + 1):
        with pytest.raises(kvant.RewindError, match=f"length {wrong}:"):
            session.rewind(wrong)
    assert session.tokens == tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fork_is_independent(name: str) -> None:
    session = session_of(name, valid_spec(name, "affine8"))
    send_and_collect(session, list(prompt_of(name)))
    fork, third = session.fork(), session.fork()
    first, two = send_and_collect(session, [5, 6, 7]), send_and_collect(fork, [8, 9])
    assert fork.tokens[-8:-6] == [8, 9] and session.tokens[-9:-6] == [5, 6, 7]
    assert send_and_collect(third, [5, 6, 7]) == first
    third_fork = session.fork()
    third_fork.rewind(third_fork.turns[0].end)
    assert send_and_collect(third_fork, [8, 9]) == two


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("count", [1, 3])
def test_stopping_early_keeps_the_tokens_so_far(count: int, draft: str | None) -> None:
    session = session_of("llama", draft=draft)
    steps = session.send([5, 6, 5, 6], max_new_tokens=9)
    reply = [step.token for step in islice(steps, count)]
    assert session.tokens == [5, 6, 5, 6, *reply]
    assert session.cache.length == len(session.tokens) - 1
    assert next(steps, None) is None, "the reply ended when the session was asked for more"
    assert session.turns[0].reply == Numbers().decode(reply)


def test_dropped_reply_ends() -> None:
    session = session_of("llama")
    next(session.send([5, 6]))
    assert session.cache.length == 2
    send_and_collect(session, [7])
    assert session.tokens[:2] == [5, 6] and session.tokens[3] == 7


def test_unanswered_message_was_not_sent() -> None:
    session = session_of("llama")
    send_and_collect(session, [5, 6])
    tokens = session.tokens

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send_and_collect(session, [9] * 9, progress=interrupt)
    assert session.tokens == tokens
    assert session.cache.length == len(tokens) - 1
    assert len(session.turns) == 1


def replace_by_sending(session: Session, folder: Path) -> Session:
    send_and_collect(session, [9, 4], 3)
    session.rewind(session.turns[-2].end)
    return session


def replace_by_saving(session: Session, folder: Path) -> Session:
    session.save(folder / "a.kv")
    return Session.load(folder / "a.kv", model_of("llama"), Numbers())


USES = [
    replace_by_sending,
    replace_by_saving,
    lambda session, folder: session.fork(),
    lambda session, folder: session.stats() and session,
]


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("keeps_reply", [True, False], ids=["held", "dropped"])
@pytest.mark.parametrize("use", USES, ids=["send", "save", "fork", "stats"])
def test_unread_reply_belongs_to_the_conversation(
    use: Any, keeps_reply: bool, draft: str | None, tmp_path: Path
) -> None:
    """Regression: `session.send("Hello")` without a loop was lost at the next call, message
    included.
    """
    session, other = session_of("llama", draft=draft), session_of("llama", draft=draft)
    for session_ in (session, other):
        send_and_collect(session_, [5, 6, 5])
    expected = send_and_collect(other, [7, 8], 5)
    stream = session.send([7, 8], max_new_tokens=5, ignore_end=True)
    if not keeps_reply:
        del stream
    used = use(session, tmp_path)
    assert (used.tokens, used.turns) == (other.tokens, other.turns)
    assert not keeps_reply or [step.token for step in stream] == expected


def test_unread_reply_closed_or_reset_is_never_computed() -> None:
    session = session_of("llama")
    send_and_collect(session, [5, 6])
    tokens, prompt_tokens = session.tokens, session.stats()["tokens_asked"]
    session.send([7]).close()
    assert session.tokens == tokens and session.stats()["tokens_asked"] == prompt_tokens
    session.send([7])
    session.reset()
    assert session.tokens == [] and session.stats()["tokens_asked"] == prompt_tokens


def test_reply_ends_at_the_capacity_as_in_an_engine() -> None:
    """Regression: it raised in the middle of the reply."""
    options: dict[str, Any] = {"kv_cache": "raw,capacity=8", "ignore_end": True}
    steps = list(kvant.generate(model_of("llama"), Numbers(), [5, 6, 7], **options))
    assert (len(steps), steps[-1].finish_reason) == (5, "length")


def test_resumed_session_has_the_capacity_of_the_file(tmp_path: Path) -> None:
    small, large = session_of("llama", "raw,capacity=8"), session_of("llama", "raw")
    for session in (small, large):
        send_and_collect(session, [5, 6], 2)
    small.save(tmp_path / "small.kv")
    large.save(tmp_path / "large.kv")
    small.resume(tmp_path / "large.kv")
    large.resume(tmp_path / "small.kv")
    assert len(send_and_collect(small, [7], 20)) == 20
    assert len(send_and_collect(large, [7], 20)) < 6


def test_unread_reply_raises_where_it_is_computed() -> None:
    session = session_of("llama", "raw")
    send_and_collect(session, [5, 6], 2)
    tokens = session.tokens

    def dies(*args: Any) -> None:
        raise RuntimeError("out of luck")

    session.send([7] * 9)
    hook = model_of("llama").get_output_embeddings().register_forward_pre_hook(dies)
    with pytest.raises(RuntimeError, match="out of luck"):
        session.fork()
    hook.remove()
    assert session.tokens == tokens


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", DEMO])
def test_failed_forward_is_rolled_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session, other = session_of(name), session_of(name)
    for session_ in (session, other):
        send_and_collect(session_, list(prompt_of(name)))

    def dies(*args: Any) -> None:
        raise RuntimeError("out of luck")

    hook = model_of(name).get_output_embeddings().register_forward_pre_hook(dies)
    layers = model_of(name).model.layers
    inner = layers[len(layers) // 2].register_forward_pre_hook(dies)
    with pytest.raises(RuntimeError, match="out of luck"):
        send_and_collect(session, [5, 6])
    hook.remove()
    inner.remove()
    assert send_and_collect(session, [5, 6]) == send_and_collect(other, [5, 6])


@pytest.mark.parametrize(
    ("name", "spec"),
    [(name, spec) for name in FAMILIES for spec in SPECS if valid_spec(name, spec) == spec],
)
def test_file_resumes_the_conversation(name: str, spec: str, tmp_path: Path) -> None:
    session, path = session_of(name, spec), tmp_path / "a.kv.safetensors"
    send_three_turns(session, name)
    session.save(path)
    loaded = Session.load(path, model_of(name), tokenizer_of(name))
    assert (loaded.tokens, loaded.turns) == (session.tokens, session.turns)
    assert loaded.cache.length == session.cache.length
    assert send_and_collect(loaded, [5, 6]) == send_and_collect(session, [5, 6])


def test_new_process_resumes_identically(tmp_path: Path) -> None:
    path = tmp_path / "a.kv.safetensors"
    session = session_of(DEMO, "affine4")
    send_and_collect(session, "import os\n" * 40, 30)
    session.save(path)
    code = (
        "import json, sys, torch, kvant\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from kvant import demo\n"
        "model = AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()\n"
        "session = kvant.Session.load(sys.argv[1], model, AutoTokenizer.from_pretrained(demo.PATH))"
        "\nsteps = session.send('def f', max_new_tokens=20, ignore_end=True)\n"
        "print(json.dumps([step.token for step in steps]))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert json.loads(out.stdout) == send_and_collect(session, "def f", 20)


def test_files_are_read_to_the_device_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: rows of a file stayed on the CPU, and the next turn of a GPU's model failed."""
    session = session_of("llama")
    send_and_collect(session, [5, 6, 7])
    session.save(tmp_path / "a.kv")
    read, devices = files.read, []

    def read_and_record(path: Path, *, device: Any) -> files.SavedCache:
        devices.append(device)
        return read(path)

    monkeypatch.setattr(files, "read", read_and_record)
    monkeypatch.setattr(TransformersDecoder, "device", torch.device("cuda"))
    Session.load(tmp_path / "a.kv", model_of("llama"), Numbers())
    session.resume(tmp_path / "a.kv")
    assert devices == [torch.device("cuda")] * 2


def test_turns_are_removed_by_their_number(chat_tokenizer: Any) -> None:
    """Regression: `/rewind` in `kvant chat` cut the newest reply, which templates had shortened."""
    chat_tokenizer.chat_template = (
        "{% for message in messages if message.role == 'user' %}{{ message.content }}\n{% endfor %}"
    )
    session = Session(model_of(DEMO), chat_tokenizer, "raw")
    send_and_collect(session, "import os", count=40)
    first = session.turns
    send_and_collect(session, "import re", count=100)
    session.rewind_turns(1)
    assert session.turns == first
    with pytest.raises(kvant.RewindError, match="2 turns to remove, of 1"):
        session.rewind_turns(2)


def test_cleared_cache_frees_its_pages_after_replayed_tokens() -> None:
    """Regression: the replayed forward kept them until the next one."""
    model = AutoModelForCausalLM.from_pretrained(demo.PATH).eval()  # no other test changed it
    session = Session(model, tokenizer_of(DEMO), "raw")
    send_and_collect(session, "import os", count=32)
    assert session.stats()["replayed"] > 0
    [*storages] = session.cache.state.storages.values()
    pages = [weakref.ref(storage.sides["keys"].open) for storage in storages]
    del storages
    session.cache.clear()
    gc.collect()
    assert [page() for page in pages] == [None] * len(pages)


def test_session_loads_a_file_in_place_of_its_own_text(tmp_path: Path) -> None:
    session, path = session_of("llama", "affine4"), tmp_path / "a.kv.safetensors"
    send_and_collect(session, [5, 6, 7])
    session.save(path)
    tokens, expected = session.tokens, send_and_collect(session, [9])
    other = session_of("llama", "raw")
    send_and_collect(other, [3, 3, 3])
    other.resume(path)
    assert other.tokens == tokens
    assert send_and_collect(other, [9]) == expected


def test_files_of_other_models_are_refused_and_change_nothing(tmp_path: Path) -> None:
    session, path = session_of("llama"), tmp_path / "a.kv.safetensors"
    send_and_collect(session, [5, 6, 7])
    session.save(path)
    other = session_of("gemma3")
    send_and_collect(other, [3])
    tokens = other.tokens
    with pytest.raises(kvant.CacheFileError, match=r"a\.kv\.safetensors.*another model"):
        other.resume(path)
    with pytest.raises(kvant.CacheFileError, match="another model"):
        Session.load(path, model_of("gemma3"), Numbers())
    plain = tmp_path / "plain.kv.safetensors"
    kvant.save(session.cache, plain)
    with pytest.raises(kvant.CacheFileError, match="without a conversation"):
        other.resume(plain)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(kvant.CacheFileError, match="checksum"):
        other.resume(path)
    assert other.tokens == tokens and other.cache.length == len(tokens) - 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"turns": [TURN | {"tokens": [5, "6"]}]},
        {"turns": [TURN | {"tokens": [5, 6]}]},
        {"turns": [TURN | {"tokens": [-1, 2, 3, 4, 5, 6, 7, 8, 9]}]},
        {"turns": [TURN | {"tokens": [1 << 30] * 9}]},
        {"turns": [TURN | {"begin": 10}]},
        {"turns": [TURN | {"shared": 1}]},
        {"turns": [TURN | {"message": 3}]},
        {"turns": [{"nonsense": 1}]},
        {"turns": []},
        {"turns": None},
        {"template": None},
        {"system": 5},
    ],
    ids=str,
)
def test_inconsistent_header_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    session, path = session_of("llama"), tmp_path / "a.kv.safetensors"
    send_and_collect(session, [5, 6, 7])
    session.save(path)
    about = dict(kvant.cache.files.read(path).about)
    about["session"] = about["session"] | wrong
    kvant.save(session.cache, path, about=about)
    with pytest.raises(kvant.CacheFileError, match=r"a\.kv\.safetensors: not a conversation"):
        Session.load(path, model_of("llama"), Numbers())


def test_same_weights_elsewhere_are_the_same_model(tmp_path: Path) -> None:
    from hf.zoo import build

    session, path = session_of("llama"), tmp_path / "a.kv.safetensors"
    send_and_collect(session, [5, 6])
    session.save(path)
    clone = build("llama")
    assert Session.load(path, clone, Numbers()).tokens == session.tokens
    with torch.no_grad():
        next(clone.parameters()).mul_(1.5)
    with pytest.raises(kvant.CacheFileError, match="another model"):
        Session.load(path, clone, Numbers())


def test_messages_are_formatted_by_the_template(chat_tokenizer: Any) -> None:
    session = Session(model_of(DEMO), chat_tokenizer, system="Be brief.")
    for message in ("import os", "def f"):
        for _ in session.send(message, max_new_tokens=5, ignore_end=True):
            pass
    first, two = session.turns
    text = (
        f"<system>Be brief.\n<user>import os\n<assistant>{first.reply}\n"
        f"<user>def f\n<assistant>{two.reply}"
    )
    assert chat_tokenizer.decode(session.tokens) == text
    stats = session.stats()
    assert stats["tokens_reused"] >= first.begin


def test_only_changed_template_text_is_recomputed(chat_tokenizer: Any) -> None:
    spec = "affine8,prefill=stored"
    session = Session(model_of(DEMO), chat_tokenizer, spec)
    other = Session(model_of(DEMO), chat_tokenizer, spec, template=False)
    for message in ("import os", "def f", "class A"):
        tokens, begin = session.tokens, session.stats()["tokens_reused"]
        send_and_collect(session, message)
        shared = count_shared_prefix(tokens, session.tokens)
        reused = session.stats()["tokens_reused"] - begin
        assert max(0, min(shared, len(tokens) - 1)) == reused
    reply = session.tokens[session.turns[-1].begin :]
    assert send_and_collect(other, session.tokens[: session.turns[-1].begin]) == reply


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", "jamba", "lfm2", DEMO])
def test_failed_reply_is_kept_up_to_the_failure(name: str, tmp_path: Path) -> None:
    session, other = session_of(name), session_of(name)
    steps = session.send(list(prompt_of(name)), max_new_tokens=9, ignore_end=True)
    reply_tokens = [next(steps).token, next(steps).token]

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    layers = model_of(name).model.layers
    hook = layers[len(layers) // 2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    hook.remove()
    send_and_collect(other, [*prompt_of(name)], 2)
    assert session.tokens == other.tokens == [*prompt_of(name), *reply_tokens]
    fork = session.fork()
    session.save(tmp_path / "a.kv")
    expected = send_and_collect(other, [5, 6])
    assert send_and_collect(fork, [5, 6]) == send_and_collect(session, [5, 6]) == expected


def test_withheld_text_belongs_to_its_reply() -> None:
    session, tokens = session_of("llama"), send_and_collect(session_of("llama"), [5, 6], 3)
    steps = session.send([5, 6], stop=[f"<{tokens[1]}>never"], ignore_end=True)
    assert [next(steps).text, next(steps).text] == [f"<{tokens[0]}>", ""]
    assert session.turns[0].reply == Numbers().decode(tokens[:2])


SHORTENING = TEMPLATE.replace(
    "{{ message.content }}", "{{ '-' if message.role == 'assistant' else message.content }}"
)


def test_template_may_shorten_past_turns(chat_tokenizer: Any, tmp_path: Path) -> None:
    chat_tokenizer.chat_template = SHORTENING
    session = Session(model_of(DEMO), chat_tokenizer)
    logs = []
    for message, count in (("import os", 40), ("def f", 5), ("class A", 7)):
        send_and_collect(session, message, count)
        logs.append(session.tokens)
    assert len(logs[1]) < len(logs[0])
    session.save(tmp_path / "a.kv")
    loaded = Session.load(tmp_path / "a.kv", model_of(DEMO), chat_tokenizer)
    assert (loaded.tokens, loaded.turns) == (session.tokens, session.turns)
    for num_kept in (2, 1):
        loaded.rewind(loaded.turns[num_kept - 1].end)
        assert (loaded.tokens, len(loaded.turns)) == (logs[num_kept - 1], num_kept)
    assert send_and_collect(loaded, "def f", 5) == logs[1][-5:]


def test_plain_text_conversation_stays_one_text(chat_tokenizer: Any, tmp_path: Path) -> None:
    session = Session(model_of(DEMO), chat_tokenizer, template=False)
    send_and_collect(session, "import os")
    session.save(tmp_path / "a.kv")
    loaded = Session.load(tmp_path / "a.kv", model_of(DEMO), chat_tokenizer)
    assert send_and_collect(loaded, "\ndef f") == send_and_collect(session, "\ndef f")


def test_template_takes_text_and_its_errors_are_reported(chat_tokenizer: Any) -> None:
    session = Session(model_of(DEMO), chat_tokenizer)
    with pytest.raises(ValueError, match="a chat template takes text"):
        session.send([5, 6])
    chat_tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(ValueError, match="no users here"):
        session.send("hello")


def test_tokens_may_have_any_integer_type(tmp_path: Path) -> None:
    expected = send_and_collect(session_of("llama"), [5, 6, 7])
    for tokens in (np.array([5, 6, 7]), torch.tensor([5, 6, 7])):
        session = session_of("llama")
        assert send_and_collect(session, tokens) == expected
        session.save(tmp_path / "a.kv")


def test_reentrant_send_continues() -> None:
    session = session_of("llama")
    steps = session.send([5, 6], max_new_tokens=2, progress=lambda *counts: session.stats())
    assert len(list(steps)) == 2


@pytest.mark.parametrize(("wrong", "error"), [([], ValueError), ([5] * 600, kvant.CapacityError)])
def test_invalid_messages_are_refused_and_change_nothing(
    wrong: list[int], error: type[Exception]
) -> None:
    session = session_of("llama")
    with pytest.raises(error, match="prompt"):
        session.send(wrong)
    assert session.tokens == [] and session.turns == []


def test_session_properties_describe_the_conversation() -> None:
    session = session_of("llama", "affine8")
    send_and_collect(session, [5, 6, 7], 4)
    send_and_collect(session, [5], 4)
    stats = session.stats()
    assert (stats["tokens"], stats["tokens_asked"], stats["tokens_reused"]) == (12, 3 + 8, 6)
    session.reset()
    assert (session.tokens, session.turns, session.cache.length) == ([], [], 0)


def test_layers_with_transformers_state_continue_and_reset() -> None:
    session = session_of("deepseek_v32")
    first = send_and_collect(session, [5, 6, 7])
    send_and_collect(session, [8])
    assert session.cache.length == len(session.tokens) - 1
    tokens = session.tokens
    with pytest.raises(kvant.CacheError, match="live in transformers"):
        session.rewind(len(tokens) - 2)
    assert session.tokens == tokens
    session.reset()
    assert send_and_collect(session, [5, 6, 7]) == first


def test_session_has_default_sampling_for_its_replies() -> None:
    hot, prompt = {"temperature": 1.5, "seed": 3}, list(prompt_of("llama"))
    session, other = session_of("llama", **hot), session_of("llama")
    assert send_and_collect(session, prompt) == send_and_collect(other, prompt, **hot)
    assert send_and_collect(session, prompt, temperature=0.0) == send_and_collect(other, prompt)
