"""Conversations: nothing is read twice, and who goes back finds the model as it was there."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import kvant
from generation.speakers import DEMO, Numbers, model_of, prompt_of, tokenizer_of
from hf.zoo import worded
from kvant import demo
from kvant.generation import Session
from kvant.generation.prefill import count_shared_prefix

TURN = {"message": "", "reply": "", "shared": 0, "tokens": [5] * 9, "begin": 3}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECS = ["raw", "affine4", "affine8,window=16,sinks=2"]
FAMILIES = [DEMO, "llama", "gemma3", "falcon_h1", "qwen3_next", "mamba2", "mamba", "jamba"]


def session_of(name: str, spec: str = "raw", **options: Any) -> Session:
    return Session(model_of(name), tokenizer_of(name), spec, **options)


def say(session: Session, message: str | list[int], count: int = 6, **options: Any) -> list[int]:
    steps = session.send(message, max_new_tokens=count, ignore_end=True, **options)
    return [step.token for step in steps]


def talk(session: Session, name: str) -> list[list[int]]:
    """Three turns."""
    first = list(prompt_of(name))
    return [say(session, message) for message in (first, first[3:9], first[1:4])]


@pytest.fixture
def talker() -> Any:
    """A tokenizer with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_is_as_if_all_had_been_one_prompt(name: str) -> None:
    session = session_of(name, "raw")
    replies = talk(session, name)
    last = session.turns[-1]
    once = session_of(name, "raw")
    assert say(once, session.tokens[: last.begin]) == replies[-1]


@pytest.mark.parametrize("spec", ["affine8,prefill=stored", "affine4,prefill=stored"])
def test_compressed_turns_too_where_prompts_are_read_stored(spec: str) -> None:
    session = session_of(DEMO, spec)
    first = list(prompt_of(DEMO)) * 5
    say(session, first, 70)
    reply = say(session, first, 20)
    once = session_of(DEMO, spec)
    assert say(once, session.tokens[: session.turns[-1].begin], 20) == reply


@pytest.mark.parametrize("name", FAMILIES)
def test_only_what_is_new_is_read(name: str) -> None:
    session = session_of(name)
    read: list[tuple[int, int]] = []
    say(session, list(prompt_of(name)))
    for message in ([5, 6, 7], [9], [4, 4]):
        held = session.cache.length
        assert held == len(session.tokens) - 1
        next(session.send(message, progress=lambda *counts: read.append(counts)))
        session.stats()  # ends the reply
        assert session.stats()["tokens_reused"] >= held
    assert session.stats()["hit_rate"] > 0.5


def test_at_least_one_token_is_read_again() -> None:
    session = session_of("llama")
    say(session, [5, 6, 7])
    session.rewind(4)
    again = session_of("llama")
    reply = say(again, session.tokens)
    assert say(session, []) == reply


@pytest.mark.parametrize("name", FAMILIES)
def test_going_back_is_never_having_been_there(name: str) -> None:
    spec = worded(name, "affine8")
    session, other = session_of(name, spec), session_of(name, spec)
    talk(session, name)
    session.rewind(session.turns[0].end)
    say(other, list(prompt_of(name)))
    assert session.tokens == other.tokens
    assert say(session, [5, 6]) == say(other, [5, 6])
    assert session.turns == other.turns


def test_a_reply_can_be_cut_short() -> None:
    session = session_of(DEMO)
    say(session, "import os\n", 8)
    begin, tokens = session.turns[0].begin, session.tokens
    session.rewind(begin + 3)
    assert session.turns[0].reply == session.tokenizer.decode(tokens[begin : begin + 3])
    assert session.tokens == tokens[: begin + 3]
    assert say(session, "", 5) == tokens[begin + 3 :]


def test_a_message_is_taken_back_whole() -> None:
    session = session_of(DEMO)
    say(session, "import os\n")
    say(session, "class A:\n")
    before, inside = session.turns[0].end, session.turns[1].begin
    tokens = session.tokens
    for wrong in (before + 1, inside, -1, len(tokens) + 1):
        with pytest.raises(kvant.RewindError, match=f"length {wrong}:"):
            session.rewind(wrong)
    assert session.tokens == tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fork_is_independent(name: str) -> None:
    session = session_of(name, worded(name, "affine8"))
    say(session, list(prompt_of(name)))
    twin, third = session.fork(), session.fork()
    one, two = say(session, [5, 6, 7]), say(twin, [8, 9])
    assert twin.tokens[-8:-6] == [8, 9] and session.tokens[-9:-6] == [5, 6, 7]
    assert say(third, [5, 6, 7]) == one
    again = session.fork()
    again.rewind(again.turns[0].end)
    assert say(again, [8, 9]) == two


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("count", [1, 3])
def test_who_stops_early_has_said_that_much(count: int, draft: str | None) -> None:
    session = session_of("llama", draft=draft)
    steps = session.send([5, 6, 5, 6], max_new_tokens=9)
    taken = [step.token for step in islice(steps, count)]
    assert session.tokens == [5, 6, 5, 6, *taken]
    assert session.cache.length == len(session.tokens) - 1
    assert next(steps, None) is None, "the reply ended when the session was asked for more"
    assert session.turns[0].reply == Numbers().decode(taken)


def test_a_reply_that_is_dropped_ends() -> None:
    session = session_of("llama")
    next(session.send([5, 6]))
    assert session.cache.length == 2
    say(session, [7])
    assert session.tokens[:2] == [5, 6] and session.tokens[3] == 7


def test_a_message_that_is_never_answered_was_not_sent() -> None:
    session = session_of("llama")
    say(session, [5, 6])
    tokens = session.tokens

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        say(session, [9] * 9, progress=interrupted)
    assert session.tokens == tokens
    assert session.cache.length == len(tokens) - 1
    assert len(session.turns) == 1


def used_by_sending(session: Session, folder: Path) -> Session:
    say(session, [9, 4], 3)
    session.rewind(session.turns[-2].end)
    return session


def used_by_saving(session: Session, folder: Path) -> Session:
    session.save(folder / "a.kv")
    return Session.load(folder / "a.kv", model_of("llama"), Numbers())


USES = [
    used_by_sending,
    used_by_saving,
    lambda session, folder: session.fork(),
    lambda session, folder: session.stats() and session,
]


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("kept", [True, False], ids=["held", "dropped"])
@pytest.mark.parametrize("use", USES, ids=["send", "save", "fork", "stats"])
def test_a_reply_that_nobody_read_belongs_to_the_conversation(
    use: Any, kept: bool, draft: str | None, tmp_path: Path
) -> None:
    """`session.send("Hello")` without a loop was forgotten by the next call, message and all."""
    session, other = session_of("llama", draft=draft), session_of("llama", draft=draft)
    for one in (session, other):
        say(one, [5, 6, 5])
    expected = say(other, [7, 8], 5)
    stream = session.send([7, 8], max_new_tokens=5, ignore_end=True)
    if not kept:
        del stream
    used = use(session, tmp_path)
    assert (used.tokens, used.turns) == (other.tokens, other.turns)
    assert not kept or [step.token for step in stream] == expected


def test_an_unread_reply_that_is_closed_or_reset_is_never_computed() -> None:
    session = session_of("llama")
    say(session, [5, 6])
    tokens, asked = session.tokens, session.stats()["tokens_asked"]
    session.send([7]).close()
    assert session.tokens == tokens and session.stats()["tokens_asked"] == asked
    session.send([7])
    session.reset()
    assert session.tokens == [] and session.stats()["tokens_asked"] == asked


def test_an_unread_reply_that_fails_says_so_where_it_is_computed() -> None:
    session = session_of("llama", "raw,capacity=8")
    say(session, [5, 6], 2)
    tokens = session.tokens
    session.send([7] * 9)
    with pytest.raises(kvant.CapacityError):
        session.fork()
    assert session.tokens == tokens


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", DEMO])
def test_a_forward_that_dies_is_undone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session, other = session_of(name), session_of(name)
    for one in (session, other):
        say(one, list(prompt_of(name)))

    def dies(*args: Any) -> None:
        raise RuntimeError("out of luck")

    hook = model_of(name).get_output_embeddings().register_forward_pre_hook(dies)
    layers = model_of(name).model.layers
    inner = layers[len(layers) // 2].register_forward_pre_hook(dies)
    with pytest.raises(RuntimeError, match="out of luck"):
        say(session, [5, 6])
    hook.remove()
    inner.remove()
    assert say(session, [5, 6]) == say(other, [5, 6])


@pytest.mark.parametrize(
    ("name", "spec"),
    [(name, spec) for name in FAMILIES for spec in SPECS if worded(name, spec) == spec],
)
def test_a_file_goes_on_where_it_was_saved(name: str, spec: str, tmp_path: Path) -> None:
    session, path = session_of(name, spec), tmp_path / "a.kv.safetensors"
    talk(session, name)
    session.save(path)
    loaded = Session.load(path, model_of(name), tokenizer_of(name))
    assert (loaded.tokens, loaded.turns) == (session.tokens, session.turns)
    assert loaded.cache.length == session.cache.length
    assert say(loaded, [5, 6]) == say(session, [5, 6])


def test_a_fresh_process_goes_on_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.kv.safetensors"
    session = session_of(DEMO, "affine4")
    say(session, "import os\n" * 40, 30)
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
    assert json.loads(out.stdout) == say(session, "def f", 20)


def test_a_session_takes_up_a_file_in_place_of_its_own(tmp_path: Path) -> None:
    session, path = session_of("llama", "affine4"), tmp_path / "a.kv.safetensors"
    say(session, [5, 6, 7])
    session.save(path)
    tokens, expected = session.tokens, say(session, [9])
    other = session_of("llama", "raw")
    say(other, [3, 3, 3])
    other.resume(path)
    assert other.tokens == tokens
    assert say(other, [9]) == expected


def test_files_of_others_are_refused_and_change_nothing(tmp_path: Path) -> None:
    session, path = session_of("llama"), tmp_path / "a.kv.safetensors"
    say(session, [5, 6, 7])
    session.save(path)
    other = session_of("gemma3")
    say(other, [3])
    tokens = other.tokens
    with pytest.raises(kvant.CacheFileError, match=r"a\.kv\.safetensors.*another model"):
        other.resume(path)
    with pytest.raises(kvant.CacheFileError, match="another model"):
        Session.load(path, model_of("gemma3"), Numbers())
    plain = tmp_path / "plain.kv.safetensors"
    kvant.save(session.cache, plain)
    with pytest.raises(kvant.CacheFileError, match="no conversation"):
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
def test_a_header_that_does_not_fit_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    session, path = session_of("llama"), tmp_path / "a.kv.safetensors"
    say(session, [5, 6, 7])
    session.save(path)
    about = dict(kvant.cache.files.read(path).about)
    about["session"] = about["session"] | wrong
    kvant.save(session.cache, path, about=about)
    with pytest.raises(kvant.CacheFileError, match=r"a\.kv\.safetensors: not a conversation"):
        Session.load(path, model_of("llama"), Numbers())


def test_the_same_weights_elsewhere_are_the_same_model(tmp_path: Path) -> None:
    from hf.zoo import build

    session, path = session_of("llama"), tmp_path / "a.kv.safetensors"
    say(session, [5, 6])
    session.save(path)
    twin = build("llama")
    assert Session.load(path, twin, Numbers()).tokens == session.tokens
    with torch.no_grad():
        next(twin.parameters()).mul_(1.5)
    with pytest.raises(kvant.CacheFileError, match="another model"):
        Session.load(path, twin, Numbers())


def test_messages_are_laid_out_by_the_template(talker: Any) -> None:
    session = Session(model_of(DEMO), talker, system="Be brief.")
    for message in ("import os", "def f"):
        for _ in session.send(message, max_new_tokens=5, ignore_end=True):
            pass
    one, two = session.turns
    text = (
        f"<system>Be brief.\n<user>import os\n<assistant>{one.reply}\n"
        f"<user>def f\n<assistant>{two.reply}"
    )
    assert talker.decode(session.tokens) == text
    stats = session.stats()
    assert stats["tokens_reused"] >= one.begin


def test_a_template_reads_again_only_what_it_says_differently(talker: Any) -> None:
    spec = "affine8,prefill=stored"
    session = Session(model_of(DEMO), talker, spec)
    other = Session(model_of(DEMO), talker, spec, template=False)
    for message in ("import os", "def f", "class A"):
        tokens, begin = session.tokens, session.stats()["tokens_reused"]
        say(session, message)
        shared = count_shared_prefix(tokens, session.tokens)
        reused = session.stats()["tokens_reused"] - begin
        assert max(0, min(shared, len(tokens) - 1)) == reused
    reply = session.tokens[session.turns[-1].begin :]
    assert say(other, session.tokens[: session.turns[-1].begin]) == reply


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", "jamba", "lfm2", DEMO])
def test_a_reply_that_dies_is_kept_as_far_as_it_came(name: str, tmp_path: Path) -> None:
    session, other = session_of(name), session_of(name)
    steps = session.send(list(prompt_of(name)), max_new_tokens=9, ignore_end=True)
    said = [next(steps).token, next(steps).token]

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    layers = model_of(name).model.layers
    hook = layers[len(layers) // 2].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    hook.remove()
    say(other, [*prompt_of(name)], 2)
    assert session.tokens == other.tokens == [*prompt_of(name), *said]
    twin = session.fork()
    session.save(tmp_path / "a.kv")
    expected = say(other, [5, 6])
    assert say(twin, [5, 6]) == say(session, [5, 6]) == expected


def test_what_was_held_back_belongs_to_a_reply() -> None:
    session, tokens = session_of("llama"), say(session_of("llama"), [5, 6], 3)
    steps = session.send([5, 6], stop=[f"<{tokens[1]}>never"], ignore_end=True)
    assert [next(steps).text, next(steps).text] == [f"<{tokens[0]}>", ""]
    assert session.turns[0].reply == Numbers().decode(tokens[:2])


SHORTENING = TEMPLATE.replace(
    "{{ message.content }}", "{{ '-' if message.role == 'assistant' else message.content }}"
)


def test_a_template_may_shorten_what_is_past(talker: Any, tmp_path: Path) -> None:
    talker.chat_template = SHORTENING
    session = Session(model_of(DEMO), talker)
    logs = []
    for message, count in (("import os", 40), ("def f", 5), ("class A", 7)):
        say(session, message, count)
        logs.append(session.tokens)
    assert len(logs[1]) < len(logs[0])
    session.save(tmp_path / "a.kv")
    loaded = Session.load(tmp_path / "a.kv", model_of(DEMO), talker)
    assert (loaded.tokens, loaded.turns) == (session.tokens, session.turns)
    for kept in (2, 1):
        loaded.rewind(loaded.turns[kept - 1].end)
        assert (loaded.tokens, len(loaded.turns)) == (logs[kept - 1], kept)
    assert say(loaded, "def f", 5) == logs[1][-5:]


def test_a_conversation_of_one_text_stays_one(talker: Any, tmp_path: Path) -> None:
    session = Session(model_of(DEMO), talker, template=False)
    say(session, "import os")
    session.save(tmp_path / "a.kv")
    loaded = Session.load(tmp_path / "a.kv", model_of(DEMO), talker)
    assert say(loaded, "\ndef f") == say(session, "\ndef f")


def test_a_template_takes_text_and_what_it_refuses_is_said(talker: Any) -> None:
    session = Session(model_of(DEMO), talker)
    with pytest.raises(ValueError, match="a chat template takes text"):
        session.send([5, 6])
    talker.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(ValueError, match="no users here"):
        session.send("hello")


def test_tokens_may_come_in_any_numbers(tmp_path: Path) -> None:
    expected = say(session_of("llama"), [5, 6, 7])
    for tokens in (np.array([5, 6, 7]), torch.tensor([5, 6, 7])):
        session = session_of("llama")
        assert say(session, tokens) == expected
        session.save(tmp_path / "a.kv")


def test_who_asks_from_within_goes_on() -> None:
    session = session_of("llama")
    steps = session.send([5, 6], max_new_tokens=2, progress=lambda *counts: session.stats())
    assert len(list(steps)) == 2


@pytest.mark.parametrize(("wrong", "kind"), [([], ValueError), ([5] * 600, kvant.CapacityError)])
def test_wrong_messages_are_refused_and_change_nothing(
    wrong: list[int], kind: type[Exception]
) -> None:
    session = session_of("llama")
    with pytest.raises(kind, match="prompt"):
        session.send(wrong)
    assert session.tokens == [] and session.turns == []


def test_the_verbs_of_a_session_say_what_there_is() -> None:
    session = session_of("llama", "affine8")
    say(session, [5, 6, 7], 4)
    say(session, [5], 4)
    stats = session.stats()
    assert (stats["tokens"], stats["tokens_asked"], stats["tokens_reused"]) == (12, 3 + 8, 6)
    session.reset()
    assert (session.tokens, session.turns, session.cache.length) == ([], [], 0)


def test_layers_that_live_in_the_host_go_on_and_begin_anew() -> None:
    session = session_of("deepseek_v32")
    first = say(session, [5, 6, 7])
    say(session, [8])
    assert session.cache.length == len(session.tokens) - 1
    tokens = session.tokens
    with pytest.raises(kvant.CacheError, match="live in transformers"):
        session.rewind(len(tokens) - 2)
    assert session.tokens == tokens
    session.reset()
    assert say(session, [5, 6, 7]) == first
