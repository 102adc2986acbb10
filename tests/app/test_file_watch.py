"""A file that is watched through renames and links."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from app.disconnect import cancel_and_wait
from app.file_watch import entries_on_the_way, watch_file

GUARD_S = 60


class Watched:
    """Counts what is told. The first call, which says that it is watched now, is taken off."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[None] = asyncio.Queue()

    async def wait(self) -> None:
        """For one more; the time only guards against hanging."""
        async with asyncio.timeout(GUARD_S):
            await self.told.get()


@contextlib.asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Watched]:
    watched = Watched()
    task = asyncio.create_task(watch_file(path, lambda: watched.told.put_nowait(None)))
    try:
        await watched.wait()
        yield watched
    finally:
        await cancel_and_wait(task)


def edit_in_place(path: Path) -> None:
    path.write_text("edited")


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_text("replaced")
    new.rename(path)


def move_away_and_write(path: Path) -> None:
    """As vim does with a backup."""
    path.rename(path.with_name("config.toml~"))
    path.write_text("written")


@pytest.mark.parametrize("edit", [edit_in_place, replace, move_away_and_write, Path.unlink, os.utime])
async def test_each_way_to_edit_is_seen(tmp_path: Path, edit: Callable[[Path], None]) -> None:
    path = tmp_path / "config.toml"
    path.write_text("first")
    async with watching(path) as watched:
        edit(path)
        await watched.wait()


async def test_one_edit_after_the_other_is_seen_and_other_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("first")
    async with watching(path) as watched:
        for number in range(5):
            (tmp_path / "other").write_text(f"{number}")
            replace(path)
            await watched.wait()
        path.unlink()
        await watched.wait()
        path.write_text("it is back")
        await watched.wait()
        assert watched.told.empty()


async def test_a_mounted_folder_whose_contents_are_swapped_by_a_link(tmp_path: Path) -> None:
    """As Kubernetes does it: config.toml -> ..data/config.toml, ..data -> ..1, and the latter link is replaced."""
    for version in ("..1", "..2", "..3"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.toml").write_text(version)
    (tmp_path / "..data").symlink_to("..1")
    path = tmp_path / "config.toml"
    path.symlink_to("..data/config.toml")
    async with watching(path) as watched:
        for old, new in (("..1", "..2"), ("..2", "..3")):
            (tmp_path / "..tmp").symlink_to(new)
            (tmp_path / "..tmp").rename(tmp_path / "..data")
            shutil.rmtree(tmp_path / old)
            await watched.wait()
            assert path.read_text() == new
        edit_in_place(tmp_path / "..3" / "config.toml")
        await watched.wait()


async def test_a_folder_in_whose_place_another_one_comes(tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "folder" / "config.toml"
    other = tmp_path / "other"
    for one in (folder, other):
        one.mkdir()
        (one / "config.toml").write_text("first")
    async with watching(path) as watched:
        folder.rename(tmp_path / "away")
        other.rename(folder)
        await watched.wait()
        edit_in_place(path)
        await watched.wait()


async def test_without_its_folder_it_cannot_be_watched(tmp_path: Path) -> None:
    told: list[None] = []
    with pytest.raises(FileNotFoundError):
        await watch_file(tmp_path / "nowhere" / "config.toml", lambda: told.append(None))
    assert told == []


async def test_a_watch_ends_at_any_moment_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("first")
    for num_turns in range(12):
        task = asyncio.create_task(watch_file(path, lambda: None))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await cancel_and_wait(task)
        assert task.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_every_link_on_the_way_is_an_entry(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "real").mkdir()
    (root / "real" / "file").write_text("")
    (root / "folder").symlink_to("real")
    (root / "real" / "up").symlink_to("../folder/file")
    (root / "start").symlink_to(root / "folder" / "up")
    expected = ["start", "folder", "real/up", "folder", "real/file"]
    assert entries_on_the_way(root / "start") == [root / entry for entry in expected]
    assert entries_on_the_way(root / "real" / "file") == [root / "real" / "file"]
    assert entries_on_the_way(root / "none" / "file") == [root / "none" / "file"]


def test_links_that_lead_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="more than 40 symbolic links"):
        entries_on_the_way(tmp_path / "a")
