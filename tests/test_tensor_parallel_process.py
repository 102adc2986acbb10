"""A replica of two ranks under the supervisor: what it answers, and what becomes of it when one is killed or hangs."""

import json
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.product import PATIENCE_S, Product, running
from tests.tiny_model import make_tiny

SEVERAL = 150
"""Tokens of an answer that is still under way when its first ones have been read."""


def children(product: Product, module: str) -> list[psutil.Process]:
    return [p for p in product._children() if module in p.cmdline()[:4]]


def chat_body(product: Product, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Tell me a long story."}
    drawn = {"max_tokens": SEVERAL, "ignore_eos": True, "seed": 7, "temperature": 1.0}
    return {"model": product.model, "messages": [message], **drawn, **fields}


def test_a_lost_rank_takes_its_replica_down_and_the_answer_goes_on_with_the_next(tmp_path: Path) -> None:
    """First one that is killed, then one that is stopped: it lives, and its connections hold."""
    model = make_tiny(tmp_path / "tiny-chat", max_position_embeddings=1024)
    arguments = ("--dtype", "float32", "--num-blocks", "256", "--check-kv", "--tensor-parallel", "2")
    # an answer that goes on alone with the next engine has the same bits as beside its siblings only without nodes
    with running(tmp_path, model, *arguments, "--shared-attention", "never") as product:
        assert "each of 2 ranks: weights " in product.log
        want = product.post("/v1/chat/completions", chat_body(product, n=2))
        for lose, reason in (
            (psutil.Process.kill, "rank 1 of 2 was killed by SIGKILL"),
            (psutil.Process.suspend, "rank 1 of 2 said nothing for 10 s and was killed"),
        ):
            [engine], [rank] = children(product, "engine"), children(product, "engine.rank_follower")
            assert rank.ppid() == engine.pid
            log = len(product.log)
            texts = ["", ""]
            body = chat_body(product, n=2, stream=True)
            with httpx.stream("POST", product.url + "/v1/chat/completions", json=body, timeout=PATIENCE_S) as sse:
                lines = sse.iter_lines()
                while not all(texts):
                    add_text(texts, next(lines))
                lose(rank)
                for line in lines:
                    add_text(texts, line)
            assert texts == [choice["message"]["content"] for choice in want["choices"]]
            assert reason in product.log[log:]
            assert "the engine ended with exit code 1: starting it again" in product.log[log:]
            assert {engine, rank}.isdisjoint(product._children())
            product.wait_for(product.is_idle, "the new engine's pool is not idle")

        [engine], [rank] = children(product, "engine"), children(product, "engine.rank_follower")
        engine.kill()
        _, left = psutil.wait_procs([engine, rank], timeout=PATIENCE_S)
        assert left == [], "a rank outlived the first one"


def add_text(texts: list[str], line: str) -> None:
    for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
        texts[choice["index"]] += choice["delta"].get("content") or ""
