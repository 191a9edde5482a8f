"""Runs every causal language model class of transformers in nine modes, for docs/compatibility.md.

A quarter of an hour on one core: `python tools/families.py`. Each class is a tiny random model in
float32, in a process of its own. The results are kept in build/families: `python tools/families.py
NAME ...` runs these classes again and takes the others from there. If any result is wrong, it says
so, exits with 1 and leaves the page as it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from compatibility import DOC_PAGE, FAMILIES_HEADING, ROOT, format_line, read_other_part
from hf.shrinking import CAUSAL, tiny
from kvant import Engine, attach, cache_for, demo
from kvant.hf import get_support

NEW_TOKENS = 24  # that each mode generates
TIMEOUT_S = 300  # for one class
# Of logits, in units of their standard deviation. Rounding comes to 2e-3 where loops over layers
# amplify it (hrm_text: 1e-3 from float64 with either cache).
TOLERANCE = 5e-3
SAME, REFUSED, STOCK_FAILS, WRONG = "as stock", "refused", "stock fails", "WRONG"
RESULTS_FOLDER = ROOT / "build" / "families"
KVANT_FOLDER = str(Path(demo.__file__).parents[1])

INTRO = f"""{FAMILIES_HEADING}

Made by `python tools/families.py` (transformers {{transformers}}, torch {{torch}}, float32, CPU).
Each class of `AutoModelForCausalLM` is a tiny random model, compared over {NEW_TOKENS} tokens with
the `generate` of transformers and its own cache (`raw` rows, `tests/hf/shrinking.py`). Logits must
agree to {TOLERANCE} standard deviations up to the first different token; a different token needs
logits that agree.

* **{SAME}**: the same tokens. **{REFUSED}**: an error of kvant's that gives the reason, listed
  below. **{STOCK_FAILS}**: transformers fails as well.
* **attach** generates from a left-padded batch, **engine** serves three prompts of 5, 70 and 130
  tokens at once. **decode**: the engine decodes sequences of different lengths *together* in one
  forward, or *in turns*.
"""


class GenerateOutput(NamedTuple):
    """What one `generate` returned."""

    tokens: Tensor  # [sequences, TOKENS]
    logits: Tensor | None  # [TOKENS, sequences, vocabulary]; None of beams,
    scores: Tensor | None  # which have a score of each sequence

    @property
    def is_finite(self) -> bool:
        """Are the logits numbers?"""
        return self.logits is None or not bool(self.logits.isnan().any())


class GenerateMode(NamedTuple):
    """One way to generate: lengths of the prompts, and options of `generate`."""

    lengths: tuple[int, ...]
    options: dict[str, Any]


MODES = {
    "greedy": GenerateMode((130,), {}),
    "short": GenerateMode((3,), {}),
    "left padded": GenerateMode((130, 70, 5), {}),
    "sampling": GenerateMode((90, 20), {"do_sample": True, "top_k": 20}),
    "beams": GenerateMode((100,), {"num_beams": 3}),
    "padded beams": GenerateMode((100, 33), {"num_beams": 3}),
    "several sequences": GenerateMode((66,), {"do_sample": True, "num_return_sequences": 3}),
}
ENGINE_LENGTHS = (130, 70, 5)
ALL_MODES = (*MODES, "attach", "engine")


@dataclass
class FamilyResults:
    """The results of one class."""

    name: str
    results: dict[str, str] = field(default_factory=dict)  # by mode
    reasons: dict[str, str] = field(default_factory=dict)  # by mode: why it is refused or wrong
    decode: str = ""
    not_built: str | None = None

    @property
    def problems(self) -> list[str]:
        found = [mode for mode, result in self.results.items() if result == WRONG]
        return [f"{self.name}, {mode}: {self.reasons[mode]}" for mode in found]

    def add_result(self, mode: str, result: str, reason: str = "") -> None:
        self.results[mode] = result
        if reason:
            self.reasons[mode] = reason


def make_prompts(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random tokens [prompts, longest], padded on the left, and their mask."""
    random, longest = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(5, 120, (length,), generator=random)
        mask[row, longest - length :] = 1
    return ids, mask


def generate_output(
    model: PreTrainedModel, mode: GenerateMode, cache: Any = None
) -> GenerateOutput:
    """Generate with a cache of kvant's, or with the model's own."""
    ids, mask = make_prompts(mode.lengths)
    torch.manual_seed(7)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **{"do_sample": False}
        | mode.options
        | ({} if cache is None else {"past_key_values": cache}),
    )
    beams = mode.options.get("num_beams", 1) > 1
    logits = None if beams else torch.stack(out.logits)
    return GenerateOutput(
        out.sequences[:, -NEW_TOKENS:], logits, out.sequences_scores if beams else None
    )


def describe_difference(output: GenerateOutput, expected: GenerateOutput) -> str | None:
    """Say what differs by more than rounding, None if nothing does."""
    different = (output.tokens != expected.tokens).any(0).nonzero()
    if expected.logits is None or output.logits is None:
        assert output.scores is not None and expected.scores is not None
        apart = float((output.scores - expected.scores).abs().max())
        tie = apart <= TOLERANCE * float(expected.scores.abs().max())
        return None if tie or not len(different) else f"other beams, scores {apart:.1e} apart"
    count = int(different[0]) + 1 if len(different) else NEW_TOKENS
    mine, stock = output.logits[:count], expected.logits[:count]
    finite = mine.isfinite() & stock.isfinite()
    apart = float((mine - stock)[finite].abs().max() / stock[finite].std())
    return None if apart <= TOLERANCE else f"logits {apart:.1e} apart by token {count}"


def try_call(run: Callable[[], Any]) -> Any:
    """Return what a call returns, or the error that it raises."""
    try:
        return run()
    except Exception as error:
        return error


def shorten_error(error: Exception) -> str:
    """Return the first line of an error, without sizes that say nothing of its reason."""
    text = str(error).strip().partition("\n")[0].partition(" Target sizes:")[0]
    return f"{type(error).__name__}: {text}"


def is_refusal(error: Exception) -> bool:
    """Is this an error that kvant raises itself, and not one of torch or transformers?"""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(KVANT_FOLDER)


def judge_mode(family: FamilyResults, mode: str, output: Any, expected: Any) -> None:
    """Compare the outputs, or the errors, of kvant and of transformers."""
    if isinstance(expected, Exception) or not expected.is_finite:
        family.add_result(mode, STOCK_FAILS)
    elif isinstance(output, Exception):
        family.add_result(mode, REFUSED if is_refusal(output) else WRONG, shorten_error(output))
    else:
        why = describe_difference(output, expected)
        family.add_result(mode, SAME if why is None else WRONG, why or "")


def run_engine(model: PreTrainedModel, tokenizer: Any) -> list[list[int]]:
    """Return the replies of an engine to prompts of different lengths at once."""
    with Engine(model, tokenizer, "raw", pack=False) as engine:
        each = [make_prompts((length,), seed=length)[0][0].tolist() for length in ENGINE_LENGTHS]
        streams = [engine.submit(ids, max_new_tokens=NEW_TOKENS, ignore_end=True) for ids in each]
        return [list(stream.result().tokens) for stream in streams]


def describe_reply_difference(model: PreTrainedModel, length: int, reply: list[int]) -> str | None:
    """Say where a reply leaves greedy tokens that are more likely by more than rounding."""
    ids = make_prompts((length,), seed=length)[0]
    logits = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    ).logits
    for place, (token, row) in enumerate(zip(reply, logits, strict=True)):
        best = int(row[0].argmax())
        if token != best:
            behind = float((row[0, best] - row[0, token]) / row[row.isfinite()].std())
            tie = behind <= TOLERANCE
            return None if tie else f"prompt of {length}: token {place} is {behind:.1e} behind"
    return None


def judge_engine(family: FamilyResults, model: PreTrainedModel, tokenizer: Any) -> None:
    found = try_call(lambda: run_engine(model, tokenizer))
    for place, length in enumerate(ENGINE_LENGTHS):
        reply = [0] * NEW_TOKENS if isinstance(found, Exception) else found[place]
        why = try_call(lambda n=length, r=reply: describe_reply_difference(model, n, r))
        if isinstance(why, Exception):
            return family.add_result("engine", STOCK_FAILS)
        if isinstance(found, Exception):
            return family.add_result(
                "engine", REFUSED if is_refusal(found) else WRONG, shorten_error(found)
            )
        if why is not None:
            return family.add_result("engine", WRONG, why)
    family.decode = "together" if get_support(model).level.name == "RAGGED_BATCH" else "in turns"
    return family.add_result("engine", SAME)


def examine_class(name: str) -> FamilyResults:
    family = FamilyResults(name)
    model = try_call(lambda: tiny(name))
    if isinstance(model, Exception):
        family.not_built = shorten_error(model)
        return family
    for mode, way in MODES.items():
        expected = try_call(lambda w=way: generate_output(model, w))
        found = try_call(lambda w=way: generate_output(model, w, cache_for(model)))
        judge_mode(family, mode, found, expected)
    padded = MODES["left padded"]
    expected = try_call(lambda: generate_output(model, padded))

    def attached() -> GenerateOutput:
        with attach(model, "raw", guard=False):
            return generate_output(model, padded)

    judge_mode(family, "attach", try_call(attached), expected)
    judge_engine(family, model, AutoTokenizer.from_pretrained(demo.PATH))
    return family


def examine_in_process(name: str) -> FamilyResults:
    """Examine one class in a process of its own, which may die or take too long."""
    here, there = get_context("fork").Pipe(duplex=False)
    worker = get_context("fork").Process(target=_send_results, args=(name, there))
    worker.start()
    there.close()
    try:
        if here.poll(TIMEOUT_S):
            found: FamilyResults = here.recv()
            return found
        why = f"no result within {TIMEOUT_S} s"
    except EOFError:
        why = "the process died"
    finally:
        worker.kill()
        worker.join()
    lost = FamilyResults(name)
    lost.add_result("engine", WRONG, why)
    return lost


def _send_results(name: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    connection.send(examine_class(name))


def make_part(families: list[FamilyResults]) -> Iterator[str]:
    """The lines of the page."""
    yield INTRO.format(transformers=transformers.__version__, torch=torch.__version__)
    built = [family for family in families if family.not_built is None]
    counts = Counter(result for family in built for result in family.results.values())
    told = ", ".join(f"{counts[word]} {word}" for word in (SAME, REFUSED, STOCK_FAILS, WRONG))
    yield f"{len(built)} of {len(families)} classes are built; modes: {told}.\n"
    yield format_line("model type", "class", *ALL_MODES, "decode")
    yield format_line(*["---"] * (len(ALL_MODES) + 3))
    for family in built:
        cells = (family.results.get(mode, "") for mode in ALL_MODES)
        yield format_line(family.name, f"`{CAUSAL[family.name]}`", *cells, family.decode)
    yield "\n### Refused\n"
    yield format_line("model types", "modes", "the error")
    yield format_line("---", "---", "---")
    yield from _format_reasons(built)
    yield "\n### Not built\n"
    yield "Their default configurations do not become small by the list of sizes.\n"
    yield format_line("model type", "the error")
    yield format_line("---", "---")
    for family in families:
        if family.not_built is not None:
            yield format_line(family.name, family.not_built[:160].replace("|", "/"))


def _format_reasons(families: list[FamilyResults]) -> Iterator[str]:
    """One line for each reason, as many classes share theirs."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for family in families:
        for mode, reason in family.reasons.items():
            told = reason.replace(CAUSAL[family.name], "this one").replace("|", "/")
            names, modes = found.setdefault(told, ({}, {}))
            names[family.name] = modes[mode] = None
    for reason, (names, modes) in found.items():
        yield format_line(", ".join(names), ", ".join(modes), reason)


def run_classes(names: list[str]) -> None:
    """Examine these classes, and keep their results."""
    RESULTS_FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for name in names:
        found = examine_in_process(name)
        (RESULTS_FOLDER / f"{name}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
        words = found.not_built or ", ".join(found.problems) or "right"
        print(f"{time.monotonic() - began:.0f} s: {name}: {words}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="only these; the others as they were")
    told = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("kvant").setLevel(logging.ERROR)
    run_classes(told.families or sorted(CAUSAL))
    kept = [RESULTS_FOLDER / f"{name}.json" for name in sorted(CAUSAL)]
    if missing := [path.stem for path in kept if not path.exists()]:
        print(f"no page: {len(missing)} classes were never run, as {missing[0]}", file=sys.stderr)
        return 1
    families = [FamilyResults(**json.loads(path.read_text(encoding="utf-8"))) for path in kept]
    wrong = [problem for family in families for problem in family.problems]
    for problem in wrong:
        print(problem, file=sys.stderr)
    if not wrong:
        text = "\n".join(make_part(families)) + "\n"
        DOC_PAGE.write_text(read_other_part(families=False) + text, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
