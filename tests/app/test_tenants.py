"""Bearer keys and the admin key."""

import pytest

from app.config import FileConfig
from app.errors import Forbidden, Unauthorized
from app.tenants import Tenant, Tenants
from engine.protocol import TenantShare

KEYED = FileConfig.model_validate(
    {
        "admin_key": "the-admin-key",
        "tenants": [{"id": "a", "keys": ["key-a-one", "key-a-two"]}, {"id": "b", "key": "key-b-one"}],
    }
)


def test_a_key_names_its_tenant() -> None:
    tenants = Tenants(KEYED)
    assert tenants.authenticate("Bearer key-a-one") == Tenant("a")
    assert tenants.authenticate("bearer  key-a-two ") == Tenant("a")
    assert tenants.authenticate("Bearer key-b-one") == Tenant("b")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic key-a-one", "key-a-one", "Bearer wrong", "Bearer \xff", "Bearer KEY-A-ONE"],
)
def test_without_a_known_key(header: str | None) -> None:
    with pytest.raises(Unauthorized) as caught:
        Tenants(KEYED).authenticate(header)
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}


def test_what_each_may_have() -> None:
    settings = {"scope": "user", "weight": 2, "max_running": 8, "guaranteed_blocks": 100, "max_blocks": 1000}
    config = FileConfig.model_validate({"tenants": [{"id": "a", "key": "key-a-one", **settings}, KEYED.tenants[1]]})
    tenants = Tenants(config)
    assert tenants.authenticate("Bearer key-a-one") == Tenant("a", is_scoped_by_user=True)
    assert not tenants.authenticate("Bearer key-b-one").is_scoped_by_user
    assert tenants.shares == [
        TenantShare(tenant="a", weight=2.0, max_running=8, guaranteed_blocks=100, max_blocks=1000),
        TenantShare(tenant="b"),
    ]
    assert Tenants(FileConfig()).shares == []


def test_without_tenants_everybody_is_one() -> None:
    tenants = Tenants(FileConfig())
    assert tenants.is_open
    for header in (None, "Bearer anything", "nonsense"):
        assert tenants.authenticate(header) == Tenant("default")


def test_the_admin_key() -> None:
    tenants = Tenants(KEYED, is_loopback=False)
    tenants.authorize_admin("Bearer the-admin-key")
    with pytest.raises(Unauthorized):
        tenants.authorize_admin(None)
    with pytest.raises(Unauthorized):
        tenants.authorize_admin("Bearer wrong")
    with pytest.raises(Forbidden):
        tenants.authorize_admin("Bearer key-a-one")
    with pytest.raises(Unauthorized):
        tenants.authenticate("Bearer the-admin-key")


@pytest.mark.parametrize(("is_open", "is_loopback"), [(True, True), (True, False), (False, True), (False, False)])
def test_without_an_admin_key_only_an_open_loopback_server_tells(is_open: bool, is_loopback: bool) -> None:
    config = FileConfig() if is_open else FileConfig.model_validate({"tenants": [{"id": "a", "key": "key-a-one"}]})
    tenants = Tenants(config, is_loopback=is_loopback)
    if is_open and is_loopback:
        tenants.authorize_admin(None)
    else:
        with pytest.raises(Forbidden):
            tenants.authorize_admin("Bearer key-a-one")
