"""Dockerfile and docker-compose.yml, as far as they can be checked without a Docker engine: the file's schema, and that
every path, port, option and variable it names exists. Nothing here builds or runs a container."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import TenantConfig, load_file_config
from app.limits import Limits

REPOSITORY = Path(__file__).parent.parent
COMPOSE = REPOSITORY / "docker-compose.yml"
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


@pytest.fixture(scope="module")
def serve_options() -> set[str]:
    """The options that `trunkline serve` really has."""
    done = subprocess.run(
        [sys.executable, "-m", "app", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    return set(re.findall(r"--[a-z-]+", done.stdout))


def test_compose_file_is_valid_by_the_compose_specification() -> None:
    """The schema is the specification's own, as check-jsonschema carries it."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_services_are_gateway_with_engine_and_redis(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"trunkline", "redis"}
    assert set(compose["services"]["trunkline"]["depends_on"]) <= set(compose["services"])


def test_every_option_of_the_commands_exists(compose: dict[str, Any], serve_options: set[str]) -> None:
    command = compose["services"]["trunkline"]["command"]
    image_command = shlex.split(re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.M)[1].translate({91: "", 93: "", 44: " "}))
    for words in (command, image_command):
        assert words[0] == "serve"
        assert {w.partition("=")[0] for w in words if w.startswith("--")} <= serve_options


def test_every_local_path_exists(compose: dict[str, Any]) -> None:
    assert (REPOSITORY / compose["services"]["trunkline"]["build"]["context"] / "Dockerfile").is_file()
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M):
        for source in line.split()[:-1]:
            assert (REPOSITORY / source).exists(), source
    volumes = [v for service in compose["services"].values() for v in service["volumes"]]
    for volume in volumes:
        source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
        assert source in compose["volumes"] or (REPOSITORY / source).exists(), source


def test_the_entry_point_is_the_console_script() -> None:
    scripts = (REPOSITORY / "pyproject.toml").read_text()
    assert 'ENTRYPOINT ["trunkline"]' in DOCKERFILE
    assert re.search(r"^trunkline = \"app\.cli:main\"$", scripts, re.M)


def test_ports_agree(compose: dict[str, Any]) -> None:
    """Published, served, exposed and asked for by the health check: one port; Redis by its service's name."""
    service = compose["services"]["trunkline"]
    exposed = re.search(r"^EXPOSE (\d+)$", DOCKERFILE, re.M)[1]
    assert service["ports"] == [f"127.0.0.1:{exposed}:{exposed}"]
    assert f"--port={exposed}" in service["command"]
    assert f":{exposed}/ready" in service["healthcheck"]["test"][-1]
    (redis_url,) = [w.partition("=")[2] for w in service["command"] if w.startswith("--redis-url")]
    assert redis_url == "redis://redis:6379/0"


def test_every_variable_has_a_default_or_a_build_argument(compose: dict[str, Any]) -> None:
    for name, default in re.findall(r"\$\{(\w+)(:-[^}]*)?\}", COMPOSE.read_text()):
        assert default, f"{name} has no default"
    for name in compose["services"]["trunkline"]["build"]["args"]:
        assert re.search(rf"^ARG {name}\b", DOCKERFILE, re.M)


def test_the_example_configuration_loads_and_has_tenants() -> None:
    """The container listens on all addresses, which an open server refuses to do."""
    config = load_file_config(REPOSITORY / "docs" / "config.example.toml")
    assert [t.id for t in config.tenants] == ["acme"]
    assert {a.id for a in config.assistants} == {"support", "translator"}
    assert config.limits == Limits(), "the example says that it shows the defaults"
    assert config.tenants[0] == TenantConfig(id="acme", key_hashes=config.tenants[0].key_hashes)
