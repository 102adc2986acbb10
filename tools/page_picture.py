"""Takes the README's picture of the chat page from a running server: `python tools/page_picture.py docs/page.png`."""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

DEFAULT_QUESTION = "My parcel has not moved for a week. What now?"
WAIT_MS = 120_000


def take(url: str, target: Path, question: str, assistant: str, scheme: str, width: int, height: int) -> None:
    """Asks `question` twice, so that the second answer shows a warm prefix, and photographs the end."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            device_scale_factor=2,
        )
        page.set_default_timeout(WAIT_MS)
        page.goto(url)
        page.locator(f'input[name="assistant"][value$=":{assistant}"]').check(force=True)
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        again = page.get_by_role("button", name="Regenerate")
        again.click()
        again.wait_for(state="detached")
        again.wait_for()
        page.screenshot(path=target)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A picture of the chat page with an answer in it.")
    parser.add_argument("target", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--question", default=DEFAULT_QUESTION)
    parser.add_argument("--assistant", default="support")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--size", default="1280x800", help="width x height")
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    take(args.url, args.target, args.question, args.assistant, args.scheme, width, height)


if __name__ == "__main__":
    main()
