"""verifier-config: the sizes of a verifier that ships its own config class are found."""

from __future__ import annotations

from types import SimpleNamespace

from probing import Builds
from standins import Recorder, carried_out, module_with

from eagle3compat.shim import DRAFT_MODEL, Status
from eagle3compat.shims.verifier_config import SHIM

CALL = "AutoConfig.from_pretrained(config.name_or_path)"


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert CALL in builds.text(DRAFT_MODEL).splitlines()[(finding.line or 0) - 1]


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    trusting = CALL.replace(")", ", trust_remote_code=True)")
    for builds in (
        installed.edited(DRAFT_MODEL, CALL, trusting),
        installed.without(DRAFT_MODEL),
        installed.without_text(DRAFT_MODEL),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_the_config_is_trusted_and_its_text_part_taken() -> None:
    text = SimpleNamespace(hidden_size=128)
    load = Recorder(SimpleNamespace(text_config=text))
    module = module_with(DRAFT_MODEL, AutoConfig=SimpleNamespace(from_pretrained=load))
    with carried_out(module, SHIM.id):
        assert module.AutoConfig.from_pretrained("verifier") is text
        module.AutoConfig.from_pretrained("verifier", trust_remote_code=False)
    assert load.calls == [
        (("verifier",), {"trust_remote_code": True}),
        (("verifier",), {"trust_remote_code": False}),
    ]


def test_a_plain_config_is_given_as_it_is() -> None:
    plain = SimpleNamespace(hidden_size=128)
    configs = SimpleNamespace(from_pretrained=Recorder(plain))
    with carried_out(module := module_with(DRAFT_MODEL, AutoConfig=configs), SHIM.id):
        assert module.AutoConfig.from_pretrained("verifier") is plain
