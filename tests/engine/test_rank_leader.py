"""The ranks behind the first, started and ended. That they compute what they should: test_tensor_parallel."""

from pathlib import Path

import psutil
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.rank_leader import RankLeader
from engine.rank_messages import RankStep
from engine.scheduled_batch import NO_TRANSFERS


@pytest.mark.slow
def test_a_rank_that_can_never_start_says_why_and_none_is_left(tmp_path: Path) -> None:
    config = EngineConfig(model_dir="", tensor_parallel=2, threads=1, runtime_dir=str(tmp_path))
    leader = RankLeader(tmp_path / "nothing", config, "float32", torch.device("cpu"))
    [follower] = psutil.Process().children()
    assert [path.name for path in tmp_path.iterdir()] != []
    with pytest.raises(EngineError) as raised:
        leader.find_least_memory(0)
    assert str(raised.value) == f"rank 1 of 2: {tmp_path}/nothing is not a prepared model: it has no manifest.json"
    leader.close()
    leader.close()
    assert not follower.is_running()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_end_with_the_object_that_started_them(tmp_path: Path) -> None:
    config = EngineConfig(model_dir="", tensor_parallel=2, threads=1, runtime_dir=str(tmp_path))
    leader = RankLeader(tmp_path / "nothing", config, "float32", torch.device("cpu"))
    [follower] = psutil.Process().children()
    del leader
    assert not follower.is_running()
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_cannot_be_loaded_is_told_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.rank_leader.sys.executable", "/bin/false")
    config = EngineConfig(model_dir="", tensor_parallel=3, runtime_dir=str(tmp_path))
    with pytest.raises(EngineError, match=r"^rank 1 of 3 ended with exit code 1 while it started$"):
        RankLeader(tmp_path, config, "float32", torch.device("cpu"))
    assert psutil.Process().children() == []
    assert list(tmp_path.iterdir()) == []


def test_a_step_without_rows_is_moves_alone() -> None:
    assert RankStep.of(NO_TRANSFERS) == RankStep()
