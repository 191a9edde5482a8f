"""Test lm-eval's tasks through kvant caches, on items written here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="pip install 'kvant[lm-eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import kvant
from kvant.checkpoints import load
from kvant.errors import SpecError
from kvant.lm_eval.__main__ import main
from kvant.lm_eval.model import KVCacheModel
from kvant.probing import measure_divergence

# As in ARC: a question, and answers of which one is right.
CHOICES = (
    ("def add(a, b):\n    return", (" a + b", " a - c", " print(a)", " import b"), 0),
    ("import os\nprint(os.", ("xyzzy", "path", "def", "====="), 1),
    ("for i in range(10):\n    print(", ("while", "class", "i", "import"), 2),
    ("class Dog(Animal):\n    def __init__(", ("1", "return", "for", "self"), 3),
    ("try:\n    f()\nexcept", (" ValueError:", " 1 + 1", " lambda", " print"), 0),
    ("if x is None:\n    x = []\nelse", (" import", ":", " def", " 12"), 1),
    ("with open(path) as file:\n    text = file.", ("None", "True", "read()", "else"), 2),
    ("while True:\n    if done:\n", ("class", "import", "    def", "        break"), 3),
)
# As in GSM8K: a worked example, and an answer to write after its mark.
QUESTIONS = (
    ("# Ann has 2 pens and buys 3.\nn = 2 + 3\n# Bob has 4 cups and buys 1.\nn =", "4 + 1"),
    ("# Six boxes of 2 eggs.\nn = 6 * 2\n# Three bags of 5 nuts.\nn =", "3 * 5"),
    ("# Seven birds, 2 fly off.\nn = 7 - 2\n# Nine cars, 4 drive off.\nn =", "9 - 4"),
)
LONG_TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(60))


@pytest.fixture(scope="module")
def bundled_model() -> tuple[Any, Any]:
    return load(None, device="cpu", dtype="float32")


def make_model(kv_cache: str, **options: Any) -> KVCacheModel:
    return KVCacheModel(kv_cache=kv_cache, device="cpu", dtype="float32", **options)


def make_requests() -> list[Instance]:
    pairs = [
        (LONG_TEXT[: 900 * i] + text, choice)
        for i, (text, c, _) in enumerate(CHOICES[:4])
        for choice in c
    ]
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_raw_gives_the_log_likelihoods_of_transformers(
    bundled_model: tuple[Any, Any], batch_size: int
) -> None:
    model, tokenizer = bundled_model
    stock = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    expected = stock.loglikelihood(make_requests(), disable_tqdm=True)
    actual = make_model("raw", batch_size=batch_size).loglikelihood(
        make_requests(), disable_tqdm=True
    )
    for (logprob, greedy), (stock_logprob, stock_greedy) in zip(actual, expected, strict=True):
        assert abs(logprob - stock_logprob) <= 1e-4 * max(1, abs(stock_logprob))
        assert greedy == stock_greedy


@pytest.mark.parametrize("spec", ["turbo2,tail=0", "affine4", "affine8,window=128"])
def test_log_likelihood_of_a_text_is_that_of_its_format(
    bundled_model: tuple[Any, Any], spec: str
) -> None:
    model, tokenizer = bundled_model
    cached = make_model(spec, max_length=1024)
    ids = [cached.prefix_token_id, *tokenizer.encode(LONG_TEXT, add_special_tokens=False)][:1025]
    text = tokenizer.decode(ids[1:])
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    divergence = measure_divergence(model, [torch.tensor([ids])], spec)
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    (logprob,) = cached.loglikelihood_rolling([request], disable_tqdm=True)
    assert logprob == pytest.approx(-float(divergence.loss.sum()), rel=1e-5)
    assert divergence.mean_kl > 1e-6  # the format changes predictions


@pytest.mark.parametrize("spec", ["affine4,tail=0", "affine8,window=128", "affine8,select=25%:0"])
def test_padding_changes_no_log_likelihood(spec: str) -> None:
    alone, together = (
        make_model(spec, batch_size=size).loglikelihood(make_requests(), disable_tqdm=True)
        for size in (1, 3)
    )
    for (logprob, greedy), (other, other_greedy) in zip(alone, together, strict=True):
        assert logprob == pytest.approx(other, rel=1e-3, abs=1e-3) and greedy == other_greedy


@pytest.mark.parametrize(
    "spec",
    ["raw", pytest.param("turbo2,tail=0", marks=pytest.mark.laws), "turbo2,tail=0,sinks=4"],
)
def test_generations_read_the_cache(bundled_model: tuple[Any, Any], spec: str) -> None:
    model, tokenizer = bundled_model
    options = {"until": ["\n\n\n\n"], "max_gen_toks": 24}
    requests = [
        Instance("generate_until", {}, (LONG_TEXT[300 * i :] + text, options), i)
        for i, text in enumerate(("def g", "# The sum of", "class A:\n    def h"))
    ]
    stock = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    cached = make_model(spec, batch_size=2)
    texts = cached.generate_until(requests, disable_tqdm=True)
    alone = make_model(spec, batch_size=1).generate_until(requests, disable_tqdm=True)
    assert texts == alone
    assert (texts == stock.generate_until(requests, disable_tqdm=True)) == (spec == "raw")
    prompt = requests[0].args[0]
    steps = kvant.generate(
        model, tokenizer, prompt, kv_cache=spec, max_new_tokens=24, stop="\n\n\n\n"
    )
    assert texts[0] == "".join(step.text for step in steps)


def test_errors_name_the_argument() -> None:
    with pytest.raises(SpecError, match="affine9"):
        make_model("affine9")
    with pytest.raises(ValueError, match=r"pretrained \./no/such: no such folder"):
        make_model("raw", pretrained="./no/such")
    with pytest.raises(ValueError, match="model_args has 'revision': known are pretrained"):
        make_model("raw", revision="main")
    pruned = make_model("raw,prune=keydiff:64", batch_size="auto", max_batch_size=2, max_length=256)
    options = {"until": ["\n"], "max_gen_toks": 4}
    request = Instance("generate_until", {}, (LONG_TEXT[-400:], options), 0)
    assert len(pruned.generate_until([request], disable_tqdm=True)) == 1
    with pytest.raises(ValueError, match="drop prune="):
        pruned.loglikelihood(make_requests()[:1], disable_tqdm=True)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
"""
CHOICE_TASK = """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
target_delimiter: ""
"""
QUESTION_TASK = """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""


def write_task(folder: Path, name: str, task: str, rows: list[dict[str, Any]]) -> None:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file) + task, "utf-8")


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "kvant.lm_eval", *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_command_line_runs_tasks_of_a_folder(tmp_path: Path) -> None:
    choices = [{"text": t, "choices": list(c), "answer": a} for t, c, a in CHOICES]
    write_task(tmp_path, "choices", CHOICE_TASK, choices)
    write_task(
        tmp_path, "questions", QUESTION_TASK, [{"text": t, "answer": a} for t, a in QUESTIONS]
    )
    done = run_command(
        tmp_path,
        *("--model_args", 'kv_cache="affine4,tail=0",dtype=float32,batch_size=2'),
        *("--tasks", "choices,questions", "--include_path", str(tmp_path)),
        *("--output_path", str(tmp_path / "out")),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    report = json.loads(file.read_text("utf-8"))
    assert report["config"]["kv_cache"] == "affine4,tail=0"
    results = report["results"]
    assert results["choices"]["acc,none"] >= 0.75  # easy for a model of Python
    assert 0 <= results["questions"]["exact_match,none"] <= 1
    assert "choices" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "hf"), "drop --model"),
        (("--model_args", "kv_cache=affine9"), "kvant.lm_eval: .*affine9"),
        (("--model_args", "kv_cache=affine4,tail=0"), "has 'tail': .* needs quotes"),
    ],
)
def test_command_line_names_what_is_wrong(
    tmp_path: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path, "choices", CHOICE_TASK, [{"text": "a", "choices": ["b"], "answer": 0}])
    words = ("--tasks", "choices", "--include_path", str(tmp_path), *arguments)
    monkeypatch.setattr(sys, "argv", ["kvant.lm_eval", *words])
    own_tasks = partial(TaskManager, include_defaults=False)  # its own are read in seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own_tasks)
    with pytest.raises(SystemExit, match=message):  # a text: printed, with exit code 1
        main()
