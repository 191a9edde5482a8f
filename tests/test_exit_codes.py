"""How a command ends."""

from __future__ import annotations

import pytest

from kvant.errors import CapacityError
from kvant.exit_codes import ending


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ValueError("--lengths a\nand more"), 2, "error: --lengths a\n"),
        (CapacityError("too long"), 2, "error: too long\n"),
        (ValueError(), 2, "error: ValueError\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
    ids=repr,
)
def test_it_is_one_line_and_an_exit_code(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, ending():
        raise error
    assert (end.value.code, *capsys.readouterr()) == (code, "", told)


def test_an_error_of_our_own_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError), ending():
        raise AssertionError
