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

from compatibility import FAMILIES_HEADING, PAGE, ROOT, line, other_part
from hf.shrinking import CAUSAL, tiny
from kvant import Engine, attach, cache_for, demo
from kvant.hf import support_of

TOKENS = 24  # that each mode generates
TIMEOUT_S = 300  # for one class
# Of logits, in units of their standard deviation. Rounding comes to 2e-3 where loops over layers
# amplify it (hrm_text: 1e-3 from float64 with either cache).
TOLERANCE = 5e-3
SAME, REFUSED, STOCK_FAILS, WRONG = "as stock", "refused", "stock fails", "WRONG"
KEPT = ROOT / "build" / "families"
SOURCE = str(Path(demo.__file__).parents[1])

INTRO = f"""{FAMILIES_HEADING}

Made by `python tools/families.py` (transformers {{transformers}}, torch {{torch}}, float32, CPU).
Each class of `AutoModelForCausalLM` is a tiny random model, compared over {TOKENS} tokens with the
`generate` of transformers and its own cache (`raw` rows, `tests/hf/shrinking.py`). Logits must
agree to {TOLERANCE} standard deviations up to the first different token; a different token needs
logits that agree.

* **{SAME}**: the same tokens. **{REFUSED}**: an error of kvant's that gives the reason, listed
  below. **{STOCK_FAILS}**: transformers fails as well.
* **attach** generates from a left-padded batch, **engine** serves three prompts of 5, 70 and 130
  tokens at once. **decode**: the engine decodes sequences of different lengths *together* in one
  forward, or *in turns*.
"""


class Output(NamedTuple):
    """What one `generate` returned."""

    tokens: Tensor  # [sequences, TOKENS]
    logits: Tensor | None  # [TOKENS, sequences, vocabulary]; None of beams,
    scores: Tensor | None  # which have a score of each sequence

    @property
    def computed(self) -> bool:
        """Are the logits numbers?"""
        return self.logits is None or not bool(self.logits.isnan().any())


class Mode(NamedTuple):
    """One way to generate: lengths of the prompts, and options of `generate`."""

    lengths: tuple[int, ...]
    options: dict[str, Any]


MODES = {
    "greedy": Mode((130,), {}),
    "short": Mode((3,), {}),
    "left padded": Mode((130, 70, 5), {}),
    "sampling": Mode((90, 20), {"do_sample": True, "top_k": 20}),
    "beams": Mode((100,), {"num_beams": 3}),
    "padded beams": Mode((100, 33), {"num_beams": 3}),
    "several sequences": Mode((66,), {"do_sample": True, "num_return_sequences": 3}),
}
ENGINE = (130, 70, 5)
ALL_MODES = (*MODES, "attach", "engine")


@dataclass
class Family:
    """The results of one class."""

    name: str
    results: dict[str, str] = field(default_factory=dict)  # by mode
    reasons: dict[str, str] = field(default_factory=dict)  # by mode: why it is refused or wrong
    decode: str = ""
    not_built: str | None = None

    @property
    def wrong(self) -> list[str]:
        found = [mode for mode, result in self.results.items() if result == WRONG]
        return [f"{self.name}, {mode}: {self.reasons[mode]}" for mode in found]

    def note(self, mode: str, result: str, reason: str = "") -> None:
        self.results[mode] = result
        if reason:
            self.reasons[mode] = reason


def prompts(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random tokens [prompts, longest], padded on the left, and their mask."""
    random, longest = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(5, 120, (length,), generator=random)
        mask[row, longest - length :] = 1
    return ids, mask


def generated(model: PreTrainedModel, mode: Mode, cache: Any = None) -> Output:
    """Generate with a cache of kvant's, or with the model's own."""
    ids, mask = prompts(mode.lengths)
    torch.manual_seed(7)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **{"do_sample": False}
        | mode.options
        | ({} if cache is None else {"past_key_values": cache}),
    )
    beams = mode.options.get("num_beams", 1) > 1
    logits = None if beams else torch.stack(out.logits)
    return Output(out.sequences[:, -TOKENS:], logits, out.sequences_scores if beams else None)


def difference(found: Output, expected: Output) -> str | None:
    """Say what differs by more than rounding, None if nothing does."""
    different = (found.tokens != expected.tokens).any(0).nonzero()
    if expected.logits is None or found.logits is None:
        assert found.scores is not None and expected.scores is not None
        apart = float((found.scores - expected.scores).abs().max())
        tie = apart <= TOLERANCE * float(expected.scores.abs().max())
        return None if tie or not len(different) else f"other beams, scores {apart:.1e} apart"
    count = int(different[0]) + 1 if len(different) else TOKENS
    mine, stock = found.logits[:count], expected.logits[:count]
    finite = mine.isfinite() & stock.isfinite()
    apart = float((mine - stock)[finite].abs().max() / stock[finite].std())
    return None if apart <= TOLERANCE else f"logits {apart:.1e} apart by token {count}"


def attempt(run: Callable[[], Any]) -> Any:
    """Return what a call returns, or the error that it raises."""
    try:
        return run()
    except Exception as error:
        return error


def short(error: Exception) -> str:
    """Return the first line of an error, without sizes that say nothing of its reason."""
    text = str(error).strip().partition("\n")[0].partition(" Target sizes:")[0]
    return f"{type(error).__name__}: {text}"


def refused(error: Exception) -> bool:
    """Is this an error that kvant raises itself, and not one of torch or transformers?"""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(SOURCE)


def judged(family: Family, mode: str, found: Any, expected: Any) -> None:
    """Compare the outputs, or the errors, of kvant and of transformers."""
    if isinstance(expected, Exception) or not expected.computed:
        family.note(mode, STOCK_FAILS)
    elif isinstance(found, Exception):
        family.note(mode, REFUSED if refused(found) else WRONG, short(found))
    else:
        why = difference(found, expected)
        family.note(mode, SAME if why is None else WRONG, why or "")


def served(model: PreTrainedModel, tokenizer: Any) -> list[list[int]]:
    """Return the replies of an engine to prompts of different lengths at once."""
    with Engine(model, tokenizer, "raw", pack=False) as engine:
        each = [prompts((length,), seed=length)[0][0].tolist() for length in ENGINE]
        streams = [engine.submit(ids, max_new_tokens=TOKENS, ignore_end=True) for ids in each]
        return [list(stream.result().tokens) for stream in streams]


def reply_difference(model: PreTrainedModel, length: int, reply: list[int]) -> str | None:
    """Say where a reply leaves greedy tokens that are more likely by more than rounding."""
    ids = prompts((length,), seed=length)[0]
    logits = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
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


def judge_engine(family: Family, model: PreTrainedModel, tokenizer: Any) -> None:
    found = attempt(lambda: served(model, tokenizer))
    for place, length in enumerate(ENGINE):
        reply = [0] * TOKENS if isinstance(found, Exception) else found[place]
        why = attempt(lambda n=length, r=reply: reply_difference(model, n, r))
        if isinstance(why, Exception):
            return family.note("engine", STOCK_FAILS)
        if isinstance(found, Exception):
            return family.note("engine", REFUSED if refused(found) else WRONG, short(found))
        if why is not None:
            return family.note("engine", WRONG, why)
    family.decode = "together" if support_of(model).level.name == "TOGETHER" else "in turns"
    return family.note("engine", SAME)


def examined(name: str) -> Family:
    family = Family(name)
    model = attempt(lambda: tiny(name))
    if isinstance(model, Exception):
        family.not_built = short(model)
        return family
    for mode, way in MODES.items():
        expected = attempt(lambda w=way: generated(model, w))
        found = attempt(lambda w=way: generated(model, w, cache_for(model)))
        judged(family, mode, found, expected)
    padded = MODES["left padded"]
    expected = attempt(lambda: generated(model, padded))

    def attached() -> Output:
        with attach(model, "raw", guard=False):
            return generated(model, padded)

    judged(family, "attach", attempt(attached), expected)
    judge_engine(family, model, AutoTokenizer.from_pretrained(demo.PATH))
    return family


def in_process(name: str) -> Family:
    """Examine one class in a process of its own, which may die or take too long."""
    here, there = get_context("fork").Pipe(duplex=False)
    worker = get_context("fork").Process(target=_send, args=(name, there))
    worker.start()
    there.close()
    try:
        if here.poll(TIMEOUT_S):
            found: Family = here.recv()
            return found
        why = f"no result within {TIMEOUT_S} s"
    except EOFError:
        why = "the process died"
    finally:
        worker.kill()
        worker.join()
    lost = Family(name)
    lost.note("engine", WRONG, why)
    return lost


def _send(name: str, where: Connection) -> None:
    torch.set_num_threads(1)
    where.send(examined(name))


def part(families: list[Family]) -> Iterator[str]:
    """The lines of the page."""
    yield INTRO.format(transformers=transformers.__version__, torch=torch.__version__)
    built = [family for family in families if family.not_built is None]
    counts = Counter(result for family in built for result in family.results.values())
    told = ", ".join(f"{counts[word]} {word}" for word in (SAME, REFUSED, STOCK_FAILS, WRONG))
    yield f"{len(built)} of {len(families)} classes are built; modes: {told}.\n"
    yield line("model type", "class", *ALL_MODES, "decode")
    yield line(*["---"] * (len(ALL_MODES) + 3))
    for family in built:
        cells = (family.results.get(mode, "") for mode in ALL_MODES)
        yield line(family.name, f"`{CAUSAL[family.name]}`", *cells, family.decode)
    yield "\n### Refused\n"
    yield line("model types", "modes", "the error")
    yield line("---", "---", "---")
    yield from _reasons(built)
    yield "\n### Not built\n"
    yield "Their default configurations do not become small by the list of sizes.\n"
    yield line("model type", "the error")
    yield line("---", "---")
    for family in families:
        if family.not_built is not None:
            yield line(family.name, family.not_built[:160].replace("|", "/"))


def _reasons(families: list[Family]) -> Iterator[str]:
    """One line for each reason, as many classes share theirs."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for family in families:
        for mode, reason in family.reasons.items():
            told = reason.replace(CAUSAL[family.name], "this one").replace("|", "/")
            names, modes = found.setdefault(told, ({}, {}))
            names[family.name] = modes[mode] = None
    for reason, (names, modes) in found.items():
        yield line(", ".join(names), ", ".join(modes), reason)


def rerun(names: list[str]) -> None:
    """Examine these classes, and keep their results."""
    KEPT.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for name in names:
        found = in_process(name)
        (KEPT / f"{name}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
        words = found.not_built or ", ".join(found.wrong) or "right"
        print(f"{time.monotonic() - began:.0f} s: {name}: {words}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="only these; the others as they were")
    told = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("kvant").setLevel(logging.ERROR)
    rerun(told.families or sorted(CAUSAL))
    kept = [KEPT / f"{name}.json" for name in sorted(CAUSAL)]
    if missing := [path.stem for path in kept if not path.exists()]:
        print(f"no page: {len(missing)} classes were never run, as {missing[0]}", file=sys.stderr)
        return 1
    families = [Family(**json.loads(path.read_text(encoding="utf-8"))) for path in kept]
    wrong = [problem for family in families for problem in family.wrong]
    for problem in wrong:
        print(problem, file=sys.stderr)
    if not wrong:
        text = "\n".join(part(families)) + "\n"
        PAGE.write_text(other_part(families=False) + text, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
