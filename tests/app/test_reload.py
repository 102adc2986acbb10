"""The configuration put in force again: what requests see of it, and that no edit is lost or comes too late."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from app import reload
from app.disconnect import cancel_and_wait
from app.live_config import Configured
from app.reload import Reloader
from app.tenants import Tenant
from engine.protocol import AddRequest, TenantShare
from tests.app.serving import Gateway, chat_body, http_request, make_services, serving, sse_data
from tests.scripted_engine import Item, Pause, ScriptedEngineClient

A = Tenant("a")
GUARD_S = 60
TEXT = """
admin_key = "admin-key-0123456789"
[[tenants]]
id = "a"
keys = ["key-of-tenant-a1", "key-of-tenant-a2"]
max_running = 3
[[assistants]]
id = "support"
tenant = "a"
instructions = "Be kind."
[[assistants]]
id = "sales"
tenant = "a"
instructions = "Be quick."
"""
SALES = TEXT[TEXT.rindex("[[assistants]]") :]


def waits_once(request: AddRequest) -> Iterator[Item]:
    yield from b"abc"
    yield Pause()
    yield from b"def"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "config.toml"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


@contextlib.asynccontextmanager
async def following(path: Path) -> AsyncIterator[Gateway]:
    """A gateway that follows the file at `path`, to whose tenant the client belongs."""
    engine = ScriptedEngineClient(script=waits_once)
    async with serving(path.parent.parent, engine, config_path=path) as gateway:
        gateway.client.headers["Authorization"] = "Bearer key-of-tenant-a1"
        await engine.wait_pinned(2)
        yield gateway


async def until(condition: Callable[[], bool]) -> None:
    """Asks again and again: threads and the kernel do the work. The time only guards against hanging."""
    async with asyncio.timeout(GUARD_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def write(path: Path, text: str) -> None:
    """In place: for a moment the file is empty."""
    path.write_text(text)


def replace(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.rename(path)


async def edit(gateway: Gateway, path: Path, text: str) -> None:
    """Replaces the file and returns when that is in force."""
    old = gateway.services.current
    replace(path, text)
    await until(lambda: gateway.services.current is not old)


def trunks(gateway: Gateway) -> list[str]:
    return sorted(bytes(t for t in trunk.token_ids if t < 256).decode() for trunk in gateway.engine.trunks)


# ---- what requests see


async def test_an_edited_assistant_is_another_version_and_its_trunk_another_pin(path: Path) -> None:
    async with following(path) as gateway:
        before = gateway.services.current.assistants
        await edit(gateway, path, TEXT.replace("Be kind.", "Be brief."))
        after = gateway.services.current.assistants
        changed, kept = zip(before, after, strict=True)
        assert changed[0].version != changed[1].version
        assert kept[0] is kept[1]
        wanted = ["system\nBe brief.\nuser\n", "system\nBe quick.\nuser\n"]
        await gateway.engine.wait_for(lambda: trunks(gateway) == wanted)
        chat = asyncio.create_task(gateway.chat(model="byte-model:support"))
        await gateway.engine.wait_paused()
        gateway.engine.release()
        assert (await chat).status_code == 200
        assert bytes(t for t in gateway.engine.requests[0].prompt_ids if t < 256).startswith(b"system\nBe brief.\nuser")


async def test_without_its_key_a_tenant_is_refused_and_what_runs_goes_on(path: Path) -> None:
    async with following(path) as gateway:
        reader, writer = await gateway.connect(keyed(http_request("/v1/chat/completions", chat_body(stream=True))))
        await gateway.engine.wait_paused()
        await edit(gateway, path, TEXT.replace('"key-of-tenant-a1", ', ""))
        assert (await gateway.chat()).status_code == 401
        assert (await gateway.client.get("/v1/models")).status_code == 401
        other = {"Authorization": "Bearer key-of-tenant-a2"}
        assert (await gateway.client.get("/v1/models", headers=other)).status_code == 200
        gateway.engine.release()
        assert list(sse_data(await to_the_end(reader)))[-1] == "[DONE]"
        writer.close()
        await writer.wait_closed()


async def test_an_assistant_that_is_removed_is_unknown_and_its_chats_end_well(path: Path) -> None:
    async with following(path) as gateway:
        chat = asyncio.create_task(gateway.chat(model="byte-model:sales"))
        await gateway.engine.wait_paused()
        await edit(gateway, path, TEXT.removesuffix(SALES))
        refused = await gateway.chat(model="byte-model:sales")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert len((await gateway.client.get("/v1/models")).json()["data"]) == 2
        gateway.engine.release()
        assert (await chat).json()["choices"][0]["message"]["content"] == "abcdef"
        await gateway.engine.wait_for(lambda: len(gateway.engine.trunks) == 1)
        await edit(gateway, path, TEXT)
        await gateway.engine.wait_pinned(2)


async def test_limits_origins_admin_key_and_shares_are_those_of_now(path: Path) -> None:
    async with following(path) as gateway:
        asked = {"Origin": "https://chat.example.com"}
        assert (await gateway.client.get("/v1/models", headers=asked)).status_code == 403
        assert gateway.engine.core.shares == [TenantShare(tenant="a", max_running=3)]
        changed = TEXT.replace("admin-key-0123456789", "another-admin-key").replace("max_running = 3", "weight = 2")
        await edit(
            gateway, path, 'allowed_origins = ["https://chat.example.com"]\n' + changed + "[limits]\nmax_choices = 2"
        )
        assert (await gateway.client.get("/v1/models", headers=asked)).status_code == 200
        assert (await gateway.chat(n=3)).status_code == 400
        assert gateway.engine.core.shares == [TenantShare(tenant="a", weight=2.0)]
        for key, status in (("admin-key-0123456789", 401), ("another-admin-key", 200)):
            answer = await gateway.client.get("/admin/stats", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status


async def test_a_request_goes_on_with_what_it_began_with(path: Path) -> None:
    """Its body comes after the edit: it is answered as one that came whole before."""
    async with following(path) as gateway:
        body = chat_body(model="byte-model:sales", n=3)
        head, _, rest = keyed(http_request("/v1/chat/completions", body)).partition(b"\r\n\r\n")
        begun = asyncio.Event()
        reader, writer = await gateway.connect(head + b"\r\n\r\n" + rest[:1])
        authenticate = gateway.services.current.tenants.authenticate

        def begin(authorization: str | None) -> Tenant:
            begun.set()
            return authenticate(authorization)

        gateway.services.current.tenants.authenticate = begin  # type: ignore[method-assign]
        await begun.wait()
        without = TEXT.removesuffix(SALES).replace('"key-of-tenant-a1", ', "") + "[limits]\nmax_choices = 2"
        await edit(gateway, path, without)
        writer.write(rest[1:])
        await gateway.engine.wait_paused(3)
        gateway.engine.release()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()


# ---- what cannot be used


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "is not valid TOML"),
        (f"x = {'[' * 5000}{']' * 5000}", "is not valid TOML"),
        (f"x = {'9' * 5000}", "is not valid TOML"),
        ("", "is empty"),
        ("# nothing", "is empty"),
        (TEXT.replace('tenant = "a"', 'tenant = "b"'), "belongs to the unknown tenant 'b'"),
        ('[[assistants]]\nid = "x"\nshared = true\ninstructions = "x"', "has no tenants any more"),
        (TEXT.replace('"Be quick."', '"x"\ntemplate_options = {messages = 1}'), "must not set 'messages'"),
        (None, "cannot be read"),
    ],
)
async def test_a_file_that_cannot_be_used_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, text: str | None, complaint: str
) -> None:
    async with following(path) as gateway:
        old = gateway.services.current
        if text is None:
            os.unlink(path)
        else:
            replace(path, text)
        await until(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert record.getMessage().startswith("the configuration stays as it was: ")
        assert complaint in record.getMessage()
        assert "\n" not in record.getMessage()
        assert "key-of-tenant" not in record.getMessage()
        assert gateway.services.current is old
        await edit(gateway, path, TEXT.replace("Be kind.", "Be brief."))  # and the next edit counts


async def test_another_redis_needs_a_restart_and_is_told_without_its_password(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(path) as gateway:
        await edit(gateway, path, 'redis_url = "redis://:password@redis"\n' + TEXT)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "redis_url has changed, which needs a restart" in record.getMessage()
    assert "password" not in caplog.text


# ---- when it is read


async def test_sighup_reads_it_where_it_cannot_be_watched(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(path: Path, changed: Callable[[], None]) -> None:
        raise OSError("no watches are left")

    monkeypatch.setattr(reload, "watch_file", refused)
    async with following(path) as gateway:
        await until(lambda: "is not watched: no watches are left; after an edit send SIGHUP" in caplog.text)
        for text in ("Be brief.", "Be slow."):
            old = gateway.services.current
            write(path, TEXT.replace("Be kind.", text))
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: gateway.services.current is not old)  # noqa: B023
            found = gateway.services.current.assistants.find(A, "support")
            assert found is not None
            assert found.instructions == text
    os.kill(os.getpid(), signal.SIGHUP)  # late, it ends nobody


async def test_sighup_without_a_file_is_told_and_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from app.gateway import following_configuration

    services = make_services(tmp_path, ScriptedEngineClient())
    with caplog.at_level(logging.INFO):
        async with following_configuration(services):
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: "there is no configuration file to read again" in caplog.text)
    services.prompts.close()


async def test_what_an_unchanged_file_says_is_not_put_in_force_again(path: Path) -> None:
    async with following(path) as gateway:
        old = gateway.services.current
        write(path, f"# the same\n{TEXT}")
        os.kill(os.getpid(), signal.SIGHUP)
        write(path, TEXT.replace("keys", "# the keys\nkeys"))
        await edit(gateway, path, TEXT.replace("Be kind.", "Be brief."))
        before = list(old.assistants)
        assert [a.instructions for a in gateway.services.current.assistants] == ["Be brief.", "Be quick."]
        assert gateway.services.current.assistants.find(A, "sales") is before[1]


async def test_edits_while_one_is_read_are_not_lost_and_the_newest_is_last(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reading is held after it has read; meanwhile the file is edited ten times."""

    async def asleep(path: Path, changed: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(reload, "watch_file", asleep)
    services = make_services(path.parent.parent, ScriptedEngineClient(), config_path=path)
    in_force: list[str] = []
    has_read, may_go_on = threading.Event(), threading.Event()
    load = services.live.load
    num_loads = 0

    def held() -> Configured:
        nonlocal num_loads
        num_loads += 1
        loaded = load()
        has_read.set()
        assert may_go_on.wait(GUARD_S)
        return loaded

    def put_in_force(configured: Configured) -> None:
        services.live.current = configured
        in_force.append(next(iter(configured.assistants)).instructions)

    monkeypatch.setattr(services.live, "load", held)
    reloader = Reloader(path, services.live, put_in_force)
    task = asyncio.create_task(reloader.run())
    write(path, TEXT.replace("Be kind.", "Edit 0."))
    reloader.request()
    await asyncio.to_thread(has_read.wait, GUARD_S)
    for number in range(1, 11):
        write(path, TEXT.replace("Be kind.", f"Edit {number}."))
        reloader.request()
        await asyncio.sleep(0)
    may_go_on.set()
    await until(lambda: len(in_force) == 2)
    assert in_force == ["Edit 0.", "Edit 10."]
    assert num_loads == 2
    await cancel_and_wait(task)
    services.prompts.close()


async def test_quick_edits_end_with_the_newest(path: Path) -> None:
    """As fast as they come, half of them in place; what is in force last is what the file says last."""
    async with following(path) as gateway:
        for number in range(200):
            text = TEXT.replace("Be kind.", f"Edit {number}.")
            (write if number % 2 else replace)(path, text)
            await asyncio.sleep(0)
        await until(lambda: instructions(gateway) == "Edit 199.")
        wanted = ["system\nBe quick.\nuser\n", "system\nEdit 199.\nuser\n"]
        await gateway.engine.wait_for(lambda: trunks(gateway) == wanted)
        assert instructions(gateway) == "Edit 199."


def instructions(gateway: Gateway) -> str | None:
    found = gateway.services.current.assistants.find(A, "support")
    return found.instructions if found else None


def keyed(request: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\nAuthorization: Bearer key-of-tenant-a1\r\n", 1)


async def to_the_end(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while b"[DONE]" not in data:
        data += await reader.read(4096)
    return data
