"""Test amounts of memory with units."""

import pytest

from kvant.errors import SpecError
from kvant.platform.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("1.5GiB", 3 * 2**29),
        ("1.5GB", 1_500_000_000),
        (" 800 MB ", 800_000_000),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("4gb", 4_000_000_000),
        ("4G", 4_000_000_000),
        ("4gib", 2**32),
        ("4Gi", 2**32),
        ("7b", 7),
        ("0", 0),
        ("1024", 1024),
        ("0.0015KB", 1),
        ("9007199254740993B", 2**53 + 1),
    ],
)
def test_sizes_have_units_of_1000_and_of_1024(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("4 parsecs", "nearest: 4GB"),
        ("-4GB", "such as 1.5GiB"),
        ("GB", "such as 1.5GiB"),
        ("", "such as 1.5GiB"),
        ("1e9", "such as 1.5GiB"),
        ("2", "such as 2GiB or 2B"),
        ("1.5", "such as 1.5GiB or 1.5B"),
        ("9" * 5000, "such as 1.5GiB"),
    ],
)
def test_invalid_size_is_refused(text: str, way_out: str) -> None:
    with pytest.raises(SpecError, match=way_out):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 * 2**29, "1.5 GiB"), (2**40, "1 TiB")],
)
def test_sizes_are_written_in_units_of_1024(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
    assert parse_size(text) == nbytes
