"""What the gateways of one server keep in common about a tenant, in Redis.

    {t:<tenant>}:ticket:<id>   a ticket that has been used; kept for longer than anybody's clock is wrong
    {t:<tenant>}:held          by gateway: websockets, running answers, and until when that holds
    {t:<tenant>}:limits        what is left of its quota, the fields of app.quota.Levels; not there: nothing was taken

Nothing here is waited for long: who asks can decide without it. And no command is sent a second time when its reply
is lost: taking or giving back twice would be wrong for longer than asking nobody.
"""

from typing import Self

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from app.quota import DAY_S, Levels, Quota, Refusal
from app.redis_commands import RedisCommands

TIMEOUT_S = 0.5
TICKET_MEMORY_S = 3600
"""Far more than a ticket lives, so that a clock that was put back does not make a used one valid again."""

LIMITS_MEMORY_S = 2 * DAY_S

# As app.quota.reserve. Numbers go as text: a reply would cut them to integers. What is refused writes nothing, unless
# the clock was put back.
_RESERVE = """
local known = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at', 'day', 'used')
for i = 1, 5 do known[i] = tonumber(known[i] or '') end
local per_minute, tokens_per_minute, per_day = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local wanted, now = tonumber(ARGV[4]), tonumber(ARGV[5])
if not now then
    local time = redis.call('TIME')
    now = time[1] + time[2] / 1000000
end
local at = known[3] or now
local elapsed = math.max(0, now - at)
local function refill(left, limit)
    if not limit then return left end
    return math.min(limit, (left or limit) + elapsed * limit / 60)
end
local requests, tokens = refill(known[1], per_minute), refill(known[2], tokens_per_minute)
local day, used = math.floor(now / 86400), known[5] or 0
if day > (known[4] or 0) then used = 0 end
local refusal = ''
if per_minute and requests < 1 then refusal = 'requests'
elseif tokens_per_minute and tokens < wanted then refusal = 'tokens'
elseif per_day and used + wanted > per_day then refusal = 'day'
else
    if per_minute then requests = requests - 1 end
    if tokens_per_minute then tokens = tokens - wanted end
    used = used + wanted
end
local function text(number) return number and string.format('%.17g', number) or '' end
if refusal == '' or now < at then
    redis.call('HSET', KEYS[1], 'requests', text(requests), 'tokens', text(tokens), 'at', text(now),
        'day', text(day), 'used', text(used))
    redis.call('EXPIRE', KEYS[1], ARGV[6])
end
return {refusal, text(now), text(requests), text(tokens), text(day), text(used)}
"""
# As app.quota.settle.
_SETTLE = """
local known = redis.call('HMGET', KEYS[1], 'tokens', 'day', 'used')
local function text(number) return string.format('%.17g', number) end
local tokens, used = tonumber(known[1] or ''), tonumber(known[3] or '')
if tokens then redis.call('HSET', KEYS[1], 'tokens', text(tokens + ARGV[1])) end
if used and tonumber(known[2]) == tonumber(ARGV[2]) then
    redis.call('HSET', KEYS[1], 'used', text(math.max(0, used - ARGV[1])))
end
"""
# Says what a gateway has and asks what the others have. One that has not said so for a lease is dead; so is one whose
# lease ends later than it could, as the clock was put back: if it lives it says so again soon.
_HOLD = """
local now, lease = tonumber(ARGV[5]), tonumber(ARGV[4])
if not now then
    local time = redis.call('TIME')
    now = time[1] + time[2] / 1000000
end
local said = redis.call('HGETALL', KEYS[1])
local connections, answers = 0, 0
for i = 1, #said, 2 do
    if said[i] ~= ARGV[1] then
        local c, a, till = string.match(said[i + 1], '^(%S+) (%S+) (%S+)$')
        till = tonumber(till)
        if till <= now or till > now + lease then
            redis.call('HDEL', KEYS[1], said[i])
        else
            connections, answers = connections + c, answers + a
        end
    end
end
if ARGV[2] == '0' and ARGV[3] == '0' then
    redis.call('HDEL', KEYS[1], ARGV[1])
else
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. string.format('%.17g', now + lease))
    redis.call('EXPIRE', KEYS[1], math.ceil(lease * 2))
end
return {connections, answers}
"""


class TenantStore:
    """Every method raises SessionsUnavailable where Redis does not answer."""

    def __init__(self, commands: RedisCommands) -> None:
        self._commands = commands
        self._reserve = commands.redis.register_script(_RESERVE)
        self._settle = commands.redis.register_script(_SETTLE)
        self._hold = commands.redis.register_script(_HOLD)

    @classmethod
    def connect(cls, url: str, *, timeout_s: float = TIMEOUT_S) -> Self:
        """Connections are made when they are needed. `timeout_s`: for everything that one command needs."""
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=8,
            timeout=None,  # here and below: a command has one deadline for everything
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
        )
        return cls(RedisCommands(Redis.from_pool(pool), timeout_s=timeout_s))

    async def close(self) -> None:
        await self._commands.close()

    async def try_use_ticket(self, tenant: str, ticket_id: str) -> bool:
        """Whether the ticket was unused until now."""

        async def run() -> bool:
            key = f"{{t:{tenant}}}:ticket:{ticket_id}"
            return bool(await self._commands.redis.set(key, 1, nx=True, ex=TICKET_MEMORY_S))

        return await self._commands.run(run())

    async def reserve(
        self, tenant: str, quota: Quota, num_tokens: int, now: float | None
    ) -> tuple[Refusal | None, Levels]:
        """As `app.quota.reserve`; `now` None: by the server's clock."""
        limits = (quota.requests_per_minute, quota.tokens_per_minute, quota.tokens_per_day)
        arguments = ["" if n is None else repr(n) for n in (*limits, num_tokens, now)]
        reply = await self._commands.run(self._reserve([_limits_key(tenant)], [*arguments, LIMITS_MEMORY_S]))
        refusal, at, requests, tokens, day, used = (text.decode() for text in reply)
        return refusal or None, Levels(
            at=float(at),
            requests=float(requests) if requests else None,
            tokens=float(tokens) if tokens else None,
            day=int(day),
            used=float(used),
        )

    async def settle(self, tenant: str, num_back: int, day: int) -> None:
        """As `app.quota.settle`."""
        await self._commands.run(self._settle([_limits_key(tenant)], [num_back, day]))

    async def hold(
        self, tenant: str, owner: str, own: tuple[int, int], lease_s: float, now: float | None
    ) -> tuple[int, int]:
        """Says how many websockets and running answers the tenant has at the gateway `owner`; how many it has at the
        others. `now` None: by the server's clock."""
        arguments: list[str | float] = [owner, *own, lease_s, "" if now is None else repr(now)]
        connections, answers = await self._commands.run(self._hold([f"{{t:{tenant}}}:held"], arguments))
        return connections, answers


def _limits_key(tenant: str) -> str:
    return f"{{t:{tenant}}}:limits"
