"""What stands under vendor/ is what tools/vendor_page.py fetched, byte for byte (its `--check` asks the registry)."""

import hashlib

from app import page
from tools import vendor_page

FETCHED = {
    "htm.js": "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
    "markdown-it.js": "40ee4f75f35a4c8d24f1d7a902f4c56a26da8bd9eec5bb02ad4a672d6ba05525",
    "preact-hooks.js": "5c65ab263688d0805862fd0807c779af02c2799c44fda0873dfcb870d0da70a0",
    "preact.js": "225d7a773766e6fb2cfcc45274fe41d2059f5782f3f2c4569aa5132a2d3a2902",
    "purify.js": "7d86ceda137fff72b0726a35241e92b6edb5610349d04992b625e48ee9871244",
}


def test_the_files_are_as_fetched() -> None:
    folder = page.STATIC / "vendor"
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == FETCHED


def test_every_package_stands_in_the_notices() -> None:
    notices = vendor_page.NOTICES.read_text("utf-8")
    for package in vendor_page.PACKAGES:
        assert f"{package.name} {package.version} ({package.license})" in notices
    assert "SmolLM2-135M-Instruct" in notices


def test_bare_imports_and_source_maps_are_edited_and_nothing_else() -> None:
    source = 'import{options as n}from"preact";const s="preact";\n//# sourceMappingURL=hooks.mjs.map\n'
    assert vendor_page.edit(source) == 'import{options as n}from"./preact.js";const s="preact";\n'
