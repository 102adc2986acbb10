from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelNotSupported
from engine.models.safetensors_file import SafetensorsFile, write_safetensors

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([1.5]), "empty": torch.empty(0, 4)}


def write(path: Path, dtype: torch.dtype = torch.float32, **tensors: torch.Tensor) -> Path:
    tensors = tensors or TENSORS
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    write_safetensors(path, shapes, dtype, tensors.items(), lambda done, total: None)
    return path


def test_what_is_written_the_library_reads_and_the_other_way_round(tmp_path: Path) -> None:
    read = load_file(write(tmp_path / "ours"))
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    save_file({name: tensor.half() for name, tensor in TENSORS.items()}, tmp_path / "theirs")
    file = SafetensorsFile(tmp_path / "theirs")
    assert file.shapes == {"b": (2, 3), "a": (1,), "empty": (0, 4)}
    assert all(torch.equal(file.tensor(name), tensor.half()) for name, tensor in TENSORS.items())


def test_tensors_are_cast_as_they_come(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "x", torch.bfloat16))
    assert file.tensor("b").dtype == torch.bfloat16
    assert torch.equal(file.tensor("b"), TENSORS["b"].bfloat16())


def test_the_file_does_not_change_through_its_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "x")
    SafetensorsFile(path).tensor("a").zero_()
    assert SafetensorsFile(path).tensor("a").item() == 1.5


def test_every_tensor_has_to_come_once(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match=r"the source has no tensor a \(2 are missing\)"):
        write(tmp_path / "x", b=TENSORS["b"])
    with pytest.raises(ModelNotSupported, match=r"tensor b has shape \(3,\), expected \(2, 3\)"):
        write(tmp_path / "x", b=torch.ones(3))


def test_files_that_are_cut_off_or_something_else(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole").read_bytes()
    for content, sentence in {
        whole[:-1]: "is cut off: it has",
        whole[:20]: "is not a whole safetensors file: its header is cut off or too long",
        b"abc": "is not a whole safetensors file",
        (5).to_bytes(8, "little") + b"12{45": "its header is not JSON",
        b"<!DOCTYPE html><html>not found</html>": "its header is cut off or too long",
    }.items():
        (tmp_path / "broken").write_bytes(content)
        with pytest.raises(ModelNotSupported, match=sentence):
            SafetensorsFile(tmp_path / "broken")
