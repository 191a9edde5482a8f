"""A session as the command line asks for it: a new one, or one from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant import checkpoints
from kvant.attention import check_backend
from kvant.cli.checks import check_drawing, check_saved, check_spec
from kvant.cli.options import spec_of
from kvant.cli.reply import Reading, show
from kvant.devices import named_device, named_dtype
from kvant.sizes import parse_size
from kvant.spec import words


@dataclass(frozen=True)
class Wanted:
    """What the options of a command say of a session."""

    model: str | None
    kv_cache: str | None
    window_size: int | None
    window_keep: int | None
    max_context: int | None
    strategy: str
    threshold: int
    budget: str | None
    draft: str | None
    load: Path | None
    guard: bool
    trust_remote_code: bool
    device: str | None
    dtype: str
    prefill_chunk: int
    backend: str | None = None

    @property
    def spec(self) -> str:
        return spec_of(self.kv_cache, self.window_size, self.window_keep)

    @property
    def bytes(self) -> int | None:
        return None if self.budget is None else parse_size(self.budget)

    def check(self, asked: Mapping[str, Any]) -> None:
        """Before anything is loaded: what is said twice or wrong, and files that are not there."""
        from kvant.generation.strategy import strategy_of

        drawn = dict(asked)
        most = drawn.pop("max_new_tokens")
        check_drawing(drawn, max_new_tokens=most, max_context=self.max_context)
        strategy_of(self.strategy, self.threshold, self.bytes)
        check_spec(self.spec)
        check_backend(self.backend)
        named_device(self.device)
        named_dtype(self.dtype)
        checkpoints.check(self.model)
        if self.draft not in (None, "ngram"):
            checkpoints.check(self.draft, flag="--draft", tokenizer=False)
        if self.load is not None:
            self._check_file(self.load)

    def _check_file(self, file: Path) -> None:
        told = {"--kv-cache": self.kv_cache, "--kv-window-size": self.window_size}
        told["--kv-window-keep"] = self.window_keep
        for flag, value in told.items():
            if value is not None:
                raise ValueError(f"{flag} {value} beside --load: the file says how it is kept")
        check_saved(file, self.model)

    def session(
        self, asked: Mapping[str, Any], *, template: bool, system: str | None = None
    ) -> Any:
        """Load the model, and begin or go on; `asked` is what `send` will be told."""
        self.check(asked)
        model, tokenizer = checkpoints.load(self.model, **self._placed)
        from kvant.generation import Session

        spec = self._attached(model, tokenizer)
        session = Session(
            model,
            tokenizer,
            spec,
            system=system,
            template=template,
            max_context=self.max_context,
            prefill_chunk=self.prefill_chunk,
            strategy=self.strategy,
            threshold=self.threshold,
            budget=self.bytes,
            draft=self._drafter(),
            backend=self.backend,
        )
        if self.load is not None:
            session.resume(self.load)
        return session

    def _attached(self, model: Any, tokenizer: Any) -> Any:
        """The spec that the model is attached with; what it does to the model is said."""
        from kvant.probing import attached

        asked = "raw" if self.load is not None else self.spec
        with Reading("trying formats") as tried:
            spec, told = attached(model, asked, tokenizer, guard=self.guard, progress=tried.show)
        if spec != asked:
            show(f"{asked}: {spec}")
        if told is not None:
            show(f"warning: {told}")
        return spec

    def _drafter(self) -> Any:
        if self.draft in (None, "ngram"):
            return self.draft
        return checkpoints.load_model(self.draft, flag="--draft", **self._placed)

    @property
    def _placed(self) -> dict[str, Any]:
        """How models are loaded, a draft like the one that it drafts for."""
        return {
            "trust_code": self.trust_remote_code,
            "device": self.device,
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class Named:
    """What a cache is called: as it was asked for, for as long as it is stored so."""

    asked: str
    begun: str

    @classmethod
    def of(cls, wanted: Wanted, session: Any) -> Named:
        """Of a session that begins, or goes on from a file."""
        from kvant.probing import is_auto

        begun = _present(session)
        found = wanted.load is not None or is_auto(wanted.spec)
        return cls(begun if found else wanted.spec, begun)

    def now(self, session: Any) -> str:
        present = _present(session)
        return self.asked if present == self.begun else present


def _present(session: Any) -> str:
    return words(session.memory.spec) or "raw"  # where no layer has rows
