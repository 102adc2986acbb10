"""The operator's file and the gateway's settings."""

import hashlib
from pathlib import Path

import pytest

from app.config import (
    GATEWAY_VARIABLE,
    REDIS_URL_VARIABLE,
    ConfigError,
    FileConfig,
    GatewayConfig,
    check_open_mode,
    find_redis_url,
    is_loopback,
    load_file_config,
)
from engine.prepared import default_state_dir

EXAMPLE = """
admin_key = "admin-key-0123456789"
allowed_origins = ["https://chat.example.com"]
[[tenants]]
id = "a"
key = "key-of-tenant-a"
[[tenants]]
id = "b"
keys = ["key-of-tenant-b1", "key-of-tenant-b2"]
[[tenants]]
id = "c"
key_sha256 = ["{digest}"]
[[assistants]]
id = "support"
tenant = "a"
instructions = "Be kind."
[[assistants]]
id = "support"
tenant = "b"
instructions = "Be brief."
[[assistants]]
id = "everybody"
shared = true
instructions = "Be there."
template_options = { enable_thinking = false }
[limits]
max_choices = 4
""".replace("{digest}", hashlib.sha256(b"key-of-tenant-c").hexdigest())


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    config = load_file_config(write(tmp_path, EXAMPLE))
    assert [t.id for t in config.tenants] == ["a", "b", "c"]
    assert [len(t.key_hashes) for t in config.tenants] == [1, 2, 1]
    assert config.tenants[2].key_hashes == (hashlib.sha256(b"key-of-tenant-c").digest(),)
    assert [(a.id, a.tenant, a.shared) for a in config.assistants] == [
        ("support", "a", False),
        ("support", "b", False),
        ("everybody", None, True),
    ]
    assert [a.template_options for a in config.assistants] == [{}, {}, {"enable_thinking": False}]
    assert (config.limits.max_choices, config.limits.max_body_bytes) == (4, 1 << 20)
    assert not config.is_open


def test_keys_are_nowhere_in_what_is_kept(tmp_path: Path) -> None:
    config = load_file_config(write(tmp_path, EXAMPLE))
    for text in (repr(config), str(config.model_dump())):
        assert "key-of-tenant" not in text
        assert "admin-key" not in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "is not valid TOML"),
        ("x = 1", "x: is no known setting"),
        ('[[tenants]]\nid = "a"', "tenants[0]: a tenant needs `key`, `keys` or `key_sha256`"),
        ('[[tenants]]\nid = "a b"\nkey = "12345678"', "tenants[0].id: an id is"),
        ('[[tenants]]\nid = "a"\nkey = 3', "tenants[0]: key must be a string"),
        ('[[tenants]]\nid = "a"\nkey_sha256 = "abcdefgh"', "tenants[0]: key_sha256 must hold SHA-256 digests"),
        ('[[tenants]]\nid = "a"\nkeys = ["12345678", "12345678"]', "tenants: a key comes twice"),
        *(
            (f'[[tenants]]\nid = "a"\nkey = "12345678"\n{setting}', f"tenants[0]{complaint}")
            for setting, complaint in (
                ("weight = 0", ".weight: "),
                ("weight = 1001", ".weight: "),
                ("weight = inf", ".weight: "),
                ("weight = true", ".weight: "),
                ("max_running = 0", ".max_running: "),
                ("guaranteed_blocks = -1", ".guaranteed_blocks: "),
                ("guaranteed_blocks = 1.5", ".guaranteed_blocks: "),
                ("guaranteed_blocks = 9\nmax_blocks = 8", ": max_blocks = 8 is less than guaranteed_blocks = 9"),
                ('scope = "everybody"', ".scope: "),
            )
        ),
        ('[[assistants]]\nid = "a"\ninstructions = "x"', "assistants[0]: an assistant has either"),
        ('[[assistants]]\nid = "a"\ninstructions = "x"\ntenant = "b"', "belongs to the unknown tenant 'b'"),
        ('[[assistants]]\nid = "a"\ninstructions = ""\nshared = true', "assistants[0].instructions: "),
        *(
            (f'[[assistants]]\nid = "a"\ninstructions = "x"\nshared = true\ntemplate_options = {options}', complaint)
            for options, complaint in (
                ("3", "assistants[0].template_options: should be an object of at most 16"),
                ("{a = []}", "assistants[0].template_options: should have strings, numbers or booleans"),
                ("{a-b = 1}", "assistants[0].template_options: should have names of at most 64"),
            )
        ),
        ('admin_key = "12345678"\n[[tenants]]\nid = "a"\nkey = "12345678"', "admin_key: it is a tenant's key too"),
        ('redis_url = "http://:12345678@r"', "redis_url: a Redis is given as redis://host:port/0"),
        ('allowed_origins = "x"', "allowed_origins: must be a list"),
        *(
            (f'allowed_origins = ["https://a", "{origin}"]', "allowed_origins[1]: an origin is written like https://")
            for origin in ("http://[", "*", "null", "chat.example.com", "https://a/b", "https://a:x", "")
        ),
        ('[limits]\nmax_choices = "x"', "limits.max_choices: "),
        ("[limits]\nmax_choices = true", "limits.max_choices: "),
    ],
)
def test_a_mistake_is_one_sentence_with_file_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_file_config(path)
    assert str(caught.value).startswith(str(path))
    assert complaint in str(caught.value)
    assert "12345678" not in str(caught.value), "no secret in a message"


def test_two_assistants_of_one_name_for_one_tenant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'everybody' comes twice"):
        load_file_config(write(tmp_path, EXAMPLE.replace('"support"', '"everybody"', 1)))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_file_config(tmp_path / "none.toml")


def test_without_a_file_three_demo_assistants() -> None:
    config = load_file_config(None)
    assert config.is_open
    assert [(a.id, a.shared) for a in config.assistants] == [("support", True), ("translator", True), ("writing", True)]
    assert all(a.instructions for a in config.assistants)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.1.2.3", True), ("localhost", True), ("::1", True), ("[::1]", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.com", False), ("", False)),
    ],
)
def test_open_on_loopback_only(host: str, loopback: bool, tmp_path: Path) -> None:
    assert is_loopback(host) == loopback
    check_open_mode(host, load_file_config(write(tmp_path, EXAMPLE)))
    if loopback:
        check_open_mode(host, FileConfig())
    else:
        with pytest.raises(ConfigError, match="loopback"):
            check_open_mode(host, FileConfig())


def test_where_the_redis_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = FileConfig(redis_url="redis://:secret@file")
    assert "secret" not in repr(config)
    monkeypatch.delenv(REDIS_URL_VARIABLE, raising=False)
    assert find_redis_url(None, FileConfig()) is None
    assert find_redis_url(None, config) == "redis://:secret@file"
    monkeypatch.setenv(REDIS_URL_VARIABLE, "rediss://environment:7000/1")
    assert find_redis_url(None, config) == "rediss://environment:7000/1"
    assert find_redis_url("unix:///run/redis.sock", config) == "unix:///run/redis.sock"


@pytest.mark.parametrize(
    "url", ["http://:secret@r", "r:6379", "redis://", "redis://[secret", "redis://r:secret", "unix://"]
)
def test_what_is_no_redis_is_told_without_its_password(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(REDIS_URL_VARIABLE, url)
    for option, where in ((url, "--redis-url"), (None, REDIS_URL_VARIABLE)):
        with pytest.raises(ConfigError, match=f"^{where}: a Redis is given as redis://") as caught:
            find_redis_url(option, FileConfig())
        assert "secret" not in str(caught.value)


def test_settings_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = GatewayConfig(model_dir=tmp_path, engine_addresses=("ipc:///x",), state_dir=tmp_path, listen_fd=3)
    monkeypatch.setenv(GATEWAY_VARIABLE, config.environment()[GATEWAY_VARIABLE])
    assert GatewayConfig.from_environment() == config
    assert config.environment()["PATH"]
    monkeypatch.setenv(GATEWAY_VARIABLE, "{}")
    with pytest.raises(ConfigError, match="model_dir"):
        GatewayConfig.from_environment()
    monkeypatch.delenv(GATEWAY_VARIABLE)
    with pytest.raises(ConfigError, match="trunkline serve"):
        GatewayConfig.from_environment()


def test_the_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert default_state_dir() == Path("/var/state/trunkline")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert default_state_dir() == Path("/home/x/.local/state/trunkline")
