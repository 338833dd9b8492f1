"""Give a single worker's reply as the list of one that the generator takes apart."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import GENERATE_030, GENERATE_040
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.settled import settle
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

_ID = "unique-reply"


def _install(module: ModuleType, patcher: Patcher) -> None:
    def derive(base: Any) -> type:
        class ExecutorWithListedReply(base):  # type: ignore[misc]
            def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
                reply = super().collective_rpc(method, *args, **kwargs)
                if method != "_get_captured_states" or kwargs.get("unique_reply_rank") is None:
                    return reply
                # The reply itself is None or a list of tensors; as a list of one it is nested.
                listed = isinstance(reply, list) and len(reply) == 1
                if listed and (reply[0] is None or isinstance(reply[0], list)):
                    settle(_ID, "vLLM answers with a list of one")
                    return reply
                settle(_ID, "vLLM answers with the value itself")
                return [reply]

        return ExecutorWithListedReply

    patcher.extend(module, "MultiprocExecutor", derive)


SHIM = Shim(
    id=_ID,
    title="a single worker's reply comes as a list of one",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.generate",
            "vllm.v1.executor.multiproc_executor.MultiprocExecutor.collective_rpc",
            "a list of one reply with unique_reply_rank",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=">=0.11.2",
    probe=known_function(
        GENERATOR,
        "VllmHiddenStatesGenerator.generate",
        {
            GENERATE_030: Finding(
                Status.NEEDED,
                "the reply is indexed as a list of one",
                "what vLLM answers; settled at the first reply, by its shape",
            ),
            GENERATE_040: Finding(Status.NOT_NEEDED, "the reply is taken as it is"),
        },
        "captured_states_list[0]",
    ),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="vLLM answers with the value itself: indexing it takes the first layer for all layers.",
    upstream="https://github.com/vllm-project/speculators/pull/225 (takes the reply as it is)",
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
)
