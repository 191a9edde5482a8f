"""A session as the command line asks for it: a new one, or one from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.checkpoints import load
from kvant.cli.options import spec_of
from kvant.cli.reply import show
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

    @property
    def spec(self) -> str:
        """What the cache is called: a spec, or the file that says what it is."""
        if self.load is not None:
            return str(self.load)
        return spec_of(self.kv_cache, self.window_size, self.window_keep)

    def told(self, session: Any) -> str:
        """The same, or what `auto` was found to be."""
        return words(session.memory.spec) if self.spec.startswith("auto") else self.spec

    def check(self) -> None:
        """Before anything is loaded: what is said twice, and files that are not there."""
        told = {"--kv-cache": self.kv_cache, "--kv-window-size": self.window_size}
        told["--kv-window-keep"] = self.window_keep
        if self.load is not None:
            for flag, value in told.items():
                if value is not None:
                    raise ValueError(f"{flag} {value} beside --load: the file says how it is kept")
            check_readable(self.load, "--load")

    def session(self, *, template: bool, system: str | None = None) -> Any:
        """Load the model, and begin or go on."""
        self.check()
        model, tokenizer = load(self.model, trust_code=self.trust_remote_code)
        from kvant.generation import Session

        spec = self._attached(model, tokenizer)
        session = Session(
            model,
            tokenizer,
            spec,
            system=system,
            template=template,
            max_context=self.max_context,
            strategy=self.strategy,
            threshold=self.threshold,
            budget=None if self.budget is None else parse_size(self.budget),
            draft=self._drafter(),
        )
        if self.load is not None:
            session.resume(self.load)
        return session

    def _attached(self, model: Any, tokenizer: Any) -> Any:
        """The spec that the model is attached with; what it does to the model is said."""
        from kvant.probing import attached

        asked = "raw" if self.load is not None else self.spec
        spec, told = attached(model, asked, tokenizer, guard=self.guard)
        if spec != asked:
            show(f"{asked}: {spec}")
        if told is not None:
            show(f"warning: {told}")
        return spec

    def _drafter(self) -> Any:
        if self.draft in (None, "ngram"):
            return self.draft
        return load(self.draft, flag="--draft", trust_code=self.trust_remote_code)[0]


def check_readable(path: Path, flag: str) -> None:
    if not path.is_file():
        raise ValueError(f"{flag} {path}: there is no such file")


def check_writable(path: Path, flag: str) -> None:
    """Said before the work, and not after it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: the name of a file in a folder that exists is needed")


def read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} cannot be read: it is no text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error


def checked_text(text: str, where: str) -> str:
    """Bytes that are no text come as lone surrogates, and no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} is no text in UTF-8") from None
    return text
