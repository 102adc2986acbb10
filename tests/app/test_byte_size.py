"""Sizes as people write them."""

import pytest

from app.byte_size import parse_byte_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("10kB", 10_000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(text, num_bytes):
    assert parse_byte_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "MiB", "1 apple", "1e9", "0x10", "inf", "1.", "1,5GB"])
def test_anything_else_says_what_is_wanted(text):
    with pytest.raises(ValueError, match=r"is not a size: a number of bytes is wanted, or one with a unit \(KiB, MiB"):
        parse_byte_size(text)
