"""The generator's config gets our values; a rerun goes on with the same extraction alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from manifest_records import run_record, sample_record

from eagle3compat.errors import InputError
from eagle3compat.kimi.dataset import Sample
from eagle3compat.kimi.extraction import check_continues, config_values, model_digest
from eagle3compat.kimi.manifest import Manifest, input_digest

SAMPLES = [Sample(1, [5, 6, 7], [1, 1, 1]), Sample(3, [8], [1])]


def manifest_with_first_sample() -> Manifest:
    digest = input_digest(SAMPLES[0].input_ids, SAMPLES[0].loss_mask)
    record = sample_record(0, input_digest=digest)
    return Manifest(Path("m"), (0, 1), runs=[run_record()], samples={0: record})


def test_the_same_extraction_goes_on() -> None:
    check_continues(manifest_with_first_sample(), run_record(run=1), SAMPLES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_digest": "other"}, "model_digest"),
        ({"layers": (1, 2)}, "layers"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"samples": 3}, "samples"),
        ({"data_digest": "other"}, "data_digest"),
        ({"settings": {"max_model_len": 17}}, "settings"),
    ],
)
def test_another_extraction_is_refused(change: dict[str, Any], named: str) -> None:
    record = replace(run_record(run=1), **change)
    with pytest.raises(InputError, match=f"has {named}"):
        check_continues(manifest_with_first_sample(), record, SAMPLES)


def test_a_data_set_that_changed_is_refused_with_the_line() -> None:
    changed = [Sample(2, [5, 6, 8], [1, 1, 1]), SAMPLES[1]]
    with pytest.raises(InputError, match=":2: is another sample"):
        check_continues(manifest_with_first_sample(), run_record(run=1), changed)


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    before = model_digest(tmp_path)
    (tmp_path / "README.md").touch()
    assert model_digest(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert model_digest(tmp_path) != before


def generator_module() -> ModuleType:
    module = ModuleType("generator")
    vars(module)["ModelConfig"] = lambda **options: SimpleNamespace(**options)
    return module


def test_config_values_override_those_of_the_call_site_and_leave_the_rest() -> None:
    module = generator_module()
    original = module.ModelConfig
    with config_values(module, {"ModelConfig": {"dtype": "float32"}}):
        config = module.ModelConfig(model="m", dtype="auto")
    assert (config.model, config.dtype) == ("m", "float32")
    assert module.ModelConfig is original


def test_config_values_are_gone_after_a_failure() -> None:
    module = generator_module()
    original = module.ModelConfig
    with pytest.raises(ZeroDivisionError), config_values(module, {"ModelConfig": {}}):
        raise ZeroDivisionError
    assert module.ModelConfig is original
