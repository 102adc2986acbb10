import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny tensors on a shared machine: a second thread would mostly be waited for."""
    torch.set_num_threads(1)
