"""Names of the keys of one conversation: they share the hash tag `{s:<root>}`, so that a script may use them together.

{s:<root>}:r:<id>   the node, see app/response_node.py
{s:<root>}:o:<id>   lease of the gateway that runs it
{s:<root>}:w:<id>   it has readers at other gateways
{s:<root>}:e:<id>   its events, see app/redis_log.py; also the channel on which new ones are announced
{s:<root>}:q:<id>   while it runs: how to submit it again, see app/recipe.py
"""

from app.ids import ResponseId


def node_key(response_id: ResponseId) -> str:
    return f"{{s:{response_id.root}}}:r:{response_id}"


def lease_key(response_id: ResponseId) -> str:
    return f"{{s:{response_id.root}}}:o:{response_id}"


def readers_key(response_id: ResponseId) -> str:
    return f"{{s:{response_id.root}}}:w:{response_id}"


def log_key(response_id: ResponseId) -> str:
    return f"{{s:{response_id.root}}}:e:{response_id}"


def recipe_key(response_id: ResponseId) -> str:
    return f"{{s:{response_id.root}}}:q:{response_id}"
