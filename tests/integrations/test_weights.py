"""Local weights as part of an identity."""

from __future__ import annotations

import shutil
from pathlib import Path

from umbp.integrations.weights import files_digest


def model(folder: Path, config: str = "{}", weights: bytes = b"1234", name: str = "model.safetensors") -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / name).write_bytes(weights)
    (folder / "README.md").write_text(str(folder))
    return str(folder)


def test_replaced_weights_are_others_and_copied_ones_are_the_same(tmp_path: Path) -> None:
    one = files_digest(model(tmp_path / "a"))
    assert files_digest(model(tmp_path / "b")) == one
    others = [
        files_digest(model(tmp_path / "a", config='{"rope": 2}')),
        files_digest(model(tmp_path / "a", weights=b"12345")),
        files_digest(model(tmp_path / "a", name="other.safetensors")),
    ]
    assert len({one, *others}) == 4


def test_a_name_has_its_revision(tmp_path: Path) -> None:
    assert files_digest("meta-llama/Llama-3.1-8B") == ""
    (tmp_path / "empty").mkdir()
    assert files_digest(str(tmp_path / "empty")) != ""
