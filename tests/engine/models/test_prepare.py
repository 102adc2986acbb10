"""A model is prepared once, found again without torch, and never there in part."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.errors import ModelNotSupported
from engine.models import fingerprint
from engine.models.prepare import prepare, resolve_dtype
from engine.models.safetensors_file import SafetensorsFile
from engine.prepared import PreparedModel
from tests.tiny_model import CHATML, make_tiny

REPOSITORY = Path(__file__).parents[3]


def ready(source: Path, state: Path, dtype: str = "float32") -> PreparedModel:
    return prepare(str(source), state, dtype, lambda *_: None)


def change_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_the_folder(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    model = ready(source, tmp_path / "state")
    fingerprint_ = model.manifest.fingerprint
    assert model.path == tmp_path / "state" / "models" / f"tiny-{fingerprint_[:12]}"
    assert sorted(p.name for p in model.path.iterdir()) == [
        *("chat_template.jinja", "manifest.json", "tokenizer.json", "weights-float32.safetensors"),
    ]
    assert model.chat_template == CHATML
    assert model.tokenizer_path.read_text() == (source / "tokenizer.json").read_text()
    manifest = model.manifest
    assert (manifest.name, manifest.bos_token_id, manifest.eos_token_ids) == ("tiny", 1, (2, 0))
    assert not manifest.add_bos
    assert not list((tmp_path / "state" / "models").glob(".preparing*"))


def test_a_second_dtype_joins_the_folder(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    first = ready(source, tmp_path / "state")
    second = ready(source, tmp_path / "state", "bfloat16")
    assert second.path == first.path
    wide, narrow = (SafetensorsFile(first.weights_path(d)) for d in ("float32", "bfloat16"))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(wide.tensor(name).bfloat16(), narrow.tensor(name))


def test_it_is_found_again_without_torch(tmp_path: Path) -> None:
    source, state = make_tiny(tmp_path / "tiny"), tmp_path / "state"
    expected = ready(source, state).path
    program = (
        "import sys; from pathlib import Path; from engine.models.prepare import prepare\n"
        f"print(prepare({str(source)!r}, Path({str(state)!r}), 'float32', None).path)\n"
        "sys.exit(bool({'torch', 'gguf', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(expected)), done.stderr


def test_the_command_prints_the_folder_last(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    command = [sys.executable, "-m", "engine.models.prepare"]
    arguments = ["--state-dir", str(tmp_path / "state"), "--dtype", "float32"]
    done = subprocess.run([*command, str(source), *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert PreparedModel.load(done.stdout.splitlines()[-1]).manifest.name == "tiny"
    assert "preparing tiny (float32)" in done.stderr
    failed = subprocess.run([*command, "/nowhere", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == "/nowhere is neither a directory, a .gguf file nor a hub id of the form owner/name\n"


def test_progress_is_in_bytes(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    model = prepare(
        str(make_tiny(tmp_path / "tiny")),
        tmp_path,
        "float32",
        lambda what, done, total: calls.append((what, done, total)),
    )
    shapes = SafetensorsFile(model.weights_path("float32")).shapes
    total = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    assert calls[-1] == ("preparing tiny (float32)", total, total)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def test_changed_weights_or_texts_are_another_model(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    seen = {ready(source, tmp_path / "state").path}
    weights = source / "model.safetensors"
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    seen.add(ready(source, tmp_path / "state").path)
    change_json(source / "tokenizer_config.json", chat_template="{{ messages }}")
    seen.add(ready(source, tmp_path / "state").path)
    make_tiny(source, seed=1)
    seen.add(ready(source, tmp_path / "state").path)
    assert len(seen) == 4


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), tmp_path / "state", "float32", stop)
    assert list((tmp_path / "state" / "models").iterdir()) == []
    assert ready(source, tmp_path / "state").weights_path("float32").exists()


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    source, folder = make_tiny(tmp_path / "tiny"), tmp_path / "state" / "models"
    for name, age_s in {".preparing-old": 25 * 3600, ".preparing-running": 3600}.items():
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - age_s,) * 2)
    model = ready(source, tmp_path / "state")
    assert {p.name for p in folder.iterdir()} == {".preparing-running", model.path.name}


def test_whoever_comes_second_takes_what_is_there(tmp_path: Path) -> None:
    """Two processes prepare the same model; the second finds the folder when it wants to put its own in place."""
    source = make_tiny(tmp_path / "tiny")
    inner: list[PreparedModel] = []

    def meanwhile(what: str, done: int, total: int) -> None:
        if not inner:
            inner.append(ready(source, tmp_path / "state"))

    assert prepare(str(source), tmp_path / "state", "float32", meanwhile).path == inner[0].path
    assert [p.name for p in (tmp_path / "state" / "models").iterdir()] == [inner[0].path.name]


def test_names_of_models() -> None:
    for file, name in {
        "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct",
        "qwen2.5-0.5b-instruct-q8_0.gguf": "qwen2.5-0.5b-instruct",
        "Llama-3.2-1B-Instruct-Q4_K_M.gguf": "Llama-3.2-1B-Instruct",
        "Mistral-7B.IQ3_XS.gguf": "Mistral-7B",
        "tiny-BF16.gguf": "tiny",
        "plain.gguf": "plain",
    }.items():
        assert fingerprint.gguf_model_name(Path(file)) == name


def test_auto_is_bfloat16_where_the_processor_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("float16", "cpu") == "float16"
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    for flag, expected in {"avx512_bf16": "bfloat16", "amx_bf16": "bfloat16", "avx2": "float32"}.items():
        monkeypatch.setattr(fingerprint, "processor_flags", lambda flag=flag: frozenset({"sse", flag}))
        assert resolve_dtype("auto", "cpu") == expected


class TestB45EveryEndOfATurn:
    """The union of configuration, generation configuration, tokenizer and template; the tokenizer's own first."""

    def end_ids(self, source: Path, tmp_path: Path) -> tuple[int, ...]:
        return ready(source, tmp_path / "state").manifest.eos_token_ids

    def test_b45_lists_and_single_ids_are_joined_once_each(self, tmp_path: Path) -> None:
        source = make_tiny(tmp_path / "tiny")
        change_json(source / "config.json", eos_token_id=[2, 7])
        change_json(source / "generation_config.json", eos_token_id=[9, 7])
        assert self.end_ids(source, tmp_path) == (2, 7, 9)

    def test_b45_the_marker_of_the_template_ends_a_turn_though_no_configuration_says_so(self, tmp_path: Path) -> None:
        source = make_tiny(tmp_path / "tiny")
        change_json(source / "config.json", eos_token_id=0)
        change_json(source / "generation_config.json", eos_token_id=0)
        change_json(source / "tokenizer_config.json", eos_token="<|endoftext|>")
        assert self.end_ids(source, tmp_path) == (0, 2)

    def test_b45_nothing_in_the_configurations(self, tmp_path: Path) -> None:
        source = make_tiny(tmp_path / "tiny")
        change_json(source / "config.json", eos_token_id=None)
        (source / "generation_config.json").unlink()
        assert self.end_ids(source, tmp_path) == (2,)

    def test_b45_ids_outside_the_vocabulary_are_not_taken(self, tmp_path: Path) -> None:
        source = make_tiny(tmp_path / "tiny")
        change_json(source / "generation_config.json", eos_token_id=[2, 128009])
        assert self.end_ids(source, tmp_path) == (2,)


def test_bos_is_wanted_where_the_tokenizer_puts_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    source = make_tiny(tmp_path / "tiny")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.save(str(source / "tokenizer.json"))
    assert ready(source, tmp_path / "state").manifest.add_bos
    change_json(source / "tokenizer_config.json", add_bos_token=False)
    assert not ready(source, tmp_path / "state").manifest.add_bos
    change_json(source / "tokenizer_config.json", bos_token=None, add_bos_token=True)
    assert ready(source, tmp_path / "state").manifest.bos_token_id is None


def test_sampling_defaults_come_from_the_generation_configuration(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    change_json(source / "generation_config.json", temperature=0.6, top_p=0.9, top_k=None, max_length=5)
    assert ready(source, tmp_path / "state").manifest.sampling_defaults == {"temperature": 0.6, "top_p": 0.9}


def test_a_dtype_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="dtype int4 is not one of auto, bfloat16, float16, float32"):
        ready(make_tiny(tmp_path / "tiny"), tmp_path / "state", "int4")
