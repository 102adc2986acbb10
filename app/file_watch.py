"""Tells when what a path names has changed: edited in place, replaced by rename, or reached through other links."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import watchfiles

from app.disconnect import cancel_and_wait

STEP_MS = 50
"""Changes that follow one another this closely are one; the library looks so often, which costs next to nothing."""
DEBOUNCE_MS = 400
"""A file that changes all the time is reported all the same after so long."""
MAX_LINKS = 40
"""As in the kernel."""


async def watch_file(path: Path, changed: Callable[[], None]) -> None:
    """Calls `changed` once it watches and after each change, so that whoever reads the file then misses nothing.

    Runs until it is cancelled. Raises OSError where the folder is not there or cannot be watched; of the folders of
    links, those that may not be read are left out.
    """
    while True:
        # looked up anew after each change, as another link may lead to another folder now
        entries = {str(entry) for entry in entries_on_the_way(path)}
        folders = _folders(entries)
        # a folder tells of itself when it is moved or removed: another one may come in its place
        of_interest = entries | folders
        edits = watchfiles.awatch(
            *folders,
            watch_filter=lambda change, where: where in of_interest,  # noqa: B023 used up before the next turn
            debounce=DEBOUNCE_MS,
            step=STEP_MS,
            recursive=False,
        )
        edit = asyncio.ensure_future(anext(edits))
        try:
            # The watch is set before the library first waits. What changed before it is seen by whoever reads now.
            await asyncio.sleep(0)
            if not edit.done():
                changed()
            await edit
        except RuntimeError as e:  # what the library makes of other errors of the system
            raise OSError(str(e)) from e
        finally:
            await cancel_and_wait(edit)
            await edits.aclose()


def _folders(entries: set[str]) -> set[str]:
    folders = {os.path.dirname(entry) for entry in entries}
    return {folder for folder in folders if not os.path.exists(folder) or os.access(folder, os.R_OK)}


def entries_on_the_way(path: Path) -> list[Path]:
    """Each symbolic link that leads to `path`, in order, and what it names in the end, in folders free of links.

    If one of them is replaced, `path` names something else. Raises OSError for too many links.
    """
    here, entries, num_links = Path("/"), [], 0
    parts = list(reversed(Path(os.path.abspath(path.parent), path.name).parts[1:]))
    while parts:
        part = parts.pop()
        if part == "..":
            here = here.parent
            continue
        entry = here / part
        if not entry.is_symlink():
            here = entry
            continue
        num_links += 1
        if num_links > MAX_LINKS:
            raise OSError(f"{path} leads through more than {MAX_LINKS} symbolic links")
        entries.append(entry)
        target = entry.readlink()
        if target.is_absolute():
            here = Path("/")
        parts += reversed([p for p in target.parts if p != "/"])
    return [*entries, here]
