"""What each tenant may have of an engine."""

import logging

import pytest

from engine.protocol import TenantShare
from engine.tenant_shares import TenantShares


def test_a_tenant_has_the_share_that_was_said_last_or_the_defaults() -> None:
    shares = TenantShares()
    shares.set([TenantShare(tenant="acme", weight=3.0), TenantShare(tenant="tiny", max_running=1)])
    assert shares.of("acme") == TenantShare(tenant="acme", weight=3.0)
    assert shares.of("nobody") == TenantShare(tenant="nobody")
    assert (shares.max_blocks("tiny"), shares.max_blocks("nobody")) == (None, None)
    shares.set([TenantShare(tenant="tiny", max_blocks=7)])
    assert shares.max_blocks("tiny") == 7
    assert (shares.of("acme").weight, shares.of("tiny").max_running, shares.of("tiny").max_blocks) == (1.0, None, 7)


@pytest.mark.parametrize(
    "share",
    [
        TenantShare(tenant="acme", weight=0.0),
        TenantShare(tenant="acme", weight=float("nan")),
        TenantShare(tenant="acme", weight=0.0009),
        TenantShare(tenant="acme", weight=1001.0),
        TenantShare(tenant="acme", max_running=0),
        TenantShare(tenant="acme", max_blocks=0),
        TenantShare(tenant="acme", guaranteed_blocks=-1),
    ],
)
def test_a_share_without_sense_is_passed_over(share: TenantShare, caplog: pytest.LogCaptureFixture) -> None:
    shares = TenantShares()
    with caplog.at_level(logging.WARNING):
        shares.set([share])
    assert shares.of("acme") == TenantShare(tenant="acme")
    assert "acme" in caplog.text
