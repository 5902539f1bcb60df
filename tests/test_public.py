"""What `import tensorformer` gives, and what it does not load."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

import tensorformer
from tests.recipes import RECIPES


def test_every_public_name_is_there() -> None:
    for name in tensorformer.__all__:
        assert getattr(tensorformer, name) is not None
    assert set(tensorformer.__all__) <= set(dir(tensorformer))
    with pytest.raises(AttributeError, match="no attribute 'Mamba'"):
        tensorformer.Mamba  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_and_building_a_model_loads_nothing_that_is_not_needed() -> None:
    code = (
        "import sys, tensorformer; loaded = ['torch'] if 'torch' in sys.modules else []\n"
        f"tensorformer.TensorTransformer(tensorformer.load_config({str(RECIPES / 'demo.toml')!r}).model)\n"
        "unwanted = ('triton', 'transformers', 'altair', 'pandas', 'rich', 'tokenizers')\n"
        "print(loaded + [m for m in unwanted if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_example_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    root = RECIPES.parent
    monkeypatch.chdir(root)
    found: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", (root / "README.md").read_text("utf-8"), re.DOTALL)[0], found)
    assert found["state"].shape == (1, 8, 256, 16)
    assert found["logits"].shape == (1, 64, 256)
