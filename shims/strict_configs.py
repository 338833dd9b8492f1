"""Let pydantic resolve transformers' config annotations when speculators builds its schemas."""

from __future__ import annotations

import ast
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher
from eagle3compat.shim import Contract, Finding, Patch, Process, Shim, Stage, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_SCHEMAS = "speculators.utils.pydantic_utils"
_CONFIGS = "transformers.configuration_utils"
_CLASSES = ("PreTrainedConfig", "PretrainedConfig")


def _probe(facts: Facts) -> Finding:
    schemas = facts.source_text(_SCHEMAS)
    if schemas is None or "cls.model_rebuild(force=True)" not in schemas:
        return Finding(Status.DRIFT, f"{_SCHEMAS} does not rebuild its schemas as it is known to")
    line = schemas[: schemas.index("cls.model_rebuild(force=True)")].count("\n") + 1
    text = facts.source_text(_CONFIGS)
    if text is None:
        return Finding(
            Status.NOT_NEEDED, "no transformers to be read; speculators imports it", None, line
        )
    try:
        unbound = annotates_with_unbound_torch(text)
    except SyntaxError as error:
        return Finding(Status.DRIFT, f"{_CONFIGS} cannot be parsed ({error})", None, line)
    if unbound:
        return Finding(
            Status.NEEDED,
            "config fields are annotated with torch, which is imported for type checkers alone",
            None,
            line,
        )
    return Finding(Status.NOT_NEEDED, "config annotations name nothing unbound", None, line)


def annotates_with_unbound_torch(text: str) -> bool:
    """Whether a config class has a field annotated with ``torch``, unbound when it is resolved.

    Args:
        text: source of ``transformers.configuration_utils``.

    Raises:
        SyntaxError: it is no Python of this interpreter's version.
    """
    tree = ast.parse(text)
    bound = any(
        isinstance(node, ast.Import) and any(name.name == "torch" for name in node.names)
        for node in tree.body
    )
    if bound:
        return False
    return any(
        isinstance(field, ast.AnnAssign) and "torch." in ast.unparse(field.annotation)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES
        for field in node.body
    )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def reload_schema(cls: Any) -> None:
        import torch

        cls.model_rebuild(force=True, _types_namespace={"torch": torch})

    patcher.replace(module.ReloadableBaseModel, "reload_schema", classmethod(reload_schema))


SHIM = Shim(
    id="strict-configs",
    title="config annotations of transformers 5 resolved",
    contracts=(
        Contract(
            _SCHEMAS,
            "ReloadableBaseModel.reload_schema",
            f"{_CONFIGS}.PreTrainedConfig",
            "a config class whose annotations resolve in its own module",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=_probe,
    patches=(Patch(_SCHEMAS, _install),),
    process=Process.BOTH,
    transformers=">=5.5",
    why=(
        "import speculators raises PydanticUndefinedAnnotation: name 'torch' is not defined, from "
        "transformers 5.5 on, which vLLM asks for from 0.24.0 on."
    ),
    upstream=(
        "https://github.com/huggingface/transformers/pull/41250 (configs become dataclasses), "
        "https://github.com/huggingface/transformers/pull/45193 (open: without torch)"
    ),
    mended_in="no release of speculators 0.3 or 0.4",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    stages=(Stage.EXTRACTION, Stage.TRAINING),
)
